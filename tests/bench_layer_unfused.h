// The arm "unfused" of bench_layer: what the megakernel does in a pass, by kernels one after the other. Plan,
// buffers, barriers and slot sum are the megakernel's. Between the barriers all rows are pulled, multiplied by their experts
// and pushed, and own tokens meet the shared expert, each step by kernels that have the GPU to themselves. So what lies
// between this arm and mok is what fusion gains.
//
// Grouped products take the experts' segments from the host, and only the device knows them: in every pass such a layer
// would have to wait for its plan. This one is spared that, in its favour: it has read the plans of all input sets before.
#ifndef MOK_TESTS_BENCH_LAYER_UNFUSED_H
#define MOK_TESTS_BENCH_LAYER_UNFUSED_H

#include "model/moe_mok.h"
#include "tests/bench_unfused.h"

// What is known of an input set beforehand.
struct unfused_plan {
    int *offsets;     // host [experts here + 1] first row of each expert's segment, padding included
    accum *gates;     // [rows] of every row
    int *slot_of_row; // [rows] where its gate is: the row's own number; -1: padding
};

// What it needs beside the megakernel's memory.
struct unfused_rows {
    real *out;      // [ring_rows, H] what is pushed
    real *d_hidden; // [ring_rows, I] backward; of the shared expert then [max_tokens, S]
    accum *d_gates; // [ring_rows] backward
};

#ifdef MOK_CUDA

#include "kernels/cuda/mok_parameters.h"

static bool unfused_available(void) { return mok_available() && grouped_matmul_available(GROUPED_OWN); }

// Rows on the host become rows on the device.
static void unfused_plan_put(struct unfused_plan *u, const struct mok_row *rows, size_t count) {
    accum *gates = malloc(sizeof *gates * (count + 1));
    int *slots = malloc(sizeof *slots * (count + 1));
    if (!gates || !slots) fail_internal("bench_layer", "found no memory for %zu rows", count);
    for (size_t i = 0; i < count; i++) {
        gates[i] = rows[i].gate;
        slots[i] = rows[i].source < 0 ? -1 : (int)i;
    }
    u->gates = device_alloc(sizeof *gates * (count + 1));
    u->slot_of_row = device_alloc(sizeof *slots * (count + 1));
    device_copy_in(u->gates, gates, sizeof *gates * count);
    device_copy_in(u->slot_of_row, slots, sizeof *slots * count);
    free(gates);
    free(slots);
}

// From the plan that was made last. Returns how many macrobatches it has.
static int unfused_plan_open(struct unfused_plan *u, const struct moe_mok *l) {
    struct mok_plan p;
    mok_plan_read(&p, &l->blocks[0].plan, &l->shape);
    int macrobatches = mok_macrobatches(&l->shape, &p);
    u->offsets = malloc(sizeof *u->offsets * ((size_t)p.experts + 1));
    if (!u->offsets) fail_internal("bench_layer", "found no memory for %d experts", p.experts);
    for (int e = 0; e <= p.experts; e++) u->offsets[e] = p.expert_block[e] * MOK_BLOCK_ROWS;
    unfused_plan_put(u, p.rows, (size_t)p.blocks * MOK_BLOCK_ROWS);
    free(p.rows);
    return macrobatches;
}

static void unfused_plan_close(struct unfused_plan *u) {
    free(u->offsets);
    device_free(u->gates);
    device_free(u->slot_of_row);
    *u = (struct unfused_plan){0};
}

static void unfused_rows_open(struct unfused_rows *r, const struct mok_shape *s, bool training) {
    size_t R = (size_t)s->ring_rows, inner = R * (size_t)s->intermediate;
    size_t shared = (size_t)s->max_tokens * (size_t)s->shared;
    *r = (struct unfused_rows){.out = device_alloc(sizeof *r->out * R * (size_t)s->hidden)};
    if (!training) return;
    r->d_hidden = device_alloc(sizeof *r->d_hidden * (inner > shared ? inner : shared));
    r->d_gates = device_alloc(sizeof *r->d_gates * R);
}

static void unfused_rows_close(struct unfused_rows *r) {
    device_free(r->out);
    device_free(r->d_hidden);
    device_free(r->d_gates);
    *r = (struct unfused_rows){0};
}

static struct mok_layer unfused_layer(const struct model *m) {
    const struct block_offsets *o = &m->params.blocks[0];
    const struct block_activations *a = &m->acts.blocks[0];
    const struct mok_block *b = &m->mok->blocks[0];
    struct mok_layer layer = {.x = a->ffn_norm,
                              .slots = m->acts.slots,
                              .w13 = m->weights + o->expert_w13,
                              .w2 = m->weights + o->expert_w2,
                              .x_rows = b->x_rows,
                              .gate_up = b->gate_up,
                              .shared_gate_up = a->gate_up};
    bool shared = m->config.shared_experts > 0;
    if (shared) {
        layer.shared_w13 = m->weights + o->shared_w13;
        layer.shared_w2 = m->weights + o->shared_w2;
    }
    if (!m->grads) return layer;
    layer.d_w13 = m->grads + o->expert_w13;
    layer.d_w2 = m->grads + o->expert_w2;
    layer.first_use = m->first_use;
    if (shared) {
        layer.d_shared_w13 = m->grads + o->shared_w13;
        layer.d_shared_w2 = m->grads + o->shared_w2;
    }
    return layer;
}

static void unfused_routed(const struct moe_mok *k, const struct mok_layer *l, const struct unfused_plan *u,
                           real *out) {
    int E = k->blocks[0].plan.experts, H = k->shape.hidden, I = k->shape.intermediate;
    grouped_matmul_nt(l->gate_up, l->x_rows, l->w13, u->offsets, E, 2 * I, H);
    swiglu_forward(k->work.hidden, l->gate_up, u->gates, u->slot_of_row, u->offsets[E], I);
    grouped_matmul_nn(out, k->work.hidden, l->w2, u->offsets, E, H, I);
}

static void unfused_shared(const struct moe_mok *k, const struct mok_layer *l, int N) {
    const struct mok_workspace *w = &k->work;
    int H = k->shape.hidden, S = k->shape.shared, offsets[] = {0, N};
    if (S == 0) return;
    grouped_matmul_nt(l->shared_gate_up, l->x, l->shared_w13, offsets, 1, 2 * S, H);
    swiglu_forward(w->shared_hidden, l->shared_gate_up, NULL, NULL, N, S);
    grouped_matmul_nn(w->shared_out, w->shared_hidden, l->shared_w2, offsets, 1, H, S);
}

// As moe_forward of the model's only block, for the input set that u belongs to.
// warps: of a multiprocessor that pull
static void unfused_forward(struct model *m, const struct unfused_plan *u, const struct unfused_rows *r, int warps,
                            real *y, int N) {
    struct moe_mok *k = m->mok;
    struct mok_plan *plan = &k->blocks[0].plan;
    const struct block_activations *a = &m->acts.blocks[0];
    struct mok_layer layer = unfused_layer(m);
    grouped_matmul_choose(GROUPED_OWN);
    mok_set_tokens(&k->group, N);
    mok_barrier(&k->group, "before a pass of unfused kernels");
    mok_plan_make(plan, &k->shape, &k->group, a->ids, a->gates);
    struct mok_parameters q = mok_parameters_of(&k->shape, plan, &k->group, &layer, &k->work, &k->crew, MOK_FORWARD);
    unfused_pull(&q, k->work.counters, warps);
    unfused_routed(k, &layer, u, r->out);
    unfused_push(&q, r->out);
    unfused_shared(k, &layer, N);
    mok_barrier(&k->group, "after a pass of unfused kernels");
    moe_sum_slots(y, layer.slots, a->ids, k->shape.shared ? k->work.shared_out : NULL, NULL, N, k->shape.top_k,
                  k->shape.hidden);
}

// Gradients of gathered rows and of their gates, from gathered dy.
static void unfused_routed_backward(const struct moe_mok *k, const struct mok_layer *l, const struct unfused_plan *u,
                                    const struct unfused_rows *r) {
    const struct mok_workspace *w = &k->work;
    int E = k->blocks[0].plan.experts, H = k->shape.hidden, I = k->shape.intermediate;
    grouped_matmul_nt(r->d_hidden, w->dy_rows, l->w2, u->offsets, E, I, H);
    swiglu_backward(w->d_gate_up, w->hidden, r->d_gates, r->d_hidden, l->gate_up, u->gates, u->slot_of_row,
                    u->offsets[E], I);
    grouped_matmul_nn(r->out, w->d_gate_up, l->w13, u->offsets, E, H, 2 * I);
}

static void unfused_weight_gradients(const struct moe_mok *k, const struct mok_layer *l, const struct unfused_plan *u) {
    const struct mok_workspace *w = &k->work;
    int E = k->blocks[0].plan.experts, H = k->shape.hidden, I = k->shape.intermediate;
    grouped_matmul_tn(l->d_w2, w->hidden, w->dy_rows, u->offsets, E, I, H, !l->first_use);
    grouped_matmul_tn(l->d_w13, w->d_gate_up, l->x_rows, u->offsets, E, 2 * I, H, !l->first_use);
}

// d_hidden [N, S] is scratch.
static void unfused_shared_backward(const struct moe_mok *k, const struct mok_layer *l, real *d_hidden, int N) {
    const struct mok_workspace *w = &k->work;
    int H = k->shape.hidden, S = k->shape.shared, offsets[] = {0, N};
    if (S == 0) return;
    grouped_matmul_nt(d_hidden, l->dy, l->shared_w2, offsets, 1, S, H);
    swiglu_backward(w->shared_d_gate_up, w->shared_hidden, NULL, d_hidden, l->shared_gate_up, NULL, NULL, N, S);
    grouped_matmul_nn(w->shared_out, w->shared_d_gate_up, l->shared_w13, offsets, 1, H, 2 * S);
    grouped_matmul_tn(l->d_shared_w2, w->shared_hidden, l->dy, offsets, 1, S, H, !l->first_use);
    grouped_matmul_tn(l->d_shared_w13, w->shared_d_gate_up, l->x, offsets, 1, 2 * S, H, !l->first_use);
}

// As moe_backward, behind unfused_forward of the same input set. dy is pulled as forward pulls x.
static void unfused_backward(struct model *m, const struct unfused_plan *u, const struct unfused_rows *r, int warps,
                             real *dx, accum *d_gates, const real *dy, int N) {
    struct moe_mok *k = m->mok;
    const struct mok_workspace *w = &k->work;
    struct mok_plan *plan = &k->blocks[0].plan;
    struct mok_layer layer = unfused_layer(m), moved = layer;
    layer.dy = moved.x = dy;
    moved.x_rows = w->dy_rows;
    grouped_matmul_choose(GROUPED_OWN);
    device_zero(d_gates, sizeof *d_gates * (size_t)N * (size_t)k->shape.top_k); // what nobody pushes
    mok_barrier(&k->group, "before a backward pass of unfused kernels");
    struct mok_parameters q = mok_parameters_of(&k->shape, plan, &k->group, &moved, w, &k->crew, MOK_FORWARD);
    unfused_pull(&q, w->counters, warps);
    unfused_routed_backward(k, &layer, u, r);
    unfused_push(&q, r->out);
    unfused_push_gates(&q, (size_t)((char *)d_gates - k->group.base[k->group.rank]), r->d_gates);
    unfused_weight_gradients(k, &layer, u);
    unfused_shared_backward(k, &layer, r->d_hidden, N);
    mok_barrier(&k->group, "after a backward pass of unfused kernels");
    moe_sum_slots(dx, layer.slots, m->acts.blocks[0].ids, k->shape.shared ? w->shared_out : NULL, NULL, N,
                  k->shape.top_k, k->shape.hidden);
}

#else

// The CPU's movers are threads of one pass.
static bool unfused_available(void) { return false; }
static int unfused_plan_open(struct unfused_plan *u, const struct moe_mok *l) {
    (void)u, (void)l;
    return 0;
}
static void unfused_plan_close(struct unfused_plan *u) { (void)u; }
static void unfused_rows_open(struct unfused_rows *r, const struct mok_shape *s, bool training) {
    (void)r, (void)s, (void)training;
}
static void unfused_rows_close(struct unfused_rows *r) { (void)r; }
static void unfused_forward(struct model *m, const struct unfused_plan *u, const struct unfused_rows *r, int warps,
                            real *y, int N) {
    (void)m, (void)u, (void)r, (void)warps, (void)y, (void)N;
}
static void unfused_backward(struct model *m, const struct unfused_plan *u, const struct unfused_rows *r, int warps,
                             real *dx, accum *d_gates, const real *dy, int N) {
    (void)m, (void)u, (void)r, (void)warps, (void)dx, (void)d_gates, (void)dy, (void)N;
}

#endif

#endif
