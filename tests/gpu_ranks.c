// The MoE layer by real ranks, a process and a GPU each, through all that the product has: groups, symmetric memory,
// barriers, NCCL. mpirun -n 4 build/cuda/tests/gpu_ranks; build/cpu/tests/gpu_ranks does the same by ranks on the CPU.
//
// Every rank makes the same global batch, computes the whole of it alone in its process, then its share as one of the ranks,
// and compares bits. Routed experts have the same bits in both layers and by every way; the shared expert is a library's
// product in the all-to-all layer, which may sum another number of rows in another order: there the megakernel is compared
// with itself alone.
//
// MOK_LONG=1 makes ten times as many calls in the soak.
#include "tests/gpu_ranks_layer.h"

#include "model/route.h"

static struct parallel parallel; // one EP group of all ranks
static int me, ranks;

// ---- ways to compute a layer ----

struct way {
    const char *name;
    struct moe_settings settings; // workers: of the CPU; a GPU has as many as it has multiprocessors
    int gpu_comm_workers;
};

enum {
    WAY_ALLTOALL,
    WAY_TWO_PIECES,
    WAY_FIVE_PIECES,
    WAY_TWO_PIECES_REBUILT,
    WAY_MOK,
    WAY_MOVERS,
    WAY_SMALL_RING,
    WAY_MOVERS_SMALL_RING,
    WAY_REPLAY,
    WAY_REPLAY_SMALL_RING,
    WAY_BLOCK,
    WAYS
};
#define ALLTOALL(chunks) .kind = MOE_ALLTOALL, .alltoall_chunks = (chunks), .expert_gemm = GROUPED_OWN
static const struct way ways[WAYS] = {
    [WAY_ALLTOALL] = {"all-to-all", {ALLTOALL(1)}, 0},
    [WAY_TWO_PIECES] = {"all-to-all in 2 pieces", {ALLTOALL(2)}, 0},
    [WAY_FIVE_PIECES] = {"all-to-all in 5 pieces", {ALLTOALL(5)}, 0}, // more than some ranks have experts
    [WAY_TWO_PIECES_REBUILT] = {"all-to-all in 2 pieces, recompute moe", {ALLTOALL(2), .recompute = RECOMPUTE_MOE}, 0},
    [WAY_MOK] = {"mok", {.kind = MOE_MOK}, 0},
    [WAY_MOVERS] = {"mok, movers", {.kind = MOE_MOK, .workers = 3, .comm_workers = 1}, 4},
    [WAY_SMALL_RING] = {"mok, ring 128", {.kind = MOE_MOK, .workers = 1, .minibatch_rows = 128, .ring_rows = 128}, 0},
    [WAY_MOVERS_SMALL_RING] =
        {"mok, movers, ring 256",
         {.kind = MOE_MOK, .workers = 3, .comm_workers = 1, .minibatch_rows = 128, .ring_rows = 256},
         4},
    [WAY_REPLAY] = {"mok, recompute moe", {.kind = MOE_MOK, .recompute = RECOMPUTE_MOE}, 0},
    [WAY_REPLAY_SMALL_RING] =
        {"mok, recompute moe, ring 128",
         {.kind = MOE_MOK, .workers = 2, .minibatch_rows = 128, .ring_rows = 128, .recompute = RECOMPUTE_MOE},
         0},
    [WAY_BLOCK] = {"mok, recompute block", {.kind = MOE_MOK, .recompute = RECOMPUTE_BLOCK}, 0},
};
static const int all_ways[] = {WAY_ALLTOALL,
                               WAY_TWO_PIECES,
                               WAY_FIVE_PIECES,
                               WAY_TWO_PIECES_REBUILT,
                               WAY_MOK,
                               WAY_SMALL_RING,
                               WAY_MOVERS_SMALL_RING,
                               WAY_REPLAY,
                               WAY_BLOCK,
                               -1};
static const int mok_ways[] = {WAY_MOK, WAY_SMALL_RING, WAY_MOVERS_SMALL_RING, WAY_REPLAY_SMALL_RING, WAY_BLOCK, -1};

static struct moe_settings settings_of(const struct way *w) {
    struct moe_settings s = w->settings;
    if (on_gpu()) s.workers = 0, s.comm_workers = w->gpu_comm_workers;
    return s;
}

// ---- one layer by all of them ----

struct arms {
    struct shape s;
    struct pool inputs, weights;
    struct arm alone, list[MOST_WAYS];
    int count;
};

// Matrices end within tiles: 264 is a tile of 256 columns and 8 more, 136 one of 128 and 8 more.
static struct shape shape_of(int E, int K, int shared, int tokens) {
    bool any = mok_column_unit() == 1;
    if (on_gpu()) return (struct shape){E, K, 264, 136, shared, tokens};
    return (struct shape){E, K, any ? 12 : 16, any ? 10 : 8, shared, tokens};
}

// which: numbers of ways, ended by -1.
static void arms_open(struct arms *a, struct shape s, const int *which, bool poisons) {
    size_t matrix = 2 * (size_t)s.I * (size_t)s.H * (size_t)(s.shared > 1 ? s.shared : 1);
    *a = (struct arms){.s = s};
    pool_open(&a->inputs, (size_t)s.H, 1, 901);
    pool_open(&a->weights, matrix, 1 / sqrt(s.H), 902);
    struct moe_settings mok = {.kind = MOE_MOK};
    arm_open(&a->alone, s, &a->weights, NULL, ranks, &mok, "mok alone");
    a->alone.poisons = poisons;
    for (; which[a->count] >= 0; a->count++) {
        const struct way *w = &ways[which[a->count]];
        struct moe_settings settings = settings_of(w);
        arm_open(&a->list[a->count], s, &a->weights, &parallel, ranks, &settings, w->name);
        a->list[a->count].poisons = poisons;
    }
}

static void arms_close(struct arms *a) {
    for (int i = 0; i < a->count; i++) arm_close(&a->list[i]);
    arm_close(&a->alone);
    free(a->inputs.values);
    free(a->weights.values);
}

// Rank me's part of a batch.
static struct part part_of(const int *tokens_of_rank) {
    struct part part = {0, tokens_of_rank[me]};
    for (int r = 0; r < me; r++) part.first += tokens_of_rank[r];
    return part;
}

static int sum_tokens(const int *tokens_of_rank) {
    int sum = 0;
    for (int r = 0; r < ranks; r++) sum += tokens_of_rank[r];
    return sum;
}

static void look_at_arm(const struct arm *a, const struct batch_of_all *p, const char *when) {
    look_at("E %d, K %d, %s: %s%s", p->s.E, p->s.K, p->name, a->name, when);
}

static void begin_step(struct arm *a) {
    if (a->poisons) poison_gradients(&a->m);
    a->m.first_use = true;
}

// Two micro-batches of the same tokens: gradients are stored, then added to.
static void check_batch(struct arms *a, const struct batch_of_all *p, const int *tokens_of_rank) {
    static const char *const when[] = {", first micro-batch", ", second micro-batch"};
    struct part part = part_of(tokens_of_rank);
    struct results wanted[2];
    look_at_arm(&a->alone, p, "");
    begin_step(&a->alone);
    for (int i = 0; i < 2; i++) wanted[i] = run_layer(&a->alone, p, (struct part){0, p->tokens});
    if (a->alone.poisons) check_numbers(&a->alone, p, &wanted[1]);
    for (struct arm *arm = a->list; arm < a->list + a->count; arm++) {
        begin_step(arm);
        for (int i = 0; i < 2; i++) {
            look_at_arm(arm, p, when[i]);
            struct results found = run_layer(arm, p, part);
            check_results(&found, &wanted[i], p);
            results_close(&found);
        }
        check_gradients(&arm->m, &a->alone.m);
    }
    for (int i = 0; i < 2; i++) results_close(&wanted[i]);
}

// A batch whose routes are still to be made.
static struct batch_of_all batch_of(struct arms *a, const int *tokens_of_rank, const char *name) {
    struct batch_of_all p;
    batch_open(&p, &a->inputs, a->s, sum_tokens(tokens_of_rank));
    p.name = name;
    return p;
}

// Checks it and closes it.
static void finish_batch(struct arms *a, struct batch_of_all *p, const int *tokens_of_rank) {
    check_batch(a, p, tokens_of_rank);
    batch_close(p);
}

// Tokens of each of the ranks.
enum { TOKENS = 128 };
static const int even[MOST_RANKS] = {80, 80, 80, 80, 80, 80, 80, 80}, nothing[MOST_RANKS] = {0};
static const int ragged[MOST_RANKS] = {5, 0, 128, 1, 0, 30, 2, 64},
                 ragged_ends[MOST_RANKS] = {127, 33, 0, 65, 3, 128, 1};
static const int empty_first[MOST_RANKS] = {0, 8, 8, 8, 8, 8, 8, 8}, one_rank[MOST_RANKS] = {100};

// ---- routed experts ----

// A machine whose GPU has no megakernel has nothing to compare with.
static void need_megakernel(void) {
    if (!mok_available() || ranks > mok_most_ranks()) skip();
}

static void random_routes_have_the_bits_of_one_process(void **state) {
    (void)state;
    need_megakernel();
    static const int shapes[][2] = {{8, 1}, {8, 8}, {13, 2}, {13, 6}, {64, 6}, {64, 8}}; // E, K
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct arms a;
        arms_open(&a, shape_of(shapes[i][0], shapes[i][1], 0, TOKENS), all_ways, true);
        struct batch_of_all p = batch_of(&a, even, "random routes");
        route_at_random(&p, 903, 0);
        finish_batch(&a, &p, even);
        arms_close(&a);
    }
}

static void workloads_have_the_bits_of_one_process(void **state) {
    (void)state;
    need_megakernel();
    struct arms a;
    arms_open(&a, shape_of(16, 2, 0, TOKENS), all_ways, true);
    for (enum moe_route route = ROUTE_BALANCED; route <= ROUTE_W7; route++) {
        char name[16];
        snprintf(name, sizeof name, "W%d", (int)route - ROUTE_BALANCED);
        struct batch_of_all p = batch_of(&a, even, name);
        for (int b = 0; b < BLOCKS; b++) // W7 bursts in the step after 6
            route_fill(p.ids + (size_t)b * (size_t)p.tokens * 2, route, (struct route_place){1, 7, b}, 0, p.tokens, 16,
                       2);
        finish_batch(&a, &p, even);
    }
    arms_close(&a);
}

static void check_share(struct arms *a, const int *tokens_of_rank, const char *name) {
    struct batch_of_all p = batch_of(a, tokens_of_rank, name);
    route_at_random(&p, 904, 0);
    finish_batch(a, &p, tokens_of_rank);
}

static void check_shares(struct arms *a) {
    check_share(a, ragged, "ragged");
    check_share(a, ragged_ends, "ragged, tokens at the ends of tiles");
    check_share(a, empty_first, "no tokens on the first rank");
    check_share(a, one_rank, "tokens on the first rank alone");
    check_share(a, nothing, "no tokens");
}

// One after the other in the same buffers, as are the batches of the tests below.
static void ranks_without_tokens_serve_the_others(void **state) {
    (void)state;
    need_megakernel();
    struct arms a;
    arms_open(&a, shape_of(13, 2, 0, TOKENS), all_ways, true);
    check_shares(&a);
    arms_close(&a);
}

static void masked_routes_go_nowhere(void **state) {
    (void)state;
    need_megakernel();
    struct arms a;
    arms_open(&a, shape_of(8, 6, 0, TOKENS), all_ways, true);
    struct batch_of_all p = batch_of(&a, ragged, "masked tokens and routes");
    route_at_random(&p, 905, 0);
    for (int t = 0; t < BLOCKS * p.tokens; t++)
        for (int k = 0; k < 6; k++)
            if (t % 3 == 0 || (t + k) % 5 == 0) p.ids[t * 6 + k] = -1;
    finish_batch(&a, &p, ragged);
    p = batch_of(&a, even, "all routes masked");
    memset(p.ids, 0xff, sizeof *p.ids * BLOCKS * (size_t)p.tokens * 6);
    finish_batch(&a, &p, even);
    arms_close(&a);
}

// With two experts per token; on 8 ranks that is all the experts of one.
static void all_routes_go_to_one_rank(void **state) {
    (void)state;
    need_megakernel();
    struct arms a;
    arms_open(&a, shape_of(16, 2, 0, TOKENS), all_ways, true);
    const int *tokens[] = {even, ragged};
    for (int i = 0; i < 2; i++)
        for (int last = 0; last < 2; last++) {
            struct batch_of_all p = batch_of(&a, tokens[i], last ? "all to the last rank" : "all to the first rank");
            for (int j = 0; j < BLOCKS * p.tokens * 2; j++) p.ids[j] = last ? 15 - j % 2 : j % 2;
            finish_batch(&a, &p, tokens[i]);
        }
    arms_close(&a);
}

// An expert with more rows than a ring of 128 has; nothing that leaves its rank; rows that go one way only.
static void one_expert_per_token(void **state) {
    (void)state;
    need_megakernel();
    struct arms a;
    arms_open(&a, shape_of(16, 1, 0, TOKENS), all_ways, true);
    struct batch_of_all p = batch_of(&a, even, "all to one expert");
    for (int t = 0; t < BLOCKS * p.tokens; t++) p.ids[t] = 5;
    finish_batch(&a, &p, even);
    p = batch_of(&a, even, "nothing exchanged");
    for (int t = 0; t < BLOCKS * p.tokens; t++) // every rank has two of 16 experts or more
        p.ids[t] = parallel_first_expert(16, ranks, t % p.tokens / 80) + t % 2;
    finish_batch(&a, &p, even);
    p = batch_of(&a, one_rank, "from the first rank to the last");
    for (int t = 0; t < BLOCKS * p.tokens; t++) p.ids[t] = 15;
    finish_batch(&a, &p, one_rank);
    arms_close(&a);
}

// Routes per expert that are no multiples of anything.
static void counts_at_the_ends_of_tiles(void **state) {
    (void)state;
    need_megakernel();
    enum { E = 8, TOTAL = 1 + 63 + 65 + 127 + 129 };
    static const int counts[E] = {1, 63, 0, 65, 127, 0, 129, 0};
    int tokens[MOST_RANKS] = {0};
    for (int r = 0; r < ranks; r++) tokens[r] = TOTAL * (r + 1) / ranks - TOTAL * r / ranks;
    struct arms a;
    arms_open(&a, shape_of(E, 1, 0, TOTAL / ranks + 1), all_ways, true);
    struct batch_of_all p = batch_of(&a, tokens, "1, 63, 65, 127 and 129 rows");
    for (int b = 0; b < BLOCKS; b++)
        for (int e = 0, t = 0; e < E; e++)
            for (int i = 0; i < counts[e]; i++, t++) p.ids[b * TOTAL + (t * 101 + b) % TOTAL] = e; // 101: no divisor
    finish_batch(&a, &p, tokens);
    arms_close(&a);
}

// ---- the shared expert ----

static void shared_expert_has_the_bits_of_one_process(void **state) {
    (void)state;
    need_megakernel();
    struct arms a;
    arms_open(&a, shape_of(8, 2, 1, TOKENS), mok_ways, true);
    check_shares(&a);
    check_share(&a, even, "random routes, shared expert");
    arms_close(&a);
    arms_open(&a, shape_of(13, 6, 2, TOKENS), mok_ways, true);
    check_share(&a, even, "random routes, two shared experts");
    arms_close(&a);
}

// Rows of 2 KiB, many tiles, all multiprocessors at work: what NVLink really carries. The CPU has few rows.
static void layer_of_real_size_has_the_bits_of_one_process(void **state) {
    (void)state;
    need_megakernel();
    static const int some[] = {WAY_MOK, WAY_MOVERS, -1};
    struct shape s = shape_of(32, 4, 1, TOKENS);
    int tokens[MOST_RANKS];
    if (on_gpu()) s = (struct shape){32, 4, 1024, 768, 1, 2048};
    for (int r = 0; r < ranks; r++) tokens[r] = s.tokens;
    struct arms a;
    arms_open(&a, s, some, false);
    struct batch_of_all p = batch_of(&a, tokens, "real size");
    route_at_random(&p, 906, 0);
    finish_batch(&a, &p, tokens);
    arms_close(&a);
}

// ---- again ----

static struct results run_step(struct arm *arm, const struct batch_of_all *p, struct part part, void **gradients) {
    begin_step(arm);
    struct results r = run_layer(arm, p, part);
    *gradients = read_device(arm->m.grads, sizeof(accum) * arm->m.params.size);
    return r;
}

static void check_repeats(struct arm *arm, const struct batch_of_all *p, struct part part) {
    size_t rows = BLOCKS * (size_t)part.N, row = sizeof(real) * (size_t)p->s.H, gates = sizeof(accum) * (size_t)p->s.K;
    void *first_gradients, *gradients;
    struct results first = run_step(arm, p, part, &first_gradients);
    look_at_arm(arm, p, ", the same once more");
    for (int i = 1; i < 10; i++) {
        struct results r = run_step(arm, p, part, &gradients);
        check_bits("y", r.y, first.y, rows * row);
        check_bits("dx", r.dx, first.dx, rows * row);
        check_bits("d gates", r.d_gates, first.d_gates, rows * gates);
        check_bits("gradients of weights", gradients, first_gradients, sizeof(accum) * arm->m.params.size);
        results_close(&r);
        free(gradients);
    }
    results_close(&first);
    free(first_gradients);
}

static void ten_runs_have_the_same_bits(void **state) {
    (void)state;
    need_megakernel();
    static const int some[] = {WAY_TWO_PIECES, WAY_MOK, WAY_SMALL_RING, WAY_MOVERS_SMALL_RING, -1};
    for (int shared = 0; shared < 2; shared++) {
        struct arms a;
        arms_open(&a, shape_of(13, 6, shared, TOKENS), some + shared, true); // with a shared expert the megakernel
        struct batch_of_all p = batch_of(&a, even, "random routes");
        route_at_random(&p, 907, 0);
        for (int i = 0; i < a.count; i++) check_repeats(&a.list[i], &p, part_of(even));
        batch_close(&p);
        arms_close(&a);
    }
}

// Models of one process whose passes alternate: each has symmetric memory, barriers and messages of its own.
static void models_take_turns(void **state) {
    (void)state;
    need_megakernel();
    static const int some[] = {WAY_MOK, WAY_SMALL_RING, WAY_TWO_PIECES, -1};
    struct arms a;
    arms_open(&a, shape_of(8, 2, 0, TOKENS), some, true);
    struct batch_of_all p = batch_of(&a, even, "passes of three models by turns");
    route_at_random(&p, 908, 0);
    begin_step(&a.alone);
    struct results wanted = run_layer(&a.alone, &p, (struct part){0, p.tokens}), found[MOST_WAYS];
    for (int i = 0; i < a.count; i++) {
        begin_step(&a.list[i]);
        found[i] = run_forward(&a.list[i], &p, part_of(even));
    }
    for (int i = 0; i < a.count; i++) run_backward(&found[i], &a.list[i], &p);
    for (int i = 0; i < a.count; i++) {
        look_at_arm(&a.list[i], &p, "");
        check_results(&found[i], &wanted, &p);
        check_gradients(&a.list[i].m, &a.alone.m);
        results_close(&found[i]);
    }
    results_close(&wanted);
    batch_close(&p);
    arms_close(&a);
}

// ---- soak ----

// What all ranks draw alike for a call.
static int draw_tokens(uint64_t *seed) {
    int kind = (int)random_below(seed, 4);
    return kind == 0 ? 0 : kind == 1 ? 1 + (int)random_below(seed, 3) : (int)random_below(seed, TOKENS + 1);
}

static void route_for_call(struct batch_of_all *p, uint64_t *seed) {
    static const char *const names[] = {"random", "hot", "masked"};
    int kind = (int)random_below(seed, 3), E = p->s.E, K = p->s.K;
    p->name = names[kind];
    route_at_random(p, random_next(seed), kind == 1 ? E - K : 0); // hot: every token has the last K
    for (int i = 0; i < BLOCKS * p->tokens * K && kind == 2; i++)
        if (random_below(seed, 3) == 0) p->ids[i] = -1;
}

// Now and then one rank comes late.
static void come_late(uint64_t *seed) {
    int rank = (int)random_below(seed, 4 * (uint64_t)ranks);
    if (rank == me) usleep((useconds_t)(100 << random_below(seed, 6)));
}

static void run_call(struct arms *a, int call) {
    uint64_t seed = random_mix((uint64_t)call + 1000);
    int tokens[MOST_RANKS] = {0};
    struct batch_of_all p;
    for (int r = 0; r < ranks; r++) tokens[r] = draw_tokens(&seed);
    bool stored = call == 0 || random_below(&seed, 2) == 0;
    p = batch_of(a, tokens, "");
    route_for_call(&p, &seed);
    char when[64];
    snprintf(when, sizeof when, ", call %d, %s", call, stored ? "stored" : "added");
    if (stored) begin_step(&a->alone);
    struct results wanted = run_layer(&a->alone, &p, (struct part){0, p.tokens});
    for (struct arm *arm = a->list; arm < a->list + a->count; arm++) {
        uint64_t pace = random_next(&seed);
        look_at_arm(arm, &p, when);
        if (stored) begin_step(arm);
        come_late(&pace);
        struct results found = run_layer(arm, &p, part_of(tokens));
        check_results(&found, &wanted, &p);
        check_gradients(&arm->m, &a->alone.m);
        results_close(&found);
    }
    results_close(&wanted);
    batch_close(&p);
}

// What a pass leaves behind (epochs of barriers, counters, rows in the ring, slots) means nothing to the next.
static void many_calls_that_all_differ(void **state) {
    (void)state;
    need_megakernel();
    static const int some[] = {WAY_SMALL_RING, WAY_MOVERS_SMALL_RING, WAY_TWO_PIECES, -1};
    int calls = (on_gpu() ? 300 : 60) * (getenv("MOK_LONG") ? 10 : 1);
    struct arms a;
    arms_open(&a, shape_of(13, 2, 0, TOKENS), some, true);
    for (int call = 0; call < calls; call++) run_call(&a, call);
    arms_close(&a);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        RANKS_TEST(random_routes_have_the_bits_of_one_process),
        RANKS_TEST(workloads_have_the_bits_of_one_process),
        RANKS_TEST(ranks_without_tokens_serve_the_others),
        RANKS_TEST(masked_routes_go_nowhere),
        RANKS_TEST(all_routes_go_to_one_rank),
        RANKS_TEST(one_expert_per_token),
        RANKS_TEST(counts_at_the_ends_of_tiles),
        RANKS_TEST(shared_expert_has_the_bits_of_one_process),
        RANKS_TEST(layer_of_real_size_has_the_bits_of_one_process),
        RANKS_TEST(ten_runs_have_the_same_bits),
        RANKS_TEST(models_take_turns),
        RANKS_TEST(many_calls_that_all_differ),
    };
    gpu_ranks_start(argc, argv);
    me = comm_rank(comm_world());
    ranks = comm_size(comm_world());
    parallel_open(&parallel, ranks, MOST_RANKS);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    parallel_close(&parallel);
    return ranks_stop(failed);
}
