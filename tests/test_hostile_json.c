// JSON that a fuzzer would hardly write: very deep, very large, and with what the grammar allows but nobody expects.
#include <cjson/cJSON.h>

#include "data/files.h"
#include "model/options.h"
#include "model/safetensors.h"
#include "tests/folder.h"

enum { MIB = 1 << 20, MOST = 100 * MIB }; // the largest JSON file that is read

static void fill_file(const char *name, char byte, size_t bytes) {
    char *text = malloc(bytes);
    assert_non_null(text);
    memset(text, byte, bytes);
    write_file(name, text, bytes);
    free(text);
}

static void assert_refused(const char *name, const char *why) {
    char error[FILE_ERROR] = "";
    assert_null(file_read_json(at(name), error, sizeof error));
    assert_memory_equal(error, at(name), strlen(at(name)));
    assert_contains(error, why);
}

static struct cJSON *parse(const char *text) {
    char error[FILE_ERROR] = "";
    struct cJSON *json = file_parse_json(text, strlen(text), "text", error, sizeof error);
    if (!json) fail_msg("%s: %s", text, error);
    return json;
}

// Whether a safetensors file of this header and no data opens.
static bool opens(const char *header, char *error, size_t error_size) {
    size_t length = strlen(header);
    char *file = calloc(1, 8 + length);
    assert_non_null(file);
    for (int i = 0; i < 8; i++) file[i] = (char)((uint64_t)length >> (8 * i));
    memcpy(file + 8, header, length);
    write_file("hostile.safetensors", file, 8 + length);
    free(file);
    struct safetensors s;
    bool opened = safetensors_open(&s, at("hostile.safetensors"), error, error_size);
    if (opened) safetensors_close(&s);
    return opened;
}

// A parser that calls itself for every bracket would run out of stack.
static void nesting_of_a_million_is_refused(void **state) {
    (void)state;
    const size_t depth = 1000000, pair = strlen("{\"a\":");
    char *text = malloc(depth * pair + depth + 2), *next = text, error[FILE_ERROR] = "";
    for (size_t i = 0; i < depth; i++) next = stpcpy(next, "{\"a\":");
    next = stpcpy(next, "1");
    memset(next, '}', depth);
    next[depth] = 0;
    assert_null(file_parse_json(text, strlen(text), "deep", error, sizeof error));
    assert_contains(error, "deep: found no JSON");
    assert_false(opens(text, error, sizeof error));
    assert_contains(error, "found no JSON");
    free(text);
}

static void hundred_mebibytes_of_brackets_are_refused(void **state) {
    (void)state;
    fill_file("brackets.json", '[', MOST);
    assert_refused("brackets.json", "found no JSON");
    fill_file("spaces.json", ' ', MOST);
    assert_refused("spaces.json", "found no JSON");
}

// By its size, before it is read: the file takes no room on the disk.
static void file_that_is_too_large_is_refused(void **state) {
    (void)state;
    write_file("large.json", "{}", 2);
    assert_int_equal(truncate(at("large.json"), (off_t)MOST + 1), 0);
    assert_refused("large.json", "wanted at most 104857600");
}

// One byte of it missing, at every place.
static void cut_object_is_refused(void **state) {
    (void)state;
    const char *text = "{\"a\": [1, {\"b\": \"c\\u00e9\"}, null], \"d\": 1e3}";
    for (size_t length = 0; length < strlen(text); length++) {
        char error[FILE_ERROR] = "";
        // In memory of its own, so that a sanitizer sees a read behind the end.
        char *cut = malloc(length + 1);
        memcpy(cut, text, length);
        char *exact = realloc(cut, length ? length : 1);
        assert_null(file_parse_json(exact, length, "cut", error, sizeof error));
        assert_contains(error, "cut: found no JSON");
        free(exact);
    }
}

static void numbers_beyond_a_double_are_no_integers(void **state) {
    (void)state;
    static const char *const wrong[] = {
        "1e999", "-1e999", "-1",   "0.5", "1e-999999", "9007199254740994", "123456789012345678901234567890",
        "\"1\"", "true",   "null", "[1]"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[64];
        uint64_t value;
        snprintf(text, sizeof text, "{\"n\":%s}", wrong[i]);
        struct cJSON *json = parse(text);
        bool zero = strcmp(wrong[i], "1e-999999") == 0; // too small is 0, as in every reader of doubles
        if (file_json_integer(cJSON_GetObjectItem(json, "n"), &value) != zero)
            fail_msg("%s was %staken for an integer", wrong[i], zero ? "not " : "");
        cJSON_Delete(json);
    }
}

static void numbers_beyond_a_double_are_no_options(void **state) {
    (void)state;
    static const char *const wrong[] = {"{\"lr\":1e999}", "{\"steps\":1e999}", "{\"seed\":1e999}", "{\"seed\":-1e999}"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct options o;
        options_set_preset(&o, "tiny");
        struct cJSON *json = parse(wrong[i]);
        if (!options_from_json(&o, json)) fail_msg("%s was taken", wrong[i]);
        cJSON_Delete(json);
    }
}

// The second would be read by one program and the first by another.
static void repeated_keys_are_refused_where_they_matter(void **state) {
    (void)state;
    char error[FILE_ERROR] = "";
    struct options o;
    options_set_preset(&o, "tiny");
    struct cJSON *json = parse("{\"lr\":0.1,\"lr\":0.2}");
    assert_string_equal(options_from_json(&o, json), "member \"lr\" stands there twice");
    cJSON_Delete(json);
    assert_false(opens("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
                       "\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                       error, sizeof error));
    assert_contains(error, "found tensor a twice");
}

// Text ends at a zero in C, so names that differ behind one are the same name.
static void names_with_a_zero_are_no_two_tensors(void **state) {
    (void)state;
    char error[FILE_ERROR] = "";
    assert_false(opens("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
                       "\"a\\u0000b\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                       error, sizeof error));
    assert_contains(error, "found tensor a twice");
}

// Editors of one system put the three bytes of a byte order mark before the text.
static void byte_order_mark_is_skipped(void **state) {
    (void)state;
    uint64_t value = 0;
    struct cJSON *json = parse("\xef\xbb\xbf{\"a\":7}\r\n");
    assert_true(file_json_integer(cJSON_GetObjectItem(json, "a"), &value));
    assert_int_equal(value, 7);
    cJSON_Delete(json);
}

static void what_follows_the_object_is_refused(void **state) {
    (void)state;
    static const char *const wrong[] = {"{} {}", "{}x", "{},", "[{}]", "null", "\"{}\"", ""};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char error[FILE_ERROR] = "";
        if (file_parse_json(wrong[i], strlen(wrong[i]), "text", error, sizeof error))
            fail_msg("%s was taken", wrong[i]);
        assert_contains(error, "text: found no JSON");
    }
    char error[FILE_ERROR] = "";
    assert_null(file_parse_json("{}\0", 3, "zero", error, sizeof error)); // a zero is no white space
}

// As many tensors as fit a header of some megabytes: nothing may take their number squared.
static void many_empty_tensors_open(void **state) {
    (void)state;
    const int count = 50000;
    char *header = malloc((size_t)count * 80), *next = header, error[FILE_ERROR] = "";
    for (int i = 0; i < count; i++)
        next += sprintf(next, "%c\"t%d\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}", i ? ',' : '{', i);
    strcpy(next, "}");
    assert_true(opens(header, error, sizeof error));
    free(header);
}

#define test(name) cmocka_unit_test_setup_teardown(name, make_root, remove_root)

int main(void) {
    const struct CMUnitTest tests[] = {
        test(nesting_of_a_million_is_refused),
        test(hundred_mebibytes_of_brackets_are_refused),
        test(file_that_is_too_large_is_refused),
        test(cut_object_is_refused),
        test(numbers_beyond_a_double_are_no_integers),
        test(numbers_beyond_a_double_are_no_options),
        test(repeated_keys_are_refused_where_they_matter),
        test(names_with_a_zero_are_no_two_tensors),
        test(byte_order_mark_is_skipped),
        test(what_follows_the_object_is_refused),
        test(many_empty_tensors_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
