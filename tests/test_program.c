// The whole program, from its flags to the files of a run: what it must do. test_program_errors.c has what it refuses.
#include "tests/program.h"

#include "model/safetensors.h"

// ---- what a run leaves ----

static void run_writes_its_resolved_flags(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--lr", "0.01", "--out", at("run"));
    cJSON *config = read_json("run/config.json");
    assert_string_equal(string(config, "preset"), "unit");
    assert_string_equal(string(config, "data"), "stories");
    assert_string_equal(string(config, "out"), at("run"));
    assert_true(number(config, "steps") == 3 && number(config, "lr") == 0.01);       // as given
    assert_true(number(config, "hidden") == 64 && number(config, "min-lr") == 3e-4); // as the preset says
    assert_true(number(config, "vocab") == 257);
    cJSON_Delete(config);
}

static void vocabulary_follows_the_data(void **state) {
    (void)state;
    // tiny leaves it open; made as small as unit here.
    assert_runs("--preset", "tiny", "--hidden", "32", "--layers", "2", "--seq", "16", "--batch", "1", "--steps", "1",
                "--sample-tokens", "0", "--eval-every", "0", "--out", at("run"));
    cJSON *config = read_json("run/config.json"), *model = read_json("run/step-00000001/config.json");
    assert_true(number(config, "vocab") == 257 && number(model, "vocab_size") == 257);
    cJSON_Delete(config);
    cJSON_Delete(model);
}

static void run_leaves_a_hugging_face_folder(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    assert_contains(out, "step-00000003");
    cJSON *config = read_json("run/step-00000003/config.json");
    cJSON *architectures = cJSON_GetObjectItem(config, "architectures");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetArrayItem(architectures, 0)), "DeepseekV3ForCausalLM");
    assert_true(number(config, "num_hidden_layers") == 3);
    cJSON_Delete(config);

    cJSON *index = read_json("run/step-00000003/model.safetensors.index.json"), *file;
    cJSON *map = cJSON_GetObjectItem(index, "weight_map");
    assert_true(cJSON_HasObjectItem(map, "model.layers.1.mlp.experts.7.down_proj.weight"));
    cJSON_ArrayForEach(file, map) {
        char name[128];
        snprintf(name, sizeof name, "run/step-00000003/%s", file->valuestring);
        assert_true(exists(name));
    }
    cJSON_Delete(index);
    assert_true(exists("run/step-00000003/generation_config.json"));
    assert_true(exists("run/step-00000003/tokenizer.json") && exists("run/step-00000003/tokenizer_config.json"));
}

static void run_prints_flags_table_and_data(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--out", at("run"));
    static const char *const parts[] = {
        "unit, on CPU", "  steps  ",         "\nParameters\n",    "\n  routed experts  ", "\n  active for a token  ",
        "\nMemory\n",   "\ntrain | stories", "\neval  | stories", "\nstep 1/2 | loss ",   "\nsaved ",
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) assert_contains(out, parts[i]);
    assert_string_equal(err, "");
}

static void assert_printed(const char *line, const char *format, double value) {
    char part[64];
    snprintf(part, sizeof part, format, value);
    assert_contains(line, part);
}

static void json_lines_hold_the_numbers_of_the_step_lines(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    cJSON *steps = read_log("run", "loss"), *json;
    assert_int_equal(cJSON_GetArraySize(steps), 3);
    const char *line = out;
    cJSON_ArrayForEach(json, steps) {
        assert_non_null(line = strstr(line, "\nstep "));
        line++;
        char text[512];
        snprintf(text, sizeof text, "%.*s", (int)strcspn(line, "\n"), line);
        assert_printed(text, "step %.0f/3 |", number(json, "step"));
        assert_printed(text, "| loss %7.4f |", number(json, "loss"));
        assert_printed(text, "| mtp %7.4f |", number(json, "mtp_loss"));
        assert_printed(text, "| bal %.2e |", number(json, "balance_loss"));
        assert_printed(text, "| norm %7.3f |", number(json, "grad_norm"));
        assert_printed(text, "| lr %.2e |", number(json, "lr"));
        assert_printed(text, "| load max/mean %5.2f ", number(json, "load_max_over_mean"));
        assert_printed(text, " dead %3.0f |", number(json, "dead_experts"));
        assert_printed(text, "| %8.1f ms |", 1e3 * number(json, "seconds"));
        assert_printed(text, "| %7.1fK tok/s |", number(json, "tokens_per_second") / 1e3);
        assert_printed(text, "| mfu %5.1f%% (causal) |", 100 * number(json, "mfu_causal"));
        assert_printed(text, "| %6.2f GiB |", number(json, "peak_memory_gib"));
        assert_true(number(json, "tokens") == 64 * number(json, "step"));
        assert_true(number(json, "epoch") == 0); // the stories have no end
        assert_true(number(json, "data_seconds") <= number(json, "seconds"));
        assert_true(number(json, "eta_seconds") >= 0);
        double rate = 64 / number(json, "seconds");
        assert_true(fabs(number(json, "tokens_per_second") / rate - 1) < 1e-9); // one division, printed in 17 digits
    }
    cJSON_Delete(steps);
}

static void step_lines_are_aligned(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "12", "--out", at("run"));
    const char *first = strstr(out, "\nstep "), *line = first;
    assert_non_null(first);
    int lines = 0;
    for (; line; line = strstr(line + 1, "\nstep "), lines++)
        for (size_t i = 1; first[i] != '\n' && line[i] != '\n'; i++) // the last column, the time left, may end anywhere
            if ((first[i] == '|') != (line[i] == '|'))
                fail_msg("found a column at another place than in the first line: %.200s", line);
    assert_int_equal(lines, 12);
}

static void samples_stand_before_between_and_after(void **state) {
    (void)state;
    assert_runs(UNIT, "--batch", "2", "--steps", "5", "--sample-tokens", "20", "--sample-every", "2", "--out",
                at("run"));
    const char *before = strstr(out, "--- sample before training ---\n"), *step = strstr(out, "\nstep 1/5");
    const char *after = strstr(out, "--- sample after training ---\n");
    assert_true(before && step && after && before < step && strstr(out, "\nstep 5/5") < after);
    assert_int_equal(count_of(out, "--- sample in between ---"), 2);
    for (const char *c = out; *c; c++)
        assert_true(*c == '\n' || isprint((unsigned char)*c) || (*c & 0x80)); // noise, fit for a UTF-8 terminal
}

// U+009B begins a command to a terminal, as ESC [ does. A model that has read little else writes it.
static void samples_hold_no_controls_of_latin_1(void **state) {
    (void)state;
    char text[3000];
    for (size_t i = 0; i < sizeof text; i++) text[i] = i % 2 ? '\x9b' : '\xc2';
    write_file("text", text, sizeof text);
    assert_runs(UNIT, "--batch", "2", "--eval-every", "0", "--steps", "30", "--sample-tokens", "40", "--data",
                at("text"), "--out", at("run"));
    const char *after = strstr(out, "--- sample after training ---\n");
    assert_non_null(after);
    assert_contains(after, "...."); // what stands in their place
    for (const unsigned char *c = (const unsigned char *)after; *c; c++)
        assert_false(c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0);
}

static void evaluations_are_logged(void **state) {
    (void)state;
    assert_runs(UNIT, "--batch", "2", "--sample-tokens", "0", "--steps", "5", "--eval-every", "2", "--out", at("run"));
    cJSON *evals = read_log("run", "eval_loss"), *line;
    static const int steps[] = {2, 4, 5}; // every second step and the last
    int i = 0;
    assert_int_equal(cJSON_GetArraySize(evals), 3);
    cJSON_ArrayForEach(line, evals) {
        assert_true(number(line, "step") == steps[i++]);
        double bits = number(line, "eval_loss") / log(2);
        // Every token is a byte, but for the ends of texts, about one in 400: their cost counts, their length does not.
        double ratio = number(line, "eval_bits_per_byte") / bits;
        assert_true(ratio >= 1 && ratio < 1.01);
    }
    cJSON_Delete(evals);
}

static void moe_layers_are_logged(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "4", "--log-moe-every", "2", "--out", at("run"));
    cJSON *lines = read_log("run", "moe_blocks"), *line, *block;
    assert_int_equal(cJSON_GetArraySize(lines), 2);
    cJSON_ArrayForEach(line, lines) {
        cJSON *blocks = cJSON_GetObjectItem(line, "moe_blocks");
        assert_int_equal(cJSON_GetArraySize(blocks), 3); // layers 1 and 2, and the MTP module
        cJSON_ArrayForEach(block, blocks) {
            assert_true(number(block, "load_max_over_mean") >= 1 && number(block, "load_min_over_mean") <= 1);
            assert_true(number(block, "bias_min") <= number(block, "bias_max"));
        }
    }
    assert_int_equal(count_of(out, "\nmoe block "), 6);
    cJSON_Delete(lines);
}

static void intervals_of_zero_mean_never(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--save-every", "0", "--sample-every", "0", "--log-moe-every", "0", "--out",
                at("run"));
    assert_lacks(out, "eval at");
    assert_lacks(out, "moe block");
    assert_lacks(out, "--- sample");
    assert_lacks(out, "saved");
    assert_false(exists("run/step-00000003"));
    assert_steps_logged("run", 1, 3);
}

static void evaluates_with_any_batch(void **state) {
    (void)state;
    // llm.c pull 667: fewer than four sequences divided by zero. The file holds one sequence to evaluate.
    char text[300];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + i % 7);
    write_file("text", text, sizeof text);
    static const char *const batches[] = {"1", "2", "3", "5"};
    double losses[4];
    for (int i = 0; i < 4; i++) {
        // Rates of 0 leave the first weights and routes, so every batch sees the same loss of the same text.
        assert_runs(UNIT, "--batch", batches[i], "--lr", "0", "--bias-rate", "0", "--steps", "2", "--sample-tokens",
                    "0", "--data", at("text"), "--overwrite", "--out", at("run"));
        cJSON *evals = read_log("run", "eval_loss");
        losses[i] = number(cJSON_GetArrayItem(evals, 0), "eval_loss");
        cJSON_Delete(evals);
        // Means of equal numbers, summed in another order: some roundings of a double, a million times less than this.
        assert_true(fabs(losses[i] / losses[0] - 1) < 1e-9);
    }
}

// ---- same bytes ----

// log.jsonl without what a clock or the machine decides; free with free().
static char *log_without_times(const char *folder) {
    static const char *const times[] = {"unix_time",    "seconds",         "tokens_per_second", "mfu_causal",
                                        "data_seconds", "peak_memory_gib", "eta_seconds"};
    cJSON *lines = read_log(folder, "step"), *line;
    cJSON_ArrayForEach(line, lines) for (size_t i = 0; i < sizeof times / sizeof *times; i++)
        cJSON_DeleteItemFromObject(line, times[i]);
    char *text = cJSON_PrintUnformatted(lines); // 17 digits where 15 do not do: equal texts are equal numbers
    cJSON_Delete(lines);
    return text;
}

static bool same_log(const char *a, const char *b) {
    char *first = log_without_times(a), *second = log_without_times(b);
    bool same = strcmp(first, second) == 0;
    free(first);
    free(second);
    return same;
}

static void same_flags_leave_the_same_bytes(void **state) {
    (void)state;
    static const char *const folders[] = {"first", "second", "one-thread", "three-threads", "other-seed"};
    static const char *const threads[] = {"2", "2", "1", "3", "2"};
    for (int i = 0; i < 5; i++) {
        setenv("OMP_NUM_THREADS", threads[i], 1);
        assert_runs(UNIT, "--batch", "2", "--sample-tokens", "0", "--eval-every", "2", "--log-moe-every", "2",
                    "--steps", "4", "--save-every", "2", "--seed", i == 4 ? "7" : "5", "--out", at(folders[i]));
    }
    setenv("OMP_NUM_THREADS", "1", 1);
    for (int i = 1; i < 4; i++) {
        char step[64];
        snprintf(step, sizeof step, "%s/step-00000004", folders[i]);
        if (!same_tree("first/step-00000004", step)) fail_msg("%s has another checkpoint than first", folders[i]);
        if (!same_log("first", folders[i])) fail_msg("%s has another log than first", folders[i]);
    }
    assert_false(same_tree("first/step-00000004", "other-seed/step-00000004"));
    assert_false(same_log("first", "other-seed"));
}

static void gradient_accumulation_reads_the_same_sequences(void **state) {
    (void)state;
    static const char *const folders[] = {"1x4", "2x2", "4x1"}, *const batches[] = {"4", "2", "1"};
    double losses[3];
    for (int i = 0; i < 3; i++) {
        assert_runs(UNIT, "--sample-tokens", "0", "--eval-every", "0", "--batch", batches[i], "--tokens-per-step",
                    "128", "--steps", "3", "--out", at(folders[i]));
        cJSON *steps = read_log(folders[i], "loss"), *last = cJSON_GetArrayItem(steps, 2);
        losses[i] = number(last, "loss");
        assert_true(number(last, "tokens") == 3 * 128);
        cJSON_Delete(steps);
        // Float sums in another order, three steps long; a wrong or doubled sequence is off by 1e-2.
        assert_true(fabs(losses[i] - losses[0]) < 1e-5);
    }
}

// ---- resume ----

// Twenty steps are ten and a resume of ten (torchtitan issues 809 and 1136: state was lost and the loss jumped).
static void resumed_run_equals_the_straight_one(void **state) {
    (void)state;
    static const char *const schedules[] = {"cosine", "linear", "wsd", "constant"};
    for (int i = 0; i < 4; i++) {
        assert_runs(QUIET, "--schedule", schedules[i], "--steps", "20", "--save-every", "10", "--overwrite", "--out",
                    at("straight"));
        assert_runs(QUIET, "--schedule", schedules[i], "--steps", "20", "--save-every", "10", "--overwrite", "--out",
                    at("resumed"));
        remove_tree(at("resumed/step-00000020")); // as if the run had ended between the two
        assert_runs(QUIET, "--schedule", schedules[i], "--steps", "20", "--save-every", "10", "--resume", "--out",
                    at("resumed"));
        assert_contains(out, "going on from");
        assert_contains(out, "step 11/20");
        assert_lacks(out, "step 10/20");
        assert_true(same_tree("straight/step-00000020", "resumed/step-00000020"));
        assert_true(same_log("straight", "resumed"));
        assert_steps_logged("resumed", 1, 20);
    }
}

static void longer_run_goes_on_from_a_finished_one(void **state) {
    (void)state;
    assert_runs(QUIET, "--schedule", "constant", "--steps", "6", "--out", at("straight"));
    assert_runs(QUIET, "--schedule", "constant", "--steps", "3", "--out", at("resumed"));
    assert_runs(QUIET, "--schedule", "constant", "--steps", "6", "--resume", "--out", at("resumed"));
    assert_contains(out, "--steps: 3 before, 6 now");
    assert_true(same_tree("straight/step-00000006", "resumed/step-00000006"));
    assert_steps_logged("resumed", 1, 6);
    cJSON *config = read_json("resumed/config.json");
    assert_true(number(config, "steps") == 6);
    cJSON_Delete(config);
}

static void finished_run_has_nothing_to_resume(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    assert_runs(QUIET, "--steps", "3", "--resume", "--out", at("run"));
    assert_contains(out, "nothing to do");
    assert_lacks(out, "step 3/3");
    assert_steps_logged("run", 1, 3);
    assert_runs(QUIET, "--steps", "2", "--resume", "--out", at("run")); // behind the checkpoint already
    assert_contains(out, "nothing to do");
    assert_true(exists("run/step-00000003"));
    assert_steps_logged("run", 1, 3);
}

static void resume_in_an_empty_folder_starts_at_the_beginning(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--resume", "--out", at("deep/in/run"));
    assert_contains(out, "no checkpoint in ");
    assert_contains(out, "starting at the beginning");
    assert_steps_logged("deep/in/run", 1, 2);
}

static void resume_goes_back_to_a_complete_checkpoint(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--out", at("straight"));
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--out", at("run"));
    shorten("run/step-00000006/state-00002-of-00005.safetensors", 1);
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--resume", "--out", at("run"));
    assert_contains(err, "skipped step-00000006: ");
    assert_contains(err, "state-00002-of-00005.safetensors");
    assert_contains(out, "step 4/6");
    assert_true(same_tree("straight/step-00000006", "run/step-00000006"));
    assert_steps_logged("run", 1, 6);

    shorten("run/step-00000006/trainer.json", 20);
    shorten("run/step-00000003/trainer.json", 20);
    assert_refused(QUIET, "--steps", "6", "--save-every", "3", "--resume", "--out", at("run"));
    assert_contains(err, "--resume: found no complete checkpoint in");
    assert_steps_logged("run", 1, 6);
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--overwrite", "--out", at("run"));
    assert_true(same_tree("straight/step-00000006", "run/step-00000006"));
}

static void torn_log_is_mended_on_resume(void **state) {
    (void)state;
    static const int cut[] = {1, 30}; // only the end of the line, or half of it
    for (int i = 0; i < 2; i++) {
        assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--overwrite", "--out", at("run"));
        remove_tree(at("run/step-00000006"));
        shorten("run/log.jsonl", cut[i]);
        assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--resume", "--out", at("run"));
        assert_steps_logged("run", 1, 6);
    }
    // The last line is that of the checkpoint's own step: it is kept, and the next does not run into it.
    shorten("run/log.jsonl", 1);
    assert_runs(QUIET, "--steps", "8", "--save-every", "0", "--schedule", "cosine", "--resume", "--out", at("run"));
    assert_steps_logged("run", 1, 8);
}

static void overwrite_starts_anew_and_leaves_foreign_files(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "4", "--save-every", "2", "--out", at("run"));
    write_file("run/notes.txt", "mine", 4);
    assert_int_equal(mkdir(at("run/step-final"), 0777), 0);
    assert_runs(QUIET, "--steps", "3", "--save-every", "3", "--overwrite", "--out", at("run"));
    assert_contains(out, "step 1/3");
    assert_true(exists("run/step-00000003") && !exists("run/step-00000002") && !exists("run/step-00000004"));
    assert_true(exists("run/notes.txt") && exists("run/step-final"));
    assert_steps_logged("run", 1, 3);
}

static void keep_limits_the_checkpoints(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "5", "--save-every", "1", "--keep", "2", "--out", at("run"));
    assert_true(exists("run/step-00000004") && exists("run/step-00000005") && !exists("run/step-00000003"));
    assert_runs(QUIET, "--steps", "4", "--save-every", "1", "--keep", "0", "--overwrite", "--out", at("run"));
    assert_true(exists("run/step-00000001") && exists("run/step-00000004"));
}

// ---- signals ----

static void wait_for_log_lines(const char *folder, int lines) {
    char name[128];
    snprintf(name, sizeof name, "%s/log.jsonl", folder);
    for (int i = 0; i < 3000; i++) { // 30 s, for a machine with much else to do
        if (exists(name)) {
            char *text = read_text(name);
            int found = count_of(text, "\n");
            free(text);
            if (found >= lines) return;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    fail_msg("%s: found fewer than %d log lines after 30 s", folder, lines);
}

static int last_step(const char *folder) {
    cJSON *steps = read_log(folder, "loss");
    int last = (int)number(cJSON_GetArrayItem(steps, cJSON_GetArraySize(steps) - 1), "step");
    cJSON_Delete(steps);
    return last;
}

static void stop_signals_save_and_leave(void **state) {
    (void)state;
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1};
    static const char *const folders[] = {"terminated", "interrupted", "hung-up", "out-of-time"};
    for (int i = 0; i < 4; i++) {
        pid_t pid = start(QUIET, "--schedule", "constant", "--steps", "1000000", "--save-every", "500000",
                          "--overwrite", "--out", at(folders[i]));
        wait_for_log_lines(folders[i], 3);
        kill(pid, signals[i]);
        assert_code(finish_program(pid), 0);
        int last = last_step(folders[i]);
        char part[64], steps[16];
        snprintf(part, sizeof part, "stopped by signal %d after step %d", signals[i], last);
        assert_contains(out, part);
        snprintf(part, sizeof part, "%s/step-%08d", folders[i], last);
        assert_true(exists(part));

        snprintf(steps, sizeof steps, "%d", last + 2);
        assert_runs(QUIET, "--schedule", "constant", "--steps", steps, "--resume", "--out", at(folders[i]));
        assert_steps_logged(folders[i], 1, last + 2);
    }
}

// As in `./train ... | head`.
static void closed_pipe_saves_and_leaves(void **state) {
    (void)state;
    char pipe[64], line[4096];
    snprintf(pipe, sizeof pipe, "%s", at("pipe"));
    assert_int_equal(mkfifo(pipe, 0600), 0);
    output_path = pipe;
    pid_t pid =
        start(QUIET, "--schedule", "constant", "--steps", "1000000", "--save-every", "500000", "--out", at("run"));
    FILE *reader = fopen(pipe, "r");
    assert_non_null(reader);
    for (int steps = 0; steps < 3;) {
        assert_non_null(fgets(line, sizeof line, reader));
        steps += strncmp(line, "step ", 5) == 0;
    }
    fclose(reader);
    assert_code(finish_program(pid), 1);
    assert_error("standard output: cannot be written");
    char part[64];
    snprintf(part, sizeof part, "run/step-%08d", last_step("run"));
    assert_true(exists(part));
}

static void killed_run_is_resumed(void **state) {
    (void)state;
    pid_t pid = start(QUIET, "--schedule", "constant", "--steps", "1000000", "--save-every", "1", "--out", at("run"));
    wait_for_log_lines("run", 5);
    kill(pid, SIGKILL);
    assert_int_equal(finish_program(pid), -SIGKILL);
    char steps[16];
    int last = last_step("run");
    snprintf(steps, sizeof steps, "%d", last + 2);
    assert_runs(QUIET, "--schedule", "constant", "--steps", steps, "--save-every", "1", "--resume", "--out", at("run"));
    assert_steps_logged("run", 1, last + 2);
    assert_runs(QUIET, "--schedule", "constant", "--steps", steps, "--out", at("straight"));
    char straight[64], resumed[64];
    snprintf(straight, sizeof straight, "straight/step-%08d/model.safetensors.index.json", last + 2);
    assert_true(exists(straight));
    snprintf(straight, sizeof straight, "straight/step-%08d/state-00005-of-00005.safetensors", last + 2);
    snprintf(resumed, sizeof resumed, "run/step-%08d/state-00005-of-00005.safetensors", last + 2);
    assert_true(same_tree(straight, resumed)); // moments and weights of the module that comes last
}

// ---- text files ----

static void short_text_wraps_into_epochs(void **state) {
    (void)state;
    char text[300];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)('a' + (i * i) % 26);
    write_file("text", text, sizeof text);
    assert_runs(QUIET, "--data", at("text"), "--steps", "50", "--save-every", "0", "--out", at("run"));
    assert_contains(out, "301 byte tokens");
    const char *part = strstr(out, "windows of 32: ");
    int windows = part ? atoi(part + strlen("windows of 32: ")) : 0;
    assert_true(windows >= 6 && windows <= 9); // 9 fit in the file, some are held out
    cJSON *steps = read_log("run", "loss"), *line;
    cJSON_ArrayForEach(line, steps) {
        int last_sequence = 2 * (int)number(line, "step") - 1;
        assert_true(number(line, "epoch") == last_sequence / windows); // whole numbers: rounded down
    }
    assert_int_equal(cJSON_GetArraySize(steps), 50);
    cJSON_Delete(steps);
}

// Words of a small vocabulary, drawn in a fixed order.
static char *make_text(size_t bytes) {
    static const char *const words[] = {"the ", "fox ", "sees ", "a ", "red ", "hen ", "and ", "runs.\n"};
    char *text = calloc(1, bytes + 16);
    uint64_t rng = 1;
    for (size_t length = 0; length < bytes; length = strlen(text + length) + length)
        strcpy(text + length, words[(int)(8 * test_uniform(&rng))]);
    return text;
}

static void longer_text_is_learned(void **state) {
    (void)state;
    char *text = make_text(400000);
    write_file("text", text, 400000);
    assert_runs(UNIT, "--batch", "8", "--lr", "0.01", "--sample-tokens", "0", "--steps", "60", "--data", at("text"),
                "--out", at("run"));
    free(text);
    assert_contains(out, "400001 byte tokens");
    cJSON *evals = read_log("run", "eval_loss"), *last = cJSON_GetArrayItem(evals, cJSON_GetArraySize(evals) - 1);
    // It begins at ln 257 = 5.5; bytes drawn evenly from the 17 that occur would give 2.8.
    assert_true(number(last, "eval_loss") < 2.8);
    cJSON_Delete(evals);
}

static void evaluation_data_may_be_another_file(void **state) {
    (void)state;
    char *text = make_text(2000);
    write_file("train", text, 2000);
    write_file("held-out", text + 1000, 500);
    free(text);
    assert_runs(UNIT, "--batch", "2", "--sample-tokens", "0", "--steps", "2", "--data", at("train"), "--eval-data",
                at("held-out"), "--out", at("run"));
    assert_contains(out, "2001 byte tokens");
    assert_contains(out, "501 byte tokens");
    assert_contains(out, "eval at step 2");
}

// ---- sampling ----

static void sampling_prints_the_prompt_and_more(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    static const char *const prompts[] = {
        "Once upon a time", "\xc3\x9c\xc3\xb6 \xe2\x82\xac \xf0\x9f\xa6\x8a", // two, three and four bytes of UTF-8
        "A prompt of more than thirty-two bytes, which is all that fits into one sequence of this model at once.",
        "\xff\xfe is no UTF-8"};
    for (int i = 0; i < 4; i++) {
        const char *prompt = prompts[i];
        assert_runs("--generate", "20", "--seq", "32", "--from", at("run/step-00000003"), "--prompt", prompt);
        assert_memory_equal(out, prompt, strlen(prompt));
        assert_true(out_bytes > strlen(prompt) && out_bytes <= strlen(prompt) + 21); // 20 bytes and a line's end
        assert_int_equal(out[out_bytes - 1], '\n');
        assert_string_equal(err, "");
    }
    assert_runs("--generate", "20", "--from", at("run/step-00000003"));
    assert_true(out_bytes >= 1 && out_bytes <= 21);
}

// The likeliest tokens of the logits are what is sampled at temperature 0.
static void logits_of_a_prompt_are_written(void **state) {
    (void)state;
    static const char prompt[] = "Once upon";
    enum { V = 257, T = sizeof prompt };
    struct safetensors file;
    char error[FILE_ERROR];
    float logits[T * V];
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    assert_runs("--generate", "1", "--from", at("run"), "--prompt", prompt, "--temperature", "0", "--logits",
                at("logits"));
    if (!safetensors_open(&file, at("logits"), error, sizeof error)) fail_msg("%s", error);
    const struct safetensors_tensor *tokens = safetensors_find(&file, "tokens"), *t = safetensors_find(&file, "logits");
    assert_true(tokens && tokens->type == SAFETENSORS_I64 && tokens->rank == 1 && tokens->shape[0] == T);
    assert_true(t && t->type == SAFETENSORS_F32 && t->rank == 2 && t->shape[0] == T && t->shape[1] == V);
    int64_t ids[T];
    assert_int_equal(fseeko(file.file, (off_t)(file.data_start + tokens->begin), SEEK_SET), 0);
    assert_int_equal(fread(ids, sizeof *ids, T, file.file), T);
    assert_int_equal(ids[0], 256); // the end of the text before
    for (int i = 1; i < T; i++) assert_int_equal(ids[i], prompt[i - 1]);
    assert_true(safetensors_read_f32(&file, t, 0, T * V, logits, error, sizeof error));
    const float *last = logits + (T - 1) * V;
    int best = 0;
    for (int v = 1; v < V; v++)
        if (last[v] > last[best]) best = v;
    if (best < 256) assert_int_equal((unsigned char)out[strlen(prompt)], best);
    safetensors_close(&file);

    assert_refused("--generate", "1", "--from", at("run"), "--prompt", prompt, "--seq", "4", "--logits", at("logits"));
    assert_error("--logits: found a prompt of 10 tokens, wanted at most 4");
    assert_refused("--generate", "1", "--from", at("run"), "--logits", at("absent/logits"));
    assert_error("--logits: ");
}

// Sizes that a model has no use for may be 0, in the flags and on the way back from a file.
static void samples_from_models_without_dense_layers_or_experts(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "2", "--mtp-depth", "0", "--dense-layers", "0", "--intermediate", "0", "--out",
                at("experts"));
    assert_runs(QUIET, "--steps", "2", "--mtp-depth", "0", "--dense-layers", "3", "--experts", "0", "--top-k", "0",
                "--groups", "0", "--top-groups", "0", "--expert-intermediate", "0", "--shared-experts", "0", "--out",
                at("dense"));
    assert_runs("--generate", "5", "--from", at("experts"));
    assert_runs("--generate", "5", "--from", at("dense"));
}

static void sampling_depends_on_seed_and_weights_only(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "3", "--out", at("run"));
    // By seed and temperature; at 0 the seed does not matter.
    static const char *const settings[][2] = {{"1", "0.8"}, {"1", "0.8"}, {"2", "0.8"}, {"1", "0"}, {"2", "0"}};
    char *texts[5];
    for (int i = 0; i < 5; i++) {
        setenv("OMP_NUM_THREADS", i == 1 ? "1" : "2", 1);
        assert_runs("--generate", "40", "--from", at("run"), "--prompt", "The fox", "--seed", settings[i][0],
                    "--temperature", settings[i][1]);
        assert_true(out_bytes > 0);
        texts[i] = strdup(out);
    }
    setenv("OMP_NUM_THREADS", "1", 1);
    assert_string_equal(texts[0], texts[1]);
    assert_string_not_equal(texts[0], texts[2]);
    assert_string_not_equal(texts[0], texts[3]);
    assert_string_equal(texts[3], texts[4]);
    for (int i = 0; i < 5; i++) free(texts[i]);
}

static void run_folder_stands_for_its_newest_checkpoint(void **state) {
    (void)state;
    assert_runs(QUIET, "--steps", "6", "--save-every", "3", "--lr", "0.1", "--out", at("run"));
    assert_runs("--generate", "40", "--from", at("run/step-00000003"));
    char *older = strdup(out);
    assert_runs("--generate", "40", "--from", at("run/step-00000006"));
    char *newest = strdup(out);
    assert_string_not_equal(older, newest);
    assert_runs("--generate", "40", "--from", at("run"));
    assert_string_equal(out, newest);
    shorten("run/step-00000006/trainer.json", 10);
    assert_runs("--generate", "40", "--from", at("run"));
    assert_string_equal(out, older);
    assert_contains(err, "skipped step-00000006: ");
    free(older);
    free(newest);
}

// ---- flags that print and stop ----

static void plans_every_preset_without_its_memory(void **state) {
    (void)state;
    assert_runs("--help");
    char *help = strdup(out), *line = strstr(help, "\nPresets"), *rest;
    assert_non_null(line);
    // The largest needs 13 TB; a plan must do with 8 GiB of addresses, most of which MPI's libraries and the stacks of many
    // threads take. (The address sanitizer alone wants 20 TB.)
    struct rlimit before, small;
    getrlimit(RLIMIT_AS, &before);
    small = before;
#ifndef __SANITIZE_ADDRESS__
    small.rlim_cur = (rlim_t)8 << 30;
#endif
    setrlimit(RLIMIT_AS, &small);
    int presets = 0, heading = 2;
    for (line = strtok_r(line, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (heading-- > 0) continue;
        char name[64], all[16];
        assert_int_equal(sscanf(line, " %63s %15s", name, all), 2);
        assert_runs("--preset", name, "--plan", "--out", at("run"));
        assert_contains(out, all); // the help and the plan count alike
        assert_contains(out, "\nMemory\n");
        assert_contains(out, "this machine has");
        if (strcmp(name, "dsv3") == 0) assert_contains(out, "671.03B"); // as published, without the MTP module
        assert_false(exists("run"));
        presets++;
    }
    setrlimit(RLIMIT_AS, &before);
    assert_int_equal(presets, 12);
    free(help);
}

static void help_lists_every_flag(void **state) {
    (void)state;
    assert_runs("--help");
    assert_string_equal(err, "");
    char *help = strdup(out);
    static const char *const flags[] = {
        "preset",        "device",       "data", "eval-data",  "out",        "resume",       "overwrite",
        "steps",         "batch",        "seq",  "seed",       "lr",         "schedule",     "warmup",
        "clip",          "weight-decay", "keep", "prompt",     "save-every", "sample-every", "generate",
        "log-moe-every", "from",         "help", "eval-every", "plan",       "temperature",  "tokens-per-step"};
    char part[64];
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        snprintf(part, sizeof part, "\n  --%s", flags[i]);
        assert_contains(help, part);
    }
    assert_runs(QUIET, "--steps", "2", "--out", at("run")); // and whatever else a run can be told
    cJSON *config = read_json("run/config.json"), *member;
    cJSON_ArrayForEach(member, config) {
        snprintf(part, sizeof part, "\n  --%s", member->string);
        assert_contains(help, part);
    }
    cJSON_Delete(config);
    free(help);
}

static void device_is_printed(void **state) {
    (void)state;
    assert_runs("--device");
    assert_int_equal(count_of(out, "\n"), 1);
    assert_contains(out, "CPU");
    assert_string_equal(err, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(run_writes_its_resolved_flags),
        TEST(vocabulary_follows_the_data),
        TEST(run_leaves_a_hugging_face_folder),
        TEST(run_prints_flags_table_and_data),
        TEST(json_lines_hold_the_numbers_of_the_step_lines),
        TEST(step_lines_are_aligned),
        TEST(samples_stand_before_between_and_after),
        TEST(samples_hold_no_controls_of_latin_1),
        TEST(evaluations_are_logged),
        TEST(moe_layers_are_logged),
        TEST(intervals_of_zero_mean_never),
        TEST(evaluates_with_any_batch),
        TEST(same_flags_leave_the_same_bytes),
        TEST(gradient_accumulation_reads_the_same_sequences),
        TEST(resumed_run_equals_the_straight_one),
        TEST(longer_run_goes_on_from_a_finished_one),
        TEST(finished_run_has_nothing_to_resume),
        TEST(resume_in_an_empty_folder_starts_at_the_beginning),
        TEST(resume_goes_back_to_a_complete_checkpoint),
        TEST(torn_log_is_mended_on_resume),
        TEST(overwrite_starts_anew_and_leaves_foreign_files),
        TEST(keep_limits_the_checkpoints),
        TEST(stop_signals_save_and_leave),
        TEST(closed_pipe_saves_and_leaves),
        TEST(killed_run_is_resumed),
        TEST(short_text_wraps_into_epochs),
        TEST(longer_text_is_learned),
        TEST(evaluation_data_may_be_another_file),
        TEST(sampling_prints_the_prompt_and_more),
        TEST(logits_of_a_prompt_are_written),
        TEST(samples_from_models_without_dense_layers_or_experts),
        TEST(sampling_depends_on_seed_and_weights_only),
        TEST(run_folder_stands_for_its_newest_checkpoint),
        TEST(plans_every_preset_without_its_memory),
        TEST(help_lists_every_flag),
        TEST(device_is_printed),
    };
    return run_program_tests(tests);
}
