// One MoE layer on N ranks that live in this process, for tests of the megakernel: every rank has a thread, its own
// buffers and symmetric memory, and knows the others by their addresses.
//
// A problem is a global batch: tokens, routes, gates, weights. It can be dealt out to any number of ranks; results come
// back in global order.
#ifndef MOK_TESTS_MOK_RANKS_H
#define MOK_TESTS_MOK_RANKS_H

#include "tests/test.h"

#include <pthread.h>

#include "kernels/kernels.h"
#include "kernels/mok.h"

struct problem {
    int E, K, H, I, S;
    int tokens;
    int32_t *ids;                            // [tokens, K]
    accum *gates;                            // [tokens, K]
    real *x, *dy, *residual;                 // [tokens, H]
    real *w13, *w2, *shared_w13, *shared_w2; // [E, 2I, H], [E, I, H], [2S, H], [S, H]
    accum *old_w13, *old_w2;                 // gradients that are there before, like w13 and w2
};

// How it is computed. Zeros: chosen as the trainer would.
struct dealing {
    int ranks;
    const int *tokens; // [ranks] of each; NULL: as even as can be
    int workers, comm_workers, minibatch, ring, lag, move_rows;
    bool first_use;
    uint64_t delays; // seed of random delays before tasks, inputs and barriers; 0: none
    int passes;      // forward and backward this many times in a row in the same buffers; 0: 1
    double timeout;  // seconds that workers and ranks wait for each other; 0: 60
    void (*before_task)(void *place, int worker, struct mok_task task); // place: the rank's; NULL: none
};

struct result {
    real *y, *dx;                      // [tokens, H]
    accum *d_gates;                    // [tokens, K]
    accum *d_w13, *d_w2;               // [E, 2I, H], [E, I, H]
    accum *d_shared_w13, *d_shared_w2; // sums over the ranks, in their order
    int most_macrobatches;             // of any rank
};

static inline void *poisoned(size_t bytes) {
    void *memory = malloc(bytes + 1);
    if (!memory) abort();
    memset(memory, 0xff, bytes + 1); // NaN as a float, -1 as an integer
    return memory;
}

static inline real *random_reals(size_t n, double scale, uint64_t *seed) {
    real *values = malloc(sizeof *values * (n + 1));
    for (size_t i = 0; i < n; i++) values[i] = (real)(scale * test_normal(seed));
    return values;
}

// Every token chooses K different experts at random.
static inline void choose_at_random(struct problem *p, uint64_t *seed) {
    for (int t = 0; t < p->tokens; t++)
        for (int k = 0; k < p->K; k++) {
            int32_t *id = p->ids + (size_t)t * p->K + k;
            bool again = true;
            while (again) {
                *id = (int32_t)(test_uniform(seed) * p->E);
                again = false;
                for (int j = 0; j < k; j++) again = again || id[j - k] == *id;
            }
        }
}

static inline void problem_open(struct problem *p, int tokens, int E, int K, int H, int I, int S, uint64_t seed) {
    *p = (struct problem){.E = E, .K = K, .H = H, .I = I, .S = S, .tokens = tokens};
    size_t N = (size_t)tokens, w = (size_t)E * I * H;
    p->ids = malloc(sizeof(int32_t) * (N * K + 1));
    p->gates = malloc(sizeof(accum) * (N * K + 1));
    for (size_t i = 0; i < N * K; i++) p->gates[i] = (accum)(0.1 + test_uniform(&seed));
    p->x = random_reals(N * H, 1, &seed);
    p->dy = random_reals(N * H, 1, &seed);
    p->residual = random_reals(N * H, 1, &seed);
    p->w13 = random_reals(2 * w, 1 / sqrt(H), &seed);
    p->w2 = random_reals(w, 1 / sqrt(I), &seed);
    p->shared_w13 = random_reals(2 * (size_t)S * H, 1 / sqrt(H), &seed);
    p->shared_w2 = random_reals((size_t)S * H, 1 / sqrt(S ? S : 1), &seed);
    p->old_w13 = (accum *)random_reals(2 * w, 1, &seed);
    p->old_w2 = (accum *)random_reals(w, 1, &seed);
    choose_at_random(p, &seed);
}

static inline void problem_close(struct problem *p) {
    void *all[] = {p->ids, p->gates,      p->x,         p->dy,      p->residual, p->w13,
                   p->w2,  p->shared_w13, p->shared_w2, p->old_w13, p->old_w2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static inline void result_open(struct result *r, const struct problem *p) {
    size_t N = (size_t)p->tokens, w = (size_t)p->E * p->I * p->H;
    *r = (struct result){.y = poisoned(sizeof(real) * N * p->H),
                         .dx = poisoned(sizeof(real) * N * p->H),
                         .d_gates = poisoned(sizeof(accum) * N * p->K),
                         .d_w13 = poisoned(sizeof(accum) * 2 * w),
                         .d_w2 = poisoned(sizeof(accum) * w),
                         .d_shared_w13 = calloc(2 * (size_t)p->S * p->H + 1, sizeof(accum)),
                         .d_shared_w2 = calloc((size_t)p->S * p->H + 1, sizeof(accum))};
}

static inline void result_close(struct result *r) {
    void *all[] = {r->y, r->dx, r->d_gates, r->d_w13, r->d_w2, r->d_shared_w13, r->d_shared_w2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// ---- one rank ----

struct place {
    const struct problem *p;
    const struct dealing *d;
    struct result *out;
    struct mok_shape shape;
    struct mok_group group;
    int first_token, tokens;
    // symmetric
    real *x, *dy, *slots;
    int32_t *ids;
    accum *gates, *d_gates;
    // own, of rank_open
    accum *d_shared_w13, *d_shared_w2;
    struct mok_workspace work;
    struct mok_plan plan;
    struct mok_layer layer;
    struct mok_crew crew;
    real *y, *dx; // [tokens, H]
    int macrobatches;
    uint64_t seed, pauses;
};

static inline void pause_at_random(uint64_t *seed) {
    if (test_uniform(seed) < 0.2) nanosleep(&(struct timespec){0, (long)(200000 * test_uniform(seed))}, NULL);
}

static inline void delay(void *argument, int worker, struct mok_task task) {
    const struct place *me = argument;
    uint64_t mixed =
        me->seed + (uint64_t)worker * 977 + (uint64_t)task.kind * 31 + (uint64_t)task.block * 7 + (uint64_t)task.tile;
    pause_at_random(&mixed);
}

static inline size_t align64(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Pieces of a rank's symmetric memory; returns its size.
static inline size_t lay_out_symmetric(struct place *me, char *base) {
    size_t N = (size_t)me->shape.max_tokens, H = (size_t)me->p->H, K = (size_t)me->p->K,
           at = align64(mok_header_bytes(me->d->ranks));
    me->x = (real *)(base + at), at += align64(N * H * sizeof(real));
    me->dy = (real *)(base + at), at += align64(N * H * sizeof(real));
    me->slots = (real *)(base + at), at += align64(N * K * H * sizeof(real));
    me->ids = (int32_t *)(base + at), at += align64(N * K * sizeof(int32_t));
    me->gates = (accum *)(base + at), at += align64(N * K * sizeof(accum));
    me->d_gates = (accum *)(base + at), at += align64(N * K * sizeof(accum));
    return at;
}

// The first of this rank's experts in global arrays, and how many elements of W2 they have.
struct experts_here {
    size_t first, size;
};
static inline struct experts_here experts_of(const struct place *me) {
    size_t one = (size_t)me->p->I * (size_t)me->p->H;
    return (struct experts_here){(size_t)mok_first_expert(&me->shape, me->group.rank) * one,
                                 (size_t)mok_local_experts(&me->shape, me->group.rank) * one};
}

// A kernel takes the matrices of this rank's experts alone.
static inline void rank_take_layer(struct place *me) {
    const struct problem *p = me->p;
    struct mok_layer *l = &me->layer;
    size_t w = experts_of(me).first;
    l->w13 = p->w13 + 2 * w, l->w2 = p->w2 + w;
    l->shared_w13 = p->shared_w13, l->shared_w2 = p->shared_w2;
    l->d_w13 = me->out->d_w13 + 2 * w, l->d_w2 = me->out->d_w2 + w;
}

static inline void rank_open(struct place *me) {
    const struct problem *p = me->p;
    const struct dealing *d = me->d;
    const struct mok_shape *s = &me->shape;
    size_t most = (size_t)s->max_tokens, H = (size_t)p->H, I = (size_t)p->I, S = (size_t)p->S;
    size_t R = (size_t)s->ring_rows, partials = (size_t)mok_ceil(p->I, MOK_PARTIAL_COLUMNS);
    me->d_shared_w13 = calloc(2 * S * H + 1, sizeof(accum));
    me->d_shared_w2 = calloc(S * H + 1, sizeof(accum));
    me->work = (struct mok_workspace){.hidden = poisoned(sizeof(real) * R * I),
                                      .out = poisoned(sizeof(real) * R * H),
                                      .dy_rows = poisoned(sizeof(real) * R * H),
                                      .d_gate_up = poisoned(sizeof(real) * R * 2 * I),
                                      .partials = poisoned(sizeof(accum) * partials * R),
                                      .shared_hidden = poisoned(sizeof(real) * most * S),
                                      .shared_d_gate_up = poisoned(sizeof(real) * most * 2 * S),
                                      .shared_out = poisoned(sizeof(real) * most * H),
                                      .counters = poisoned(sizeof(int32_t) * mok_counter_total(s))};
    mok_plan_alloc(&me->plan, s);
    memset(me->plan.rows, 0xff, mok_plan_bytes(s));
    me->layer = (struct mok_layer){.x = me->x,
                                   .dy = me->dy,
                                   .slots = me->slots,
                                   .d_gates = me->d_gates,
                                   .d_shared_w13 = me->d_shared_w13,
                                   .d_shared_w2 = me->d_shared_w2,
                                   .first_use = d->first_use,
                                   .x_rows = poisoned(sizeof(real) * R * H),
                                   .gate_up = poisoned(sizeof(real) * R * 2 * I),
                                   .shared_gate_up = poisoned(sizeof(real) * most * 2 * S)};
    me->crew = (struct mok_crew){.workers = d->workers ? d->workers : 2,
                                 .comm_workers = d->comm_workers,
                                 .timeout = d->timeout ? d->timeout : 60,
                                 .before_task = d->before_task ? d->before_task
                                                : d->delays    ? delay
                                                               : NULL,
                                 .argument = me};
    mok_crew_open(&me->crew);
    me->y = poisoned(sizeof(real) * most * H);
    me->dx = poisoned(sizeof(real) * most * H);
}

static inline void rank_close(struct place *me) {
    mok_crew_close(&me->crew);
    mok_plan_free(&me->plan);
    struct mok_workspace *w = &me->work;
    void *all[] = {w->hidden,
                   w->out,
                   w->dy_rows,
                   w->d_gate_up,
                   w->partials,
                   w->shared_hidden,
                   w->shared_d_gate_up,
                   w->shared_out,
                   w->counters,
                   me->layer.x_rows,
                   me->layer.gate_up,
                   me->layer.shared_gate_up,
                   me->d_shared_w13,
                   me->d_shared_w2,
                   me->y,
                   me->dx};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static inline void rank_barrier(struct place *me, const char *what) {
    if (me->d->delays) pause_at_random(&me->pauses);
    mok_barrier(&me->group, what);
}

static inline void rank_forward(struct place *me) {
    const struct problem *p = me->p;
    size_t N = (size_t)me->tokens, first = (size_t)me->first_token, H = (size_t)p->H, K = (size_t)p->K;
    if (me->d->delays) pause_at_random(&me->pauses);
    memcpy(me->x, p->x + first * H, sizeof(real) * N * H);
    memcpy(me->ids, p->ids + first * K, sizeof(int32_t) * N * K);
    memcpy(me->gates, p->gates + first * K, sizeof(accum) * N * K);
    mok_set_tokens(&me->group, me->tokens);
    rank_barrier(me, "before forward");
    mok_plan_make(&me->plan, &me->shape, &me->group, me->ids, me->gates);
    mok_run(&me->shape, &me->plan, &me->group, &me->layer, &me->work, &me->crew, MOK_FORWARD);
    rank_barrier(me, "after forward");
    moe_sum_slots(me->y, me->slots, me->ids, p->S ? me->work.shared_out : NULL, p->residual + first * H, me->tokens,
                  p->K, p->H);
}

static inline void rank_prepare_gradients(struct place *me) {
    const struct problem *p = me->p;
    struct experts_here w = experts_of(me);
    size_t shared = (size_t)p->S * (size_t)p->H;
    if (me->d->first_use) {
        memset(me->layer.d_w13, 0xff, sizeof(accum) * 2 * w.size);
        memset(me->layer.d_w2, 0xff, sizeof(accum) * w.size);
        memset(me->d_shared_w13, 0xff, sizeof(accum) * 2 * shared);
        memset(me->d_shared_w2, 0xff, sizeof(accum) * shared);
    } else {
        memcpy(me->layer.d_w13, p->old_w13 + 2 * w.first, sizeof(accum) * 2 * w.size);
        memcpy(me->layer.d_w2, p->old_w2 + w.first, sizeof(accum) * w.size);
        memset(me->d_shared_w13, 0, sizeof(accum) * 2 * shared);
        memset(me->d_shared_w2, 0, sizeof(accum) * shared);
    }
}

static inline void rank_backward(struct place *me) {
    const struct problem *p = me->p;
    size_t N = (size_t)me->tokens, first = (size_t)me->first_token, H = (size_t)p->H, K = (size_t)p->K;
    if (me->d->delays) pause_at_random(&me->pauses);
    memcpy(me->dy, p->dy + first * H, sizeof(real) * N * H);
    memset(me->d_gates, 0, sizeof(accum) * N * K);
    rank_prepare_gradients(me);
    rank_barrier(me, "before backward");
    mok_run(&me->shape, &me->plan, &me->group, &me->layer, &me->work, &me->crew, MOK_BACKWARD);
    rank_barrier(me, "after backward");
    moe_sum_slots(me->dx, me->slots, me->ids, p->S ? me->work.shared_out : NULL, NULL, me->tokens, p->K, p->H);
}

// Both passes over this rank's tokens of p; its part of the results is then in out.
static inline void rank_pass(struct place *me) {
    const struct problem *p = me->p;
    size_t N = (size_t)me->tokens, first = (size_t)me->first_token, H = (size_t)p->H, K = (size_t)p->K;
    rank_take_layer(me);
    rank_forward(me);
    rank_backward(me);
    memcpy(me->out->y + first * H, me->y, sizeof(real) * N * H);
    memcpy(me->out->dx + first * H, me->dx, sizeof(real) * N * H);
    memcpy(me->out->d_gates + first * K, me->d_gates, sizeof(accum) * N * K);
    me->macrobatches = mok_macrobatches(&me->shape, &me->plan);
}

static inline void *run_rank(void *argument) {
    struct place *me = argument;
    for (int pass = 0; pass < (me->d->passes ? me->d->passes : 1); pass++) rank_pass(me);
    return NULL;
}

// ---- all ranks ----

enum { MOST_PLACES = 64 };

static inline struct mok_shape shape_of(const struct problem *p, const struct dealing *d, int most) {
    struct mok_shape s = {.ranks = d->ranks,
                          .experts = p->E,
                          .top_k = p->K,
                          .hidden = p->H,
                          .intermediate = p->I,
                          .shared = p->S,
                          .max_tokens = most,
                          .lag = d->lag,
                          .move_rows = d->move_rows ? d->move_rows : 32};
    s.minibatch_rows = d->minibatch ? d->minibatch : mok_default_minibatch(p->I, d->workers ? d->workers : 2);
    s.ring_rows = d->ring ? d->ring : mok_default_ring(&s);
    return s;
}

// Ranks with buffers for `most` tokens each of problems like p; base [ranks] receives their symmetric memory. The tokens of
// each, and where its results go, are up to the caller.
static inline struct place *ranks_open(const struct problem *p, const struct dealing *d, int most, char **base) {
    struct place *ranks = calloc(MOST_PLACES, sizeof *ranks);
    for (int r = 0; r < d->ranks; r++) {
        struct place *me = &ranks[r];
        me->p = p, me->d = d, me->shape = shape_of(p, d, most), me->seed = me->pauses = d->delays + (uint64_t)r;
        me->group =
            (struct mok_group){.rank = r, .ranks = d->ranks, .base = base, .timeout = d->timeout ? d->timeout : 60};
        size_t header = mok_header_bytes(d->ranks), bytes = lay_out_symmetric(me, (char *)64); // only counted
        base[r] = aligned_alloc(64, bytes);
        memset(base[r], 0xff, bytes);
        memset(base[r], 0, header);
        lay_out_symmetric(me, base[r]);
        rank_open(me);
    }
    return ranks;
}

static inline void ranks_close(struct place *ranks, int count, char **base) {
    for (int r = 0; r < count; r++) {
        rank_close(&ranks[r]);
        free(base[r]);
    }
    free(ranks);
}

// Every rank in a thread of its own, until all are done.
static inline void ranks_run(struct place *ranks, int count, void *(*run)(void *)) {
    pthread_t threads[MOST_PLACES];
    for (int r = 1; r < count; r++) assert_int_equal(pthread_create(&threads[r], NULL, run, &ranks[r]), 0);
    run(&ranks[0]);
    for (int r = 1; r < count; r++) pthread_join(threads[r], NULL);
}

static inline int even_share(int tokens, int ranks, int r) {
    return (int)((long long)tokens * (r + 1) / ranks - (long long)tokens * r / ranks);
}

static inline void deal_out(struct result *out, const struct problem *p, const struct dealing *d) {
    char *base[MOST_PLACES];
    size_t S = (size_t)p->S, H = (size_t)p->H;
    int tokens[MOST_PLACES], most = 0, next = 0;
    for (int r = 0; r < d->ranks; r++) {
        tokens[r] = d->tokens ? d->tokens[r] : even_share(p->tokens, d->ranks, r);
        if (tokens[r] > most) most = tokens[r];
    }
    struct place *ranks = ranks_open(p, d, most, base);
    result_open(out, p);
    for (int r = 0; r < d->ranks; r++) {
        ranks[r].first_token = next;
        ranks[r].tokens = tokens[r];
        ranks[r].out = out;
        next += tokens[r];
    }
    assert_int_equal(next, p->tokens);
    ranks_run(ranks, d->ranks, run_rank);
    for (int r = 0; r < d->ranks; r++) {
        for (size_t i = 0; i < 2 * S * H; i++) out->d_shared_w13[i] += ranks[r].d_shared_w13[i];
        for (size_t i = 0; i < S * H; i++) out->d_shared_w2[i] += ranks[r].d_shared_w2[i];
        if (ranks[r].macrobatches > out->most_macrobatches) out->most_macrobatches = ranks[r].macrobatches;
    }
    ranks_close(ranks, d->ranks, base);
}

// ---- the same in FP64, straight from the equations ----

struct exact {
    double *y, *dx, *d_gates, *d_w13, *d_w2, *d_shared_w13, *d_shared_w2;
};

// y += gate * ((silu(x W1^T) * (x W3^T)) W2); with dy also the gradients. Returns the gate's.
static inline double exact_ffn(double *y, double *dx, double *d_w13, double *d_w2, const real *x, const real *dy,
                               const real *w13, const real *w2, double gate, int H, int I) {
    double d_gate = 0;
    for (int i = 0; i < I; i++) {
        const real *w1 = w13 + (size_t)i * H, *w3 = w13 + (size_t)(I + i) * H, *down = w2 + (size_t)i * H;
        double g = 0, u = 0, d = 0;
        for (int h = 0; h < H; h++) g += (double)x[h] * w1[h], u += (double)x[h] * w3[h], d += (double)dy[h] * down[h];
        double sigma = 1 / (1 + exp(-g)), silu = g * sigma, hidden = silu * u;
        double dg = gate * d * u * (sigma * (1 + g * (1 - sigma))), du = gate * d * silu;
        d_gate += d * hidden;
        for (int h = 0; h < H; h++) {
            y[h] += gate * hidden * down[h];
            dx[h] += dg * w1[h] + du * w3[h];
            d_w13[(size_t)i * H + h] += dg * x[h];
            d_w13[(size_t)(I + i) * H + h] += du * x[h];
            d_w2[(size_t)i * H + h] += gate * hidden * dy[h];
        }
    }
    return d_gate;
}

static inline void exact_open(struct exact *e, const struct problem *p, bool first_use) {
    size_t N = (size_t)p->tokens, H = (size_t)p->H, w = (size_t)p->E * p->I * H, s = (size_t)p->S * H;
    *e = (struct exact){calloc(N * H + 1, 8), calloc(N * H + 1, 8), calloc(N * p->K + 1, 8), calloc(2 * w + 1, 8),
                        calloc(w + 1, 8),     calloc(2 * s + 1, 8), calloc(s + 1, 8)};
    for (size_t i = 0; !first_use && i < 2 * w; i++) e->d_w13[i] = p->old_w13[i];
    for (size_t i = 0; !first_use && i < w; i++) e->d_w2[i] = p->old_w2[i];
    for (size_t t = 0; t < N; t++) {
        const real *x = p->x + t * H, *dy = p->dy + t * H;
        for (int k = 0; k < p->K; k++) {
            int32_t id = p->ids[t * (size_t)p->K + k];
            if (id < 0) continue;
            size_t at = (size_t)id * p->I * H;
            e->d_gates[t * (size_t)p->K + k] =
                exact_ffn(e->y + t * H, e->dx + t * H, e->d_w13 + 2 * at, e->d_w2 + at, x, dy, p->w13 + 2 * at,
                          p->w2 + at, p->gates[t * (size_t)p->K + k], p->H, p->I);
        }
        exact_ffn(e->y + t * H, e->dx + t * H, e->d_shared_w13, e->d_shared_w2, x, dy, p->shared_w13, p->shared_w2, 1,
                  p->H, p->S);
        for (size_t h = 0; h < H; h++) e->y[t * H + h] += p->residual[t * H + h];
    }
}

static inline void exact_close(struct exact *e) {
    void *all[] = {e->y, e->dx, e->d_gates, e->d_w13, e->d_w2, e->d_shared_w13, e->d_shared_w2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

#endif
