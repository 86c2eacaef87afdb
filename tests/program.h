// For tests of the whole program: runs build/cpu/train (or what MOK_TRAIN names, another build of it), keeps what it
// prints, and reads the files that it leaves. The tests start in the root of the repository, and each has an empty
// folder of its own under /tmp.
#ifndef MOK_TESTS_PROGRAM_H
#define MOK_TESTS_PROGRAM_H

#include "tests/folder.h"

#include <cjson/cJSON.h>
#include <ctype.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *output_path; // where a run's standard output goes; NULL: kept in `out`; "": it is closed

static inline int make_program_root(void **state) {
    output_path = NULL;
    return make_root(state);
}

// One thread does for steps this small, and leaves the cores to others; a test may ask for more.
static inline void use_one_thread(void) { setenv("OMP_NUM_THREADS", "1", 1); }

#define run_program_tests(tests) (use_one_thread(), cmocka_run_group_tests(tests, NULL, NULL))

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_program_root, remove_root)

static inline char *read_text(const char *name) {
    size_t bytes;
    return read_bytes(at(name), &bytes);
}

// Cuts the end off a file of the test's folder.
static inline void shorten(const char *name, off_t bytes) {
    struct stat info;
    assert_int_equal(stat(at(name), &info), 0);
    assert_int_equal(truncate(at(name), info.st_size - bytes), 0);
}

// Same names, same bytes, in every subfolder.
static inline bool same_tree(const char *a, const char *b) {
    char command[640];
    snprintf(command, sizeof command, "diff -r %s %s >%s 2>&1", at(a), at(b), at("difference"));
    int status = system(command);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) <= 1); // 2: diff itself failed
    return WEXITSTATUS(status) == 0;
}

// ---- the program ----

// Small models, no samples, no evaluations. A flag may be given once only, so what a test sets itself is not in here.
#define UNIT  "--preset", "unit", "--seq", "32", "--warmup", "2"
#define QUIET UNIT, "--batch", "2", "--sample-tokens", "0", "--eval-every", "0"

static char *out, *err;  // what the last run printed, with a final zero
static size_t out_bytes; // of out, which may hold zeros

static inline const char *program(void) {
    const char *path = getenv("MOK_TRAIN");
    return path ? path : "build/cpu/train";
}

static inline void redirect(int descriptor, const char *path) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (file < 0 || dup2(file, descriptor) < 0) _exit(126);
    if (file != descriptor) close(file);
}

static inline pid_t start_program(const char *const *arguments) {
    const char *kept = output_path ? output_path : at("stdout"), *messages = at("stderr");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    redirect(STDERR_FILENO, messages);
    if (*kept)
        redirect(STDOUT_FILENO, kept);
    else
        close(STDOUT_FILENO);
    alarm(60); // a run that hangs ends as killed by SIGALRM
    execv(program(), (char *const *)arguments);
    _exit(127);
}

// The exit code, or minus the signal that ended it.
static inline int finish_program(pid_t pid) {
    int status;
    size_t bytes;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    free(out);
    free(err);
    out = output_path ? calloc(1, 1) : read_bytes(at("stdout"), &out_bytes);
    err = read_bytes(at("stderr"), &bytes);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

#define start(...) start_program((const char *const[]){"train", __VA_ARGS__, NULL})
#define run(...)   finish_program(start(__VA_ARGS__))

static inline void assert_code(int found, int wanted) {
    if (found != wanted) fail_msg("exit code %d, wanted %d; it said: %s", found, wanted, err);
}

#define assert_runs(...) assert_code(run(__VA_ARGS__), 0)
// A user's error: exit code 2.
#define assert_refused(...) assert_code(run(__VA_ARGS__), 2)

// One line on standard error that says "mok: error: PLACE...".
static inline void assert_error(const char *place) {
    char wanted[512];
    snprintf(wanted, sizeof wanted, "mok: error: %s", place);
    const char *end = strchr(err, '\n');
    if (strncmp(err, wanted, strlen(wanted)) != 0 || !end || end[1])
        fail_msg("found \"%s\", wanted one line that begins with \"%s\"", err, wanted);
}

static inline void assert_lacks(const char *text, const char *part) {
    if (strstr(text, part)) fail_msg("found \"%s\", wanted it not to contain \"%s\"", text, part);
}

static inline int count_of(const char *text, const char *part) {
    int count = 0;
    while ((text = strstr(text, part))) count++, text += strlen(part);
    return count;
}

// ---- JSON ----

static inline cJSON *read_json(const char *name) {
    char *text = read_text(name);
    cJSON *json = cJSON_Parse(text);
    if (!json) fail_msg("%s is not JSON: %s", name, text);
    free(text);
    return json;
}

static inline double number(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    if (!cJSON_IsNumber(item)) fail_msg("found no number \"%s\"", key);
    return item->valuedouble;
}

static inline const char *string(const cJSON *object, const char *key) {
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    if (!value) fail_msg("found no text \"%s\"", key);
    return value;
}

// The lines of FOLDER/log.jsonl that have this member, as an array; every line must be a JSON object.
static inline cJSON *read_log(const char *folder, const char *member) {
    char name[128], *rest;
    snprintf(name, sizeof name, "%s/log.jsonl", folder);
    char *text = read_text(name);
    cJSON *lines = cJSON_CreateArray();
    assert_true(*text == 0 || text[strlen(text) - 1] == '\n');
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        const char *end;
        cJSON *object = cJSON_ParseWithOpts(line, &end, true); // true: nothing may follow the object
        if (!cJSON_IsObject(object)) fail_msg("found the log line \"%s\", wanted one JSON object", line);
        if (cJSON_HasObjectItem(object, member))
            cJSON_AddItemToArray(lines, object);
        else
            cJSON_Delete(object);
    }
    free(text);
    return lines;
}

// The log tells of the steps first to last, each once and in this order.
static inline void assert_steps_logged(const char *folder, int first, int last) {
    cJSON *steps = read_log(folder, "loss"), *line;
    int wanted = first;
    cJSON_ArrayForEach(line, steps) {
        if (number(line, "step") != wanted)
            fail_msg("%s: found step %g after step %d", folder, number(line, "step"), wanted - 1);
        wanted++;
    }
    if (wanted != last + 1) fail_msg("%s: found %d as its last step, wanted %d", folder, wanted - 1, last);
    cJSON_Delete(steps);
}

#endif
