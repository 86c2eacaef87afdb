// Speed of the MoE layer alone, from the router's output to the layer's output, and with --backward from dy to dx and
// all gradients: the megakernel beside its own work by kernels one after the other (unfused), the layer of all-to-all
// exchanges, whole and in parts, and the grouped products alone, which are its ceiling. Each --with adds the megakernel
// with other settings. Started alone or by mpirun, one rank for each GPU: one EP group. scripts/bench_layer.py does the
// same by torch and NCCL, scripts/sweep.py tries settings.
//
// Passes: forward; backward, which stores the gradients of weights, as the first one of a step does; backward-add, which
// adds them to what is there, as those that follow; fwd+bwd, both in one interval, stored. Of products: gate-up and down,
// "both" of them; d-hidden, d-x, d-w2 and d-w13 (stored, FP32), all "four" of them.
//
// Each turn of an arm is a burst (after 60 ms in which the GPU did nothing) or sustained (after 100 ms of that arm,
// when power limits the clock). Arms take turns A/B/C/C/B/A. A pass begins when all ranks have come to it; its time is
// that of the slowest rank. ms is the median, p10 and p90 stand beside it. Inputs are random, of several sets in turn.
//
// Operations are 6 H (I routes + S tokens), backward twice as many, both passes three times, of the mean rank; of
// products alone those of the busiest: 2 H I for each of its rows, of gate-up, d-x and d-w13 twice as many. "busiest" is
// its rows over the mean. A share is of the tensor cores' peak, at the clock that stands beside it, or as the maker gives
// it.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/comm.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"
#include "model/leader.h"
#include "model/model.h"
#include "model/moe.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/trace.h"
#include "tests/bench_layer.h"
#include "tests/bench_layer_inputs.h"
#include "tests/bench_layer_table.h"

enum { IDLE_MS = 60, LOAD_MS = 100, MOST_PASSES = 10, SPANS = 1 << 14 };
static const int passes_of_turn[LOADS] = {4, 10};

// ---- the layer, and the arms ----

// One MoE layer, and next to nothing else.
static struct config config_of(const struct layer_shape *s) {
    enum { VOCABULARY = 16, HEAD = 64 };
    return (struct config){.vocab = VOCABULARY,
                           .hidden = s->H,
                           .layers = 1,
                           .heads = 1,
                           .kv_rank = HEAD,
                           .nope_dim = HEAD,
                           .rope_dim = HEAD,
                           .value_dim = HEAD,
                           .intermediate = s->I,
                           .expert_intermediate = s->I,
                           .experts = s->E,
                           .shared_experts = s->S / s->I,
                           .top_k = s->K,
                           .groups = 1,
                           .top_groups = 1,
                           .route_scale = 1,
                           .max_positions = s->T,
                           .rms_eps = 1e-6,
                           .rope_theta = 10000};
}

// Why what they name cannot run here; NULL: it can. S is some I wide.
static const char *why_no_megakernel(const struct bench *b) {
    int unit = mok_column_unit();
    if (!mok_available()) return "this build has no megakernel";
    if (b->parallel.ep > mok_most_ranks()) return "the megakernel takes fewer ranks";
    if (b->shape.H % unit || b->shape.I % unit) return "the megakernel does not take H and I of this shape";
    return NULL;
}

static const char *why_no_products(const struct bench *b, enum grouped_core core) {
    int unit = grouped_matmul_unit(core);
    if (!grouped_matmul_available(core)) return "this build does not have these products";
    if (b->shape.H % unit || b->shape.I % unit) return "these products do not take H and I of this shape";
    return NULL;
}

static const char *why_not(const struct bench *b, const struct arm_type *t) {
    const char *why = t->kind == ARM_MOK ? why_no_megakernel(b) : why_no_products(b, t->core);
    if (why) return why;
    if (t->unfused && !unfused_available()) return "this build has no kernels for it";
    if (t->chunks && b->parallel.ep == 1) return "one rank exchanges nothing";
    return NULL;
}

// The model is opened for all input sets, the layers of the arms for one.
static void open_model(struct bench *b) {
    struct config c = config_of(&b->shape);
    struct moe_settings settings = {.kind = why_no_megakernel(b) ? MOE_ALLTOALL : MOE_MOK, .alltoall_chunks = 1};
    model_open(&b->model, &c, SETS, b->shape.T, b->options->backward, &b->parallel, &settings);
    moe_close(&b->model);
    b->model.acts.batch = 1;
    b->model.first_use = true;
    b->first = b->model.acts.blocks[0];
}

static void open_products(struct bench *b) {
    const struct layer_shape *s = &b->shape;
    struct expert_range here = parallel_experts(&b->parallel, s->E);
    size_t most = 1, H = (size_t)s->H, I = (size_t)s->I;
    for (int i = 0; i < SETS; i++) {
        size_t rows = (size_t)b->offsets[i][here.end - here.first];
        if (rows > most) most = rows;
    }
    int hidden_rows = (int)((most * I + H - 1) / H); // as many numbers as rows of I, in rows of H
    b->rows = device_alloc(sizeof(real) * most * H);
    b->gate_up = device_alloc(sizeof(real) * most * 2 * I);
    b->hidden = device_alloc(sizeof(real) * (size_t)hidden_rows * H);
    b->out = device_alloc(sizeof(real) * most * H);
    if (b->options->backward) {
        b->d_hidden = device_alloc(sizeof(real) * most * I);
        b->d_x = device_alloc(sizeof(real) * most * H);
    }
    real *pool = pool_make(s->H, 1, 13);
    fill_rows(b->rows, pool, (int)most, s->H, 1);
    fill_rows(b->hidden, pool, hidden_rows, s->H, 2);
    device_free(pool);
}

// Which workers only move rows is said again before every pass.
static bool has_same_layer(const struct arm *a, const struct arm *b) {
    struct moe_settings x = a->model.moe, y = b->model.moe;
    if (a->type->kind != b->type->kind) return false;
    x.comm_workers = y.comm_workers = 0;
    return a->type->kind == ARM_MOK ? same_settings(x, y) : x.alltoall_chunks == y.alltoall_chunks;
}

// The layer's own memory is shared too by arms that differ in nothing it depends on.
static void open_layer(struct bench *b, struct arm *a, struct moe_settings with) {
    const struct arm_type *t = a->type;
    a->model = b->model;
    a->model.moe = with;
    a->model.moe.kind = t->kind == ARM_MOK ? MOE_MOK : MOE_ALLTOALL;
    a->model.moe.alltoall_chunks = t->chunks ? b->options->chunks : 1;
    a->model.moe.expert_gemm = t->core;
    if (t->kind == ARM_PRODUCTS) return;
    if (t->kind == ARM_MOK) {
        leader_begin(b->parallel.world);
        moe_mok_shape(&a->model.config, b->parallel.ep, b->shape.T, &a->model.moe);
        leader_end(b->parallel.world);
    }
    for (struct arm *other = b->arms; other < a && !a->model.mok && !a->model.alltoall; other++) {
        if (!has_same_layer(other, a)) continue;
        a->model.mok = other->model.mok;
        a->model.alltoall = other->model.alltoall;
    }
    a->owner = !a->model.mok && !a->model.alltoall;
    if (a->owner) moe_open(&a->model);
}

// The layer works on an input set.
static void choose_set(const struct bench *b, struct model *m, int set) {
    size_t H = (size_t)b->shape.H, K = (size_t)b->shape.K, at = (size_t)set * (size_t)b->shape.T;
    struct block_activations *now = &m->acts.blocks[0];
    now->ffn_norm = b->first.ffn_norm + at * H;
    now->ids = b->first.ids + at * K;
    now->gates = b->first.gates + at * K;
    if (m->mok) m->mok->crew.comm_workers = m->moe.comm_workers;
}

// All megakernels meet in the same symmetric memory: each goes on with the count of barriers of the one before, or it would
// take their arrivals for those at its own. (A GPU keeps that count in this memory.)
static void go_on_counting(const struct bench *b, struct model *m) {
    if (m->mok) m->mok->group.epoch = b->barriers;
}

static void keep_count(struct bench *b, const struct model *m) {
    if (m->mok) b->barriers = m->mok->group.epoch;
}

static void forward(struct bench *b, struct model *m, int set, bool unfused) {
    choose_set(b, m, set);
    go_on_counting(b, m);
    if (unfused)
        unfused_forward(m, &b->unfused[set], &b->unfused_rows, b->options->pull_warps, m->acts.output, b->shape.T);
    else
        moe_forward(m, 0, m->acts.output, NULL, b->shape.T);
    keep_count(b, m);
}

static bool has_backward(const struct bench *b, const struct arm *a) {
    return b->options->backward && a->type->kind != ARM_PRODUCTS;
}

// Of the input set that went forward.
static void backward(struct bench *b, struct model *m, int set, bool unfused, bool add) {
    size_t H = (size_t)b->shape.H, K = (size_t)b->shape.K, at = (size_t)set * (size_t)b->shape.T;
    const real *dy = m->acts.dx + at * H;
    accum *d_gates = m->acts.d_gates + at * K;
    m->first_use = !add;
    go_on_counting(b, m);
    if (unfused)
        unfused_backward(m, &b->unfused[set], &b->unfused_rows, b->options->pull_warps, m->acts.d_norm, d_gates, dy,
                         b->shape.T);
    else
        moe_backward(m, 0, m->acts.d_norm, d_gates, dy, b->shape.T);
    keep_count(b, m);
}

// ---- that unfused kernels have the megakernel's results ----

enum { RESULTS = 7 };
struct result {
    const char *name;
    const real *reals; // NULL: they are sums
    const accum *sums;
    size_t count;
    float *wanted; // host [count] the megakernel's
};

// What forward leaves, y, and what both passes leave: dx, the gates' gradients and those of the first and the shared
// expert's weights too. Returns how many there are.
static int results_of(const struct bench *b, const struct model *m, int set, bool both,
                      struct result results[RESULTS]) {
    const struct block_offsets *o = &m->params.blocks[0];
    const struct activations *acts = &m->acts;
    const accum *grads = m->grads;
    size_t T = (size_t)b->shape.T, H = (size_t)b->shape.H, I = (size_t)b->shape.I, K = (size_t)b->shape.K;
    size_t S = (size_t)b->shape.S;
    results[0] = (struct result){"y", acts->output, NULL, T * H, NULL};
    if (!both) return 1;
    results[1] = (struct result){"dx", acts->d_norm, NULL, T * H, NULL};
    results[2] = (struct result){"d gates", NULL, acts->d_gates + (size_t)set * T * K, T * K, NULL};
    results[3] = (struct result){"d W2", NULL, grads + o->expert_w2, I * H, NULL};
    results[4] = (struct result){"d W13", NULL, grads + o->expert_w13, 2 * I * H, NULL};
    if (!S) return 5;
    results[5] = (struct result){"d shared W2", NULL, grads + o->shared_w2, S * H, NULL};
    results[6] = (struct result){"d shared W13", NULL, grads + o->shared_w13, 2 * S * H, NULL};
    return 7;
}

static float *read_result(const struct result *r) {
    float *values = host_alloc(r->count, sizeof *values);
    if (r->reals)
        device_real_to_float(values, r->reals, r->count);
    else
        device_accum_to_float(values, r->sums, r->count);
    return values;
}

// Norm of the difference over the norm of what is wanted.
static double relative_error(const float *found, const float *wanted, size_t count) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        double off = (double)found[i] - wanted[i];
        error += off * off;
        norm += (double)wanted[i] * wanted[i];
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

// It has the megakernel's bits.
static void check_result(const struct result *r, int set) {
    float *found = read_result(r);
    double error = relative_error(found, r->wanted, r->count);
    free(found);
    if (!(error <= 0))
        fail_internal("unfused",
                      "found %s of input set %d off the megakernel's by %g of its norm, wanted the same bits", r->name,
                      set, error);
}

// All input sets by the megakernel, in both passes or in forward alone, and its plans. Returns in how many of all ranks'
// passes there were several macrobatches.
static int64_t run_sets_fused(struct bench *b, struct arm *a, bool both, struct result wanted[SETS][RESULTS]) {
    struct model *m = &a->model;
    int64_t several = 0;
    for (int i = 0; i < SETS; i++) {
        forward(b, m, i, false);
        if (both) backward(b, m, i, false, false);
        several += unfused_plan_open(&b->unfused[i], m->mok) > 1;
        int count = results_of(b, m, i, both, wanted[i]);
        for (int r = 0; r < count; r++) wanted[i][r].wanted = read_result(&wanted[i][r]);
    }
    comm_sum_int64(b->parallel.world, &several, 1);
    return several;
}

// What a pass finds in memory is of another input set.
static void check_sets_unfused(struct bench *b, struct model *m, bool both, struct result wanted[SETS][RESULTS]) {
    for (int i = 0; i < SETS; i++) {
        forward(b, m, i, true);
        if (both) backward(b, m, i, true, false);
        for (int r = 0; r < RESULTS && wanted[i][r].wanted; r++) check_result(&wanted[i][r], i);
    }
}

// Whether every rank's rows fit into its ring.
static bool open_unfused(struct bench *b, struct arm *a) {
    struct result wanted[SETS][RESULTS] = {0};
    bool both = has_backward(b, a);
    bool fits = run_sets_fused(b, a, both, wanted) == 0;
    if (fits) {
        unfused_rows_open(&b->unfused_rows, &a->model.mok->shape, b->options->backward);
        check_sets_unfused(b, &a->model, both, wanted);
    }
    for (int i = 0; i < SETS; i++)
        for (int r = 0; r < RESULTS; r++) free(wanted[i][r].wanted);
    return fits;
}

static void close_unfused(struct bench *b) {
    for (int i = 0; i < SETS; i++) unfused_plan_close(&b->unfused[i]);
    unfused_rows_close(&b->unfused_rows);
}

// ---- opening ----

static void open_samples(struct arm *a, int most) {
    for (int l = 0; l < LOADS; l++)
        for (int m = 0; m < MEASURES; m++) a->samples[l].seconds[m] = host_alloc((size_t)most, sizeof(double));
}

static int rounds_of(const struct options *o, enum load load) {
    int both = 2 * passes_of_turn[load]; // a round has two turns of every arm
    return (o->iterations + both - 1) / both;
}

static void name_arm(struct arm *a, const struct options *o) {
    const struct arm_type *t = a->type;
    int number = t->chunks ? o->chunks : t->unfused ? o->pull_warps : 0;
    bool plain = number == 0 || (t->unfused && number == UNFUSED_WARPS);
    snprintf(a->name, sizeof a->name, plain ? "%s" : "%s-%d", t->name, number);
}

static void name_arm_of_with(struct arm *a, struct moe_settings with) {
    size_t length = (size_t)snprintf(a->name, sizeof a->name, "%s", a->type->name);
    const char *before = " ";
    for (int i = 0; i < SETTINGS; i++) {
        int value = *setting_of(&with, i);
        if (!value) continue;
        length +=
            (size_t)snprintf(a->name + length, sizeof a->name - length, "%s%s=%d", before, setting_names[i], value);
        before = ",";
    }
}

// Why it cannot run here after all; NULL: it can. with: NULL but of --with
static const char *open_arm(struct bench *b, struct arm *a, const struct arm_type *t, const struct moe_settings *with) {
    *a = (struct arm){.type = t, .with = with != NULL};
    if (with)
        name_arm_of_with(a, *with);
    else
        name_arm(a, b->options);
    if (t->kind == ARM_PRODUCTS && !b->rows) open_products(b);
    open_layer(b, a, with ? *with : (struct moe_settings){0});
    if (!t->unfused || open_unfused(b, a)) return NULL;
    close_unfused(b);
    if (a->owner) moe_close(&a->model);
    *a = (struct arm){0};
    return "it takes one macrobatch, and a rank has more rows than its ring";
}

static void add_arm(struct bench *b, const struct arm_type *t, const struct moe_settings *with) {
    int most = 2 * MOST_PASSES * (rounds_of(b->options, BURST) + rounds_of(b->options, SUSTAINED));
    const char *why = why_not(b, t);
    if (!why) why = open_arm(b, &b->arms[b->arm_count], t, with);
    if (!why)
        open_samples(&b->arms[b->arm_count++], most);
    else if (is_leader(b))
        printf("%s%s is left out: %s\n", t->name, with ? " of --with" : "", why);
}

// Those of --with beside mok.
static void open_arms(struct bench *b) {
    const struct options *o = b->options;
    for (int i = 0; i < ARMS; i++) {
        const struct arm_type *t = &arm_types[i];
        if (o->arms[i]) add_arm(b, t, NULL);
        for (int w = 0; w < o->with_count && t == type_of_with; w++) add_arm(b, t, &o->with[w]);
    }
}

static void bench_open(struct bench *b) {
    int ranks = comm_size(comm_world());
    leader_begin(comm_world());
    if (ranks > b->shape.E)
        fail_user("--shape", "found %d experts for %d ranks, wanted one for each at least", b->shape.E, ranks);
    leader_end(comm_world());
    parallel_open(&b->parallel, ranks, b->shape.E);
    b->meeting = device_alloc((size_t)MEETING_BYTES * ((size_t)ranks + 1));
    open_model(b);
    fill(b);
    route(b);
    open_arms(b);
}

static void bench_close(struct bench *b) {
    for (struct arm *a = b->arms; a < b->arms + b->arm_count; a++) {
        if (a->owner) moe_close(&a->model);
        for (int l = 0; l < LOADS; l++)
            for (int m = 0; m < MEASURES; m++) free(a->samples[l].seconds[m]);
    }
    void *device[] = {b->rows, b->gate_up, b->hidden, b->out, b->d_hidden, b->d_x, b->meeting};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++) device_free(device[i]);
    close_unfused(b);
    for (int i = 0; i < SETS; i++) free(b->offsets[i]);
    model_close(&b->model);
    parallel_close(&b->parallel);
}

// ---- one pass ----

// Until all ranks' devices are here; the host goes on.
static void meet(const struct bench *b) {
    int ranks = b->parallel.ranks;
    char *mine = b->meeting + (size_t)MEETING_BYTES * ranks;
    if (ranks > 1) comm_gather_device(b->parallel.world, b->meeting, mine, MEETING_BYTES);
}

static int mark_if(bool timed) { return timed ? device_mark() : -1; }

static void trace_if(const struct bench *b, enum measure pass) {
    operation_trace = b->traced == pass ? b->trace : NULL;
}

// Kinds and input sets take turns, but not in step: each kind meets every set.
static enum kind next_kind(struct arm *a) {
    int number = a->passes++;
    return (enum kind)((number + number / SETS) % KINDS);
}

// Between the passes of the last kind there is no meeting.
static void pass_layer(struct bench *b, struct arm *a, int set, bool timed, struct interval *out) {
    static const enum measure backward_of_kind[KINDS] = {
        [STORES] = BACKWARD, [ADDS] = BACKWARD_ADD, [JOINED] = FORWARD_BACKWARD};
    bool both = has_backward(b, a);
    enum kind kind = !both || b->trace ? STORES : next_kind(a);
    meet(b);
    trace_if(b, FORWARD);
    int begin = mark_if(timed);
    forward(b, &a->model, set, a->type->unfused);
    operation_trace = NULL;
    if (kind != JOINED) out[FORWARD] = (struct interval){begin, mark_if(timed)};
    if (!both) return;
    if (kind != JOINED) meet(b);
    trace_if(b, BACKWARD);
    if (kind != JOINED) begin = mark_if(timed);
    backward(b, &a->model, set, a->type->unfused, kind == ADDS);
    out[backward_of_kind[kind]] = (struct interval){begin, mark_if(timed)};
    operation_trace = NULL;
}

// What a layer multiplies in its experts. Where backward reads what forward has written, it is random all the same.
static void pass_products(const struct bench *b, const struct arm *a, int set, bool timed, struct interval *out) {
    const struct layer_shape *s = &b->shape;
    const struct block_offsets *o = &a->model.params.blocks[0];
    const real *w13 = a->model.weights + o->expert_w13, *w2 = a->model.weights + o->expert_w2;
    struct expert_range here = parallel_experts(&b->parallel, s->E);
    const int experts = here.end - here.first, *offsets = b->offsets[set], H = s->H, I = s->I;
    grouped_matmul_choose(a->type->core);
    meet(b);
    int begin = mark_if(timed);
    grouped_matmul_nt(b->gate_up, b->rows, w13, offsets, experts, 2 * I, H);
    int middle = mark_if(timed);
    grouped_matmul_nn(b->out, b->hidden, w2, offsets, experts, H, I);
    int end = mark_if(timed);
    out[GATE_UP] = (struct interval){begin, middle};
    out[DOWN] = (struct interval){middle, end};
    out[BOTH] = (struct interval){begin, end};
    if (!b->options->backward) return;
    int marks[5];
    meet(b);
    marks[0] = mark_if(timed);
    grouped_matmul_nt(b->d_hidden, b->out, w2, offsets, experts, I, H);
    marks[1] = mark_if(timed);
    grouped_matmul_nn(b->d_x, b->gate_up, w13, offsets, experts, H, 2 * I);
    marks[2] = mark_if(timed);
    grouped_matmul_tn(a->model.grads + o->expert_w2, b->hidden, b->out, offsets, experts, I, H, false);
    marks[3] = mark_if(timed);
    grouped_matmul_tn(a->model.grads + o->expert_w13, b->gate_up, b->rows, offsets, experts, 2 * I, H, false);
    marks[4] = mark_if(timed);
    out[D_HIDDEN] = (struct interval){marks[0], marks[1]};
    out[D_X] = (struct interval){marks[1], marks[2]};
    out[D_W2] = (struct interval){marks[2], marks[3]};
    out[D_W13] = (struct interval){marks[3], marks[4]};
    out[FOUR] = (struct interval){marks[0], marks[4]};
}

// With the next input set. out [MEASURES]
static void pass(struct bench *b, struct arm *a, bool timed, struct interval *out) {
    int set = b->set++ % SETS;
    for (int m = 0; m < MEASURES; m++) out[m] = (struct interval){-1, -1};
    if (a->type->kind == ARM_PRODUCTS)
        pass_products(b, a, set, timed, out);
    else
        pass_layer(b, a, set, timed, out);
}

static void passes_untimed(struct bench *b, struct arm *a, int count) {
    struct interval none[MEASURES];
    for (int i = 0; i < count; i++) pass(b, a, false, none);
}

// ---- timing ----

// Each number becomes its most over the ranks.
static void take_slowest(const struct bench *b, double *seconds, int n) {
    double *all = host_alloc((size_t)n * b->parallel.ranks, sizeof *all);
    comm_gather_all(b->parallel.world, all, seconds, sizeof *seconds * (size_t)n);
    for (int r = 0; r < b->parallel.ranks; r++)
        for (int i = 0; i < n; i++) seconds[i] = fmax(seconds[i], all[(size_t)r * n + i]);
    free(all);
}

// The first mark waits for everything before it; those that follow it do not.
static void begin_marks(const struct bench *b) {
    comm_barrier(b->parallel.world);
    device_clear_marks();
    device_mark();
}

static int passes_of_load(const struct arm *a) { return 1 + (int)(1e-3 * LOAD_MS / a->seconds); }

// The end of something that a pass has measured.
static int any_mark(const struct interval marks[MEASURES]) {
    int m = 0;
    while (marks[m].begin < 0) m++;
    return marks[m].end;
}

// Seconds of every measure of every pass, 0 where there is none. Returns the clock, read while the device works on
// them.
static unsigned time_passes(struct bench *b, struct arm *a, int passes, double seconds[MOST_PASSES][MEASURES]) {
    struct interval marks[MOST_PASSES][MEASURES] = {0};
    for (int i = 0; i < passes; i++) pass(b, a, true, marks[i]);
    device_mark_seconds(any_mark(marks[passes / 2]));
    unsigned mhz = clock_mhz();
    device_finish();
    for (int i = 0; i < passes; i++)
        for (int m = 0; m < MEASURES; m++) {
            struct interval in = marks[i][m];
            seconds[i][m] = in.begin < 0 ? 0 : device_mark_seconds(in.end) - device_mark_seconds(in.begin);
        }
    take_slowest(b, &seconds[0][0], passes * MEASURES);
    return mhz;
}

// The first passes load kernels and take memory.
static void warm_up(struct bench *b, struct arm *a) {
    static const enum measure whole[] = {FORWARD, BACKWARD, BACKWARD_ADD, FORWARD_BACKWARD, BOTH, FOUR};
    double seconds[MOST_PASSES][MEASURES], sum = 0;
    begin_marks(b);
    passes_untimed(b, a, KINDS);
    time_passes(b, a, KINDS, seconds);
    for (int i = 0; i < KINDS; i++)
        for (size_t m = 0; m < sizeof whole / sizeof *whole; m++) sum += seconds[i][whole[m]];
    a->seconds = fmax(sum / KINDS, 1e-6);
}

static void take_turn(struct bench *b, struct arm *a, enum load load) {
    struct samples *s = &a->samples[load];
    double seconds[MOST_PASSES][MEASURES];
    int passes = passes_of_turn[load];
    begin_marks(b);
    if (load == BURST) usleep(1000 * IDLE_MS);
    passes_untimed(b, a, load == BURST ? 1 : passes_of_load(a));
    unsigned mhz = time_passes(b, a, passes, seconds);
    for (int i = 0; i < passes; i++)
        for (int m = 0; m < MEASURES; m++)
            if (seconds[i][m] > 0) s->seconds[m][s->count[m]++] = seconds[i][m];
    s->mhz += mhz;
    s->clocks += mhz > 0;
}

static void take_turns(struct bench *b, enum load load) {
    for (int round = 0; round < rounds_of(b->options, load); round++) {
        for (int i = 0; i < b->arm_count; i++) take_turn(b, &b->arms[i], load);
        for (int i = b->arm_count - 1; i >= 0; i--) take_turn(b, &b->arms[i], load);
    }
}

// Where the time of a pass goes on rank 0, under load: means over the passes.
static void measure_parts(struct bench *b, struct arm *a, enum measure m) {
    struct trace t;
    double seconds[MOST_PASSES][MEASURES], whole = 0;
    int passes = passes_of_turn[SUSTAINED];
    begin_marks(b);
    passes_untimed(b, a, passes_of_load(a));
    trace_open(&t, 0, SPANS);
    t.on = true;
    b->trace = &t;
    b->traced = m;
    unsigned mhz = time_passes(b, a, passes, seconds);
    b->trace = NULL;
    trace_take_spans(&t);
    for (int i = 0; i < passes; i++) whole += seconds[i][m] / passes;
    if (is_leader(b)) print_parts(b, a, m, &t, passes, whole, mhz);
    trace_close(&t);
}

static void measure_all_parts(struct bench *b) {
    for (struct arm *a = b->arms; a < b->arms + b->arm_count; a++) {
        bool asked = b->options->parts || (a->type->kind == ARM_MOK && !a->with);
        if (a->type->kind == ARM_PRODUCTS || !asked) continue;
        measure_parts(b, a, FORWARD);
        if (has_backward(b, a)) measure_parts(b, a, BACKWARD);
    }
}

// ---- all of it ----

static void bench_shape(const struct options *o, struct layer_shape shape, int workload, FILE *json) {
    struct bench b = {.options = o, .shape = shape, .workload = workload, .json = json};
    bool leader = comm_rank(comm_world()) == 0;
    if (leader) printf("\n%s, W%d\n", shape.name, workload);
    bench_open(&b);
    if (leader) print_head(&b);
    fflush(stdout);
    for (int i = 0; i < b.arm_count; i++) warm_up(&b, &b.arms[i]);
    for (int l = 0; l < LOADS; l++) // bursts first: a load leaves the GPU warm, and its clock low
        if (o->loads[l]) take_turns(&b, (enum load)l);
    if (leader) print_rows(&b);
    measure_all_parts(&b);
    bench_close(&b);
}

// A GPU for this rank.
static void open_device(struct comm *world) {
    struct comm *here = comm_split_host(world);
    device_open(comm_rank(here), comm_size(here));
    comm_free(here);
}

static void check_options(struct options *o, int argc, char **argv) {
    struct comm *world = comm_world();
    leader_begin(world);
    read_options(o, argc, argv);
    leader_end(world);
}

static FILE *open_json(const char *path) {
    if (!path || comm_rank(comm_world()) != 0) return NULL;
    FILE *file = fopen(path, "a");
    if (!file) fail_user("--json", "cannot open %s to add to it; name a file in a folder that can be written", path);
    return file;
}

int main(int argc, char **argv) {
    struct options o;
    device_start(argv);
    comm_start(&argc, &argv);
    check_options(&o, argc, argv);
    bool leader = comm_rank(comm_world()) == 0;
    if (o.help && leader) print_help();
    if (!o.help) {
        FILE *json = open_json(o.json);
        open_device(comm_world());
        clock_open();
        if (leader) printf("%s, %d ranks, products %s\n", device_name(), comm_size(comm_world()), device_tuning());
        for (int i = 0; i < o.shape_count; i++)
            for (int w = 0; w < WORKLOADS; w++)
                if (o.workloads[w]) bench_shape(&o, o.shapes[i], w, json);
        if (json && fclose(json) != 0) fail_internal(o.json, "cannot write the last rows; free some space there");
    }
    comm_stop();
    return 0;
}
