// The megakernel's protocol without any multiplication: whoever runs when, nobody waits for ever, reads what is not there
// yet, or overwrites what is still needed. tests/mok_simulation.h is the model.
#include "tests/mok_plans.h"
#include "tests/mok_simulation.h"

#include <omp.h>

// ---- cases ----

// Row blocks of the experts; with two ranks the first half is rank 0's. Rings and minibatches in blocks.
struct protocol_case {
    const char *name;
    int ranks, experts, blocks[8];
    int minibatch, ring, lag;
    int hidden, intermediate, shared, tokens; // tokens: blocks of them at least, for the shared expert
    int move_rows;
};

// Small enough for every order of their steps.
static const struct protocol_case tiny[] = {
    {"no rows at all", 1, 2, {0}, 1, 1, 0, 1, 1, 0, 0, 128},
    {"one expert over three macrobatches", 1, 1, {3}, 1, 1, 1, 1, 1, 0, 0, 128},
    {"three experts, a ring of one block", 1, 3, {1, 1, 1}, 1, 1, 0, 1, 1, 0, 0, 128},
    {"the second expert is cut", 1, 2, {1, 2}, 1, 2, 1, 1, 1, 0, 0, 128},
    {"the second expert is cut, one phase", 1, 2, {1, 2}, 2, 2, 1, 1, 1, 0, 0, 128},
    {"a ring exactly full, empty experts at both ends and between", 1, 5, {0, 1, 0, 1, 0}, 1, 2, 20, 1, 1, 0, 0, 128},
    {"an empty expert where macrobatches meet", 1, 4, {1, 0, 2, 0}, 1, 1, 0, 1, 1, 0, 0, 128},
    {"two groups and two tiles of each kind", 1, 1, {2}, 1, 1, 1, 257, 257, 0, 0, 64},
    {"an expert of two blocks and one more", 1, 1, {3}, 1, 2, 0, 1, 1, 0, 0, 128},
    {"a shared expert over two blocks of tokens", 1, 1, {1}, 1, 1, 0, 1, 1, 257, 2, 128},
    {"a shared expert of one tile", 1, 1, {1}, 1, 1, 0, 1, 1, 1, 2, 128},
    {"four macrobatches, three cut experts", 1, 5, {1, 2, 0, 3, 2}, 1, 2, 1, 1, 1, 0, 0, 128},
    {"two ranks, a ring of one minibatch", 2, 4, {1, 2, 3, 0}, 1, 1, 1, 1, 1, 0, 0, 128},
    {"two ranks, a ring of two minibatches", 2, 2, {3, 4}, 1, 2, 1, 1, 1, 0, 0, 128},
};
enum { TINY = sizeof tiny / sizeof *tiny };

static const struct protocol_case large[] = {
    {"no rows at all", 1, 3, {0}, 1, 2, 4, 300, 300, 300, 1, 32},
    {"one expert over three macrobatches", 2, 4, {0, 9, 1, 0}, 1, 3, 2, 257, 300, 0, 0, 32},
    {"a ring of one minibatch", 1, 4, {2, 3, 0, 5}, 2, 2, 3, 300, 513, 200, 1, 64},
    {"a ring exactly full", 1, 4, {2, 0, 3, 1}, 2, 6, 5, 300, 257, 0, 0, 16},
    {"a ring of three minibatches, cut experts", 2, 8, {1, 2, 0, 5, 4, 0, 3, 1}, 1, 3, 20, 129, 129, 130, 1, 64},
    {"the last macrobatch is short", 1, 3, {4, 1, 2}, 2, 4, 1, 513, 129, 0, 0, 128},
    {"every macrobatch cuts an expert", 1, 5, {3, 3, 3, 3, 2}, 1, 2, 1, 257, 257, 0, 0, 64},
    {"one tile, many blocks", 1, 8, {1, 1, 2, 1, 4, 1, 3, 1}, 1, 2, 2, 1, 1, 0, 0, 128},
};
enum { LARGE = sizeof large / sizeof *large };

static int rows_of_blocks(int blocks) { return blocks ? (blocks - 1) * MOK_BLOCK_ROWS + 1 : 0; }

static void open_case(struct plans *w, const struct protocol_case *c) {
    int counts[8];
    for (int e = 0; e < c->experts; e++) counts[e] = rows_of_blocks(c->blocks[e]);
    struct mok_shape s = {.ranks = c->ranks,
                          .experts = c->experts,
                          .top_k = 1,
                          .hidden = c->hidden,
                          .intermediate = c->intermediate,
                          .shared = c->shared,
                          .minibatch_rows = c->minibatch * MOK_BLOCK_ROWS,
                          .ring_rows = c->ring * MOK_BLOCK_ROWS,
                          .lag = c->lag,
                          .move_rows = c->move_rows};
    s.max_tokens = plans_most_tokens(counts, c->experts, c->ranks, 50);
    if (s.max_tokens < rows_of_blocks(c->tokens)) s.max_tokens = rows_of_blocks(c->tokens);
    plans_open(w, &s);
    plans_route_counts(w, counts, 50);
    if (c->tokens) // the others are masked
        for (int r = 0; r < c->ranks; r++) w->tokens[r] = s.max_tokens;
    plans_make(w);
}

// Calls check for forward, backward, and backward that finds nothing of forward in the ring, of every rank.
static void for_passes(const struct protocol_case *c, const char *(*check)(struct sim *m, void *argument),
                       void *argument) {
    struct plans w;
    open_case(&w, c);
    for (int r = 0; r < c->ranks; r++)
        for (int way = 0; way < 3; way++) {
            struct sim m;
            w.s.replay = way == 2;
            sim_open(&m, &w.s, &w.plan[r], way == 0 ? MOK_FORWARD : MOK_BACKWARD, sim_no_change);
            const char *error = check(&m, argument);
            if (error) fail_msg("%s, rank %d%s: %s", c->name, r, w.s.replay ? ", all replayed" : "", error);
            sim_close(&m);
        }
    plans_close(&w);
}

// ---- one after the other ----

static const char *check_alone(struct sim *m, void *argument) {
    (void)argument;
    const char *error = sim_run_fixed(m, 1, 0, false);
    if (!error) error = sim_run_fixed(m, 2, 1, false);
    return error ? error : sim_run_fixed(m, 2, 1, true);
}

// The rest of the machine may be busy with something else for as long as it likes.
static void test_any_one_worker_finishes_alone(void **state) {
    (void)state;
    for (int i = 0; i < TINY; i++) for_passes(&tiny[i], check_alone, NULL);
    for (int i = 0; i < LARGE; i++) for_passes(&large[i], check_alone, NULL);
}

// Movers alone, as far as they get.
static void move_all(struct sim *m, struct sim_state *st) {
    enum sim_action options[SIM_MOST_OPTIONS];
    while (sim_options(m, st, 0, options) && options[0] != SIM_LEAVE) assert_null(sim_step(m, st, 0, options[0]));
}

static const char *check_waits_look_back(struct sim *m, void *argument) {
    (void)argument;
    struct sim_state *st = sim_alloc_states(m, 1);
    sim_start(m, st, 2, 1);
    for (int i = 0; i < m->tasks; i++) {
        move_all(m, st);
        if (!sim_is_reached(m, st, i)) {
            snprintf(m->error, sizeof m->error, "task %d of pass %d waits for something that comes later", i, m->pass);
            free(st);
            return m->error;
        }
        const char *error = sim_begin_job(m, st, &m->jobs[i]);
        if (!error) error = sim_end_job(m, st, &m->jobs[i]);
        assert_null(error);
    }
    move_all(m, st);
    assert_int_equal(st->next_push, m->moves);
    free(st);
    return NULL;
}

static void test_a_task_waits_only_for_earlier_tasks_and_movers(void **state) {
    (void)state;
    for (int i = 0; i < TINY; i++) for_passes(&tiny[i], check_waits_look_back, NULL);
    for (int i = 0; i < LARGE; i++) for_passes(&large[i], check_waits_look_back, NULL);
}

// ---- in any order ----

struct crew {
    int workers, movers;
};

struct random_runs {
    uint64_t seed;
    int runs;
};

static const char *check_random_runs(struct sim *m, void *argument) {
    struct random_runs *r = argument;
    static const struct crew crews[] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 0}, {2, 1}, {3, 1}, {4, 2}, {5, 1}, {5, 3}};
    const char *error = NULL;
    for (int run = 0; run < r->runs && !error; run++)
        error = sim_run(m, crews[run % 10].workers, crews[run % 10].movers, &r->seed);
    return error;
}

static void test_random_orders(void **state) {
    (void)state;
    struct random_runs r = {707, getenv("MOK_LONG") ? 5000 : 200};
    omp_set_num_threads(1);
    for (int i = 0; i < LARGE; i++) for_passes(&large[i], check_random_runs, &r);
    for (int i = 0; i < TINY; i++) for_passes(&tiny[i], check_random_runs, &r);
}

// Plans at random, a few runs each.
static void test_random_orders_of_random_plans(void **state) {
    (void)state;
    struct random_runs r = {708, 10};
    uint64_t *seed = &r.seed;
    int plans = getenv("MOK_LONG") ? 20000 : 1000;
    for (int i = 0; i < plans; i++) {
        struct protocol_case c = {.name = "random", .ranks = 1 + (int)random_below(seed, 2)};
        c.experts = c.ranks + (int)random_below(seed, (uint64_t)(9 - c.ranks));
        for (int e = 0; e < c.experts; e++)
            c.blocks[e] = random_below(seed, 3) ? (int)random_below(seed, 4) : 5 * (int)random_below(seed, 2);
        c.minibatch = 1 + (int)random_below(seed, 3);
        c.ring = c.minibatch * (1 + (int)random_below(seed, 4));
        c.lag = (int)random_below(seed, 21);
        c.hidden = 1 + (int)random_below(seed, 400);
        c.intermediate = 1 + (int)random_below(seed, 400);
        c.shared = random_below(seed, 4) ? 0 : 1 + (int)random_below(seed, 400);
        c.move_rows = 128 >> random_below(seed, 3);
        for_passes(&c, check_random_runs, &r);
    }
}

// ---- in every order ----

static const char *check_all_orders(struct sim *m, void *argument) {
    static const struct crew crews[] = {{1, 0}, {2, 0}, {2, 1}, {3, 0}, {3, 1}, {4, 2}, {4, 0}, {5, 0}};
    size_t *states = argument;
    const char *error = NULL;
    for (int i = 0; i < 8 && !error; i++) {
        bool many = m->tasks > 30 && crews[i].workers > 3; // up to millions of states
        if (!many || getenv("MOK_LONG")) error = sim_search(m, crews[i].workers, crews[i].movers, states);
    }
    return error;
}

static void test_every_order_of_tiny_passes(void **state) {
    (void)state;
    size_t states = 0;
    for (int i = 0; i < TINY; i++) for_passes(&tiny[i], check_all_orders, &states);
    assert_true(states > 100000); // the search did go everywhere
}

// ---- no wait can be left out ----

struct needed_wait {
    const char *name;
    enum mok_pass pass;
    int kind;
    enum mok_counter_kind counter;
};

static const struct needed_wait needed_waits[] = {
    {"a pull for the push of the rows before", MOK_FORWARD, SIM_PULL, MOK_PUSHED},
    {"gate/up for its rows", MOK_FORWARD, MOK_TASK_GATE_UP, MOK_READY},
    {"down for hidden", MOK_FORWARD, MOK_TASK_DOWN, MOK_GATE_UP},
    {"a push for down", MOK_FORWARD, SIM_PUSH, MOK_OUT},
    {"shared down for hidden", MOK_FORWARD, MOK_TASK_SHARED_DOWN, MOK_SHARED_INNER},
    {"a pull for the push of the rows before", MOK_BACKWARD, SIM_PULL, MOK_PUSHED},
    {"a pull for the weight gradients of the rows before", MOK_BACKWARD, SIM_PULL, MOK_EXPERT_D_WEIGHTS},
    {"replayed gate/up for its rows", MOK_BACKWARD, MOK_TASK_GATE_UP, MOK_READY},
    {"d hidden for its rows", MOK_BACKWARD, MOK_TASK_D_HIDDEN, MOK_READY},
    {"d hidden for the replay", MOK_BACKWARD, MOK_TASK_D_HIDDEN, MOK_GATE_UP},
    {"d hidden for the expert's gradients so far", MOK_BACKWARD, MOK_TASK_D_HIDDEN, MOK_EXPERT_D_WEIGHTS},
    {"d x for d hidden", MOK_BACKWARD, MOK_TASK_D_X, MOK_D_HIDDEN},
    {"d w2 for d hidden", MOK_BACKWARD, MOK_TASK_D_W2, MOK_EXPERT_D_HIDDEN},
    {"d w13 for d hidden", MOK_BACKWARD, MOK_TASK_D_W13, MOK_EXPERT_D_HIDDEN},
    {"a push for d x", MOK_BACKWARD, SIM_PUSH, MOK_OUT},
    {"shared d x for d hidden", MOK_BACKWARD, MOK_TASK_SHARED_D_X, MOK_SHARED_INNER},
    {"shared d w2 for d hidden", MOK_BACKWARD, MOK_TASK_SHARED_D_W2, MOK_SHARED_ALL},
    {"shared d w13 for d hidden", MOK_BACKWARD, MOK_TASK_SHARED_D_W13, MOK_SHARED_ALL},
};

// Whether some workers can go wrong in a case once the change is made.
static bool is_noticed(const struct protocol_case *c, enum mok_pass pass, struct sim_change change, int workers) {
    struct plans w;
    size_t states = 0;
    bool noticed = false;
    open_case(&w, c);
    for (int r = 0; r < c->ranks && !noticed; r++) {
        struct sim m;
        sim_open(&m, &w.s, &w.plan[r], pass, change);
        noticed = m.changed && sim_search(&m, workers, 0, &states) != NULL;
        sim_close(&m);
    }
    plans_close(&w);
    return noticed;
}

static bool is_noticed_somewhere(const struct needed_wait *wait, int less) {
    struct sim_change change = {wait->kind, wait->counter, less};
    for (int workers = 2; workers <= SIM_MOST_WORKERS; workers++)
        for (int c = 0; c < TINY; c++)
            if (is_noticed(&tiny[c], wait->pass, change, workers)) return true;
    return false;
}

// Each wait is there for a reason: without it, or with one tile or group less, some order of the steps goes wrong. So the
// tests above would notice if it were missing.
static void test_every_wait_is_needed_to_the_last_tile(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof needed_waits / sizeof *needed_waits; i++) {
        const struct needed_wait *wait = &needed_waits[i];
        if (!is_noticed_somewhere(wait, SIM_ALL)) fail_msg("%s (pass %d): not needed", wait->name, wait->pass);
        if (!is_noticed_somewhere(wait, 1)) fail_msg("%s (pass %d): one less is enough", wait->name, wait->pass);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_one_worker_finishes_alone),
        cmocka_unit_test(test_a_task_waits_only_for_earlier_tasks_and_movers),
        cmocka_unit_test(test_random_orders),
        cmocka_unit_test(test_random_orders_of_random_plans),
        cmocka_unit_test(test_every_order_of_tiny_passes),
        cmocka_unit_test(test_every_wait_is_needed_to_the_last_tile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
