#include "model/model.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "model/ffn.h"
#include "model/mla.h"
#include "model/moe.h"
#include "model/trace.h"

static size_t sums_bytes(const struct model *m) { return sizeof *m->sums * ((size_t)m->config.mtp_depth + 2); }

void model_open(struct model *m, const struct config *c, int batch, int seq, bool training,
                const struct parallel *parallel, const struct moe_settings *moe) {
    *m = (struct model){.config = *c, .parallel = parallel ? parallel : &parallel_alone};
    if (moe) m->moe = *moe;
    params_build_share(&m->params, c, parallel_experts(m->parallel, c->experts));
    m->weights = device_alloc(sizeof(real) * m->params.size);
    if (training) m->grads = device_alloc(sizeof(accum) * m->params.size);
    m->bias = device_alloc(sizeof(accum) * model_bias_size(c));
    m->counts = device_alloc(sizeof(int64_t) * model_bias_size(c));
    m->sums = device_alloc(sums_bytes(m));
    activations_alloc(
        &m->acts, c,
        (struct activation_use){batch, seq, training, m->moe.recompute, moe_header_bytes(c, &m->moe, m->parallel->ep)},
        m->parallel->group);
    m->ids = malloc(sizeof *m->ids * (size_t)batch * (size_t)seq);
    bool forced = m->moe.route != ROUTE_LEARNED && model_moe_blocks(c) > 0;
    if (forced) m->routes = malloc(sizeof *m->routes * (size_t)batch * (size_t)seq * (size_t)c->top_k);
    if (!m->ids || (forced && !m->routes)) fail_internal("model", "found no memory for %d x %d tokens", batch, seq);
    moe_open(m);
    struct scratch_sizes scratch = model_scratch_sizes(c, batch, seq, training);
    device_reserve_scratch(device_scratch_bytes(&scratch));
}

void model_close(struct model *m) {
    moe_close(m);
    free(m->routes);
    free(m->ids);
    activations_free(&m->acts);
    device_free(m->sums);
    device_free(m->counts);
    device_free(m->bias);
    device_free(m->grads);
    device_free(m->weights);
    params_free(&m->params);
    *m = (struct model){0};
}

struct router_shape model_router_shape(const struct config *c) {
    return (struct router_shape){c->experts, c->top_k, c->groups, c->top_groups, c->normalize_gates, c->route_scale};
}

struct scratch_sizes model_scratch_sizes(const struct config *c, int batch, int seq, bool training) {
    bool moe = model_moe_blocks(c) > 0;
    int width = c->hidden;
    if (width < c->q_rank) width = c->q_rank;
    if (width < c->kv_rank) width = c->kv_rank;
    struct scratch_sizes s = {.rows = batch * seq,
                              .width = width,
                              .hidden = c->hidden,
                              .experts = moe ? c->experts : 0,
                              .top_k = moe ? c->top_k : 0,
                              .sequences = batch};
    if (!training) return s;
    s.batch = batch;
    s.length = seq;
    s.heads = c->heads;
    s.nope_dim = c->nope_dim;
    s.rope_dim = c->rope_dim;
    s.value_dim = c->value_dim;
    return s;
}

void model_add_totals(struct step_totals *totals, const struct config *c, struct batch batch) {
    int columns = batch.T + 1 + c->mtp_depth;
    for (int b = 0; b < batch.B; b++)
        for (int k = 0; k <= c->mtp_depth; k++)
            for (int t = 0; t < batch.T; t++) totals->targets[k] += batch.tokens[(size_t)b * columns + t + k + 1] >= 0;
    totals->sequences += batch.B;
}

// heads[k].ids = the tokens k positions ahead of the input, for every k.
static void load_tokens(struct model *m, struct batch batch) {
    const struct activations *a = &m->acts;
    int D = m->config.mtp_depth, columns = batch.T + 1 + D;
    if (batch.T > a->seq || batch.B > a->batch)
        fail_internal("model", "found a batch of %d x %d tokens, wanted at most %d x %d", batch.B, batch.T, a->batch,
                      a->seq);
    m->first_token = batch.first * batch.T;
    size_t row = sizeof(int32_t) * (size_t)batch.T;
    for (int k = 0; k <= D + 1; k++) {
        for (int b = 0; b < batch.B; b++)
            memcpy(m->ids + (size_t)b * batch.T, batch.tokens + (size_t)b * columns + k, row);
        device_copy_in(a->heads[k].ids, m->ids, row * (size_t)batch.B);
    }
}

// ---- forward ----

static real *block_output(const struct model *m, int block) {
    const struct activations *a = &m->acts;
    if (block >= m->config.layers) return a->blocks[block].output;
    return block + 1 < m->config.layers ? a->blocks[block + 1].input : a->output;
}

// The tokens that a block's input stands for: those of the main model, or of an MTP depth.
static const int32_t *block_tokens(const struct model *m, int block) {
    int depth = block < m->config.layers ? 0 : block - m->config.layers + 1;
    return m->acts.heads[depth].ids;
}

static void block_forward(struct model *m, int block, int B, int T, bool count) {
    trace_set_block(m->trace, block);
    int begin = trace_mark(m->trace);
    mla_forward(m, block, B, T);
    trace_add_phase(m->trace, "attention forward", block, begin);
    ffn_forward(m, block, block_output(m, block), block_tokens(m, block), B, T, count);
    trace_set_block(m->trace, -1);
    m->computed = block;
}

// Layers and final norm: heads[0].normed.
static void layers_forward(struct model *m, int B, int T, bool count) {
    const struct config *c = &m->config;
    struct activations *a = &m->acts;
    int N = B * T, H = c->hidden;
    embedding_forward(a->blocks[0].input, m->weights + m->params.embedding, a->heads[0].ids, N, H);
    for (int l = 0; l < c->layers; l++) block_forward(m, l, B, T, count);
    rmsnorm_forward(a->heads[0].normed, H, a->heads[0].rstd, a->output, H, m->weights + m->params.final_norm, N, H,
                    c->rms_eps);
}

// The hidden state that MTP depth k (from 1) continues: after the final norm for the first, the block's output later.
static const real *mtp_hidden(const struct model *m, int k) {
    return k == 1 ? m->acts.heads[0].normed : m->acts.blocks[m->config.layers + k - 2].output;
}

// MTP depth k: heads[k].normed (V3 eq. 21 to 23).
static void mtp_forward(struct model *m, int k, int B, int T, bool count) {
    const struct config *c = &m->config;
    int block = c->layers + k - 1, N = B * T, H = c->hidden;
    const struct block_offsets *w = &m->params.blocks[block];
    struct block_activations *a = &m->acts.blocks[block];
    struct head_activations *head = &m->acts.heads[k];
    embedding_forward(a->embedded, m->weights + m->params.embedding, head->ids, N, H);
    rmsnorm_forward(a->concat, 2 * H, a->embedded_rstd, a->embedded, H, m->weights + w->enorm, N, H, c->rms_eps);
    rmsnorm_forward(a->concat + H, 2 * H, a->hidden_rstd, mtp_hidden(m, k), H, m->weights + w->hnorm, N, H, c->rms_eps);
    matmul_nt(a->input, a->concat, m->weights + w->eh_proj, N, H, 2 * H, NULL);
    block_forward(m, block, B, T, count);
    rmsnorm_forward(head->normed, H, head->rstd, a->output, H, m->weights + w->head_norm, N, H, c->rms_eps);
}

// Head and cross-entropy of heads[k], one chunk of logits at a time. With gradient: d_normed is written, the head's
// weight gradient added or stored, both multiplied by scale. The N losses stand behind those of the heads before it.
// All heads share one weight: the first chunk of the first one stores its gradient, a rank without tokens too (zeros).
static void head_loss(struct model *m, int k, int N, bool gradient, double scale) {
    struct activations *a = &m->acts;
    struct head_activations *head = &a->heads[k];
    const real *w = m->weights + m->params.head;
    accum *losses = a->losses + (size_t)k * (size_t)N;
    int H = m->config.hidden, V = m->config.vocab, begin = trace_mark(m->trace);
    for (int first = 0; first == 0 || first < N; first += a->logit_rows) {
        int rows = N - first < a->logit_rows ? N - first : a->logit_rows;
        const real *normed = head->normed + (size_t)first * H;
        matmul_nt(a->logits, normed, w, rows, V, H, NULL);
        cross_entropy(a->logits, losses + first, a->heads[k + 1].ids + first, rows, V, gradient, scale);
        if (!gradient) continue;
        matmul_nn(head->d_normed + (size_t)first * H, a->logits, w, rows, H, V, NULL);
        bool add = !m->first_use || k > 0 || first > 0;
        matmul_tn(m->grads + m->params.head, a->logits, normed, V, H, rows, add);
    }
    trace_add_phase(m->trace, "head", -1, begin);
}

// What the passes left in losses and balance. It stays on the device, so that the host need not wait for every micro-batch.
static void add_losses(const struct model *m, int B, int T) {
    const struct activations *a = &m->acts;
    int D = m->config.mtp_depth;
    size_t N = (size_t)B * (size_t)T;
    for (int k = 0; k <= D; k++) device_add_sum(&m->sums[k], a->losses + (size_t)k * N, N);
    device_add_sum(&m->sums[D + 1], a->balance, (size_t)model_moe_blocks(&m->config) * (size_t)B);
}

struct losses model_take_losses(struct model *m) {
    struct losses losses = {0};
    double sums[MTP_MAX + 2];
    int D = m->config.mtp_depth;
    device_copy_out(sums, m->sums, sums_bytes(m));
    device_zero(m->sums, sums_bytes(m));
    for (int k = 0; k <= D; k++) losses.cross_entropy[k] = sums[k];
    losses.balance = sums[D + 1];
    return losses;
}

// ---- backward ----

static void block_backward(struct model *m, int block, real *dx, int B, int T, int64_t sequences) {
    // The same bits once more; the routes have been counted.
    if (m->moe.recompute == RECOMPUTE_BLOCK && m->computed != block) block_forward(m, block, B, T, false);
    trace_set_block(m->trace, block);
    ffn_backward(m, block, dx, B, T, sequences);
    int begin = trace_mark(m->trace);
    mla_backward(m, block, dx, B, T);
    trace_add_phase(m->trace, "attention backward", block, begin);
    trace_set_block(m->trace, -1);
}

// MTP depth k. dx comes as the gradient of the module's output from depth k + 1 (if deeper) and leaves as the gradient
// of the hidden state it continues; for k = 1 that is added to heads[0].d_normed instead.
static void mtp_backward(struct model *m, int k, int B, int T, int64_t sequences) {
    const struct config *c = &m->config;
    int block = c->layers + k - 1, N = B * T, H = c->hidden;
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct activations *s = &m->acts;
    const struct head_activations *head = &s->heads[k];
    bool deeper = k < c->mtp_depth;
    rmsnorm_backward(s->dx, H, deeper, m->grads + w->head_norm, head->d_normed, H, a->output, H,
                     m->weights + w->head_norm, head->rstd, N, H);
    block_backward(m, block, s->dx, B, T, sequences);
    matmul_tn(m->grads + w->eh_proj, s->dx, a->concat, H, 2 * H, N, !m->first_use);
    matmul_nn(s->d_concat, s->dx, m->weights + w->eh_proj, N, 2 * H, H, NULL);
    rmsnorm_backward(s->d_norm, H, false, m->grads + w->enorm, s->d_concat, 2 * H, a->embedded, H,
                     m->weights + w->enorm, a->embedded_rstd, N, H);
    embedding_backward(m->grads + m->params.embedding, s->d_norm, head->ids, N, H);
    rmsnorm_backward(k == 1 ? s->heads[0].d_normed : s->dx, H, k == 1, m->grads + w->hnorm, s->d_concat + H, 2 * H,
                     mtp_hidden(m, k), H, m->weights + w->hnorm, a->hidden_rstd, N, H);
}

static void layers_backward(struct model *m, int B, int T, int64_t sequences) {
    const struct config *c = &m->config;
    const struct activations *a = &m->acts;
    int N = B * T, H = c->hidden;
    rmsnorm_backward(a->dx, H, false, m->grads + m->params.final_norm, a->heads[0].d_normed, H, a->output, H,
                     m->weights + m->params.final_norm, a->heads[0].rstd, N, H);
    for (int l = c->layers - 1; l >= 0; l--) block_backward(m, l, a->dx, B, T, sequences);
    embedding_backward(m->grads + m->params.embedding, a->dx, a->heads[0].ids, N, H);
}

// ---- passes ----

struct losses model_evaluate(struct model *m, struct batch batch) {
    int B = batch.B, T = batch.T, D = m->config.mtp_depth;
    load_tokens(m, batch);
    layers_forward(m, B, T, false);
    for (int k = 1; k <= D; k++) mtp_forward(m, k, B, T, false);
    for (int k = 0; k <= D; k++) head_loss(m, k, B * T, false, 0);
    device_zero(m->sums, sums_bytes(m));
    add_losses(m, B, T);
    return model_take_losses(m);
}

void model_score(struct model *m, struct batch batch, float *losses) {
    load_tokens(m, batch);
    layers_forward(m, batch.B, batch.T, false);
    head_loss(m, 0, batch.B * batch.T, false, 0);
    device_accum_to_float(losses, m->acts.losses, (size_t)batch.B * (size_t)batch.T);
}

// One stretch of neighbours at a time. Routed experts, of which some have no offset here, are all stored: none is in a
// stretch that is zeroed. Nothing but zeros is written to padding.
void model_begin_gradients(struct model *m) {
    const struct param *list = m->params.list;
    int count = m->params.count;
    for (int first = 0, end; first < count; first = end) {
        for (end = first + 1; end < count && list[end].stored == list[first].stored;) end++;
        if (list[first].stored) continue;
        size_t begin = list[first].offset, size = list[end - 1].offset + param_size(&list[end - 1]) - begin;
        device_zero(m->grads + begin, sizeof(accum) * size);
    }
    m->first_use = true;
}

void model_gradient(struct model *m, struct batch batch, const struct step_totals *totals) {
    int B = batch.B, T = batch.T, D = m->config.mtp_depth;
    load_tokens(m, batch);
    layers_forward(m, B, T, true);
    for (int k = 1; k <= D; k++) mtp_forward(m, k, B, T, true);
    for (int k = 0; k <= D; k++) {
        double weight = k == 0 ? 1 : m->config.mtp_weight / D;
        double targets = totals->targets[k] > 0 ? (double)totals->targets[k] : 1;
        head_loss(m, k, B * T, true, weight / targets);
    }
    for (int k = D; k >= 1; k--) mtp_backward(m, k, B, T, totals->sequences);
    layers_backward(m, B, T, totals->sequences);
    m->first_use = false;
    add_losses(m, B, T);
}

void model_logits(struct model *m, const int32_t *tokens, int T, int first, float *logits) {
    const struct activations *a = &m->acts;
    int H = m->config.hidden, V = m->config.vocab;
    if (T > a->seq) fail_internal("model", "found a sequence of %d tokens, wanted at most %d", T, a->seq);
    device_copy_in(a->heads[0].ids, tokens, sizeof(int32_t) * (size_t)T);
    m->first_token = 0;
    layers_forward(m, 1, T, false);
    for (int row = first; row < T; row += a->logit_rows) {
        int rows = T - row < a->logit_rows ? T - row : a->logit_rows;
        matmul_nt(a->logits, a->heads[0].normed + (size_t)row * H, m->weights + m->params.head, rows, V, H, NULL);
        device_real_to_float(logits + (size_t)(row - first) * V, a->logits, (size_t)rows * V);
    }
}
