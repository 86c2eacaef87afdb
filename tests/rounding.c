// Stands in for a GPU in tests of the tests: every operation of the CPU build, linked with --wrap, rounds its `real`
// results to BF16 as the GPU's does. The sums inside are the CPU's, and what attention rounds inside stays as it is.
//
// MOK_MISTAKE=NAME in the environment makes one mistake, which the comparison must find: a term is left out (router,
// balance, residual, shared, rotation, gate, norm), a factor is wrong (target), or the program ends (end).
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "tests/record.h"

static bool mistake(const char *name) {
    const char *asked = getenv("MOK_MISTAKE");
    return asked && strcmp(asked, name) == 0;
}

static void round_rows(real *x, size_t rows, size_t columns, size_t stride) {
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++) x[r * stride + c] = (real)round_to_bf16((float)x[r * stride + c]);
}
static void round_all(real *x, int rows, size_t columns) { round_rows(x, (size_t)rows, columns, columns); }

// Operations that call others must not have those rounded.
static int depth;

// Declares the operation behind __wrap_NAME and begins its wrapper.
#define WRAP(name, ...)                                                                                                \
    void __real_##name(__VA_ARGS__);                                                                                   \
    void __wrap_##name(__VA_ARGS__);                                                                                   \
    void __wrap_##name(__VA_ARGS__)
#define REAL(name, ...) (depth++, __real_##name(__VA_ARGS__), depth--)

WRAP(device_real_from_float, real *device, const float *host, size_t n) {
    REAL(device_real_from_float, device, host, n);
    round_rows(device, 1, n, n);
}

WRAP(matmul_nt, real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    REAL(matmul_nt, y, x, w, M, N, K, mistake("residual") && add != y ? NULL : add);
    if (depth == 0) round_all(y, M, (size_t)N);
}
WRAP(matmul_nn, real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    REAL(matmul_nn, y, x, w, M, N, K, add);
    if (depth == 0) round_all(y, M, (size_t)N);
}

static void round_group(real *y, const int *offsets, int E, int N) {
    round_all(y + (size_t)offsets[0] * (size_t)N, offsets[E] - offsets[0], (size_t)N);
}
WRAP(grouped_matmul_nt, real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    REAL(grouped_matmul_nt, y, x, w, offsets, E, N, K);
    round_group(y, offsets, E, N);
}
WRAP(grouped_matmul_nn, real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    REAL(grouped_matmul_nn, y, x, w, offsets, E, N, K);
    round_group(y, offsets, E, N);
}

WRAP(rmsnorm_forward, real *y, int y_stride, accum *rstd, const real *x, int x_stride, const real *w, int N, int C,
     double eps) {
    REAL(rmsnorm_forward, y, y_stride, rstd, x, x_stride, w, N, C, eps);
    round_rows(y, (size_t)N, (size_t)C, (size_t)y_stride);
}
WRAP(rmsnorm_backward, real *dx, int dx_stride, bool add, accum *dw, const real *dy, int dy_stride, const real *x,
     int x_stride, const real *w, const accum *rstd, int N, int C) {
    REAL(rmsnorm_backward, dx, dx_stride, add && !mistake("norm"), dw, dy, dy_stride, x, x_stride, w, rstd, N, C);
    round_rows(dx, (size_t)N, (size_t)C, (size_t)dx_stride);
}

WRAP(rope_rotate, real *x, int row_stride, int heads, int head_stride, int first, int rope_dim, const accum *angles,
     int N, int T, bool inverse) {
    if (inverse && mistake("rotation")) return;
    REAL(rope_rotate, x, row_stride, heads, head_stride, first, rope_dim, angles, N, T, inverse);
    for (int h = 0; h < heads; h++)
        round_rows(x + (size_t)h * (size_t)head_stride + first, (size_t)N, (size_t)rope_dim, (size_t)row_stride);
}

WRAP(attention_forward, real *o, accum *lse, const real *q, const real *kv, const real *kr, int kr_stride,
     struct attention_shape s) {
    REAL(attention_forward, o, lse, q, kv, kr, kr_stride, s);
    round_all(o, s.batch * s.length, (size_t)(s.heads * s.value_dim));
}
WRAP(attention_backward, real *dq, real *dkv, real *dkr, int dkr_stride, const real *d_o, const real *q, const real *kv,
     const real *kr, int kr_stride, const real *o, const accum *lse, struct attention_shape s) {
    REAL(attention_backward, dq, dkv, dkr, dkr_stride, d_o, q, kv, kr, kr_stride, o, lse, s);
    int N = s.batch * s.length;
    round_all(dq, N, (size_t)(s.heads * (s.nope_dim + s.rope_dim)));
    round_all(dkv, N, (size_t)(s.heads * (s.nope_dim + s.value_dim)));
    round_rows(dkr, (size_t)N, (size_t)s.rope_dim, (size_t)dkr_stride);
}

WRAP(swiglu_forward, real *hidden, const real *gate_up, const accum *gates, const int *slot_of_row, int rows, int I) {
    REAL(swiglu_forward, hidden, gate_up, mistake("gate") ? NULL : gates, slot_of_row, rows, I);
    round_all(hidden, rows, (size_t)I);
}
WRAP(swiglu_backward, real *d_gate_up, real *hidden, accum *d_gates, const real *d_hidden, const real *gate_up,
     const accum *gates, const int *slot_of_row, int rows, int I) {
    REAL(swiglu_backward, d_gate_up, hidden, d_gates, d_hidden, gate_up, gates, slot_of_row, rows, I);
    round_all(d_gate_up, rows, 2 * (size_t)I);
    round_all(hidden, rows, (size_t)I);
}

WRAP(router_score, accum *scores, const real *x, const real *w, int N, int E, int H) {
    REAL(router_score, scores, x, w, N, E, H);
}
WRAP(router_backward, real *dx, accum *dw, accum *dz, const accum *d_gates, const accum *scores, const int32_t *ids,
     const accum *f, double balance_scale, const real *x, const real *w, int B, int T, int H,
     struct router_shape shape) {
    if (mistake("router")) return;
    REAL(router_backward, dx, dw, dz, d_gates, scores, ids, f, mistake("balance") ? 0 : balance_scale, x, w, B, T, H,
         shape);
    round_all(dx, B * T, (size_t)H);
}

WRAP(moe_combine, real *y, const real *rows, const int *row_of_slot, const real *shared, const real *residual, int N,
     int K, int H) {
    REAL(moe_combine, y, rows, row_of_slot, mistake("shared") ? NULL : shared, residual, N, K, H);
    round_all(y, N, (size_t)H);
}
WRAP(moe_sum_slots, real *y, const real *slots, const int32_t *ids, const real *shared, const real *residual, int N,
     int K, int H) {
    REAL(moe_sum_slots, y, slots, ids, mistake("shared") ? NULL : shared, residual, N, K, H);
    round_all(y, N, (size_t)H);
}

WRAP(cross_entropy, real *logits, accum *loss, const int32_t *targets, int rows, int V, bool want_gradient,
     double scale) {
    if (mistake("end")) fail_internal("cross_entropy", "found the mistake that was asked for");
    REAL(cross_entropy, logits, loss, targets, rows, V, want_gradient, mistake("target") ? 1.05 * scale : scale);
    if (want_gradient) round_all(logits, rows, (size_t)V);
}

WRAP(adamw_update, accum *master, accum *m, accum *v, real *weight, const accum *grad, size_t n, struct adamw a) {
    REAL(adamw_update, master, m, v, weight, grad, n, a);
    round_rows(weight, 1, n, n);
}
