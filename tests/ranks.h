// For tests that run on several ranks (mpirun -n 4 build/cpu/tests/test_x), or alone without mpirun. Every rank runs all
// tests of the group; rank 0 prints the results. An assertion that fails on one rank ends the job at once, with its message
// on stderr and an exit code that is not 0: the others might wait for a rank that has left the test. So after the test
// all ranks meet, and what rank 0 calls passed has passed everywhere.
#ifndef MOK_TESTS_RANKS_H
#define MOK_TESTS_RANKS_H

#include "tests/test.h"

#include <signal.h>
#include <unistd.h>

#include "kernels/comm.h"
#include "kernels/kernels.h"

enum { RANKS_TIMEOUT = 60 }; // seconds that a rank waits for others: sanitizers on busy cores are slow

static inline void ranks_end_of_failed_test(int number) {
    char line[64];
    int length = snprintf(line, sizeof line, "rank %d: the test failed as said above\n", comm_rank(comm_world()));
    if (write(STDERR_FILENO, line, (size_t)length) < 0) _exit(1);
    signal(number, SIG_DFL);
    raise(number);
}

static inline void ranks_start(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    comm_set_timeout(RANKS_TIMEOUT);
    setvbuf(stdout, NULL, _IOLBF, 0); // what has passed is seen even if the job ends early
    if (comm_size(comm_world()) == 1) return;
    setenv("CMOCKA_TEST_ABORT", "1", 1); // a failed assertion calls abort
    signal(SIGABRT, ranks_end_of_failed_test);
    if (comm_rank(comm_world()) != 0 && !freopen("/dev/null", "w", stdout)) abort();
}

// The number of tests that failed on any rank: what main returns.
static inline int ranks_stop(int failed) {
    int64_t sum = failed;
    comm_sum_int64(comm_world(), &sum, 1);
    comm_stop();
    return sum < 100 ? (int)sum : 100;
}

static inline int ranks_meet(void **state) {
    (void)state;
    comm_barrier(comm_world());
    return 0;
}

#define RANKS_TEST(function) cmocka_unit_test_teardown(function, ranks_meet)

#define ranks_main(argc, argv, tests) (ranks_start(argc, argv), ranks_stop(cmocka_run_group_tests(tests, NULL, NULL)))

#endif
