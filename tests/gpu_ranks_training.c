// Training by real ranks, a process and a GPU each, at every layout: what the ranks share stays the same bit by bit, and a
// run of the same layout gives the same bytes. mpirun -n 4 build/cuda/tests/gpu_ranks_training, or build/cpu/tests/...
#include "tests/gpu_ranks.h"

#include "data/hash.h"
#include "kernels/mok.h"
#include "model/trainer.h"

static int ranks;

// Many for a CPU, where test_trainer_ranks.c compares training with one process.
static int steps_of_run(void) { return on_gpu() ? 20 : 8; }

// ---- a run ----

struct run {
    struct data *data;
    struct trainer t;
};

// Ragged shares: some ranks have two micro-batches, others one and a half.
static struct options options_of(const char *preset, enum moe_kind kind, int shared) {
    struct options o;
    assert_true(options_set_preset(&o, preset));
    o.seq = o.seq < 64 ? o.seq : 64;
    o.batch = 2;
    o.tokens_per_step = (int64_t)(3 * ranks + 1) * o.seq;
    o.warmup = 2;
    o.steps = 30;
    o.model.init_std = 0.1; // routing and attention far from uniform from the first step
    o.model.shared_experts = shared;
    o.moe.kind = kind;
    if (!shared) o.moe.expert_gemm = GROUPED_OWN;
    return o;
}

static void run_open(struct run *r, const struct options *o, const struct parallel *p) {
    config_validate(&o->model);
    r->data = data_open(o->data, o->eval_data, NULL, o->seed, o->seq, 1 + o->model.mtp_depth);
    trainer_open(&r->t, o, r->data, NULL, p);
}

static void run_close(struct run *r) {
    trainer_close(&r->t);
    data_close(r->data);
}

// ---- fingerprints ----

enum { DENSE, EXPERTS, BIASES, COUNTS, MASTERS, FIRST_MOMENTS, SECOND_MOMENTS, REPORT, ARRAYS };
static const char *const array_names[ARRAYS] = {"dense weights",    "experts' weights", "router biases",
                                                "counts of routes", "master weights",   "first moments",
                                                "second moments",   "reports"};

struct prints {
    uint64_t of[ARRAYS];
};

static uint64_t print_of(const void *host, size_t bytes) {
    struct hash h = hash_begin();
    hash_add(&h, host, bytes);
    return hash_end(&h);
}

static uint64_t print_of_device(const void *device, size_t bytes) {
    void *host = read_device(device, bytes);
    uint64_t print = print_of(host, bytes);
    free(host);
    return print;
}

static struct prints take_prints(const struct trainer *t, const struct step_report *last) {
    const struct params *p = &t->model.params;
    size_t biases = model_bias_size(&t->options.model), state = sizeof(accum) * t->sharding.size;
    double numbers[] = {last->loss, last->mtp, last->balance, last->norm, last->lr, last->load_max_over_mean};
    struct prints prints = {{
        [DENSE] = print_of_device(t->model.weights, sizeof(real) * p->dense_size),
        [EXPERTS] = print_of_device(t->model.weights + p->dense_size, sizeof(real) * (p->size - p->dense_size)),
        [BIASES] = print_of_device(t->model.bias, sizeof(accum) * biases),
        [COUNTS] = print_of_device(t->model.counts, sizeof(int64_t) * biases),
        [MASTERS] = print_of_device(t->master, state),
        [FIRST_MOMENTS] = print_of_device(t->m, state),
        [SECOND_MOMENTS] = print_of_device(t->v, state),
        [REPORT] = print_of(numbers, sizeof numbers),
    }};
    return prints;
}

static void check_same(const char *with, const struct prints *found, const struct prints *wanted, int array) {
    if (found->of[array] != wanted->of[array]) fail_here("%s: found other bits than %s", array_names[array], with);
}

// ---- what must hold ----

// Compared on every rank, so that the one that differs says so; rank 0 of the group is right by definition.
static void check_shared(struct comm *group, const char *with, const struct prints *mine, const int *arrays,
                         int count) {
    struct prints *all = take_host(sizeof *all * (size_t)comm_size(group));
    comm_gather_all(group, all, mine, sizeof *mine);
    for (int i = 0; i < count; i++) check_same(with, mine, &all[0], arrays[i]);
    free(all);
}

static void check_ranks_agree(const struct parallel *p, const struct prints *mine) {
    static const int everywhere[] = {DENSE, BIASES, COUNTS, REPORT}, on_replicas[] = {EXPERTS};
    check_shared(p->world, "rank 0", mine, everywhere, 4);
    check_shared(p->replicas, "the first replica", mine, on_replicas, 1);
}

// A fingerprint that does not see a step would find nothing.
static void check_step_changes_all(const struct prints *before, const struct prints *after) {
    for (int i = 0; i < ARRAYS; i++)
        if (before->of[i] == after->of[i]) fail_here("%s: found the same bits after another step", array_names[i]);
}

static struct prints train(const struct options *o, const struct parallel *p) {
    struct run r;
    struct prints before = {{0}}, after = {{0}};
    int steps = steps_of_run();
    run_open(&r, o, p);
    for (int step = 1; step <= steps; step++) {
        struct step_report report = trainer_step(&r.t);
        if (!report.finite) fail_here("step %d: found a loss or gradient that is no number", step);
        before = after;
        if (step >= steps - 1) after = take_prints(&r.t, &report);
    }
    check_ranks_agree(p, &after);
    check_step_changes_all(&before, &after);
    run_close(&r);
    return after;
}

// The same bytes of everything.
static void check_all(const char *with, const struct prints *found, const struct prints *wanted) {
    for (int i = 0; i < ARRAYS; i++) check_same(with, found, wanted, i);
}

static const char *const kinds[] = {[MOE_MOK] = "mok", [MOE_ALLTOALL] = "alltoall"};

static bool has_kind(int kind, int ep) { return kind == MOE_ALLTOALL || (mok_available() && ep <= mok_most_ranks()); }

static void check_twice(const char *preset, const struct parallel *p, int kind) {
    struct options o = options_of(preset, (enum moe_kind)kind, 1);
    look_at("%s, EP %d, --moe %s", preset, p->ep, kinds[kind]);
    struct prints first = train(&o, p), second = train(&o, p);
    check_all("the first run", &second, &first);
}

// Without a shared expert both layers give the same bits, so whole runs do.
static void check_both_kinds(const char *preset, const struct parallel *p) {
    struct prints prints[2];
    for (int kind = MOE_MOK; kind <= MOE_ALLTOALL; kind++) {
        struct options o = options_of(preset, (enum moe_kind)kind, 0);
        look_at("%s without shared experts, EP %d, --moe %s", preset, p->ep, kinds[kind]);
        prints[kind] = train(&o, p);
    }
    check_all("with --moe mok", &prints[MOE_ALLTOALL], &prints[MOE_MOK]);
}

static void check_layout(const char *preset, int ep) {
    struct parallel p;
    parallel_open(&p, ep, options_of(preset, MOE_MOK, 1).model.experts);
    for (int kind = MOE_MOK; kind <= MOE_ALLTOALL; kind++)
        if (has_kind(kind, ep)) check_twice(preset, &p, kind);
    if (has_kind(MOE_MOK, ep)) check_both_kinds(preset, &p);
    parallel_close(&p);
}

// Every rank has all experts; some of them, in several groups; or the ranks share one set.
static void what_ranks_share_stays_the_same(void **state) {
    (void)state;
    for (int ep = 1; ep <= ranks; ep++)
        if (ranks % ep == 0) check_layout("unit", ep);
}

// Of a GPU full tiles; of a CPU experts that three and six ranks can share.
static void and_of_other_experts(void **state) {
    (void)state;
    check_layout(on_gpu() ? "unit-128" : "unit-12", ranks);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        RANKS_TEST(what_ranks_share_stays_the_same),
        RANKS_TEST(and_of_other_experts),
    };
    gpu_ranks_start(argc, argv);
    ranks = comm_size(comm_world());
    return ranks_stop(cmocka_run_group_tests(tests, NULL, NULL));
}
