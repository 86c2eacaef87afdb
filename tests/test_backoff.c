// Waiting for others with an end.
#include "tests/test.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/backoff.h"

static void a_wait_counts_its_seconds(void **state) {
    (void)state;
    struct backoff wait = {0};
    double start = clock_seconds(), seconds;
    while ((seconds = backoff_pause(&wait)) < 0.2) {}
    assert_true(clock_seconds() - start >= seconds);
}

// Ctrl-Z and fg: whoever goes on first finds that much time has passed, and must not give up the others for that.
static void time_in_which_the_process_was_stopped_does_not_count(void **state) {
    (void)state;
    int begun[2], status;
    char byte = 0;
    assert_int_equal(pipe(begun), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct backoff wait = {0};
        while (backoff_pause(&wait) == 0) {} // until it reads the clock
        if (write(begun[1], &byte, 1) != 1) _exit(1);
        while (backoff_pause(&wait) < 0.8) {}
        _exit(0);
    }
    assert_int_equal(read(begun[0], &byte, 1), 1);
    kill(child, SIGSTOP);
    usleep(1000000);
    kill(child, SIGCONT);
    usleep(100000); // it has 0.7 s left
    assert_int_equal(waitpid(child, &status, WNOHANG), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    close(begun[0]);
    close(begun[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_wait_counts_its_seconds),
        cmocka_unit_test(time_in_which_the_process_was_stopped_does_not_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
