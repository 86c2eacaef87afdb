// The program on shards, with tokenizers and questions: what it accepts, what it learns, and what it notices when a run
// goes on.
#include "tests/program.h"

#include "tests/shards.h"

#define SHORT   QUIET, "--schedule", "constant", "--vocab", "0"
#define BPE     "tests/reference/tokenizer_gpt2.json"
#define BPE_IDS 1500

static const char *make_tokens(const char *prefix, const char *tokenizer, const char *text) {
    char command[2048];
    const char *tokenize = getenv("MOK_TOKENIZE");
    snprintf(command, sizeof command, "%s --tokenizer %s --out %s --shard-tokens 2000 %s >%s",
             tokenize ? tokenize : "build/cpu/tokenize", tokenizer, at(prefix), text, at("said"));
    assert_int_equal(system(command), 0);
    return at(prefix);
}

// ---- shards ----

// (llm.c's own files have no vocabulary: it is that of GPT-2)
static void shards_of_llmc_are_trained_on(void **state) {
    (void)state;
    write_shard("a_000001.bin", 2, 0, 700, 0, 7);
    write_shard("a_000002.bin", 2, 0, 400, 50256, 0);
    assert_runs(SHORT, "--hidden", "16", "--steps", "2", "--data", at("a_*.bin"), "--out", at("run"));
    assert_contains(out, "2 shards, 1100 tokens of 16 bits");
    cJSON *config = read_json("run/config.json");
    assert_true(number(config, "vocab") == 50257);
    cJSON_Delete(config);
    // Nothing says what the ids stand for, so a sample is ids, and nothing is made up for transformers.
    assert_false(exists("run/step-00000002/tokenizer.json"));
    assert_runs("--preset", "unit", "--vocab", "0", "--seq", "32", "--warmup", "1", "--batch", "2", "--eval-every", "0",
                "--hidden", "16", "--sample-tokens", "3", "--steps", "1", "--data", at("a_000001.bin"), "--out",
                at("ids"));
    const char *sample = strstr(out, "--- sample after training ---\n");
    int ids[3];
    assert_non_null(sample);
    assert_int_equal(sscanf(strchr(sample, '\n'), "%d %d %d", &ids[0], &ids[1], &ids[2]), 3);
    assert_refused("--generate", "3", "--from", at("ids"));
    assert_contains(err, "found no tokenizer.json");
    assert_runs("--generate", "3", "--from", at("ids"), "--tokenizer", "bytes", "--prompt", "x");
}

// (an id at the vocabulary's end, in the last token: a crash in the middle of a step, torchtitan pull 1495)
static void id_beyond_the_vocabulary_is_named_with_file_and_position(void **state) {
    (void)state;
    write_shard("good.bin", 2, 0, 200, 0, 1);
    write_shard("bad.bin", 2, 0, 66, 235, 1); // 235 to 300
    assert_refused(QUIET, "--vocab", "300", "--steps", "9", "--data", at("bad.bin"), "--eval-data", at("good.bin"),
                   "--out", at("run"));
    assert_error(at("bad.bin"));
    assert_contains(err, "300");
    assert_contains(err, "65");
    assert_runs(QUIET, "--vocab", "301", "--steps", "2", "--data", at("bad.bin"), "--eval-data", at("good.bin"),
                "--out", at("run"), "--overwrite");
}

// (vmlx-swift pull 217, llama.cpp issue 662, by the whole program)
static void files_that_are_no_data_are_refused(void **state) {
    (void)state;
    write_shard("whole.bin", 2, 0, 200, 0, 1);
    static const off_t cuts[] = {1, 200, 400};
    for (int i = 0; i < 3; i++) {
        write_shard("cut.bin", 2, 0, 200, 0, 1);
        shorten("cut.bin", cuts[i]);
        assert_refused(SHORT, "--data", at("cut.bin"), "--out", at("run"));
        assert_error(at("cut.bin"));
        assert_contains(err, "1424"); // 1024 + 2 x 200
    }
    unsigned char model[2048] = {0};
    store(model, 20240326, 4);
    write_file("model.bin", model, sizeof model);
    assert_refused(SHORT, "--data", at("*.bin"), "--out", at("run")); // in the order of their names, cut.bin is first
    assert_error(at("cut.bin"));
    assert_refused(SHORT, "--data", at("m*.bin"), "--out", at("run"));
    assert_contains(err, "llm.c");
    assert_refused(SHORT, "--data", at("none-*.bin"), "--out", at("run"));
    assert_contains(err, "none-*.bin");
    write_file("page.bin", "<!DOCTYPE html><html><body>No such file</body></html>\n", 54);
    assert_refused(SHORT, "--data", at("page.bin"), "--out", at("run"));
    assert_error(at("page.bin"));
    assert_contains(err, "found an HTML or XML page");
    assert_contains(err, "FILE.txt");
    assert_false(exists("run"));
}

// (the loader spins at the end of the data: nanochat issues 358, 360 and 371)
static void one_short_shard_wraps_with_an_epoch_counter(void **state) {
    (void)state;
    write_shard("short.bin", 2, 300, 2 * 32 + 2, 0, 1); // --batch 2 of 32, a target and the MTP module's
    write_shard("eval.bin", 2, 300, 100, 0, 1);
    assert_runs(SHORT, "--steps", "50", "--data", at("short.bin"), "--eval-data", at("eval.bin"), "--out", at("run"));
    cJSON *steps = read_log("run", "epoch"), *line;
    int epoch = 0;
    cJSON_ArrayForEach(line, steps) assert_true(number(line, "epoch") == epoch++);
    assert_int_equal(epoch, 50);
    cJSON_Delete(steps);
    assert_contains(out, "| epoch   0 |");
    assert_contains(out, "| epoch  49 |");
}

// ---- a run that goes on finds its data again ----

static void changed_data_is_noticed_whatever_its_name(void **state) {
    (void)state;
    write_shard("data_1.bin", 2, 300, 900, 0, 0);
    write_shard("data_2.bin", 2, 300, 700, 1, 0);
    assert_runs(SHORT, "--steps", "2", "--save-every", "2", "--data", at("data_*.bin"), "--out", at("run"));

    write_shard("data_3.bin", 2, 300, 100, 2, 0); // a file more
    assert_refused("--resume", "--steps", "3", "--out", at("run"));
    assert_error("--data: 2 files before, 3 now");
    assert_contains(err, "--override");
    assert_int_equal(remove(at("data_3.bin")), 0);

    assert_int_equal(rename(at("data_1.bin"), at("data_3.bin")), 0); // another order
    assert_refused("--resume", "--steps", "3", "--out", at("run"));
    assert_error("--data: ");
    assert_int_equal(rename(at("data_3.bin"), at("data_1.bin")), 0);

    change_byte("data_1.bin", 1400); // the same size
    assert_refused("--resume", "--steps", "3", "--out", at("run"));
    assert_error("--data: ");
    assert_contains(err, "data_1.bin");
    change_byte("data_1.bin", 1400);

    assert_refused("--resume", "--steps", "3", "--seq", "16", "--out", at("run")); // another length
    assert_error("--seq: ");
    assert_refused("--resume", "--steps", "3", "--eval-data", at("data_2.bin"), "--out", at("run")); // nothing held out
    assert_contains(err, "mok: warning: /tmp/");                                                     // it is trained on
    assert_contains(err, "mok: error: --data: ");

    assert_runs("--resume", "--steps", "3", "--out", at("run")); // all as it was
    write_shard("data_3.bin", 2, 300, 100, 2, 0);
    assert_runs("--resume", "--override", "--steps", "4", "--out", at("run"));
    assert_contains(out, "other training data than before: 2 files before, 3 now");
    assert_runs("--resume", "--steps", "5", "--out", at("run")); // which is the run's data from then on
    assert_steps_logged("run", 1, 5);
}

static void moved_data_is_the_same_data(void **state) {
    (void)state;
    write_shard("here.bin", 2, 300, 900, 0, 0);
    assert_runs(SHORT, "--steps", "4", "--data", at("here.bin"), "--out", at("straight"));
    assert_runs(SHORT, "--steps", "2", "--data", at("here.bin"), "--out", at("run"));
    assert_int_equal(rename(at("here.bin"), at("there.bin")), 0);
    assert_refused("--resume", "--steps", "4", "--out", at("run"));
    assert_error(at("here.bin"));
    assert_runs("--resume", "--steps", "4", "--data", at("there.bin"), "--out", at("run"));
    assert_true(same_tree("straight/step-00000004/state-00001-of-00005.safetensors",
                          "run/step-00000004/state-00001-of-00005.safetensors"));
}

// ---- tokenizers ----

static void run_on_bpe_shards_speaks_text(void **state) {
    (void)state;
    make_tokens("prose", BPE, "README.md");
    assert_runs(UNIT, "--vocab", "0", "--batch", "2", "--steps", "3", "--sample-tokens", "20", "--data",
                at("prose_train_*.bin"), "--out", at("run"));
    assert_contains(out, "vocabulary 1500");
    assert_contains(out, "bits per byte");
    // The tokenizer is in the checkpoint, byte for byte; config.json has its end of text.
    char command[512];
    snprintf(command, sizeof command, "cmp %s %s", BPE, at("run/step-00000003/tokenizer.json"));
    assert_int_equal(system(command), 0);
    cJSON *config = read_json("run/step-00000003/config.json");
    assert_true(number(config, "eos_token_id") == 0 && number(config, "vocab_size") == BPE_IDS);
    cJSON_Delete(config);
    assert_runs("--generate", "5", "--from", at("run"), "--prompt", "A trainer for small models");
    assert_int_equal(strncmp(out, "A trainer for small models", 26), 0);
    // The run needs the shards' tokenizer no more.
    assert_int_equal(remove(at("tokenizer.json")), 0);
    assert_runs("--resume", "--steps", "4", "--out", at("run"));
    assert_true(exists("run/step-00000004/tokenizer.json"));
}

static void text_with_a_tokenizer_is_what_its_shards_are(void **state) {
    (void)state;
    assert_runs(SHORT, "--steps", "3", "--data", "README.md", "--tokenizer", BPE, "--out", at("text"));
    assert_contains(out, "bytes of text");
    cJSON *text = read_log("text", "loss");
    assert_int_equal(cJSON_GetArraySize(text), 3);
    double loss = number(cJSON_GetArrayItem(text, 0), "loss");
    assert_true(fabs(loss - log(BPE_IDS)) < 0.2); // nothing is known yet
    cJSON_Delete(text);
    assert_runs("--evaluate", "--from", at("text"), "--data", "README.md", "--eval-sequences", "4", "--batch", "3");
    assert_contains(out, "bits per byte over ");
    // Another tokenizer makes another text of it.
    assert_refused("--resume", "--steps", "4", "--tokenizer", "bytes", "--out", at("text"));
    assert_error("--data: ");
}

// A run that goes on has its tokenizer in the checkpoint: the file it was read from may be gone, or hold another by now.
static void run_that_goes_on_has_its_own_tokenizer(void **state) {
    (void)state;
    char command[512];
    snprintf(command, sizeof command, "cp %s %s", BPE, at("mine.json"));
    assert_int_equal(system(command), 0);
    assert_runs(SHORT, "--steps", "4", "--data", "README.md", "--tokenizer", at("mine.json"), "--out", at("straight"));
    assert_runs(SHORT, "--steps", "2", "--data", "README.md", "--tokenizer", at("mine.json"), "--out", at("run"));
    assert_int_equal(remove(at("mine.json")), 0);
    assert_runs("--resume", "--steps", "4", "--save-every", "500", "--out", at("run"));
    static const char *const files[] = {"tokenizer.json", "tokenizer_config.json", "state-00001-of-00005.safetensors"};
    for (int i = 0; i < 3; i++) {
        char straight[128], resumed[128];
        snprintf(straight, sizeof straight, "straight/step-00000004/%s", files[i]);
        snprintf(resumed, sizeof resumed, "run/step-00000004/%s", files[i]);
        assert_true(same_tree(straight, resumed));
    }
    assert_refused("--resume", "--steps", "5", "--tokenizer", at("gone.json"), "--out", at("run")); // asked for now
    assert_error("--tokenizer: ");
}

static void tokenizer_that_is_none_is_refused(void **state) {
    (void)state;
    write_file("tokenizer.json", "{\"model\": {\"type\": \"Unigram\"}}", 30);
    assert_refused(SHORT, "--data", "README.md", "--tokenizer", at("tokenizer.json"), "--out", at("run"));
    assert_error("--tokenizer: ");
    assert_contains(err, "Unigram");
    assert_false(exists("run"));
    // Ids can be trained on without it; the line says so.
    write_shard("ids.bin", 2, 300, 300, 0, 0);
    assert_runs(SHORT, "--steps", "2", "--data", at("ids.bin"), "--out", at("run"));
    assert_contains(err, "mok: warning: tokenizer: ");
}

// The shards of llm.c do not say whose ids they hold. The run does, once it was told.
static void shards_that_say_nothing_keep_the_tokenizer_they_were_given(void **state) {
    (void)state;
    write_shard("ids.bin", 2, 0, 900, 0, 0);
    assert_runs(SHORT, "--steps", "2", "--data", at("ids.bin"), "--tokenizer", BPE, "--out", at("run"));
    assert_refused("--resume", "--steps", "3", "--tokenizer", "bytes", "--out", at("run"));
    assert_error("--data: another tokenizer than before");
    assert_contains(err, "--override");
    assert_runs("--resume", "--steps", "3", "--out", at("run"));
    assert_runs("--resume", "--steps", "4", "--tokenizer", BPE, "--out", at("run"));
    assert_runs("--resume", "--steps", "5", "--tokenizer", "bytes", "--override", "--out", at("run"));
    assert_contains(out, "other training data than before: another tokenizer than before");
    assert_runs(SHORT, "--steps", "2", "--data", at("ids.bin"), "--out", at("new"));
    assert_runs("--resume", "--steps", "3", "--tokenizer", BPE, "--out", at("new"));
    assert_refused("--resume", "--steps", "4", "--tokenizer", "bytes", "--out", at("new"));
}

// Bytes among the ids of some tokenizer train and evaluate without complaint, and mean nothing.
static void text_beside_ids_of_an_unknown_tokenizer_is_refused(void **state) {
    (void)state;
    write_shard("ids.bin", 2, 300, 300, 0, 0);
    assert_refused(SHORT, "--steps", "2", "--data", at("ids.bin"), "--eval-data", "README.md", "--out", at("run"));
    assert_error("--tokenizer: ");
    assert_contains(err, "README.md");
    assert_false(exists("run"));
    assert_runs(SHORT, "--steps", "2", "--data", at("ids.bin"), "--out", at("run"));
    assert_refused("--evaluate", "--from", at("run"), "--data", "README.md");
    assert_error("--tokenizer: ");
    assert_refused("--evaluate", "--from", at("run"), "--data", "stories");
    assert_error("--tokenizer: ");
    assert_contains(err, "stories");
    assert_refused("--from", at("run"), "--seq", "32", "--batch", "2", "--warmup", "1", "--out", at("next"));
    assert_error("--tokenizer: ");
    // Ids need no tokenizer, and whoever names one takes the blame.
    assert_runs("--evaluate", "--from", at("run"), "--eval-data", at("ids.bin"));
    assert_runs("--evaluate", "--from", at("run"), "--data", "README.md", "--tokenizer", "bytes");
    assert_refused("--evaluate", "--from", at("run"), "--data", at("missing"));
    assert_error(at("missing")); // what is not there is no text
    // One that cannot be read is not done without either.
    write_file("tokenizer.json", "{}", 2);
    assert_refused(SHORT, "--steps", "2", "--data", at("ids.bin"), "--eval-data", "README.md", "--out", at("other"));
    assert_error("tokenizer: ");
}

// The header knows the tokenizer, or how many ids it had: with more or fewer it was another one.
static void shards_of_another_tokenizer_are_noticed(void **state) {
    (void)state;
    make_tokens("prose", BPE, "README.md");
    write_shard("bytes.bin", 2, 257, 900, 0, 0);
    write_shard("unknown.bin", 2, 0, 900, 0, 0);
    assert_refused(SHORT, "--steps", "2", "--data", at("prose_train_*.bin"), "--tokenizer", "bytes", "--out",
                   at("run"));
    assert_error(at("prose_train_000001.bin"));
    assert_contains(err, "found ids of another tokenizer");
    write_shard("wide.bin", 2, 1500, 900, 0, 0);
    assert_refused(SHORT, "--steps", "2", "--data", at("wide.bin"), "--tokenizer", "bytes", "--out", at("run"));
    assert_error(at("wide.bin"));
    assert_contains(err, "found a vocabulary of 1500 in the header, wanted at most the 257 ids of the tokenizer");
    assert_runs(SHORT, "--steps", "2", "--data", at("prose_train_*.bin"), "--out", at("run"));
    assert_string_equal(err, "");
    assert_runs("--evaluate", "--from", at("run"), "--data", at("bytes.bin"), "--eval-sequences", "2");
    assert_contains(err, "mok: warning: ");
    assert_contains(err, "found a vocabulary of 257 in the header, wanted the 1500 ids of the tokenizer");
    assert_runs("--evaluate", "--from", at("run"), "--data", at("unknown.bin"), "--eval-sequences", "2");
    assert_string_equal(err, "");
}

// All ids of bytes are ids of the BPE tokenizer too: without a word they would train and mean nothing.
static void shards_are_read_with_the_tokenizer_that_made_them(void **state) {
    (void)state;
    assert_int_equal(mkdir(at("a"), 0777) | mkdir(at("b"), 0777), 0);
    make_tokens("a/prose", BPE, "README.md");
    make_tokens("b/prose", "bytes", "README.md");
    assert_runs(SHORT, "--steps", "2", "--data", at("b/prose_train_*.bin"), "--out", at("bytes"));
    assert_runs(SHORT, "--steps", "2", "--data", at("a/prose_train_*.bin"), "--out", at("run"));
    assert_runs("--evaluate", "--from", at("run"), "--data", at("a/prose_train_*.bin"), "--eval-sequences", "2");
    assert_runs("--resume", "--steps", "3", "--out", at("run"));
    // That of --from, of --tokenizer, and the one that has come to lie beside the shards.
    assert_refused("--evaluate", "--from", at("run"), "--data", at("b/prose_train_*.bin"));
    assert_error(at("b/prose_train_000001.bin"));
    assert_contains(err, "found ids of another tokenizer");
    assert_refused(SHORT, "--steps", "2", "--data", at("b/prose_train_*.bin"), "--tokenizer", BPE, "--out", at("no"));
    assert_error(at("b/prose_train_000001.bin"));
    make_tokens("b/other", BPE " --overwrite", "README.md");
    assert_refused(SHORT, "--steps", "2", "--data", at("b/prose_train_*.bin"), "--out", at("no"));
    assert_error(at("b/prose_train_000001.bin"));
    assert_refused(SHORT, "--steps", "2", "--data", at("a/prose_train_*.bin"), "--eval-data",
                   at("b/prose_train_000001.bin"), "--out", at("no"));
    assert_false(exists("no"));
}

// ---- questions ----

// (llm.c's evaluation divides by zero for a batch below 4, and stops where ranks outnumber examples: llm.c pull 667)
static void questions_are_answered_with_any_batch(void **state) {
    (void)state;
    static const char questions[] =
        "{\"ctx\": \"The fox\", \"endings\": [\"ran.\", \"xqz\", \"9 9 9\", \"!!\"], \"label\": 0}\n"
        "{\"ctx\": \"Once\", \"endings\": [\"upon a time\", \"Q\"], \"label\": 1}\n"
        "{\"ctx\": \"A\", \"endings\": [\"much longer ending than the model can see at once\", "
        "\"b\"], \"label\": 1}\n";
    write_file("q.jsonl", questions, sizeof questions - 1);
    char command[1024], answers[3][256];
    const char *tokenize = getenv("MOK_TOKENIZE"), *batches[] = {"1", "2", "3"};
    snprintf(command, sizeof command, "%s --choices %s --tokenizer bytes --out %s >/dev/null",
             tokenize ? tokenize : "build/cpu/tokenize", at("q.jsonl"), at("q.bin"));
    assert_int_equal(system(command), 0);
    assert_runs(UNIT, "--batch", "3", "--sample-tokens", "0", "--steps", "4", "--eval-every", "2", "--eval-choices",
                at("q.bin"), "--out", at("run"));
    assert_int_equal(count_of(out, "questions right"), 2);
    assert_contains(out, "1 too long for --seq, skipped");
    cJSON *lines = read_log("run", "choices_accuracy"), *first = cJSON_GetArrayItem(lines, 0);
    assert_int_equal(cJSON_GetArraySize(lines), 2);
    assert_true(number(first, "choices_examples") == 2 && number(first, "choices_skipped") == 1);
    cJSON_Delete(lines);
    for (int i = 0; i < 3; i++) {
        assert_runs("--evaluate", "--from", at("run"), "--batch", batches[i], "--eval-sequences", "3", "--eval-choices",
                    at("q.bin"));
        // The whole line: "1 of 2 questions right, 50.00 % | by sum 1 | 1 too long for --seq, skipped".
        const char *end = strstr(out, " questions right");
        assert_non_null(end);
        while (end[-1] != '|') end--;
        snprintf(answers[i], sizeof answers[i], "%.*s", (int)strcspn(end, "\n"), end);
        assert_string_equal(answers[i], answers[0]);
    }
    // Ids of bytes are ids of the BPE tokenizer too.
    assert_refused(SHORT, "--steps", "2", "--data", "README.md", "--tokenizer", BPE, "--eval-choices", at("q.bin"),
                   "--out", at("other"));
    assert_error("--eval-choices: ");
    assert_contains(err, "q.bin: found ids of another tokenizer");
    shorten("q.bin", 2);
    assert_refused("--evaluate", "--from", at("run"), "--eval-choices", at("q.bin"));
    assert_error("--eval-choices: ");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(shards_of_llmc_are_trained_on),
        TEST(id_beyond_the_vocabulary_is_named_with_file_and_position),
        TEST(files_that_are_no_data_are_refused),
        TEST(one_short_shard_wraps_with_an_epoch_counter),
        TEST(changed_data_is_noticed_whatever_its_name),
        TEST(moved_data_is_the_same_data),
        TEST(run_on_bpe_shards_speaks_text),
        TEST(text_with_a_tokenizer_is_what_its_shards_are),
        TEST(run_that_goes_on_has_its_own_tokenizer),
        TEST(tokenizer_that_is_none_is_refused),
        TEST(shards_that_say_nothing_keep_the_tokenizer_they_were_given),
        TEST(text_beside_ids_of_an_unknown_tokenizer_is_refused),
        TEST(shards_of_another_tokenizer_are_noticed),
        TEST(shards_are_read_with_the_tokenizer_that_made_them),
        TEST(questions_are_answered_with_any_batch),
    };
    return run_program_tests(tests);
}
