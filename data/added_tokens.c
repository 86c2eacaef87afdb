#include "data/added_tokens.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "data/bpe.h"
#include "data/files.h"
#include "kernels/fail.h"

// ---- reading ----

static bool read_flag(const cJSON *item, const char *name, bool *flag, const char *path, char *error,
                      size_t error_size) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(item, name);
    *flag = cJSON_IsTrue(value);
    return !value || cJSON_IsBool(value) ||
           file_error(error, error_size, "%s: found no true or false for %s of an added token, wanted one of them",
                      path, name);
}

// These take white space or look at the letters around the token: no published byte-level vocabulary asks for it but a
// few mask tokens, and decoding could not give the text back.
static bool refuse_strips(const cJSON *item, const char *path, char *error, size_t error_size) {
    static const char *const names[] = {"lstrip", "rstrip", "single_word"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        bool flag;
        if (!read_flag(item, names[i], &flag, path, error, error_size)) return false;
        if (flag)
            return file_error(error, error_size,
                              "%s: found %s for the added token %.100s, wanted false; remove the token", path, names[i],
                              cJSON_GetObjectItemCaseSensitive(item, "content")->valuestring);
    }
    return true;
}

static bool read_token(struct added_token *t, const cJSON *item, const char *path, char *error, size_t error_size) {
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(item, "content");
    uint64_t id;
    if (!cJSON_IsString(content) || !*content->valuestring)
        return file_error(error, error_size, "%s: found an added token without content, wanted a string", path);
    if (!file_json_integer(cJSON_GetObjectItemCaseSensitive(item, "id"), &id) || id >= BPE_MOST_IDS)
        return file_error(error, error_size,
                          "%s: found an id of the added token %.100s outside 0 to %d, wanted one inside", path,
                          content->valuestring, BPE_MOST_IDS - 1);
    *t = (struct added_token){.bytes = strlen(content->valuestring), .id = (int32_t)id};
    if (!refuse_strips(item, path, error, error_size) ||
        !read_flag(item, "special", &t->special, path, error, error_size) ||
        !read_flag(item, "normalized", &t->late, path, error, error_size))
        return false;
    t->text = strdup(content->valuestring);
    if (!t->text) fail_internal(path, "no memory for an added token of %zu bytes", t->bytes);
    return true;
}

// A text comes before the longer ones that begin with it.
static int compare_texts(const struct added_token *a, const struct added_token *b) {
    int order = memcmp(a->text, b->text, a->bytes < b->bytes ? a->bytes : b->bytes);
    return order ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static int compare_tokens(const void *left, const void *right) {
    const struct added_token *a = left, *b = right;
    return a->late != b->late ? a->late - b->late : compare_texts(a, b);
}

static int compare_ids(const void *left, const void *right) {
    const struct added_token *a = left, *b = right;
    return (a->id > b->id) - (a->id < b->id);
}

static bool check_unique(const struct added_token *a, const struct added_token *b, const char *path, char *error,
                         size_t error_size) {
    if (a->id == b->id)
        return file_error(error, error_size,
                          "%s: found the id %d for the added tokens %.100s and %.100s, wanted one each", path, a->id,
                          a->text, b->text);
    return compare_texts(a, b) != 0 ||
           file_error(error, error_size, "%s: found the added token %.100s twice, wanted once", path, a->text);
}

static void index_first_bytes(struct added_tokens *a) {
    size_t next = 0;
    for (int late = 0; late < 2; late++) {
        for (int byte = 0; byte < 257; byte++) {
            a->first[late][byte] = next;
            while (next < a->count && a->list[next].late == late && (unsigned char)*a->list[next].text == byte) next++;
        }
    }
}

bool added_tokens_read(struct added_tokens *a, const cJSON *json, const char *path, char *error, size_t error_size) {
    *a = (struct added_tokens){0};
    if (!json || cJSON_IsNull(json)) return true;
    if (!cJSON_IsArray(json))
        return file_error(error, error_size, "%s: found no list in added_tokens, wanted one", path);
    size_t size = (size_t)cJSON_GetArraySize(json);
    a->list = calloc(size ? size : 1, sizeof *a->list);
    if (!a->list) fail_internal(path, "no memory for %zu added tokens", size);
    const cJSON *item;
    cJSON_ArrayForEach(item, json) if (!read_token(&a->list[a->count++], item, path, error, error_size)) return false;
    qsort(a->list, a->count, sizeof *a->list, compare_ids);
    for (size_t i = 1; i < a->count; i++)
        if (!check_unique(&a->list[i - 1], &a->list[i], path, error, error_size)) return false;
    qsort(a->list, a->count, sizeof *a->list, compare_tokens);
    for (size_t i = 1; i < a->count; i++)
        if (!check_unique(&a->list[i - 1], &a->list[i], path, error, error_size)) return false;
    index_first_bytes(a);
    return true;
}

void added_tokens_close(struct added_tokens *a) {
    for (size_t i = 0; i < a->count; i++) free(a->list[i].text);
    free(a->list);
}

// ---- finding ----

// The longest token that text begins with: byte by byte, the part of the list that agrees with it gets smaller.
static const struct added_token *find_longest(const struct added_tokens *a, bool late, const char *text, size_t bytes) {
    size_t low = a->first[late][(unsigned char)*text], high = a->first[late][(unsigned char)*text + 1];
    const struct added_token *longest = NULL;
    for (size_t depth = 1; low < high; depth++) {
        if (a->list[low].bytes == depth) longest = &a->list[low++];
        if (depth == bytes) break;
        unsigned char wanted = (unsigned char)text[depth];
        while (low < high && (unsigned char)a->list[low].text[depth] < wanted) low++;
        while (low < high && (unsigned char)a->list[high - 1].text[depth] > wanted) high--;
    }
    return longest;
}

const struct added_token *added_tokens_next(const struct added_tokens *a, bool late, const char *text, size_t bytes,
                                            size_t *at) {
    const size_t *first = a->first[late];
    if (first[0] == first[256]) return NULL;
    for (; *at < bytes; ++*at) {
        unsigned char byte = (unsigned char)text[*at];
        if (first[byte] == first[byte + 1]) continue;
        const struct added_token *found = find_longest(a, late, text + *at, bytes - *at);
        if (found) return found;
    }
    return NULL;
}

const struct added_token *added_tokens_find(const struct added_tokens *a, const char *text, size_t bytes) {
    for (int late = 0; late < 2 && bytes; late++) {
        const struct added_token *found = find_longest(a, late, text, bytes);
        if (found && found->bytes == bytes) return found;
    }
    return NULL;
}
