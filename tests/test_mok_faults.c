// The bounded waits of the megakernel: when a worker stops, the job ends with a line that names who waited in which pass and
// task for which counter, and a rank that does not come to a barrier is named there. The ranks are threads of a child.
#include "tests/child.h"
#include "tests/mok_ranks.h"

#include "kernels/clock.h"

// ---- a worker stops ----

// A job in which a worker of one rank stops for ever before one task of one pass, and what is then said.
struct stop {
    struct dealing dealing;
    int rank;
    struct mok_task task; // expert is not compared
    const char *said[3];
};

static const struct stop *stopping;
static bool has_stopped;

static void stop_before(void *place, int worker, struct mok_task task) {
    const struct place *me = place;
    const struct mok_task *at = &stopping->task;
    (void)worker;
    if (me->group.rank != stopping->rank || task.kind != at->kind || task.block != at->block || task.tile != at->tile)
        return;
    if (__atomic_exchange_n(&has_stopped, true, __ATOMIC_RELAXED)) return;
    for (;;) pause();
}

// Expert 0 has 200 rows, row blocks 0 and 1; expert 1 has 100, row block 2. A row block has 3 gate/up tiles, 2 d hidden
// tiles and 2 output tiles.
static void run_with_stop(void *argument) {
    struct problem p;
    struct result r;
    stopping = argument;
    struct dealing d = stopping->dealing;
    d.before_task = stop_before;
    d.first_use = true;
    d.timeout = 1;
    problem_open(&p, 300, 2, 1, 300, 300, 8, 1);
    for (int t = 0; t < p.tokens; t++) p.ids[t] = t % 3 == 2;
    deal_out(&r, &p, &d);
}

static void assert_ends(void (*call)(void *), void *argument, const char *const said[3]) {
    char text[4096];
    double start = clock_seconds();
    int code = run_child(call, argument, text, sizeof text);
    double seconds = clock_seconds() - start;
    if (code != 1) fail_msg("exit code %d, wanted 1; it said: %s", code, text);
    for (int i = 0; i < 3 && said[i]; i++)
        if (!strstr(text, said[i])) fail_msg("found \"%s\", wanted it to contain \"%s\"", text, said[i]);
    if (strncmp(text, "mok: error: megakernel: ", 24) != 0 || strchr(text, '\n') != text + strlen(text) - 1)
        fail_msg("found \"%s\", wanted one line", text);
    // 1 s and the work before it; more only if the machine has much else to do.
    if (seconds > 20) fail_msg("it took %g s", seconds);
}

// Two workers that move and multiply: the other one goes on until nothing is left that can be done.
static void worker_that_stops_is_reported_with_task_and_counter(void **state) {
    (void)state;
    struct stop stops[] = {
        {{.ranks = 1},
         0,
         {MOK_TASK_SHARED_GATE_UP, 1, 0, 0},
         {" in the forward pass waited ", " s in task shared down (block 1, tile 0, local expert -1) for shared inner ",
          "tiles of token block 1: found 0, wanted 1; a worker has stopped"}},
        {{.ranks = 1},
         0,
         {MOK_TASK_GATE_UP, 1, 2, 0},
         {" in the forward pass waited ", " s in task down (block 1, tile 0, local expert 0) for gate/up tiles of ",
          "row block 1: found 2, wanted 3; "}},
        {{.ranks = 1},
         0,
         {MOK_TASK_DOWN, 2, 1, 0},
         {" in the forward pass waited ",
          " s in the push of row block 2 for output tiles of row block 2: ", "found 1, wanted 2; "}},
        {{.ranks = 1},
         0,
         {MOK_TASK_D_HIDDEN, 1, 0, 0},
         {" in the backward pass waited ", " s in task d x (block 1, tile 0, local expert 0) for d hidden tiles of ",
          "row block 1: found 1, wanted 2; "}},
    };
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) assert_ends(run_with_stop, &stops[i], stops[i].said);
}

// The worker that only moves reports it.
static void mover_reports_a_multiplier_that_stops(void **state) {
    (void)state;
    struct stop stop = {{.ranks = 1, .workers = 2, .comm_workers = 1},
                        0,
                        {MOK_TASK_GATE_UP, 0, 0, 0},
                        {" in the forward pass waited ", " s in the push of row block ", ": found 0, wanted 2; "}};
    assert_ends(run_with_stop, &stop, stop.said);
}

static void pause_before_shared(void *place, int worker, struct mok_task task) {
    (void)place, (void)worker;
    if (task.kind == MOK_TASK_SHARED_GATE_UP || task.kind == MOK_TASK_SHARED_DOWN) usleep(60000);
}

// The shared expert's 15 tasks take longer than a worker waits.
static void run_slowly(void *nothing) {
    (void)nothing;
    struct problem p;
    struct result r;
    struct dealing d = {
        .ranks = 1, .workers = 2, .comm_workers = 1, .timeout = 0.6, .before_task = pause_before_shared};
    problem_open(&p, 300, 2, 1, 300, 300, 300, 1);
    deal_out(&r, &p, &d);
    _exit(0);
}

// 60 s for a pass would be too little for large models on slow machines.
static void mover_is_patient_while_tasks_are_taken(void **state) {
    (void)state;
    char text[4096];
    int code = run_child(run_slowly, NULL, text, sizeof text);
    if (code != 0) fail_msg("exit code %d, wanted 0; it said: %s", code, text);
}

// A ring of one row block: what is pulled next overwrites what the weight gradients still read.
static void pull_that_cannot_begin_is_reported_with_its_counter(void **state) {
    (void)state;
    struct stop stop = {{.ranks = 1, .minibatch = 128, .ring = 128},
                        0,
                        {MOK_TASK_D_W2, 0, 1, 0},
                        {" in the backward pass waited ",
                         " for pulled groups of row block 1: found 0, wanted 4, and the ",
                         "pull of row block 1 for weight-gradient tiles of local expert 0: found "}};
    assert_ends(run_with_stop, &stop, stop.said);
}

// ---- a rank does not come ----

static void rank_whose_only_worker_stops_is_missed_at_the_barrier(void **state) {
    (void)state;
    struct stop stop = {
        {.ranks = 2, .workers = 1},
        1,
        {MOK_TASK_D_HIDDEN, 0, 0, 0},
        {"rank 0 of its EP group waited ", " s at barrier 4, after backward, for rank 1 (at barrier 3)"}};
    assert_ends(run_with_stop, &stop, stop.said);
}

enum { RANKS = 3 };

static void *come_twice(void *argument) {
    struct mok_group *g = argument;
    mok_barrier(g, "before the forward pass of layer 7");
    if (g->rank == 0) mok_barrier(g, "after the forward pass of layer 7");
    return NULL;
}

// All meet once, then rank 0 alone goes on.
static void miss_two(void *nothing) {
    (void)nothing;
    struct mok_group groups[RANKS];
    char *base[RANKS];
    pthread_t threads[RANKS];
    for (int r = 0; r < RANKS; r++) {
        base[r] = calloc(1, mok_header_bytes(RANKS));
        groups[r] = (struct mok_group){.rank = r, .ranks = RANKS, .base = base, .timeout = 1};
    }
    for (int r = 1; r < RANKS; r++)
        if (pthread_create(&threads[r], NULL, come_twice, &groups[r]) != 0) _exit(99);
    come_twice(&groups[0]);
}

static void ranks_that_do_not_come_are_named_with_their_last_barrier(void **state) {
    (void)state;
    static const char *const said[3] = {"rank 0 of its EP group waited ",
                                        " s at barrier 2, after the forward pass of layer 7, for rank 1 (at barrier "
                                        "1), 2 (at barrier 1) of the group; "};
    assert_ends(miss_two, NULL, said);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(worker_that_stops_is_reported_with_task_and_counter),
        cmocka_unit_test(mover_reports_a_multiplier_that_stops),
        cmocka_unit_test(mover_is_patient_while_tasks_are_taken),
        cmocka_unit_test(pull_that_cannot_begin_is_reported_with_its_counter),
        cmocka_unit_test(rank_whose_only_worker_stops_is_missed_at_the_barrier),
        cmocka_unit_test(ranks_that_do_not_come_are_named_with_their_last_barrier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
