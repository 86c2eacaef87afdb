// The folder of a run: what may be written into it, and whether it has the space.
#include "tests/child.h"
#include "tests/folder.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <sys/file.h>
#include <sys/syscall.h>

#include "data/files.h"
#include "kernels/kernels.h"
#include "model/checkpoint.h"
#include "model/run_folder.h"

static struct options options;

static void set_options(const char *out) {
    assert_true(options_set_preset(&options, "unit"));
    options.model.vocab = 257;
    snprintf(options.out, sizeof options.out, "%s", out);
    options.steps = 100;
    options.save_every = 10;
    options.keep = 3;
}

// Saves a checkpoint of zeros.
static void save(const char *folder, int64_t step) {
    struct params params;
    params_build(&params, &options.model);
    size_t bytes = params.size * sizeof(accum);
    accum *zeros = device_alloc(bytes), *bias = device_alloc(bytes);
    real *weights = device_alloc(params.size * sizeof(real));
    device_zero(zeros, bytes);
    device_zero(bias, bytes);
    device_zero(weights, params.size * sizeof(real));
    struct checkpoint c = {.config = &options.model,
                           .params = &params,
                           .weights = weights,
                           .master = zeros,
                           .m = zeros,
                           .v = zeros,
                           .bias = bias,
                           .step = step,
                           .seed = 1};
    checkpoint_save(&c, folder, 0);
    device_free(zeros);
    device_free(bias);
    device_free(weights);
    params_free(&params);
}

// ---- what may be written into ----

static char text[8192];          // what the last child wrote to stderr
static char from[FILE_PATH / 2]; // where the last run would go on from

static void open_and_print(void *unused) {
    (void)unused;
    run_folder_open(&options, from, sizeof from);
    run_folder_begin(&options);
    fprintf(stderr, "from %s", from);
}

// In a child, because it holds the folder until it ends.
static int open_folder(void) { return run_child(open_and_print, NULL, text, sizeof text); }

static void assert_opens(void) {
    int code = open_folder();
    if (code != 0) fail_msg("%s: exit code %d: %s", options.out, code, text);
}

static void assert_refused(const char *part) {
    assert_int_equal(open_folder(), 2);
    assert_contains(text, part);
}

static void folders_of_any_name_are_made(void **state) {
    (void)state;
    const char *names[] = {"plain",           "deep/in/a folder with spaces", "trailing/", "double//slash",
                           "./dot/../dot2/.", "\xc3\xa4\xe2\x82\xac",         "-dash",     "a\nline"};
    assert_int_equal(mkdir(at("dot"), 0777), 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char config[128];
        set_options(at(names[i]));
        assert_opens();
        assert_string_equal(text, "from ");
        snprintf(config, sizeof config, "%s/config.json", names[i]);
        assert_true(exists(config));
        assert_opens(); // and once more, as the folder that is there
    }
}

static void the_folder_one_stands_in_is_used(void **state) {
    (void)state;
    char here[4096];
    assert_non_null(getcwd(here, sizeof here));
    const char *names[] = {".", "./", "below"};
    assert_int_equal(chdir(root), 0);
    for (int i = 0; i < 3; i++) {
        set_options(names[i]);
        int code = open_folder();
        if (code != 0) (void)!chdir(here);
        assert_int_equal(code, 0);
    }
    assert_int_equal(chdir(here), 0);
    assert_true(exists("config.json") && exists("below/config.json"));
}

// Just short of what an option may hold.
static void a_very_long_path_is_used(void **state) {
    (void)state;
    char path[OPTION_TEXT];
    size_t length = (size_t)snprintf(path, sizeof path, "%s", root);
    while (length < OPTION_TEXT - 1) {
        size_t piece = OPTION_TEXT - 2 - length < 100 ? OPTION_TEXT - 2 - length : 100;
        path[length] = '/';
        memset(path + length + 1, 'x', piece);
        length += piece + 1;
    }
    path[length] = 0;
    assert_int_equal(length, OPTION_TEXT - 1);
    set_options(path);
    assert_opens();
    save(path, 7);
    options.resume = true;
    assert_opens();
    assert_contains(text, "/step-00000007");
    options.resume = false;
    assert_refused("--out: found a run in /tmp/");
}

static void what_cannot_be_a_folder_is_refused(void **state) {
    (void)state;
    write_file("file", "x", 1);
    assert_int_equal(symlink("nowhere", at("dangling")), 0);
    assert_int_equal(symlink("loop", at("loop")), 0);
    char longest[400];
    snprintf(longest, sizeof longest, "%s/", root);
    size_t length = strlen(longest);
    memset(longest + length, 'x', 300);
    longest[length + 300] = 0;
    const char *names[][2] = {
        {at("file"), "is not a folder"},     {at("file/below"), "cannot make the folder"},
        {at("dangling"), "is not a folder"}, {at("loop/below"), "Too many levels of symbolic links"},
        {longest, "File name too long"},     {"/proc/here", "cannot make the folder /proc/here"}};
    for (int i = 0; i < 6; i++) {
        set_options(names[i][0]);
        assert_refused(names[i][1]);
        assert_int_equal(strncmp(text, "mok: error: --out: ", 19), 0);
    }
}

static void a_run_is_a_log_with_a_line_or_any_checkpoint(void **state) {
    (void)state;
    set_options(at("run"));
    assert_opens();
    write_file("run/log.jsonl", "", 0); // stopped before its first step
    write_file("run/notes.txt", "mine", 4);
    assert_opens();
    write_file("run/log.jsonl", "{\"step\":1}\n", 11);
    assert_refused("--out: found a run in ");
    assert_int_equal(remove(at("run/log.jsonl")), 0);
    assert_int_equal(mkdir(at("run/log.jsonl"), 0777), 0);
    assert_refused("--out: found a run in ");
    assert_int_equal(rmdir(at("run/log.jsonl")), 0);
    assert_int_equal(symlink("/dev/null", at("run/log.jsonl")), 0); // whose size says nothing
    assert_refused("--out: found a run in ");
    assert_int_equal(remove(at("run/log.jsonl")), 0);
    assert_int_equal(mkdir(at("run/step-00000001"), 0777), 0); // broken, but someone's
    assert_refused("--out: found a run in ");
    options.resume = true;
    assert_refused("--resume: found no complete checkpoint in ");
    assert_contains(text, "skipped step-00000001: ");
    options.resume = false;
    options.overwrite = true;
    assert_opens();
    assert_true(exists("run/notes.txt") && !exists("run/step-00000001"));
}

static int lock_errno; // what flock is made to fail with; 0: it works

// Stands before the C library's.
int flock(int file, int operation) {
    if (!lock_errno) return (int)syscall(SYS_flock, file, operation);
    errno = lock_errno;
    return -1;
}

// (Lustre without its lock option says ENOSYS, NFS without a lock daemon ENOLCK: nobody else runs there for that.)
static void folder_that_cannot_be_locked_is_used_with_a_warning(void **state) {
    (void)state;
    static const int reasons[] = {ENOSYS, ENOLCK, EOPNOTSUPP};
    set_options(at("run"));
    for (int i = 0; i < 3; i++) {
        lock_errno = reasons[i];
        assert_opens();
        assert_contains(text, "mok: warning: --out: cannot lock ");
        assert_contains(text, strerror(reasons[i]));
    }
    lock_errno = EWOULDBLOCK;
    assert_refused("found that another process runs in ");
    lock_errno = 0;
    assert_opens();
    assert_null(strstr(text, "warning"));
}

static void resume_mends_what_a_killed_save_left(void **state) {
    (void)state;
    set_options(at("run"));
    assert_opens();
    save(at("run"), 10);
    assert_int_equal(rename(at("run/step-00000010"), at("run/.old-step-00000010")), 0);
    assert_int_equal(mkdir(at("run/.tmp-step-00000010"), 0777), 0);
    options.resume = true;
    assert_opens();
    assert_contains(text, "run/step-00000010");
    assert_false(exists("run/.old-step-00000010") || exists("run/.tmp-step-00000010"));
}

// ---- space ----

static uint64_t available;

static void check_space(void *unused) {
    (void)unused;
    run_folder_check_space(&options, available);
}

static int check(uint64_t bytes) {
    available = bytes;
    return run_child(check_space, NULL, text, sizeof text);
}

static void assert_silent(uint64_t bytes) {
    if (check(bytes) != 0 || *text) fail_msg("%ju bytes: found \"%s\", wanted silence", (uintmax_t)bytes, text);
}

static void assert_warns(uint64_t bytes, const char *count) {
    assert_int_equal(check(bytes), 0);
    assert_int_equal(strncmp(text, "mok: warning: --keep: found ", 28), 0);
    assert_contains(text, count);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
}

static void assert_too_little(uint64_t bytes) {
    assert_int_equal(check(bytes), 2);
    assert_int_equal(strncmp(text, "mok: error: --out: found ", 25), 0);
    assert_contains(text, " for one checkpoint; free some space, name another folder, or save nothing");
}

// The disk was full at the first save, hours after the start (Megatron-LM issue 314).
static void too_little_space_is_refused_before_the_run(void **state) {
    (void)state;
    set_options(at("run"));
    uint64_t one = checkpoint_bytes(&options.model);
    assert_too_little(0);
    assert_too_little(one - 1);
    assert_warns(one, " for the 4 that are there at once");
    assert_warns(4 * one - 1, " for the 4 that are there at once");
    assert_silent(4 * one);
    assert_silent(UINT64_MAX / 2);
    options.save_every = 0;
    assert_silent(0);
}

static void as_many_checkpoints_are_counted_as_there_will_be(void **state) {
    (void)state;
    set_options(at("run"));
    uint64_t one = checkpoint_bytes(&options.model);
    options.save_every = 60; // after 60 and 100
    assert_warns(2 * one - 1, " for the 2 that are there at once");
    assert_silent(2 * one);
    options.save_every = 1000; // after 100
    assert_silent(one);
    options.save_every = 7;
    options.keep = 0;
    assert_warns(15 * one - 1, " for the 15 that are there at once");
    assert_silent(15 * one);
    options.steps = options.save_every = INT64_C(1) << 50;
    assert_silent(one);
    options.save_every = 1; // bytes beyond 64 bits
    assert_warns(UINT64_MAX / 2, " that are there at once");
}

static void checkpoints_that_are_there_count(void **state) {
    (void)state;
    set_options(at("run"));
    uint64_t one = checkpoint_bytes(&options.model);
    assert_int_equal(mkdir(at("run"), 0777), 0);
    save(at("run"), 10);
    uint64_t used = checkpoint_bytes_on_disk(at("run"));
    assert_too_little(one - 1); // the next is written beside them
    assert_warns(4 * one - used - 1, " for the 4 ");
    assert_silent(4 * one - used);
    options.overwrite = true; // they will be gone
    assert_true(used < one);
    assert_too_little(one - used - 1);
    assert_warns(one - used, " for the 4 ");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(folders_of_any_name_are_made),
        TEST(the_folder_one_stands_in_is_used),
        TEST(a_very_long_path_is_used),
        TEST(what_cannot_be_a_folder_is_refused),
        TEST(a_run_is_a_log_with_a_line_or_any_checkpoint),
        TEST(folder_that_cannot_be_locked_is_used_with_a_warning),
        TEST(resume_mends_what_a_killed_save_left),
        TEST(too_little_space_is_refused_before_the_run),
        TEST(as_many_checkpoints_are_counted_as_there_will_be),
        TEST(checkpoints_that_are_there_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
