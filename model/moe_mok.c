#include "model/moe_mok.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/fail.h"
#include "model/leader.h"
#include "model/moe.h"
#include "model/trace.h"

// ---- sizes ----

// A minibatch of at most `most` rows that divides the ring.
static int fit_minibatch(int most, int ring) {
    int blocks = mok_min(most, ring) / MOK_BLOCK_ROWS;
    while (ring / MOK_BLOCK_ROWS % blocks) blocks--;
    return blocks * MOK_BLOCK_ROWS;
}

int moe_mok_workers(const struct moe_settings *settings) {
    return settings->workers ? settings->workers : mok_default_workers();
}

// Rows are numbered by int: before any of them are.
static void check_capacity(const struct mok_shape *s) {
    if (mok_capacity_rows(s) <= INT_MAX / 2) return;
    fail_user(
        "--batch",
        "found %d tokens on each of %d ranks with --top-k %d, wanted less: %zu rows could meet on one rank; lower "
        "--batch or --seq",
        s->max_tokens, s->ranks, s->top_k, mok_capacity_rows(s));
}

static void check_workers(const struct moe_settings *settings) {
    int workers = moe_mok_workers(settings), most = mok_most_workers();
    if (workers > most)
        fail_user("--workers", "found %d, wanted at most %d (of a GPU, its multiprocessors); lower it or leave it out",
                  workers, most);
    if (settings->comm_workers >= workers)
        fail_user(
            "--comm-workers",
            "found %d with %d worker%s of a rank, wanted fewer, so that some multiply; lower it or raise --workers",
            settings->comm_workers, workers, workers == 1 ? "" : "s");
}

static void check_ranks(int ep) {
    int most = mok_most_ranks(), nearest = 1;
    if (ep <= most) return;
    for (int n = 2; n <= most; n++)
        if (ep % n == 0) nearest = n;
    fail_user("--ep", "found %d, wanted at most %d with --moe mok on this device; use --ep %d or --moe alltoall", ep,
              most, nearest);
}

static void check_rows(const struct mok_shape *s) {
    if (s->minibatch_rows % MOK_BLOCK_ROWS || s->ring_rows % s->minibatch_rows)
        fail_user("--ring-rows", "found %d with --minibatch-rows %d, wanted a multiple of it, and both of %d",
                  s->ring_rows, s->minibatch_rows, MOK_BLOCK_ROWS);
}

struct mok_shape moe_mok_shape(const struct config *c, int ep, int max_tokens, const struct moe_settings *settings) {
    int workers = moe_mok_workers(settings), m = c->expert_intermediate;
    check_workers(settings);
    check_ranks(ep);
    moe_check_widths(c, mok_column_unit(), "--moe mok", "--moe alltoall");
    struct mok_shape s = {.ranks = ep,
                          .experts = c->experts,
                          .top_k = c->top_k,
                          .hidden = c->hidden,
                          .intermediate = m,
                          .shared = config_shared_intermediate(c),
                          .max_tokens = max_tokens,
                          .minibatch_rows = settings->minibatch_rows,
                          .ring_rows = settings->ring_rows,
                          .lag = workers, // about one wave
                          .move_rows = mok_default_move_rows(c->hidden),
                          .replay = settings->recompute == RECOMPUTE_MOE};
    check_capacity(&s);
    if (!s.minibatch_rows) {
        s.minibatch_rows = mok_default_minibatch(m, workers);
        if (s.ring_rows >= MOK_BLOCK_ROWS) s.minibatch_rows = fit_minibatch(s.minibatch_rows, s.ring_rows);
    }
    if (!s.ring_rows) s.ring_rows = mok_default_ring(&s);
    check_rows(&s);
    return s;
}

// ---- memory ----

// Hands out device memory, or only counts it.
struct allocator {
    bool count_only;
    size_t bytes;
};

static void *take(struct allocator *a, size_t count, size_t size) {
    a->bytes += count * size;
    return a->count_only ? NULL : device_alloc(count * size);
}

static void take_workspace(struct allocator *a, struct mok_workspace *w, const struct mok_shape *s, bool training) {
    size_t R = (size_t)s->ring_rows, H = (size_t)s->hidden, I = (size_t)s->intermediate;
    size_t T = (size_t)s->max_tokens, S = (size_t)s->shared;
    *w = (struct mok_workspace){.hidden = take(a, R * I, sizeof(real)),
                                .out = take(a, mok_keeps_out() ? R * H : 0, sizeof(real)),
                                .shared_hidden = take(a, T * S, sizeof(real)),
                                .shared_out = take(a, S ? T * H : 0, sizeof(real)),
                                .counters = take(a, mok_counter_total(s), sizeof(int32_t))};
    if (!training) return;
    w->dy_rows = take(a, R * H, sizeof(real));
    w->d_gate_up = take(a, R * 2 * I, sizeof(real));
    w->partials = take(a, (size_t)mok_ceil(s->intermediate, MOK_PARTIAL_COLUMNS) * R, sizeof(accum));
    w->shared_d_gate_up = take(a, T * 2 * S, sizeof(real));
}

static void take_plan(struct allocator *a, struct mok_block *b, const struct mok_shape *s) {
    a->bytes += mok_plan_bytes(s);
    if (!a->count_only) mok_plan_alloc(&b->plan, s);
}

static void take_rows(struct allocator *a, struct mok_block *b, const struct mok_shape *s) {
    size_t R = (size_t)s->ring_rows;
    b->x_rows = take(a, R * (size_t)s->hidden, sizeof(real));
    b->gate_up = take(a, R * 2 * (size_t)s->intermediate, sizeof(real));
}

size_t moe_mok_bytes(const struct config *c, const struct mok_shape *s, bool training, enum recompute recompute) {
    struct allocator a = {.count_only = true};
    struct mok_workspace w;
    struct mok_block b;
    take_workspace(&a, &w, s, training);
    for (int i = 0; i < model_kept_routes(c, training, recompute); i++) take_plan(&a, &b, s);
    for (int i = 0; i < model_kept_rows(c, training, recompute); i++) take_rows(&a, &b, s);
    return a.bytes;
}

// Of threads: under sanitizers, or with many ranks on few cores, waits take longer than on a machine that has nothing
// else to do. On a GPU nothing else runs, and its waits have a bound of their own.
static double wait_seconds(struct comm *world) {
    const char *text = getenv("MOK_WAIT_SECONDS");
    char *end = "";
    double seconds = text ? strtod(text, &end) : 60;
    leader_begin(world);
    if (!(seconds > 0) || *end)
        fail_user("MOK_WAIT_SECONDS", "found '%s', wanted a number of seconds above zero; correct it or unset it",
                  text);
    leader_end(world);
    return seconds;
}

void moe_mok_open(struct model *m) {
    const struct config *c = &m->config;
    const struct parallel *p = m->parallel;
    bool training = m->grads != NULL;
    size_t blocks = (size_t)model_moe_blocks(c);
    struct moe_mok *l = m->mok = calloc(1, sizeof *l);
    if (l) l->blocks = calloc(blocks, sizeof *l->blocks);
    if (!l || !l->blocks) fail_internal("megakernel", "found no memory for %zu layers", blocks);
    l->shape = moe_mok_shape(c, p->ep, m->acts.batch * m->acts.seq, &m->moe);
    l->group = (struct mok_group){
        .rank = p->ep_rank, .ranks = p->ep, .base = (char *const *)m->acts.symm.peers, .timeout = comm_timeout()};
    l->crew = (struct mok_crew){.workers = moe_mok_workers(&m->moe),
                                .comm_workers = m->moe.comm_workers,
                                .timeout = wait_seconds(p->world),
                                .first_expert = parallel_first_expert(c->experts, p->ep, p->ep_rank)};
    mok_crew_open(&l->crew);
    struct allocator a = {0};
    take_workspace(&a, &l->work, &l->shape, training);
    size_t plans = (size_t)model_kept_routes(c, training, m->moe.recompute);
    size_t rows = (size_t)model_kept_rows(c, training, m->moe.recompute);
    for (size_t i = 0; i < blocks; i++) {
        l->blocks[i] = l->blocks[0];
        if (i < plans) take_plan(&a, &l->blocks[i], &l->shape);
        if (i < rows) take_rows(&a, &l->blocks[i], &l->shape);
    }
}

void moe_mok_close(struct model *m) {
    struct moe_mok *l = m->mok;
    struct mok_workspace *w = &l->work;
    for (int i = 0; i < model_kept_routes(&m->config, m->grads, m->moe.recompute); i++)
        mok_plan_free(&l->blocks[i].plan);
    for (int i = 0; i < model_kept_rows(&m->config, m->grads, m->moe.recompute); i++) {
        device_free(l->blocks[i].x_rows);
        device_free(l->blocks[i].gate_up);
    }
    void *all[] = {w->hidden,           w->out,        w->dy_rows, w->d_gate_up, w->partials, w->shared_hidden,
                   w->shared_d_gate_up, w->shared_out, w->counters};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(all[i]);
    mok_crew_close(&l->crew);
    free(l->blocks);
    free(l);
    m->mok = NULL;
}

// ---- passes ----

static struct mok_block *block_of(struct model *m, int block) {
    return &m->mok->blocks[block - m->config.dense_layers];
}

static struct mok_layer layer_of(struct model *m, int block) {
    const struct block_offsets *o = &m->params.blocks[block];
    const struct block_activations *a = &m->acts.blocks[block];
    const struct mok_block *b = block_of(m, block);
    bool shared = m->config.shared_experts > 0;
    struct mok_layer layer = {.x = a->ffn_norm,
                              .slots = m->acts.slots,
                              .w13 = m->weights + o->expert_w13,
                              .w2 = m->weights + o->expert_w2,
                              .shared_w13 = shared ? m->weights + o->shared_w13 : NULL,
                              .shared_w2 = shared ? m->weights + o->shared_w2 : NULL,
                              .x_rows = b->x_rows,
                              .gate_up = b->gate_up,
                              .shared_gate_up = a->gate_up};
    if (!m->grads) return layer;
    layer.d_w13 = m->grads + o->expert_w13;
    layer.d_w2 = m->grads + o->expert_w2;
    layer.d_shared_w13 = shared ? m->grads + o->shared_w13 : NULL;
    layer.d_shared_w2 = shared ? m->grads + o->shared_w2 : NULL;
    layer.first_use = m->first_use;
    return layer;
}

// One pass between its two barriers; in forward the plan comes first.
static void run(struct model *m, int block, const struct mok_layer *layer, enum mok_pass pass) {
    struct moe_mok *l = m->mok;
    const struct block_activations *a = &m->acts.blocks[block];
    struct mok_block *b = block_of(m, block);
    bool forward = pass == MOK_FORWARD;
    char before[64], after[64];
    snprintf(before, sizeof before, "before the %s pass of layer %d", forward ? "forward" : "backward", block);
    snprintf(after, sizeof after, "after the %s pass of layer %d", forward ? "forward" : "backward", block);
    l->crew.trace = m->trace;

    int begin = trace_mark(m->trace);
    mok_barrier(&l->group, before);
    trace_add_phase(m->trace, "barrier", block, begin);
    if (forward) {
        begin = trace_mark(m->trace);
        mok_plan_make(&b->plan, &l->shape, &l->group, a->ids, a->gates);
        trace_add_phase(m->trace, "plan", block, begin);
    }
    begin = trace_mark(m->trace);
    mok_run(&l->shape, &b->plan, &l->group, layer, &l->work, &l->crew, pass);
    trace_add_phase(m->trace, "megakernel", block, begin);
    begin = trace_mark(m->trace);
    mok_barrier(&l->group, after);
    trace_add_phase(m->trace, "barrier", block, begin);
}

void moe_mok_forward(struct model *m, int block, real *y, const real *residual, int N) {
    const struct config *c = &m->config;
    struct mok_layer layer = layer_of(m, block);
    mok_set_tokens(&m->mok->group, N);
    run(m, block, &layer, MOK_FORWARD);
    moe_sum_slots(y, layer.slots, m->acts.blocks[block].ids, c->shared_experts ? m->mok->work.shared_out : NULL,
                  residual, N, c->top_k, c->hidden);
}

void moe_mok_backward(struct model *m, int block, real *dx, accum *d_gates, const real *dy, int N) {
    const struct config *c = &m->config;
    struct mok_layer layer = layer_of(m, block);
    layer.dy = dy;
    layer.d_gates = d_gates;
    device_zero(d_gates, sizeof *d_gates * (size_t)N * (size_t)c->top_k); // what nobody pushes
    run(m, block, &layer, MOK_BACKWARD);
    moe_sum_slots(dx, layer.slots, m->acts.blocks[block].ids, c->shared_experts ? m->mok->work.shared_out : NULL, NULL,
                  N, c->top_k, c->hidden);
}
