// The arm "unfused" of bench_layer: what the megakernel does in its forward pass, by kernels one after the other. Plan,
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

#ifdef MOK_CUDA

#include "kernels/cuda/mok_parameters.h"

static bool unfused_available(void) { return mok_available(MOK_FORWARD) && grouped_matmul_available(GROUPED_OWN); }

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
    if (!m->config.shared_experts) return layer;
    layer.shared_w13 = m->weights + o->shared_w13;
    layer.shared_w2 = m->weights + o->shared_w2;
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
// out [ring_rows, H] receives what is pushed   warps: of a multiprocessor that pull
static void unfused_forward(struct model *m, const struct unfused_plan *u, real *out, int warps, real *y, int N) {
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
    unfused_routed(k, &layer, u, out);
    unfused_push(&q, out);
    unfused_shared(k, &layer, N);
    mok_barrier(&k->group, "after a pass of unfused kernels");
    moe_sum_slots(y, layer.slots, a->ids, k->shape.shared ? k->work.shared_out : NULL, NULL, N, k->shape.top_k,
                  k->shape.hidden);
}

#else

// The CPU's movers are threads of one pass.
static bool unfused_available(void) { return false; }
static int unfused_plan_open(struct unfused_plan *u, const struct moe_mok *l) {
    (void)u, (void)l;
    return 0;
}
static void unfused_plan_close(struct unfused_plan *u) { (void)u; }
static void unfused_forward(struct model *m, const struct unfused_plan *u, real *out, int warps, real *y, int N) {
    (void)m, (void)u, (void)out, (void)warps, (void)y, (void)N;
}

#endif

#endif
