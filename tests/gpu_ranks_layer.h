// The MoE layer of a rank beside that of one process: a global batch of both blocks of a model, the ways to compute it, and
// what must have the same bits. Device memory is only copied to and from, so that all of it works on a GPU.
#ifndef MOK_TESTS_GPU_RANKS_LAYER_H
#define MOK_TESTS_GPU_RANKS_LAYER_H

#include "tests/gpu_ranks.h"

#include "kernels/random.h"
#include "model/moe.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"

enum { MOST_RANKS = 8, BLOCKS = 2, MOST_WAYS = 12 };

// ---- a layer, and a global batch for it ----

// tokens: the most that a rank may have.
struct shape {
    int E, K, H, I, shared, tokens;
};

static inline struct config config_of(struct shape s) {
    return (struct config){.vocab = 16,
                           .hidden = s.H,
                           .layers = BLOCKS,
                           .heads = 1,
                           .kv_rank = 16,
                           .nope_dim = 16,
                           .rope_dim = 8,
                           .value_dim = 16,
                           .intermediate = s.I,
                           .expert_intermediate = s.I,
                           .experts = s.E,
                           .shared_experts = s.shared,
                           .top_k = s.K,
                           .groups = 1,
                           .top_groups = 1,
                           .route_scale = 1,
                           .max_positions = s.tokens * MOST_RANKS,
                           .rms_eps = 1e-6,
                           .rope_theta = 10000};
}

// Numbers of which every row and matrix is a stretch that begins at one of STARTS places: as random as a test needs, and
// made once.
enum { STARTS = 1 << 18 };
struct pool {
    real *values; // host, as the device has them: [STARTS + longest]
};

static inline void pool_open(struct pool *p, size_t longest, double deviation, uint64_t seed) {
    size_t n = STARTS + longest;
    float *values = take_host(sizeof *values * n);
    real *device = device_alloc(sizeof *device * n);
    for (size_t i = 0; i < n; i++) { // nearly normal: the sum of four uniform numbers
        uint64_t bits = random_next(&seed), sum = 0;
        for (int k = 0; k < 4; k++) sum += bits >> 16 * k & 0xffff;
        values[i] = (float)(deviation * ((double)sum / 65536 - 2) * 1.7320508075688772);
    }
    device_real_from_float(device, values, n);
    p->values = read_device(device, sizeof *device * n);
    device_free(device);
    free(values);
}

// The stretch of a name.
static inline const real *pool_at(const struct pool *p, uint64_t name) { return p->values + random_mix(name) % STARTS; }

// Inputs of both blocks, host memory.
struct batch_of_all {
    struct shape s;
    const char *name; // of its routes
    int tokens;
    real *x, *residual, *dy; // [BLOCKS, tokens, H]
    accum *gates;            // [BLOCKS, tokens, K]
    int32_t *ids;            // [BLOCKS, tokens, K]
};

enum { INPUT_X = 1, INPUT_RESIDUAL, INPUT_DY, INPUT_GATES, WEIGHT_W13, WEIGHT_W2, WEIGHT_SHARED_W13, WEIGHT_SHARED_W2 };
static inline uint64_t name_of(int what, int block, int number) {
    return (uint64_t)what << 48 | (uint64_t)block << 40 | (uint64_t)number;
}

static inline real *pooled_rows(const struct pool *inputs, int what, int tokens, int H) {
    real *rows = take_host(sizeof *rows * BLOCKS * (size_t)tokens * (size_t)H);
    for (int b = 0; b < BLOCKS; b++)
        for (int t = 0; t < tokens; t++)
            memcpy(rows + ((size_t)b * (size_t)tokens + (size_t)t) * (size_t)H, pool_at(inputs, name_of(what, b, t)),
                   sizeof *rows * (size_t)H);
    return rows;
}

static inline void batch_open(struct batch_of_all *p, const struct pool *inputs, struct shape s, int tokens) {
    size_t routes = BLOCKS * (size_t)tokens * (size_t)s.K;
    uint64_t seed = name_of(INPUT_GATES, 0, 0);
    *p = (struct batch_of_all){.s = s, .tokens = tokens};
    p->x = pooled_rows(inputs, INPUT_X, tokens, s.H);
    p->residual = pooled_rows(inputs, INPUT_RESIDUAL, tokens, s.H);
    p->dy = pooled_rows(inputs, INPUT_DY, tokens, s.H);
    p->gates = take_host(sizeof *p->gates * routes);
    p->ids = take_host(sizeof *p->ids * routes);
    for (size_t i = 0; i < routes; i++) p->gates[i] = (accum)(float)(0.1 + random_uniform(random_next(&seed)));
}

static inline void batch_close(struct batch_of_all *p) {
    void *all[] = {p->x, p->residual, p->dy, p->gates, p->ids};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// K different experts for every token, those from first on.
static inline void route_at_random(struct batch_of_all *p, uint64_t seed, int first) {
    int K = p->s.K;
    for (int t = 0; t < BLOCKS * p->tokens; t++)
        for (int k = 0; k < K; k++) {
            int32_t *ids = p->ids + (size_t)t * (size_t)K;
            int i;
            do {
                ids[k] = first + (int32_t)random_below(&seed, (uint64_t)(p->s.E - first));
                for (i = 0; ids[i] != ids[k]; i++) {}
            } while (i < k);
        }
}

// ---- a layer of one rank, or of one process alone ----

struct arm {
    struct model m;
    const char *name;
    bool poisons;            // what passes may not read
    real *y, *dx, *residual; // device [capacity, H]
    size_t capacity;
};

static inline void put_matrix(real *device, const struct pool *weights, int what, int block, int number, size_t n) {
    device_copy_in(device, pool_at(weights, name_of(what, block, number)), sizeof *device * n);
}

static inline void put_weights(struct model *m, const struct pool *weights) {
    const struct config *c = &m->config;
    size_t one = (size_t)c->expert_intermediate * (size_t)c->hidden;
    size_t shared = (size_t)config_shared_intermediate(c) * (size_t)c->hidden;
    struct expert_range here = parallel_experts(m->parallel, c->experts);
    for (int b = 0; b < BLOCKS; b++) {
        const struct block_offsets *w = &m->params.blocks[b];
        for (int e = here.first; e < here.end; e++) {
            size_t i = (size_t)(e - here.first) * one;
            put_matrix(m->weights + w->expert_w13 + 2 * i, weights, WEIGHT_W13, b, e, 2 * one);
            put_matrix(m->weights + w->expert_w2 + i, weights, WEIGHT_W2, b, e, one);
        }
        if (shared == 0) continue;
        put_matrix(m->weights + w->shared_w13, weights, WEIGHT_SHARED_W13, b, 0, 2 * shared);
        put_matrix(m->weights + w->shared_w2, weights, WEIGHT_SHARED_W2, b, 0, shared);
    }
}

// parallel NULL: alone, with room for the tokens of `ranks` ranks.
static inline void arm_open(struct arm *a, struct shape s, const struct pool *weights, const struct parallel *parallel,
                            int ranks, const struct moe_settings *way, const char *name) {
    struct config c = config_of(s);
    *a = (struct arm){.name = name, .capacity = (size_t)s.tokens * (size_t)(parallel ? 1 : ranks)};
    size_t bytes = sizeof(real) * a->capacity * (size_t)s.H;
    model_open(&a->m, &c, 1, (int)a->capacity, true, parallel, way);
    a->y = device_alloc(bytes);
    a->dx = device_alloc(bytes);
    a->residual = device_alloc(bytes);
    put_weights(&a->m, weights);
}

static inline void arm_close(struct arm *a) {
    device_free(a->y);
    device_free(a->dx);
    device_free(a->residual);
    model_close(&a->m);
}

// ---- poison ----

// NaN, and as an integer -1.
static inline void poison(void *device, size_t bytes) {
    static unsigned char bad[1 << 20];
    if (!device) return;
    if (!*bad) memset(bad, 0xff, sizeof bad);
    for (size_t at = 0; at < bytes; at += sizeof bad)
        device_copy_in((char *)device + at, bad, bytes - at < sizeof bad ? bytes - at : sizeof bad);
}

static inline void poison_plan(const struct mok_plan *p, const struct mok_shape *s) {
    size_t experts = (size_t)mok_most_experts(s), blocks = mok_capacity_blocks(s), rows = mok_capacity_rows(s);
    poison(p->rows, sizeof *p->rows * rows);
    poison(p->expert_block, sizeof(int) * (experts + 1));
    poison(p->expert_rows, sizeof(int) * experts);
    poison(p->block_expert, sizeof(int) * blocks);
    poison(p->walk, sizeof(int) * blocks);
    poison(p->source_rows, sizeof(int) * experts * (size_t)s->ranks);
    poison(p->twin, sizeof(int) * rows);
}

// The ring's rows as far as any routes can reach. Peers write to slots and gates' gradients only behind the first barrier of
// a pass, which this rank comes to after its poison, and not behind the last: no barrier is needed for it.
static inline void poison_mok(struct model *m, bool between) {
    struct moe_mok *l = m->mok;
    const struct mok_shape *s = &l->shape;
    size_t R = (size_t)s->ring_rows, T = (size_t)s->max_tokens, H = (size_t)s->hidden, I = (size_t)s->intermediate;
    size_t S = (size_t)s->shared, K = (size_t)s->top_k, whole = R;
    if (R > mok_capacity_rows(s)) R = mok_capacity_rows(s);
    poison(l->work.hidden, sizeof(real) * R * I);
    if (mok_keeps_out()) poison(l->work.out, sizeof(real) * R * H);
    poison(l->work.dy_rows, sizeof(real) * R * H);
    poison(l->work.d_gate_up, sizeof(real) * R * 2 * I);
    poison(l->work.partials, sizeof(accum) * whole * (size_t)mok_ceil((int)I, MOK_PARTIAL_COLUMNS));
    poison(l->work.shared_hidden, sizeof(real) * T * S);
    poison(l->work.shared_d_gate_up, sizeof(real) * T * 2 * S);
    if (S > 0) poison(l->work.shared_out, sizeof(real) * T * H);
    poison(l->work.counters, sizeof(int32_t) * mok_counter_total(s));
    poison(m->acts.slots, sizeof(real) * T * K * H);
    poison(m->acts.d_gates, sizeof(accum) * T * K);
    for (int b = 0; b < BLOCKS; b++) {
        if (between && m->moe.recompute != RECOMPUTE_MOE) continue; // else the rows are another block's
        poison(l->blocks[b].x_rows, sizeof(real) * R * H);
        poison(l->blocks[b].gate_up, sizeof(real) * R * 2 * I);
        if (!between) poison_plan(&l->blocks[b].plan, s);
    }
}

static inline void poison_alltoall(struct model *m, bool between) {
    struct moe_alltoall *l = m->alltoall;
    size_t routes = (size_t)m->acts.batch * (size_t)m->acts.seq * (size_t)m->config.top_k;
    struct grown shared[] = {l->moved, l->hidden, l->out, l->d_rows, l->d_hidden, l->d_gate_up, l->d_gates};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) poison(shared[i].memory, shared[i].bytes);
    poison(l->sent, sizeof(real) * routes * (size_t)m->config.hidden);
    poison(l->sent_gates, sizeof(accum) * routes);
    poison(m->acts.d_gates, sizeof(accum) * routes);
    for (int b = 0; b < l->kept_routes; b++) {
        struct alltoall_block *kept = &l->blocks[b];
        if (!between || m->moe.recompute == RECOMPUTE_MOE) {
            poison(kept->rows.memory, kept->rows.bytes);
            poison(kept->gate_up.memory, kept->gate_up.bytes);
        }
        if (between) continue;
        struct grown grown[] = {kept->arrival_of_row, kept->row_of_arrival, kept->gates};
        for (size_t i = 0; i < sizeof grown / sizeof *grown; i++) poison(grown[i].memory, grown[i].bytes);
        poison(kept->slot_of_row, sizeof(int) * routes);
        poison(kept->row_of_slot, sizeof(int) * routes);
    }
}

// What no pass may read before it writes it. between: the blocks keep what they have, for the backward pass.
static inline void poison_layer(struct arm *a, bool between) {
    size_t bytes = sizeof(real) * a->capacity * (size_t)a->m.config.hidden;
    if (!a->poisons) return;
    poison(a->y, bytes);
    poison(a->dx, bytes);
    if (a->m.mok)
        poison_mok(&a->m, between);
    else
        poison_alltoall(&a->m, between);
}

static inline void poison_gradients(struct model *m) { poison(m->grads, sizeof(accum) * m->params.size); }

// ---- both passes ----

// This rank's tokens of the batch: N from `first` on.
struct part {
    int first, N;
};

// Results of both blocks, host memory: [BLOCKS, N, ...]
struct results {
    struct part part;
    real *y, *dx;
    accum *d_gates;
};

static inline void results_close(struct results *r) {
    free(r->y);
    free(r->dx);
    free(r->d_gates);
}

static inline void put_inputs(struct arm *a, const struct batch_of_all *p, int b, struct part part) {
    const struct block_activations *acts = &a->m.acts.blocks[b];
    size_t H = (size_t)p->s.H, K = (size_t)p->s.K, n = (size_t)part.N;
    size_t token = (size_t)b * (size_t)p->tokens + (size_t)part.first;
    if (a->poisons) poison(acts->ffn_norm, sizeof(real) * a->capacity * H);
    if (a->poisons) poison(acts->gates, sizeof(accum) * a->capacity * K);
    if (n == 0) return;
    device_copy_in(acts->ffn_norm, p->x + token * H, sizeof(real) * n * H);
    device_copy_in(acts->gates, p->gates + token * K, sizeof(accum) * n * K);
    device_copy_in(acts->ids, p->ids + token * K, sizeof(int32_t) * n * K);
    device_copy_in(a->residual, p->residual + token * H, sizeof(real) * n * H);
}

static inline struct results run_forward(struct arm *a, const struct batch_of_all *p, struct part part) {
    size_t row = sizeof(real) * (size_t)p->s.H, n = (size_t)part.N, K = (size_t)p->s.K;
    struct results r = {part, take_host(BLOCKS * n * row), take_host(BLOCKS * n * row),
                        take_host(BLOCKS * n * K * sizeof(accum))};
    poison_layer(a, false);
    for (int b = 0; b < BLOCKS; b++) {
        put_inputs(a, p, b, part);
        moe_forward(&a->m, b, a->y, a->residual, part.N);
        if (n) device_copy_out((char *)r.y + (size_t)b * n * row, a->y, n * row);
    }
    return r;
}

// With RECOMPUTE_BLOCK a block's activations are another's since: its forward pass comes once more, as in the model.
static inline void run_backward(struct results *r, struct arm *a, const struct batch_of_all *p) {
    struct model *m = &a->m;
    struct part part = r->part;
    size_t row = sizeof(real) * (size_t)p->s.H, n = (size_t)part.N, K = (size_t)p->s.K;
    poison_layer(a, true);
    for (int b = BLOCKS - 1; b >= 0; b--) {
        if (m->moe.recompute == RECOMPUTE_BLOCK && b < BLOCKS - 1) {
            put_inputs(a, p, b, part);
            moe_forward(m, b, a->y, a->residual, part.N);
        }
        const real *dy = p->dy + ((size_t)b * (size_t)p->tokens + (size_t)part.first) * (size_t)p->s.H;
        if (n) device_copy_in(m->acts.dx, dy, n * row);
        moe_backward(m, b, a->dx, m->acts.d_gates, m->acts.dx, part.N);
        if (n == 0) continue;
        device_copy_out((char *)r->dx + (size_t)b * n * row, a->dx, n * row);
        device_copy_out(r->d_gates + (size_t)b * n * K, m->acts.d_gates, n * K * sizeof(accum));
    }
    m->first_use = false;
}

static inline struct results run_layer(struct arm *a, const struct batch_of_all *p, struct part part) {
    struct results r = run_forward(a, p, part);
    run_backward(&r, a, p);
    return r;
}

// ---- numbers ----

static inline double *read_doubles(const accum *device, size_t n) {
    float *values = take_host(sizeof *values * n);
    double *wide = take_host(sizeof *wide * n);
    device_accum_to_float(values, device, n);
    for (size_t i = 0; i < n; i++) wide[i] = (double)values[i];
    free(values);
    return wide;
}

static inline void check_finite(const char *array, const double *values, size_t n) {
    double size = 0;
    for (size_t i = 0; i < n; i++) size += values[i] * values[i];
    if (n > 0 && !(isfinite(size) && size > 0))
        fail_here("%s: found the norm %g, wanted a number above 0", array, sqrt(size));
}

// By way of the device, which knows what a `real` is.
static inline double *widen_reals(real *device, const real *host, size_t n) {
    float *values = take_host(sizeof *values * n);
    double *wide = take_host(sizeof *wide * n);
    if (n) device_copy_in(device, host, sizeof *host * n);
    device_real_to_float(values, device, n);
    for (size_t i = 0; i < n; i++) wide[i] = (double)values[i];
    free(values);
    return wide;
}

// r of a whole batch: two arrays that are no numbers could have the same bits.
static inline void check_numbers(const struct arm *a, const struct batch_of_all *p, const struct results *r) {
    const struct model *m = &a->m;
    size_t n = (size_t)p->tokens * (size_t)p->s.H;
    for (int b = 0; b < BLOCKS; b++) {
        double *y = widen_reals(a->y, r->y + (size_t)b * n, n);
        check_finite("y", y, n);
        free(y);
    }
    bool routed = false; // without any route gradients are zeros
    for (size_t i = 0; i < BLOCKS * (size_t)p->tokens * (size_t)p->s.K; i++) routed = routed || p->ids[i] >= 0;
    if (!routed) return;
    for (int b = 0; b < BLOCKS; b++) {
        const struct block_offsets *w = &m->params.blocks[b];
        size_t matrices = (size_t)p->s.E * (size_t)p->s.I * (size_t)p->s.H;
        double *dx = widen_reals(a->dx, r->dx + (size_t)b * n, n);
        double *w13 = read_doubles(m->grads + w->expert_w13, 2 * matrices);
        double *w2 = read_doubles(m->grads + w->expert_w2, matrices);
        check_finite("dx", dx, n);
        check_finite("dW13", w13, 2 * matrices);
        check_finite("dW2", w2, matrices);
        free(dx);
        free(w13);
        free(w2);
    }
}

// ---- what must have the same bits ----

// wanted: of the whole batch.
static inline void check_results(const struct results *found, const struct results *wanted,
                                 const struct batch_of_all *p) {
    size_t row = sizeof(real) * (size_t)p->s.H, gates = sizeof(accum) * (size_t)p->s.K, n = (size_t)found->part.N;
    const struct {
        const char *name;
        const void *found, *wanted;
        size_t width;
    } arrays[] = {{"y", found->y, wanted->y, row},
                  {"dx", found->dx, wanted->dx, row},
                  {"d gates", found->d_gates, wanted->d_gates, gates}};
    for (int i = 0; i < 3; i++)
        for (size_t b = 0; b < BLOCKS; b++) {
            char name[32];
            size_t first = b * (size_t)p->tokens + (size_t)found->part.first, width = arrays[i].width;
            snprintf(name, sizeof name, "%s of block %zu", arrays[i].name, b);
            check_bits(name, (const char *)arrays[i].found + b * n * width,
                       (const char *)arrays[i].wanted + first * width, n * width);
        }
}

static inline void check_matrices(const char *array, int block, const accum *found, const accum *wanted, size_t n) {
    char name[48];
    snprintf(name, sizeof name, "%s of block %d", array, block);
    accum *a = read_device(found, sizeof *a * n), *b = read_device(wanted, sizeof *b * n);
    check_bits(name, a, b, sizeof *a * n);
    free(a);
    free(b);
}

// Sums of FP32 in another order, over up to 16 thousand tokens. A GPU's tensor cores cut off what does not fit into a sum
// where others round, which in a thousand steps of 16 tokens is up to 2^-23 each, 1.2e-4 together. One rank of eight that
// is left out is off by a third.
static const double SUMMED_BY_RANKS = 2e-4;

// The shared expert's gradients are of this rank's tokens only: their sum over the ranks is compared.
static inline void check_sum(const char *array, int block, struct comm *group, const accum *found, const accum *wanted,
                             size_t n) {
    double *a = read_doubles(found, n), *b = read_doubles(wanted, n);
    comm_sum_double(group, a, n);
    double error = test_relative_norm(a, b, n);
    if (!(error <= SUMMED_BY_RANKS))
        fail_here("%s of block %d, summed over the ranks: relative error %.3g, wanted at most %.3g", array, block,
                  error, SUMMED_BY_RANKS);
    free(a);
    free(b);
}

static inline void check_gradients(const struct model *m, const struct model *alone) {
    size_t H = (size_t)m->config.hidden, one = (size_t)m->config.expert_intermediate * H;
    size_t shared = (size_t)config_shared_intermediate(&m->config) * H;
    struct expert_range here = parallel_experts(m->parallel, m->config.experts);
    size_t first = (size_t)here.first * one, count = (size_t)(here.end - here.first) * one;
    for (int b = 0; b < BLOCKS; b++) {
        const struct block_offsets *w = &m->params.blocks[b], *a = &alone->params.blocks[b];
        check_matrices("dW13", b, m->grads + w->expert_w13, alone->grads + a->expert_w13 + 2 * first, 2 * count);
        check_matrices("dW2", b, m->grads + w->expert_w2, alone->grads + a->expert_w2 + first, count);
        if (shared == 0) continue;
        check_sum("dW13 of the shared expert", b, m->parallel->group, m->grads + w->shared_w13,
                  alone->grads + a->shared_w13, 2 * shared);
        check_sum("dW2 of the shared expert", b, m->parallel->group, m->grads + w->shared_w2,
                  alone->grads + a->shared_w2, shared);
    }
}

#endif
