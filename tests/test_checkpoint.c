// Checkpoints: the same bits out and in, what is kept, and whose weights are taken.
#include "tests/child.h"
#include "tests/saved_model.h"

#include <cjson/cJSON.h>
#include <dirent.h>

#include "data/files.h"
#include "kernels/bf16.h"
#include "model/safetensors.h"
#include "model/shards.h"

// ---- saving and loading ----

static void state_comes_back_bit_for_bit(void **state) {
    (void)state;
    struct model a, b;
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    model_fill(&a, 1);
    a.c.options = cJSON_Parse("{\"lr\": 0.0003, \"data\": \"stories\"}");
    a.c.data = cJSON_Parse("{\"files\": [{\"name\": \"a.bin\", \"bytes\": 3000000000}], \"tokens\": 1}");
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
    assert_true(cJSON_Compare(a.c.data, b.c.data, true));
    assert_false(exists(".tmp-step-00000100"));
    cJSON_Delete(a.c.options);
    cJSON_Delete(b.c.options);
    cJSON_Delete(a.c.data);
    cJSON_Delete(b.c.data);
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

static void what_was_not_saved_comes_back_as_nothing(void **state) {
    (void)state;
    struct model a, b;
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    checkpoint_save(&a.c, root, 0);
    b.c.options = b.c.data = (cJSON *)&b; // not a pointer to keep
    checkpoint_load_progress(at("step-00000000"), &b.c);
    assert_null(b.c.options);
    assert_null(b.c.data);
    model_free(&a);
    model_free(&b);
}

static uint64_t bytes_of(const char *folder, const char *name) {
    char path[512];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(stat(path, &info), 0);
    return (uint64_t)info.st_size;
}

static void bytes_of_a_checkpoint_are_known_before_it_is_written(void **state) {
    (void)state;
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 18);
    assert_int_equal(checkpoint_bytes_on_disk(root), 0);
    save_step(&a, 1, 0);
    struct dirent **entries;
    int count = scandir(at("step-00000001"), &entries, NULL, alphasort);
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++) {
        if (entries[i]->d_name[0] != '.') bytes += bytes_of(at("step-00000001"), entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    assert_int_equal(checkpoint_bytes_on_disk(root), bytes);
    uint64_t said = checkpoint_bytes(&uneven), floats = 16 * (uint64_t)params_total(&a.params);
    // Never too little. Names and shapes take at most a kilobyte a tensor, even where tensors are this small.
    assert_true(said >= bytes && said <= floats + 1024 * (uint64_t)a.params.count + (1 << 17));
    save_step(&a, 2, 0);
    assert_int_equal(rename(at("step-00000001"), at(".tmp-step-00000001")), 0); // half a checkpoint takes space too
    assert_int_equal(checkpoint_bytes_on_disk(root), 2 * bytes);
    model_free(&a);
}

// ---- keeping and finding ----

static void save_and_keep_one(void *model) { checkpoint_save(&((struct model *)model)->c, root, 1); }

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
    write_file("step-foo/mine", "mine", 4);
    assert_int_equal(symlink("step-foo", at("step-00000002")), 0);
    for (int step = 100; step <= 400; step += 100) save_step(&a, step, 2);
    char warnings[4096];
    a.c.step = 500;
    assert_int_equal(run_child(save_and_keep_one, &a, warnings, sizeof warnings), 0);
    assert_string_equal(warnings, "");
    for (int i = 0; i < 6; i++) assert_true(exists(others[i]));
    assert_true(exists("step-00000001") && exists("log.jsonl") && exists("step-00000002"));
    assert_true(exists("step-foo/mine")); // where a link leads
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

static void remove_all(void *argument) {
    (void)argument;
    checkpoint_remove_all(root);
}

// A removal that does not come to its end, as when the program is killed: what is left does not look like a checkpoint that
// is damaged, and --resume begins anew instead of refusing.
static void half_removed_checkpoint_has_lost_its_name(void **state) {
    (void)state;
    char text[4096];
    struct model a;
    model_init(&a, &uneven);
    model_fill(&a, 18);
    save_step(&a, 12, 0);
    assert_int_equal(mkdir(at("step-00000012/stays"), 0777), 0); // a folder in it is not removed
    assert_int_equal(run_child(remove_all, NULL, text, sizeof text), 2);
    assert_false(exists("step-00000012") || exists(".tmp-step-00000012/trainer.json"));
    assert_true(exists(".tmp-step-00000012/stays"));
    assert_false(checkpoint_exists(root));
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
    assert_not_loaded(load_weights, &uneven, "config.json: found 5 bytes, wanted ");
    model_free(&a);
}

// A name in the index that leads out of the folder, to a file that would do.
static void index_names_files_of_its_folder_only(void **state) {
    (void)state;
    struct model a;
    char error[FILE_ERROR];
    model_init(&a, &uneven);
    model_fill(&a, 19);
    checkpoint_save(&a.c, root, 0);
    assert_int_equal(mkdir(at("elsewhere"), 0777) | mkdir(at("elsewhere/in"), 0777), 0);
    const char *wrong[][2] = {
        {"\"../step-00000100/model-00001-of-00005.safetensors\"", "found no file name, wanted one"},
        {"\"in/model.safetensors\"", "found no file name, wanted one in this folder"},
        {"\"..\"", "wanted a regular file"},
        {"\"\"", "wanted a regular file"},
        {"7", "found no file name, wanted one in this folder"}};
    assert_int_equal(
        symlink(at("step-00000100/model-00001-of-00005.safetensors"), at("elsewhere/in/model.safetensors")), 0);
    for (int i = 0; i < 5; i++) {
        char text[256];
        struct shards files;
        int bytes = snprintf(text, sizeof text, "{\"weight_map\": {\"lm_head.weight\": %s}}", wrong[i][0]);
        write_file("elsewhere/model.safetensors.index.json", text, (size_t)bytes);
        assert_false(shards_open_index(&files, at("elsewhere"), error, sizeof error));
        assert_contains(error, wrong[i][1]);
    }
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
    struct shard_array weights = {"", a.c.weights, NULL, false};
    struct spread whole = {&uneven, &a.params, &parallel_alone, NULL};
    char error[FILE_ERROR];
    assert_true(shards_open_index(&files, root, error, sizeof error));
    assert_false(shards_read(&files, &whole, &weights, 1, true, error, sizeof error));
    assert_contains(error, "model.safetensors: tensor model.embed_tokens.weight: found BF16, wanted F32");
    assert_false(shards_read_bias(&files, &uneven, a.c.bias, true, error, sizeof error));
    assert_contains(error, "model.layers.1.mlp.gate.e_score_correction_bias: found BF16, wanted F32");
    shards_close(&files);
    model_free(&a);
}

static float rounded_to_bf16(float value) {
    uint16_t half;
    safetensors_bf16_from_f32(&half, &value, 1);
    return bf16_to_float(half);
}

static uint64_t bytes_of_weights(const char *index_path) {
    char error[FILE_ERROR];
    uint64_t bytes = 0;
    struct cJSON *index = file_read_json(index_path, error, sizeof error);
    const struct cJSON *metadata = cJSON_GetObjectItemCaseSensitive(index, "metadata");
    assert_true(file_json_integer(cJSON_GetObjectItemCaseSensitive(metadata, "total_size"), &bytes));
    cJSON_Delete(index);
    return bytes;
}

static void assert_config_says(const char *config_path, const char *dtype) {
    char error[FILE_ERROR];
    struct cJSON *config = file_read_json(config_path, error, sizeof error);
    assert_string_equal(cJSON_GetObjectItemCaseSensitive(config, "torch_dtype")->valuestring, dtype);
    cJSON_Delete(config);
}

static enum safetensors_type type_of(const char *path, const char *tensor) {
    struct safetensors file;
    char error[FILE_ERROR];
    if (!safetensors_open(&file, path, error, sizeof error)) fail_msg("%s", error);
    const struct safetensors_tensor *t = safetensors_find(&file, tensor);
    if (!t) fail_msg("%s: found no tensor %s", path, tensor);
    enum safetensors_type type = t->type;
    safetensors_close(&file);
    return type;
}

// What a GPU saves: a model in BF16 with its biases in F32, beside a state in F32, which goes on anywhere.
static void bf16_checkpoint_is_a_smaller_model_and_the_same_state(void **state) {
    (void)state;
    struct model a, b;
    model_init(&a, &uneven);
    model_init(&b, &uneven);
    model_fill(&a, 21);
    assert_int_equal(mkdir(at("f32"), 0777) | mkdir(at("bf16"), 0777), 0);
    checkpoint_save(&a.c, at("f32"), 0);
    a.c.bf16 = true;
    checkpoint_save(&a.c, at("bf16"), 0);
    assert_config_says(at("f32/step-00000100/config.json"), "float32");
    assert_config_says(at("bf16/step-00000100/config.json"), "bfloat16");
    uint64_t elements = params_total(&a.params), biases = 4 * BIASES;
    assert_int_equal(bytes_of_weights(at("f32/step-00000100/model.safetensors.index.json")), 4 * elements + biases);
    assert_int_equal(bytes_of_weights(at("bf16/step-00000100/model.safetensors.index.json")), 2 * elements + biases);
    const char *third = "bf16/step-00000100/model-00003-of-00005.safetensors";
    assert_int_equal(type_of(at(third), "model.layers.1.mlp.gate.weight"), SAFETENSORS_BF16);
    assert_int_equal(type_of(at(third), "model.layers.1.mlp.gate.e_score_correction_bias"), SAFETENSORS_F32);
    for (int shard = 1; shard <= 5; shard++) { // the state does not know of it
        char name[80];
        snprintf(name, sizeof name, "f32/step-00000100/state-%05d-of-00005.safetensors", shard);
        size_t n, m;
        char *left = read_bytes(at(name), &n);
        snprintf(name, sizeof name, "bf16/step-00000100/state-%05d-of-00005.safetensors", shard);
        char *right = read_bytes(at(name), &m);
        assert_int_equal(n, m);
        assert_memory_equal(left, right, n);
        free(left);
        free(right);
    }

    // Resumed: masters as they were, and weights that are rounded from them for this machine.
    checkpoint_load_progress(at("bf16/step-00000100"), &b.c);
    checkpoint_load_state(at("bf16/step-00000100"), &b.c);
    assert_memory_equal(a.c.master, b.c.master, a.params.size * sizeof(accum));
    assert_memory_equal(a.c.m, b.c.m, a.params.size * sizeof(accum));
    assert_memory_equal(a.c.bias, b.c.bias, BIASES * sizeof(accum));
    assert_memory_equal(a.c.weights, b.c.weights, a.params.size * sizeof(real));

    // Begun from: weights and masters are what the file has.
    checkpoint_load_weights(at("bf16/step-00000100"), &b.c);
    for (int i = 0; i < a.params.count; i++)
        for (size_t j = a.params.list[i].offset, end = j + param_size(&a.params.list[i]); j < end; j++) {
            float wanted = rounded_to_bf16((float)a.c.weights[j]);
            assert_true((float)b.c.weights[j] == wanted && (float)b.c.master[j] == wanted);
        }
    assert_memory_equal(a.c.bias, b.c.bias, BIASES * sizeof(accum));

    // A model that has only 16 bits is the same in a second file.
    b.c.bf16 = true;
    assert_int_equal(mkdir(at("again"), 0777), 0);
    checkpoint_save(&b.c, at("again"), 0);
    size_t n, m;
    char *left = read_bytes(at(third), &n),
         *right = read_bytes(at("again/step-00000100/model-00003-of-00005.safetensors"), &m);
    assert_int_equal(n, m);
    assert_memory_equal(left, right, n);
    free(left);
    free(right);
    model_free(&a);
    model_free(&b);
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

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(state_comes_back_bit_for_bit),
        TEST(weights_alone_come_back_without_trainer_files),
        TEST(two_saves_of_one_state_are_the_same_bytes),
        TEST(what_was_not_saved_comes_back_as_nothing),
        TEST(bytes_of_a_checkpoint_are_known_before_it_is_written),
        TEST(file_names_tensors_by_hugging_face),
        TEST(purge_removes_old_steps_by_exact_name_only),
        TEST(remove_all_removes_checkpoints_by_exact_name_only),
        TEST(half_removed_checkpoint_has_lost_its_name),
        TEST(purge_counts_complete_checkpoints_only),
        TEST(loading_names_what_does_not_fit),
        TEST(index_names_files_of_its_folder_only),
        TEST(weights_load_without_the_mtp_modules),
        TEST(one_bf16_file_of_another_program_loads_as_weights_but_is_no_state),
        TEST(bf16_checkpoint_is_a_smaller_model_and_the_same_state),
        TEST(config_is_read_from_a_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
