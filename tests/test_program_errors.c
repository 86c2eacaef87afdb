// The whole program again: what it refuses, and what is left when something goes wrong in the middle of a run.
#include "tests/program.h"
#include "tests/trainer_json.h"

// ---- run folders ----

static void used_folder_is_refused(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    char *log = read_text("run/log.jsonl");
    assert_refused(QUIET, "--steps", "3", "--out", at("run"));
    assert_error("--out: found a run in ");
    assert_contains(err, "--resume");
    assert_contains(err, "--overwrite");
    char *after = read_text("run/log.jsonl");
    assert_string_equal(after, log);
    assert_true(exists("run/step-00000003"));
    free(log);
    free(after);
    remove_tree(at("run/step-00000003")); // a log alone is a run too
    assert_refused(QUIET, "--steps", "3", "--out", at("run"));
    assert_refused(QUIET, "--steps", "3", "--resume", "--overwrite", "--out", at("run"));
    assert_error("--resume: ");
}

static void folder_that_cannot_be_made_is_refused(void **state) {
    (void)state;
    write_file("file", "x", 1);
    assert_refused(QUIET, "--steps", "3", "--out", at("file"));
    assert_error("--out: ");
    assert_contains(err, "is not a folder");
    assert_refused(QUIET, "--steps", "3", "--out", at("file/run"));
    assert_error("--out: cannot make the folder ");
    assert_refused(QUIET, "--steps", "3", "--out", "/proc/nobody/run");
    assert_error("--out: cannot make the folder /proc/nobody");
    assert_refused(QUIET, "--steps", "3", "--out", "/proc"); // there, but nothing can be written
    assert_error("--out: cannot write /proc/.lock");
}

// A run with another model goes on in silence in Megatron-LM issue 6920.
static void resume_with_other_settings_is_refused(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--out", at("run"));
    char *config = read_text("run/config.json"), *log = read_text("run/log.jsonl");
    static const char *const changes[][3] = {
        {"--lr", "0.5", "0.003"},
        {"--seed", "5", "1337"},
        {"--schedule", "wsd", "cosine"},
        {"--clip", "0.25", "1"},
        {"--tokens-per-step", "128", "64"},
        {"--hidden", "32", "64"},
        {"--experts", "16", "8"},
        {"--top-k", "3", "2"},
        {"--expert-intermediate", "64", "32"},
        {"--bias-rate", "0.5", "0.001"},
        {"--layers", "4", "3"},
        {"--mtp-depth", "0", "1"},
    };
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        const char *const *c = changes[i];
        char difference[64];
        assert_refused(QUIET, "--steps", "9", "--save-every", "3", "--resume", "--out", at("run"), c[0], c[1]);
        snprintf(difference, sizeof difference, "\n%s: %s before, %s now\n", c[0], c[2], c[1]);
        assert_contains(out, difference);
        assert_contains(out, "\n--steps: 6 before, 9 now\n"); // which alone would have been allowed
        assert_error(c[0]);
        assert_contains(err, "step-00000006");
        char *found = read_text("run/config.json"), *found_log = read_text("run/log.jsonl");
        assert_string_equal(found, config);
        assert_string_equal(found_log, log);
        free(found);
        free(found_log);
    }
    free(config);
    free(log);
    assert_runs(QUIET, "--steps", "9", "--save-every", "3", "--resume", "--out", at("run"));
    assert_steps_logged("run", 1, 9);
}

// ---- numbers that are not finite ----

static void assert_all_finite(const char *folder, const char *file) {
    char name[128];
    size_t bytes;
    uint64_t header;
    snprintf(name, sizeof name, "%s/%s", folder, file);
    char *data = read_bytes(at(name), &bytes);
    memcpy(&header, data, sizeof header);
    for (size_t i = 8 + header; i + 4 <= bytes; i += 4) {
        float value;
        memcpy(&value, data + i, 4);
        if (!isfinite(value)) fail_msg("%s: found %g", name, (double)value);
    }
    free(data);
}

static void diverged_run_stops_and_keeps_what_was_good(void **state) {
    (void)state;
    assert_code(run(QUIET, "--steps", "50", "--save-every", "1", "--lr", "1e12", "--out", at("run")), 1);
    assert_error("gradient: step ");
    int bad = atoi(err + strlen("mok: error: gradient: step "));
    assert_true(bad > 1 && bad < 50);
    assert_contains(err, " has loss ");
    assert_contains(err, " and gradient norm ");
    assert_contains(err, "nan");
    char good[64], never[64], line[64];
    snprintf(good, sizeof good, "run/step-%08d", bad - 1);
    snprintf(never, sizeof never, "run/step-%08d", bad);
    snprintf(line, sizeof line, "step %2d/50", bad);
    assert_true(exists(good) && !exists(never));
    assert_lacks(out, line);
    assert_steps_logged("run", 1, bad - 1);
    static const char *const files[] = {"model-00001-of-00005.safetensors", "model-00004-of-00005.safetensors",
                                        "state-00001-of-00005.safetensors", "state-00004-of-00005.safetensors"};
    for (int i = 0; i < 4; i++) assert_all_finite(good, files[i]);
}

// Writes a NaN over the first value of a tensor.
static void spoil(const char *file, const char *tensor) {
    size_t bytes;
    uint64_t header;
    char *data = read_bytes(at(file), &bytes);
    memcpy(&header, data, sizeof header);
    cJSON *json = cJSON_ParseWithLength(data + 8, header);
    cJSON *offsets = cJSON_GetObjectItem(cJSON_GetObjectItem(json, tensor), "data_offsets");
    assert_non_null(offsets);
    float nan = NAN;
    memcpy(data + 8 + header + (size_t)cJSON_GetArrayItem(offsets, 0)->valuedouble, &nan, sizeof nan);
    cJSON_Delete(json);
    write_file(file, data, bytes);
    free(data);
}

static void one_bad_weight_stops_the_run(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--out", at("run"));
    spoil("run/step-00000006/state-00002-of-00005.safetensors", "model.layers.0.input_layernorm.weight.master");
    vouch_for("run/step-00000006", "state-00002-of-00005.safetensors"); // as if it had been saved so
    assert_code(run(QUIET, "--steps", "9", "--save-every", "1", "--keep", "1", "--resume", "--out", at("run")), 1);
    assert_error("gradient: step 7 has loss ");
    assert_true(exists("run/step-00000003") && exists("run/step-00000006") && !exists("run/step-00000007"));
    assert_steps_logged("run", 1, 6);
    remove_tree(at("run/step-00000006")); // the way out that the message names
    assert_runs(QUIET, "--steps", "9", "--save-every", "3", "--resume", "--out", at("run"));
    assert_steps_logged("run", 1, 9);
}

// ---- launchers ----

static void launcher_of_several_ranks_is_refused(void **state) {
    (void)state;
    // Ubuntu 24.04's MPICH starts N processes that all are rank 0 of 1 and would write the same files (runner-images issue
    // 13204).
    static const char *const names[] = {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"};
    for (int i = 0; i < 4; i++) {
        char found[64];
        setenv(names[i], "4", 1);
        assert_refused(QUIET, "--steps", "3", "--out", at("run"));
        snprintf(found, sizeof found, "found %s=4", names[i]);
        assert_error("launcher: ");
        assert_contains(err, found);
        assert_false(exists("run"));
        setenv(names[i], "1", 1);
        assert_runs(QUIET, "--steps", "2", "--overwrite", "--out", at("one"));
        unsetenv(names[i]);
    }
}

// ---- data ----

static void assert_data_refused(const char *data, const char *found) {
    assert_refused(QUIET, "--steps", "3", "--out", at("run"), "--data", data);
    assert_error(data);
    assert_contains(err, found);
    assert_refused(QUIET, "--steps", "3", "--out", at("run"), "--eval-data", data);
    assert_error(data);
    assert_contains(err, found);
    assert_false(exists("run"));
}

static void bad_data_is_refused(void **state) {
    (void)state;
    static const int32_t shard[256] = {20240520, 1, 0}, model[256] = {20240326, 3};
    char text[100];
    memset(text, 'a', sizeof text);
    write_file("empty", "", 0);
    write_file("short", text, 30);
    write_file("shard.bin", shard, sizeof shard);
    write_file("model.bin", model, sizeof model);
    assert_data_refused(at("missing"), "No such file");
    assert_data_refused(root, "found a directory");
    assert_data_refused(at("empty"), "found an empty file");
    assert_data_refused(at("short"), "found 31 tokens"); // one sequence and what MTP looks ahead: 34
    assert_data_refused(at("shard.bin"), "found 0 tokens");
    assert_data_refused(at("model.bin"), "llm.c GPT-2 model");
    assert_data_refused("/dev/null", "found a pipe or device");
    write_file("one", text, 40); // enough to train on or to evaluate, not for both
    assert_refused(QUIET, "--steps", "3", "--out", at("run"), "--data", at("one"));
    assert_contains(err, "one sequence to train and one to evaluate");
    assert_runs(QUIET, "--steps", "3", "--out", at("run"), "--data", at("one"), "--eval-data", at("one"));
}

static void vocabulary_that_is_too_small_is_refused(void **state) {
    (void)state;
    assert_refused(QUIET, "--steps", "3", "--vocab", "100", "--out", at("run"));
    assert_error("--vocab: found 100, wanted at least 257");
    assert_false(exists("run"));
    assert_runs(QUIET, "--steps", "2", "--vocab", "300", "--out", at("run"));
}

static void bad_flags_are_one_line(void **state) {
    (void)state;
    assert_refused("--stepz", "3");
    assert_error("command line: found unknown flag --stepz, wanted perhaps --steps");
    assert_refused("--steps", "12abc");
    assert_error("--steps: found '12abc'");
    assert_refused("--preset", "unit", "--top-k", "99", "--out", at("run"));
    assert_error("--top-k: found 99");
    assert_false(exists("run"));
}

// ---- sampling ----

static void sampling_from_no_checkpoint_is_refused(void **state) {
    (void)state;
    assert_refused("--generate", "5", "--from", at("missing"));
    assert_error("--from: ");
    assert_contains(err, "missing/config.json: No such file");
    write_file("file", "x", 1);
    assert_refused("--generate", "5", "--from", at("file"));
    assert_error("--from: ");
    assert_runs(QUIET, "--steps", "2", "--save-every", "0", "--out", at("run")); // a run without a checkpoint
    assert_refused("--generate", "5", "--from", at("run"));
    assert_error("--from: ");
    assert_contains(err, "found a run without a whole checkpoint in ");
    assert_refused("--generate", "5");
    assert_error("--generate: found without --from");
}

static void sampling_from_a_damaged_checkpoint_is_refused(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--out", at("run"));
    shorten("run/step-00000002/model-00003-of-00005.safetensors", 1);
    assert_refused("--generate", "5", "--from", at("run/step-00000002"));
    assert_error("checkpoint: cannot load weights: ");
    assert_contains(err, "model-00003-of-00005.safetensors");
    assert_string_equal(out, "");
    assert_int_equal(remove(at("run/step-00000002/model-00003-of-00005.safetensors")), 0);
    assert_refused("--generate", "5", "--from", at("run/step-00000002"));
    assert_error("checkpoint: cannot load weights: ");
    assert_contains(err, "model-00003-of-00005.safetensors");
    write_file("run/step-00000002/config.json", "{", 1);
    assert_refused("--generate", "5", "--from", at("run/step-00000002"));
    assert_error("--from: ");
    assert_contains(err, "step-00000002/config.json");
}

static void sample_that_is_too_long_is_refused(void **state) {
    (void)state;
    // 2^32 + 1 would be a single token in 32 bits.
    assert_refused("--generate", "4294967297", "--from", at("run"), "--prompt", "abc");
    assert_error("--generate: found 4294967297 with a prompt of 3 bytes, wanted at most 2147483643");
}

// ---- output that cannot be written ----

static void context_beyond_the_positions_of_the_model_is_refused(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--max-positions", "64", "--out", at("run"));
    assert_runs("--generate", "5", "--seq", "64", "--from", at("run"));
    assert_refused("--generate", "5", "--seq", "65", "--from", at("run"));
    assert_error("--seq: found 65, wanted at most the 64 positions of the model");
}

static void flags_of_a_run_beside_sampling_are_refused(void **state) {
    (void)state;
    assert_refused("--generate", "5", "--from", at("run"), "--steps", "5");
    assert_error("--steps: found beside --generate");
    assert_refused("--generate", "5", "--from", at("run"), "--plan");
    assert_error("--plan: found beside --generate");
}

static void second_process_in_a_folder_is_refused(void **state) {
    (void)state;
    pid_t first = start(QUIET, "--steps", "1000000", "--out", at("run"));
    for (int i = 0; i < 1000 && !exists("run/log.jsonl"); i++) usleep(10000);
    fflush(NULL);
    static const char *const how[] = {"--resume", "--overwrite"};
    for (int i = 0; i < 2; i++) {
        output_path = at("second");
        assert_refused(QUIET, "--steps", "5", how[i], "--out", at("run"));
        assert_contains(err, "--out: found that another process runs in");
    }
    kill(first, SIGKILL);
    assert_int_equal(waitpid(first, NULL, 0), first);
    output_path = NULL;
    assert_runs(QUIET, "--steps", "2", "--overwrite", "--out", at("run"));
}

static void unwritable_output_is_an_error(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--out", at("run"));
    static const char *const outputs[] = {"/dev/full", ""};
    for (int i = 0; i < 2; i++) {
        output_path = outputs[i];
        assert_code(run("--generate", "20", "--from", at("run")), 1);
        assert_error("standard output: cannot be written");
        assert_code(run("--help"), 1);
        assert_error("standard output: cannot be written");
        assert_code(run("--plan"), 1);
        assert_code(run("--device"), 1);
        // Training is worth more than what it says: it ends, is saved, and then the error is told.
        assert_code(run(QUIET, "--steps", "3", "--overwrite", "--out", at("quiet")), 1);
        assert_error("standard output: cannot be written");
        output_path = NULL;
        assert_true(exists("quiet/step-00000003/trainer.json"));
        assert_steps_logged("quiet", 1,
                            3); // nothing else got into the log, whose number could have been that of stdout
    }
}

static void log_on_a_full_disk_stops_the_run(void **state) {
    (void)state;
    assert_int_equal(mkdir(at("run"), 0777), 0);
    assert_int_equal(symlink("/dev/full", at("run/log.jsonl")), 0);
    assert_code(run(QUIET, "--steps", "3", "--overwrite", "--out", at("run")), 1);
    assert_error(at("run/log.jsonl: cannot write the log: No space left on device"));
    assert_false(exists("run/step-00000003"));
}

// What cannot begin must not have removed anything.
static void run_that_does_not_fit_is_refused_and_leaves_the_old_one(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    assert_refused("--preset", "moonlight", "--layers", "3000", "--overwrite", "--out", at("run")); // 37 TiB
    assert_error("memory: found ");
    assert_true(exists("run/step-00000003"));
    assert_steps_logged("run", 1, 3);
    assert_runs("--generate", "5", "--from", at("run"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(used_folder_is_refused),
        TEST(folder_that_cannot_be_made_is_refused),
        TEST(resume_with_other_settings_is_refused),
        TEST(diverged_run_stops_and_keeps_what_was_good),
        TEST(one_bad_weight_stops_the_run),
        TEST(launcher_of_several_ranks_is_refused),
        TEST(bad_data_is_refused),
        TEST(vocabulary_that_is_too_small_is_refused),
        TEST(bad_flags_are_one_line),
        TEST(sampling_from_no_checkpoint_is_refused),
        TEST(sampling_from_a_damaged_checkpoint_is_refused),
        TEST(sample_that_is_too_long_is_refused),
        TEST(context_beyond_the_positions_of_the_model_is_refused),
        TEST(flags_of_a_run_beside_sampling_are_refused),
        TEST(second_process_in_a_folder_is_refused),
        TEST(unwritable_output_is_an_error),
        TEST(log_on_a_full_disk_stops_the_run),
        TEST(run_that_does_not_fit_is_refused_and_leaves_the_old_one),
    };
    return run_program_tests(tests);
}
