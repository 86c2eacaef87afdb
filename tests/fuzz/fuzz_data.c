// data/source.c and data/data.c: a spec and what it names.
//
// An input is the spec (in the folder of the files), the spec of the evaluation data or nothing, a line of two bytes: T
// and lookahead; then up to five files, a.bin, b.bin, c.bin (fuzz_write_shard says what is in them), a.txt and b.txt.
#include "data/data.h"

#include <cjson/cJSON.h>

#include "tests/fuzz/fuzz.h"

enum { FILES = 5, SPEC = 256, WINDOWS = 40 };

// Cuts a line off the input as the path of a spec; false where there is none, or one that leads out of the folder.
static bool take_spec(char spec[SPEC], const uint8_t **data, size_t *size) {
    const uint8_t *end = memchr(*data, '\n', *size);
    size_t length = end ? (size_t)(end - *data) : 0;
    if (!end || length > 64 || memchr(*data, '/', length) || memchr(*data, 0, length)) return false;
    spec[0] = 0;
    if (length) snprintf(spec, SPEC, "%s/%.*s", fuzz_folder, (int)length, (const char *)*data);
    *size -= length + 1;
    *data = end + 1;
    return true;
}

static void write_files(const uint8_t *data, size_t size) {
    static const char *const names[] = {"a.bin", "b.bin", "c.bin", "a.txt", "b.txt"};
    struct fuzz_part parts[FILES];
    size_t count = fuzz_cut(data, size, parts, FILES);
    for (size_t i = 0; i < FILES; i++)
        if (i < count && parts[i].size)
            fuzz_write_shard(names[i], parts[i].data, parts[i].size);
        else
            unlink(fuzz_path(names[i]));
}

static void read_split(const struct data *d, enum data_split split, int vocab, size_t tokens) {
    uint64_t windows = data_windows(d, split);
    int32_t *window = malloc(tokens * sizeof *window);
    fuzz_require(windows > 0);
    for (uint64_t i = 0; i < windows + 2 && i < WINDOWS; i++) {
        struct data_error e = {0};
        fuzz_require(data_epoch(d, split, i) == i / windows);
        if (data_read(d, split, i, window, &e)) {
            for (size_t t = 0; t < tokens; t++) fuzz_require(window[t] >= 0 && window[t] < vocab);
        } else {
            fuzz_require(!e.internal);
            fuzz_check_error(e.line, sizeof e.line, fuzz_folder);
        }
    }
    free(window);
}

// The data is the same as itself, after a trip through a checkpoint too.
static void check_identity(const struct data *d) {
    char difference[256], error[FILE_ERROR];
    struct cJSON *now = data_identity(d);
    char *text = cJSON_Print(now);
    struct cJSON *before = file_parse_json(text, strlen(text), "identity", error, sizeof error);
    fuzz_require(before && data_identity_equal(before, now, difference, sizeof difference));
    cJSON_free(text);
    cJSON_Delete(before);
    cJSON_Delete(now);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char spec[SPEC], eval_spec[SPEC];
    fuzz_make_folder();
    if (!take_spec(spec, &data, &size) || !take_spec(eval_spec, &data, &size) || size < 3 || !spec[0]) return -1;
    int length = 1 + data[0] % 32, lookahead = 1 + data[1] % 4;
    write_files(data + 3, size - 3);

    fuzz_arm();
    if (setjmp(fuzz_stop) == 0) {
        struct data *d = data_open(spec, eval_spec, NULL, 7, length, lookahead);
        int vocab = data_settle_vocab(d, 0);
        read_split(d, DATA_TRAIN, vocab, (size_t)(length + lookahead));
        read_split(d, DATA_EVAL, vocab, (size_t)(length + lookahead));
        data_describe(d, stdout);
        check_identity(d);
        data_close(d);
    }
    fuzz_disarm();
    return 0;
}
