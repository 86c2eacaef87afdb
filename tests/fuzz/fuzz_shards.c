// model/shards.c: a folder of safetensors files, with or without an index, read as the tensors of a small model.
//
// Parts of an input: the index (empty: there is none), then model.safetensors, a.safetensors and b.safetensors.
#include "model/shards.h"

#include "tests/fuzz/fuzz.h"

static struct param list[] = {
    {.name = "norm.weight", .rows = 4, .block = -1, .expert = -1, .offset = 0},
    {.name = "up.weight", .rows = 2, .cols = 3, .block = 0, .expert = -1, .offset = 4},
    {.name = "down.weight", .rows = 3, .cols = 2, .transposed = true, .block = 1, .expert = -1, .offset = 10},
};
enum { SIZE = 16, EXPERTS = 2 };
static const struct params table = {.list = list, .count = 3, .size = SIZE, .dense_size = SIZE};
static const struct config config = {.layers = 2, .dense_layers = 1, .experts = EXPERTS}; // one MoE block, number 1

static const struct sharding sharding = {.dense = {0, SIZE, 0}, .experts = {SIZE, SIZE, SIZE}, .size = SIZE};
static const struct spread spread = {&config, &table, &parallel_alone, &sharding};

// What was read has the shape of the table, and no file lies outside the folder.
static void check_shapes(const struct shards *s, const char *folder) {
    for (int f = 0; f < s->count; f++) {
        fuzz_require(!strchr(s->files[f].path + strlen(folder) + 1, '/'));
        for (int i = 0; i < table.count; i++) {
            const struct safetensors_tensor *t = safetensors_find(&s->files[f], list[i].name);
            if (!t || !s->used[f][t - s->files[f].list]) continue;
            fuzz_require(t->rank == 1 + (list[i].cols > 0) && t->shape[0] == (uint64_t)list[i].rows);
            fuzz_require(t->rank == 1 || t->shape[1] == (uint64_t)list[i].cols);
        }
    }
}

// Nothing goes wrong where nothing was found wrong.
static void read_all(struct shards *s, const char *folder) {
    char error[FILE_ERROR] = "";
    real *weights = calloc(SIZE, sizeof *weights);
    accum *values = calloc(SIZE, sizeof *values), *bias = calloc(EXPERTS, sizeof *bias);
    const struct shard_array arrays[] = {{"", weights, values, false}, {".m", NULL, values, false}};
    for (int exact = 0; exact < 2; exact++) {
        bool good = shards_check(s, &table, arrays, 1 + exact, exact, error, sizeof error) &&
                    shards_check_bias(s, &config, exact, error, sizeof error);
        bool read = shards_read(s, &spread, arrays, 1 + exact, exact, error, sizeof error) &&
                    shards_read_bias(s, &config, bias, exact, error, sizeof error);
        fuzz_require(read == good);
        bool used = good && shards_check_used(s, &config, error, sizeof error);
        if (!used) fuzz_check_error(error, sizeof error, s->count ? folder : "checkpoint");
    }
    free(weights);
    free(values);
    free(bias);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const names[] = {"model.safetensors", "a.safetensors", "b.safetensors"};
    struct fuzz_part parts[4];
    size_t count = fuzz_cut(data, size, parts, 4);
    const char *index = fuzz_path("model.safetensors.index.json");
    if (parts[0].size)
        fuzz_write("model.safetensors.index.json", parts[0].data, parts[0].size);
    else
        unlink(index);
    for (size_t i = 1; i < 4; i++)
        if (i < count)
            fuzz_write_safetensors(names[i - 1], parts[i].data, parts[i].size);
        else
            unlink(fuzz_path(names[i - 1]));

    struct shards s;
    char error[FILE_ERROR] = "";
    fuzz_arm(); // a file name that is too long
    if (setjmp(fuzz_stop) == 0) {
        if (shards_open_index(&s, fuzz_folder, error, sizeof error)) {
            read_all(&s, fuzz_folder);
            check_shapes(&s, fuzz_folder);
            shards_close(&s);
        } else {
            fuzz_check_error(error, sizeof error, fuzz_folder);
        }
    }
    fuzz_disarm();
    return 0;
}
