// The MoE layer of either kind. Alone it is compared with the equations in FP64, and its gradients with central differences
// of them. Under mpirun every rank has its part of a global batch and some of the experts, and compares all that it gets,
// bit by bit, with what the all-to-all layer of one process alone gives for the whole batch.
//
// The bits would also show what others have reported: gradients of experts doubled or divided by the number of ranks
// (PyTorch issue 160285, MegaBlocks issues 86 and 20, DeepSpeed issue 5259), router gradients that are wrong under expert parallelism alone
// (transformers issue 48687), one gradient that is wrong among right ones (Liger pull 1413), outputs that are wrong for several experts per token or per rank (FlashMoE issue 18).
#include "tests/ranks.h"
#include "tests/reference.h"

#include "model/moe.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/route.h"

enum { MOST_RANKS = 8, BLOCKS = 2 };

static int teardown(void **state) {
    int overwritten = watch_teardown(state);
    if (comm_size(comm_world()) > 1) omp_set_num_threads(1);
    return ranks_meet(state) + overwritten;
}
#define layer_test(f) cmocka_unit_test_teardown(f, teardown)

static struct config config_of(int experts, int top_k, int shared) {
    return (struct config){.vocab = 16,
                           .hidden = 12,
                           .layers = BLOCKS,
                           .heads = 1,
                           .kv_rank = 2,
                           .nope_dim = 2,
                           .rope_dim = 2,
                           .value_dim = 2,
                           .intermediate = 1,
                           .expert_intermediate = 10,
                           .experts = experts,
                           .shared_experts = shared,
                           .top_k = top_k,
                           .groups = 1,
                           .top_groups = 1,
                           .max_positions = 4096,
                           .rms_eps = 1e-6,
                           .rope_theta = 10000};
}

// ---- a global batch ----

// Inputs of both blocks, for all tokens: [BLOCKS, tokens, ...]. Numbers are floats, exactly.
struct problem {
    struct config c;
    int tokens;
    double *x, *residual, *dy, *gates;
    int *ids;
    double *w13, *w2;               // [BLOCKS, E, 2m, H], [BLOCKS, E, m, H]
    double *shared_w13, *shared_w2; // [BLOCKS, 2Sm, H], [BLOCKS, Sm, H]
};

static struct problem make_problem(struct config c, int tokens) {
    uint64_t seed = 901;
    size_t n = (size_t)BLOCKS * (size_t)tokens, H = (size_t)c.hidden, K = (size_t)c.top_k;
    size_t routed = (size_t)BLOCKS * (size_t)c.experts * (size_t)c.expert_intermediate;
    size_t shared = (size_t)BLOCKS * (size_t)config_shared_intermediate(&c);
    struct problem p = {.c = c, .tokens = tokens};
    p.w13 = normals(2 * routed * H, 0.5, &seed);
    p.w2 = normals(routed * H, 0.5, &seed);
    p.shared_w13 = normals(2 * shared * H, 0.5, &seed);
    p.shared_w2 = normals(shared * H, 0.5, &seed);
    p.x = normals(n * H, 1, &seed);
    p.residual = normals(n * H, 1, &seed);
    p.dy = normals(n * H, 1, &seed);
    p.gates = normals(n * K, 1, &seed);
    p.ids = host_ints(n * K);
    return p;
}

// K different experts for every token.
static void route_at_random(struct problem *p) {
    uint64_t seed = 902;
    int K = p->c.top_k;
    for (int t = 0; t < BLOCKS * p->tokens; t++)
        for (int k = 0; k < K; k++) {
            int *ids = p->ids + t * K, i;
            do {
                ids[k] = random_below(p->c.experts, &seed);
                for (i = 0; ids[i] != ids[k]; i++) {}
            } while (i < k);
        }
}

// ---- one model's part of it ----

static void put_weights(struct model *m, const struct problem *p) {
    const struct config *c = &p->c;
    size_t H = (size_t)c->hidden, one = (size_t)c->expert_intermediate * H;
    size_t shared = (size_t)config_shared_intermediate(c) * H;
    struct expert_range here = parallel_experts(m->parallel, c->experts);
    size_t count = (size_t)(here.end - here.first) * one;
    for (int b = 0; b < BLOCKS; b++) {
        const struct block_offsets *w = &m->params.blocks[b];
        size_t first = ((size_t)b * (size_t)c->experts + (size_t)here.first) * one;
        device_copy_in(m->weights + w->expert_w13,
                       get_bytes(put_real(p->w13 + 2 * first, 2 * count), 2 * count * sizeof(real)),
                       2 * count * sizeof(real));
        device_copy_in(m->weights + w->expert_w2, get_bytes(put_real(p->w2 + first, count), count * sizeof(real)),
                       count * sizeof(real));
        if (shared == 0) continue;
        device_copy_in(
            m->weights + w->shared_w13,
            get_bytes(put_real(p->shared_w13 + (size_t)b * 2 * shared, 2 * shared), 2 * shared * sizeof(real)),
            2 * shared * sizeof(real));
        device_copy_in(m->weights + w->shared_w2,
                       get_bytes(put_real(p->shared_w2 + (size_t)b * shared, shared), shared * sizeof(real)),
                       shared * sizeof(real));
    }
}

static void poison_device(void *device, size_t bytes) {
    if (bytes == 0) return;
    void *poison = malloc(bytes);
    memset(poison, 0xff, bytes);
    device_copy_in(device, poison, bytes);
    free(poison);
}

static void poison_grown(struct grown g) { poison_device(g.memory, g.bytes); }

static void poison_mok(struct model *m, bool between) {
    struct moe_mok *l = m->mok;
    size_t R = (size_t)l->shape.ring_rows, T = (size_t)l->shape.max_tokens, H = (size_t)l->shape.hidden;
    size_t I = (size_t)l->shape.intermediate, S = (size_t)l->shape.shared;
    poison_device(l->work.hidden, sizeof(real) * R * I);
    poison_device(l->work.out, sizeof(real) * R * H);
    poison_device(l->work.dy_rows, sizeof(real) * R * H);
    poison_device(l->work.d_gate_up, sizeof(real) * R * 2 * I);
    poison_device(l->work.partials, sizeof(accum) * R * (size_t)mok_ceil((int)I, MOK_PARTIAL_COLUMNS));
    poison_device(l->work.shared_hidden, sizeof(real) * T * S);
    poison_device(l->work.shared_d_gate_up, sizeof(real) * T * 2 * S);
    if (S > 0) poison_device(l->work.shared_out, sizeof(real) * T * H);
    poison_device(l->work.counters, sizeof(int32_t) * mok_counter_total(&l->shape));
    comm_barrier(m->parallel->group); // slots are written by others
    poison_device(m->acts.slots, sizeof(real) * T * (size_t)l->shape.top_k * H);
    poison_device(m->acts.d_gates, sizeof(accum) * T * (size_t)l->shape.top_k);
    for (int b = 0; b < BLOCKS && !between; b++) {
        poison_device(l->blocks[b].x_rows, sizeof(real) * R * H);
        poison_device(l->blocks[b].gate_up, sizeof(real) * R * 2 * I);
        poison_device(l->blocks[b].plan.rows, mok_plan_bytes(&l->shape));
    }
    comm_barrier(m->parallel->group);
}

// What no pass may read before it writes it, symmetric memory included (Liger pull 1398, Axolotl pull 3827: gradients of
// several ranks are not finite, those of one are). between: the blocks keep what they have, for the backward pass.
static void poison_layer(struct model *m, bool between) {
    struct moe_alltoall *l = m->alltoall;
    if (m->mok) {
        poison_mok(m, between);
        return;
    }
    size_t routes = (size_t)m->acts.batch * (size_t)m->acts.seq * (size_t)m->config.top_k;
    struct grown shared[] = {l->moved, l->hidden, l->out, l->d_rows, l->d_hidden, l->d_gate_up, l->d_gates};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) poison_grown(shared[i]);
    if (l->ranks > 1) poison_device(l->sent, sizeof(real) * routes * (size_t)m->config.hidden);
    if (l->ranks > 1) poison_device(l->sent_gates, sizeof(accum) * routes);
    for (int b = 0; b < BLOCKS && !between; b++) {
        struct alltoall_block *kept = &l->blocks[b];
        struct grown grown[] = {kept->arrival_of_row, kept->row_of_arrival, kept->gates, kept->rows, kept->gate_up};
        for (size_t i = 0; i < sizeof grown / sizeof *grown; i++) poison_grown(grown[i]);
        poison_device(kept->slot_of_row, sizeof(int) * routes);
        poison_device(kept->row_of_slot, sizeof(int) * routes);
    }
}

// All-to-all in 1, 2 and 5 pieces, which is more than some ranks have experts; the megakernel as it is by default, with
// one worker in a ring of one minibatch, and with a worker that only moves rows.
static const struct moe_settings ways[] = {
    {.kind = MOE_ALLTOALL, .alltoall_chunks = 1},
    {.kind = MOE_ALLTOALL, .alltoall_chunks = 2},
    {.kind = MOE_ALLTOALL, .alltoall_chunks = 5},
    {.kind = MOE_MOK},
    {.kind = MOE_MOK, .workers = 1, .minibatch_rows = 128, .ring_rows = 128},
    {.kind = MOE_MOK, .workers = 3, .comm_workers = 1, .minibatch_rows = 128, .ring_rows = 256},
};

// Room for all tokens of the batch: symmetric memory is of one size on all ranks.
static void open_layer(struct model *m, const struct problem *p, const struct parallel *parallel,
                       const struct moe_settings *settings) {
    model_open(m, &p->c, 1, p->tokens > 0 ? p->tokens : 1, true, parallel, settings);
    put_weights(m, p);
    poison_device(m->grads, sizeof(accum) * m->params.size);
    m->first_use = true;
}

// Results of both blocks: [BLOCKS, tokens, ...]
struct results {
    real *y, *dx;
    accum *d_gates;
    int tokens;
};

static void put_inputs(struct model *m, const struct problem *p, int b, int first, int N) {
    const struct block_activations *a = &m->acts.blocks[b];
    size_t H = (size_t)p->c.hidden, K = (size_t)p->c.top_k, n = (size_t)N;
    size_t token = (size_t)b * (size_t)p->tokens + (size_t)first;
    if (N == 0) return;
    device_copy_in(a->ffn_norm, get_bytes(put_real(p->x + token * H, n * H), n * H * sizeof(real)),
                   n * H * sizeof(real));
    device_copy_in(a->gates, get_bytes(put_accum(p->gates + token * K, n * K), n * K * sizeof(accum)),
                   n * K * sizeof(accum));
    device_copy_in(a->ids, p->ids + token * K, n * K * sizeof(int32_t));
}

// Tokens first .. first + N - 1, forward; the results have room for what run_backward adds.
static struct results run_forward(struct model *m, const struct problem *p, int first, int N) {
    size_t H = (size_t)p->c.hidden, K = (size_t)p->c.top_k, n = (size_t)N;
    struct results r = {poisoned_real(BLOCKS * n * H), poisoned_real(BLOCKS * n * H), poisoned_accum(BLOCKS * n * K),
                        N};
    poison_layer(m, false);
    for (int b = 0; b < BLOCKS; b++) {
        const double *residual = p->residual + ((size_t)b * (size_t)p->tokens + (size_t)first) * H;
        put_inputs(m, p, b, first, N);
        moe_forward(m, b, r.y + (size_t)b * n * H, put_real(residual, n * H), N);
    }
    return r;
}

static void run_backward(struct results *r, struct model *m, const struct problem *p, int first) {
    size_t H = (size_t)p->c.hidden, K = (size_t)p->c.top_k, n = (size_t)r->tokens;
    poison_layer(m, true);
    for (int b = BLOCKS - 1; b >= 0; b--) {
        const double *dy = p->dy + ((size_t)b * (size_t)p->tokens + (size_t)first) * H;
        memcpy(m->acts.dx, put_real(dy, n * H), sizeof(real) * n * H);
        moe_backward(m, b, r->dx + (size_t)b * n * H, m->acts.d_gates, m->acts.dx, r->tokens);
        memcpy(r->d_gates + (size_t)b * n * K, m->acts.d_gates, sizeof(accum) * n * K);
    }
    m->first_use = false;
}

// Both blocks forward, then both backward.
static struct results run_layer(struct model *m, const struct problem *p, int first, int N) {
    struct results r = run_forward(m, p, first, N);
    run_backward(&r, m, p, first);
    return r;
}

// ---- alone: the equations in FP64 ----

// y of token t [H] without the residual.
static void expert_terms(double *y, const double *x, const double *w13, const double *w2, double gate, int I, int H) {
    for (int i = 0; i < I; i++) {
        double g = dot(w13 + (size_t)i * H, x, H), u = dot(w13 + (size_t)(I + i) * H, x, H);
        double hidden = gate * g * reference_sigmoid(g) * u;
        for (int h = 0; h < H; h++) y[h] += hidden * w2[(size_t)i * H + h];
    }
}

static void reference_token(double *y, const struct problem *p, int b, int t) {
    const struct config *c = &p->c;
    int H = c->hidden, I = c->expert_intermediate, K = c->top_k, Is = config_shared_intermediate(c);
    size_t one = (size_t)I * (size_t)H, token = (size_t)b * (size_t)p->tokens + (size_t)t;
    const double *x = p->x + token * (size_t)H;
    for (int h = 0; h < H; h++) y[h] = 0;
    for (int k = 0; k < K; k++) {
        int e = p->ids[token * (size_t)K + (size_t)k];
        size_t expert = ((size_t)b * (size_t)c->experts + (size_t)e) * one;
        if (e >= 0)
            expert_terms(y, x, p->w13 + 2 * expert, p->w2 + expert, p->gates[token * (size_t)K + (size_t)k], I, H);
    }
    size_t shared = (size_t)b * (size_t)Is * (size_t)H;
    expert_terms(y, x, p->shared_w13 + 2 * shared, p->shared_w2 + shared, 1, Is, H);
}

// <dy, y> over all tokens and blocks
static double reference_product_with_dy(const void *context) {
    const struct problem *p = context;
    int H = p->c.hidden;
    double y[64], sum = 0;
    for (int b = 0; b < BLOCKS; b++)
        for (int t = 0; t < p->tokens; t++) {
            reference_token(y, p, b, t);
            sum += dot(y, p->dy + ((size_t)b * (size_t)p->tokens + (size_t)t) * (size_t)H, H);
        }
    return sum;
}

static double *gradient_of(struct problem *p, double *values, size_t n) {
    return central_difference(values, n, 1, reference_product_with_dy, p);
}

// The products have at most H or 2m terms in a chain, an activation between, and sums over routes: the errors of each
// add up like their roots. 64 roundings leave a factor of a few.
static double layer_tolerance(void) { return gradient_roundings(64); }

// Gate rows, then up rows, of all experts' W13 [count, 2I, H] on their own: the errors of one cannot hide behind the
// other.
static void check_w13(const char *gate, const char *up, const accum *found, const double *wanted, size_t count,
                      size_t one) {
    double *all = get_accum(found, 2 * count * one);
    double *parts[4] = {host_doubles(count * one), host_doubles(count * one), host_doubles(count * one),
                        host_doubles(count * one)};
    for (size_t i = 0; i < count * one; i++) {
        size_t at = i / one * 2 * one + i % one;
        parts[0][i] = all[at], parts[1][i] = wanted[at];
        parts[2][i] = all[at + one], parts[3][i] = wanted[at + one];
    }
    assert_close(gate, parts[0], parts[1], count * one, layer_tolerance());
    assert_close(up, parts[2], parts[3], count * one, layer_tolerance());
}

static void check_against_equations(struct problem *p, const struct moe_settings *kind) {
    const struct config *c = &p->c;
    int H = c->hidden, N = p->tokens;
    size_t n = (size_t)N, one = (size_t)c->expert_intermediate * (size_t)H, E = (size_t)c->experts;
    size_t shared = (size_t)config_shared_intermediate(c) * (size_t)H, rows = BLOCKS * n * (size_t)H;
    struct model m;
    open_layer(&m, p, NULL, kind);
    struct results r = run_layer(&m, p, 0, N);
    double *y = host_doubles(rows);
    for (int b = 0; b < BLOCKS; b++)
        for (int t = 0; t < N; t++) reference_token(y + (b * N + t) * H, p, b, t);
    assert_real("y", r.y, added(y, p->residual, rows), rows, layer_tolerance());
    assert_real("dx", r.dx, gradient_of(p, p->x, rows), rows, layer_tolerance());
    size_t routes = BLOCKS * n * (size_t)c->top_k;
    assert_accum("d_gates", r.d_gates, gradient_of(p, p->gates, routes), routes, layer_tolerance());
    double *d_w13 = gradient_of(p, p->w13, BLOCKS * 2 * E * one), *d_w2 = gradient_of(p, p->w2, BLOCKS * E * one);
    double *d_s13 = gradient_of(p, p->shared_w13, BLOCKS * 2 * shared);
    double *d_s2 = gradient_of(p, p->shared_w2, BLOCKS * shared);
    for (size_t b = 0; b < BLOCKS; b++) {
        const struct block_offsets *w = &m.params.blocks[b];
        check_w13("dW gate", "dW up", m.grads + w->expert_w13, d_w13 + b * 2 * E * one, E, one);
        assert_accum("dW down", m.grads + w->expert_w2, d_w2 + b * E * one, E * one, layer_tolerance());
        if (shared == 0) continue;
        check_w13("dW gate, shared", "dW up, shared", m.grads + w->shared_w13, d_s13 + b * 2 * shared, 1, shared);
        assert_accum("dW down, shared", m.grads + w->shared_w2, d_s2 + b * shared, shared, layer_tolerance());
    }
    model_close(&m);
}

static void output_and_every_gradient_match_the_equations(void **state) {
    (void)state;
    if (comm_size(comm_world()) > 1) return;
    static const int shapes[][4] = {{11, 5, 3, 2}, {7, 8, 1, 0}, {9, 4, 4, 1}}; // tokens, E, K, shared
    for (int s = 0; s < 3; s++) {
        struct problem p = make_problem(config_of(shapes[s][1], shapes[s][2], shapes[s][3]), shapes[s][0]);
        route_at_random(&p);
        p.gates[3] = 0; // its gradient is not 0
        check_against_equations(&p, &ways[0]);
        check_against_equations(&p, &ways[3]);
        for (int i = 0; i < shapes[s][2]; i++) p.ids[2 * shapes[s][2] + i] = -1; // a token of no expert
        p.ids[4 * shapes[s][2]] = -1;                                            // and a single route
        check_against_equations(&p, &ways[0]);
        check_against_equations(&p, &ways[3]);
        watch_release();
    }
}

// Sums over eight large terms are made in accum (Transformer Engine issue 1336: the gradient of the unpermuted rows was off
// by 3.6).
static void eight_large_gates_match_the_equations(void **state) {
    (void)state;
    if (comm_size(comm_world()) > 1) return;
    struct problem p = make_problem(config_of(9, 8, 0), 2);
    route_at_random(&p);
    for (int i = 0; i < BLOCKS * p.tokens * 8; i++) p.gates[i] *= 64;
    check_against_equations(&p, &ways[0]);
    check_against_equations(&p, &ways[3]);
}

// ---- ranks against one process ----

// Tokens first .. first + N - 1 of the batch are this rank's.
struct share {
    int first, N;
};

static struct share share_of(const int *tokens_of_rank) {
    struct share s = {0, tokens_of_rank[comm_rank(comm_world())]};
    for (int r = 0; r < comm_rank(comm_world()); r++) s.first += tokens_of_rank[r];
    return s;
}

static int sum_tokens(const int *tokens_of_rank) {
    int sum = 0;
    for (int r = 0; r < comm_size(comm_world()); r++) sum += tokens_of_rank[r];
    return sum;
}

// A rank's part of [BLOCKS, tokens, width] elements, bit by bit.
static void check_part(const char *name, const void *found, const void *wanted, const struct problem *p, struct share s,
                       size_t width) {
    for (int b = 0; b < BLOCKS; b++) {
        size_t of_all = ((size_t)b * (size_t)p->tokens + (size_t)s.first) * width, bytes = (size_t)s.N * width;
        assert_same_bits(name, (const char *)found + (size_t)b * bytes, (const char *)wanted + of_all, bytes);
    }
}

static void check_results(struct results found, struct results wanted, const struct problem *p, struct share s) {
    size_t row = sizeof(real) * (size_t)p->c.hidden;
    check_part("y", found.y, wanted.y, p, s, row);
    check_part("dx", found.dx, wanted.dx, p, s, row);
    check_part("d_gates", found.d_gates, wanted.d_gates, p, s, sizeof(accum) * (size_t)p->c.top_k);
}

// Those of the shared expert are of this rank's tokens only: their sum over the ranks is compared.
static void check_shared_gradients(const struct model *m, const struct model *alone) {
    size_t H = (size_t)m->config.hidden, count = 3 * (size_t)config_shared_intermediate(&m->config) * H;
    for (int b = 0; b < BLOCKS && count > 0; b++) {
        double *found = host_doubles(count), *wanted = host_doubles(count);
        const struct block_offsets *w = &m->params.blocks[b], *of_alone = &alone->params.blocks[b];
        memcpy(found, get_accum(m->grads + w->shared_w13, 2 * count / 3), sizeof(double) * 2 * count / 3);
        memcpy(found + 2 * count / 3, get_accum(m->grads + w->shared_w2, count / 3), sizeof(double) * count / 3);
        memcpy(wanted, get_accum(alone->grads + of_alone->shared_w13, 2 * count / 3), sizeof(double) * 2 * count / 3);
        memcpy(wanted + 2 * count / 3, get_accum(alone->grads + of_alone->shared_w2, count / 3),
               sizeof(double) * count / 3);
        comm_sum_double(m->parallel->group, found, count);
        // Sums over some hundred tokens, taken in another order.
        assert_close("dW of the shared expert, all ranks", found, wanted, count, roundings(64));
    }
}

static void check_gradients(const struct model *m, const struct model *alone) {
    size_t one = (size_t)m->config.expert_intermediate * (size_t)m->config.hidden;
    struct expert_range here = parallel_experts(m->parallel, m->config.experts);
    for (int b = 0; b < BLOCKS; b++) {
        const struct block_offsets *w = &m->params.blocks[b], *of_alone = &alone->params.blocks[b];
        size_t first = (size_t)here.first * one, bytes = (size_t)(here.end - here.first) * one * sizeof(accum);
        assert_same_bits("dW gate and up", m->grads + w->expert_w13, alone->grads + of_alone->expert_w13 + 2 * first,
                         2 * bytes);
        assert_same_bits("dW down", m->grads + w->expert_w2, alone->grads + of_alone->expert_w2 + first, bytes);
    }
    check_shared_gradients(m, alone);
}

// Two micro-batches of the same tokens: gradients are stored, then added to; buffers have grown to their sizes and are
// poisoned the second time.
static void check_ranks(const struct problem *p, const int *tokens_of_rank) {
    struct parallel parallel;
    parallel_open(&parallel, comm_size(comm_world()), p->c.experts);
    struct share share = share_of(tokens_of_rank);
    struct model alone;
    open_layer(&alone, p, NULL, &ways[0]);
    struct results wanted[2];
    for (int i = 0; i < 2; i++) wanted[i] = run_layer(&alone, p, 0, p->tokens);
    for (size_t c = 0; c < sizeof ways / sizeof *ways; c++) {
        struct model m;
        open_layer(&m, p, &parallel, &ways[c]);
        for (int i = 0; i < 2; i++) check_results(run_layer(&m, p, share.first, share.N), wanted[i], p, share);
        check_gradients(&m, &alone);
        model_close(&m);
    }
    model_close(&alone);
    parallel_close(&parallel);
}

// Tokens of each of the ranks.
static const int even[MOST_RANKS] = {16, 16, 16, 16, 16, 16, 16, 16}, ragged[MOST_RANKS] = {5, 0, 17, 1, 0, 30, 2, 64};
static const int empty_first[MOST_RANKS] = {0, 8, 8, 8, 8, 8, 8, 8}, nothing[MOST_RANKS] = {0};
static const int one_rank[MOST_RANKS] = {20, 0, 0, 0, 0, 0, 0, 0};

static void random_routes_have_the_bits_of_one_process(void **state) {
    (void)state;
    // 8 experts on 3 ranks, 6 on 4, 13 on 6: shares that are not equal.
    static const int shapes[][3] = {{8, 2, 1}, {6, 3, 0}, {13, 1, 1}, {8, 8, 2}}; // E, K, shared
    for (int s = 0; s < 4; s++) {
        struct problem p = make_problem(config_of(shapes[s][0], shapes[s][1], shapes[s][2]), sum_tokens(even));
        route_at_random(&p);
        check_ranks(&p, even);
        watch_release();
    }
}

// Shares that are not equal, and tokens that are no multiple of any tile: refused elsewhere, where EP must divide the experts
// (torchtitan) or be 4 or a multiple and tokens a multiple of 256 (Mixture-of-Kittens).
static void sixty_four_experts_and_257_tokens_on_any_ranks(void **state) {
    (void)state;
    int ranks = comm_size(comm_world()), tokens[MOST_RANKS] = {0};
    for (int r = 0; r < ranks; r++) tokens[r] = 257 * (r + 1) / ranks - 257 * r / ranks;
    struct problem p = make_problem(config_of(64, 6, 1), 257);
    route_at_random(&p);
    check_ranks(&p, tokens);
}

// Both layers share one SwiGLU, so they agree where it saturates, too (a benchmark's other arm lacked a clamp that the
// Mixture-of-Kittens reference has).
static void activations_far_beyond_one_have_the_bits_of_one_process(void **state) {
    (void)state;
    struct problem p = make_problem(config_of(8, 2, 1), sum_tokens(even));
    route_at_random(&p);
    for (int i = 0; i < BLOCKS * p.tokens * p.c.hidden; i++) p.x[i] *= 256;
    check_ranks(&p, even);
}

// A rank without tokens hangs the others (Megatron-LM issue 4851, T = {0, 8}; torchtitan issue 1166).
static void ranks_without_tokens_serve_the_others(void **state) {
    (void)state;
    const int *tokens[] = {ragged, empty_first, one_rank};
    for (int i = 0; i < 3; i++) {
        struct problem p = make_problem(config_of(8, 2, 1), sum_tokens(tokens[i]));
        route_at_random(&p);
        check_ranks(&p, tokens[i]);
    }
}

// A batch without tokens on any rank: a null pointer in others (SGLang issue 38773).
static void no_rank_has_tokens(void **state) {
    (void)state;
    struct problem p = make_problem(config_of(6, 2, 1), 0);
    check_ranks(&p, nothing);
}

// A rank whose experts get nothing hangs or skips the exchange of the backward pass, so that its peers wait for ever
// (Megatron-LM pull 3626, issue 1877, Automodel issues 3680 and 935), and memory runs out on the rank that gets all (DeepEP issue 99).
static void all_routes_go_to_one_rank(void **state) {
    (void)state;
    for (int K = 1; K <= 2; K++) {
        struct problem p = make_problem(config_of(12, K, 1), sum_tokens(ragged));
        for (int i = 0; i < BLOCKS * p.tokens * K; i++)
            p.ids[i] = i / K < p.tokens ? i % K : 11 - i % K; // first, last rank
        check_ranks(&p, ragged);
    }
    int ranks = comm_size(comm_world());
    struct problem p = make_problem(config_of(8 * ranks, 8, 1), sum_tokens(even));
    for (int i = 0; i < BLOCKS * p.tokens * 8; i++) p.ids[i] = (i + i / 8) % 8; // all of the first rank's
    check_ranks(&p, even);
}

// Nothing goes from one rank to another in either direction: an exchange where one side of size zero is skipped and the
// other is not never ends (NCCL issue 788).
static void nothing_is_exchanged(void **state) {
    (void)state;
    struct problem p = make_problem(config_of(8, 1, 0), sum_tokens(even));
    int ranks = comm_size(comm_world());
    for (int t = 0; t < BLOCKS * p.tokens; t++) p.ids[t] = parallel_first_expert(8, ranks, t % p.tokens / 16);
    check_ranks(&p, even);
    // And only from the first rank to the last.
    struct problem q = make_problem(config_of(8, 1, 0), sum_tokens(one_rank));
    for (int t = 0; t < BLOCKS * q.tokens; t++) q.ids[t] = 7;
    check_ranks(&q, one_rank);
}

// -1 used as an index (FlashInfer issue 2643), and masked tokens that are routed nevertheless (torchtitan issue 4168).
static void masked_routes_go_nowhere_and_have_gradient_zero(void **state) {
    (void)state;
    struct problem p = make_problem(config_of(8, 3, 1), sum_tokens(ragged));
    route_at_random(&p);
    for (int t = 0; t < BLOCKS * p.tokens; t++)
        for (int k = 0; k < 3; k++)
            if (t % 3 == 0 || (t % 5 == 0 && k == t % 2)) p.ids[t * 3 + k] = -1, p.gates[t * 3 + k] = 0;
    check_ranks(&p, ragged);
    for (int i = 0; i < BLOCKS * p.tokens * 3; i++) p.ids[i] = -1;
    check_ranks(&p, ragged);

    struct model m;
    open_layer(&m, &p, NULL, &ways[0]);
    struct results r = run_layer(&m, &p, 0, p.tokens);
    const double *d_gates = get_accum(r.d_gates, (size_t)BLOCKS * (size_t)p.tokens * 3);
    for (int i = 0; i < BLOCKS * p.tokens * 3; i++) assert_true(d_gates[i] == 0);
    model_close(&m);
}

// Weight gradients that are wrong unless counts are multiples of a tile (Marin issue 8339 and pull 8793) or if a group is
// empty (Transformer Engine pull 2765), or that end in a hang behind an empty range of experts (Liger pull 1463): routes per
// expert as listed.
static void check_counts(const int *counts, int E) {
    int total = 0, ranks = comm_size(comm_world()), tokens_of_rank[MOST_RANKS] = {0};
    for (int e = 0; e < E; e++) total += counts[e];
    for (int r = 0; r < ranks; r++) tokens_of_rank[r] = total * (r + 1) / ranks - total * r / ranks;
    struct problem p = make_problem(config_of(E, 1, 0), total);
    for (int b = 0; b < BLOCKS; b++) {
        for (int e = 0, t = 0; e < E; e++)
            for (int i = 0; i < counts[e]; i++, t++) p.ids[b * total + (t * 101 + b) % total] = e; // 101: no divisor
    }
    check_ranks(&p, tokens_of_rank);
}

static void counts_of_any_size_are_exact(void **state) {
    (void)state;
    check_counts((int[]){1, 63, 65, 127, 129, 0}, 6);
    check_counts((int[]){0, 5, 0, 0, 130, 0, 1, 0}, 8);
    check_counts((int[]){128, 0, 64, 0, 0, 0}, 6);
}

static bool is_plus_zero(const accum *values, size_t n) {
    const double *v = get_accum(values, n);
    for (size_t i = 0; i < n; i++)
        if (v[i] != 0 || signbit(v[i])) return false;
    return true;
}

static void check_experts_without_rows(struct problem *p, const struct parallel *parallel,
                                       const struct moe_settings *way) {
    struct share share = share_of(even);
    struct expert_range here = parallel_experts(parallel, 8);
    size_t one = (size_t)p->c.expert_intermediate * (size_t)p->c.hidden;
    struct model m;
    open_layer(&m, p, parallel, way);
    for (int t = 0; t < BLOCKS * p->tokens; t++) p->ids[2 * t] = 0, p->ids[2 * t + 1] = 5;
    run_layer(&m, p, share.first, share.N);
    for (int e = here.first; e < here.end; e++) {
        size_t i = (size_t)(e - here.first) * one;
        bool idle = e != 0 && e != 5;
        assert_true(is_plus_zero(m.grads + m.params.blocks[1].expert_w2 + i, one) == idle);
        assert_true(is_plus_zero(m.grads + m.params.blocks[1].expert_w13 + 2 * i, 2 * one) == idle);
    }
    accum *before = get_bytes(m.grads, m.params.size * sizeof(accum));
    for (int t = 0; t < BLOCKS * p->tokens; t++) p->ids[2 * t] = 3, p->ids[2 * t + 1] = 6;
    run_layer(&m, p, share.first, share.N);
    for (int e = here.first; e < here.end; e++) {
        size_t at = m.params.blocks[1].expert_w2 + (size_t)(e - here.first) * one;
        bool same = memcmp(get_bytes(m.grads + at, one * sizeof(accum)), before + at, one * sizeof(accum)) == 0;
        assert_true(same == (e != 3 && e != 6));
    }
    model_close(&m);
}

// Gradients of experts without rows: zero at their first use in a step whatever was in memory (MSLK issue 158), and as
// they were when the step goes on.
static void experts_without_rows_store_zeros_and_then_keep_what_they_have(void **state) {
    (void)state;
    struct problem p = make_problem(config_of(8, 2, 0), sum_tokens(even));
    struct parallel parallel;
    parallel_open(&parallel, comm_size(comm_world()), 8);
    for (size_t c = 0; c < sizeof ways / sizeof *ways; c++) check_experts_without_rows(&p, &parallel, &ways[c]);
    parallel_close(&parallel);
}

// The routes that benchmarks force: balanced, hot experts, a hot rank, ragged numbers of tokens, experts and a rank without
// load, a hot spot that moves, a burst.
static void workloads_have_the_bits_of_one_process(void **state) {
    (void)state;
    static const int tokens[MOST_RANKS] = {48, 48, 48, 48, 48, 48, 48, 48};
    for (enum moe_route route = ROUTE_BALANCED; route <= ROUTE_W7; route++) {
        struct problem p = make_problem(config_of(16, 2, 1), sum_tokens(tokens));
        for (int b = 0; b < BLOCKS; b++)
            route_fill(p.ids + b * p.tokens * 2, route, (struct route_place){1, 7, b}, 0, p.tokens, 16, 2);
        check_ranks(&p, tokens);
        watch_release();
    }
}

static void check_ten_runs(const struct problem *p, const struct parallel *parallel, const struct moe_settings *way) {
    struct share share = share_of(even);
    struct model m;
    open_layer(&m, p, parallel, way);
    void *first[4] = {NULL};
    size_t rows = BLOCKS * (size_t)share.N;
    for (int i = 0; i < 10; i++) {
        m.first_use = true;
        struct results r = run_layer(&m, p, share.first, share.N);
        assert_same_as_first("y", &first[0], r.y, rows * (size_t)p->c.hidden * sizeof(real));
        assert_same_as_first("dx", &first[1], r.dx, rows * (size_t)p->c.hidden * sizeof(real));
        assert_same_as_first("d_gates", &first[2], r.d_gates, rows * (size_t)p->c.top_k * sizeof(accum));
        assert_same_as_first("dW", &first[3], m.grads + m.params.dense_size,
                             (m.params.size - m.params.dense_size) * sizeof(accum));
    }
    model_close(&m);
}

// A sum over slots in the order in which they come back varies from run to run (torchtitan issue 1974, imp issue 1546,
// FlashMoE issue 18).
static void ten_runs_have_the_same_bits(void **state) {
    (void)state;
    struct problem p = make_problem(config_of(8, 4, 1), sum_tokens(even));
    route_at_random(&p);
    struct parallel parallel;
    parallel_open(&parallel, comm_size(comm_world()), 8);
    check_ten_runs(&p, &parallel, &ways[1]);
    check_ten_runs(&p, &parallel, &ways[5]);
    parallel_close(&parallel);
}

// Two models of one process whose passes alternate: each has buffers, barriers and messages of its own (NCCL issue 522,
// SGLang issue 31117: two users of one communicator hang).
static void two_models_take_turns(void **state) {
    (void)state;
    struct problem p[2] = {make_problem(config_of(8, 2, 1), sum_tokens(even)),
                           make_problem(config_of(7, 3, 1), sum_tokens(ragged))};
    struct share share[2] = {share_of(even), share_of(ragged)};
    struct parallel parallel[2];
    struct model alone[2];
    struct results wanted[2], found[2];
    for (int i = 0; i < 2; i++) {
        route_at_random(&p[i]);
        parallel_open(&parallel[i], comm_size(comm_world()), p[i].c.experts);
        open_layer(&alone[i], &p[i], NULL, &ways[0]);
        wanted[i] = run_layer(&alone[i], &p[i], 0, p[i].tokens);
    }
    static const int pairs[][2] = {{4, 5}, {3, 1}, {2, 1}};
    for (int pair = 0; pair < 3; pair++) {
        struct model m[2];
        for (int i = 0; i < 2; i++) open_layer(&m[i], &p[i], &parallel[i], &ways[pairs[pair][i]]);
        for (int i = 0; i < 2; i++) found[i] = run_forward(&m[i], &p[i], share[i].first, share[i].N);
        for (int i = 0; i < 2; i++) run_backward(&found[i], &m[i], &p[i], share[i].first);
        for (int i = 0; i < 2; i++) {
            check_results(found[i], wanted[i], &p[i], share[i]);
            check_gradients(&m[i], &alone[i]);
            model_close(&m[i]);
        }
    }
    for (int i = 0; i < 2; i++) {
        model_close(&alone[i]);
        parallel_close(&parallel[i]);
    }
}

// ---- memory ----

static void the_plan_knows_what_is_allocated(void **state) {
    (void)state;
    struct config c = config_of(13, 3, 1);
    struct parallel parallel;
    parallel_open(&parallel, comm_size(comm_world()), 13);
    struct expert_range here = parallel_experts(&parallel, 13);
    for (int way = 0; way <= 3; way++) {
        struct model m;
        bool training = way > 0;
        struct moe_settings settings = ways[0];
        settings.recompute = training ? way - 1 : RECOMPUTE_NONE;
        model_open(&m, &c, 2, 21, training, &parallel, &settings);
        const struct moe_alltoall *l = m.alltoall;
        size_t routes = 2 * 21 * 3, ranks = (size_t)l->ranks, bytes = sizeof(int) * (13 + 14 + ranks * 14);
        if (ranks > 1) bytes += (sizeof(real) * (size_t)c.hidden + sizeof(accum)) * routes;
        struct grown shared[] = {l->moved, l->hidden, l->out, l->d_rows, l->d_hidden, l->d_gate_up, l->d_gates};
        for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) bytes += shared[i].bytes;
        for (int b = 0; b < l->kept_routes; b++) {
            const struct alltoall_block *k = &l->blocks[b];
            bytes +=
                k->arrival_of_row.bytes + k->row_of_arrival.bytes + k->gates.bytes + k->rows.bytes + k->gate_up.bytes;
            bytes += sizeof(int) * 2 * routes;
        }
        size_t planned = moe_alltoall_bytes(&c, parallel.ep, 2, 21, training, settings.recompute);
        if (here.end - here.first == (13 + parallel.ep - 1) / parallel.ep)
            assert_int_equal(bytes, planned);
        else
            assert_true(bytes < planned);
        model_close(&m);
    }
    parallel_close(&parallel);
    c.dense_layers = BLOCKS;
    assert_int_equal(moe_alltoall_bytes(&c, 1, 2, 21, true, RECOMPUTE_NONE), 0);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        layer_test(output_and_every_gradient_match_the_equations),
        layer_test(eight_large_gates_match_the_equations),
        layer_test(random_routes_have_the_bits_of_one_process),
        layer_test(sixty_four_experts_and_257_tokens_on_any_ranks),
        layer_test(activations_far_beyond_one_have_the_bits_of_one_process),
        layer_test(ranks_without_tokens_serve_the_others),
        layer_test(no_rank_has_tokens),
        layer_test(all_routes_go_to_one_rank),
        layer_test(nothing_is_exchanged),
        layer_test(masked_routes_go_nowhere_and_have_gradient_zero),
        layer_test(counts_of_any_size_are_exact),
        layer_test(experts_without_rows_store_zeros_and_then_keep_what_they_have),
        layer_test(workloads_have_the_bits_of_one_process),
        layer_test(ten_runs_have_the_same_bits),
        layer_test(two_models_take_turns),
        layer_test(the_plan_knows_what_is_allocated),
    };
    ranks_start(argc, argv);
    if (comm_size(comm_world()) > 1) omp_set_num_threads(1);
    return ranks_stop(cmocka_run_group_tests(tests, NULL, NULL));
}
