// Checkpoints: the same bits out and in, crash-safe folders and files that lie.
#include "tests/child.h"
#include "tests/configs.h"
#include "tests/folder.h"

#include <cjson/cJSON.h>
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "kernels/kernels.h"
#include "model/checkpoint.h"
#include "data/files.h"
#include "model/safetensors.h"
#include "model/shards.h"

// ---- a model with a state ----

enum { BIASES = 3 * 6 }; // three MoE blocks

struct model {
    struct params params;
    struct checkpoint c;
};

static accum *zeros(size_t n) { return device_alloc(n * sizeof(accum)); }

static void model_init(struct model *m, const struct config *config) {
    params_build(&m->params, config);
    size_t n = m->params.size;
    m->c = (struct checkpoint){.config = config, .params = &m->params, .weights = device_alloc(n * sizeof(real))};
    m->c.master = zeros(n);
    m->c.m = zeros(n);
    m->c.v = zeros(n);
    m->c.bias = zeros(BIASES);
}

// Numbers of every size, but padding stays zero as in training. Biases near 7 differ in their last bits: saved in 16
// bits they would become a handful of values (sglang pull 31213).
static void model_fill(struct model *m, uint64_t seed) {
    accum *arrays[] = {m->c.master, m->c.m, m->c.v};
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        for (int a = 0; a < 3; a++)
            for (size_t j = 0; j < param_size(p); j++)
                arrays[a][p->offset + j] = (accum)(float)(test_normal(&seed) * exp(8 * test_normal(&seed)));
        for (size_t j = 0; j < param_size(p); j++) m->c.weights[p->offset + j] = (real)m->c.master[p->offset + j];
    }
    float bias = 7;
    for (int i = 0; i < BIASES; i++) m->c.bias[i] = bias = nextafterf(bias, i % 2 ? 8 : 9);
    m->c.step = 100;
    m->c.sequences = 12345;
    m->c.tokens = 9007199254740991; // 2^53 - 1
    m->c.seed = 0xfedcba9876543210; // more than a double holds
}

static void model_free(struct model *m) {
    device_free(m->c.weights);
    device_free(m->c.master);
    device_free(m->c.m);
    device_free(m->c.v);
    device_free(m->c.bias);
    params_free(&m->params);
}

static void save_step(struct model *m, int64_t step, int keep) {
    m->c.step = step;
    checkpoint_save(&m->c, root, keep);
}

// ---- saving and loading ----

static void state_comes_back_bit_for_bit(void **state) {
    (void)state;
    struct model a, b;
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    model_fill(&a, 1);
    a.c.options = cJSON_Parse("{\"lr\": 0.0003, \"data\": \"stories\"}");
    checkpoint_save(&a.c, root, 0);
    checkpoint_load_progress(at("step-00000100"), &b.c);
    checkpoint_load_state(at("step-00000100"), &b.c);
    size_t bytes = a.params.size * sizeof(accum);
    assert_memory_equal(a.c.weights, b.c.weights, a.params.size * sizeof(real));
    assert_memory_equal(a.c.master, b.c.master, bytes);
    assert_memory_equal(a.c.m, b.c.m, bytes);
    assert_memory_equal(a.c.v, b.c.v, bytes);
    assert_memory_equal(a.c.bias, b.c.bias, BIASES * sizeof(accum));
    assert_true(a.c.bias[0] != a.c.bias[1]);
    assert_true(b.c.step == 100 && b.c.sequences == 12345 && b.c.tokens == a.c.tokens && b.c.seed == a.c.seed);
    assert_true(cJSON_Compare(a.c.options, b.c.options, true));
    assert_false(exists(".tmp-step-00000100"));
    cJSON_Delete(a.c.options);
    cJSON_Delete(b.c.options);
    model_free(&a);
    model_free(&b);
}

static void weights_alone_come_back_without_trainer_files(void **state) {
    (void)state;
    struct model a, b;
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    model_fill(&a, 2);
    checkpoint_save(&a.c, root, 0);
    assert_int_equal(remove(at("step-00000100/trainer.json")), 0);
    assert_int_equal(remove(at("step-00000100/state-00001-of-00005.safetensors")), 0);
    accum *master = b.c.master;
    checkpoint_load_weights(at("step-00000100"), &b.c);
    assert_memory_equal(a.c.weights, b.c.weights, a.params.size * sizeof(real));
    assert_memory_equal(a.c.master, b.c.master, a.params.size * sizeof(accum));
    assert_memory_equal(a.c.bias, b.c.bias, BIASES * sizeof(accum));
    b.c.master = NULL; // as for sampling
    checkpoint_load_weights(at("step-00000100"), &b.c);
    b.c.master = master;
    model_free(&a);
    model_free(&b);
}

static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void assert_same_folders(const char *a, const char *b) {
    struct dirent **x, **y;
    int count = scandir(a, &x, is_visible, alphasort);
    assert_int_equal(scandir(b, &y, is_visible, alphasort), count);
    assert_true(count >= 14); // 2 configs, index, 2 * 5 shards, trainer.json
    for (int i = 0; i < count; i++) {
        char path[512];
        size_t n, m;
        assert_string_equal(x[i]->d_name, y[i]->d_name);
        snprintf(path, sizeof path, "%s/%s", a, x[i]->d_name);
        char *left = read_bytes(path, &n);
        snprintf(path, sizeof path, "%s/%s", b, x[i]->d_name);
        char *right = read_bytes(path, &m);
        if (n != m || memcmp(left, right, n) != 0) fail_msg("%s differs between two saves", x[i]->d_name);
        free(left);
        free(right);
        free(x[i]);
        free(y[i]);
    }
    free(x);
    free(y);
}

static void two_saves_of_one_state_are_the_same_bytes(void **state) {
    (void)state;
    struct model a, b;
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    model_fill(&a, 3);
    assert_int_equal(mkdir(at("one"), 0777) | mkdir(at("two"), 0777), 0);
    checkpoint_save(&a.c, at("one"), 0);
    checkpoint_load_progress(at("one/step-00000100"), &b.c);
    checkpoint_load_state(at("one/step-00000100"), &b.c);
    checkpoint_save(&b.c, at("two"), 0);
    assert_same_folders(at("one/step-00000100"), at("two/step-00000100"));
    checkpoint_save(&b.c, at("two"), 0); // in place of the one that is there
    assert_same_folders(at("one/step-00000100"), at("two/step-00000100"));
    assert_false(exists("two/.old-step-00000100"));
    model_free(&a);
    model_free(&b);
}

static void file_names_tensors_by_hugging_face(void **state) {
    (void)state;
    struct model a;
    struct safetensors file;
    char error[FILE_ERROR];
    model_init(&a, &uneven);
    model_fill(&a, 4);
    checkpoint_save(&a.c, root, 0);
    if (!safetensors_open(&file, at("step-00000100/model-00003-of-00005.safetensors"), error, sizeof error))
        fail_msg("%s", error);
    assert_int_equal(file.data_start % 8, 0);
    const struct safetensors_tensor *down = safetensors_find(&file, "model.layers.1.mlp.experts.5.down_proj.weight");
    assert_non_null(down);
    assert_true(down->rank == 2 && down->shape[0] == 24 && down->shape[1] == 9); // [H, m], as Hugging Face has it
    float values[24 * 9];
    assert_true(safetensors_read_f32(&file, down, 0, 24 * 9, values, error, sizeof error));
    const real *memory = a.c.weights + a.params.blocks[1].expert_w2 + 5 * 24 * 9; // [m, H]
    for (int h = 0; h < 24; h++)
        for (int m = 0; m < 9; m++) assert_true(values[h * 9 + m] == (float)memory[m * 24 + h]);
    assert_non_null(safetensors_find(&file, "model.layers.1.mlp.gate.e_score_correction_bias"));
    safetensors_close(&file);

    struct cJSON *index = file_read_json(at("step-00000100/model.safetensors.index.json"), error, sizeof error);
    const struct cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map");
    assert_int_equal(cJSON_GetArraySize(map), a.params.count + 3);
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(map, "lm_head.weight")->valuestring,
                        "model-00001-of-00005.safetensors");
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(map, "model.layers.3.eh_proj.weight")->valuestring,
                        "model-00005-of-00005.safetensors");
    cJSON_Delete(index);
    model_free(&a);
}

// ---- keeping and finding ----

static void purge_removes_old_steps_by_exact_name_only(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 5);
    const char *others[] = {"step-foo",        "step-00000100.bak", "step-100",
                            "step-0000000100", "step--0000001",     "xstep-00000001"};
    for (int i = 0; i < 6; i++) assert_int_equal(mkdir(at(others[i]), 0777), 0);
    write_file("step-00000001", "a file", 6);
    write_file("log.jsonl", "{}", 2);
    assert_int_equal(symlink("step-foo", at("step-00000002")), 0);
    for (int step = 100; step <= 500; step += 100) save_step(&a, step, step == 500 ? 1 : 2);
    for (int i = 0; i < 6; i++) assert_true(exists(others[i]));
    assert_true(exists("step-00000001") && exists("log.jsonl") && exists("step-00000002"));
    assert_true(exists("step-00000500"));
    assert_false(exists("step-00000400") || exists("step-00000300") || exists("step-00000100"));
    save_step(&a, 600, 2);
    assert_true(exists("step-00000600") && exists("step-00000500"));
    save_step(&a, 700, 0);
    assert_true(exists("step-00000700") && exists("step-00000600") && exists("step-00000500"));
    model_free(&a);
}

static void remove_all_removes_checkpoints_by_exact_name_only(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 17);
    save_step(&a, 1, 0);
    const char *gone[] = {"step-00000002", ".tmp-step-00000003", ".old-step-00000001"};
    const char *others[] = {"step-foo", "step-00000100.bak", ".tmp-step-foo", ".git"};
    for (int i = 0; i < 3; i++) assert_int_equal(mkdir(at(gone[i]), 0777), 0);
    for (int i = 0; i < 4; i++) assert_int_equal(mkdir(at(others[i]), 0777), 0);
    write_file("step-00000005", "a file", 6);
    checkpoint_remove_all(root);
    for (int i = 0; i < 3; i++) assert_false(exists(gone[i]));
    for (int i = 0; i < 4; i++) assert_true(exists(others[i]));
    assert_true(exists("step-00000005") && !exists("step-00000001"));
    model_free(&a);
}

static void purge_counts_complete_checkpoints_only(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 6);
    save_step(&a, 100, 0);
    save_step(&a, 200, 0);
    save_step(&a, 900, 0);
    assert_int_equal(truncate(at("step-00000200/state-00002-of-00005.safetensors"), 100), 0);
    save_step(&a, 300, 2);
    assert_true(exists("step-00000300") && exists("step-00000100")); // 200 is broken: 100 is the second good one
    assert_true(exists("step-00000900"));                            // a later step is never old
    model_free(&a);
}

static void newest_skips_what_is_not_complete_and_says_why(void **state) {
    (void)state;
    struct model a;
    char path[512], *text = NULL;
    size_t bytes = 0;
    model_init(&a, &uneven);
    model_fill(&a, 7);
    assert_false(checkpoint_newest(at("absent"), path, sizeof path, stderr));
    assert_false(checkpoint_newest(root, path, sizeof path, stderr));
    for (int step = 1; step <= 5; step++) save_step(&a, step, 0);
    assert_int_equal(rename(at("step-00000005"), at("step-00000010")), 0);
    assert_int_equal(mkdir(at("step-00000009"), 0777), 0);
    assert_int_equal(mkdir(at(".tmp-step-00000011"), 0777), 0);
    assert_int_equal(remove(at("step-00000010/state-00003-of-00005.safetensors")), 0);
    assert_int_equal(truncate(at("step-00000004/model-00001-of-00005.safetensors"), 1000), 0);
    FILE *broken = fopen(at("step-00000003/model-00002-of-00005.safetensors"), "r+b"); // right size, no header
    assert_int_equal(fwrite("\xff\xff\xff\xff\xff\xff\xff\xff", 1, 8, broken), 8);
    fclose(broken);
    FILE *log = open_memstream(&text, &bytes);
    assert_true(checkpoint_newest(root, path, sizeof path, log));
    fclose(log);
    assert_string_equal(path, at("step-00000002"));
    assert_contains(text, "skipped step-00000010, which is not complete: ");
    assert_contains(text, "step-00000010/state-00003-of-00005.safetensors: No such file or directory");
    assert_contains(text, "step-00000009/trainer.json: No such file or directory");
    assert_contains(text, "step-00000004/model-00001-of-00005.safetensors: found 1000 bytes, wanted ");
    assert_contains(text, "step-00000003/model-00002-of-00005.safetensors: found header length 18446744073709551615");
    assert_null(strstr(text, "tmp-step"));
    free(text);
    model_free(&a);
}

static void trainer_json_that_lies_makes_a_checkpoint_incomplete(void **state) {
    (void)state;
    struct model a;
    char path[512];
    size_t bytes;
    model_init(&a, &uneven);
    model_fill(&a, 8);
    save_step(&a, 1, 0);
    char *good = read_bytes(at("step-00000001/trainer.json"), &bytes);
    FILE *log = fopen("/dev/null", "w");
    // Cut anywhere, it is no JSON; the last byte is only the newline.
    for (size_t cut = 0; cut < bytes - 1; cut += 7) {
        write_file("step-00000001/trainer.json", good, cut);
        assert_false(checkpoint_newest(root, path, sizeof path, log));
    }
    const char *wrong[] = {"{}",
                           "[]",
                           "{\"format_version\": 1}",
                           "{\"format_version\": 1, \"files\": {}}",
                           "{\"format_version\": 2, \"files\": {\"config.json\": 1}}",
                           "{\"format_version\": 1, \"files\": {\"../step-00000001/config.json\": 1}}",
                           "{\"format_version\": 1, \"files\": {\"config.json\": -1}}"};
    for (int i = 0; i < 7; i++) {
        write_file("step-00000001/trainer.json", wrong[i], strlen(wrong[i]));
        assert_false(checkpoint_newest(root, path, sizeof path, log));
    }
    write_file("step-00000001/trainer.json", good, bytes);
    assert_true(checkpoint_newest(root, path, sizeof path, log));
    fclose(log);
    free(good);
    model_free(&a);
}

// ---- failures while saving ----

static void save_with_small_files(void *argument) {
    signal(SIGXFSZ, SIG_IGN);             // then a write beyond the limit fails as on a full disk
    struct rlimit limit = {60000, 60000}; // more than any model file, less than a state file
    setrlimit(RLIMIT_FSIZE, &limit);
    save_step(argument, 200, 1);
}

static void save_again(void *argument) { save_step(argument, 200, 1); }

static void a_save_that_fails_leaves_the_older_checkpoint(void **state) {
    (void)state;
    struct model a, b;
    char text[4096];
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    model_fill(&a, 9);
    save_step(&a, 100, 1);
    assert_int_equal(run_child(save_with_small_files, &a, text, sizeof text), 1);
    assert_contains(text, "mok: error: checkpoint: step 200 was not saved: ");
    assert_contains(text, ".tmp-step-00000200/state-00001-of-00005.safetensors: cannot write ");
    assert_contains(text, "File too large");
    assert_false(exists(".tmp-step-00000200") || exists("step-00000200"));
    checkpoint_load_progress(at("step-00000100"), &b.c);
    checkpoint_load_state(at("step-00000100"), &b.c);
    assert_memory_equal(a.c.m, b.c.m, a.params.size * sizeof(accum));

    // The name of the hidden folder is taken by a file: nothing is overwritten and the step is not there.
    write_file(".tmp-step-00000200", "x", 1);
    assert_int_equal(run_child(save_again, &a, text, sizeof text), 1);
    assert_contains(text, ".tmp-step-00000200: cannot open the folder: Not a directory");
    assert_true(exists("step-00000100") && exists(".tmp-step-00000200") && !exists("step-00000200"));
    model_free(&a);
    model_free(&b);
}

static void save_to_absent_run(void *argument) { checkpoint_save(argument, "/proc/no such run", 1); }

static void a_folder_that_cannot_be_made_is_named(void **state) {
    (void)state;
    struct model a;
    char text[4096];
    model_init(&a, &uneven);
    assert_int_equal(run_child(save_to_absent_run, &a.c, text, sizeof text), 1);
    assert_contains(text, "/proc/no such run/.tmp-step-00000000: cannot create the folder: No such file or directory");
    model_free(&a);
}

static void what_a_killed_save_left_is_taken_away_by_the_next(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 10);
    assert_int_equal(mkdir(at(".tmp-step-00000100"), 0777), 0);
    write_file(".tmp-step-00000100/half", "half", 4);
    checkpoint_save(&a.c, root, 0);
    assert_false(exists(".tmp-step-00000100") || exists("step-00000100/half"));
    // Killed between moving the old folder aside and giving the new one its name.
    assert_int_equal(rename(at("step-00000100"), at(".old-step-00000100")), 0);
    checkpoint_save(&a.c, root, 0);
    assert_true(exists("step-00000100") && !exists(".old-step-00000100"));
    model_free(&a);
}

static void killed_at_any_moment_a_complete_checkpoint_remains(void **state) {
    (void)state;
    struct model a;
    char path[512];
    model_init(&a, &uneven);
    model_fill(&a, 11);
    save_step(&a, 1, 1);
    FILE *log = fopen("/dev/null", "w");
    uint64_t random = 1;
    for (int round = 0; round < 20; round++) {
        pid_t child = fork();
        if (child == 0)
            for (int64_t step = 2;; step++) save_step(&a, step, 1);
        usleep((useconds_t)(1000 + 40000 * test_uniform(&random)));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        if (!checkpoint_newest(root, path, sizeof path, log)) fail_msg("round %d: no complete checkpoint", round);
    }
    fclose(log);
    model_free(&a);
}

// ---- tensor files that lie ----

// Header, then bytes of data; length is what the first 8 bytes say, -1 for the truth.
static void write_tensors(const char *header, int64_t length, size_t data_bytes) {
    size_t header_bytes = strlen(header);
    char *text = calloc(1, 8 + header_bytes + data_bytes);
    uint64_t said = length == -1 ? header_bytes : (uint64_t)length;
    memcpy(text, &said, 8);
    memcpy(text + 8, header, header_bytes);
    write_file("x.safetensors", text, 8 + header_bytes + data_bytes);
    free(text);
}

static void assert_refused(const char *part) {
    struct safetensors s;
    char error[FILE_ERROR] = "";
    if (safetensors_open(&s, at("x.safetensors"), error, sizeof error)) fail_msg("accepted, wanted: %s", part);
    assert_contains(error, "/x.safetensors: ");
    assert_contains(error, part);
}

static void safetensors_refuses_wrong_lengths(void **state) {
    (void)state;
    const char *header = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    write_tensors(header, -1, 8);
    struct safetensors s;
    char error[FILE_ERROR];
    assert_true(safetensors_open(&s, at("x.safetensors"), error, sizeof error));
    safetensors_close(&s);
    const int64_t lengths[] = {0, 1, INT64_MIN, -2, INT64_MAX, 1 << 20, 101 << 20};
    for (int i = 0; i < 7; i++) {
        write_tensors(header, lengths[i], 8);
        assert_refused("found header length");
    }
    write_tensors(header, (int64_t)strlen(header) - 1, 8);
    assert_refused("found no JSON");
    write_tensors(header, (int64_t)strlen(header) + 1, 8);
    assert_refused("found no JSON");
    write_tensors(header, -1, 7);
    assert_refused("data_offsets [0, 8], wanted them ascending and at most 7");
    write_tensors(header, -1, 9);
    assert_refused("found 9 bytes of data, wanted 8");
    // More than the cap, and the file is that long.
    write_tensors(header, (100 << 20) + 1, 8);
    assert_int_equal(truncate(at("x.safetensors"), 200 << 20), 0);
    assert_refused("found header length 104857601, wanted 2 to 104857600");
}

static void safetensors_refuses_a_file_cut_anywhere(void **state) {
    (void)state;
    struct model a;
    size_t bytes;
    model_init(&a, &uneven);
    model_fill(&a, 12);
    checkpoint_save(&a.c, root, 0);
    char *good = read_bytes(at("step-00000100/model-00003-of-00005.safetensors"), &bytes);
    for (size_t cut = 0; cut < bytes; cut += cut < 64 ? 1 : 997) {
        write_file("x.safetensors", good, cut);
        assert_refused("found ");
    }
    write_file("x.safetensors", good, bytes - 1);
    assert_refused("found ");
    free(good);
    model_free(&a);
}

static void safetensors_refuses_headers_that_lie(void **state) {
    (void)state;
#define TENSOR(name, type, shape, offsets)                                                                             \
    "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
    const struct {
        const char *header, *part;
    } cases[] = {
        {"not JSON at all, but long enough", "found no JSON"},
        {"[]", "found no JSON"},
        {"{} {}", "found no JSON"},
        {"{\"a\":1}", "found dtype"},
        {"{" TENSOR("a", "F8_E4M3", "[16]", "[0,16]") "}", "found dtype F8_E4M3, wanted F32, F16, BF16 or I64"},
        {"{" TENSOR("a", "F32", "4", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[-4]", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[4.5]", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1,4]", "[0,16]") "}", "found a bad shape"},
        {"{" TENSOR("a", "F32", "[4]", "[0]") "}", "found bad data_offsets"},
        {"{" TENSOR("a", "F32", "[4]", "[0,1e300]") "}", "found bad data_offsets"},
        {"{" TENSOR("a", "F32", "[4]", "[-16,0]") "}", "found bad data_offsets"},
        {"{" TENSOR("a", "F32", "[4]", "[16,0]") "}", "found data_offsets [16, 0], wanted them ascending"},
        {"{" TENSOR("a", "F32", "[8]", "[0,32]") "}", "at most 16"},
        {"{" TENSOR("a", "F32", "[1099511627776,1099511627776]", "[0,16]") "}", "whose size fits 64 bits"},
        {"{" TENSOR("a", "F32", "[3]", "[0,16]") "}", "found 16 bytes, wanted 12 for F32 [3]"},
        {"{" TENSOR("a", "BF16", "[4]", "[0,16]") "}", "found 16 bytes, wanted 8 for BF16 [4]"},
        {"{" TENSOR("a", "F32", "[3]", "[0,12]") "," TENSOR("b", "F32", "[2]", "[8,16]") "}", "tensors overlap"},
        {"{" TENSOR("a", "F32", "[4]", "[0,16]") "," TENSOR("b", "F32", "[4]", "[0,16]") "}", "tensors overlap"},
        {"{" TENSOR("a", "F32", "[1]", "[0,4]") "," TENSOR("b", "F32", "[2]", "[8,16]") "}", "a gap before it"},
        {"{" TENSOR("a", "F32", "[2]", "[0,8]") "," TENSOR("a", "F32", "[2]", "[8,16]") "}", "tensor a twice"},
        {"{}", "found 16 bytes of data, wanted 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_tensors(cases[i].header, -1, 16);
        assert_refused(cases[i].part);
    }
    assert_int_equal(remove(at("x.safetensors")), 0);
    assert_int_equal(mkfifo(at("x.safetensors"), 0600), 0); // nobody writes: opening it would wait for ever
    assert_refused("wanted a regular file");
}

static void safetensors_reads_16_bit_types_as_float(void **state) {
    (void)state;
    const char *header = "{\"__metadata__\":{\"format\":\"pt\"},"
                         "\"h\":{\"dtype\":\"F16\",\"shape\":[2,4],\"data_offsets\":[0,16]},"
                         "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[16,24]},"
                         "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[24,32]}}";
    const uint16_t data[16] = {0x3c00, 0xc000, 0x0001, 0x83ff, 0x7bff, 0x7c00,
                               0x8000, 0x3555, 0x3f80, 0xc0e0, 0x0001, 0x7f80};
    const float half[8] = {1, -2, 0x1p-24f, -1023 * 0x1p-24f, 65504, INFINITY, -0.0f, 1365 * 0x1p-12f};
    const float brain[4] = {1, -7, 0x1p-133f, INFINITY};
    char error[FILE_ERROR];
    float out[8];
    struct safetensors s;
    write_tensors(header, -1, 32);
    FILE *file = fopen(at("x.safetensors"), "r+b");
    fseek(file, 8 + (long)strlen(header), SEEK_SET);
    assert_int_equal(fwrite(data, 1, 32, file), 32);
    fclose(file);
    if (!safetensors_open(&s, at("x.safetensors"), error, sizeof error)) fail_msg("%s", error);
    const struct safetensors_tensor *h = safetensors_find(&s, "h");
    assert_true(safetensors_read_f32(&s, h, 0, 8, out, error, sizeof error));
    assert_memory_equal(out, half, sizeof half);
    assert_true(safetensors_read_f32(&s, h, 5, 3, out, error, sizeof error)); // a part
    assert_memory_equal(out, half + 5, 3 * sizeof *half);
    assert_true(safetensors_read_f32(&s, safetensors_find(&s, "b"), 0, 4, out, error, sizeof error));
    assert_memory_equal(out, brain, sizeof brain);
    assert_false(safetensors_read_f32(&s, h, 5, 4, out, error, sizeof error));
    assert_false(safetensors_read_f32(&s, h, UINT64_MAX, 2, out, error, sizeof error));
    assert_false(safetensors_read_f32(&s, safetensors_find(&s, "i"), 0, 1, out, error, sizeof error));
    assert_null(safetensors_find(&s, "__metadata__"));
    safetensors_close(&s);
}

static void safetensors_writer_notices_a_full_disk_and_missing_data(void **state) {
    (void)state;
    struct safetensors_writer w;
    char error[FILE_ERROR] = "";
    static float zero[1 << 16];
    struct safetensors_tensor list[] = {{.name = "a", .type = SAFETENSORS_F32, .rank = 1, .shape = {1 << 16}}};
    bool written = safetensors_begin(&w, "/dev/full", list, 1, error, sizeof error);
    if (written) {
        written = safetensors_append(&w, zero, sizeof zero, error, sizeof error);
        char later[FILE_ERROR];
        safetensors_finish(&w, later, sizeof later);
    }
    assert_false(written);
    assert_contains(error, "/dev/full: cannot write 262144 bytes");
    assert_contains(error, "No space left on device");

    // So little that only the flush at the end meets the disk.
    list[0].shape[0] = 1;
    assert_true(safetensors_begin(&w, "/dev/full", list, 1, error, sizeof error));
    assert_true(safetensors_append(&w, zero, 4, error, sizeof error));
    assert_false(safetensors_finish(&w, error, sizeof error));
    assert_contains(error, "No space left on device");

    assert_true(safetensors_begin(&w, at("short"), list, 1, error, sizeof error));
    assert_false(safetensors_finish(&w, error, sizeof error));
    assert_contains(error, "found 0 bytes of data, wanted 4");
}

// ---- a checkpoint of another model ----

static void load_state(void *argument) { checkpoint_load_state(at("step-00000100"), argument); }
static void load_weights(void *argument) { checkpoint_load_weights(at("step-00000100"), argument); }

static void assert_not_loaded(void (*load)(void *), const struct config *c, const char *part) {
    struct model other;
    char text[4096];
    model_init(&other, c);
    assert_int_equal(run_child(load, &other.c, text, sizeof text), 2);
    assert_contains(text, "mok: error: checkpoint: cannot ");
    assert_contains(text, part);
    model_free(&other);
}

static void loading_names_what_does_not_fit(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 13);
    checkpoint_save(&a.c, root, 0);
    struct config c = uneven;
    c.kv_rank = 13;
    assert_not_loaded(load_state, &c,
                      "self_attn.kv_a_proj_with_mqa.weight.master: found shape [20, 24], wanted [21, 24]");
    assert_not_loaded(load_weights, &c, "self_attn.kv_a_proj_with_mqa.weight: found shape [20, 24], wanted [21, 24]");
    c = uneven;
    c.q_rank = 0;
    assert_not_loaded(load_weights, &c, "tensor model.layers.0.self_attn.q_proj.weight: found none, wanted one");
    c = uneven;
    c.layers = 2; // the last layer left out is not an MTP module left out
    c.mtp_depth = 0;
    assert_not_loaded(load_weights, &c, "model.layers.2.input_layernorm.weight, which this model does not have");
    c = uneven;
    c.layers = 4;
    c.dense_layers = 2;
    assert_not_loaded(load_state, &c, "model-00001-of-00006.safetensors: No such file or directory");
    assert_int_equal(truncate(at("step-00000100/config.json"), 5), 0);
    assert_not_loaded(load_state, &uneven, "config.json: found 5 bytes, wanted ");
    model_free(&a);
}

static void weights_load_without_the_mtp_modules(void **state) {
    (void)state;
    struct model a, b;
    struct config c = uneven;
    c.mtp_depth = 0;
    model_init(&a, &uneven);
    model_init(&b, &c);
    model_fill(&a, 16);
    checkpoint_save(&a.c, root, 0);
    checkpoint_load_weights(at("step-00000100"), &b.c);
    assert_memory_equal(a.c.weights + a.params.blocks[2].expert_w2, b.c.weights + b.params.blocks[2].expert_w2,
                        6 * 9 * 24 * sizeof(real));
    assert_memory_equal(a.c.bias, b.c.bias, 2 * 6 * sizeof(accum));
    model_free(&a);
    model_free(&b);
}

// The model's weights as one file without an index, in BF16, with the tensors that published files have besides.
static void write_single_bf16(const struct model *a, const char *path) {
    char error[FILE_ERROR];
    int count = a->params.count, total = count + 3 + 2;
    struct safetensors_tensor *list = calloc((size_t)total, sizeof *list);
    static const char *const extra[] = {"model.layers.1.mlp.gate.e_score_correction_bias",
                                        "model.layers.2.mlp.gate.e_score_correction_bias",
                                        "model.layers.3.mlp.gate.e_score_correction_bias",
                                        "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"};
    for (int i = 0; i < total; i++) {
        const struct param *p = i < count ? &a->params.list[i] : NULL;
        list[i] = (struct safetensors_tensor){.name = p ? p->name : extra[i - count], .type = SAFETENSORS_BF16};
        list[i].rank = p && p->cols ? 2 : 1;
        list[i].shape[0] = p ? (uint64_t)p->rows : 6;
        if (p) list[i].shape[1] = (uint64_t)p->cols;
    }
    struct safetensors_writer w;
    uint16_t data[257 * 24];
    for (int i = 0; i < 257 * 24; i++) data[i] = (uint16_t)(0x3f80 + i % 64); // 1, 1 + 1/128, ...
    assert_true(safetensors_begin(&w, path, list, total, error, sizeof error));
    for (int i = 0; i < total; i++)
        assert_true(safetensors_append(&w, data, list[i].end - list[i].begin, error, sizeof error));
    assert_true(safetensors_finish(&w, error, sizeof error));
    free(list);
}

static void one_bf16_file_of_another_program_loads_as_weights_but_is_no_state(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    write_single_bf16(&a, at("model.safetensors"));
    checkpoint_load_weights(root, &a.c);
    const struct param *p = &a.params.list[0];
    for (size_t i = 0; i < param_size(p); i++)
        assert_true(a.c.weights[p->offset + i] == (real)(1 + (double)(i % 64) / 128));
    assert_memory_equal(a.c.weights, a.c.master, a.params.size * sizeof(real));
    assert_true(a.c.bias[BIASES - 1] == (accum)(1 + 5.0 / 128));

    // 16 bits are not what a run to be resumed has saved.
    struct shards files;
    struct shard_array weights = {"", a.c.weights, NULL};
    char error[FILE_ERROR];
    assert_true(shards_open_index(&files, root, error, sizeof error));
    assert_false(shards_read(&files, &a.params, &weights, 1, true, error, sizeof error));
    assert_contains(error, "model.safetensors: tensor model.embed_tokens.weight: found BF16, wanted F32");
    assert_false(shards_read_bias(&files, &uneven, a.c.bias, true, error, sizeof error));
    assert_contains(error, "model.layers.1.mlp.gate.e_score_correction_bias: found BF16, wanted F32");
    shards_close(&files);
    model_free(&a);
}

static void config_is_read_from_a_checkpoint(void **state) {
    (void)state;
    struct model a;
    char error[FILE_ERROR];
    model_init(&a, &uneven);
    model_fill(&a, 15);
    checkpoint_save(&a.c, root, 0);
    struct config back = {.bias_rate = uneven.bias_rate, .mtp_weight = uneven.mtp_weight};
    assert_true(checkpoint_read_config(at("step-00000100"), &back, error, sizeof error));
    assert_memory_equal(&back, &uneven, sizeof uneven);
    assert_false(checkpoint_read_config(root, &back, error, sizeof error));
    assert_contains(error, "/config.json: No such file or directory");
    write_file("config.json", "{\"vocab_size\": 3", 16);
    assert_false(checkpoint_read_config(root, &back, error, sizeof error));
    assert_contains(error, "/config.json: found no JSON");
    model_free(&a);
}

// A kill between the two renames of a save leaves the only complete folder aside; the next save of the step, which may
// fail, must not lose it.
static void folder_that_was_set_aside_comes_back(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 1);
    checkpoint_save(&a.c, root, 0);
    assert_int_equal(rename(at("step-00000100"), at(".old-step-00000100")), 0);
    assert_false(checkpoint_exists(root));
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = (struct rlimit){100, before.rlim_max};
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &small);
        close(STDERR_FILENO);
        checkpoint_save(&a.c, root, 0);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    char path[256];
    assert_true(checkpoint_newest(root, path, sizeof path, NULL));
    assert_string_equal(path, at("step-00000100"));
    model_free(&a);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(folder_that_was_set_aside_comes_back),
        TEST(state_comes_back_bit_for_bit),
        TEST(weights_alone_come_back_without_trainer_files),
        TEST(two_saves_of_one_state_are_the_same_bytes),
        TEST(file_names_tensors_by_hugging_face),
        TEST(purge_removes_old_steps_by_exact_name_only),
        TEST(remove_all_removes_checkpoints_by_exact_name_only),
        TEST(purge_counts_complete_checkpoints_only),
        TEST(newest_skips_what_is_not_complete_and_says_why),
        TEST(trainer_json_that_lies_makes_a_checkpoint_incomplete),
        TEST(a_save_that_fails_leaves_the_older_checkpoint),
        TEST(a_folder_that_cannot_be_made_is_named),
        TEST(what_a_killed_save_left_is_taken_away_by_the_next),
        TEST(killed_at_any_moment_a_complete_checkpoint_remains),
        TEST(safetensors_refuses_wrong_lengths),
        TEST(safetensors_refuses_a_file_cut_anywhere),
        TEST(safetensors_refuses_headers_that_lie),
        TEST(safetensors_reads_16_bit_types_as_float),
        TEST(safetensors_writer_notices_a_full_disk_and_missing_data),
        TEST(loading_names_what_does_not_fit),
        TEST(weights_load_without_the_mtp_modules),
        TEST(one_bf16_file_of_another_program_loads_as_weights_but_is_no_state),
        TEST(config_is_read_from_a_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
