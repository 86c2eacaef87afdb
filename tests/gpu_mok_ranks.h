// The megakernel's forward pass of one MoE layer on N ranks that are N sets of buffers on one device. No rank waits for
// another inside a pass, so the ranks go through it phase by phase: all inputs, all plans, all passes, all sums. The
// order of the calls takes the place of the barriers.
//
// A problem is a global batch: tokens, routes, gates, weights. It can be dealt out to any number of ranks; results come
// back in global order. All memory is poisoned before a call, and what nobody may write must be poison after it.
#ifndef MOK_TESTS_GPU_MOK_RANKS_H
#define MOK_TESTS_GPU_MOK_RANKS_H

#include "tests/scene.h"

#include "kernels/mok.h"

// ---- a problem ----

struct problem {
    int tokens, E, K, H, I, S;
    int32_t *ids;   // [tokens, K] host
    accum *gates;   // [tokens, K] host
    real *x;        // [tokens, H] host, numbers as the device has them
    real *residual; // [tokens, H] device; NULL: none
    real *w13, *w2, *shared_w13,
        *shared_w2; // [E, 2I, H], [E, I, H], [2S, H], [S, H] device; the shared ones NULL without S
};

// Nearly normal, of deviation 1, and fast: the sum of four uniform numbers of 16 bits.
static inline double bell(void) {
    uint64_t bits = random_next(&scene.seed), sum = 0;
    for (int i = 0; i < 4; i++) sum += bits >> 16 * i & 0xffff;
    return ((double)sum / 65536 - 2) * 1.7320508075688772;
}

static inline real *bell_reals(size_t n, double deviation) {
    real *values = malloc(sizeof *values * (n + 1));
    if (!values) abort();
    for (size_t i = 0; i < n; i++) values[i] = host_real(round_to_bf16((float)(deviation * bell())));
    return values;
}

static inline void *on_device(void *host, size_t bytes) {
    void *device = device_alloc(bytes);
    device_copy_in(device, host, bytes);
    free(host);
    return device;
}

static inline real *device_reals(size_t n, double deviation) {
    return on_device(bell_reals(n, deviation), sizeof(real) * n);
}

// Every token chooses K different experts at random.
static inline void choose_at_random(struct problem *p) {
    for (int t = 0; t < p->tokens; t++)
        for (int k = 0; k < p->K; k++) {
            int32_t *id = p->ids + (size_t)t * (size_t)p->K + k;
            bool again = true;
            while (again) {
                *id = scene_below(p->E);
                again = false;
                for (int j = 0; j < k; j++) again = again || id[j - k] == *id;
            }
        }
}

static inline void problem_open(struct problem *p, int tokens, int E, int K, int H, int I, int S, bool residual) {
    *p = (struct problem){.tokens = tokens, .E = E, .K = K, .H = H, .I = I, .S = S};
    size_t N = (size_t)tokens, w = (size_t)E * (size_t)I * (size_t)H, s = (size_t)S * (size_t)H, slots = N * (size_t)K;
    p->ids = malloc(sizeof *p->ids * (slots + 1));
    p->gates = malloc(sizeof *p->gates * (slots + 1));
    for (size_t i = 0; i < slots; i++) p->gates[i] = (accum)(float)(0.1 + scene_uniform());
    p->x = bell_reals(N * (size_t)H, 1);
    p->residual = residual ? device_reals(N * (size_t)H, 1) : NULL;
    p->w13 = device_reals(2 * w, 1 / sqrt(H));
    p->w2 = device_reals(w, 1 / sqrt(I));
    p->shared_w13 = S ? device_reals(2 * s, 1 / sqrt(H)) : NULL;
    p->shared_w2 = S ? device_reals(s, 1 / sqrt(S)) : NULL;
    choose_at_random(p);
}

static inline void problem_close(struct problem *p) {
    void *host[] = {p->ids, p->gates, p->x}, *device[] = {p->residual, p->w13, p->w2, p->shared_w13, p->shared_w2};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++) free(host[i]);
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        if (device[i]) device_free(device[i]);
}

// ---- how it is computed ----

// Zeros: as below.
struct dealing {
    int ranks;
    const int *tokens; // [ranks] of each; NULL: as even as can be
    int workers;       // as many as there can be
    int comm_workers, minibatch, ring;
    int lag;       // tasks; as many as workers. -1: none
    int move_rows; // 8
    uint64_t delays;
};

enum { MOST_RANKS = 16, MOST_LAYERS = 2, MINIBATCH = 256, MOVE_ROWS = 8 };

static inline struct mok_shape shape_of(const struct problem *p, const struct dealing *d, int most, int workers) {
    struct mok_shape s = {.ranks = d->ranks,
                          .experts = p->E,
                          .top_k = p->K,
                          .hidden = p->H,
                          .intermediate = p->I,
                          .shared = p->S,
                          .max_tokens = most,
                          .minibatch_rows = d->minibatch ? d->minibatch : MINIBATCH,
                          .lag = d->lag < 0 ? 0
                                 : d->lag   ? d->lag
                                            : workers,
                          .move_rows = d->move_rows ? d->move_rows : MOVE_ROWS};
    s.ring_rows = d->ring ? d->ring : mok_default_ring(&s);
    return s;
}

// For the lines that say what failed.
static inline const char *dealing_text(const struct dealing *d) {
    static char text[160];
    int length = snprintf(
        text, sizeof text,
        "EP %d, workers %d, comm workers %d, minibatch %d, ring %d, lag %d, move rows %d, delays %llu", d->ranks,
        d->workers, d->comm_workers, d->minibatch, d->ring, d->lag, d->move_rows, (unsigned long long)d->delays);
    for (int r = 0; d->tokens && r < d->ranks && length < (int)sizeof text - 16; r++)
        length += snprintf(text + length, sizeof text - (size_t)length, "%s%d", r ? " " : ", tokens ", d->tokens[r]);
    return text;
}

// ---- memory ----

// One piece of device memory and its copy on the host, with poison between the arrays in it.
enum { MOST_ARRAYS = 24, GAP = 256 };
struct memory {
    unsigned char *device, *image;
    size_t bytes;
    size_t first[MOST_ARRAYS], end[MOST_ARRAYS]; // of each array
    int count;
};

// The next array, aligned as device_alloc does. Without memory yet it is only counted.
static inline void *memory_take(struct memory *m, size_t bytes) {
    if (m->count == MOST_ARRAYS) abort();
    size_t at = m->bytes;
    m->first[m->count] = at;
    m->end[m->count++] = at + bytes;
    m->bytes = (at + bytes + 255) / 256 * 256 + GAP;
    return m->device ? m->device + at : NULL;
}

static inline void memory_alloc(struct memory *m) {
    m->device = device_alloc(m->bytes);
    m->image = malloc(m->bytes);
    if (!m->image) abort();
    m->bytes = 0;
    m->count = 0;
}

static inline void memory_close(struct memory *m) {
    device_free(m->device);
    free(m->image);
}

static inline void memory_poison(struct memory *m) {
    memset(m->image, 0xff, m->bytes); // NaN as a float, -1 as an integer
    device_copy_in(m->device, m->image, m->bytes);
}

static inline void memory_read(struct memory *m) { device_copy_out(m->image, m->device, m->bytes); }

// What was last read of an array.
static inline const void *memory_of(const struct memory *m, const void *device) {
    return m->image + ((const unsigned char *)device - m->device);
}

static inline bool is_poison(const void *memory, size_t bytes) {
    const unsigned char *at = memory;
    return bytes == 0 || (*at == 0xff && memcmp(at, at + 1, bytes - 1) == 0);
}

static inline void memory_check_gaps(const struct memory *m, const char *what) {
    for (int i = 0; i < m->count; i++) {
        size_t next = i + 1 < m->count ? m->first[i + 1] : m->bytes;
        if (!is_poison(m->image + m->end[i], next - m->end[i]))
            scene_fail(what, "memory behind array %d of %d was written", i, m->count);
    }
}

// ---- one rank ----

// What a rank has of each layer, and of the call in work.
struct own_layer {
    const struct problem *p;
    int first_token, tokens;
    real *x;      // symmetric
    int32_t *ids; // symmetric
    accum *gates; // symmetric
    struct mok_plan plan;
    struct mok_layer layer;
};

struct place {
    struct mok_shape shape;
    struct mok_group group;
    struct mok_workspace work;
    struct mok_crew crew;
    struct memory symmetric, own;
    real *dy, *slots; // symmetric
    accum *d_gates;   // symmetric
    real *y;          // [max_tokens, H]
    struct own_layer layers[MOST_LAYERS];
};

struct ranks {
    struct place *list;
    int count, layers;
    char *base[MOST_RANKS];
};

static inline void lay_out_symmetric(struct place *me, int layers) {
    struct memory *m = &me->symmetric;
    size_t N = (size_t)me->shape.max_tokens, H = (size_t)me->shape.hidden, slots = N * (size_t)me->shape.top_k;
    memory_take(m, mok_header_bytes(me->shape.ranks));
    for (int l = 0; l < layers; l++) {
        me->layers[l].x = memory_take(m, sizeof(real) * N * H);
        me->layers[l].ids = memory_take(m, sizeof(int32_t) * slots);
        me->layers[l].gates = memory_take(m, sizeof(accum) * slots);
    }
    me->dy = memory_take(m, sizeof(real) * N * H);
    me->slots = memory_take(m, sizeof(real) * slots * H);
    me->d_gates = memory_take(m, sizeof(accum) * slots);
}

static inline void lay_out_own(struct place *me, int layers) {
    struct memory *m = &me->own;
    const struct mok_shape *s = &me->shape;
    size_t N = (size_t)s->max_tokens, H = (size_t)s->hidden, I = (size_t)s->intermediate, S = (size_t)s->shared;
    size_t R = (size_t)s->ring_rows, partials = (size_t)mok_ceil(s->intermediate, MOK_PARTIAL_COLUMNS);
    memory_take(m, 0); // poison before the first array too
    struct mok_workspace *w = &me->work;
    w->hidden = memory_take(m, sizeof(real) * R * I);
    w->dy_rows = memory_take(m, sizeof(real) * R * H);
    w->d_gate_up = memory_take(m, sizeof(real) * R * 2 * I);
    w->partials = memory_take(m, sizeof(accum) * partials * R);
    w->shared_hidden = memory_take(m, sizeof(real) * N * S);
    w->shared_d_gate_up = memory_take(m, sizeof(real) * N * 2 * S);
    w->shared_out = memory_take(m, S ? sizeof(real) * N * H : 0);
    w->counters = memory_take(m, sizeof(int32_t) * mok_counter_total(s));
    if (mok_keeps_out()) w->out = memory_take(m, sizeof(real) * R * H);
    me->y = memory_take(m, sizeof(real) * N * H);
    for (int l = 0; l < layers; l++) {
        struct mok_layer *layer = &me->layers[l].layer;
        *layer = (struct mok_layer){.x = me->layers[l].x, .dy = me->dy, .slots = me->slots, .d_gates = me->d_gates};
        layer->x_rows = memory_take(m, sizeof(real) * R * H);
        layer->gate_up = memory_take(m, sizeof(real) * R * 2 * I);
        layer->shared_gate_up = memory_take(m, sizeof(real) * N * 2 * S);
    }
}

// Everything between the ranks and all that a call may leave behind.
static inline void rank_poison(struct place *me) {
    memory_poison(&me->symmetric);
    memory_poison(&me->own);
    device_zero(me->symmetric.device, mok_header_bytes(me->shape.ranks));
}

static inline void poison_device(void *device, size_t bytes) {
    if (!device) return;
    unsigned char *poison = malloc(bytes + 1);
    memset(poison, 0xff, bytes + 1);
    device_copy_in(device, poison, bytes);
    free(poison);
}

static inline void plan_poison(struct mok_plan *p, const struct mok_shape *s) {
    size_t experts = (size_t)mok_most_experts(s), blocks = mok_capacity_blocks(s), rows = mok_capacity_rows(s);
    poison_device(p->expert_block, sizeof(int) * (experts + 1));
    poison_device(p->expert_rows, sizeof(int) * experts);
    poison_device(p->block_expert, sizeof(int) * blocks);
    poison_device(p->walk, sizeof(int) * blocks);
    poison_device(p->rows, sizeof *p->rows * rows);
    poison_device(p->source_rows, sizeof(int) * experts * (size_t)s->ranks);
    poison_device(p->twin, sizeof(int) * rows);
}

static inline void rank_open(struct place *me, int layers) {
    lay_out_symmetric(me, layers);
    lay_out_own(me, layers);
    memory_alloc(&me->symmetric);
    memory_alloc(&me->own);
    lay_out_symmetric(me, layers);
    lay_out_own(me, layers);
    rank_poison(me);
    for (int l = 0; l < layers; l++) {
        mok_plan_alloc(&me->layers[l].plan, &me->shape);
        plan_poison(&me->layers[l].plan, &me->shape);
    }
    mok_crew_open(&me->crew);
}

static inline void rank_close(struct place *me, int layers) {
    mok_crew_close(&me->crew);
    for (int l = 0; l < layers; l++) mok_plan_free(&me->layers[l].plan);
    memory_close(&me->symmetric);
    memory_close(&me->own);
}

// ---- all ranks, phase by phase ----

// Seconds that workers wait for each other. Sanitizers slow a GPU down, other processes a CPU.
#define PATIENCE (scene.tiny || sizeof(real) > 2 ? 200 : 20)

// Ranks with room for `most` tokens each of problems as wide as p.
static inline void ranks_open(struct ranks *all, const struct problem *p, const struct dealing *d, int most,
                              int layers) {
    int workers = d->workers ? d->workers : mok_default_workers();
    if (d->ranks > MOST_RANKS || layers > MOST_LAYERS) abort();
    *all = (struct ranks){.list = calloc((size_t)d->ranks, sizeof *all->list), .count = d->ranks, .layers = layers};
    for (int r = 0; r < d->ranks; r++) {
        struct place *me = &all->list[r];
        me->shape = shape_of(p, d, most > 0 ? most : 1, workers);
        me->group = (struct mok_group){.rank = r, .ranks = d->ranks, .base = all->base, .timeout = PATIENCE};
        me->crew = (struct mok_crew){.workers = workers,
                                     .comm_workers = d->comm_workers,
                                     .timeout = PATIENCE,
                                     .first_expert = mok_first_expert(&me->shape, r),
                                     .delays = d->delays ? d->delays + (uint64_t)r : 0};
        rank_open(me, layers);
        all->base[r] = (char *)me->symmetric.device;
    }
}

static inline void ranks_close(struct ranks *all) {
    for (int r = 0; r < all->count; r++) rank_close(&all->list[r], all->layers);
    free(all->list);
}

static inline void ranks_poison(struct ranks *all) {
    for (int r = 0; r < all->count; r++) rank_poison(&all->list[r]);
}

static inline int even_share(int tokens, int ranks, int r) {
    return (int)((long long)tokens * (r + 1) / ranks - (long long)tokens * r / ranks);
}

static inline int tokens_of(const struct problem *p, const struct dealing *d, int r) {
    return d->tokens ? d->tokens[r] : even_share(p->tokens, d->ranks, r);
}

static inline int most_tokens(const struct problem *p, const struct dealing *d) {
    int most = 0;
    for (int r = 0; r < d->ranks; r++)
        if (tokens_of(p, d, r) > most) most = tokens_of(p, d, r);
    return most;
}

// This rank's tokens, and its experts' weights.
static inline void rank_put(struct place *me, int l, const struct problem *p, int first, int tokens) {
    struct own_layer *own = &me->layers[l];
    size_t H = (size_t)p->H, K = (size_t)p->K, N = (size_t)tokens, at = (size_t)first;
    size_t w = (size_t)mok_first_expert(&me->shape, me->group.rank) * (size_t)p->I * H;
    own->p = p, own->first_token = first, own->tokens = tokens;
    device_copy_in(own->x, p->x + at * H, sizeof(real) * N * H);
    device_copy_in(own->ids, p->ids + at * K, sizeof(int32_t) * N * K);
    device_copy_in(own->gates, p->gates + at * K, sizeof(accum) * N * K);
    own->layer.w13 = p->w13 + 2 * w, own->layer.w2 = p->w2 + w;
    own->layer.shared_w13 = p->shared_w13, own->layer.shared_w2 = p->shared_w2;
    mok_set_tokens(&me->group, tokens);
}

static inline void ranks_put(struct ranks *all, int l, const struct problem *p, const struct dealing *d) {
    int next = 0;
    for (int r = 0; r < all->count; r++) {
        rank_put(&all->list[r], l, p, next, tokens_of(p, d, r));
        next += tokens_of(p, d, r);
    }
    if (next != p->tokens) abort();
}

static inline void ranks_plan(struct ranks *all, int l) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        struct own_layer *own = &me->layers[l];
        mok_plan_make(&own->plan, &me->shape, &me->group, own->ids, own->gates);
    }
}

static inline void ranks_multiply(struct ranks *all, int l) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        struct own_layer *own = &me->layers[l];
        mok_run(&me->shape, &own->plan, &me->group, &own->layer, &me->work, &me->crew, MOK_FORWARD);
    }
}

static inline void ranks_sum(struct ranks *all, int l) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        const struct own_layer *own = &me->layers[l];
        const struct problem *p = own->p;
        const real *residual = p->residual ? p->residual + (size_t)own->first_token * (size_t)p->H : NULL;
        moe_sum_slots(me->y, me->slots, own->ids, p->S ? me->work.shared_out : NULL, residual, own->tokens, p->K, p->H);
    }
}

// y [tokens, H] host, in global order.
static inline void ranks_take(struct ranks *all, int l, real *y) {
    for (int r = 0; r < all->count; r++) {
        const struct own_layer *own = &all->list[r].layers[l];
        size_t H = (size_t)own->p->H;
        device_copy_out(y + (size_t)own->first_token * H, all->list[r].y, sizeof(real) * (size_t)own->tokens * H);
    }
}

static inline void ranks_forward(struct ranks *all, int l, const struct problem *p, const struct dealing *d, real *y) {
    ranks_put(all, l, p, d);
    ranks_plan(all, l);
    ranks_multiply(all, l);
    ranks_sum(all, l);
    ranks_take(all, l, y);
}

static inline real *result_open(const struct problem *p) {
    size_t bytes = sizeof(real) * (size_t)p->tokens * (size_t)p->H;
    real *y = malloc(bytes + 1);
    if (!y) abort();
    memset(y, 0xff, bytes + 1);
    return y;
}

#endif
