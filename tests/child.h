// Calls that end the process, made in a child.
#ifndef MOK_TESTS_CHILD_H
#define MOK_TESTS_CHILD_H

#include "tests/test.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

// Runs call(argument) in a child with its standard output thrown away. Returns the exit code, 0 if call returns and 128
// if a signal ended it; text [size] receives what it wrote to stderr, with a final zero.
static inline int run_child(void (*call)(void *), void *argument, char *text, size_t size) {
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int null = open("/dev/null", O_WRONLY);
        if (null < 0 || dup2(null, STDOUT_FILENO) < 0 || dup2(ends[1], STDERR_FILENO) < 0) _exit(99);
        close(ends[0]);
        close(ends[1]);
        call(argument);
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    for (ssize_t got; (got = read(ends[0], text + used, size - 1 - used)) > 0;) used += (size_t)got;
    text[used] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

#endif
