// The program on several ranks, started by mpirun (or what MPIRUN names): they speak, log and save as one.
#include "tests/program.h"
#include "tests/test.h"

#include <dirent.h>

// ---- mpirun ----

static pid_t start_job(const char *ranks, const char *const *arguments) {
    // MPIRUN may be several words.
    const char *argv[64] = {"sh", "-c", "exec ${MPIRUN:-mpirun} \"$@\"", "sh", "-n", ranks, program()};
    for (int i = 7; *arguments; arguments++) argv[i++] = *arguments;
    const char *kept = at("stdout"), *messages = at("stderr");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    redirect(STDOUT_FILENO, kept);
    redirect(STDERR_FILENO, messages);
    alarm(120); // a job that hangs ends
    execv("/bin/sh", (char *const *)argv);
    _exit(127);
}

#define start_ranks(ranks, ...) start_job(ranks, (const char *const[]){__VA_ARGS__, NULL})
#define run_ranks(ranks, ...)   finish_program(start_ranks(ranks, __VA_ARGS__))

#define assert_ranks_run(ranks, ...) assert_code(run_ranks(ranks, __VA_ARGS__), 0)

// One line of ours beside what the launcher says, of the first rank.
static void assert_one_error(const char *place) {
    char wanted[512];
    snprintf(wanted, sizeof wanted, "mok: error: rank 0: %s", place);
    if (count_of(err, "mok: error") != 1 || !strstr(err, wanted))
        fail_msg("found \"%s\", wanted one line that begins with \"%s\"", err, wanted);
}

// ---- one run ----

#define STEPS "--steps", "6", "--save-every", "3", "--tokens-per-step", "128"

static void assert_same_losses(const char *a, const char *b) {
    cJSON *found = read_log(a, "loss"), *wanted = read_log(b, "loss");
    assert_int_equal(cJSON_GetArraySize(found), cJSON_GetArraySize(wanted));
    for (cJSON *x = found->child, *y = wanted->child; x; x = x->next, y = y->next) {
        double difference = fabs(number(x, "loss") - number(y, "loss"));
        // Gradients are summed in another order: measured 6e-8 at most in six steps. A wrong sequence is off by 1e-2.
        if (!(difference <= 1e-6))
            fail_msg("%s, step %g: loss %.9g, wanted %.9g", a, number(x, "step"), number(x, "loss"), number(y, "loss"));
        assert_true(number(x, "tokens") == number(y, "tokens") && number(x, "lr") == number(y, "lr"));
    }
    cJSON_Delete(found);
    cJSON_Delete(wanted);
}

static void ranks_speak_log_and_save_as_one(void **state) {
    (void)state;
    assert_runs(QUIET, STEPS, "--out", at("alone"));
    assert_contains(out, "1 rank: EP 1 x DP 1, --moe mok\n");
    assert_ranks_run("2", QUIET, STEPS, "--out", at("run"));
    assert_string_equal(err, "");
    assert_int_equal(count_of(out, "2 ranks: EP 2 x DP 1, --moe mok\n"), 1);
    assert_int_equal(count_of(out, "step 4/6 |"), 1);
    assert_int_equal(count_of(out, "saved "), 2);
    assert_steps_logged("run", 1, 6);
    assert_same_losses("run", "alone");
    cJSON *lines = read_log("run", "loss"), *line;
    cJSON_ArrayForEach(line, lines) assert_true(number(line, "ranks") == 2 && number(line, "ep") == 2);
    cJSON_Delete(lines);
    assert_true(exists("run/step-00000003/trainer.json") && exists("run/step-00000006/trainer.json"));
}

// Not given, the tokens of a step are a micro-batch of each rank, and config.json says how many that are.
static void tokens_of_a_step_are_settled_and_saved(void **state) {
    (void)state;
    assert_ranks_run("3", QUIET, "--steps", "2", "--save-every", "2", "--ep", "1", "--out", at("run"));
    cJSON *config = read_json("run/config.json");
    assert_true(number(config, "tokens-per-step") == 3 * 2 * 32);
    cJSON_Delete(config);
    assert_runs(QUIET, "--steps", "3", "--save-every", "3", "--resume", "--out", at("run"));
    cJSON *lines = read_log("run", "loss");
    assert_true(number(cJSON_GetArrayItem(lines, 2), "tokens") == 3 * 192);
    cJSON_Delete(lines);
}

static void both_layers_leave_the_same_bytes(void **state) {
    (void)state;
    assert_ranks_run("2", QUIET, STEPS, "--moe", "mok", "--out", at("mok"));
    assert_ranks_run("2", QUIET, STEPS, "--moe", "mok", "--workers", "3", "--comm-workers", "1", "--minibatch-rows",
                     "128", "--ring-rows", "128", "--trace", at("trace.json"), "--out", at("small"));
    assert_ranks_run("2", QUIET, STEPS, "--moe", "alltoall", "--alltoall-chunks", "2", "--out", at("alltoall"));
    assert_true(same_tree("mok/step-00000006", "small/step-00000006"));
    assert_true(same_tree("mok/step-00000006", "alltoall/step-00000006"));
    cJSON_Delete(read_json("trace.json"));
}

// What a step of either layer computes, and of a second run of the first: losses, norms, loads.
static void assert_same_numbers(const char *a, const char *b) {
    static const char *const names[] = {"step",      "loss", "mtp_loss",          "balance_loss",
                                        "grad_norm", "lr",   "load_max_over_mean"};
    cJSON *found = read_log(a, "loss"), *wanted = read_log(b, "loss");
    assert_int_equal(cJSON_GetArraySize(found), cJSON_GetArraySize(wanted));
    for (cJSON *x = found->child, *y = wanted->child; x; x = x->next, y = y->next)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            if (number(x, names[i]) != number(y, names[i]))
                fail_msg("%s, step %g: %s %.17g, in %s %.17g", a, number(x, "step"), names[i], number(x, names[i]), b,
                         number(y, names[i]));
    cJSON_Delete(found);
    cJSON_Delete(wanted);
}

// The published losses of a fused layer and of its unfused arms end far apart (the training figure of LigerCute): here not a
// bit differs in fifty steps, nor from run to run.
static void both_layers_train_alike_for_fifty_steps(void **state) {
    (void)state;
    static const char *const names[] = {"mok", "again", "alltoall"}, *const kinds[] = {"mok", "mok", "alltoall"};
    for (int i = 0; i < 3; i++)
        assert_ranks_run("2", QUIET, "--steps", "50", "--save-every", "25", "--tokens-per-step", "128", "--moe",
                         kinds[i], "--out", at(names[i]));
    for (int i = 1; i < 3; i++) {
        char folder[64];
        assert_steps_logged(names[i], 1, 50);
        assert_same_numbers(names[i], "mok");
        snprintf(folder, sizeof folder, "%s/step-00000025", names[i]);
        assert_true(same_tree(folder, "mok/step-00000025"));
        snprintf(folder, sizeof folder, "%s/step-00000050", names[i]);
        assert_true(same_tree(folder, "mok/step-00000050"));
    }
}

// ---- resume ----

// The loss differs after a resume in Megatron-LM issue 761; on the same layout a straight run and a resumed one leave the same
// bytes, on others the same sequences give the same losses within the order of sums.
static void run_goes_on_with_other_ranks(void **state) {
    (void)state;
    static const char *const ranks[] = {"1", "2", "4", "4"}, *const eps[] = {"1", "2", "4", "2"};
    assert_ranks_run("2", QUIET, STEPS, "--out", at("straight"));
    for (int i = 0; i < 4; i++) {
        char copy[1024];
        snprintf(copy, sizeof copy, "rm -rf %s && cp -r %s %s", at("run"), at("straight"), at("run"));
        assert_int_equal(system(copy), 0);
        remove_tree(at("run/step-00000006")); // as if the run had ended after step 3
        assert_ranks_run(ranks[i], "--resume", "--ep", eps[i], "--out", at("run"));
        assert_int_equal(count_of(out, "going on from "), 1);
        assert_steps_logged("run", 1, 6);
        assert_same_losses("run", "straight");
        if (i == 1) assert_true(same_tree("run/step-00000006", "straight/step-00000006")); // the same layout
    }
}

// ---- errors ----

// Found by all ranks, or by the first for all of them: said once, with the code that one process ends with.
static void error_is_one_line(void **state) {
    (void)state;
    assert_runs(QUIET, STEPS, "--out", at("used"));
    write_file("short.txt", "x", 1);
    assert_int_equal(run_ranks("3", QUIET, "--stepz", "3"), 2);
    assert_one_error("command line: found unknown flag --stepz");
    assert_int_equal(run_ranks("3", QUIET, "--tokens-per-step", "33", "--out", at("run")), 2);
    assert_one_error("--tokens-per-step: found 33");
    assert_int_equal(run_ranks("3", QUIET, "--ep", "2", "--out", at("run")), 2);
    assert_one_error("--ep: found 2 with 3 ranks");
    assert_int_equal(run_ranks("3", QUIET, "--data", at("short.txt"), "--out", at("run")), 2);
    assert_one_error(at("short.txt"));
    assert_int_equal(run_ranks("3", QUIET, STEPS, "--out", at("used")), 2);
    assert_one_error("--out: found a run in ");
    assert_int_equal(run_ranks("3", "--generate", "5", "--from", at("used")), 2);
    assert_one_error("--generate: found 3 ranks");
    assert_int_equal(run_ranks("3", "--evaluate", "--from", at("nowhere")), 2);
    assert_one_error("");
    assert_int_equal(run_ranks("3", "--evaluate", "--from", at("used"), "--workers", "2", "--comm-workers", "2"), 2);
    assert_one_error("--comm-workers: found 2");
    assert_int_equal(run_ranks("3", "--evaluate", "--from", at("used"), "--workers", "100000"), 2);
    assert_one_error("--workers: found 100000");
    assert_int_equal(run_ranks("3", "--evaluate", "--from", at("used"), "--batch", "2000000000"), 2);
    assert_one_error("--batch: found 2000000000 with --seq ");
    assert_int_equal(
        run_ranks("3", QUIET, STEPS, "--out", at("used"), "--overwrite", "--trace", at("nowhere/trace.json")), 2);
    assert_one_error("--trace: cannot create ");
    assert_true(exists("used/step-00000006/trainer.json"));
    assert_int_equal(run_ranks("3", "--resume", "--out", at("used"), "--seed", "5"), 2);
    assert_one_error("--seed: found another value");
    assert_false(exists("run"));
}

// MOK_WAIT_SECONDS, which every rank reads for itself.
static void wrong_patience_is_one_line(void **state) {
    (void)state;
    static const char *const seconds[] = {"abc", "0", "-1", "nan", "5x", ""};
    for (int i = 0; i < (int)(sizeof seconds / sizeof *seconds); i++) {
        setenv("MOK_WAIT_SECONDS", seconds[i], true);
        assert_int_equal(run_ranks("3", QUIET, STEPS, "--out", at("run")), 2);
        assert_one_error("MOK_WAIT_SECONDS: found '");
    }
    unsetenv("MOK_WAIT_SECONDS");
    assert_false(exists("run/config.json"));
}

static void warning_is_one_line(void **state) {
    (void)state;
    assert_ranks_run("2", QUIET, "--steps", "2", "--save-every", "0", "--route", "balanced", "--out", at("run"));
    assert_int_equal(count_of(err, "mok: warning"), 1);
    assert_contains(err, "mok: warning: rank 0: --route: ");
}

static void diverged_run_is_stopped_by_all_ranks(void **state) {
    (void)state;
    assert_int_equal(run_ranks("2", QUIET, "--steps", "50", "--save-every", "1", "--lr", "1e12", "--out", at("run")),
                     1);
    assert_one_error("gradient: step ");
}

// ---- signals ----

static void wait_for_text(const char *text) {
    for (int i = 0; i < 6000; i++) { // 60 s, for a machine with much else to do
        char *said = exists("stdout") ? read_text("stdout") : calloc(1, 1);
        bool found = strstr(said, text);
        free(said);
        if (found) return;
        usleep(10000);
    }
    fail_msg("found no \"%s\" in time", text);
}

// The last of the processes that run the program on this test's folder, without the launcher's.
static pid_t find_last_rank(void) {
    DIR *processes = opendir("/proc");
    pid_t last = 0;
    assert_non_null(processes);
    for (struct dirent *entry; (entry = readdir(processes));) {
        char path[300], line[4096];
        snprintf(path, sizeof path, "/proc/%s/cmdline", entry->d_name);
        FILE *file = isdigit((unsigned char)entry->d_name[0]) ? fopen(path, "r") : NULL;
        if (!file) continue;
        size_t length = fread(line, 1, sizeof line - 1, file);
        fclose(file);
        line[length] = 0;
        if (strcmp(line, program()) == 0 && memmem(line, length, root, strlen(root))) last = atoi(entry->d_name);
    }
    closedir(processes);
    assert_true(last > 0);
    return last;
}

static int last_step_stopped(int number) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "stopped by signal %d after step ", number);
    const char *line = strstr(out, wanted);
    if (!line || count_of(out, wanted) != 1) fail_msg("found \"%s\", wanted \"%s\" once", out, wanted);
    return atoi(line + strlen(wanted));
}

// To the launcher, which passes it on, or to one rank alone: all stop after the same step, and have saved it. (Open MPI's
// mpirun, asked by SIGTERM, does not pass it on alone: it ends the job, with exit code 1.)
static void signal_stops_all_ranks_at_one_step(void **state) {
    (void)state;
    for (int alone = 0; alone < 2; alone++) {
        pid_t launcher =
            start_ranks("2", QUIET, "--steps", "100000", "--save-every", "100000", "--overwrite", "--out", at("run"));
        wait_for_text("step      2/");
        kill(alone ? find_last_rank() : launcher, alone ? SIGTERM : SIGUSR1);
        assert_code(finish_program(launcher), 0);
        int step = last_step_stopped(alone ? SIGTERM : SIGUSR1);
        char saved[64], more[16];
        snprintf(saved, sizeof saved, "run/step-%08d", step);
        assert_true(exists(saved));
        snprintf(more, sizeof more, "%d", step + 2);
        assert_ranks_run("2", "--resume", "--steps", more, "--out", at("run"));
        assert_steps_logged("run", 1, step + 2);
    }
}

// ---- evaluation ----

static void ranks_evaluate_as_one_process(void **state) {
    (void)state;
    assert_runs(QUIET, STEPS, "--out", at("run"));
    assert_runs("--evaluate", "--from", at("run"), "--batch", "2", "--eval-sequences", "5");
    char *wanted = strdup(out);
    assert_contains(wanted, "bits per byte");
    assert_ranks_run("3", "--evaluate", "--from", at("run"), "--batch", "2", "--eval-sequences", "5");
    assert_string_equal(out, wanted);
    assert_ranks_run("4", "--evaluate", "--from", at("run"), "--batch", "2", "--eval-sequences", "5", "--ep", "2",
                     "--moe", "alltoall");
    assert_string_equal(out, wanted);
    free(wanted);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(ranks_speak_log_and_save_as_one),      TEST(tokens_of_a_step_are_settled_and_saved),
        TEST(both_layers_leave_the_same_bytes),     TEST(both_layers_train_alike_for_fifty_steps),
        TEST(run_goes_on_with_other_ranks),         TEST(error_is_one_line),
        TEST(wrong_patience_is_one_line),           TEST(warning_is_one_line),
        TEST(diverged_run_is_stopped_by_all_ranks), TEST(signal_stops_all_ranks_at_one_step),
        TEST(ranks_evaluate_as_one_process),
    };
    return run_program_tests(tests);
}
