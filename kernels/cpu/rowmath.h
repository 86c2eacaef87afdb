// Sums and exponentials along one row, written so that compilers vectorise them and every machine gets one order.
#ifndef MOK_KERNELS_CPU_ROWMATH_H
#define MOK_KERNELS_CPU_ROWMATH_H

#include <math.h>
#include <string.h>

#include "kernels/types.h"

#ifdef MOK_DOUBLE
#define accum_sqrt sqrt
#define accum_log  log
#else
#define accum_sqrt sqrtf
#define accum_log  logf
#endif

// A row's sum runs in ROW_LANES interleaved chains (element i in chain i mod ROW_LANES), added up in order at the end.
enum { ROW_LANES = 16 };

static inline accum row_lanes_total(const accum *lanes) {
    accum total = 0;
    for (int l = 0; l < ROW_LANES; l++) total += lanes[l];
    return total;
}

// sum of a[i] b[i]
static inline accum row_dot(const real *a, const real *b, int n) {
    accum lanes[ROW_LANES] = {0};
    int i = 0;
    for (; i + ROW_LANES <= n; i += ROW_LANES)
        for (int l = 0; l < ROW_LANES; l++) lanes[l] += a[i + l] * b[i + l];
    for (int l = 0; i + l < n; l++) lanes[l] += a[i + l] * b[i + l];
    return row_lanes_total(lanes);
}

// sum of a[i] b[i] c[i]
static inline accum row_dot3(const real *a, const real *b, const real *c, int n) {
    accum lanes[ROW_LANES] = {0};
    int i = 0;
    for (; i + ROW_LANES <= n; i += ROW_LANES)
        for (int l = 0; l < ROW_LANES; l++) lanes[l] += a[i + l] * b[i + l] * c[i + l];
    for (int l = 0; i + l < n; l++) lanes[l] += a[i + l] * b[i + l] * c[i + l];
    return row_lanes_total(lanes);
}

static inline accum row_sum(const accum *a, int n) {
    accum lanes[ROW_LANES] = {0};
    int i = 0;
    for (; i + ROW_LANES <= n; i += ROW_LANES)
        for (int l = 0; l < ROW_LANES; l++) lanes[l] += a[i + l];
    for (int l = 0; i + l < n; l++) lanes[l] += a[i + l];
    return row_lanes_total(lanes);
}

static inline real row_max(const real *a, int n) {
    real lanes[ROW_LANES];
    for (int l = 0; l < ROW_LANES; l++) lanes[l] = a[0];
    int i = 0;
    for (; i + ROW_LANES <= n; i += ROW_LANES)
        for (int l = 0; l < ROW_LANES; l++) lanes[l] = a[i + l] > lanes[l] ? a[i + l] : lanes[l];
    for (; i < n; i++) lanes[0] = a[i] > lanes[0] ? a[i] : lanes[0];
    for (int l = 1; l < ROW_LANES; l++) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    return lanes[0];
}

// e^x within two units in the last place, without branches or library calls. 0 below the range, clamped above it
// (no infinity); NaN stays NaN.
static inline real row_exp(real x) {
#ifdef MOK_DOUBLE
    return exp(x);
#else
    // x = n ln 2 + r with |r| <= ln(2)/2; the Taylor polynomial of degree 7 is exact to 6e-9 there.
    const float round = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    float clamped = x > 88.3f ? 88.3f : (x < -87.0f ? -87.0f : x);
    float n = (clamped * 1.44269504f + round) - round;
    float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f; // ln 2 in two pieces, the first exact in n
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = ((int32_t)(n == n ? n : 0) + 127) * (1 << 23); // a NaN is no integer; p has it already
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
#endif
}

static inline real row_sigmoid(real x) { return 1 / (1 + row_exp(-x)); }

#endif
