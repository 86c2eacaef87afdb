// Where a run begins: with saved settings, with changed ones, with the weights of another run.
#include "tests/program.h"

// ---- resume ----

static void resume_needs_no_flag_but_the_folder(void **state) {
    (void)state;
    assert_runs(QUIET, "--schedule", "constant", "--lr", "0.002", "--steps", "6", "--save-every", "3", "--keep", "0",
                "--out", at("straight"));
    assert_runs(QUIET, "--schedule", "constant", "--lr", "0.002", "--steps", "3", "--save-every", "3", "--keep", "0",
                "--out", at("resumed"));
    assert_runs("--resume", "--steps", "6", "--out", at("resumed"));
    assert_contains(out, "going on with the settings saved in ");
    assert_contains(out, "\n--steps: 3 before, 6 now\n");
    assert_true(same_tree("straight/step-00000006", "resumed/step-00000006"));
    assert_true(exists("resumed/step-00000003")); // --keep 0 stays: the default 3 would do so too, but see below
    cJSON *config = read_json("resumed/config.json");
    assert_true(number(config, "keep") == 0 && number(config, "lr") == 0.002);
    cJSON_Delete(config);
}

static void overridden_settings_are_printed_and_used(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--save-every", "3", "--out", at("run"));
    assert_refused("--resume", "--steps", "5", "--lr", "0.0005", "--min-lr", "0.0005", "--out", at("run"));
    assert_error("--lr: found another value than in ");
    assert_contains(err, "--override");
    assert_runs("--resume", "--override", "--steps", "5", "--lr", "0.0005", "--min-lr", "0.0005", "--out", at("run"));
    assert_contains(out, "\n--lr: 0.003 before, 0.0005 now\n");
    cJSON *lines = read_log("run", "lr"), *line;
    assert_int_equal(cJSON_GetArraySize(lines), 5);
    cJSON_ArrayForEach(line, lines) assert_true(number(line, "step") <= 3 || number(line, "lr") == 0.0005);
    cJSON_Delete(lines);
    // What was changed once is the run's own from then on.
    assert_runs("--resume", "--steps", "6", "--out", at("run"));
    assert_lacks(out, "--lr:");
    cJSON *config = read_json("run/config.json");
    assert_true(number(config, "lr") == 0.0005);
    cJSON_Delete(config);
}

// (a finished run that is asked for less: nothing is written)
static void resume_with_nothing_to_do_writes_nothing(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "4", "--save-every", "2", "--out", at("run"));
    char *config = read_text("run/config.json"), *log = read_text("run/log.jsonl");
    assert_runs("--resume", "--steps", "3", "--out", at("run"));
    assert_contains(out, "nothing to do");
    char *config_now = read_text("run/config.json"), *log_now = read_text("run/log.jsonl");
    assert_string_equal(config_now, config);
    assert_string_equal(log_now, log);
    free(config), free(config_now), free(log), free(log_now);
}

// The settings of a run that was killed before its first checkpoint are in its config.json.
static void resume_before_the_first_checkpoint_has_the_settings(void **state) {
    (void)state;
    assert_runs(QUIET, "--lr", "0.002", "--steps", "3", "--save-every", "3", "--overwrite", "--out", at("straight"));
    assert_runs(QUIET, "--lr", "0.002", "--steps", "3", "--save-every", "3", "--overwrite", "--out", at("run"));
    remove_tree(at("run/step-00000003")); // as if it had ended in the third step
    assert_runs("--resume", "--out", at("run"));
    assert_contains(out, "no checkpoint in ");
    assert_true(same_tree("straight/step-00000003", "run/step-00000003"));
    assert_steps_logged("run", 1, 3);
    remove_tree(at("run/step-00000003"));
    assert_refused("--resume", "--lr", "0.1", "--out", at("run"));
    assert_error("--lr: found another value");
}

// A run's files would replace those of whatever lies there.
static void folder_of_something_else_stays_as_it_is(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--save-every", "2", "--out", at("run"));
    assert_int_equal(mkdir(at("weights"), 0777), 0);
    write_file("weights/config.json", "{\"model_type\": \"deepseek_v3\"}", 29);
    assert_int_equal(mkdir(at("notes"), 0777), 0);
    write_file("notes/config.json", "precious", 8);
    static const char *const folders[] = {"run/step-00000002", "weights", "notes"};
    for (int i = 0; i < 3; i++) {
        char file[64];
        snprintf(file, sizeof file, "%s/config.json", folders[i]);
        char *before = read_text(file);
        assert_refused(QUIET, "--steps", "2", "--out", at(folders[i]));
        assert_error("--out: ");
        assert_refused(QUIET, "--steps", "2", "--overwrite", "--out", at(folders[i]));
        assert_refused("--resume", "--out", at(folders[i]));
        assert_contains(err, "config.json");
        char *after = read_text(file);
        assert_string_equal(after, before);
        free(before), free(after);
        snprintf(file, sizeof file, "%s/.lock", folders[i]);
        assert_false(exists(file));
    }
    assert_runs("--resume", "--steps", "3", "--out", at("run"));
}

// A moved run is the same run.
static void moved_run_goes_on(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--save-every", "3", "--out", at("here"));
    assert_int_equal(rename(at("here"), at("there")), 0);
    assert_runs("--resume", "--steps", "4", "--out", at("there"));
    assert_steps_logged("there", 1, 4);
}

// ---- weights of another run ----

static void run_starts_from_the_weights_of_another(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "20", "--save-every", "20", "--schedule", "constant", "--out", at("first"));
    cJSON *first = read_log("first", "loss");
    double reached = number(cJSON_GetArrayItem(first, 19), "loss"),
           begun = number(cJSON_GetArrayItem(first, 0), "loss");
    cJSON_Delete(first);

    assert_runs("--from", at("first"), "--seq", "32", "--batch", "2", "--seed", "5", "--sample-tokens", "0",
                "--eval-every", "0", "--warmup", "0", "--steps", "2", "--lr", "1e-6", "--min-lr", "0", "--out",
                at("second"));
    assert_contains(out, "starting from the weights in ");
    assert_contains(out, "first/step-00000020");
    cJSON *second = read_log("second", "loss");
    double loss = number(cJSON_GetArrayItem(second, 0), "loss");
    // It goes on where the first one stopped, on other stories of the same kind.
    if (!(fabs(loss - reached) < 0.3 * (begun - reached)))
        fail_msg("first loss %g, wanted about %g and far from %g", loss, reached, begun);
    cJSON_Delete(second);
    assert_steps_logged("second", 1, 2);
    assert_true(exists("second/step-00000002"));

    // The sizes came with the weights and are the run's own now: the first run is not needed any more.
    remove_tree(at("first"));
    assert_runs("--resume", "--steps", "3", "--out", at("second"));
    assert_steps_logged("second", 1, 3);
}

static void weights_that_are_none_are_refused(void **state) {
    (void)state;
    assert_refused("--from", at("nowhere"), "--out", at("run"));
    assert_error("--from: ");
    assert_contains(err, "config.json");
    assert_false(exists("run"));
    assert_runs(QUIET, "--steps", "2", "--save-every", "2", "--out", at("first"));
    assert_refused("--from", at("first"), "--hidden", "96", "--out", at("run"));
    assert_error("--hidden: found 96, wanted 64");
    assert_false(exists("run"));
}

// transformers drops the MTP modules of what it loads, and leaves config.json as it was.
static void weights_without_mtp_modules_are_enough(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--save-every", "2", "--out", at("first"));
    assert_runs(QUIET, "--mtp-depth", "0", "--steps", "2", "--save-every", "2", "--out", at("second"));
    char command[512];
    snprintf(command, sizeof command,
             "cp %s/first/step-00000002/config.json %s/second/step-00000002/ && rm "
             "%s/second/step-00000002/trainer.json",
             root, root, root);
    assert_int_equal(system(command), 0);
    assert_runs("--from", at("second/step-00000002"), "--seq", "32", "--batch", "2", "--sample-tokens", "0",
                "--eval-every", "0", "--warmup", "0", "--steps", "1", "--out", at("third"));
    assert_contains(out, "found 0 MTP modules in ");
    assert_lacks(out, "| mtp ");
    // Modules that are asked for are not made up.
    assert_refused("--from", at("second/step-00000002"), "--mtp-depth", "1", "--out", at("fourth"));
    assert_error("--mtp-depth: found 1, wanted 0");
}

static void run_without_a_checkpoint_has_no_weights(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--save-every", "0", "--out", at("run"));
    static const char *const uses[][2] = {{"--generate", "3"}, {"--eval-sequences", "3"}};
    for (int i = 0; i < 2; i++) {
        assert_refused("--from", at("run"), uses[i][0], uses[i][1], i ? "--evaluate" : "--prompt=x");
        assert_contains(err, "found a run without a whole checkpoint");
    }
    assert_refused("--from", at("run"), "--out", at("other"));
    assert_contains(err, "found a run without a whole checkpoint");
}

// What is evaluated by default is what the run held out.
static void evaluation_of_weights_reads_the_data_of_their_run(void **state) {
    (void)state;
    char text[4000];
    for (int i = 0; i < 4000; i++) text[i] = (char)('a' + i * i % 7 * (i % 3));
    write_file("text", text, sizeof text);
    assert_runs(UNIT, "--batch", "2", "--sample-tokens", "0", "--steps", "4", "--eval-sequences", "5", "--data",
                at("text"), "--out", at("run"));
    char loss[32] = "";
    assert_int_equal(sscanf(strstr(out, "eval at step 4 | "), "eval at step 4 | loss %31s", loss), 1);
    assert_runs("--evaluate", "--from", at("run"), "--eval-sequences", "5", "--batch", "3");
    assert_contains(out, at("text"));
    assert_contains(out, loss); // trained with an MTP module and evaluated without: the same part is held out
    // Weights of other origin do not say what they were trained on.
    assert_int_equal(remove(at("run/step-00000004/trainer.json")), 0);
    assert_refused("--evaluate", "--from", at("run/step-00000004"), "--batch", "3");
    assert_error("--data: found none");
}

static void signal_cuts_an_evaluation_short(void **state) {
    (void)state;
    pid_t pid = start(UNIT, "--batch", "2", "--sample-tokens", "0", "--steps", "2", "--eval-every", "1",
                      "--eval-sequences", "1000000000", "--out", at("run"));
    for (int i = 0; i < 3000 && !(exists("run/log.jsonl") && count_of(read_text("run/log.jsonl"), "\n")); i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    kill(pid, SIGTERM);
    assert_code(finish_program(pid), 0);
    assert_contains(out, "stopped by signal 15 after step 1");
    assert_lacks(out, "eval at step");
    assert_true(exists("run/step-00000001"));
}

static void weights_are_not_read_when_a_run_is_resumed(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--save-every", "2", "--out", at("first"));
    // One command line for a job that may be started again: from the weights at first, later from its own checkpoint.
    const char *steps[] = {"2", "4"};
    for (int i = 0; i < 2; i++) {
        assert_runs("--resume", "--from", at("first"), "--seq", "32", "--batch", "2", "--sample-tokens", "0",
                    "--eval-every", "0", "--warmup", "0", "--schedule", "constant", "--steps", steps[i], "--out",
                    at("second"));
        assert_int_equal(count_of(out, "starting from the weights in "), i == 0);
    }
    assert_steps_logged("second", 1, 4);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(resume_needs_no_flag_but_the_folder),
        TEST(overridden_settings_are_printed_and_used),
        TEST(resume_with_nothing_to_do_writes_nothing),
        TEST(resume_before_the_first_checkpoint_has_the_settings),
        TEST(folder_of_something_else_stays_as_it_is),
        TEST(moved_run_goes_on),
        TEST(run_starts_from_the_weights_of_another),
        TEST(weights_that_are_none_are_refused),
        TEST(weights_without_mtp_modules_are_enough),
        TEST(run_without_a_checkpoint_has_no_weights),
        TEST(evaluation_of_weights_reads_the_data_of_their_run),
        TEST(signal_cuts_an_evaluation_short),
        TEST(weights_are_not_read_when_a_run_is_resumed),
    };
    return run_program_tests(tests);
}
