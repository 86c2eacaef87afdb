// What a resumed run must find again: the identity of its data, and the words for what is another.
#include "tests/shards.h"
#include "tests/test.h"

#include <cjson/cJSON.h>

#include "data/data.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

enum { T = 16 };

// As a checkpoint keeps it: written and read.
static cJSON *stored(const cJSON *identity) {
    char *text = cJSON_Print(identity);
    cJSON *read = cJSON_Parse(text);
    assert_non_null(read);
    cJSON_free(text);
    return read;
}

static cJSON *encoded_identity(const char *spec, const char *eval_spec, const struct tokenizer *tokenizer, int length) {
    struct data *d = data_open(spec, eval_spec, tokenizer, 1, length, 1);
    cJSON *identity = data_identity(d);
    data_close(d);
    return identity;
}

static cJSON *identity_of(const char *spec, const char *eval_spec, int length) {
    return encoded_identity(spec, eval_spec, NULL, length);
}

// Compares as a resumed run does: before comes from a file. Deletes both.
static void assert_difference(cJSON *before, cJSON *now, const char *words) {
    char difference[512] = "";
    cJSON *old = stored(before);
    bool equal = data_identity_equal(old, now, difference, sizeof difference);
    if (equal && words) fail_msg("no difference, wanted: %s", words);
    if (!equal && !words) fail_msg("found: %s, wanted no difference", difference);
    if (words) assert_string_equal(difference, words);
    cJSON *new = stored(now);
    assert_int_equal(data_identity_equal(old, new, difference, sizeof difference), equal);
    cJSON_Delete(new);
    cJSON_Delete(old);
    cJSON_Delete(before);
    cJSON_Delete(now);
}

static void write_three(void) {
    write_shard("a.bin", 2, 0, 100, 0, 1);
    write_shard("b.bin", 2, 0, 200, 7, 2);
    write_shard("c.bin", 2, 0, 100, 9, 3);
}

static cJSON *identity_of_all(void) { return identity_of(at("?.bin"), NULL, T); }

static void identity_lists_files_and_windows(void **state) {
    (void)state;
    write_three();
    cJSON *identity = identity_of_all(), *json = stored(identity);
    cJSON *files = cJSON_GetObjectItem(json, "files"), *b = cJSON_GetArrayItem(files, 1);
    assert_int_equal(cJSON_GetArraySize(files), 3);
    assert_string_equal(cJSON_GetObjectItem(b, "name")->valuestring, "b.bin");
    assert_int_equal(cJSON_GetObjectItem(b, "bytes")->valueint, 1424);
    assert_int_equal(strspn(cJSON_GetObjectItem(b, "hash")->valuestring, "0123456789abcdef"), 16);
    assert_int_equal(cJSON_GetObjectItem(json, "tokens")->valueint, 400);
    assert_int_equal(cJSON_GetObjectItem(json, "windows")->valueint, 23); // of 24
    assert_int_equal(cJSON_GetObjectItem(json, "length")->valueint, T);
    assert_true(cJSON_IsTrue(cJSON_GetObjectItem(json, "shards")));
    assert_null(cJSON_GetObjectItem(json, "tokenizer"));
    assert_null(cJSON_GetObjectItem(json, "vocab"));
    cJSON_Delete(json);
    cJSON_Delete(identity);
}

static void the_same_files_elsewhere_are_the_same_data(void **state) {
    (void)state;
    write_three();
    cJSON *before = identity_of_all();
    assert_int_equal(mkdir(at("new"), 0700), 0);
    assert_int_equal(rename(at("a.bin"), at("new/1")) | rename(at("b.bin"), at("new/2")), 0);
    assert_int_equal(rename(at("c.bin"), at("new/3")), 0);
    assert_difference(before, identity_of(at("new/*"), NULL, T), NULL);
}

static void other_shards_are_told_in_words(void **state) {
    (void)state;
    write_three();
    cJSON *before = identity_of_all();
    write_shard("d.bin", 2, 0, 100, 9, 3);
    assert_difference(before, identity_of_all(), "3 files before, 4 now");
    unlink(at("d.bin"));

    before = identity_of_all();
    assert_int_equal(rename(at("a.bin"), at("x.bin")), 0);
    assert_difference(before, identity_of_all(), "the same 3 files in another order");
    assert_int_equal(rename(at("x.bin"), at("a.bin")), 0);

    before = identity_of_all();
    write_shard("b.bin", 2, 0, 200, 8, 2);
    assert_difference(before, identity_of_all(), "file 2 of 3 (b.bin): other content");

    before = identity_of_all();
    change_byte("c.bin", TOKEN_FILE_HEADER + 199);
    assert_difference(before, identity_of_all(), "file 3 of 3 (c.bin): other content");

    before = identity_of_all();
    write_shard("a.bin", 2, 0, 101, 0, 1);
    assert_difference(before, identity_of_all(), "file 1 of 3 (a.bin): 1224 bytes before, 1226 now");
}

static void another_cut_into_windows_is_told(void **state) {
    (void)state;
    write_three();
    char held_out[128], not_held_out[128];
    snprintf(held_out, sizeof held_out,
             "23 sequences before, 24 now: evaluation data was held out before and is not now");
    snprintf(not_held_out, sizeof not_held_out,
             "24 sequences before, 23 now: evaluation data was not held out before and is held out now");
    assert_difference(identity_of_all(), identity_of(at("?.bin"), at("a.bin"), T), held_out);
    assert_difference(identity_of(at("?.bin"), at("a.bin"), T), identity_of_all(), not_held_out);
    assert_difference(identity_of(at("?.bin"), at("a.bin"), T), identity_of(at("?.bin"), at("b.bin"), T), NULL);
    assert_difference(identity_of_all(), identity_of(at("?.bin"), NULL, 8), "sequences of 16 tokens before, 8 now");
}

// A hash in the header stands for the ids, so that the file need not be read.
static void a_hash_in_the_header_is_trusted(void **state) {
    (void)state;
    char error[FILE_ERROR];
    for (int32_t k = 0; k < 2; k++) {
        struct token_writer w;
        int32_t ids[100] = {k};
        assert_true(token_writer_begin(&w, at(k ? "other" : "h.bin"), 257, 0, error, sizeof error));
        assert_true(token_writer_append(&w, ids, 100, error, sizeof error));
        assert_true(token_writer_finish(&w, error, sizeof error));
    }
    cJSON *before = identity_of(at("h.bin"), NULL, T);
    change_byte("h.bin", TOKEN_FILE_HEADER); // ./tokenize --check finds this
    assert_difference(before, identity_of(at("h.bin"), NULL, T), NULL);
    assert_difference(identity_of(at("h.bin"), NULL, T), identity_of(at("other"), NULL, T),
                      "file 1 of 1 (other): other content");
    before = identity_of(at("h.bin"), NULL, T);
    set_tokenizer("h.bin", 7); // the same ids of another tokenizer
    assert_difference(before, identity_of(at("h.bin"), NULL, T), "file 1 of 1 (h.bin): other content");
}

// More than 256 MiB: blocks of it, the last bytes among them.
static void large_files_are_sampled(void **state) {
    (void)state;
    const uint32_t count = 150u << 20;
    if (!write_sparse_shard("l.bin", count, 1)) skip();
    cJSON *before = identity_of(at("l.bin"), NULL, T), *same = identity_of(at("l.bin"), NULL, T);
    assert_true(write_sparse_shard("l.bin", count, 2));
    assert_difference(before, identity_of(at("l.bin"), NULL, T), "file 1 of 1 (l.bin): other content");
    assert_true(write_sparse_shard("l.bin", count, 1));
    change_byte("l.bin", TOKEN_FILE_HEADER);
    assert_difference(same, identity_of(at("l.bin"), NULL, T), "file 1 of 1 (l.bin): other content");
}

static void text_and_stories_have_identities(void **state) {
    (void)state;
    char text[400];
    memset(text, 'a', sizeof text);
    write_file("text", text, sizeof text);
    assert_difference(identity_of("stories", NULL, T), identity_of("stories", NULL, 2 * T), NULL);
    assert_difference(identity_of(at("text"), NULL, T), identity_of(at("text"), NULL, T), NULL);
    assert_difference(identity_of(at("text"), NULL, T), identity_of("stories", NULL, T),
                      "files before, the built-in stories now");
    assert_difference(identity_of("stories", NULL, T), identity_of(at("text"), NULL, T),
                      "the built-in stories before, files now");
    cJSON *before = identity_of(at("text"), NULL, T);
    change_byte("text", 399);
    assert_difference(before, identity_of(at("text"), NULL, T), "file 1 of 1 (text): other content");
    before = identity_of("stories", NULL, T);
    cJSON_ReplaceItemInObject(before, "stories", cJSON_CreateString("0123456789abcdef"));
    assert_difference(before, identity_of("stories", NULL, T), "the built-in stories are others than those before");
}

static void the_tokenizer_belongs_to_the_data(void **state) {
    (void)state;
    char error[FILE_ERROR];
    struct tokenizer *a = tokenizer_open("tests/reference/tokenizer_gpt2.json", error, sizeof error);
    struct tokenizer *b = tokenizer_open("tests/reference/tokenizer_llama3.json", error, sizeof error);
    struct tokenizer *bytes = tokenizer_open_bytes();
    assert_true(a && b);
    char text[400];
    memset(text, 'a', sizeof text);
    write_file("text", text, sizeof text);
    const char *specs[] = {"stories", at("text")};
    for (int k = 0; k < 2; k++) {
        const char *spec = specs[k];
        assert_difference(encoded_identity(spec, spec, a, 8), encoded_identity(spec, spec, a, 8), NULL);
        assert_difference(encoded_identity(spec, spec, bytes, 8), encoded_identity(spec, spec, NULL, 8), NULL);
        assert_difference(encoded_identity(spec, spec, a, 8), encoded_identity(spec, spec, b, 8),
                          "another tokenizer than before");
        assert_difference(encoded_identity(spec, spec, NULL, 8), encoded_identity(spec, spec, a, 8),
                          "text was bytes before and a tokenizer encodes it now");
        assert_difference(encoded_identity(spec, spec, a, 8), encoded_identity(spec, spec, bytes, 8),
                          "a tokenizer encoded the text before and it is bytes now");
    }
    write_three(); // of llm.c: the headers say nothing
    const char *shards = at("?.bin");
    const struct tokenizer *const all[] = {a, b, bytes, NULL};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++)
            assert_difference(encoded_identity(shards, NULL, all[i], T), encoded_identity(shards, NULL, all[k], T),
                              i == k || !all[i] ? NULL
                              : all[k]          ? "another tokenizer than before"
                                                : "a tokenizer was known before and none is known now");
    assert_difference(encoded_identity(shards, NULL, a, T), encoded_identity(at("text"), NULL, a, T),
                      "3 files before, 1 now");
    tokenizer_close(a);
    tokenizer_close(b);
    tokenizer_close(bytes);
}

// Blocks are all that is read of more than 256 MiB: of less, every byte counts, and so does the size of zeros.
static void all_of_a_small_file_and_the_size_of_a_large_one_count(void **state) {
    (void)state;
    write_file("text", "", 0);
    assert_int_equal(truncate(at("text"), 10 << 20), 0);
    cJSON *before = identity_of(at("text"), NULL, T);
    change_byte("text", 37000); // between blocks of 4 KiB, one in 10 KiB
    assert_difference(before, identity_of(at("text"), NULL, T), "file 1 of 1 (text): other content");
    write_file("text", "", 0);
    assert_int_equal(truncate(at("text"), 300 << 20), 0);
    before = identity_of(at("text"), NULL, T);
    assert_int_equal(truncate(at("text"), (300 << 20) + 1), 0);
    assert_difference(before, identity_of(at("text"), NULL, T),
                      "file 1 of 1 (text): 314572800 bytes before, 314572801 now");
}

// It comes from a checkpoint, whose bytes may be any.
static void damaged_identities_are_other_data(void **state) {
    (void)state;
    static const char *const texts[] = {"{}",
                                        "[]",
                                        "{\"files\":1}",
                                        "{\"files\":[]}",
                                        "{\"files\":[1,2,3]}",
                                        "{\"files\":[{},{},{}]}",
                                        "{\"files\":[{\"hash\":1},{\"hash\":null},{\"hash\":[]}],\"tokens\":-1}",
                                        "{\"stories\":{}}"};
    write_three();
    cJSON *now = identity_of_all();
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char difference[512] = "";
        cJSON *before = cJSON_Parse(texts[i]);
        assert_false(data_identity_equal(before, now, difference, sizeof difference));
        assert_true(strlen(difference) > 0);
        cJSON_Delete(before);
    }
    cJSON_Delete(now);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)
int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(identity_lists_files_and_windows),  TEST(the_same_files_elsewhere_are_the_same_data),
        TEST(other_shards_are_told_in_words),    TEST(another_cut_into_windows_is_told),
        TEST(a_hash_in_the_header_is_trusted),   TEST(large_files_are_sampled),
        TEST(text_and_stories_have_identities),  TEST(all_of_a_small_file_and_the_size_of_a_large_one_count),
        TEST(the_tokenizer_belongs_to_the_data), TEST(damaged_identities_are_other_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
