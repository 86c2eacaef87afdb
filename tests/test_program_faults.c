// The whole program when something happens to its run folder: kills, full disks, damaged files and logs.
#include "tests/program.h"
#include "tests/small_disk.h"

#include "data/files.h"
#include "kernels/clock.h"
#include "model/checkpoint.h"

// In memory where that is possible: a process that is killed leaves the same files there, and waits for no disk.
static int make_root_in_memory(void **state) {
    strcpy(root, "/dev/shm/mok_test_XXXXXX");
    return mkdtemp(root) ? 0 : make_program_root(state);
}

#undef TEST
#define TEST(function) cmocka_unit_test_setup_teardown(function, make_root_in_memory, remove_root)

// A run of six steps that saves after 3 and 6.
#define SHORT QUIET, "--steps", "6", "--save-every", "3"

static void flip_bit(const char *name) {
    size_t bytes;
    char *data = read_bytes(at(name), &bytes);
    data[bytes - 3] ^= 16; // in a tensor file one of the last number's middle bits: a value that looks like any other
    write_file(name, data, bytes);
    free(data);
}

// ---- damaged checkpoints ----

static void resume_skips_a_damaged_checkpoint_and_says_why(void **state) {
    (void)state;
    static const char *const files[] = {"state-00002-of-00005.safetensors", "model-00005-of-00005.safetensors"};
    assert_runs(SHORT, "--out", at("straight"));
    assert_runs(SHORT, "--out", at("run"));
    for (int i = 0; i < 2; i++) {
        char name[128], line[512];
        snprintf(name, sizeof name, "run/step-00000006/%s", files[i]);
        flip_bit(name);
        assert_runs(SHORT, "--resume", "--out", at("run"));
        snprintf(line, sizeof line, "skipped step-00000006: %s: found hash ", at(name));
        assert_contains(err, line);
        assert_contains(err, ": damaged\n");
        assert_contains(out, "run/step-00000003\n"); // going on from there
        assert_true(same_tree("straight/step-00000006", "run/step-00000006"));
        assert_steps_logged("run", 1, 6);
    }
}

static void sampling_notices_a_damaged_checkpoint(void **state) {
    (void)state;
    assert_runs(SHORT, "--out", at("run"));
    assert_runs("--generate", "20", "--from", at("run/step-00000003"));
    char *older = strdup(out);
    flip_bit("run/step-00000006/model-00003-of-00005.safetensors");
    assert_refused("--generate", "20", "--from", at("run/step-00000006"));
    assert_error("checkpoint: cannot load weights: ");
    assert_contains(err, "model-00003-of-00005.safetensors: found hash ");
    assert_runs("--generate", "20", "--from", at("run")); // the newest that is whole
    assert_contains(err, "skipped step-00000006: ");
    assert_string_equal(out, older);
    free(older);
}

// ---- kills ----

// Kills a run that saves after every step at a point of its time, resumes it, and wants the straight run's bytes. In a folder
// of its own: one that is killed while it removes an older run may leave that one's last checkpoint alone.
static void kill_and_resume(double seconds, double whole) {
    if (exists("killed")) remove_tree(at("killed"));
    pid_t pid = start(QUIET, "--steps", "12", "--save-every", "1", "--keep", "2", "--out", at("killed"));
    nanosleep(&(struct timespec){(time_t)seconds, (long)(1e9 * (seconds - floor(seconds)))}, NULL);
    kill(pid, SIGKILL);
    int code = finish_program(pid);
    assert_true(code == -SIGKILL || code == 0);
    char newest[512] = "", wanted[600];
    if (checkpoint_newest(at("killed"), newest, sizeof newest, NULL))
        snprintf(wanted, sizeof wanted, "going on from %s\n", newest);
    else
        snprintf(wanted, sizeof wanted, "starting at the beginning\n");
    assert_runs(QUIET, "--steps", "12", "--save-every", "1", "--keep", "2", "--resume", "--out", at("killed"));
    assert_contains(out, wanted);
    if (!same_tree("straight/step-00000012", "killed/step-00000012") ||
        !same_tree("straight/step-00000011", "killed/step-00000011"))
        fail_msg("killed after %.3f of %.3f s it ends with other bytes", seconds, whole);
    assert_steps_logged("killed", 1, 12);
    // Killed between the last checkpoint and the purge, a run has nothing left to do that would purge.
    if (!strstr(newest, "step-00000012")) assert_false(exists("killed/step-00000010"));
    for (int step = 1; step <= 12; step++) {
        char name[64];
        snprintf(name, sizeof name, "killed/.tmp-step-%08d", step);
        assert_false(exists(name));
    }
}

// Lightning issue 688: the newest checkpoint was cut short by a kill, and taken. `make test` tries four points.
static void killed_while_it_saves_a_run_loses_nothing(void **state) {
    (void)state;
    int points = getenv("MOK_LONG") ? 20 : 4;
    double before = clock_seconds();
    assert_runs(QUIET, "--steps", "12", "--save-every", "1", "--keep", "2", "--out", at("straight"));
    double whole = clock_seconds() - before;
    uint64_t random = 34;
    for (int i = 0; i < points; i++) kill_and_resume((i + test_uniform(&random)) / points * whole, whole);
}

// ---- disks ----

static uint64_t bytes_of_one(void) {
    assert_runs(QUIET, "--steps", "2", "--out", at("measured"));
    uint64_t bytes = checkpoint_bytes_on_disk(at("measured"));
    remove_tree(at("measured"));
    return bytes;
}

// torch's "unexpected pos" hours into a run (Megatron-LM issue 314): said before the first step, nothing else touched.
static void too_small_a_disk_is_refused_before_the_run(void **state) {
    (void)state;
    mount_small_disk("disk", bytes_of_one() / 2);
    assert_refused(SHORT, "--out", at("disk/run"));
    assert_error("--out: found 0.00");
    assert_contains(err, " for one checkpoint; free some space");
    assert_false(exists("disk/run/log.jsonl") || exists("disk/run/config.json"));
    assert_runs(QUIET, "--steps", "3", "--save-every", "0", "--out", at("disk/run"));
    assert_steps_logged("disk/run", 1, 3);
    unmount_small_disk("disk");
}

static void resize_disk(uint64_t bytes) {
    char size[32];
    snprintf(size, sizeof size, "size=%ju", (uintmax_t)bytes);
    assert_int_equal(mount("none", at("disk"), "tmpfs", MS_REMOUNT, size), 0);
}

static void full_disk_stops_the_run_which_goes_on_when_there_is_room(void **state) {
    (void)state;
    uint64_t one = bytes_of_one();
    char newest[512];
    assert_runs(SHORT, "--keep", "1", "--out", at("straight"));
    mount_small_disk("disk", one * 7 / 4); // one checkpoint and most of another
    assert_code(run(SHORT, "--keep", "1", "--out", at("disk/run")), 1);
    assert_contains(err, "mok: warning: --keep: found ");
    assert_contains(err, "mok: error: checkpoint: step 6 was not saved: ");
    assert_contains(err, "No space left on device");
    assert_false(exists("disk/run/step-00000006") || exists("disk/run/.tmp-step-00000006"));
    assert_true(checkpoint_newest(at("disk/run"), newest, sizeof newest, NULL));
    assert_string_equal(newest, at("disk/run/step-00000003"));

    assert_refused(SHORT, "--keep", "1", "--resume", "--out", at("disk/run")); // no room for another
    assert_error("--out: found ");
    assert_true(checkpoint_newest(at("disk/run"), newest, sizeof newest, NULL));
    resize_disk(3 * one);
    assert_runs(SHORT, "--keep", "1", "--resume", "--out", at("disk/run"));
    assert_string_equal(err, "");
    assert_true(same_tree("straight/step-00000006", "disk/run/step-00000006"));
    assert_steps_logged("disk/run", 1, 6);

    resize_disk(one * 7 / 4);
    assert_runs(QUIET, "--steps", "2", "--overwrite", "--out", at("disk/run")); // the old run's room counts as free
    assert_string_equal(err, "");
    unmount_small_disk("disk");
}

static void wait_for(const char *name) {
    for (int i = 0; i < 3000 && !exists(name); i++) usleep(10000); // 30 s, for a machine with much else to do
    assert_true(exists(name));
}

static void run_whose_folder_is_taken_away_stops(void **state) {
    (void)state;
    pid_t pid = start(QUIET, "--schedule", "constant", "--steps", "1000000", "--save-every", "5", "--out", at("run"));
    wait_for("run/step-00000005");
    assert_int_equal(rename(at("run"), at("moved")), 0);
    assert_code(finish_program(pid), 1);
    assert_error("checkpoint: step ");
    assert_contains(err, ": cannot ");
    assert_contains(err, "No such file or directory");
    assert_false(exists("run"));
    assert_runs(QUIET, "--schedule", "constant", "--steps", "2", "--resume", "--out", at("moved"));
    assert_contains(out, "nothing to do");
}

// ---- a run that has ended, or not begun ----

static void finished_run_is_left_as_it_is(void **state) {
    (void)state;
    assert_runs(SHORT, "--keep", "0", "--out", at("run"));
    char *config = read_text("run/config.json"), *log = read_text("run/log.jsonl");
    assert_runs(QUIET, "--steps", "5", "--save-every", "1", "--keep", "1", "--resume", "--out", at("run"));
    assert_contains(out, "nothing to do");
    char *config_now = read_text("run/config.json"), *log_now = read_text("run/log.jsonl");
    assert_string_equal(config_now, config);
    assert_string_equal(log_now, log);
    assert_true(exists("run/step-00000003") && exists("run/step-00000006"));
    free(config);
    free(log);
    free(config_now);
    free(log_now);
}

static void run_that_stopped_before_its_first_step_may_be_started_again(void **state) {
    (void)state;
    assert_int_equal(mkdir(at("run"), 0777), 0);
    write_file("run/log.jsonl", "", 0);
    assert_runs(SHORT, "--out", at("run"));
    assert_steps_logged("run", 1, 6);
}

static void runs_in_folders_of_odd_names(void **state) {
    (void)state;
    char folder[600], resumed[700], *program_path = realpath(program(), NULL), here[4096];
    snprintf(folder, sizeof folder, "%s/%0200d/%0200d", root, 1, 2); // long, and resumed under other spellings of it
    snprintf(resumed, sizeof resumed, "%s//", folder);
    assert_runs(QUIET, "--steps", "2", "--out", folder);
    assert_runs(QUIET, "--steps", "3", "--resume", "--out", resumed);
    assert_contains(out, "step 3/3");
    assert_runs(QUIET, "--steps", "2", "--out", at("my runs/the first one/"));
    assert_runs("--generate", "5", "--from", at("my runs/the first one/"));

    assert_true(program_path && getcwd(here, sizeof here) && mkdir(at("in"), 0777) == 0 && chdir(at("in")) == 0);
    const char *before = getenv("MOK_TRAIN");
    char *kept = before ? strdup(before) : NULL;
    setenv("MOK_TRAIN", program_path, 1);
    int first = run(QUIET, "--steps", "2", "--out", "."), second = run(QUIET, "--steps", "3", "--resume", "--out", ".");
    kept ? setenv("MOK_TRAIN", kept, 1) : unsetenv("MOK_TRAIN");
    assert_int_equal(chdir(here), 0);
    assert_code(first, 0);
    assert_code(second, 0);
    assert_steps_logged("in", 1, 3);
    free(kept);
    free(program_path);
}

// ---- the log ----

// Takes the last checkpoint of a run of six steps away and appends to its log, which tells of all six.
static void lose_and_append(const char *data, size_t bytes) {
    remove_tree(at("run/step-00000006"));
    FILE *log = fopen(at("run/log.jsonl"), "ab");
    assert_int_equal(fwrite(data, 1, bytes, log), bytes);
    assert_int_equal(fclose(log), 0);
}

#define LOSE_AND_APPEND(text) lose_and_append(text, sizeof text - 1) // text may hold zeros

static void resume_and_check_log(void) {
    assert_runs(SHORT, "--resume", "--out", at("run"));
    assert_steps_logged("run", 1, 6);
}

static void what_is_no_line_of_a_log_goes(void **state) {
    (void)state;
    static char zeros[5000], megabyte[1 << 20];
    memset(megabyte, 'x', sizeof megabyte);
    assert_runs(SHORT, "--out", at("run"));
    LOSE_AND_APPEND("{\"step\":7,\"lo"); // torn
    resume_and_check_log();
    lose_and_append(zeros, sizeof zeros); // what a file system may leave after a loss of power
    resume_and_check_log();
    LOSE_AND_APPEND("\0\0{\"step\":2,\"loss\":1}\n");
    resume_and_check_log();
    LOSE_AND_APPEND("{\"step\":2,\"loss\":1}\0\n"); // what follows must not join this line
    resume_and_check_log();
    LOSE_AND_APPEND("{\"step\":2,\"loss\":1} {\"step\":3}\n");
    resume_and_check_log();
    LOSE_AND_APPEND("{\"step\":-1,\"loss\":1}\n[2]\n\n{\"step\":\"2\",\"loss\":1}\n\"step\"\n{\"loss\":1}\n");
    resume_and_check_log();
    lose_and_append(megabyte, sizeof megabyte);
    resume_and_check_log();
    assert_false(exists("run/log.jsonl.tmp"));
}

static void long_lines_of_earlier_steps_stay(void **state) {
    (void)state;
    enum { LONG = 1 << 20 };
    char *line = malloc(LONG + 100);
    int head = sprintf(line, "{\"step\":3,\"note\":\"");
    memset(line + head, 'x', LONG);
    strcpy(line + head + LONG, "\"}\n");
    assert_runs(SHORT, "--out", at("run"));
    lose_and_append(line, strlen(line));
    resume_and_check_log();
    cJSON *notes = read_log("run", "note");
    assert_int_equal(cJSON_GetArraySize(notes), 1);
    cJSON_Delete(notes);
    free(line);
}

// A line of an early step that is damaged is lost, but no other is.
static void zeros_within_the_log_cost_their_line_only(void **state) {
    (void)state;
    assert_runs(SHORT, "--out", at("run"));
    LOSE_AND_APPEND("");
    char *log = read_text("run/log.jsonl"), *second = strchr(log, '\n') + 1;
    size_t bytes = strlen(log);
    memset(second + 4, 0, 10);
    write_file("run/log.jsonl", log, bytes);
    free(log);
    assert_runs(SHORT, "--resume", "--out", at("run"));
    cJSON *steps = read_log("run", "loss"), *line;
    static const int wanted[] = {1, 3, 4, 5, 6};
    assert_int_equal(cJSON_GetArraySize(steps), 5);
    int i = 0;
    cJSON_ArrayForEach(line, steps) assert_true(number(line, "step") == wanted[i++]);
    cJSON_Delete(steps);
}

static void missing_log_begins_anew(void **state) {
    (void)state;
    assert_runs(SHORT, "--out", at("run"));
    LOSE_AND_APPEND("");
    assert_int_equal(remove(at("run/log.jsonl")), 0);
    assert_runs(SHORT, "--resume", "--out", at("run"));
    assert_steps_logged("run", 4, 6);
}

static void log_that_is_a_folder_is_refused(void **state) {
    (void)state;
    assert_runs(SHORT, "--out", at("run"));
    LOSE_AND_APPEND("");
    assert_int_equal(remove(at("run/log.jsonl")), 0);
    assert_int_equal(mkdir(at("run/log.jsonl"), 0777), 0);
    assert_refused(SHORT, "--resume", "--out", at("run"));
    assert_error(at("run/log.jsonl: cannot open the log: Is a directory; mend or move it"));
    assert_refused(SHORT, "--overwrite", "--out", at("run"));
    assert_error(at("run/log.jsonl: cannot open the log: Is a directory; mend or move it"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(resume_skips_a_damaged_checkpoint_and_says_why),
        TEST(sampling_notices_a_damaged_checkpoint),
        TEST(killed_while_it_saves_a_run_loses_nothing),
        TEST(too_small_a_disk_is_refused_before_the_run),
        TEST(full_disk_stops_the_run_which_goes_on_when_there_is_room),
        TEST(run_whose_folder_is_taken_away_stops),
        TEST(finished_run_is_left_as_it_is),
        TEST(run_that_stopped_before_its_first_step_may_be_started_again),
        TEST(runs_in_folders_of_odd_names),
        TEST(what_is_no_line_of_a_log_goes),
        TEST(long_lines_of_earlier_steps_stay),
        TEST(zeros_within_the_log_cost_their_line_only),
        TEST(missing_log_begins_anew),
        TEST(log_that_is_a_folder_is_refused),
    };
    return run_program_tests(tests);
}
