#include "model/mla.h"

static const double INNER_NORM_EPS = 1e-6; // of the q and kv latents, whatever rms_eps is (as in released code)

static struct attention_shape shape_of(const struct config *c, int B, int T) {
    return (struct attention_shape){B, T, c->heads, c->nope_dim, c->rope_dim, c->value_dim, config_attention_scale(c)};
}

static void rotate_queries(const struct model *m, real *q, int N, int T, bool inverse) {
    const struct config *c = &m->config;
    int dq = config_query_dim(c);
    rope_rotate(q, c->heads * dq, c->heads, dq, c->nope_dim, c->rope_dim, m->acts.angles, N, T, inverse);
}

// The one rope key of a token stands behind its latent.
static void rotate_key(const struct model *m, real *kv_a, int N, int T, bool inverse) {
    const struct config *c = &m->config;
    rope_rotate(kv_a, c->kv_rank + c->rope_dim, 1, 0, c->kv_rank, c->rope_dim, m->acts.angles, N, T, inverse);
}

void mla_forward(struct model *m, int block, int B, int T) {
    const struct config *c = &m->config;
    const struct block_offsets *w = &m->params.blocks[block];
    struct block_activations *a = &m->acts.blocks[block];
    const real *weights = m->weights;
    int N = B * T, H = c->hidden, rq = c->q_rank, rk = c->kv_rank, kv_a_width = rk + c->rope_dim;
    int q_width = c->heads * config_query_dim(c), kv_width = c->heads * (c->nope_dim + c->value_dim);
    int o_width = c->heads * c->value_dim;

    rmsnorm_forward(a->attention_norm, H, a->attention_rstd, a->input, H, weights + w->input_norm, N, H, c->rms_eps);
    if (rq) {
        matmul_nt(a->q_a, a->attention_norm, weights + w->q_a, N, rq, H, NULL);
        rmsnorm_forward(a->q_a_norm, rq, a->q_a_rstd, a->q_a, rq, weights + w->q_a_norm, N, rq, INNER_NORM_EPS);
        matmul_nt(a->q, a->q_a_norm, weights + w->q_b, N, q_width, rq, NULL);
    } else {
        matmul_nt(a->q, a->attention_norm, weights + w->q, N, q_width, H, NULL);
    }
    rotate_queries(m, a->q, N, T, false);

    matmul_nt(a->kv_a, a->attention_norm, weights + w->kv_a, N, kv_a_width, H, NULL);
    rmsnorm_forward(a->latent, rk, a->latent_rstd, a->kv_a, kv_a_width, weights + w->kv_a_norm, N, rk, INNER_NORM_EPS);
    matmul_nt(a->kv, a->latent, weights + w->kv_b, N, kv_width, rk, NULL);
    rotate_key(m, a->kv_a, N, T, false);

    attention_forward(a->o, a->lse, a->q, a->kv, a->kv_a + rk, kv_a_width, shape_of(c, B, T));
    matmul_nt(a->middle, a->o, weights + w->o, N, H, o_width, a->input);
}

void mla_backward(struct model *m, int block, real *dx, int B, int T) {
    const struct config *c = &m->config;
    const struct block_offsets *w = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct activations *s = &m->acts;
    const real *weights = m->weights;
    accum *grads = m->grads;
    bool add = !m->first_use;
    int N = B * T, H = c->hidden, rq = c->q_rank, rk = c->kv_rank, kv_a_width = rk + c->rope_dim;
    int q_width = c->heads * config_query_dim(c), kv_width = c->heads * (c->nope_dim + c->value_dim);
    int o_width = c->heads * c->value_dim;

    matmul_nn(s->d_o, dx, weights + w->o, N, o_width, H, NULL);
    matmul_tn(grads + w->o, dx, a->o, H, o_width, N, add);
    attention_backward(s->d_q, s->d_kv, s->d_kv_a + rk, kv_a_width, s->d_o, a->q, a->kv, a->kv_a + rk, kv_a_width, a->o,
                       a->lse, shape_of(c, B, T));

    rotate_key(m, s->d_kv_a, N, T, true);
    matmul_nn(s->d_latent, s->d_kv, weights + w->kv_b, N, rk, kv_width, NULL);
    matmul_tn(grads + w->kv_b, s->d_kv, a->latent, kv_width, rk, N, add);
    rmsnorm_backward(s->d_kv_a, kv_a_width, false, grads + w->kv_a_norm, s->d_latent, rk, a->kv_a, kv_a_width,
                     weights + w->kv_a_norm, a->latent_rstd, N, rk);
    matmul_nn(s->d_norm, s->d_kv_a, weights + w->kv_a, N, H, kv_a_width, NULL);
    matmul_tn(grads + w->kv_a, s->d_kv_a, a->attention_norm, kv_a_width, H, N, add);

    rotate_queries(m, s->d_q, N, T, true);
    if (rq) {
        matmul_nn(s->d_q_a_norm, s->d_q, weights + w->q_b, N, rq, q_width, NULL);
        matmul_tn(grads + w->q_b, s->d_q, a->q_a_norm, q_width, rq, N, add);
        rmsnorm_backward(s->d_q_a, rq, false, grads + w->q_a_norm, s->d_q_a_norm, rq, a->q_a, rq, weights + w->q_a_norm,
                         a->q_a_rstd, N, rq);
        matmul_nn(s->d_norm, s->d_q_a, weights + w->q_a, N, H, rq, s->d_norm);
        matmul_tn(grads + w->q_a, s->d_q_a, a->attention_norm, rq, H, N, add);
    } else {
        matmul_nn(s->d_norm, s->d_q, weights + w->q, N, H, q_width, s->d_norm);
        matmul_tn(grads + w->q, s->d_q, a->attention_norm, q_width, H, N, add);
    }
    rmsnorm_backward(dx, H, true, grads + w->input_norm, s->d_norm, H, a->input, H, weights + w->input_norm,
                     a->attention_rstd, N, H);
}
