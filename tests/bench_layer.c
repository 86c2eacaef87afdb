// Speed of the MoE layer alone, from the router's output to the layer's output, and with --backward from dy to dx and
// all gradients: the megakernel beside its own work by kernels one after the other (unfused), the layer of all-to-all
// exchanges, whole and in parts, and the two grouped products alone, which are its ceiling. Started alone or by mpirun,
// one rank for each GPU: one EP group. scripts/bench_layer.py does the same by torch and NCCL.
//
// Each turn of an arm is a burst (after 60 ms in which the GPU did nothing) or sustained (after 100 ms of that arm,
// when power limits the clock). Arms take turns A/B/C/C/B/A. A pass begins when all ranks have come to it; its time is
// that of the slowest rank. ms is the median, p10 and p90 stand beside it. Inputs are random, of several sets in turn.
//
// Operations are 6 H (I routes + S tokens), backward twice as many, of the mean rank; of products alone those of the
// busiest. "busiest" is its rows over the mean. A share is of the tensor cores' peak, at the clock that stands beside
// it, or as the maker gives it.
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/comm.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"
#include "kernels/random.h"
#include "model/leader.h"
#include "model/model.h"
#include "model/moe.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/route.h"
#include "model/trace.h"
#include "tests/bench_layer_options.h"
#include "tests/bench_layer_unfused.h"

enum { SETS = 3, IDLE_MS = 60, LOAD_MS = 100, MOST_PASSES = 10, PARTS = 32, SPANS = 1 << 14 };
static const int passes_of_turn[LOADS] = {4, 10};

// ---- the clock of the multiprocessors ----

#ifdef MOK_CUDA
#include "tests/gpu_clock.h"
static void clock_open(void) { nvml_open(); }
static unsigned clock_mhz(void) { return nvml_mhz(); }
// Of dense BF16: 2048 multiply-adds in each multiprocessor and cycle (Hopper).
static double peak_at(double mhz) { return 4096e6 * mhz * cuda_multiprocessors(); }
#else
static void clock_open(void) {}
static unsigned clock_mhz(void) { return 0; }
static double peak_at(double mhz) { return mhz; }
#endif

// ---- what is measured ----

enum measure { FORWARD, BACKWARD, GATE_UP, DOWN, BOTH, MEASURES };
static const char *const measure_names[MEASURES] = {"forward", "backward", "gate-up", "down", "both"};

// Marks of the device; begin < 0: was not measured.
struct interval {
    int begin, end;
};

struct samples {
    double *seconds[MEASURES]; // of the slowest rank
    int count[MEASURES];
    double mhz; // their sum
    int clocks; // how many
};

struct arm {
    const struct arm_type *type;
    char name[64];
    struct model model; // shares all but the layer's own memory with the others
    bool owner;         // of that
    double seconds;     // of a pass, about
    struct samples samples[LOADS];
};

// One shape in one workload.
struct bench {
    const struct options *options;
    struct parallel parallel;
    struct layer_shape shape;
    int workload;
    struct model model;                  // weights and activations of all arms
    struct block_activations first;      // those of input set 0
    int set;                             // the next one
    int *offsets[SETS];                  // host [experts here + 1] of the products
    double routes, busiest;              // of a rank: mean, most; mean over the sets
    real *rows, *gate_up, *hidden, *out; // of the products
    struct unfused_plan unfused[SETS];
    real *unfused_out;   // [ring_rows, H]
    char *meeting;       // [ranks * MEETING_BYTES]
    struct trace *trace; // of the pass `traced`; NULL: none
    enum measure traced;
    struct arm arms[ARMS];
    int arm_count;
    FILE *json;
};
enum { MEETING_BYTES = 256 };

static bool is_leader(const struct bench *b) { return b->parallel.rank == 0; }

static void *host_alloc(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) fail_internal("bench_layer", "found no memory for %zu numbers", count);
    return memory;
}

// ---- random inputs ----

enum { POOL_ROWS = 2048, NORMALS = 1000003 };

// Rows of normal numbers, of which all others are copies in random order. H numbers each.
static real *pool_make(int H, double scale, uint64_t seed) {
    float *normals = host_alloc(NORMALS, sizeof *normals), *rows = host_alloc((size_t)POOL_ROWS * H, sizeof *rows);
    for (int i = 0; i < NORMALS; i++) {
        double u = random_uniform(random_next(&seed)), v = random_uniform(random_next(&seed));
        normals[i] = (float)(scale * sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v));
    }
    for (size_t i = 0; i < (size_t)POOL_ROWS * H; i++) rows[i] = normals[i % NORMALS];
    real *pool = device_alloc(sizeof *pool * POOL_ROWS * H);
    device_real_from_float(pool, rows, (size_t)POOL_ROWS * H);
    free(rows);
    free(normals);
    return pool;
}

static void fill_rows(real *to, const real *pool, int rows, int H, uint64_t seed) {
    int *index = host_alloc((size_t)rows + 1, sizeof *index);
    for (int i = 0; i < rows; i++) index[i] = (int)random_below(&seed, POOL_ROWS);
    int *device = device_alloc(sizeof *device * ((size_t)rows + 1));
    device_copy_in(device, index, sizeof *index * (size_t)rows);
    moe_gather(to, pool, device, rows, H);
    device_finish();
    device_free(device);
    free(index);
}

static void fill_weights(const struct bench *b, const real *pool, uint64_t seed) {
    const struct layer_shape *s = &b->shape;
    const struct block_offsets *o = &b->model.params.blocks[0];
    struct expert_range experts = parallel_experts(&b->parallel, s->E);
    int inner = (experts.end - experts.first) * s->I;
    fill_rows(b->model.weights + o->expert_w13, pool, 2 * inner, s->H, seed);
    fill_rows(b->model.weights + o->expert_w2, pool, inner, s->H, seed + 1);
    if (s->S == 0) return;
    fill_rows(b->model.weights + o->shared_w13, pool, 2 * s->S, s->H, seed + 2);
    fill_rows(b->model.weights + o->shared_w2, pool, s->S, s->H, seed + 3);
}

static void fill_gates(const struct bench *b, uint64_t seed) {
    size_t count = (size_t)SETS * b->shape.T * b->shape.K;
    float *gates = host_alloc(count, sizeof *gates);
    for (size_t i = 0; i < count; i++) gates[i] = (float)random_uniform(random_next(&seed));
    device_accum_from_float(b->first.gates, gates, count);
    free(gates);
}

static void fill(const struct bench *b) {
    const struct layer_shape *s = &b->shape;
    uint64_t seed = random_mix((uint64_t)b->parallel.rank);
    real *inputs = pool_make(s->H, 1, 11), *weights = pool_make(s->H, 1 / sqrt(s->H), 12);
    fill_weights(b, weights, seed);
    fill_rows(b->first.ffn_norm, inputs, SETS * s->T, s->H, seed + 4);
    if (b->options->backward) fill_rows(b->model.acts.dx, inputs, SETS * s->T, s->H, seed + 5);
    fill_gates(b, seed + 6);
    device_free(inputs);
    device_free(weights);
}

// ---- routes ----

// Rows of every expert, all ranks' tokens together, from those that this rank's tokens choose.
static int64_t *count_rows(const struct bench *b, const int32_t *ids) {
    int64_t *rows = host_alloc((size_t)b->shape.E, sizeof *rows);
    for (size_t i = 0; i < (size_t)b->shape.T * b->shape.K; i++)
        if (ids[i] >= 0) rows[ids[i]]++;
    comm_sum_int64(b->parallel.world, rows, (size_t)b->shape.E);
    return rows;
}

static void add_loads(struct bench *b, const int64_t *rows) {
    int ranks = b->parallel.ep, E = b->shape.E;
    int64_t most = 0;
    for (int r = 0; r < ranks; r++) {
        int64_t here = 0;
        for (int e = parallel_first_expert(E, ranks, r); e < parallel_first_expert(E, ranks, r + 1); e++)
            here += rows[e];
        b->routes += (double)here / ranks / SETS;
        if (here > most) most = here;
    }
    b->busiest += (double)most / SETS;
}

static int *offsets_of(const struct bench *b, const int64_t *rows) {
    struct expert_range here = parallel_experts(&b->parallel, b->shape.E);
    int *offsets = host_alloc((size_t)(here.end - here.first) + 1, sizeof *offsets);
    for (int e = here.first; e < here.end; e++) offsets[e - here.first + 1] = offsets[e - here.first] + (int)rows[e];
    return offsets;
}

// The last step is the burst of W7.
static void route(struct bench *b) {
    const struct layer_shape *s = &b->shape;
    size_t count = (size_t)s->T * s->K;
    int32_t *ids = host_alloc(count, sizeof *ids);
    for (int i = 0; i < SETS; i++) {
        struct route_place place = {.seed = 1, .step = ROUTE_BURST - SETS + i};
        route_fill(ids, route_of_workload(b->workload), place, (int64_t)b->parallel.rank * s->T, s->T, s->E, s->K);
        device_copy_in(b->first.ids + (size_t)i * count, ids, sizeof *ids * count);
        int64_t *rows = count_rows(b, ids);
        add_loads(b, rows);
        b->offsets[i] = offsets_of(b, rows);
        free(rows);
    }
    free(ids);
}

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
    if (!mok_available(MOK_FORWARD)) return "this build has no megakernel";
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
    if (t->movers && !b->options->comm_workers) return "--comm-workers says how many";
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
    real *pool = pool_make(s->H, 1, 13);
    fill_rows(b->rows, pool, (int)most, s->H, 1);
    fill_rows(b->hidden, pool, hidden_rows, s->H, 2);
    device_free(pool);
}

static bool has_same_layer(const struct arm *a, const struct arm *b) {
    if (a->type->kind != b->type->kind) return false;
    return a->type->kind == ARM_MOK || a->model.moe.alltoall_chunks == b->model.moe.alltoall_chunks;
}

// The layer's own memory is shared too by arms that differ in nothing it depends on. So the megakernel's barriers have
// one count.
static void open_layer(struct bench *b, struct arm *a) {
    const struct options *o = b->options;
    const struct arm_type *t = a->type;
    a->model = b->model;
    a->model.moe = (struct moe_settings){.kind = t->kind == ARM_MOK ? MOE_MOK : MOE_ALLTOALL,
                                         .alltoall_chunks = t->chunks ? o->chunks : 1,
                                         .expert_gemm = t->core,
                                         .comm_workers = t->movers ? o->comm_workers : 0};
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

static void forward(struct bench *b, struct arm *a, int set) {
    struct model *m = &a->model;
    choose_set(b, m, set);
    if (a->type->unfused)
        unfused_forward(m, &b->unfused[set], b->unfused_out, b->options->pull_warps, m->acts.output, b->shape.T);
    else
        moe_forward(m, 0, m->acts.output, NULL, b->shape.T);
}

// Results of the megakernel, one behind the other in y, and its plans. Returns in how many of all ranks' passes there were
// several macrobatches.
static int64_t run_sets_fused(struct bench *b, struct arm *a, char *y, size_t bytes) {
    struct model *m = &a->model;
    int64_t several = 0;
    for (int i = 0; i < SETS; i++) {
        choose_set(b, m, i);
        moe_forward(m, 0, m->acts.output, NULL, b->shape.T);
        device_copy_out(y + (size_t)i * bytes, m->acts.output, bytes);
        several += unfused_plan_open(&b->unfused[i], m->mok) > 1;
    }
    comm_sum_int64(b->parallel.world, &several, 1);
    return several;
}

// That the unfused kernels give the same bits. What a pass finds in memory is of another input set.
static void check_sets_unfused(struct bench *b, struct arm *a, const char *y, size_t bytes) {
    char *found = host_alloc(bytes, 1);
    for (int i = 0; i < SETS; i++) {
        const char *wanted = y + (size_t)i * bytes;
        size_t at = 0;
        forward(b, a, i);
        device_copy_out(found, a->model.acts.output, bytes);
        if (memcmp(found, wanted, bytes) == 0) continue;
        while (found[at] == wanted[at]) at++;
        fail_internal("unfused", "found other bits than the megakernel's in token %zu of input set %d, wanted the same",
                      at / sizeof(real) / (size_t)b->shape.H, i);
    }
    free(found);
}

// Whether every rank's rows fit into its ring.
static bool open_unfused(struct bench *b, struct arm *a) {
    size_t bytes = sizeof(real) * (size_t)b->shape.T * (size_t)b->shape.H;
    char *y = host_alloc(SETS, bytes);
    bool fits = run_sets_fused(b, a, y, bytes) == 0;
    if (fits) {
        b->unfused_out = device_alloc(sizeof(real) * (size_t)a->model.mok->shape.ring_rows * (size_t)b->shape.H);
        check_sets_unfused(b, a, y, bytes);
    }
    free(y);
    return fits;
}

static void close_unfused(struct bench *b) {
    for (int i = 0; i < SETS; i++) unfused_plan_close(&b->unfused[i]);
    device_free(b->unfused_out);
    b->unfused_out = NULL;
}

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
    int number = t->movers ? o->comm_workers : t->chunks ? o->chunks : t->unfused ? o->pull_warps : 0;
    bool plain = number == 0 || (t->unfused && number == UNFUSED_WARPS);
    snprintf(a->name, sizeof a->name, plain ? "%s" : "%s-%d", t->name, number);
}

// Why it cannot run here after all; NULL: it can.
static const char *open_arm(struct bench *b, struct arm *a, const struct arm_type *t) {
    a->type = t;
    name_arm(a, b->options);
    if (t->kind == ARM_PRODUCTS && !b->rows) open_products(b);
    open_layer(b, a);
    if (!t->unfused || open_unfused(b, a)) return NULL;
    close_unfused(b);
    if (a->owner) moe_close(&a->model);
    *a = (struct arm){0};
    return "it takes one macrobatch, and a rank has more rows than its ring";
}

static void open_arms(struct bench *b) {
    int most = 2 * MOST_PASSES * (rounds_of(b->options, BURST) + rounds_of(b->options, SUSTAINED));
    for (int i = 0; i < ARMS; i++) {
        const struct arm_type *t = &arm_types[i];
        if (!b->options->arms[i]) continue;
        const char *why = why_not(b, t);
        if (!why) why = open_arm(b, &b->arms[b->arm_count], t);
        if (why && is_leader(b)) printf("%s is left out: %s\n", t->name, why);
        if (why) continue;
        open_samples(&b->arms[b->arm_count++], most);
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
    void *device[] = {b->rows, b->gate_up, b->hidden, b->out, b->meeting};
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

static bool has_backward(const struct bench *b, const struct arm *a) {
    return b->options->backward && a->type->kind != ARM_PRODUCTS && !a->type->unfused &&
           (a->type->kind != ARM_MOK || mok_available(MOK_BACKWARD));
}

static void pass_layer(struct bench *b, struct arm *a, int set, bool timed, struct interval *out) {
    struct model *m = &a->model;
    size_t H = (size_t)b->shape.H, K = (size_t)b->shape.K, at = (size_t)set * (size_t)b->shape.T;
    meet(b);
    trace_if(b, FORWARD);
    out[FORWARD].begin = mark_if(timed);
    forward(b, a, set);
    out[FORWARD].end = mark_if(timed);
    operation_trace = NULL;
    if (!has_backward(b, a)) return;
    meet(b);
    trace_if(b, BACKWARD);
    out[BACKWARD].begin = mark_if(timed);
    moe_backward(m, 0, m->acts.d_norm, m->acts.d_gates + at * K, m->acts.dx + at * H, b->shape.T);
    out[BACKWARD].end = mark_if(timed);
    operation_trace = NULL;
}

static void pass_products(const struct bench *b, const struct arm *a, int set, bool timed, struct interval *out) {
    const struct layer_shape *s = &b->shape;
    const struct block_offsets *o = &a->model.params.blocks[0];
    struct expert_range here = parallel_experts(&b->parallel, s->E);
    int experts = here.end - here.first;
    grouped_matmul_choose(a->type->core);
    meet(b);
    int begin = mark_if(timed);
    grouped_matmul_nt(b->gate_up, b->rows, a->model.weights + o->expert_w13, b->offsets[set], experts, 2 * s->I, s->H);
    int middle = mark_if(timed);
    grouped_matmul_nn(b->out, b->hidden, a->model.weights + o->expert_w2, b->offsets[set], experts, s->H, s->I);
    int end = mark_if(timed);
    out[GATE_UP] = (struct interval){begin, middle};
    out[DOWN] = (struct interval){middle, end};
    out[BOTH] = (struct interval){begin, end};
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

// Seconds of every measure of every pass, 0 where there is none. Returns the clock, read while the device works on
// them.
static unsigned time_passes(struct bench *b, struct arm *a, int passes, double seconds[MOST_PASSES][MEASURES]) {
    struct interval marks[MOST_PASSES][MEASURES] = {0};
    enum measure last = a->type->kind == ARM_PRODUCTS ? BOTH : FORWARD;
    for (int i = 0; i < passes; i++) pass(b, a, true, marks[i]);
    device_mark_seconds(marks[passes / 2][last].end);
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
    enum { WARM_PASSES = SETS };
    double seconds[MOST_PASSES][MEASURES];
    begin_marks(b);
    passes_untimed(b, a, WARM_PASSES);
    time_passes(b, a, 1, seconds);
    a->seconds = fmax(seconds[0][FORWARD] + seconds[0][BACKWARD] + seconds[0][BOTH], 1e-6);
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

// ---- rows of the table ----

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double flops_of(const struct bench *b, enum measure m) {
    const struct layer_shape *s = &b->shape;
    double product = 2.0 * s->H * s->I * b->busiest, layer = 6.0 * s->H * (s->I * b->routes + (double)s->S * s->T);
    const double flops[MEASURES] = {
        [FORWARD] = layer, [BACKWARD] = 2 * layer, [GATE_UP] = 2 * product, [DOWN] = product, [BOTH] = 3 * product};
    return flops[m];
}

static double busiest_share(const struct bench *b) { return b->routes > 0 ? b->busiest / b->routes : 1; }

static void print_head(void) {
    printf("%6s %5s %5s %4s %3s %5s %3s %-4s %7s %-27s %-9s %-9s %9s %9s %9s %8s %5s %7s %7s\n", "T", "H", "I", "E",
           "K", "S", "EP", "work", "busiest", "arm", "pass", "load", "ms", "p10", "p90", "TFLOP/s", "MHz", "of MHz",
           "of peak");
}

static void print_sizes(const struct bench *b, const char *arm, const char *pass, const char *load) {
    const struct layer_shape *s = &b->shape;
    printf("%6d %5d %5d %4d %3d %5d %3d W%-3d %7.3f %-27s %-9s %-9s", s->T, s->H, s->I, s->E, s->K, s->S,
           b->parallel.ep, b->workload, busiest_share(b), arm, pass, load);
}

static cJSON *json_sizes(const struct bench *b, const char *arm, const char *pass, const char *load) {
    const struct layer_shape *s = &b->shape;
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"T", s->T}, {"H", s->H}, {"I", s->I}, {"E", s->E}, {"K", s->K}, {"S", s->S}, {"EP", b->parallel.ep}};
    cJSON *row = cJSON_CreateObject();
    char workload[4];
    snprintf(workload, sizeof workload, "W%d", b->workload);
    cJSON_AddStringToObject(row, "device", device_name());
    cJSON_AddStringToObject(row, "shape", s->name);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        cJSON_AddNumberToObject(row, sizes[i].name, sizes[i].value);
    cJSON_AddStringToObject(row, "workload", workload);
    cJSON_AddNumberToObject(row, "busiest", busiest_share(b));
    cJSON_AddStringToObject(row, "arm", arm);
    cJSON_AddStringToObject(row, "pass", pass);
    cJSON_AddStringToObject(row, "load", load);
    return row;
}

// Takes row.
static void write_json(const struct bench *b, cJSON *row) {
    char *text = cJSON_PrintUnformatted(row);
    if (!text) fail_internal("--json", "found no memory for a row");
    if (fprintf(b->json, "%s\n", text) < 0 || fflush(b->json) != 0)
        fail_internal(b->options->json, "cannot write a row; free some space there or name another file");
    cJSON_free(text);
    cJSON_Delete(row);
}

// Percent of a whole that may be unknown.
static void print_share(double part, double whole) {
    if (whole > 0)
        printf(" %6.1f%%", 100 * part / whole);
    else
        printf(" %7s", "-");
}

static void print_row(const struct bench *b, const struct arm *a, enum load load, enum measure m) {
    const struct samples *s = &a->samples[load];
    double *sorted = s->seconds[m];
    int count = s->count[m];
    if (count == 0) return;
    qsort(sorted, (size_t)count, sizeof *sorted, compare_doubles);
    double ms = 1e3 * sorted[count / 2], p10 = 1e3 * sorted[count / 10], p90 = 1e3 * sorted[count - 1 - count / 10];
    double rate = flops_of(b, m) / (1e-3 * ms), mhz = s->clocks ? s->mhz / s->clocks : 0;
    print_sizes(b, a->name, measure_names[m], load_names[load]);
    printf(" %9.4f %9.4f %9.4f %8.1f", ms, p10, p90, 1e-12 * rate);
    if (s->clocks)
        printf(" %5.0f", mhz);
    else
        printf(" %5s", "-");
    print_share(rate, peak_at(mhz));
    print_share(rate, device_peak_flops());
    putchar('\n');
    if (!b->json) return;
    cJSON *row = json_sizes(b, a->name, measure_names[m], load_names[load]);
    cJSON_AddNumberToObject(row, "ms", ms);
    cJSON_AddNumberToObject(row, "p10", p10);
    cJSON_AddNumberToObject(row, "p90", p90);
    cJSON_AddNumberToObject(row, "tflops", 1e-12 * rate);
    if (s->clocks) cJSON_AddNumberToObject(row, "mhz", mhz);
    cJSON_AddNumberToObject(row, "passes", count);
    write_json(b, row);
}

static void print_rows(const struct bench *b) {
    for (int l = 0; l < LOADS; l++)
        for (int m = 0; m < MEASURES; m++)
            for (int i = 0; i < b->arm_count; i++) print_row(b, &b->arms[i], (enum load)l, (enum measure)m);
    fflush(stdout);
}

// ---- parts of a pass ----

// Seconds of one operation in all passes.
struct part {
    const char *name;
    int calls;
    double seconds;
};

static int collect_parts(const struct trace *t, struct part parts[PARTS]) {
    const struct trace_track *device = &t->tracks[trace_device_track(t)];
    int count = 0;
    for (size_t i = 0; i < device->count; i++) {
        const struct trace_event *e = &device->events[i];
        int p = 0;
        while (p < count && strcmp(parts[p].name, e->name) != 0) p++;
        if (p == PARTS) continue;
        if (p == count) parts[count++] = (struct part){.name = e->name};
        parts[p].calls++;
        parts[p].seconds += e->end - e->begin;
    }
    return count;
}

// flops 0: those of the part are not known.
static void print_part(const struct bench *b, const struct arm *a, enum measure m, const struct part *p, int passes,
                       double whole, double flops, double mhz) {
    double seconds = p->seconds / passes, calls = (double)p->calls / passes;
    print_sizes(b, a->name, measure_names[m], load_names[SUSTAINED]);
    printf("   %-24s %5.1f %9.4f %6.1f%%", p->name, calls, 1e3 * seconds, 100 * seconds / whole);
    if (flops > 0) printf(" %8.1f TFLOP/s at %.0f MHz", 1e-12 * flops / seconds, mhz);
    putchar('\n');
    if (!b->json) return;
    cJSON *row = json_sizes(b, a->name, measure_names[m], load_names[SUSTAINED]);
    cJSON_AddStringToObject(row, "part", p->name);
    cJSON_AddNumberToObject(row, "calls", calls);
    cJSON_AddNumberToObject(row, "ms", 1e3 * seconds);
    cJSON_AddNumberToObject(row, "share", seconds / whole);
    if (flops > 0) cJSON_AddNumberToObject(row, "tflops", 1e-12 * flops / seconds);
    write_json(b, row);
}

static void print_parts(const struct bench *b, const struct arm *a, enum measure m, const struct trace *t, int passes,
                        double whole, double mhz) {
    struct part parts[PARTS], rest = {"between operations", 0, whole * passes};
    int count = collect_parts(t, parts);
    for (int i = 0; i < count; i++) {
        bool megakernel = strcmp(parts[i].name, "mok_run") == 0;
        print_part(b, a, m, &parts[i], passes, whole, megakernel ? flops_of(b, m) : 0, mhz);
        rest.seconds -= parts[i].seconds;
    }
    print_part(b, a, m, &rest, passes, whole, 0, mhz);
    fflush(stdout);
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
        if (a->type->kind == ARM_PRODUCTS || (a->type->kind != ARM_MOK && !b->options->parts)) continue;
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
    if (leader) print_head();
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
