// The last line of a program: one line, whatever it is about.
#include "tests/child.h"

#include "kernels/fail.h"

static char text[40000]; // what the last child wrote to stderr

static int run_call(void (*call)(void *), const void *argument) {
    return run_child(call, (void *)argument, text, sizeof text);
}

static void user(void *message) { fail_user("--steps", "%s", (const char *)message); }
static void internal(void *message) { fail_internal("--steps", "%s", (const char *)message); }
static void warn(void *message) { fail_warn("--steps", "%s", (const char *)message); }
static void user_place(void *place) { fail_user(place, "found %d, wanted %d", 1, 2); }

static void line_says_place_and_message_and_the_code_whose_fault_it_is(void **state) {
    (void)state;
    assert_int_equal(run_call(user, "found 0, wanted 1"), 2);
    assert_string_equal(text, "mok: error: --steps: found 0, wanted 1\n");
    assert_int_equal(run_call(internal, "found 0, wanted 1"), 1);
    assert_string_equal(text, "mok: error: --steps: found 0, wanted 1\n");
    assert_int_equal(run_call(warn, "found 0, wanted 1"), 0); // and goes on
    assert_string_equal(text, "mok: warning: --steps: found 0, wanted 1\n");
    assert_int_equal(run_call(user_place, "a file"), 2);
    assert_string_equal(text, "mok: error: a file: found 1, wanted 2\n");
}

static void end_job(int code) { _exit(40 + code); }
static void user_of_rank(void *message) {
    fail_set_rank(12, end_job);
    user(message);
}
static void internal_of_rank(void *message) {
    fail_set_rank(12, end_job);
    internal(message);
}
static void warn_of_rank(void *message) {
    fail_set_rank(12, end_job);
    warn(message);
}
static void user_of_one_again(void *message) {
    fail_set_rank(12, end_job);
    fail_set_rank(0, NULL);
    user(message);
}

// exit() in one rank would leave the others waiting.
static void in_a_job_of_several_ranks_the_line_names_the_rank_and_the_job_is_ended(void **state) {
    (void)state;
    assert_int_equal(run_call(user_of_rank, "found 0, wanted 1"), 42);
    assert_string_equal(text, "mok: error: rank 12: --steps: found 0, wanted 1\n");
    assert_int_equal(run_call(internal_of_rank, "found 0, wanted 1"), 41);
    assert_string_equal(text, "mok: error: rank 12: --steps: found 0, wanted 1\n");
    assert_int_equal(run_call(warn_of_rank, "found 0, wanted 1"), 0);
    assert_string_equal(text, "mok: warning: rank 12: --steps: found 0, wanted 1\n");
    assert_int_equal(run_call(user_of_one_again, "found 0, wanted 1"), 2);
    assert_string_equal(text, "mok: error: --steps: found 0, wanted 1\n");
}

// A name in a damaged file may clear the screen, set its title, or begin a line that looks like another message.
static void what_a_terminal_would_obey_is_hidden(void **state) {
    (void)state;
    const char *lines[][2] = {
        {"a\033[2Jb\033]0;title\007c", "a?[2Jb?]0;title?c"},
        {"a\nmok: error: b\r\n\tc\v\f", "a?mok: error: b???c??"},
        {"\001\037 ~\177", "?? ~?"},
        {"a\xc2\x9b"
         "2Jb\xc2\x80\xc2\x9f",
         "a??2Jb????"}, // the same in Latin-1's second row
        {"\xc2\xa0\xc3\x9b \xe2\x82\xac \xf0\x9f\xa6\x8a \xd0\x90",
         "\xc2\xa0\xc3\x9b \xe2\x82\xac \xf0\x9f\xa6\x8a \xd0\x90"},
        {"\xff\xfe\xc2", "\xff\xfe\xc2"}, // no UTF-8, and the end is not read over
        {"", ""},
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        char wanted[256];
        snprintf(wanted, sizeof wanted, "mok: error: --steps: %s\n", lines[i][1]);
        assert_int_equal(run_call(user, lines[i][0]), 2);
        assert_string_equal(text, wanted);
        assert_int_equal(run_call(internal, lines[i][0]), 1);
        assert_string_equal(text, wanted);
    }
    assert_int_equal(run_call(user_place, "run\033[1m/x\ny"), 2);
    assert_string_equal(text, "mok: error: run?[1m/x?y: found 1, wanted 2\n");
    char line[] = "one\ntwo";
    assert_ptr_equal(fail_hide_controls(line), line);
    assert_string_equal(line, "one?two");
}

static void what_is_too_long_is_cut(void **state) {
    (void)state;
    static char long_text[30001];
    static const size_t lengths[] = {4000, 8000, 12000, 12288, 13000, 30000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        memset(long_text, 'x', lengths[i]);
        long_text[lengths[i]] = 0;
        assert_int_equal(run_call(user, long_text), 2);
        size_t printed = strlen(text);
        assert_true(text[printed - 1] == '\n' && strchr(text, '\n') == text + printed - 1);
        assert_int_equal(strncmp(text, "mok: error: --steps: xxx", 24), 0);
        if (lengths[i] <= 8000) assert_int_equal(printed, lengths[i] + strlen("mok: error: --steps: \n"));

        // A long place leaves room for the message.
        assert_int_equal(run_call(user_place, long_text), 2);
        const char *end = ": found 1, wanted 2\n";
        printed = strlen(text);
        assert_true(printed > strlen(end) && strcmp(text + printed - strlen(end), end) == 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(line_says_place_and_message_and_the_code_whose_fault_it_is),
        cmocka_unit_test(in_a_job_of_several_ranks_the_line_names_the_rank_and_the_job_is_ended),
        cmocka_unit_test(what_a_terminal_would_obey_is_hidden),
        cmocka_unit_test(what_is_too_long_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
