// What the tests of the operations share: watched memory, comparisons, gradients by central differences, and the
// forward operations written naively in FP64 from the comments of kernels/kernels.h.
//
// No gradient is written down here: a backward pass is compared with central differences of <dy, f(x)>, where f is the
// FP64 forward function of this file.
#ifndef MOK_TESTS_REFERENCE_H
#define MOK_TESTS_REFERENCE_H

#include "tests/test.h"

#include <omp.h>

#include "kernels/kernels.h"

_Static_assert(sizeof(int) == sizeof(int32_t), "the tests pass token and expert ids as int");

// ---- watched memory ----

// Every block lies between two guards of NaN bytes: reading beyond an end poisons the result, and writing there is
// found by watch_release. Blocks live until then, so a test frees nothing itself.
enum { WATCH_GUARD = 256 };

struct watch_block {
    struct watch_block *next;
    unsigned char *memory; // guard, bytes, guard
    size_t bytes;
    bool on_device;
};

static struct watch_block *watch_blocks;

static inline void *watch_alloc(size_t bytes, int fill, bool on_device) {
    struct watch_block *block = malloc(sizeof *block);
    unsigned char *image = malloc(bytes + 2 * WATCH_GUARD);
    if (block == NULL || image == NULL) abort();
    memset(image, 0xff, bytes + 2 * WATCH_GUARD);
    memset(image + WATCH_GUARD, fill, bytes);
    *block = (struct watch_block){watch_blocks, image, bytes, on_device};
    watch_blocks = block;
    if (on_device) {
        block->memory = device_alloc(bytes + 2 * WATCH_GUARD);
        device_copy_in(block->memory, image, bytes + 2 * WATCH_GUARD);
        free(image);
    }
    return block->memory + WATCH_GUARD;
}

// Frees every block; returns how many had a guard written over.
static inline int watch_free_all(void) {
    int overwritten = 0;
    while (watch_blocks != NULL) {
        struct watch_block *block = watch_blocks;
        watch_blocks = block->next;
        unsigned char guards[2 * WATCH_GUARD], untouched[2 * WATCH_GUARD];
        memset(untouched, 0xff, sizeof untouched);
        unsigned char *after = block->memory + WATCH_GUARD + block->bytes;
        if (block->on_device) {
            device_copy_out(guards, block->memory, WATCH_GUARD);
            device_copy_out(guards + WATCH_GUARD, after, WATCH_GUARD);
            device_free(block->memory);
        } else {
            memcpy(guards, block->memory, WATCH_GUARD);
            memcpy(guards + WATCH_GUARD, after, WATCH_GUARD);
            free(block->memory);
        }
        overwritten += memcmp(guards, untouched, sizeof guards) != 0;
        free(block);
    }
    return overwritten;
}

// For the end of each case in a test of many cases.
static inline void watch_release(void) {
    if (watch_free_all() > 0) fail_msg("memory outside an array was written");
}

static inline int watch_teardown(void **state) {
    (void)state;
    int overwritten = watch_free_all();
    if (overwritten > 0) print_error("memory outside %d arrays was written\n", overwritten);
    omp_set_num_threads(omp_get_num_procs());
    return overwritten;
}

// A test whose memory is watched.
#define watched_test(f) cmocka_unit_test_teardown(f, watch_teardown)

static inline double *host_doubles(size_t n) { return watch_alloc(n * sizeof(double), 0, false); }
static inline int *host_ints(size_t n) { return watch_alloc(n * sizeof(int), 0, false); }

// Outputs start poisoned, so that an element nobody wrote is seen: NaN, or an integer that is no index.
static inline real *poisoned_real(size_t n) { return watch_alloc(n * sizeof(real), 0xff, true); }
static inline accum *poisoned_accum(size_t n) { return watch_alloc(n * sizeof(accum), 0xff, true); }
static inline int *poisoned_int(size_t n) { return watch_alloc(n * sizeof(int), 0x7f, true); }

static inline real *put_real(const double *values, size_t n) {
    real *host = watch_alloc(n * sizeof(real), 0, false), *device = poisoned_real(n);
    for (size_t i = 0; i < n; i++) host[i] = (real)values[i];
    device_copy_in(device, host, n * sizeof(real));
    return device;
}

static inline accum *put_accum(const double *values, size_t n) {
    accum *host = watch_alloc(n * sizeof(accum), 0, false), *device = poisoned_accum(n);
    for (size_t i = 0; i < n; i++) host[i] = (accum)values[i];
    device_copy_in(device, host, n * sizeof(accum));
    return device;
}

static inline int *put_int(const int *values, size_t n) {
    int *device = poisoned_int(n);
    device_copy_in(device, values, n * sizeof(int));
    return device;
}

// A host copy of device memory.
static inline void *get_bytes(const void *device, size_t bytes) {
    void *host = watch_alloc(bytes, 0, false);
    device_copy_out(host, device, bytes);
    return host;
}

static inline int *get_int(const int *device, size_t n) { return get_bytes(device, n * sizeof(int)); }

static inline double *get_real(const real *device, size_t n) {
    const real *host = get_bytes(device, n * sizeof(real));
    double *values = host_doubles(n);
    for (size_t i = 0; i < n; i++) values[i] = (double)host[i];
    return values;
}

static inline double *get_accum(const accum *device, size_t n) {
    const accum *host = get_bytes(device, n * sizeof(accum));
    double *values = host_doubles(n);
    for (size_t i = 0; i < n; i++) values[i] = (double)host[i];
    return values;
}

// ---- random inputs ----

// Normal numbers that a float holds exactly, so that operation and reference see the same input.
static inline double *normals(size_t n, double deviation, uint64_t *seed) {
    double *values = host_doubles(n);
    for (size_t i = 0; i < n; i++) values[i] = (float)(deviation * test_normal(seed));
    return values;
}

static inline int random_below(int limit, uint64_t *seed) { return (int)(test_uniform(seed) * limit); }

// ---- comparisons ----

// The relative error of `count` roundings of a real, in units of half a last place.
static inline double roundings(double count) { return count * (sizeof(real) == 4 ? 0x1p-24 : 0x1p-53); }
// The same for a comparison with central differences, whose own error in FP64 (step^2 and rounding over the step, each
// about 1e-10 of the gradient, with room for cancellation) only shows in the double build.
static inline double gradient_roundings(double count) { return roundings(count) + 1e-8; }

static inline void assert_close(const char *name, const double *found, const double *wanted, size_t n,
                                double tolerance) {
    test_assert_close(name, found, wanted, n, tolerance);
}

static inline void assert_real(const char *name, const real *found, const double *wanted, size_t n, double tolerance) {
    assert_close(name, get_real(found, n), wanted, n, tolerance);
}

static inline void assert_accum(const char *name, const accum *found, const double *wanted, size_t n,
                                double tolerance) {
    assert_close(name, get_accum(found, n), wanted, n, tolerance);
}

static inline void assert_finite(const char *name, const double *values, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!isfinite(values[i])) fail_msg("%s[%zu] is %g, wanted a finite number", name, i, values[i]);
}

// Both in device memory.
static inline void assert_same_bits(const char *name, const void *found, const void *wanted, size_t bytes) {
    const unsigned char *a = get_bytes(found, bytes), *b = get_bytes(wanted, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i]) fail_msg("%s: bits differ from byte %zu of %zu on", name, i, bytes);
}

// Keeps the first result in *first and compares all later ones with it, bit by bit.
static inline void assert_same_as_first(const char *name, void **first, const void *found, size_t bytes) {
    if (*first == NULL) {
        *first = watch_alloc(bytes, 0, true);
        device_copy_in(*first, get_bytes(found, bytes), bytes);
    }
    assert_same_bits(name, found, *first, bytes);
}

// Bytes that nothing may have written since watch_alloc filled them with 0xff.
static inline void assert_poison(const char *name, const void *device, size_t bytes) {
    const unsigned char *host = get_bytes(device, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (host[i] != 0xff) fail_msg("%s: byte %zu of a part that must stay as it is was written", name, i);
}

// ---- gradients by central differences ----

// Gradient of f with respect to x[0], x[every], x[2 every], ... of n. f reads x through its context.
static inline double *central_difference(double *x, size_t n, size_t every, double (*f)(const void *context),
                                         const void *context) {
    const double step = 1e-5;
    double *gradient = host_doubles((n + every - 1) / every);
    for (size_t i = 0; i < n; i += every) {
        double kept = x[i];
        x[i] = kept + step;
        double above = f(context), width = x[i];
        x[i] = kept - step;
        double below = f(context);
        width -= x[i];
        x[i] = kept;
        gradient[i / every] = (above - below) / width;
    }
    return gradient;
}

// values[0], values[every], ... : what belongs to central_difference with the same `every`.
static inline double *sample(const double *values, size_t n, size_t every) {
    double *some = host_doubles((n + every - 1) / every);
    for (size_t i = 0; i < n; i += every) some[i / every] = values[i];
    return some;
}

static inline double dot(const double *a, const double *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// a + b
static inline double *added(const double *a, const double *b, size_t n) {
    double *sum = host_doubles(n);
    for (size_t i = 0; i < n; i++) sum[i] = a[i] + b[i];
    return sum;
}

// ---- the operations in FP64 ----

static inline double reference_sigmoid(double z) { return 1 / (1 + exp(-z)); }

// y[i, j] = add[i, j] + sum_k x(i, k) w(j, k), where x(i, k) = x[i * x_row + k * x_k] and w alike: one function for the
// three products. size [M, N] receives the norm of each element's terms, the scale of its rounding errors.
struct reference_strides {
    size_t x_row, x_k, w_row, w_k;
};
static inline void reference_product(double *y, double *size, const double *x, const double *w, int M, int N, int K,
                                     struct reference_strides s, const double *add) {
    for (size_t i = 0; i < (size_t)M; i++)
        for (size_t j = 0; j < (size_t)N; j++) {
            double sum = add != NULL ? add[i * N + j] : 0, squares = sum * sum;
            for (size_t k = 0; k < (size_t)K; k++) {
                double term = x[i * s.x_row + k * s.x_k] * w[j * s.w_row + k * s.w_k];
                sum += term;
                squares += term * term;
            }
            y[i * N + j] = sum;
            size[i * N + j] = sqrt(squares);
        }
}

static inline void reference_rmsnorm(double *y, double *rstd, const double *x, int x_stride, const double *w, int N,
                                     int C, double eps) {
    for (size_t i = 0; i < (size_t)N; i++) {
        const double *row = x + i * x_stride;
        rstd[i] = 1 / sqrt(dot(row, row, C) / C + eps);
        for (int c = 0; c < C; c++) y[i * C + c] = w[c] * row[c] * rstd[i];
    }
}

static inline void reference_attention(double *o, double *lse, const double *q, const double *kv, const double *kr,
                                       int kr_stride, struct attention_shape s) {
    int n = s.heads, T = s.length, dn = s.nope_dim, dr = s.rope_dim, dv = s.value_dim;
    double *score = malloc((size_t)T * sizeof(double));
    for (int b = 0; b < s.batch; b++)
        for (int h = 0; h < n; h++)
            for (int i = 0; i < T; i++) {
                const double *qi = q + ((size_t)(b * T + i) * n + h) * (dn + dr);
                double largest = -INFINITY, sum = 0;
                for (int j = 0; j <= i; j++) {
                    const double *kn = kv + ((size_t)(b * T + j) * n + h) * (dn + dv);
                    score[j] = s.scale * (dot(qi, kn, dn) + dot(qi + dn, kr + (size_t)(b * T + j) * kr_stride, dr));
                    largest = fmax(largest, score[j]);
                }
                for (int j = 0; j <= i; j++) sum += exp(score[j] - largest);
                lse[((size_t)b * n + h) * T + i] = largest + log(sum);
                double *oi = o + ((size_t)(b * T + i) * n + h) * dv;
                for (int c = 0; c < dv; c++) oi[c] = 0;
                for (int j = 0; j <= i; j++) {
                    const double *v = kv + ((size_t)(b * T + j) * n + h) * (dn + dv) + dn;
                    double p = exp(score[j] - largest) / sum;
                    for (int c = 0; c < dv; c++) oi[c] += p * v[c];
                }
            }
    free(score);
}

// gates and slot_of_row as in swiglu_forward.
static inline void reference_swiglu(double *hidden, const double *gate_up, const double *gates, const int *slot_of_row,
                                    int rows, int I) {
    for (size_t r = 0; r < (size_t)rows; r++)
        for (int i = 0; i < I; i++) {
            double g = gate_up[r * 2 * I + i], u = gate_up[r * 2 * I + I + i];
            double weight = gates == NULL ? 1 : slot_of_row[r] < 0 ? 0 : gates[slot_of_row[r]];
            hidden[r * I + i] = weight * g * reference_sigmoid(g) * u;
        }
}

// ids [K] of one token: the largest of score + bias first. Experts are compared one pair at a time: the rank of an
// expert is how many others come before it.
static inline bool reference_before(const double *value, int i, int j) {
    return value[i] > value[j] || (value[i] == value[j] && i < j);
}
static inline int reference_rank(const double *value, int n, int i) {
    int rank = 0;
    for (int j = 0; j < n; j++) rank += reference_before(value, j, i);
    return rank;
}
static inline void reference_select(int *ids, const double *scores, const double *bias, struct router_shape s) {
    int size = s.experts / s.groups;
    double *biased = host_doubles(s.experts), *group = host_doubles(s.groups);
    for (int e = 0; e < s.experts; e++) biased[e] = scores[e] + bias[e];
    for (int g = 0; g < s.groups; g++)
        for (int e = 0; e < size; e++)
            if (reference_rank(biased + g * size, size, e) < 2) group[g] += biased[g * size + e];
    for (int e = 0; s.groups > 1 && e < s.experts; e++)
        if (reference_rank(group, s.groups, e / size) >= s.top_groups) biased[e] = -INFINITY;
    for (int e = 0; e < s.experts; e++) {
        int rank = reference_rank(biased, s.experts, e);
        if (rank < s.top_k) ids[rank] = e;
    }
}
// gates [K] of one token
static inline void reference_gates(double *gates, const int *ids, const double *scores, struct router_shape s) {
    double sum = 1e-20;
    for (int k = 0; k < s.top_k; k++) sum += scores[ids[k]];
    for (int k = 0; k < s.top_k; k++) gates[k] = s.scale * scores[ids[k]] / (s.normalize ? sum : 1);
}

// f [E] and the loss of one sequence; scores [T, E]
static inline double reference_balance(double *f, const double *scores, int T, struct router_shape s) {
    int E = s.experts;
    double *P = host_doubles(E), loss = 0;
    for (int e = 0; e < E; e++) f[e] = 0;
    for (int t = 0; t < T; t++) {
        const double *row = scores + (size_t)t * E;
        double sum = 0;
        for (int e = 0; e < E; e++) sum += row[e];
        for (int e = 0; e < E; e++) {
            if (reference_rank(row, E, e) < s.top_k) f[e] += (double)E / ((double)s.top_k * T);
            P[e] += row[e] / sum / T;
        }
    }
    for (int e = 0; e < E; e++) loss += f[e] * P[e];
    return loss;
}

// Loss of one row; a target of -1 gives 0.
static inline double reference_cross_entropy(const double *logits, int target, int V) {
    if (target < 0) return 0;
    double largest = -INFINITY, sum = 0;
    for (int v = 0; v < V; v++) largest = fmax(largest, logits[v]);
    for (int v = 0; v < V; v++) sum += exp(logits[v] - largest);
    return largest + log(sum) - logits[target];
}

// One element, one step.
static inline void reference_adamw(double *w, double *m, double *v, double grad, struct adamw a) {
    double g = grad * a.grad_scale;
    *m = a.beta1 * *m + (1 - a.beta1) * g;
    *v = a.beta2 * *v + (1 - a.beta2) * g * g;
    double m_hat = *m / (1 - pow(a.beta1, (double)a.step)), v_hat = *v / (1 - pow(a.beta2, (double)a.step));
    *w -= a.lr * (m_hat / (sqrt(v_hat) + a.eps) + a.weight_decay * *w);
}

#endif
