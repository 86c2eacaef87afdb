// All experts on this rank: place the routes, gather their rows, run the experts, sum every token's slots in order.
#include "model/moe.h"

// The shared expert reads every token; its output stays in shared_out until the combine adds it.
static void shared_forward(struct model *m, int block, int N) {
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    int H = m->config.hidden, I = config_shared_intermediate(&m->config);
    matmul_nt(a->gate_up, a->ffn_norm, m->weights + w->shared_w13, N, 2 * I, H, NULL);
    swiglu_forward(m->acts.ffn_hidden, a->gate_up, NULL, NULL, N, I);
    matmul_nn(m->acts.shared_out, m->acts.ffn_hidden, m->weights + w->shared_w2, N, H, I, NULL);
}

void moe_forward(struct model *m, int block, real *y, const real *residual, int N) {
    const struct config *c = &m->config;
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct activations *s = &m->acts;
    int H = c->hidden, E = c->experts, K = c->top_k, I = c->expert_intermediate, routes = N * K;
    if (c->shared_experts) shared_forward(m, block, N);
    moe_place(a->offsets, a->slot_of_row, a->row_of_slot, a->ids, N, K, E);
    moe_gather(a->rows, a->ffn_norm, a->slot_of_row, routes, K, H);
    grouped_matmul_nt(a->expert_gate_up, a->rows, m->weights + w->expert_w13, a->offsets, routes, E, 2 * I, H);
    swiglu_forward(s->expert_hidden, a->expert_gate_up, a->gates, a->slot_of_row, routes, I);
    grouped_matmul_nn(s->expert_rows, s->expert_hidden, m->weights + w->expert_w2, a->offsets, routes, E, H, I);
    moe_combine(y, s->expert_rows, a->row_of_slot, c->shared_experts ? s->shared_out : NULL, residual, N, K, H);
}

// shared_out = gradient of the normed input through the shared expert
static void shared_backward(struct model *m, int block, const real *dy, int N) {
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct activations *s = &m->acts;
    int H = m->config.hidden, I = config_shared_intermediate(&m->config);
    matmul_nt(s->d_hidden, dy, m->weights + w->shared_w2, N, I, H, NULL);
    swiglu_backward(s->d_gate_up, s->ffn_hidden, NULL, s->d_hidden, a->gate_up, NULL, NULL, N, I);
    matmul_tn(m->grads + w->shared_w2, s->ffn_hidden, dy, I, H, N);
    matmul_tn(m->grads + w->shared_w13, s->d_gate_up, a->ffn_norm, 2 * I, H, N);
    matmul_nn(s->shared_out, s->d_gate_up, m->weights + w->shared_w13, N, H, 2 * I, NULL);
}

void moe_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N) {
    const struct config *c = &m->config;
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct activations *s = &m->acts;
    int H = c->hidden, E = c->experts, K = c->top_k, I = c->expert_intermediate, routes = N * K;
    if (c->shared_experts) shared_backward(m, block, dy, N);
    moe_gather(s->d_rows, dy, a->slot_of_row, routes, K, H);
    grouped_matmul_nt(s->d_expert_hidden, s->d_rows, m->weights + w->expert_w2, a->offsets, routes, E, I, H);
    swiglu_backward(s->d_expert_gate_up, s->expert_hidden, d_gates, s->d_expert_hidden, a->expert_gate_up, a->gates,
                    a->slot_of_row, routes, I);
    grouped_matmul_tn(m->grads + w->expert_w2, s->expert_hidden, s->d_rows, a->offsets, routes, E, I, H);
    grouped_matmul_tn(m->grads + w->expert_w13, s->d_expert_gate_up, a->rows, a->offsets, routes, E, 2 * I, H);
    grouped_matmul_nn(s->expert_rows, s->d_expert_gate_up, m->weights + w->expert_w13, a->offsets, routes, E, H, 2 * I);
    moe_combine(dx, s->expert_rows, a->row_of_slot, c->shared_experts ? s->shared_out : NULL, NULL, N, K, H);
}
