// Speed of every operation of kernels.h on the GPU, in the order of kernels.h, at three models' shapes, and that of
// those that move rows at a large one, where a launch no longer counts: bytes that must move (inputs read once, outputs
// written once) beside a copy of this run, or floating-point operations beside the matrix product that cuBLASLt does
// best. A row that is bound by memory and reaches less than 85 % of the copy ends in "<-".
#include <math.h>
#include <stdbool.h>

#include "kernels/clock.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/presets.h"
#include "tests/gpu_bench.h"

// A rank's part of a model.
struct shape {
    const char *name, *preset;
    int batch, length, vocab;
    int local_experts; // that get, balanced, as many rows as the rank has routes
    bool large;        // only for operations that move rows

    const struct config *c;
    int tokens, routes, head_rows;
    int32_t *ids;                   // host [tokens, K], different ones in a row, of all experts
    int *slot_of_row, *row_of_slot; // host, as moe_place makes them
    int *local_ends;                // host [local_experts + 1], offsets of the grouped products
};

static struct shape shapes[] = {
    {.name = "moonlight-mini",
     .preset = "moonlight-mini",
     .batch = 4,
     .length = 4096,
     .vocab = 163840,
     .local_experts = 64},
    {.name = "dsv3", .preset = "dsv3", .batch = 1, .length = 4096, .vocab = 129280, .local_experts = 32},
    {.name = "tiny", .preset = "tiny", .batch = 8, .length = 256, .vocab = 257, .local_experts = 16},
    {.name = "large",
     .preset = "moonlight-mini",
     .batch = 16,
     .length = 4096,
     .vocab = 163840,
     .local_experts = 64,
     .large = true},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static double copy_bytes_per_second, product_flops_per_second;

// ---- rows of the table ----

static void print_row(const char *operation, const struct shape *s, const char *sizes, struct sample t, double rate,
                      const char *unit, double ceiling, bool memory) {
    char percent[16] = "-", mhz[16] = "-";
    if (ceiling > 0) snprintf(percent, sizeof percent, "%.1f %%", 100 * rate / ceiling);
    if (t.mhz) snprintf(mhz, sizeof mhz, "%u MHz", t.mhz);
    printf("%-21s %-14s %-38s %10.1f us %9.1f %-7s %8s %8s%s\n", operation, s->name, sizes, 1e6 * t.seconds, rate, unit,
           percent, mhz, memory && rate < 0.85 * ceiling ? "  <-" : "");
    fflush(stdout);
}

static void print_bytes(const char *operation, const struct shape *s, const char *sizes, double bytes,
                        struct sample t) {
    print_row(operation, s, sizes, t, 1e-9 * bytes / t.seconds, "GB/s", 1e-9 * copy_bytes_per_second, true);
}

static void print_tensor(const char *operation, const struct shape *s, const char *sizes, double flops,
                         struct sample t) {
    print_row(operation, s, sizes, t, 1e-12 * flops / t.seconds, "TFLOP/s", 1e-12 * product_flops_per_second, false);
}

#define BENCH(s, CALL) BENCH_TIMES(s, BENCH_REPEATS, CALL)

static char sizes[64];
#define SIZES(...) snprintf(sizes, sizeof sizes, __VA_ARGS__)

static struct buffer buffer_of(const void *host, size_t bytes) {
    struct buffer b = buffer_take(bytes, BENCH_EMPTY);
    for (int i = 0; i < bench.copies; i++) device_copy_in(b.memory + (size_t)i * b.stride, host, bytes);
    return b;
}
static struct buffer buffer_ints(const int *host, size_t n) { return buffer_of(host, n * sizeof(int)); }
static struct buffer buffer_zeros(size_t bytes) { return buffer_take(bytes, BENCH_EMPTY); }

static int *host_ints(size_t n) {
    int *ints = calloc(n, sizeof *ints);
    if (!ints) fail_internal("bench", "no memory for %zu numbers", n);
    return ints;
}

static struct router_shape router_of(const struct config *c) {
    return (struct router_shape){c->experts, c->top_k, c->groups, c->top_groups, c->normalize_gates, c->route_scale};
}

// ---- inputs that must make sense ----

static void choose_experts(struct shape *s) {
    int E = s->c->experts, K = s->c->top_k;
    uint64_t state = 7;
    s->ids = (int32_t *)host_ints((size_t)s->routes);
    for (int t = 0; t < s->tokens; t++)
        for (int k = 0; k < K; k++) {
            bool again = true;
            int32_t *row = s->ids + (size_t)t * (size_t)K;
            while (again) {
                row[k] = (int32_t)random_below(&state, (uint64_t)E);
                again = false;
                for (int i = 0; i < k; i++) again |= row[i] == row[k];
            }
        }
}

static void place_routes(struct shape *s) {
    int E = s->c->experts;
    s->slot_of_row = host_ints((size_t)s->routes);
    s->row_of_slot = host_ints((size_t)s->routes);
    int *next = host_ints((size_t)E + 1); // row of each expert
    for (int i = 0; i < s->routes; i++) next[s->ids[i] + 1]++;
    for (int e = 0; e < E; e++) next[e + 1] += next[e];
    for (int i = 0; i < s->routes; i++) {
        s->row_of_slot[i] = next[s->ids[i]]++;
        s->slot_of_row[s->row_of_slot[i]] = i;
    }
    free(next);
}

static void shape_fill(struct shape *s) {
    s->c = &preset_find(s->preset)->model;
    s->tokens = s->batch * s->length;
    s->routes = s->tokens * s->c->top_k;
    s->head_rows = activations_logit_rows(s->vocab, (size_t)s->tokens);
    choose_experts(s);
    place_routes(s);
    s->local_ends = host_ints((size_t)s->local_experts + 1);
    for (int e = 0; e <= s->local_experts; e++) s->local_ends[e] = (int)((int64_t)s->routes * e / s->local_experts);
}

// ---- matrix products ----

static void bench_nt(const struct shape *s, int M, int N, int K) {
    struct sample t;
    size_t m = (size_t)M, n = (size_t)N, k = (size_t)K;
    bench_begin(2.0 * (double)(m * k + n * k + m * n));
    struct buffer x = buffer_reals(m * k), w = buffer_reals(n * k), y = buffer_reals(m * n);
    BENCH(t, matmul_nt(at(y), at(x), at(w), M, N, K, NULL));
    SIZES("M %d, N %d, K %d", M, N, K);
    print_tensor("matmul_nt", s, sizes, 2.0 * M * N * K, t);
}

static void bench_nn(const struct shape *s, int M, int N, int K, bool residual) {
    struct sample t;
    size_t m = (size_t)M, n = (size_t)N, k = (size_t)K;
    bench_begin(2.0 * (double)(m * k + n * k + 2 * m * n));
    struct buffer x = buffer_reals(m * k), w = buffer_reals(n * k), y = buffer_reals(m * n), add = buffer_reals(m * n);
    BENCH(t, matmul_nn(at(y), at(x), at(w), M, N, K, residual ? at(add) : NULL));
    SIZES("M %d, N %d, K %d%s", M, N, K, residual ? ", add" : "");
    print_tensor("matmul_nn", s, sizes, 2.0 * M * N * K, t);
}

static void bench_tn(const struct shape *s, int M, int N, int K, bool add) {
    struct sample t;
    size_t m = (size_t)M, n = (size_t)N, k = (size_t)K;
    bench_begin(2.0 * (double)(m * k + n * k + 2 * m * n));
    struct buffer a = buffer_reals(m * k), b = buffer_reals(n * k), dw = buffer_accums(m * n);
    BENCH(t, matmul_tn(at(dw), at(a), at(b), M, N, K, add));
    SIZES("M %d, N %d, K %d%s", M, N, K, add ? ", add" : "");
    print_tensor("matmul_tn", s, sizes, 2.0 * M * N * K, t);
}

static void bench_matmul_nt(const struct shape *s) {
    bench_nt(s, s->tokens, 2 * s->c->intermediate, s->c->hidden);
    bench_nt(s, s->head_rows, s->vocab, s->c->hidden);
}

static void bench_matmul_nn(const struct shape *s) {
    bench_nn(s, s->tokens, s->c->hidden, s->c->intermediate, true);
    bench_nn(s, s->head_rows, s->c->hidden, s->vocab, false);
}

static void bench_matmul_tn(const struct shape *s) {
    bench_tn(s, 2 * s->c->intermediate, s->c->hidden, s->tokens, false);
    bench_tn(s, s->vocab, s->c->hidden, s->head_rows, true);
}

// Bytes of the operands of a grouped product, of which one has rows x width, the other rows x other.
static double grouped_bytes(const struct shape *s, int width, int other, double weight_bytes) {
    return 2.0 * s->routes * (width + other) + weight_bytes * s->local_experts * width * other;
}

static void bench_grouped_nt(const struct shape *s) {
    struct sample t;
    int E = s->local_experts, N = 2 * s->c->expert_intermediate, K = s->c->hidden;
    size_t R = (size_t)s->routes, n = (size_t)N, k = (size_t)K;
    bench_begin(grouped_bytes(s, N, K, 2));
    struct buffer x = buffer_reals(R * k), w = buffer_reals((size_t)E * n * k), y = buffer_reals(R * n);
    BENCH(t, grouped_matmul_nt(at(y), at(x), at(w), s->local_ends, E, N, K));
    SIZES("rows %d, E %d, N %d, K %d", s->routes, E, N, K);
    print_tensor("grouped_matmul_nt", s, sizes, 2.0 * s->routes * N * K, t);
}

static void bench_grouped_nn(const struct shape *s) {
    struct sample t;
    int E = s->local_experts, N = s->c->hidden, K = s->c->expert_intermediate;
    size_t R = (size_t)s->routes, n = (size_t)N, k = (size_t)K;
    bench_begin(grouped_bytes(s, N, K, 2));
    struct buffer x = buffer_reals(R * k), w = buffer_reals((size_t)E * n * k), y = buffer_reals(R * n);
    BENCH(t, grouped_matmul_nn(at(y), at(x), at(w), s->local_ends, E, N, K));
    SIZES("rows %d, E %d, N %d, K %d", s->routes, E, N, K);
    print_tensor("grouped_matmul_nn", s, sizes, 2.0 * s->routes * N * K, t);
}

static void bench_grouped_tn(const struct shape *s) {
    struct sample t;
    int E = s->local_experts, M = 2 * s->c->expert_intermediate, N = s->c->hidden;
    size_t R = (size_t)s->routes, m = (size_t)M, n = (size_t)N;
    bench_begin(grouped_bytes(s, M, N, 4));
    struct buffer a = buffer_reals(R * m), b = buffer_reals(R * n), dw = buffer_accums((size_t)E * m * n);
    BENCH(t, grouped_matmul_tn(at(dw), at(a), at(b), s->local_ends, E, M, N, true));
    SIZES("rows %d, E %d, M %d, N %d", s->routes, E, M, N);
    print_tensor("grouped_matmul_tn", s, sizes, 2.0 * s->routes * M * N, t);
}

// ---- embedding, norm, rotary position ----

static int *random_tokens(const struct shape *s, int *different) {
    int *tokens = host_ints((size_t)s->tokens), *seen = host_ints((size_t)s->vocab);
    uint64_t state = 11;
    *different = 0;
    for (int i = 0; i < s->tokens; i++) {
        tokens[i] = (int)random_below(&state, (uint64_t)s->vocab);
        *different += seen[tokens[i]]++ == 0;
    }
    free(seen);
    return tokens;
}

static void bench_embedding_forward(const struct shape *s) {
    struct sample t;
    int N = s->tokens, H = s->c->hidden, different;
    int *tokens = random_tokens(s, &different);
    size_t n = (size_t)N * (size_t)H;
    double bytes = 2.0 * H * (N + different) + 4.0 * N;
    bench_begin(bytes);
    struct buffer x = buffer_reals(n), ids = buffer_ints(tokens, (size_t)N);
    struct buffer table = buffer_reals((size_t)s->vocab * (size_t)H);
    BENCH(t, embedding_forward(at(x), at(table), at(ids), N, H));
    SIZES("N %d, H %d, V %d", N, H, s->vocab);
    print_bytes("embedding_forward", s, sizes, bytes, t);
    free(tokens);
}

static void bench_embedding_backward(const struct shape *s) {
    struct sample t;
    int N = s->tokens, H = s->c->hidden, different;
    int *tokens = random_tokens(s, &different);
    size_t n = (size_t)N * (size_t)H;
    double bytes = 2.0 * N * H + 8.0 * different * H + 4.0 * N;
    bench_begin(bytes);
    struct buffer dx = buffer_reals(n), ids = buffer_ints(tokens, (size_t)N);
    struct buffer dtable = buffer_accums((size_t)s->vocab * (size_t)H);
    BENCH(t, embedding_backward(at(dtable), at(dx), at(ids), N, H));
    SIZES("N %d, H %d, V %d", N, H, s->vocab);
    print_bytes("embedding_backward", s, sizes, bytes, t);
    free(tokens);
}

static void bench_rmsnorm_forward(const struct shape *s) {
    struct sample t;
    int N = s->tokens, H = s->c->hidden;
    size_t n = (size_t)N * (size_t)H;
    double bytes = 4.0 * (double)n + 4.0 * N + 2.0 * H;
    bench_begin(bytes);
    struct buffer x = buffer_reals(n), y = buffer_reals(n), w = buffer_reals((size_t)H),
                  rstd = buffer_accums((size_t)N);
    BENCH(t, rmsnorm_forward(at(y), H, at(rstd), at(x), H, at(w), N, H, 1e-6));
    SIZES("N %d, C %d", N, H);
    print_bytes("rmsnorm_forward", s, sizes, bytes, t);
}

static void bench_rmsnorm_backward(const struct shape *s) {
    struct sample t;
    int N = s->tokens, H = s->c->hidden;
    size_t n = (size_t)N * (size_t)H;
    double bytes = 8.0 * (double)n + 4.0 * N + 10.0 * H;
    bench_begin(bytes);
    struct buffer dx = buffer_reals(n), dy = buffer_reals(n), x = buffer_reals(n), w = buffer_reals((size_t)H);
    struct buffer rstd = buffer_accums((size_t)N), dw = buffer_accums((size_t)H);
    BENCH(t, rmsnorm_backward(at(dx), H, true, at(dw), at(dy), H, at(x), H, at(w), at(rstd), N, H));
    SIZES("N %d, C %d, add", N, H);
    print_bytes("rmsnorm_backward", s, sizes, bytes, t);
}

static void bench_rope(const struct shape *s) {
    struct sample t;
    const struct config *c = s->c;
    int N = s->tokens, query = config_query_dim(c), row = c->heads * query, T = s->length;
    size_t angle_count = (size_t)T * (size_t)c->rope_dim;
    double bytes = 4.0 * N * c->heads * c->rope_dim + 4.0 * (double)angle_count;
    bench_begin(2.0 * N * row);
    struct buffer x = buffer_reals((size_t)N * (size_t)row), angles = buffer_accums(angle_count);
    BENCH(t, rope_rotate(at(x), row, c->heads, query, c->nope_dim, c->rope_dim, at(angles), N, T, false));
    SIZES("N %d, heads %d, %d of %d", N, c->heads, c->rope_dim, query);
    print_bytes("rope_rotate", s, sizes, bytes, t);
}

// ---- attention ----

struct attention_buffers {
    struct attention_shape shape;
    struct buffer q, kv, kr, o, lse;
    double pairs; // of queries and keys
};

static struct attention_buffers attention_take(const struct shape *s) {
    const struct config *c = s->c;
    size_t N = (size_t)s->tokens, n = (size_t)c->heads, dq = (size_t)config_query_dim(c), dv = (size_t)c->value_dim;
    size_t dkv = (size_t)c->nope_dim + dv;
    bench_begin(2.0 * (double)(N * n * (dq + dkv + dv)));
    return (struct attention_buffers){
        .shape = {s->batch, s->length, c->heads, c->nope_dim, c->rope_dim, c->value_dim, config_attention_scale(c)},
        .q = buffer_reals(N * n * dq),
        .kv = buffer_reals(N * n * dkv),
        .kr = buffer_reals(N * (size_t)c->rope_dim),
        .o = buffer_reals(N * n * dv),
        .lse = buffer_accums(N * n),
        .pairs = (double)N * (double)n * (s->length + 1) / 2,
    };
}

static void attention_sizes(const struct shape *s) {
    SIZES("B %d, T %d, heads %d, %d/%d", s->batch, s->length, s->c->heads, config_query_dim(s->c), s->c->value_dim);
}

static void attention_call(const struct shape *s, const struct attention_buffers *b) {
    attention_forward(at(b->o), at(b->lse), at(b->q), at(b->kv), at(b->kr), s->c->rope_dim, b->shape);
}

static void bench_attention_forward(const struct shape *s) {
    struct sample t;
    struct attention_buffers b = attention_take(s);
    BENCH(t, attention_call(s, &b));
    attention_sizes(s);
    print_tensor("attention_forward", s, sizes, 2 * b.pairs * (config_query_dim(s->c) + s->c->value_dim), t);
}

static void bench_attention_backward(const struct shape *s) {
    struct sample t;
    const struct config *c = s->c;
    struct attention_buffers b = attention_take(s);
    size_t N = (size_t)s->tokens, n = (size_t)c->heads;
    int dq = config_query_dim(c), dkv = c->nope_dim + c->value_dim, dr = c->rope_dim;
    struct buffer d_o = buffer_reals(N * n * (size_t)c->value_dim), d_q = buffer_reals(N * n * (size_t)dq);
    struct buffer d_kv = buffer_reals(N * n * (size_t)dkv), d_kr = buffer_reals(N * (size_t)dr);
    for (int i = 0; i < bench.copies; i++, bench.turn++) attention_call(s, &b);
    BENCH(t, attention_backward(at(d_q), at(d_kv), at(d_kr), dr, at(d_o), at(b.q), at(b.kv), at(b.kr), dr, at(b.o),
                                at(b.lse), b.shape));
    attention_sizes(s);
    print_tensor("attention_backward", s, sizes, 2 * b.pairs * (3 * dq + 2 * c->value_dim), t);
}

// ---- SwiGLU ----

static void bench_swiglu_forward(const struct shape *s) {
    struct sample t;
    int I = s->c->expert_intermediate, R = s->routes;
    size_t r = (size_t)R, n = r * (size_t)I;
    double bytes = 6.0 * (double)n + 8.0 * R;
    bench_begin(bytes);
    struct buffer hidden = buffer_reals(n), gate_up = buffer_reals(2 * n), gates = buffer_accums(r);
    struct buffer slots = buffer_ints(s->slot_of_row, r);
    BENCH(t, swiglu_forward(at(hidden), at(gate_up), at(gates), at(slots), R, I));
    SIZES("rows %d, I %d, gates", R, I);
    print_bytes("swiglu_forward", s, sizes, bytes, t);
}

static void bench_swiglu_backward(const struct shape *s) {
    struct sample t;
    int I = s->c->expert_intermediate, R = s->routes;
    size_t r = (size_t)R, n = r * (size_t)I;
    double bytes = 12.0 * (double)n + 12.0 * R;
    bench_begin(bytes);
    struct buffer d_gate_up = buffer_reals(2 * n), hidden = buffer_reals(n), d_gates = buffer_accums(r);
    struct buffer d_hidden = buffer_reals(n), gate_up = buffer_reals(2 * n), gates = buffer_accums(r);
    struct buffer slots = buffer_ints(s->slot_of_row, r);
    BENCH(t, swiglu_backward(at(d_gate_up), at(hidden), at(d_gates), at(d_hidden), at(gate_up), at(gates), at(slots), R,
                             I));
    SIZES("rows %d, I %d, gates", R, I);
    print_bytes("swiglu_backward", s, sizes, bytes, t);
}

// ---- router ----

static void router_sizes(const struct shape *s) {
    SIZES("N %d, E %d, K %d, H %d", s->tokens, s->c->experts, s->c->top_k, s->c->hidden);
}

static void bench_router_score(const struct shape *s) {
    struct sample t;
    int N = s->tokens, E = s->c->experts, H = s->c->hidden;
    size_t n = (size_t)N, e = (size_t)E, h = (size_t)H;
    double bytes = 2.0 * N * H + 2.0 * E * H + 4.0 * N * E;
    bench_begin(bytes);
    struct buffer scores = buffer_accums(n * e), x = buffer_reals(n * h), w = buffer_reals(e * h);
    BENCH(t, router_score(at(scores), at(x), at(w), N, E, H));
    router_sizes(s);
    print_bytes("router_score", s, sizes, bytes, t);
}

static void bench_router_select(const struct shape *s) {
    struct sample t;
    int N = s->tokens;
    size_t e = (size_t)s->c->experts, n = (size_t)N, routes = (size_t)s->routes;
    double bytes = 4.0 * (double)(n * e) + 8.0 * s->routes + 4.0 * (double)e;
    bench_begin(bytes);
    struct buffer ids = buffer_zeros(routes * 4), gates = buffer_accums(routes);
    struct buffer scores = buffer_accums(n * e), bias = buffer_zeros(e * sizeof(accum));
    BENCH(t, router_select(at(ids), at(gates), at(scores), at(bias), NULL, N, router_of(s->c)));
    router_sizes(s);
    print_bytes("router_select", s, sizes, bytes, t);
}

static void bench_router_gates(const struct shape *s) {
    struct sample t;
    size_t routes = (size_t)s->routes;
    double bytes = 12.0 * s->routes;
    bench_begin(bytes + 4.0 * s->tokens * s->c->experts);
    struct buffer ids = buffer_of(s->ids, routes * sizeof(int32_t)), gates = buffer_accums(routes);
    struct buffer scores = buffer_accums((size_t)s->tokens * (size_t)s->c->experts);
    BENCH(t, router_gates(at(ids), at(gates), at(scores), NULL, s->tokens, router_of(s->c)));
    router_sizes(s);
    print_bytes("router_gates", s, sizes, bytes, t);
}

static void bench_router_count(const struct shape *s) {
    struct sample t;
    int E = s->c->experts;
    size_t routes = (size_t)s->routes;
    double bytes = 4.0 * s->routes + 16.0 * E;
    bench_begin(bytes);
    struct buffer ids = buffer_of(s->ids, routes * sizeof(int32_t)), counts = buffer_zeros((size_t)E * sizeof(int64_t));
    BENCH(t, router_count(at(counts), at(ids), routes, E));
    SIZES("n %d, E %d", s->routes, E);
    print_bytes("router_count", s, sizes, bytes, t);
}

static void bench_router_balance(const struct shape *s) {
    struct sample t;
    size_t B = (size_t)s->batch, e = (size_t)s->c->experts, n = (size_t)s->tokens;
    double bytes = 4.0 * (double)(n * e + B * e + B);
    bench_begin(bytes);
    struct buffer f = buffer_accums(B * e), loss = buffer_accums(B), scores = buffer_accums(n * e);
    BENCH(t, router_balance(at(f), at(loss), at(scores), NULL, s->batch, s->length, router_of(s->c)));
    SIZES("B %d, T %d, E %d, K %d", s->batch, s->length, s->c->experts, s->c->top_k);
    print_bytes("router_balance", s, sizes, bytes, t);
}

static void bench_router_backward(const struct shape *s) {
    struct sample t;
    int H = s->c->hidden;
    size_t n = (size_t)s->tokens, e = (size_t)s->c->experts, h = (size_t)H, routes = (size_t)s->routes;
    double bytes = 6.0 * (double)(n * h) + 10.0 * (double)(e * h) + 8.0 * (double)(n * e) + 8.0 * (double)routes;
    bench_begin(bytes);
    struct buffer dx = buffer_reals(n * h), dw = buffer_accums(e * h), dz = buffer_accums(n * e);
    struct buffer d_gates = buffer_accums(routes), scores = buffer_accums(n * e);
    struct buffer ids = buffer_of(s->ids, routes * sizeof(int32_t)), f = buffer_accums((size_t)s->batch * e);
    struct buffer x = buffer_reals(n * h), w = buffer_reals(e * h);
    BENCH(t, router_backward(at(dx), at(dw), at(dz), at(d_gates), at(scores), at(ids), at(f), 1e-6, at(x), at(w),
                             s->batch, s->length, H, router_of(s->c)));
    router_sizes(s);
    print_bytes("router_backward", s, sizes, bytes, t);
}

static void bench_router_update_bias(const struct shape *s) {
    struct sample t;
    int E = s->c->experts;
    bench_begin(16.0 * E);
    struct buffer bias = buffer_zeros((size_t)E * sizeof(accum)), counts = buffer_zeros((size_t)E * sizeof(int64_t));
    BENCH(t, router_update_bias(at(bias), at(counts), E, 1e-3));
    SIZES("E %d", E);
    print_bytes("router_update_bias", s, sizes, 16.0 * E, t);
}

// ---- dispatch and combine ----

static void moe_sizes(const struct shape *s) { SIZES("N %d, K %d, H %d", s->tokens, s->c->top_k, s->c->hidden); }

static void bench_moe_place(const struct shape *s) {
    struct sample t;
    int E = s->c->experts;
    size_t routes = (size_t)s->routes;
    double bytes = 12.0 * s->routes + 4.0 * E;
    bench_begin(bytes);
    struct buffer offsets = buffer_zeros(((size_t)E + 1) * sizeof(int)), ids = buffer_of(s->ids, routes * 4);
    struct buffer slots = buffer_zeros(routes * sizeof(int)), rows = buffer_zeros(routes * sizeof(int));
    BENCH(t, moe_place(at(offsets), at(slots), at(rows), at(ids), NULL, s->tokens, s->c->top_k, E));
    SIZES("N %d, E %d, K %d", s->tokens, E, s->c->top_k);
    print_bytes("moe_place", s, sizes, bytes, t);
}

// Eight sources that send every local expert as many rows.
static void bench_moe_regroup(const struct shape *s) {
    enum { SOURCES = 8 };
    struct sample t;
    int E = s->local_experts, stride = E + 1, each = s->routes / (SOURCES * E), rows = each * SOURCES * E;
    int *ends = host_ints((size_t)SOURCES * (size_t)stride);
    for (int i = 0; i < SOURCES; i++)
        for (int e = 0; e <= E; e++) ends[i * stride + e] = e * each;
    double bytes = 8.0 * rows + 4.0 * SOURCES * stride;
    bench_begin(bytes);
    struct buffer offsets = buffer_ints(ends, (size_t)SOURCES * (size_t)stride);
    struct buffer arrival = buffer_zeros((size_t)rows * sizeof(int)), row = buffer_zeros((size_t)rows * sizeof(int));
    BENCH(t, moe_regroup(at(arrival), at(row), at(offsets), SOURCES, stride, E, 0, rows));
    SIZES("rows %d, S %d, E %d", rows, SOURCES, E);
    print_bytes("moe_regroup", s, sizes, bytes, t);
    free(ends);
}

static void bench_moe_gather_gates(const struct shape *s) {
    struct sample t;
    size_t routes = (size_t)s->routes;
    bench_begin(12.0 * s->routes);
    struct buffer out = buffer_accums(routes), gates = buffer_accums(routes),
                  index = buffer_ints(s->slot_of_row, routes);
    BENCH(t, moe_gather_gates(at(out), at(gates), at(index), s->routes));
    SIZES("n %d", s->routes);
    print_bytes("moe_gather_gates", s, sizes, 12.0 * s->routes, t);
}

static void bench_moe_scatter(const struct shape *s) {
    struct sample t;
    int K = s->c->top_k, H = s->c->hidden;
    size_t n = (size_t)s->tokens, h = (size_t)H, routes = (size_t)s->routes;
    double bytes = 2.0 * (double)((n + routes) * h) + 4.0 * s->routes;
    bench_begin(bytes);
    struct buffer rows = buffer_reals(routes * h), x = buffer_reals(n * h);
    struct buffer row_of_slot = buffer_ints(s->row_of_slot, routes);
    BENCH(t, moe_scatter(at(rows), at(x), at(row_of_slot), s->tokens, K, H));
    moe_sizes(s);
    print_bytes("moe_scatter", s, sizes, bytes, t);
}

static void bench_moe_gather(const struct shape *s) {
    struct sample t;
    int H = s->c->hidden;
    size_t h = (size_t)H, routes = (size_t)s->routes;
    double bytes = 4.0 * (double)(routes * h) + 4.0 * s->routes;
    bench_begin(bytes);
    struct buffer rows = buffer_reals(routes * h), x = buffer_reals(routes * h);
    struct buffer index = buffer_ints(s->slot_of_row, routes);
    BENCH(t, moe_gather(at(rows), at(x), at(index), s->routes, H));
    SIZES("R %d, H %d", s->routes, H);
    print_bytes("moe_gather", s, sizes, bytes, t);
}

static void bench_moe_combine(const struct shape *s) {
    struct sample t;
    int K = s->c->top_k, H = s->c->hidden;
    size_t n = (size_t)s->tokens, h = (size_t)H, routes = (size_t)s->routes;
    double bytes = 2.0 * (double)((routes + 3 * n) * h) + 4.0 * s->routes;
    bench_begin(bytes);
    struct buffer y = buffer_reals(n * h), rows = buffer_reals(routes * h), shared = buffer_reals(n * h);
    struct buffer residual = buffer_reals(n * h), row_of_slot = buffer_ints(s->row_of_slot, routes);
    BENCH(t, moe_combine(at(y), at(rows), at(row_of_slot), at(shared), at(residual), s->tokens, K, H));
    moe_sizes(s);
    print_bytes("moe_combine", s, sizes, bytes, t);
}

static void bench_moe_sum_slots(const struct shape *s) {
    struct sample t;
    int K = s->c->top_k, H = s->c->hidden;
    size_t n = (size_t)s->tokens, h = (size_t)H, routes = (size_t)s->routes;
    double bytes = 2.0 * (double)((routes + 3 * n) * h) + 4.0 * s->routes;
    bench_begin(bytes);
    struct buffer y = buffer_reals(n * h), slots = buffer_reals(routes * h), shared = buffer_reals(n * h);
    struct buffer residual = buffer_reals(n * h), ids = buffer_of(s->ids, routes * sizeof(int32_t));
    BENCH(t, moe_sum_slots(at(y), at(slots), at(ids), at(shared), at(residual), s->tokens, K, H));
    moe_sizes(s);
    print_bytes("moe_sum_slots", s, sizes, bytes, t);
}

// ---- loss, sums, optimizer ----

static void bench_cross_entropy(const struct shape *s) {
    struct sample t;
    int rows = s->head_rows, V = s->vocab, different;
    int *tokens = random_tokens(s, &different);
    size_t r = (size_t)rows;
    double bytes = 4.0 * rows * V + 8.0 * rows;
    bench_begin(bytes / 2); // in place
    struct buffer logits = buffer_reals(r * (size_t)V), loss = buffer_accums(r), targets = buffer_ints(tokens, r);
    BENCH(t, cross_entropy(at(logits), at(loss), at(targets), rows, V, true, 1e-3));
    SIZES("rows %d, V %d, gradient", rows, V);
    print_bytes("cross_entropy", s, sizes, bytes, t);
    free(tokens);
}

static size_t sum_length(const struct shape *s) { return 8 * (size_t)s->tokens * (size_t)s->c->hidden; }

static void bench_device_add_sum(const struct shape *s) {
    struct sample t;
    size_t n = sum_length(s);
    bench_begin(4.0 * (double)n);
    double *sum = device_alloc(sizeof *sum);
    struct buffer values = buffer_accums(n);
    BENCH(t, device_add_sum(sum, at(values), n));
    SIZES("n %zu", n);
    device_free(sum);
    print_bytes("device_add_sum", s, sizes, 4.0 * (double)n, t);
}

static void bench_device_sum_squares(const struct shape *s) {
    struct sample t;
    size_t n = sum_length(s);
    bench_begin(4.0 * (double)n);
    struct buffer values = buffer_accums(n);
    BENCH(t, device_sum_squares(at(values), n));
    SIZES("n %zu, to the host", n);
    print_bytes("device_sum_squares", s, sizes, 4.0 * (double)n, t);
}

static void bench_adamw_update(const struct shape *s) {
    struct sample t;
    size_t n = (size_t)s->tokens * (size_t)s->c->hidden;
    double bytes = 30.0 * (double)n; // master and moments both ways, gradient, weight
    bench_begin(bytes);
    struct buffer master = buffer_accums(n), m = buffer_accums(n), v = buffer_zeros(n * sizeof(accum));
    struct buffer weight = buffer_reals(n), gradient = buffer_accums(n);
    struct adamw a = {1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 10};
    BENCH(t, adamw_update(at(master), at(m), at(v), at(weight), at(gradient), n, a));
    SIZES("n %zu", n);
    print_bytes("adamw_update", s, sizes, bytes, t);
}

// ---- all of them ----

static const struct {
    void (*measure)(const struct shape *);
    bool large; // at the large shape, too
} operations[] = {
    {bench_matmul_nt, false},
    {bench_matmul_nn, false},
    {bench_matmul_tn, false},
    {bench_grouped_nt, false},
    {bench_grouped_nn, false},
    {bench_grouped_tn, false},
    {bench_embedding_forward, true},
    {bench_embedding_backward, true},
    {bench_rmsnorm_forward, true},
    {bench_rmsnorm_backward, true},
    {bench_rope, true},
    {bench_attention_forward, false},
    {bench_attention_backward, false},
    {bench_swiglu_forward, true},
    {bench_swiglu_backward, true},
    {bench_router_score, false},
    {bench_router_select, false},
    {bench_router_gates, false},
    {bench_router_count, false},
    {bench_router_balance, false},
    {bench_router_backward, false},
    {bench_router_update_bias, false},
    {bench_moe_place, false},
    {bench_moe_regroup, false},
    {bench_moe_gather_gates, false},
    {bench_moe_scatter, true},
    {bench_moe_gather, true},
    {bench_moe_combine, true},
    {bench_moe_sum_slots, true},
    {bench_cross_entropy, false},
    {bench_device_add_sum, false},
    {bench_device_sum_squares, false},
    {bench_adamw_update, true},
};

// A copy reads and writes.
static void measure_ceilings(void) {
    enum { SIDE = 8192 };
    struct sample copy, product;
    size_t bytes = (size_t)1 << 30, n = (size_t)SIDE * SIDE;
    bench_begin(2.0 * (double)bytes);
    struct buffer to = buffer_take(bytes, BENCH_REALS), from = buffer_take(bytes, BENCH_REALS);
    BENCH(copy, cuda_check(cudaMemcpyAsync(at(to), at(from), bytes, cudaMemcpyDeviceToDevice, cuda_stream())));
    bench_begin(6.0 * (double)n);
    struct buffer y = buffer_reals(n), x = buffer_reals(n), w = buffer_reals(n);
    BENCH(product, matmul_nt(at(y), at(x), at(w), SIDE, SIDE, SIDE, NULL));
    copy_bytes_per_second = 2.0 * (double)bytes / copy.seconds;
    product_flops_per_second = 2.0 * (double)n * SIDE / product.seconds;
    printf("%s, products %s\nceilings: copy of 1 GiB %.1f GB/s at %u MHz, product of %d^3 %.1f TFLOP/s at %u MHz\n",
           device_name(), device_tuning(), 1e-9 * copy_bytes_per_second, copy.mhz, SIDE,
           1e-12 * product_flops_per_second, product.mhz);
}

int main(int argc, char **argv) {
    (void)argc;
    device_start(argv);
    device_open(0, 1);
    double start = clock_seconds();
    bench_open();
    measure_ceilings();
    for (int i = 0; i < SHAPES; i++) shape_fill(&shapes[i]);
    for (size_t op = 0; op < sizeof operations / sizeof *operations; op++)
        for (int i = 0; i < SHAPES; i++)
            if (operations[op].large || !shapes[i].large) operations[op].measure(&shapes[i]);
    printf("median of %d calls each, %.0f s in all\n", BENCH_REPEATS, clock_seconds() - start);
    return 0;
}
