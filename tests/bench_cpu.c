// Speed of the CPU operations: median of repeated calls on random data, with every size in the row. Matrix products and
// attention are shown as GFLOP/s and as a share of the cores' measured FP32 peak; the others as GB/s of their operands.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/clock.h"
#include "kernels/kernels.h"
#include "model/presets.h"

enum { REPEATS = 15 };

static real *random_reals(size_t n) {
    static uint32_t state = 1;
    real *x = device_alloc(n * sizeof(real));
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (real)(state >> 8) * 0x1p-23f - 1;
    }
    return x;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Median seconds of one call; CALL is an expression.
#define TIME(seconds, CALL)                                                                                            \
    do {                                                                                                               \
        double times_[REPEATS];                                                                                        \
        CALL;                                                                                                          \
        for (int r_ = 0; r_ < REPEATS; r_++) {                                                                         \
            double start_ = clock_seconds();                                                                           \
            CALL;                                                                                                      \
            times_[r_] = clock_seconds() - start_;                                                                     \
        }                                                                                                              \
        qsort(times_, REPEATS, sizeof *times_, compare_doubles);                                                       \
        seconds = times_[REPEATS / 2];                                                                                 \
    } while (0)

static void print_flops(const char *preset, const char *what, const char *shape, double flops, double seconds) {
    double gflops = flops / seconds / 1e9, share = gflops * 1e9 / device_peak_flops();
    printf("%-6s %-22s %-34s %9.3f ms %8.1f GFLOP/s %5.1f %% of peak\n", preset, what, shape, 1e3 * seconds, gflops,
           100 * share);
}

static void print_bytes(const char *preset, const char *what, const char *shape, double bytes, double seconds) {
    printf("%-6s %-22s %-34s %9.3f ms %8.1f GB/s\n", preset, what, shape, 1e3 * seconds, bytes / seconds / 1e9);
}

// The three products of one linear layer y = x w^T with w [out, in].
static void bench_linear(const char *preset, const char *what, int rows, int out, int in) {
    real *x = random_reals((size_t)rows * in), *w = random_reals((size_t)out * in);
    real *y = random_reals((size_t)rows * out);
    double seconds, flops = 2.0 * rows * out * in;
    char shape[64], name[64];
    snprintf(shape, sizeof shape, "rows %d, out %d, in %d", rows, out, in);
    TIME(seconds, matmul_nt(y, x, w, rows, out, in, NULL));
    snprintf(name, sizeof name, "%s y", what);
    print_flops(preset, name, shape, flops, seconds);
    TIME(seconds, matmul_nn(x, y, w, rows, in, out, NULL));
    snprintf(name, sizeof name, "%s dx", what);
    print_flops(preset, name, shape, flops, seconds);
    TIME(seconds, matmul_tn(w, y, x, out, in, rows, true));
    snprintf(name, sizeof name, "%s dw", what);
    print_flops(preset, name, shape, flops, seconds);
    device_free(x);
    device_free(w);
    device_free(y);
}

static void bench_experts(const char *preset, const struct config *c, int tokens) {
    int E = c->experts, H = c->hidden, I = c->expert_intermediate, rows = tokens * c->top_k;
    real *x = random_reals((size_t)rows * H), *w = random_reals((size_t)E * 2 * I * H);
    real *y = random_reals((size_t)rows * 2 * I);
    int *offsets = malloc(sizeof(int) * ((size_t)E + 1));
    for (int e = 0; e <= E; e++) offsets[e] = (int)((long)rows * e / E);
    double seconds, flops = 2.0 * rows * 2 * I * H;
    char shape[64];
    snprintf(shape, sizeof shape, "rows %d, E %d, H %d, I %d", rows, E, H, I);
    TIME(seconds, grouped_matmul_nt(y, x, w, offsets, E, 2 * I, H));
    print_flops(preset, "experts gate/up", shape, flops, seconds);
    TIME(seconds, grouped_matmul_nn(x, y, w, offsets, E, H, 2 * I));
    print_flops(preset, "experts gate/up dx", shape, flops, seconds);
    TIME(seconds, grouped_matmul_tn(w, y, x, offsets, E, 2 * I, H, true));
    print_flops(preset, "experts gate/up dw", shape, flops, seconds);
    real *hidden = random_reals((size_t)rows * I), *d_hidden = random_reals((size_t)rows * I);
    TIME(seconds, grouped_matmul_nn(x, hidden, w, offsets, E, H, I));
    print_flops(preset, "experts down", shape, flops / 2, seconds);
    TIME(seconds, grouped_matmul_nt(d_hidden, x, w, offsets, E, I, H));
    print_flops(preset, "experts down dx", shape, flops / 2, seconds);
    TIME(seconds, grouped_matmul_tn(w, hidden, x, offsets, E, I, H, true));
    print_flops(preset, "experts down dw", shape, flops / 2, seconds);
    TIME(seconds, swiglu_forward(hidden, y, NULL, NULL, rows, I));
    print_bytes(preset, "swiglu", shape, 3.0 * rows * I * sizeof(real), seconds);
    real *d_y = random_reals((size_t)rows * 2 * I);
    TIME(seconds, swiglu_backward(d_y, hidden, NULL, d_hidden, y, NULL, NULL, rows, I));
    print_bytes(preset, "swiglu backward", shape, 6.0 * rows * I * sizeof(real), seconds);
    void *all[] = {x, w, y, hidden, d_hidden, d_y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
    free(offsets);
}

// Router, dispatch and combine.
static void bench_routing(const char *preset, const struct config *c, int tokens) {
    int E = c->experts, H = c->hidden, K = c->top_k, B = 8, T = tokens / B;
    size_t N = (size_t)tokens, routes = N * (size_t)K;
    struct router_shape s = {E, K, c->groups, c->top_groups, c->normalize_gates, c->route_scale};
    real *x = random_reals(N * (size_t)H), *w = random_reals((size_t)E * H), *y = random_reals(N * (size_t)H);
    real *rows = random_reals(routes * (size_t)H);
    accum *scores = device_alloc(sizeof(accum) * N * E), *gates = device_alloc(sizeof(accum) * routes);
    accum *bias = device_alloc(sizeof(accum) * (size_t)E), *f = device_alloc(sizeof(accum) * (size_t)B * E);
    accum *loss = device_alloc(sizeof(accum) * (size_t)B), *dz = device_alloc(sizeof(accum) * N * E);
    int32_t *ids = device_alloc(sizeof(int32_t) * routes);
    int *offsets = device_alloc(sizeof(int) * ((size_t)E + 1));
    int *slot_of_row = device_alloc(sizeof(int) * routes), *row_of_slot = device_alloc(sizeof(int) * routes);
    double seconds, flops = 2.0 * tokens * E * H, bytes = (double)(routes * (size_t)H * sizeof(real));
    char shape[64];
    snprintf(shape, sizeof shape, "rows %d, E %d, K %d, H %d", tokens, E, K, H);
    TIME(seconds, router_score(scores, x, w, tokens, E, H));
    print_flops(preset, "router score", shape, flops, seconds);
    TIME(seconds, router_select(ids, gates, scores, bias, NULL, tokens, s));
    print_bytes(preset, "router select", shape, (double)(N * E * sizeof(accum)), seconds);
    TIME(seconds, router_balance(f, loss, scores, NULL, B, T, s));
    print_bytes(preset, "router balance", shape, (double)(N * E * sizeof(accum)), seconds);
    TIME(seconds, router_backward(y, w, dz, gates, scores, ids, f, 1e-6, x, w, B, T, H, s));
    print_flops(preset, "router backward", shape, 2 * flops, seconds);
    TIME(seconds, moe_place(offsets, slot_of_row, row_of_slot, ids, NULL, tokens, K, E));
    print_bytes(preset, "moe place", shape, 3.0 * (double)routes * sizeof(int), seconds);
    TIME(seconds, moe_scatter(rows, x, row_of_slot, tokens, K, H));
    print_bytes(preset, "moe scatter", shape, bytes + bytes / K, seconds);
    TIME(seconds, moe_combine(y, rows, row_of_slot, x, x, tokens, K, H));
    print_bytes(preset, "moe combine", shape, bytes + 3 * bytes / K, seconds);
    void *all[] = {x, w, y, rows, scores, gates, bias, f, loss, dz, ids, offsets, slot_of_row, row_of_slot};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
}

static void bench_attention(const char *preset, const struct config *c, int batch, int seq) {
    struct attention_shape s = {
        batch, seq, c->heads, c->nope_dim, c->rope_dim, c->value_dim, config_attention_scale(c)};
    size_t N = (size_t)batch * seq, n = (size_t)c->heads, dq = (size_t)config_query_dim(c), dv = (size_t)c->value_dim;
    size_t dkv = (size_t)c->nope_dim + dv;
    real *q = random_reals(N * n * dq), *kv = random_reals(N * n * dkv), *kr = random_reals(N * (size_t)c->rope_dim);
    real *o = random_reals(N * n * dv), *d_o = random_reals(N * n * dv);
    real *d_q = random_reals(N * n * dq), *d_kv = random_reals(N * n * dkv);
    real *d_kr = random_reals(N * (size_t)c->rope_dim);
    accum *lse = device_alloc(N * n * sizeof(accum));
    double seconds, pairs = (double)N * (double)n * (seq + 1) / 2;
    char shape[64];
    snprintf(shape, sizeof shape, "B %d, T %d, heads %d, %zu/%zu", batch, seq, c->heads, dq, dv);
    TIME(seconds, attention_forward(o, lse, q, kv, kr, c->rope_dim, s));
    print_flops(preset, "attention", shape, 2 * pairs * (double)(dq + dv), seconds);
    TIME(seconds, attention_backward(d_q, d_kv, d_kr, c->rope_dim, d_o, q, kv, kr, c->rope_dim, o, lse, s));
    print_flops(preset, "attention backward", shape, 2 * pairs * (double)(3 * dq + 2 * dv), seconds);
    real *all[] = {q, kv, kr, o, d_o, d_q, d_kv, d_kr, lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
}

static void bench_rows(const char *preset, const struct config *c, int tokens) {
    int H = c->hidden;
    size_t n = (size_t)tokens * H;
    real *x = random_reals(n), *y = random_reals(n), *w = random_reals((size_t)H), *m = random_reals(n);
    real *v = random_reals(n), *gradient = random_reals(n);
    accum *rstd = device_alloc(sizeof(accum) * (size_t)tokens);
    for (size_t i = 0; i < n; i++) v[i] = v[i] * v[i];
    double seconds;
    char shape[64];
    snprintf(shape, sizeof shape, "rows %d, H %d", tokens, H);
    TIME(seconds, rmsnorm_forward(y, H, rstd, x, H, w, tokens, H, 1e-6));
    print_bytes(preset, "rmsnorm", shape, 2.0 * (double)n * sizeof(real), seconds);
    accum *dw = device_alloc(sizeof(accum) * (size_t)H);
    TIME(seconds, rmsnorm_backward(y, H, true, dw, gradient, H, x, H, w, rstd, tokens, H));
    print_bytes(preset, "rmsnorm backward", shape, 4.0 * (double)n * sizeof(real), seconds);
    int V = 257, n_heads = c->heads, width = config_query_dim(c);
    real *logits = random_reals((size_t)tokens * V), *q = random_reals((size_t)tokens * n_heads * width);
    accum *losses = device_alloc(sizeof(accum) * (size_t)tokens), *angles = device_alloc(sizeof(accum) * 256 * 256);
    int32_t *targets = device_alloc(sizeof(int32_t) * (size_t)tokens);
    for (int i = 0; i < tokens; i++) targets[i] = i % V;
    real *table = random_reals((size_t)V * H);
    TIME(seconds, embedding_forward(y, table, targets, tokens, H));
    print_bytes(preset, "embedding", shape, 2.0 * (double)n * sizeof(real), seconds);
    snprintf(shape, sizeof shape, "rows %d, V %d", tokens, V);
    TIME(seconds, cross_entropy(logits, losses, targets, tokens, V, true, 1));
    print_bytes(preset, "cross-entropy", shape, 2.0 * tokens * V * sizeof(real), seconds);
    snprintf(shape, sizeof shape, "rows %d, heads %d, rope %d", tokens, n_heads, c->rope_dim);
    TIME(seconds,
         rope_rotate(q, n_heads * width, n_heads, width, c->nope_dim, c->rope_dim, angles, tokens, 256, false));
    print_bytes(preset, "rope", shape, 2.0 * tokens * n_heads * c->rope_dim * sizeof(real), seconds);
    struct adamw a = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 10};
    snprintf(shape, sizeof shape, "%zu elements", n);
    TIME(seconds, adamw_update(x, m, v, y, gradient, n, a));
    print_bytes(preset, "adamw", shape, 8.0 * (double)n * sizeof(real), seconds);
    void *all[] = {x, y, w, m, v, gradient, rstd, dw, logits, q, losses, angles, targets, table};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
}

int main(int argc, char **argv) {
    (void)argc;
    device_start(argv);
    static const char *const names[] = {"tiny", "small"};
    printf("%s, peak %.1f GFLOP/s (multiply-adds in registers)\n", device_name(), device_peak_flops() / 1e9);
    for (size_t p = 0; p < sizeof names / sizeof *names; p++) {
        const struct preset *preset = preset_find(names[p]);
        const struct config *c = &preset->model;
        int tokens = 2048, n = c->heads, H = c->hidden;
        bench_linear(preset->name, "query", tokens, n * config_query_dim(c), c->q_rank ? c->q_rank : H);
        bench_linear(preset->name, "kv a", tokens, c->kv_rank + c->rope_dim, H);
        bench_linear(preset->name, "kv b", tokens, n * (c->nope_dim + c->value_dim), c->kv_rank);
        bench_linear(preset->name, "attention out", tokens, H, n * c->value_dim);
        bench_linear(preset->name, "dense gate/up", tokens, 2 * c->intermediate, H);
        bench_linear(preset->name, "head", tokens, 257, H);
        bench_experts(preset->name, c, tokens);
        bench_routing(preset->name, c, tokens);
        bench_attention(preset->name, c, 8, 256);
        bench_rows(preset->name, c, tokens);
    }
    return 0;
}
