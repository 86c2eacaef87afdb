// What workers of the megakernel did, as events of a trace: names and places of tasks, and what a GPU's blocks record.
#include "tests/mok_plans.h"

#include "kernels/mok_events.h"

enum { LAYER = 3, FIRST_EXPERT = 40, EVENTS = 3 * MOK_RECORDS };

static const struct mok_shape shape = {.ranks = 2,
                                       .experts = 6,
                                       .top_k = 2,
                                       .hidden = 600,
                                       .intermediate = 300,
                                       .shared = 200,
                                       .max_tokens = 500,
                                       .minibatch_rows = 256,
                                       .ring_rows = 512,
                                       .lag = 3,
                                       .move_rows = 32};
static const struct mok_events events = {&shape, LAYER, FIRST_EXPERT};

// ---- names and places ----

static void assert_event(struct trace_event e, const char *name, int expert, int phase, int first_row, int bytes) {
    assert_string_equal(e.name, name);
    assert_int_equal(e.block, LAYER);
    assert_int_equal(e.expert, expert);
    assert_int_equal(e.phase, phase);
    assert_int_equal(e.first_row, first_row);
    assert_int_equal(e.bytes, bytes);
}

// Row block 5 is in the third minibatch, of two blocks each.
static void every_kind_of_task_has_its_name_and_place(void **state) {
    (void)state;
    static const struct {
        enum mok_task_kind kind;
        const char *name;
        bool shared, rows;
    } kinds[] = {
        {MOK_TASK_SHARED_GATE_UP, "shared gate/up", true, false},
        {MOK_TASK_SHARED_DOWN, "shared down", true, false},
        {MOK_TASK_SHARED_D_HIDDEN, "shared d hidden", true, false},
        {MOK_TASK_SHARED_D_X, "shared d x", true, false},
        {MOK_TASK_SHARED_D_W2, "shared d w2", true, false},
        {MOK_TASK_SHARED_D_W13, "shared d w13", true, false},
        {MOK_TASK_GATE_UP, "gate/up", false, true},
        {MOK_TASK_DOWN, "down", false, true},
        {MOK_TASK_D_HIDDEN, "d hidden", false, true},
        {MOK_TASK_D_X, "d x", false, true},
        {MOK_TASK_D_W2, "d w2", false, false},
        {MOK_TASK_D_W13, "d w13", false, false},
    };
    assert_int_equal(sizeof kinds / sizeof *kinds, MOK_TASK_D_W13 + 1);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct mok_task task = {kinds[i].kind, 5, 1, kinds[i].shared ? -1 : 2};
        assert_string_equal(mok_task_name(task), kinds[i].name);
        assert_true(mok_is_d_weights(task) == (!kinds[i].shared && !kinds[i].rows));
        struct trace_event e = mok_event_of(&events, mok_task_name(task), task, 0, 0);
        assert_event(e, kinds[i].name, kinds[i].shared ? -1 : FIRST_EXPERT + 2, kinds[i].rows ? 2 : -1,
                     kinds[i].rows ? 5 * MOK_BLOCK_ROWS : -1, 0);
    }
    assert_string_equal(mok_task_name((struct mok_task){-1, 0, 0, 0}), "none");
}

static void moves_have_their_first_row_and_bytes(void **state) {
    (void)state;
    struct mok_task rows = {-1, 3, 0, 1};
    assert_event(mok_event_of(&events, "push", rows, 96, 4096), "push", FIRST_EXPERT + 1, 1, 3 * MOK_BLOCK_ROWS + 96,
                 4096);
}

// Every task of both passes of a plan with three macrobatches has a name, and a place that the plan has too.
static void tasks_of_a_plan_lie_in_its_rows(void **state) {
    (void)state;
    static const int counts[] = {129, 300, 128, 1, 127, 200};
    struct plans w;
    plans_open(&w, &shape);
    plans_route_counts(&w, counts, 3);
    plans_make(&w);
    for (int r = 0; r < shape.ranks; r++)
        for (int pass = 0; pass < MOK_PASSES; pass++) {
            const struct mok_plan *p = &w.plan[r];
            int tasks = mok_task_total(&shape, p, (enum mok_pass)pass);
            for (int i = 0; i < tasks; i++) {
                struct mok_task task = mok_task_at(&shape, p, (enum mok_pass)pass, i);
                struct trace_event e = mok_event_of(&events, mok_task_name(task), task, 0, 0);
                assert_string_not_equal(e.name, "none");
                assert_true(e.expert == -1 || e.expert - FIRST_EXPERT < p->experts);
                if (e.first_row < 0) continue;
                assert_true(e.first_row < p->blocks * MOK_BLOCK_ROWS);
                assert_int_equal(e.phase, e.first_row / shape.minibatch_rows);
            }
        }
    plans_close(&w);
}

// ---- tracks ----

static void tracks_have_the_names_of_blocks(void **state) {
    (void)state;
    static const struct {
        struct mok_blocks blocks;
        int tracks, track;
        const char *name;
    } cases[] = {
        {{3, 0}, 9, 0, "block 0"},          {{3, 0}, 9, 2, "block 2"},         {{3, 0}, 9, 3, "block 0 pull"},
        {{3, 0}, 9, 5, "block 2 pull"},     {{3, 0}, 9, 6, "block 0 push"},    {{3, 0}, 9, 8, "block 2 push"},
        {{3, 2}, 30, 2, "block 2"},         {{3, 2}, 30, 3, "mover 0 pull 0"}, {{3, 2}, 30, 14, "mover 0 pull 11"},
        {{3, 2}, 30, 15, "mover 1 pull 0"}, {{3, 2}, 30, 27, "block 0 push"},  {{3, 2}, 30, 29, "block 2 push"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[32];
        assert_int_equal(mok_block_tracks(cases[i].blocks), cases[i].tracks);
        mok_name_block_track(name, cases[i].blocks, cases[i].track);
        assert_string_equal(name, cases[i].name);
    }
}

// No two recorders share a lane, and every lane is somebody's.
static void every_recorder_has_a_lane(void **state) {
    (void)state;
    static const struct mok_blocks cases[] = {{1, 0}, {5, 0}, {5, 1}, {5, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct mok_blocks b = cases[i];
        int seen[256] = {0}, lanes = mok_lanes(b);
        assert_true(lanes <= 256);
        for (int block = 0; block < b.all; block++) {
            seen[mok_lane(MOK_LOADER, b.all, block)]++;
            seen[mok_lane(MOK_MULTIPLIER, b.all, block)]++;
            seen[mok_lane(MOK_STORER, b.all, block)]++;
            seen[mok_lane(MOK_STORER, b.all, b.all + block)]++;
        }
        for (int puller = 0; puller < mok_pullers(b); puller++) seen[mok_lane(MOK_PULLER, b.all, puller)]++;
        for (int lane = 0; lane < 256; lane++) assert_int_equal(seen[lane], lane < lanes);
    }
}

// ---- what blocks recorded ----

struct scene {
    struct mok_blocks blocks;
    struct mok_log log;
    struct trace trace;
};

static void *take(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) abort();
    return memory;
}

static void scene_open(struct scene *s, int blocks, int movers) {
    *s = (struct scene){.blocks = {blocks, movers}};
    size_t lanes = (size_t)mok_lanes(s->blocks);
    s->log.records = take(lanes * MOK_RECORDS, sizeof *s->log.records);
    s->log.counts = take(lanes, sizeof *s->log.counts);
    s->trace.track_count = TRACE_TRACK_WORKER + mok_block_tracks(s->blocks) + 1;
    s->trace.tracks = take((size_t)s->trace.track_count, sizeof *s->trace.tracks);
    for (int i = 0; i < s->trace.track_count; i++)
        s->trace.tracks[i] =
            (struct trace_track){.events = take(EVENTS, sizeof(struct trace_event)), .capacity = EVENTS};
}

static void scene_close(struct scene *s) {
    for (int i = 0; i < s->trace.track_count; i++) free(s->trace.tracks[i].events);
    free(s->trace.tracks);
    free(s->log.counts);
    free(s->log.records);
}

// The GPU's clock at the moment 5 s of the host's. Its digits do not fit into a double.
enum { CLOCK_SECONDS = 5 };
static const uint64_t clock_start = 1764523456789012345u;

// Nanoseconds are from that moment on; they may be before it.
static void happened(struct scene *s, enum mok_recorder kind, int number, int begin, int end, struct mok_task task,
                     int bytes) {
    int lane = mok_lane(kind, s->blocks.all, number), at = s->log.counts[lane]++;
    if (at >= MOK_RECORDS) return;
    s->log.records[(size_t)lane * MOK_RECORDS + (size_t)at] = (struct mok_record){
        clock_start + (uint64_t)(int64_t)begin, clock_start + (uint64_t)(int64_t)end, task, bytes, 0};
}

static void scene_read(struct scene *s) {
    mok_add_events(&s->trace, &events, &s->log, s->blocks, (struct mok_moment){CLOCK_SECONDS, clock_start});
}

static const struct trace_track *track_of(const struct scene *s, int track) {
    return &s->trace.tracks[TRACE_TRACK_WORKER + track];
}

// Seconds of a clock at 5 s are exact to 1e-15; the times are whole nanoseconds.
static void assert_times(const struct trace_event *e, const char *name, int begin, int end) {
    assert_string_equal(e->name, name);
    assert_true(e->begin > CLOCK_SECONDS + 1e-9 * (begin - 0.01) && e->begin < CLOCK_SECONDS + 1e-9 * (begin + 0.01));
    assert_true(e->end > CLOCK_SECONDS + 1e-9 * (end - 0.01) && e->end < CLOCK_SECONDS + 1e-9 * (end + 0.01));
}

static const struct mok_task gate_up = {MOK_TASK_GATE_UP, 2, 0, 1}, down = {MOK_TASK_DOWN, 2, 1, 1},
                             d_w2 = {MOK_TASK_D_W2, 0, 0, 2};

// Its loader waits for gate/up before anything is there, for down while gate/up is still multiplied, and for d w2 only
// beneath down.
static void a_block_waits_where_it_has_nothing_to_multiply(void **state) {
    (void)state;
    struct scene s;
    scene_open(&s, 2, 0);
    happened(&s, MOK_LOADER, 1, -50, 40, gate_up, 0);
    happened(&s, MOK_LOADER, 1, 60, 130, down, 0);
    happened(&s, MOK_LOADER, 1, 150, 160, d_w2, 0);
    happened(&s, MOK_MULTIPLIER, 1, 45, 100, gate_up, 0);
    happened(&s, MOK_MULTIPLIER, 1, 140, 200, down, 0);
    happened(&s, MOK_MULTIPLIER, 1, 210, 300, d_w2, 0);
    scene_read(&s);
    const struct trace_track *t = track_of(&s, 1);
    assert_int_equal(t->count, 5);
    assert_times(&t->events[0], "wait", -50, 40);
    assert_times(&t->events[1], "gate/up", 45, 100);
    assert_times(&t->events[2], "wait", 100, 130);
    assert_times(&t->events[3], "down", 140, 200);
    assert_times(&t->events[4], "d w2", 210, 300);
    assert_event(t->events[2], "wait", FIRST_EXPERT + 1, 1, 2 * MOK_BLOCK_ROWS, 0); // for whom
    assert_event(t->events[4], "d w2", FIRST_EXPERT + 2, -1, -1, 0);
    assert_int_equal(track_of(&s, 0)->count, 0);
    scene_close(&s);
}

// A task without a wait comes between two that have one.
static void waits_find_their_tasks(void **state) {
    (void)state;
    struct scene s;
    scene_open(&s, 1, 0);
    happened(&s, MOK_LOADER, 0, 110, 190, d_w2, 0);
    happened(&s, MOK_MULTIPLIER, 0, 0, 50, gate_up, 0);
    happened(&s, MOK_MULTIPLIER, 0, 50, 100, down, 0);
    happened(&s, MOK_MULTIPLIER, 0, 200, 300, d_w2, 0);
    scene_read(&s);
    const struct trace_track *t = track_of(&s, 0);
    assert_int_equal(t->count, 4);
    assert_times(&t->events[2], "wait", 110, 190);
    scene_close(&s);
}

static void a_tile_is_pushed_by_both_halves(void **state) {
    (void)state;
    struct scene s;
    scene_open(&s, 2, 0);
    happened(&s, MOK_STORER, 0, 100, 180, down, 1000);
    happened(&s, MOK_STORER, 0, 190, 260, down, 10);
    happened(&s, MOK_STORER, 2 + 0, 90, 200, down, 2000); // the second half's storer of block 0
    happened(&s, MOK_STORER, 2 + 0, 210, 250, down, 20);
    scene_read(&s);
    const struct trace_track *t = track_of(&s, 4);
    assert_int_equal(t->count, 2);
    assert_times(&t->events[0], "push", 90, 200);
    assert_times(&t->events[1], "push", 200, 260); // the first half was there at 190
    assert_event(t->events[0], "push", FIRST_EXPERT + 1, 1, 2 * MOK_BLOCK_ROWS, 3000);
    assert_int_equal(t->events[1].bytes, 30);
    assert_int_equal(track_of(&s, 5)->count, 0);
    scene_close(&s);
}

// A block's last 64 rows may be padding, of which nothing is pushed.
static void a_tile_of_half_a_block_is_pushed_by_one(void **state) {
    (void)state;
    const struct mok_task half = {down.kind, down.block + 1, down.tile, down.expert};
    struct scene s;
    scene_open(&s, 1, 0);
    happened(&s, MOK_STORER, 0, 100, 180, half, 1000);
    happened(&s, MOK_STORER, 0, 300, 380, down, 10);
    happened(&s, MOK_STORER, 0, 400, 480, half, 100);
    happened(&s, MOK_STORER, 1, 310, 390, down, 20);
    scene_read(&s);
    const struct trace_track *t = track_of(&s, 2);
    assert_int_equal(t->count, 3);
    assert_times(&t->events[0], "push", 100, 180);
    assert_int_equal(t->events[0].bytes, 1000);
    assert_times(&t->events[1], "push", 300, 390);
    assert_int_equal(t->events[1].bytes, 30);
    assert_times(&t->events[2], "push", 400, 480);
    assert_int_equal(t->events[2].bytes, 100);
    scene_close(&s);
}

static void pulls_are_of_the_warp_that_made_them(void **state) {
    (void)state;
    struct scene s;
    scene_open(&s, 2, 1);
    happened(&s, MOK_PULLER, 11, 10, 20, (struct mok_task){-1, 1, 64, 0}, 5000);
    happened(&s, MOK_PULLER, 11, 20, 30, (struct mok_task){-1, 4, 96, 2}, 0);
    scene_read(&s);
    const struct trace_track *t = track_of(&s, 2 + 11); // "mover 0 pull 11"
    assert_int_equal(t->count, 2);
    assert_times(&t->events[0], "pull", 10, 20);
    assert_event(t->events[0], "pull", FIRST_EXPERT, 0, MOK_BLOCK_ROWS + 64, 5000);
    assert_event(t->events[1], "pull", FIRST_EXPERT + 2, 2, 4 * MOK_BLOCK_ROWS + 96, 0);
    scene_close(&s);
}

static void what_does_not_fit_is_counted(void **state) {
    (void)state;
    struct scene s;
    scene_open(&s, 1, 0);
    for (int i = 0; i < MOK_RECORDS + 7; i++) happened(&s, MOK_MULTIPLIER, 0, 10 * i, 10 * i + 9, gate_up, 0);
    for (int i = 0; i < MOK_RECORDS; i++) happened(&s, MOK_PULLER, 0, i, i + 1, (struct mok_task){-1, 0, 0, 0}, 1);
    scene_read(&s);
    assert_int_equal(track_of(&s, 0)->count, MOK_RECORDS);
    assert_int_equal(track_of(&s, 0)->dropped, 7);
    assert_int_equal(track_of(&s, 1)->count, MOK_RECORDS);
    assert_int_equal(track_of(&s, 1)->dropped, 0); // it was just full
    scene_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_of_task_has_its_name_and_place),
        cmocka_unit_test(moves_have_their_first_row_and_bytes),
        cmocka_unit_test(tasks_of_a_plan_lie_in_its_rows),
        cmocka_unit_test(tracks_have_the_names_of_blocks),
        cmocka_unit_test(every_recorder_has_a_lane),
        cmocka_unit_test(a_block_waits_where_it_has_nothing_to_multiply),
        cmocka_unit_test(waits_find_their_tasks),
        cmocka_unit_test(a_tile_is_pushed_by_both_halves),
        cmocka_unit_test(a_tile_of_half_a_block_is_pushed_by_one),
        cmocka_unit_test(pulls_are_of_the_warp_that_made_them),
        cmocka_unit_test(what_does_not_fit_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
