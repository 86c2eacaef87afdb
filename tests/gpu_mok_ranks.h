// The megakernel's passes of one MoE layer on N ranks that are N sets of buffers on one device. No rank waits for another
// inside a pass, so the ranks go through it phase by phase: all inputs, all plans, all passes, all sums. The order of the
// calls takes the place of the barriers.
//
// A problem can be dealt out to any number of ranks; results come back in the order of its batch. All memory is poisoned
// before a call; before its backward pass, all that this pass must not need of forward.
#ifndef MOK_TESTS_GPU_MOK_RANKS_H
#define MOK_TESTS_GPU_MOK_RANKS_H

#include "tests/gpu_mok_memory.h"
#include "tests/gpu_mok_problem.h"

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
    bool replay; // as where layers share one ring: backward has nothing of forward's rows
    bool add;    // gradients are added to start_value
    int calls;   // of both passes, 1; the gradients of the later ones are added
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
                          .move_rows = d->move_rows ? d->move_rows : MOVE_ROWS,
                          .replay = d->replay};
    s.ring_rows = d->ring ? d->ring : mok_default_ring(&s);
    return s;
}

// For the lines that say what failed.
static inline const char *dealing_text(const struct dealing *d) {
    static char text[200];
    int length =
        snprintf(text, sizeof text,
                 "EP %d, workers %d, comm workers %d, minibatch %d, ring %d, lag %d, move rows %d, delays %llu%s%s",
                 d->ranks, d->workers, d->comm_workers, d->minibatch, d->ring, d->lag, d->move_rows,
                 (unsigned long long)d->delays, d->replay ? ", replay" : "", d->add ? ", added" : "");
    if (d->calls) length += snprintf(text + length, sizeof text - (size_t)length, ", %d calls", d->calls);
    for (int r = 0; d->tokens && r < d->ranks && length < (int)sizeof text - 16; r++)
        length += snprintf(text + length, sizeof text - (size_t)length, "%s%d", r ? " " : ", tokens ", d->tokens[r]);
    return text;
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
    struct memory symmetric, own, gradients; // of weights
    real *dy, *slots;                        // symmetric
    accum *d_gates;                          // symmetric
    real *y, *dx;                            // [max_tokens, H]
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
    me->dx = memory_take(m, sizeof(real) * N * H);
    for (int l = 0; l < layers; l++) {
        struct mok_layer *layer = &me->layers[l].layer;
        *layer = (struct mok_layer){.x = me->layers[l].x, .dy = me->dy, .slots = me->slots, .d_gates = me->d_gates};
        // With `replay` layers share one ring.
        bool own = l == 0 || !s->replay;
        layer->x_rows = own ? memory_take(m, sizeof(real) * R * H) : me->layers[0].layer.x_rows;
        layer->gate_up = own ? memory_take(m, sizeof(real) * R * 2 * I) : me->layers[0].layer.gate_up;
        layer->shared_gate_up = memory_take(m, sizeof(real) * N * 2 * S);
    }
}

static inline int experts_of(const struct place *me) { return mok_local_experts(&me->shape, me->group.rank); }

static inline void lay_out_gradients(struct place *me, int layers) {
    struct memory *m = &me->gradients;
    const struct mok_shape *s = &me->shape;
    size_t H = (size_t)s->hidden, w = (size_t)experts_of(me) * (size_t)s->intermediate * H,
           shared = (size_t)s->shared * H;
    memory_take(m, 0);
    for (int l = 0; l < layers; l++) {
        struct mok_layer *layer = &me->layers[l].layer;
        layer->d_w13 = memory_take(m, sizeof(accum) * 2 * w);
        layer->d_w2 = memory_take(m, sizeof(accum) * w);
        layer->d_shared_w13 = memory_take(m, sizeof(accum) * 2 * shared);
        layer->d_shared_w2 = memory_take(m, sizeof(accum) * shared);
    }
}

// Everything between the ranks and all that a call may leave behind, but for the gradients of weights.
static inline void rank_poison(struct place *me) {
    memory_poison(&me->symmetric);
    memory_poison(&me->own);
    device_zero(me->symmetric.device, mok_header_bytes(me->shape.ranks));
}

// All that the backward pass of layer l must not need: what the layers share, and with `replay` their ring.
static inline void rank_forget(struct place *me, int l) {
    struct memory *m = &me->own;
    const struct mok_shape *s = &me->shape;
    const struct mok_layer *layer = &me->layers[l].layer;
    size_t N = (size_t)s->max_tokens, H = (size_t)s->hidden, I = (size_t)s->intermediate, S = (size_t)s->shared;
    size_t R = (size_t)s->ring_rows, slots = N * (size_t)s->top_k;
    const struct mok_workspace *w = &me->work;
    memory_poison_array(m, w->hidden, sizeof(real) * R * I);
    memory_poison_array(m, w->out, sizeof(real) * R * H);
    memory_poison_array(m, w->dy_rows, sizeof(real) * R * H);
    memory_poison_array(m, w->d_gate_up, sizeof(real) * R * 2 * I);
    memory_poison_array(m, w->partials, sizeof(accum) * (size_t)mok_ceil(s->intermediate, MOK_PARTIAL_COLUMNS) * R);
    memory_poison_array(m, w->shared_hidden, sizeof(real) * N * S);
    memory_poison_array(m, w->shared_d_gate_up, sizeof(real) * N * 2 * S);
    memory_poison_array(m, w->shared_out, S ? sizeof(real) * N * H : 0);
    memory_poison_array(m, w->counters, sizeof(int32_t) * mok_counter_total(s));
    memory_poison_array(m, me->y, sizeof(real) * N * H);
    memory_poison_array(m, me->dx, sizeof(real) * N * H);
    memory_poison_array(&me->symmetric, me->dy, sizeof(real) * N * H);
    memory_poison_array(&me->symmetric, me->slots, sizeof(real) * slots * H);
    memory_poison_array(&me->symmetric, me->d_gates, sizeof(accum) * slots);
    if (!s->replay) return;
    memory_poison_array(m, layer->x_rows, sizeof(real) * R * H);
    memory_poison_array(m, layer->gate_up, sizeof(real) * R * 2 * I);
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
    lay_out_gradients(me, layers);
    memory_alloc(&me->symmetric);
    memory_alloc(&me->own);
    memory_alloc(&me->gradients);
    lay_out_symmetric(me, layers);
    lay_out_own(me, layers);
    lay_out_gradients(me, layers);
    rank_poison(me);
    memory_poison(&me->gradients);
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
    memory_close(&me->gradients);
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

static inline void ranks_poison_gradients(struct ranks *all) {
    for (int r = 0; r < all->count; r++) memory_poison(&all->list[r].gradients);
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

static inline void ranks_multiply(struct ranks *all, int l, enum mok_pass pass) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        struct own_layer *own = &me->layers[l];
        mok_run(&me->shape, &own->plan, &me->group, &own->layer, &me->work, &me->crew, pass);
    }
}

// y with the residual, or dx.
static inline void ranks_sum(struct ranks *all, int l, enum mok_pass pass) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        const struct own_layer *own = &me->layers[l];
        const struct problem *p = own->p;
        bool forward = pass == MOK_FORWARD;
        const real *residual = forward && p->residual ? p->residual + (size_t)own->first_token * (size_t)p->H : NULL;
        moe_sum_slots(forward ? me->y : me->dx, me->slots, own->ids, p->S ? me->work.shared_out : NULL, residual,
                      own->tokens, p->K, p->H);
    }
}

static inline void ranks_forward(struct ranks *all, int l, const struct problem *p, const struct dealing *d,
                                 struct results *out) {
    ranks_put(all, l, p, d);
    ranks_plan(all, l);
    ranks_multiply(all, l, MOK_FORWARD);
    ranks_sum(all, l, MOK_FORWARD);
    for (int r = 0; r < all->count; r++) {
        const struct own_layer *own = &all->list[r].layers[l];
        size_t H = (size_t)p->H;
        device_copy_out(out->y + (size_t)own->first_token * H, all->list[r].y, sizeof(real) * (size_t)own->tokens * H);
    }
}

// ---- backward ----

static inline void start_gradient(struct memory *m, accum *gradient, int which, size_t first, size_t n, bool zeros) {
    accum *image = (accum *)(m->image + memory_at(m, gradient));
    for (size_t i = 0; i < n; i++) image[i] = zeros ? 0 : start_value(which, first + i);
    device_copy_in(gradient, image, sizeof *image * n);
}

// The present values that gradients are added to. Those of the shared expert are every rank's own, and only their sum is
// looked at: rank 0 has the values, the others zeros.
static inline void ranks_start_gradients(struct ranks *all, int l) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        const struct mok_layer *layer = &me->layers[l].layer;
        size_t H = (size_t)me->shape.hidden, I = (size_t)me->shape.intermediate, S = (size_t)me->shape.shared;
        size_t first = (size_t)mok_first_expert(&me->shape, r) * I * H, n = (size_t)experts_of(me) * I * H;
        start_gradient(&me->gradients, layer->d_w13, RESULT_D_W13, 2 * first, 2 * n, false);
        start_gradient(&me->gradients, layer->d_w2, RESULT_D_W2, first, n, false);
        start_gradient(&me->gradients, layer->d_shared_w13, RESULT_D_SHARED_W13, 0, 2 * S * H, r > 0);
        start_gradient(&me->gradients, layer->d_shared_w2, RESULT_D_SHARED_W2, 0, S * H, r > 0);
    }
}

// The ranks' sum.
static inline void take_shared_gradient(const struct ranks *all, accum *out, size_t n, int l, bool w2) {
    double *sum = calloc(n + 1, sizeof *sum);
    if (!sum) abort();
    for (int r = 0; r < all->count; r++) {
        const struct place *me = &all->list[r];
        const struct mok_layer *layer = &me->layers[l].layer;
        const accum *part = memory_of(&me->gradients, w2 ? layer->d_shared_w2 : layer->d_shared_w13);
        for (size_t i = 0; i < n; i++) sum[i] += (double)part[i];
    }
    for (size_t i = 0; i < n; i++) out[i] = (accum)sum[i];
    free(sum);
}

static inline void ranks_take_gradients(struct ranks *all, int l, const struct problem *p, struct results *out) {
    size_t H = (size_t)p->H, K = (size_t)p->K, I = (size_t)p->I, S = (size_t)p->S;
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        const struct own_layer *own = &me->layers[l];
        size_t N = (size_t)own->tokens, at = (size_t)own->first_token;
        size_t first = (size_t)mok_first_expert(&me->shape, r) * I * H, n = (size_t)experts_of(me) * I * H;
        memory_read(&me->gradients);
        device_copy_out(out->dx + at * H, me->dx, sizeof(real) * N * H);
        device_copy_out(out->d_gates + at * K, me->d_gates, sizeof(accum) * N * K);
        memcpy(out->d_w13 + 2 * first, memory_of(&me->gradients, own->layer.d_w13), sizeof(accum) * 2 * n);
        memcpy(out->d_w2 + first, memory_of(&me->gradients, own->layer.d_w2), sizeof(accum) * n);
    }
    take_shared_gradient(all, out->d_shared_w13, 2 * S * H, l, false);
    take_shared_gradient(all, out->d_shared_w2, S * H, l, true);
}

// add: to what is there; else nothing of that may be left.
static inline void ranks_backward(struct ranks *all, int l, const struct problem *p, bool add, struct results *out) {
    for (int r = 0; r < all->count; r++) {
        struct place *me = &all->list[r];
        struct own_layer *own = &me->layers[l];
        size_t H = (size_t)p->H;
        rank_forget(me, l);
        device_copy_in(me->dy, p->dy + (size_t)own->first_token * H, sizeof(real) * (size_t)own->tokens * H);
        own->layer.first_use = !add;
    }
    ranks_multiply(all, l, MOK_BACKWARD);
    ranks_sum(all, l, MOK_BACKWARD);
    ranks_take_gradients(all, l, p, out);
}

#endif
