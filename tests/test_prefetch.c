// The thread that reads ahead gives what reading without it gives, from any sequence on, and ends when it should.
#include "tests/child.h"
#include "tests/shards.h"
#include "tests/test.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "data/data.h"
#include "data/prefetch.h"

enum { T = 16, AHEAD = 2, WIDTH = T + AHEAD, COUNT = 5 };

static void nap(double seconds) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))};
    nanosleep(&t, NULL);
}

static struct data *open_shards(void) {
    write_shard("p1.bin", 2, 0, 300, 0, 1);
    write_shard("p2.bin", 2, 0, 77, 300, 1);
    return data_open(at("p*.bin"), NULL, NULL, 3, T, AHEAD);
}

static void assert_block(const struct data *d, const int32_t *block, int64_t first) {
    for (int i = 0; i < COUNT; i++) {
        int32_t tokens[WIDTH];
        data_read_or_fail(d, DATA_TRAIN, (uint64_t)(first + i), tokens);
        assert_memory_equal(block + i * WIDTH, tokens, sizeof tokens);
    }
}

static void blocks_are_what_reading_gives(void **state) {
    (void)state;
    for (int stories = 0; stories <= 1; stories++) {
        struct data *d = stories ? data_open("stories", NULL, NULL, 3, T, AHEAD) : open_shards();
        struct prefetch *p = prefetch_open(d, WIDTH, COUNT, COUNT);
        double waited = 100;
        for (int64_t step = 0; step < 200; step++)
            assert_block(d, prefetch_take(p, step * COUNT, &waited), step * COUNT);
        assert_true(waited > 100);
        prefetch_close(p);
        data_close(d);
    }
}

static void any_sequence_may_be_next(void **state) {
    (void)state;
    static const int64_t firsts[] = {35, 40, 45, 45, 45, 0, 5, 1000003, 1000008, 7, 12, 2, 7, ((int64_t)1 << 40) + 1};
    struct data *d = open_shards();
    struct prefetch *p = prefetch_open(d, WIDTH, COUNT, COUNT);
    double waited = 0;
    for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        const int32_t *block = prefetch_take(p, firsts[i], &waited);
        if (i % 3 == 0) nap(0.002); // while the thread fills the other buffer
        assert_block(d, block, firsts[i]);
    }
    prefetch_close(p);
    data_close(d);
}

// Ranks that read their parts of steps of 12 sequences; one has none.
static void blocks_of_ranks_leave_out_those_of_the_others(void **state) {
    (void)state;
    enum { STEP = 12 };
    struct data *d = open_shards();
    struct prefetch *ranks[] = {prefetch_open(d, WIDTH, COUNT, STEP), prefetch_open(d, WIDTH, COUNT, STEP)};
    struct prefetch *none = prefetch_open(d, WIDTH, 0, STEP);
    double waited = 0;
    for (int64_t step = 0; step < 100; step++) {
        for (int r = 0; r < 2; r++)
            assert_block(d, prefetch_take(ranks[r], step * STEP + r * COUNT, &waited), step * STEP + r * COUNT);
        assert_non_null(prefetch_take(none, step * STEP, &waited));
    }
    prefetch_close(ranks[0]);
    prefetch_close(ranks[1]);
    prefetch_close(none);
    data_close(d);
}

static void the_thread_may_be_ended_at_any_time(void **state) {
    (void)state;
    struct data *d = open_shards();
    double waited = 0;
    prefetch_close(NULL);
    for (int i = 0; i < 50; i++) {
        struct prefetch *p = prefetch_open(d, WIDTH, COUNT, COUNT), *other = prefetch_open(d, WIDTH, COUNT, COUNT);
        for (int k = 0; k < i % 4; k++) assert_block(d, prefetch_take(p, k * COUNT, &waited), k * COUNT);
        prefetch_close(p);
        prefetch_close(other);
    }
    data_close(d);
}

// What is read while the caller is busy costs it nothing, a stride further on. The first block has to be waited for.
static void blocks_are_read_while_the_caller_is_busy(void **state) {
    (void)state;
    enum { LONG = 100000 };
    struct data *d = data_open("stories", NULL, NULL, 3, LONG, 1);
    struct prefetch *p = prefetch_open(d, LONG + 1, COUNT, 3 * COUNT);
    double first = 0, least = 1e9;
    prefetch_take(p, 0, &first);
    for (int step = 1; step < 20 && least >= first / 4; step++) { // again where the machine is busy with other things
        double waited = 0;
        nap(0.02 * step);
        prefetch_take(p, step * 3 * COUNT, &waited);
        if (waited < least) least = waited;
    }
    if (!(least < first / 4)) fail_msg("waited %g s for what was read ahead, %g s for the first block", least, first);
    prefetch_close(p);
    data_close(d);
}

static double processor_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void waiting_takes_no_processor_time(void **state) {
    (void)state;
    struct data *d = open_shards();
    struct prefetch *p = prefetch_open(d, WIDTH, COUNT, COUNT);
    double waited = 0;
    prefetch_take(p, 0, &waited);
    nap(0.05); // enough to read 5 windows
    double start = processor_seconds();
    nap(0.2);
    assert_true(processor_seconds() - start < 0.05); // a thread that spins takes 0.2 s
    prefetch_close(p);
    data_close(d);
}

static volatile sig_atomic_t caught;
static void catch_signal(int number) { caught = number; }

// Blocked in the main thread, a signal goes to any other that would take it: there must be none.
static void signals_are_left_to_the_main_thread(void **state) {
    (void)state;
    sigset_t one, before;
    struct data *d = open_shards();
    struct prefetch *p = prefetch_open(d, WIDTH, COUNT, COUNT);
    void (*old)(int) = signal(SIGTERM, catch_signal);
    sigemptyset(&one);
    sigaddset(&one, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &one, &before);
    assert_int_equal(kill(getpid(), SIGTERM), 0);
    nap(0.05);
    assert_int_equal(caught, 0);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    assert_int_equal(caught, SIGTERM);
    signal(SIGTERM, old);
    prefetch_close(p);
    data_close(d);
}

// ---- errors ----

// Takes blocks until the whole epoch has been read; the file has been cut after the first.
static void take_from_a_cut_file(void *argument) {
    (void)argument;
    struct data *d = open_shards();
    struct prefetch *p = prefetch_open(d, WIDTH, COUNT, COUNT);
    double waited = 0;
    prefetch_take(p, 0, &waited);
    if (truncate(at("p2.bin"), 1024) != 0) _exit(9);
    for (int64_t first = COUNT; first < 100; first += COUNT) prefetch_take(p, first, &waited);
}

static void a_block_that_cannot_be_read_ends_the_program(void **state) {
    (void)state;
    char text[8192];
    int code = run_child(take_from_a_cut_file, NULL, text, sizeof text);
    if (code != 2) fail_msg("exit code %d, wanted 2: %s", code, text);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    assert_contains(text, "mok: error: /tmp");
    assert_contains(text, "p2.bin: found 1024 bytes, wanted the 1178 it had");
}

static void a_block_that_nobody_takes_may_fail(void **state) {
    (void)state;
    struct data *d = open_shards();
    struct prefetch *p =
        prefetch_open(d, WIDTH, 10 * COUNT, 10 * COUNT); // more than an epoch: every block reads both shards
    double waited = 0;
    prefetch_take(p, 0, &waited);
    nap(0.02);
    assert_int_equal(truncate(at("p1.bin"), 1024) | truncate(at("p2.bin"), 1024), 0);
    prefetch_close(p);
    p = prefetch_open(d, WIDTH, COUNT, COUNT);
    prefetch_close(p);
    data_close(d);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(blocks_are_what_reading_gives),
        TEST(any_sequence_may_be_next),
        TEST(blocks_of_ranks_leave_out_those_of_the_others),
        TEST(the_thread_may_be_ended_at_any_time),
        TEST(blocks_are_read_while_the_caller_is_busy),
        TEST(waiting_takes_no_processor_time),
        TEST(signals_are_left_to_the_main_thread),
        TEST(a_block_that_cannot_be_read_ends_the_program),
        TEST(a_block_that_nobody_takes_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
