// The trace of a step: the file, what happens when it cannot be written, and the script that reads it. With several ranks
// (mpirun -n N build/cpu/tests/test_trace) the part that is about ranks.
#include "tests/child.h"
#include "tests/ranks.h"
#include "tests/small_disk.h"

#include <cjson/cJSON.h>
#include <errno.h>

#include "data/files.h"
#include "kernels/operation.h"
#include "model/breakdown.h"
#include "model/moe_mok.h"
#include "model/trace.h"
#include "model/trainer.h"

static char text[8192]; // what a child wrote to stderr, or what a command printed

static struct trace_event event(const char *name, double begin, double end) {
    return (struct trace_event){begin, end, name, .block = -1, .expert = -1, .phase = -1, .first_row = -1};
}

// ---- reading the file back ----

static cJSON *read_trace(const char *path) {
    char error[FILE_ERROR];
    cJSON *json = file_read_json(path, error, sizeof error);
    if (!json) fail_msg("%s", error);
    return json;
}

// The i-th event that is a complete one ("X") or metadata ("M") of a rank and track; NULL: there are fewer.
static const cJSON *find(const cJSON *json, const char *ph, int pid, int tid, int i) {
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "traceEvents")) {
        bool same = strcmp(cJSON_GetObjectItem(item, "ph")->valuestring, ph) == 0 &&
                    cJSON_GetObjectItem(item, "pid")->valueint == pid &&
                    cJSON_GetObjectItem(item, "tid")->valueint == tid;
        if (same && i-- == 0) return item;
    }
    return NULL;
}

static int count(const cJSON *json, const char *ph) {
    const cJSON *item;
    int found = 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "traceEvents")) found +=
        strcmp(cJSON_GetObjectItem(item, "ph")->valuestring, ph) == 0;
    return found;
}

static const char *string(const cJSON *item, const char *name) {
    const cJSON *member = cJSON_GetObjectItem(item, name);
    return cJSON_IsString(member) ? member->valuestring : "";
}

static double number(const cJSON *item, const char *name) {
    const cJSON *member = cJSON_GetObjectItem(item, name);
    return cJSON_IsNumber(member) ? member->valuedouble : NAN;
}

static const cJSON *arguments(const cJSON *item) { return cJSON_GetObjectItem(item, "args"); }

// What metadata says of a track: "thread_name", or "process_name" of a rank at track 0.
static const cJSON *metadata(const cJSON *json, const char *name, int pid, int tid) {
    const cJSON *item;
    for (int i = 0; (item = find(json, "M", pid, tid, i)); i++)
        if (strcmp(string(item, "name"), name) == 0) return arguments(item);
    fail_msg("found no %s of track %d of rank %d", name, tid, pid);
    return NULL;
}

// ---- the file ----

static void events_come_back_as_they_were_recorded(void **state) {
    (void)state;
    struct trace t;
    trace_open(&t, 2, 10);
    struct trace_event pull = {1000000.000250, 1000000.000350, "pull", 3, 17, 2, 256, 4096};
    trace_add(&t, TRACE_TRACK_WORKER + 1, pull);
    trace_add(&t, TRACE_TRACK_WORKER + 1, event("wait", 1000000.000350, 1000000.000351));
    trace_add(&t, TRACE_TRACK_WORKER, event("gate/up", 1000000.000300, 1000000.000900));
    trace_add(&t, TRACE_TRACK_STEP, event("moe forward", 1000000, 1000000.001)); // the first that begins
    assert_int_equal(trace_write(&t, NULL, at("trace.json")), 4);
    trace_close(&t);
    assert_false(exists("trace.json.tmp"));

    cJSON *json = read_trace(at("trace.json"));
    assert_int_equal(count(json, "X"), 4);
    assert_string_equal(string(metadata(json, "process_name", 0, 0), "name"), "rank 0");
    assert_string_equal(string(metadata(json, "thread_name", 0, 0), "name"), "step");
    assert_string_equal(string(metadata(json, "thread_name", 0, 2), "name"), "worker 1");

    const cJSON *item = find(json, "X", 0, 2, 0);
    assert_string_equal(string(item, "name"), "pull");
    assert_string_equal(string(item, "cat"), "move");
    // Nanoseconds are kept; a clock of 1e6 seconds is exact to 1.2e-10, and the difference of two is printed to 1e-3 us.
    assert_true(fabs(number(item, "ts") - 250) < 2e-3);
    assert_true(fabs(number(item, "dur") - 100) < 2e-3);
    assert_true(number(arguments(item), "layer") == 3 && number(arguments(item), "expert") == 17);
    assert_true(number(arguments(item), "phase") == 2 && number(arguments(item), "row") == 256);
    assert_true(number(arguments(item), "bytes") == 4096);
    item = find(json, "X", 0, 2, 1);
    assert_string_equal(string(item, "cat"), "wait");
    assert_null(arguments(item)); // nothing is known of it
    assert_string_equal(string(find(json, "X", 0, 1, 0), "cat"), "compute");
    item = find(json, "X", 0, 0, 0);
    assert_string_equal(string(item, "cat"), "step");
    assert_true(number(item, "ts") == 0);
    cJSON_Delete(json);
}

// Perfetto takes overlapping events of a track for nested ones, and drops those that are not.
static void events_that_follow_each_other_do_not_overlap(void **state) {
    (void)state;
    enum { EVENTS = 500 };
    struct trace t;
    uint64_t random = 5;
    double now = 12345.678;
    trace_open(&t, 0, EVENTS);
    for (int i = 0; i < EVENTS; i++) {
        double begin = now;
        now += 5e-9 * test_uniform(&random);
        trace_add(&t, TRACE_TRACK_STEP, event("router", begin, now));
    }
    trace_write(&t, NULL, at("trace.json"));
    trace_close(&t);
    cJSON *json = read_trace(at("trace.json"));
    const cJSON *item;
    double end = 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "traceEvents")) {
        if (strcmp(string(item, "ph"), "X") != 0) continue;
        assert_true(fabs(number(item, "ts") - end) < 1e-6); // decimal fractions of microseconds, read as binary ones
        end = number(item, "ts") + number(item, "dur");
    }
    cJSON_Delete(json);
}

static void names_with_any_character_are_valid_json(void **state) {
    (void)state;
    static const char *const name = "a \"b\" \\ \n\t\x01 \xc2\xb5s";
    struct trace t;
    trace_open(&t, 0, 1);
    trace_add(&t, TRACE_TRACK_STEP, event(name, 1, 2));
    trace_write(&t, NULL, at("trace.json"));
    trace_close(&t);
    cJSON *json = read_trace(at("trace.json"));
    assert_string_equal(string(find(json, "X", 0, 0, 0), "name"), name);
    cJSON_Delete(json);
}

// More text than is kept in memory at once.
static void long_traces_are_whole(void **state) {
    (void)state;
    enum { EVENTS = 3000 };
    struct trace t;
    trace_open(&t, 1, EVENTS);
    for (int i = 0; i < EVENTS; i++) {
        struct trace_event e = event("down", i, i + 0.5);
        e.first_row = i;
        trace_add(&t, TRACE_TRACK_WORKER, e);
    }
    assert_int_equal(trace_write(&t, NULL, at("trace.json")), EVENTS);
    trace_close(&t);
    cJSON *json = read_trace(at("trace.json"));
    const cJSON *item;
    int next = 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItem(json, "traceEvents")) {
        if (strcmp(string(item, "ph"), "X") != 0) continue;
        assert_true(number(arguments(item), "row") == next && number(item, "ts") == 1e6 * next);
        next++;
    }
    assert_int_equal(next, EVENTS);
    cJSON_Delete(json);
}

static void a_trace_without_events_is_valid(void **state) {
    (void)state;
    struct trace t;
    trace_open(&t, 3, 0);
    assert_int_equal(trace_write(&t, NULL, at("trace.json")), 0);
    trace_close(&t);
    cJSON *json = read_trace(at("trace.json"));
    assert_int_equal(count(json, "X"), 0);
    assert_string_equal(string(metadata(json, "thread_name", 0, 3), "name"), "worker 2");
    cJSON_Delete(json);
}

static void write_overflow(void *unused) {
    (void)unused;
    struct trace t;
    trace_open(&t, 4, 3);
    for (int i = 0; i < 15; i++) trace_add(&t, TRACE_TRACK_WORKER + 3, event("push", i, i + 1));
    for (int i = 0; i < 3; i++) trace_add(&t, TRACE_TRACK_WORKER, event("push", i, i + 1));
    if (trace_write(&t, NULL, at("trace.json")) != 6) _exit(98);
    trace_close(&t);
}

static void events_that_do_not_fit_are_counted(void **state) {
    (void)state;
    assert_int_equal(run_child(write_overflow, NULL, text, sizeof text), 0);
    assert_contains(text, "mok: warning: trace: 12 events of worker 3 did not fit");
    assert_null(strstr(text, "worker 0")); // it was just full
    cJSON *json = read_trace(at("trace.json"));
    assert_int_equal(count(json, "X"), 6);
    assert_true(number(metadata(json, "thread_name", 0, 4), "dropped") == 12);
    assert_null(cJSON_GetObjectItem(metadata(json, "thread_name", 0, 1), "dropped"));
    cJSON_Delete(json);
}

// ---- files that cannot be written ----

static void write_much(void *path) {
    struct trace t;
    trace_open(&t, 1, 2000);
    for (int i = 0; i < 2000; i++) trace_add(&t, TRACE_TRACK_WORKER, event("d hidden", i, i + 1));
    trace_write(&t, NULL, path);
}

static void a_full_disk_leaves_the_older_trace_and_no_half_one(void **state) {
    (void)state;
    mount_small_disk("disk", 64 << 10);
    write_file("disk/trace.json", "older", 5);
    char path[256];
    strcpy(path, at("disk/trace.json"));
    assert_int_equal(run_child(write_much, path, text, sizeof text), 1);
    assert_contains(text, "mok: error: ");
    assert_contains(text, "disk/trace.json: cannot write the trace: ");
    assert_contains(text, "No space left on device; free some space there or name another place");
    size_t bytes;
    char *kept = read_bytes(path, &bytes);
    assert_string_equal(kept, "older");
    free(kept);
    assert_false(exists("disk/trace.json.tmp"));
    unmount_small_disk("disk");
}

static void a_folder_that_is_gone_at_the_end_is_named(void **state) {
    (void)state;
    char path[256];
    strcpy(path, at("gone/trace.json"));
    assert_int_equal(run_child(write_much, path, text, sizeof text), 1);
    assert_contains(text, "gone/trace.json: cannot write the trace: ");
    assert_contains(text, "No such file or directory");
}

static void check_path(void *path) { trace_check_path(path); }

static void assert_refused(const char *path, const char *why) {
    char copy[FILE_PATH + 8];
    snprintf(copy, sizeof copy, "%s", path);
    if (run_child(check_path, copy, text, sizeof text) != 2) fail_msg("%s was not refused: %s", path, text);
    assert_contains(text, "mok: error: --trace: ");
    assert_contains(text, why);
}

// At the start of a run, not after its first steps. As root, a rename to /dev/null would replace it for everybody.
static void paths_that_no_trace_can_have_are_refused_at_once(void **state) {
    (void)state;
    char long_path[FILE_PATH + 1];
    memset(long_path, 'a', FILE_PATH);
    long_path[FILE_PATH] = 0;
    assert_refused(long_path, "found a path of 4096 bytes");
    assert_refused(at("absent/trace.json"), "No such file or directory; name a file in a folder that exists");
    assert_refused(root, "found a folder or device, wanted a regular file");
    assert_refused("/dev/null", "found a folder or device, wanted a regular file");
    write_file("older.json", "older", 5);
    trace_check_path(at("older.json"));
    trace_check_path(at("new.json"));
    assert_true(exists("older.json"));
    assert_false(exists("new.json") || exists("new.json.tmp") || exists("older.json.tmp"));
}

// ---- the trace of a run ----

static int standard_output;

static void begin_capture(void) {
    fflush(stdout);
    standard_output = dup(STDOUT_FILENO);
    int file = open(at("stdout"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    assert_true(standard_output >= 0 && file >= 0 && dup2(file, STDOUT_FILENO) >= 0);
    close(file);
}

// Leaves what was printed in text.
static void end_capture(void) {
    fflush(stdout);
    assert_true(dup2(standard_output, STDOUT_FILENO) >= 0);
    close(standard_output);
    size_t bytes;
    char *printed = read_bytes(at("stdout"), &bytes);
    snprintf(text, sizeof text, "%s", printed);
    free(printed);
}

// Takes steps done + 1 .. stop of a run that would go up to `steps`, with the event "router" in block number `step`. asked:
// the step to be traced, or 0
static void run_steps_asked(const char *path, int64_t asked, int64_t done, int64_t stop, int64_t steps) {
    struct run_trace r;
    begin_capture();
    trace_open_run(&r, NULL, path, 2, asked, done, steps);
    for (int64_t step = done + 1; step <= stop; step++) {
        trace_begin_step(&r, step);
        trace_add_phase(&r.trace, "router", (int)step, trace_mark(&r.trace));
        trace_end_step(&r);
        trace_add_phase(&r.trace, "between steps", -1, trace_mark(&r.trace));
    }
    trace_close_run(&r);
    end_capture();
}

static void run_steps(const char *path, int64_t done, int64_t stop, int64_t steps) {
    run_steps_asked(path, 0, done, stop, steps);
}

static void assert_traced(int64_t step) {
    char line[512];
    snprintf(line, sizeof line, "trace of step %d: %s, 1 events; draw it with scripts/plot_trace.py\n", (int)step,
             at("trace.json"));
    assert_int_equal(strncmp(text, line, strlen(line)), 0);
    snprintf(line, sizeof line, "where the time of step %d went, on rank 0\n", (int)step);
    assert_contains(text, line);
    cJSON *json = read_trace(at("trace.json"));
    assert_int_equal(count(json, "X"), 1);
    const cJSON *item = find(json, "X", 0, TRACE_TRACK_STEP, 0);
    assert_string_equal(string(item, "name"), "router");
    assert_true(number(arguments(item), "layer") == (double)step);
    assert_true(number(item, "ts") == 0 && number(item, "dur") >= 0);
    cJSON_Delete(json);
}

static void the_third_step_of_a_run_is_traced(void **state) {
    (void)state;
    run_steps(at("trace.json"), 0, 6, 6);
    assert_traced(3);
}

static void the_third_step_of_a_resumed_run_is_traced(void **state) {
    (void)state;
    run_steps(at("trace.json"), 100, 120, 200);
    assert_traced(103);
}

static void a_shorter_run_traces_its_last_step(void **state) {
    (void)state;
    run_steps(at("trace.json"), 0, 1, 1);
    assert_traced(1);
    run_steps(at("trace.json"), 10, 12, 12);
    assert_traced(12);
}

static void the_step_that_is_asked_for_is_traced(void **state) {
    (void)state;
    run_steps_asked(at("trace.json"), 1, 0, 6, 6);
    assert_traced(1);
    run_steps_asked(at("trace.json"), 6, 0, 6, 6);
    assert_traced(6);
    run_steps_asked(at("trace.json"), 12, 10, 20, 20);
    assert_traced(12);
}

static void open_trace_of_another_step(void *step) {
    struct run_trace r;
    trace_open_run(&r, NULL, at("trace.json"), 0, *(int64_t *)step, 10, 20);
}

static void a_step_that_the_run_does_not_take_is_refused(void **state) {
    (void)state;
    int64_t steps[] = {10, 21};
    for (int i = 0; i < 2; i++) {
        int code = run_child(open_trace_of_another_step, &steps[i], text, sizeof text);
        assert_int_equal(code, 2);
        assert_contains(text, i ? "--trace-step: found 21, wanted a step that this run takes: from 11 to 20"
                                : "--trace-step: found 10, wanted a step");
    }
}

static void a_run_that_stops_before_says_that_there_is_no_trace(void **state) {
    (void)state;
    run_steps(at("trace.json"), 0, 2, 10);
    assert_contains(text, "trace.json was not written, the run ended before step 3\n");
    assert_false(exists("trace.json"));
}

static void a_run_without_trace_records_nothing(void **state) {
    (void)state;
    run_steps("", 0, 5, 5);
    assert_string_equal(text, "");
    assert_true(trace_now(NULL) == 0 && trace_mark(NULL) == -1);
    trace_add_phase(NULL, "router", 0, 0);
}

// ---- operations ----

// As kernels/ has them: one that is made of others, leaves early, or does nothing.
static int operations_run;
static void inner_operation(void) {
    OPERATION();
    operations_run++;
}
static void outer_operation(bool leave) {
    OPERATION();
    if (leave) return;
    inner_operation();
    inner_operation();
}

static void an_operation_within_another_is_part_of_it(void **state) {
    (void)state;
    struct run_trace r;
    operations_run = 0;
    begin_capture();
    trace_open_run(&r, NULL, at("trace.json"), 1, 0, 0, 1);
    inner_operation(); // before the step
    trace_begin_step(&r, 1);
    trace_set_block(&r.trace, 2);
    outer_operation(false);
    outer_operation(true);
    trace_set_block(&r.trace, -1);
    inner_operation();
    trace_end_step(&r);
    inner_operation(); // after it
    trace_close_run(&r);
    outer_operation(false); // after the run
    end_capture();
    assert_int_equal(operations_run, 7);

    int device = TRACE_TRACK_WORKER + 1;
    cJSON *json = read_trace(at("trace.json"));
    assert_int_equal(count(json, "X"), 3);
    assert_string_equal(string(metadata(json, "thread_name", 0, device), "name"), "device");
    const char *names[] = {"outer_operation", "outer_operation", "inner_operation"};
    double end = 0;
    for (int i = 0; i < 3; i++) {
        const cJSON *item = find(json, "X", 0, device, i);
        assert_string_equal(string(item, "name"), names[i]);
        assert_string_equal(string(item, "cat"), "operation");
        assert_true(number(item, "ts") >= end - 1e-6);
        end = number(item, "ts") + number(item, "dur");
    }
    assert_true(number(arguments(find(json, "X", 0, device, 1)), "layer") == 2);
    assert_null(arguments(find(json, "X", 0, device, 2)));
    cJSON_Delete(json);
}

static void nothing_is_recorded_while_it_is_off(void **state) {
    (void)state;
    float a[16] = {1}, b[16] = {0};
    assert_null(operation_trace);
    device_clear_marks();
    int before = device_mark();
    device_copy_in(b, a, sizeof b);
    inner_operation();
    assert_int_equal(device_mark(), before + 1);
    assert_true(device_mark_seconds(before + 1) >= device_mark_seconds(before));
    device_clear_marks();
    assert_int_equal(device_mark(), 0);
    device_clear_marks();
}

// More spans than there is room for at first.
static void many_operations_are_all_recorded(void **state) {
    (void)state;
    struct run_trace r;
    begin_capture();
    trace_open_run(&r, NULL, at("trace.json"), 0, 0, 0, 1);
    trace_begin_step(&r, 1);
    for (int i = 0; i < 5000; i++) inner_operation();
    trace_end_step(&r);
    trace_close_run(&r);
    end_capture();
    assert_contains(text, " 5000 events;");
    assert_contains(text, "  inner_operation             5000 ");
}

static void the_table_is_sorted_and_sums_to_the_step(void **state) {
    (void)state;
    struct trace_event events[] = {event("matmul_nt", 1, 1.002), event("rope_rotate", 1.002, 1.003),
                                   event("matmul_nt", 1.003, 1.005), event("adamw_update", 1.005, 1.010)};
    struct trace_track device = {.name = "device", .events = events, .count = 4, .capacity = 4};
    FILE *file = fopen(at("table"), "w");
    breakdown_print(file, &device, 7, 0.0125);
    fclose(file);
    size_t bytes;
    char *printed = read_bytes(at("table"), &bytes);
    assert_string_equal(printed, "where the time of step 7 went, on rank 0\n"
                                 "  operation                  calls          ms of the step\n"
                                 "  adamw_update                   1       5.000      40.0 %\n"
                                 "  matmul_nt                      2       4.000      32.0 %\n"
                                 "  rope_rotate                    1       1.000       8.0 %\n"
                                 "  gaps, host                             2.500      20.0 %\n"
                                 "  step                                  12.500     100.0 %\n");
    free(printed);
}

// One step of every branch of the model.
static void trace_step(enum moe_kind kind) {
    struct options o;
    struct trainer t;
    struct run_trace r;
    assert_true(options_set_preset(&o, "unit"));
    o.seq = 16;
    o.moe.kind = kind;
    o.tokens_per_step = 2 * (int64_t)o.batch * o.seq; // two micro-batches
    struct data *data = data_open(o.data, o.eval_data, NULL, o.seed, o.seq, 1 + o.model.mtp_depth);
    data_settle_vocab(data, o.model.vocab);
    trainer_open(&t, &o, data, NULL, NULL);
    begin_capture();
    trace_open_run(&r, NULL, at("trace.json"), moe_mok_workers(&o.moe), 0, 0, 1);
    t.model.trace = &r.trace;
    trace_begin_step(&r, 1);
    trainer_step(&t);
    trace_end_step(&r);
    t.model.trace = NULL;
    trace_close_run(&r);
    end_capture();
    trainer_close(&t);
    data_close(data);
}

// The track "device": every event within the step and behind the one before. Returns what they last, in microseconds.
static double sum_operations(const cJSON *json, int device) {
    const cJSON *item;
    double sum = 0, end = 0;
    for (int i = 0; (item = find(json, "X", 0, device, i)); i++) {
        assert_true(number(item, "ts") >= end - 1e-6);
        sum += number(item, "dur");
        end = number(item, "ts") + number(item, "dur");
    }
    return sum;
}

static void assert_step_is_traced(const char *const *operations, const char *const *phases) {
    char line[64];
    for (int i = 0; operations[i]; i++) {
        snprintf(line, sizeof line, "\n  %-24s ", operations[i]);
        assert_contains(text, line);
    }
    cJSON *json = read_trace(at("trace.json"));
    int device = 0;
    while (strcmp(string(metadata(json, "thread_name", 0, device), "name"), "device") != 0) device++;
    const char *step = strstr(text, "\n  step ");
    assert_non_null(step);
    double milliseconds = strtod(step + strlen("\n  step "), NULL), sum = 1e-3 * sum_operations(json, device);
    assert_true(sum <= milliseconds + 1e-3 && sum > 0);
    for (int i = 0; phases[i]; i++) {
        const cJSON *item;
        int place = 0;
        while ((item = find(json, "X", 0, TRACE_TRACK_STEP, place)) && strcmp(string(item, "name"), phases[i]) != 0)
            place++;
        if (!item) fail_msg("found no phase %s", phases[i]);
    }
    cJSON_Delete(json);
}

static void a_step_is_told_apart_by_operation(void **state) {
    (void)state;
    static const char *const everywhere[] = {"embedding_forward",
                                             "embedding_backward",
                                             "rmsnorm_forward",
                                             "rmsnorm_backward",
                                             "rope_rotate",
                                             "matmul_nt",
                                             "matmul_nn",
                                             "matmul_tn",
                                             "attention_forward",
                                             "attention_backward",
                                             "swiglu_forward",
                                             "swiglu_backward",
                                             "router_score",
                                             "router_select",
                                             "router_count",
                                             "router_balance",
                                             "router_backward",
                                             "cross_entropy",
                                             "device_zero",
                                             "device_copy_in",
                                             "device_copy_out",
                                             "device_add_sum",
                                             "device_sum_squares",
                                             "adamw_update",
                                             "router_update_bias",
                                             "comm_sum_double",
                                             "comm_reduce_scatter",
                                             "comm_all_gather",
                                             "comm_all_gather_begin",
                                             "comm_exchange_finish",
                                             NULL};
    static const char *const mok[] = {"mok_barrier", "mok_plan_make", "mok_run", "moe_sum_slots", NULL};
    static const char *const alltoall[] = {
        "moe_place",         "moe_scatter", "grouped_matmul_nt",  "grouped_matmul_nn",
        "grouped_matmul_tn", "moe_combine", "comm_gather_device", NULL};
    static const char *const phases[] = {"attention forward", "attention backward", "dense forward",
                                         "dense backward",    "router forward",     "router backward",
                                         "moe forward",       "moe backward",       "head",
                                         "sum gradients",     "update weights",     NULL};
    static const char *const mok_phases[] = {"barrier", "plan", "megakernel", NULL};
    trace_step(MOE_MOK);
    assert_step_is_traced(everywhere, phases);
    assert_step_is_traced(mok, mok_phases);
    trace_step(MOE_ALLTOALL);
    assert_step_is_traced(everywhere, phases);
    assert_step_is_traced(alltoall, phases);
}

// ---- the script ----

// Its exit code; what it printed in text. Skips the test where there is no Python.
static int plot(const char *arguments_of_it) {
    char command[1024];
    if (system("python3 -c 'import json' >/dev/null 2>&1") != 0) {
        print_message("skipped: found no python3\n");
        skip();
    }
    snprintf(command, sizeof command, "python3 scripts/plot_trace.py %s >%s 2>&1", arguments_of_it, at("printed"));
    int status = system(command);
    size_t bytes;
    char *printed = read_bytes(at("printed"), &bytes);
    snprintf(text, sizeof text, "%s", printed);
    free(printed);
    return WEXITSTATUS(status);
}

static struct trace_event of_block(int block, struct trace_event e) {
    e.block = block;
    return e;
}

// Layer 4 from 0 to 100 us. Worker 0 pulls from 0 to 40 and pushes from 80 to 100, worker 1 has a product of an expert from
// 10 to 30, worker 2 one of the shared expert from 20 to 90: while rows move, 10 to 40 and 80 to 90, so 40 of 60 us.
static void write_pass(void) {
    struct trace t;
    trace_open(&t, 3, 10);
    struct trace_event expert = of_block(4, event("gate/up", 10e-6, 30e-6));
    expert.expert = 7;
    trace_add(&t, TRACE_TRACK_STEP, of_block(4, event("moe forward", 0, 100e-6)));
    trace_add(&t, TRACE_TRACK_STEP, of_block(4, event("moe backward", 200e-6, 300e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("pull", 0, 40e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("wait", 40e-6, 80e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("push", 80e-6, 100e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("pull", 200e-6, 250e-6)));
    trace_add(&t, TRACE_TRACK_WORKER + 1, expert);
    trace_add(&t, TRACE_TRACK_WORKER + 2, of_block(4, event("shared gate/up", 20e-6, 90e-6)));
    trace_write(&t, NULL, at("trace.json"));
    trace_close(&t);
}

static void the_script_finds_how_much_of_the_moving_is_hidden(void **state) {
    (void)state;
    char line[512];
    write_pass();
    snprintf(line, sizeof line, "%s --layer 4 --pass forward", at("trace.json"));
    assert_int_equal(plot(line), 0);
    assert_contains(text, "layer 4, forward: 100.0 us");
    assert_contains(text, "workers  pull                    1           40.0     13.3 %"); // of three workers' 100 us
    assert_contains(text, "workers  shared gate/up          1           70.0     23.3 %");
    assert_contains(text, "rank 0: during 66.7 % of its moving time a worker of the rank multiplied");
    snprintf(line, sizeof line, "%s --pass backward", at("trace.json"));
    assert_int_equal(plot(line), 0);
    assert_contains(text, "workers  pull                    1           50.0     16.7 %");
    assert_contains(text, "rank 0: during 0.0 % of its moving time");
    assert_int_equal(plot(at("trace.json")), 0);
    assert_contains(text, "whole step: 300.0 us");
}

// Two workers' tiles: 8, 10 and 30 us, with 1 us and (in which one waits) 5 us between, and 9 us, behind a tile of another kind.
static void the_script_tells_how_long_tiles_take_and_what_is_between(void **state) {
    (void)state;
    char line[512];
    struct trace t;
    trace_open(&t, 2, 8);
    trace_add(&t, TRACE_TRACK_STEP, of_block(4, event("moe forward", 0, 100e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("down", 0, 8e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("down", 9e-6, 19e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("wait", 20e-6, 23e-6)));
    trace_add(&t, TRACE_TRACK_WORKER, of_block(4, event("down", 24e-6, 54e-6)));
    trace_add(&t, TRACE_TRACK_WORKER + 1, of_block(4, event("gate/up", 0, 40e-6)));
    trace_add(&t, TRACE_TRACK_WORKER + 1, of_block(4, event("down", 60e-6, 69e-6)));
    trace_write(&t, NULL, at("trace.json"));
    trace_close(&t);
    snprintf(line, sizeof line, "%s --layer 4 --pass forward", at("trace.json"));
    assert_int_equal(plot(line), 0);
    assert_contains(text,
                    "workers  down                    4           57.0     28.5 %       10.0       30.0      3.0\n");
    assert_contains(text,
                    "workers  gate/up                 1           40.0     20.0 %       40.0       40.0        -\n");
}

static void the_script_says_what_is_wrong(void **state) {
    (void)state;
    char line[512];
    struct trace t;
    assert_int_equal(plot(at("absent.json")), 2);
    assert_contains(text, "absent.json: cannot be read: No such file or directory");
    write_file("cut.json", "{\"traceEvents\":[", 16);
    assert_int_equal(plot(at("cut.json")), 2);
    assert_contains(text, "cut.json: found no trace");
    trace_open(&t, 1, 0);
    trace_write(&t, NULL, at("empty.json"));
    trace_close(&t);
    assert_int_equal(plot(at("empty.json")), 2);
    assert_contains(text, "empty.json: found no events");
    write_pass();
    snprintf(line, sizeof line, "%s --layer 5", at("trace.json"));
    assert_int_equal(plot(line), 2);
    assert_contains(text, "--layer: found 5, wanted a layer with experts: 4");
}

// ---- ranks ----

// One after the other, rank r records 500 * r events: none, little text, and more than goes into one message.
static void all_ranks_are_in_one_file(void **state) {
    (void)state;
    struct comm *world = comm_world();
    int me = comm_rank(world), ranks = comm_size(world);
    struct trace t;
    comm_broadcast(world, root, sizeof root, 0); // the folder of rank 0's test
    trace_open(&t, me % 2 + 1, (size_t)(500 * ranks));
    for (int r = 0; r < ranks; r++) {
        for (int i = 0; r == me && i < 500 * r; i++)
            trace_add(&t, TRACE_TRACK_WORKER, event("push", clock_seconds(), clock_seconds()));
        comm_barrier(world);
    }
    assert_int_equal(trace_write(&t, world, at("trace.json")), 250 * ranks * (ranks - 1));
    trace_close(&t);
    if (me != 0) return;

    cJSON *json = read_trace(at("trace.json"));
    double before = 0; // ranks of one host have one clock: what came first has the smaller time
    for (int r = 0; r < ranks; r++) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", r);
        assert_string_equal(string(metadata(json, "process_name", r, 0), "name"), name);
        assert_int_equal(find(json, "M", r, TRACE_TRACK_WORKER + 2, 0) != NULL, r % 2); // "device" is the last
        assert_null(find(json, "X", r, TRACE_TRACK_WORKER, 500 * r));
        if (r == 0) continue;
        double first = number(find(json, "X", r, TRACE_TRACK_WORKER, 0), "ts");
        const cJSON *last = find(json, "X", r, TRACE_TRACK_WORKER, 500 * r - 1);
        assert_true(r == 1 ? first == 0 : first >= before);
        before = number(last, "ts") + number(last, "dur");
    }
    cJSON_Delete(json);
}

static int end_ranks(void **state) {
    return ranks_meet(state) != 0 || (comm_rank(comm_world()) == 0 && remove_root(state));
}

static int make_root_of_rank_0(void **state) { return comm_rank(comm_world()) == 0 ? make_root(state) : 0; }

#define TEST(function) cmocka_unit_test_setup_teardown(function, make_root, remove_root)

int main(int argc, char **argv) {
    const struct CMUnitTest alone[] = {
        TEST(events_come_back_as_they_were_recorded),
        TEST(events_that_follow_each_other_do_not_overlap),
        TEST(names_with_any_character_are_valid_json),
        TEST(long_traces_are_whole),
        TEST(a_trace_without_events_is_valid),
        TEST(events_that_do_not_fit_are_counted),
        TEST(a_full_disk_leaves_the_older_trace_and_no_half_one),
        TEST(a_folder_that_is_gone_at_the_end_is_named),
        TEST(paths_that_no_trace_can_have_are_refused_at_once),
        TEST(the_third_step_of_a_run_is_traced),
        TEST(the_third_step_of_a_resumed_run_is_traced),
        TEST(a_shorter_run_traces_its_last_step),
        TEST(the_step_that_is_asked_for_is_traced),
        TEST(a_step_that_the_run_does_not_take_is_refused),
        TEST(a_run_that_stops_before_says_that_there_is_no_trace),
        TEST(a_run_without_trace_records_nothing),
        TEST(an_operation_within_another_is_part_of_it),
        TEST(nothing_is_recorded_while_it_is_off),
        TEST(many_operations_are_all_recorded),
        TEST(the_table_is_sorted_and_sums_to_the_step),
        TEST(a_step_is_told_apart_by_operation),
        TEST(the_script_finds_how_much_of_the_moving_is_hidden),
        TEST(the_script_tells_how_long_tiles_take_and_what_is_between),
        TEST(the_script_says_what_is_wrong),
    };
    const struct CMUnitTest together[] = {
        cmocka_unit_test_setup_teardown(all_ranks_are_in_one_file, make_root_of_rank_0, end_ranks),
    };
    ranks_start(argc, argv);
    int failed = comm_size(comm_world()) == 1 ? cmocka_run_group_tests(alone, NULL, NULL) : 0;
    return ranks_stop(failed + cmocka_run_group_tests(together, NULL, NULL));
}
