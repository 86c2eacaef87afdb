// Causal attention for MLA heads, as a few matrix products per head and block of queries. Scores of one block exist at
// a time, never [T, T]; the backward pass computes them again from the stored log-sum-exp.
#include <limits.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/rowmath.h"
#include "kernels/cpu/scratch.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

enum { QUERY_BLOCK = 64 };

int attention_most_columns(void) { return INT_MAX; }

// One head of one sequence. Keys and values are also kept transposed, because packing a transpose anew for every block
// of queries would cost as much as the product.
struct head {
    struct view q;                         // [T, dq]
    struct view keys, keys_transposed;     // [T, dq], [dq, T]
    struct view values, values_transposed; // [T, dv], [dv, T]; the transpose for the backward pass only
    size_t q_row, kv_row, o_row;           // elements from one token to the next
};

// Scratch of one thread.
struct head_scratch {
    real *keys, *keys_transposed; // [T, dq], [dq, T]
    real *values_transposed;      // [dv, T], backward
    real *d_keys, *d_values;      // [T, dq], [T, dv], backward
    real *p, *ds;                 // [QUERY_BLOCK, T]; ds backward
};

static struct head_scratch head_scratch_alloc(struct attention_shape s, bool backward) {
    size_t T = (size_t)s.length, dq = (size_t)s.nope_dim + s.rope_dim, dv = (size_t)s.value_dim;
    struct head_scratch w = {.keys = scratch_alloc(sizeof(real) * T * dq),
                             .keys_transposed = scratch_alloc(sizeof(real) * T * dq),
                             .p = scratch_alloc(sizeof(real) * QUERY_BLOCK * T)};
    if (!backward) return w;
    w.values_transposed = scratch_alloc(sizeof(real) * T * dv);
    w.d_keys = scratch_alloc(sizeof(real) * T * dq);
    w.d_values = scratch_alloc(sizeof(real) * T * dv);
    w.ds = scratch_alloc(sizeof(real) * QUERY_BLOCK * T);
    return w;
}

static void head_scratch_free(struct head_scratch w) {
    scratch_free(w.keys);
    scratch_free(w.keys_transposed);
    scratch_free(w.values_transposed);
    scratch_free(w.d_keys);
    scratch_free(w.d_values);
    scratch_free(w.p);
    scratch_free(w.ds);
}

static struct view view_rows(const real *data, size_t row) { return (struct view){data, row, 1}; }
static struct view view_transposed(struct view v) { return (struct view){v.data, v.col, v.row}; }
static struct view view_from_row(struct view v, int i) { return (struct view){v.data + i * v.row, v.row, v.col}; }

// Keys of one head side by side: nope part from kv, rope part from kr.
static void gather_keys(real *keys, const real *kv, size_t kv_row, const real *kr, size_t kr_row,
                        struct attention_shape s) {
    size_t dq = (size_t)s.nope_dim + s.rope_dim;
    for (int t = 0; t < s.length; t++) {
        memcpy(keys + t * dq, kv + t * kv_row, sizeof(real) * (size_t)s.nope_dim);
        memcpy(keys + t * dq + s.nope_dim, kr + t * kr_row, sizeof(real) * (size_t)s.rope_dim);
    }
}

// out [cols, rows] = transpose of v [rows, cols]
static struct view transpose(real *out, struct view v, int rows, int cols) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) out[(size_t)j * rows + i] = v.data[i * v.row + j];
    return view_rows(out, (size_t)rows);
}

static struct head head_open(struct head_scratch w, const real *q, const real *kv, const real *kr, int kr_stride, int b,
                             int h, struct attention_shape s) {
    size_t dq = (size_t)s.nope_dim + s.rope_dim, dkv = (size_t)s.nope_dim + s.value_dim;
    struct head a = {.q_row = s.heads * dq, .kv_row = s.heads * dkv, .o_row = (size_t)s.heads * s.value_dim};
    size_t first = (size_t)b * s.length;
    const real *head_kv = kv + first * a.kv_row + h * dkv;
    gather_keys(w.keys, head_kv, a.kv_row, kr + first * (size_t)kr_stride, (size_t)kr_stride, s);
    a.q = view_rows(q + first * a.q_row + h * dq, a.q_row);
    a.keys = view_rows(w.keys, dq);
    a.keys_transposed = transpose(w.keys_transposed, a.keys, s.length, (int)dq);
    a.values = view_rows(head_kv + s.nope_dim, a.kv_row);
    if (w.values_transposed) a.values_transposed = transpose(w.values_transposed, a.values, s.length, s.value_dim);
    return a;
}

// c [M, N] (+)= a b, c's rows c_row apart
static void multiply(real *c, size_t c_row, bool add, struct view a, struct view b, int M, int N, int K) {
    struct gemm g = {M, N, K, a, b, c, c_row, add ? c : NULL, c_row};
    gemm_serial(&g);
}

// Row of scores -> probabilities of keys 0..last, zero behind them up to width; returns the log-sum-exp.
static accum softmax_row(real *row, int last, int width, accum scale) {
    accum largest = row_max(row, last + 1);
    for (int j = 0; j <= last; j++) row[j] = row_exp((row[j] - largest) * scale);
    accum sum = row_sum(row, last + 1), inverse = 1 / sum;
    for (int j = 0; j <= last; j++) row[j] *= inverse;
    for (int j = last + 1; j < width; j++) row[j] = 0;
    return largest * scale + accum_log(sum);
}

static void probabilities_again(real *row, int last, int width, accum scale, accum lse) {
    for (int j = 0; j <= last; j++) row[j] = row_exp(row[j] * scale - lse);
    for (int j = last + 1; j < width; j++) row[j] = 0;
}

void attention_forward(real *o, accum *lse, const real *q, const real *kv, const real *kr, int kr_stride,
                       struct attention_shape s) {
    OPERATION();
    size_t T = (size_t)s.length;
    int dq = s.nope_dim + s.rope_dim;
#pragma omp parallel
    {
        struct head_scratch w = head_scratch_alloc(s, false);
#pragma omp for collapse(2) schedule(dynamic)
        for (int b = 0; b < s.batch; b++)
            for (int h = 0; h < s.heads; h++) {
                struct head a = head_open(w, q, kv, kr, kr_stride, b, h, s);
                accum *head_lse = lse + ((size_t)b * s.heads + h) * T;
                real *head_o = o + b * T * a.o_row + (size_t)h * s.value_dim;
                for (int i0 = 0; i0 < s.length; i0 += QUERY_BLOCK) {
                    int i1 = i0 + QUERY_BLOCK < s.length ? i0 + QUERY_BLOCK : s.length, rows = i1 - i0;
                    multiply(w.p, T, false, view_from_row(a.q, i0), a.keys_transposed, rows, i1, dq);
                    for (int i = i0; i < i1; i++) head_lse[i] = softmax_row(w.p + (i - i0) * T, i, i1, (accum)s.scale);
                    multiply(head_o + i0 * a.o_row, a.o_row, false, view_rows(w.p, T), a.values, rows, s.value_dim, i1);
                }
            }
        head_scratch_free(w);
    }
}

// Gradients of one head: dq in place, d_keys and d_values in scratch.
static void head_backward(real *head_dq, struct head_scratch w, const struct head *a, const real *head_do,
                          const real *head_o, const accum *lse, struct attention_shape s) {
    size_t T = (size_t)s.length;
    int dq = s.nope_dim + s.rope_dim, dv = s.value_dim;
    memset(w.d_keys, 0, sizeof(real) * T * (size_t)dq);
    memset(w.d_values, 0, sizeof(real) * T * (size_t)dv);
    for (int i0 = 0; i0 < s.length; i0 += QUERY_BLOCK) {
        int i1 = i0 + QUERY_BLOCK < s.length ? i0 + QUERY_BLOCK : s.length, rows = i1 - i0;
        struct view q = view_from_row(a->q, i0), d_o = view_rows(head_do + i0 * a->o_row, a->o_row);
        struct view p = view_rows(w.p, T), ds = view_rows(w.ds, T);
        multiply(w.p, T, false, q, a->keys_transposed, rows, i1, dq);
        multiply(w.ds, T, false, d_o, a->values_transposed, rows, i1, dv);
        for (int i = i0; i < i1; i++) {
            real *pi = w.p + (i - i0) * T, *dsi = w.ds + (i - i0) * T;
            probabilities_again(pi, i, i1, (accum)s.scale, lse[i]);
            accum D = row_dot(head_do + i * a->o_row, head_o + i * a->o_row, dv);
            for (int j = 0; j <= i; j++) dsi[j] = (accum)s.scale * pi[j] * (dsi[j] - D);
            for (int j = i + 1; j < i1; j++) dsi[j] = 0;
        }
        multiply(w.d_values, (size_t)dv, true, view_transposed(p), d_o, i1, dv, rows);
        multiply(w.d_keys, (size_t)dq, true, view_transposed(ds), q, i1, dq, rows);
        multiply(head_dq + i0 * a->q_row, a->q_row, false, ds, a->keys, rows, dq, i1);
    }
}

void attention_backward(real *dq, real *dkv, real *dkr, int dkr_stride, const real *d_o, const real *q, const real *kv,
                        const real *kr, int kr_stride, const real *o, const accum *lse, struct attention_shape s) {
    OPERATION();
    size_t T = (size_t)s.length, width = (size_t)s.nope_dim + s.rope_dim, dr = (size_t)s.rope_dim;
    size_t dkv_width = (size_t)s.nope_dim + s.value_dim;
    real *dkr_of_head = scratch_alloc(sizeof(real) * s.batch * T * s.heads * dr); // [B, T, n, dr]
#pragma omp parallel
    {
        struct head_scratch w = head_scratch_alloc(s, true);
#pragma omp for collapse(2) schedule(dynamic)
        for (int b = 0; b < s.batch; b++)
            for (int h = 0; h < s.heads; h++) {
                struct head a = head_open(w, q, kv, kr, kr_stride, b, h, s);
                size_t out = b * T * a.o_row + (size_t)h * s.value_dim;
                head_backward(dq + b * T * a.q_row + h * width, w, &a, d_o + out, o + out,
                              lse + ((size_t)b * s.heads + h) * T, s);
                for (size_t t = 0; t < T; t++) {
                    real *row = dkv + (b * T + t) * a.kv_row + h * dkv_width;
                    memcpy(row, w.d_keys + t * width, sizeof(real) * (size_t)s.nope_dim);
                    memcpy(row + s.nope_dim, w.d_values + t * s.value_dim, sizeof(real) * (size_t)s.value_dim);
                    memcpy(dkr_of_head + ((b * T + t) * s.heads + h) * dr, w.d_keys + t * width + s.nope_dim,
                           sizeof(real) * dr);
                }
            }
        head_scratch_free(w);
    }
#pragma omp parallel for
    for (size_t i = 0; i < s.batch * T; i++)
        for (size_t j = 0; j < dr; j++) {
            accum sum = 0; // over heads, in order
            for (int h = 0; h < s.heads; h++) sum += dkr_of_head[(i * s.heads + h) * dr + j];
            dkr[i * (size_t)dkr_stride + j] = sum;
        }
    scratch_free(dkr_of_head);
}
