// data/token_file.c: one token shard (fuzz_write_shard says how an input becomes one).
#include "tests/fuzz/fuzz.h"

// The ids are those in the file, whether they are read at once or in two pieces. False when one is out of range.
static bool check_ids(const struct token_file *f, const uint8_t *raw, int32_t *ids) {
    char error[FILE_ERROR] = "";
    uint32_t limit = f->vocab ? f->vocab : 1u << 31;
    if (!token_file_read(f, 0, f->count, 0, ids, error, sizeof error)) {
        fuzz_check_error(error, sizeof error, f->path);
        return false;
    }
    for (size_t i = 0; i < f->count; i++) {
        uint32_t id = 0;
        memcpy(&id, raw + i * (size_t)f->id_bytes, (size_t)f->id_bytes);
        fuzz_require(id < limit && ids[i] == (int32_t)id);
    }
    uint64_t middle = f->count / 2, rest = f->count - middle;
    int32_t *second_half = malloc((rest + 1) * sizeof *second_half);
    fuzz_require(token_file_read(f, middle, rest, 0, second_half, error, sizeof error));
    fuzz_require(memcmp(second_half, ids + middle, rest * sizeof *ids) == 0);
    free(second_half);
    return true;
}

// Our writer's file of the same ids holds them. A vocabulary is an int, so the last id of all cannot be written.
static void check_writer(const int32_t *ids, uint64_t count, uint32_t vocab, uint64_t tokenizer) {
    char error[FILE_ERROR] = "";
    struct token_writer w;
    struct token_file f;
    for (uint64_t i = 0; i < count; i++)
        if (ids[i] == INT32_MAX) return;
    const char *path = fuzz_path("again.bin");
    fuzz_require(token_writer_begin(&w, path, (int)vocab, tokenizer, error, sizeof error) &&
                 token_writer_append(&w, ids, count, error, sizeof error) &&
                 token_writer_finish(&w, error, sizeof error));
    fuzz_require(token_file_open(&f, path, error, sizeof error));
    fuzz_require(f.count == count && f.vocab == vocab && f.tokenizer == tokenizer);
    fuzz_require(token_file_check(&f, &(int32_t){0}, error, sizeof error));
    token_file_close(&f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1 + FUZZ_SHARD_INTS) return -1;
    char error[FILE_ERROR] = "";
    struct token_file f;
    const char *path = fuzz_write_shard("shard.bin", data, size);
    bool raw = data[0] & FUZZ_RAW, is = token_file_is(path);
    if (!token_file_open(&f, path, error, sizeof error)) {
        fuzz_check_error(error, sizeof error, path);
        return 0;
    }
    fuzz_require(is && !f.count == !(token_file_bytes(&f) - TOKEN_FILE_HEADER));
    int32_t *ids = malloc((f.count + 1) * sizeof *ids);
    const uint8_t *bytes = data + 1 + (raw ? TOKEN_FILE_HEADER : FUZZ_SHARD_INTS);
    bool good = check_ids(&f, bytes, ids), checked = token_file_check(&f, &(int32_t){0}, error, sizeof error);
    fuzz_require(good || !checked);
    if (good && !raw && data[0] & FUZZ_FIX_HASH) fuzz_require(checked);
    if (!checked) fuzz_check_error(error, sizeof error, path);
    if (good && f.count) check_writer(ids, f.count, f.vocab ? f.vocab : INT32_MAX, f.tokenizer);
    free(ids);
    token_file_close(&f);
    return 0;
}
