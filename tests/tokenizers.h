// Small trained vocabularies for tests, and their files with changes.
#ifndef MOK_TESTS_TOKENIZERS_H
#define MOK_TESTS_TOKENIZERS_H

#include "tests/folder.h"

#include <cjson/cJSON.h>

#include "data/files.h"
#include "data/tokenizer.h"

static const char *const NAMES[] = {"gpt2", "llama3", "deepseek"};
enum { VOCABULARIES = 3, GPT2 = 0, LLAMA3 = 1, DEEPSEEK = 2 };

static struct tokenizer *trained[VOCABULARIES];

static const char *reference_path(const char *name) {
    static char path[128];
    snprintf(path, sizeof path, "tests/reference/tokenizer_%s.json", name);
    return path;
}

static inline struct tokenizer *open_or_fail(const char *path) {
    char error[FILE_ERROR] = "";
    struct tokenizer *t = tokenizer_open(path, error, sizeof error);
    if (!t) fail_msg("%s", error);
    return t;
}

static inline int open_trained(void **state) {
    (void)state;
    for (int v = 0; v < VOCABULARIES; v++) trained[v] = open_or_fail(reference_path(NAMES[v]));
    return 0;
}

static inline int close_trained(void **state) {
    (void)state;
    for (int v = 0; v < VOCABULARIES; v++) tokenizer_close(trained[v]);
    return 0;
}

static inline struct token_list encode(const struct tokenizer *t, const char *text, size_t bytes, bool special) {
    struct token_list ids = {0};
    tokenizer_encode(t, text, bytes, special, &ids);
    return ids;
}

// The vocabulary of gpt2 with one member of the file replaced. Takes over value.
static inline void write_changed(const char *file, const char *member, cJSON *value) {
    char error[FILE_ERROR] = "";
    cJSON *json = file_read_json(reference_path("gpt2"), error, sizeof error);
    assert_non_null(json);
    assert_true(cJSON_ReplaceItemInObjectCaseSensitive(json, member, value));
    if (!file_write_json(at(file), json, error, sizeof error)) fail_msg("%s", error);
    cJSON_Delete(json);
}

static inline void check_round_trip(const struct tokenizer *t, const char *text, size_t bytes) {
    struct token_list ids = encode(t, text, bytes, false);
    size_t room = tokenizer_decode_room(t, ids.ids, ids.count), sum = 0;
    for (size_t i = 0; i < ids.count; i++) {
        assert_true(ids.ids[i] >= 0 && ids.ids[i] < tokenizer_vocab(t));
        assert_true(tokenizer_token_bytes(t, ids.ids[i]) > 0);
        sum += tokenizer_token_bytes(t, ids.ids[i]);
    }
    assert_int_equal(sum, bytes);
    assert_int_equal(room, bytes);
    char *back = malloc(room + 2);
    memset(back, '#', room + 2);
    assert_int_equal(tokenizer_decode(t, back, room + 1, ids.ids, ids.count), bytes);
    assert_memory_equal(back, text, bytes);
    assert_int_equal(back[bytes], '#');
    if (bytes > 1) { // a smaller capacity takes the beginning and writes nothing behind it
        memset(back, '#', room + 2);
        assert_int_equal(tokenizer_decode(t, back, bytes - 1, ids.ids, ids.count), bytes - 1);
        assert_memory_equal(back, text, bytes - 1);
        assert_int_equal(back[bytes - 1], '#');
    }
    free(back);
    free(ids.ids);
}

// The file with the first `from` replaced by `to`.
static inline char *replace(const char *text, const char *from, const char *to) {
    const char *place = strstr(text, from);
    if (!place) fail_msg("the file has no %s", from);
    size_t before = (size_t)(place - text), size = strlen(text) + strlen(to) + 1;
    char *out = malloc(size);
    assert_non_null(out);
    snprintf(out, size, "%.*s%s%s", (int)before, text, to, place + strlen(from));
    return out;
}

#define in_folder(test) cmocka_unit_test_setup_teardown(test, make_root, remove_root)

#endif
