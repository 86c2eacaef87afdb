#include "model/ffn.h"

#include "model/moe.h"
#include "model/route.h"
#include "model/trace.h"

static void dense_forward(struct model *m, int block, real *out, int N) {
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    int H = m->config.hidden, I = m->config.intermediate, begin = trace_mark(m->trace);
    matmul_nt(a->gate_up, a->ffn_norm, m->weights + w->w13, N, 2 * I, H, NULL);
    swiglu_forward(m->acts.ffn_hidden, a->gate_up, NULL, NULL, N, I);
    matmul_nn(out, m->acts.ffn_hidden, m->weights + w->w2, N, H, I, a->middle);
    trace_add_phase(m->trace, "dense forward", block, begin);
}

// d_norm = gradient of the normed input
static void dense_backward(struct model *m, int block, real *d_norm, const real *dy, int N) {
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct activations *s = &m->acts;
    int H = m->config.hidden, I = m->config.intermediate, begin = trace_mark(m->trace);
    matmul_nt(s->d_hidden, dy, m->weights + w->w2, N, I, H, NULL);
    swiglu_backward(s->d_gate_up, s->ffn_hidden, NULL, s->d_hidden, a->gate_up, NULL, NULL, N, I);
    matmul_tn(m->grads + w->w2, s->ffn_hidden, dy, I, H, N, !m->first_use);
    matmul_tn(m->grads + w->w13, s->d_gate_up, a->ffn_norm, 2 * I, H, N, !m->first_use);
    matmul_nn(d_norm, s->d_gate_up, m->weights + w->w13, N, H, 2 * I, NULL);
    trace_add_phase(m->trace, "dense backward", block, begin);
}

// ids and gates from scores: by the router's choice, or forced.
static void choose(struct model *m, int block, const int32_t *tokens, int N) {
    const struct block_activations *a = &m->acts.blocks[block];
    struct router_shape shape = model_router_shape(&m->config);
    if (m->moe.route == ROUTE_LEARNED) {
        router_select(a->ids, a->gates, a->scores, model_bias(m, block), tokens, N, shape);
        return;
    }
    struct route_place place = {m->seed, m->step, block};
    route_fill(m->routes, m->moe.route, place, m->first_token, N, shape.experts, shape.top_k);
    device_copy_in(a->ids, m->routes, sizeof(int32_t) * (size_t)N * (size_t)shape.top_k);
    router_gates(a->ids, a->gates, a->scores, tokens, N, shape);
}

// Scores, choice, gates and balance losses of one block.
static void route(struct model *m, int block, const int32_t *tokens, int B, int T, bool count) {
    const struct config *c = &m->config;
    const struct block_activations *a = &m->acts.blocks[block];
    int N = B * T, begin = trace_mark(m->trace);
    router_score(a->scores, a->ffn_norm, m->weights + m->params.blocks[block].router, N, c->experts, c->hidden);
    choose(m, block, tokens, N);
    if (count) router_count(model_counts(m, block), a->ids, (size_t)N * (size_t)c->top_k, c->experts);
    accum *losses = m->acts.balance + (size_t)(block - c->dense_layers) * (size_t)B;
    router_balance(a->balance_f, losses, a->scores, tokens, B, T, model_router_shape(c));
    trace_add_phase(m->trace, "router forward", block, begin);
}

void ffn_forward(struct model *m, int block, real *out, const int32_t *tokens, int B, int T, bool count) {
    const struct config *c = &m->config;
    const struct block_activations *a = &m->acts.blocks[block];
    int N = B * T, H = c->hidden;
    rmsnorm_forward(a->ffn_norm, H, a->ffn_rstd, a->middle, H, m->weights + m->params.blocks[block].post_norm, N, H,
                    c->rms_eps);
    if (!config_is_moe(c, block)) {
        dense_forward(m, block, out, N);
        return;
    }
    route(m, block, tokens, B, T, count);
    moe_forward(m, block, out, a->middle, N);
}

void ffn_backward(struct model *m, int block, real *dx, int B, int T, int64_t sequences) {
    const struct config *c = &m->config;
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    real *d_norm = m->acts.d_norm;
    int N = B * T, H = c->hidden;
    if (config_is_moe(c, block)) {
        moe_backward(m, block, d_norm, m->acts.d_gates, dx, N);
        int begin = trace_mark(m->trace);
        router_backward(d_norm, m->grads + w->router, m->acts.d_scores, m->acts.d_gates, a->scores, a->ids,
                        a->balance_f, c->balance_alpha / (double)sequences, a->ffn_norm, m->weights + w->router, B, T,
                        H, model_router_shape(c));
        trace_add_phase(m->trace, "router backward", block, begin);
    } else {
        dense_backward(m, block, d_norm, dx, N);
    }
    rmsnorm_backward(dx, H, true, m->grads + w->post_norm, d_norm, H, a->middle, H, m->weights + w->post_norm,
                     a->ffn_rstd, N, H);
}
