// The "model" of tokenizer.json.
#include "data/bpe.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "data/added_tokens.h"
#include "data/byte_level.h"
#include "data/files.h"
#include "kernels/fail.h"

enum { MOST_TOKEN_BYTES = 1 << 16 };

// Where an error line goes.
struct report {
    const char *path;
    char *error;
    size_t size;
};
#define refuse(r, format, ...) file_error((r)->error, (r)->size, "%s: " format, (r)->path, __VA_ARGS__)

// ---- settings ----

static bool check_type(const cJSON *model, const struct report *r) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(model, "type");
    if (!cJSON_IsObject(model)) return refuse(r, "found %s, wanted one", "no object named model");
    if (!type) return true; // GPT-2's own file has none
    return (cJSON_IsString(type) && strcmp(type->valuestring, "BPE") == 0) ||
           refuse(r, "found a model of type %.100s, wanted BPE over bytes; other kinds of tokenizers are not read here",
                  cJSON_IsString(type) ? type->valuestring : "(not a string)");
}

static bool is_off(const cJSON *value) {
    return !value || cJSON_IsNull(value) || cJSON_IsFalse(value) || (cJSON_IsString(value) && !*value->valuestring) ||
           (cJSON_IsNumber(value) && value->valuedouble == 0);
}

// unk_token and fuse_unk do not matter: no byte is unknown.
static bool check_settings(const cJSON *model, const struct report *r) {
    static const char *const names[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!is_off(cJSON_GetObjectItemCaseSensitive(model, names[i])))
            return refuse(r, "found a model with %s, wanted one without; only byte-level BPE is read here", names[i]);
    const cJSON *ignore = cJSON_GetObjectItemCaseSensitive(model, "ignore_merges");
    return !ignore || cJSON_IsBool(ignore) || cJSON_IsNull(ignore) ||
           refuse(r, "found %s, wanted true or false", "no true or false for ignore_merges");
}

// ---- tokens ----

struct sizes {
    size_t vocab, bytes, merges;
};

static bool measure_vocab(const cJSON *vocab, struct sizes *sizes, const struct report *r) {
    if (!cJSON_IsObject(vocab)) return refuse(r, "found no %s in the model, wanted an object of tokens", "vocab");
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab) {
        uint64_t id;
        size_t bytes = strlen(item->string);
        if (!file_json_integer(item, &id) || id >= BPE_MOST_IDS)
            return refuse(r, "found an id of the token %.100s outside 0 to %d, wanted one inside", item->string,
                          BPE_MOST_IDS - 1);
        if (bytes > MOST_TOKEN_BYTES)
            return refuse(r, "found a token of %zu bytes, wanted at most %d", bytes, MOST_TOKEN_BYTES);
        if (id >= sizes->vocab) sizes->vocab = (size_t)id + 1;
        sizes->bytes += bytes;
    }
    return true;
}

static bool measure(const cJSON *model, const struct added_tokens *added, struct sizes *sizes, const struct report *r) {
    *sizes = (struct sizes){0};
    const cJSON *merges = cJSON_GetObjectItemCaseSensitive(model, "merges");
    if (!cJSON_IsArray(merges)) return refuse(r, "found no list of %s in the model, wanted one", "merges");
    if (!measure_vocab(cJSON_GetObjectItemCaseSensitive(model, "vocab"), sizes, r)) return false;
    sizes->merges = (size_t)cJSON_GetArraySize(merges);
    for (size_t i = 0; i < added->count; i++) {
        const struct added_token *t = &added->list[i];
        if ((size_t)t->id >= sizes->vocab) sizes->vocab = (size_t)t->id + 1;
        sizes->bytes += t->bytes;
    }
    return true;
}

// What a name in the file stands for: bytes, or itself where a character is not in the alphabet.
struct token_text {
    char text[MOST_TOKEN_BYTES];
    size_t bytes;
    bool named;
};

static void read_name(struct token_text *t, const char *name, size_t length) {
    t->named = !byte_level_bytes(name, length, t->text, &t->bytes);
    if (!t->named) return;
    memcpy(t->text, name, length);
    t->bytes = length;
}

static bool read_vocab(struct bpe *b, const cJSON *vocab, struct token_text *t, const struct report *r) {
    const cJSON *item;
    cJSON_ArrayForEach(item, vocab) {
        int32_t id = (int32_t)item->valuedouble;
        read_name(t, item->string, strlen(item->string));
        if (b->tokens[id].present) return refuse(r, "found the id %d twice in vocab, wanted one token for it", id);
        if (bpe_find(b, t->text, t->bytes, t->named) >= 0)
            return refuse(r, "found the token %.100s twice in vocab, wanted one id for it", item->string);
        bpe_add_token(b, id, t->text, t->bytes, t->named, true);
    }
    return true;
}

static bool find_bytes(struct bpe *b, const struct report *r) {
    for (int byte = 0; byte < 256; byte++) {
        char text = (char)(unsigned char)byte;
        b->byte_ids[byte] = bpe_find(b, &text, 1, false);
        if (b->byte_ids[byte] < 0)
            return refuse(r, "found no token for the byte %d, wanted all 256; only byte-level BPE is read here", byte);
    }
    return true;
}

// ---- added tokens ----

// The vocabulary may have it already: then with this id, and a text that is the same in the alphabet of bytes.
static bool read_added(struct bpe *b, const struct added_token *a, struct token_text *t, const struct report *r) {
    int32_t id = -1;
    if (a->bytes <= MOST_TOKEN_BYTES) {
        read_name(t, a->text, a->bytes);
        id = bpe_find(b, t->text, t->bytes, t->named);
    }
    struct bpe_token *token = &b->tokens[a->id];
    if (id >= 0 && id != a->id)
        return refuse(r, "found the added token %.100s with id %d and in vocab with %d, wanted one id", a->text, a->id,
                      id);
    if (id < 0 && token->present)
        return refuse(r, "found the id %d of the added token %.100s in use for another, wanted one token for it", a->id,
                      a->text);
    if (id >= 0 && (t->bytes != a->bytes || memcmp(t->text, a->text, a->bytes) != 0))
        return refuse(r, "found the added token %.100s, which vocab has as other bytes, wanted another name", a->text);
    if (id < 0) bpe_add_token(b, a->id, a->text, a->bytes, true, false);
    token->special = a->special;
    return true;
}

// ---- merges ----

// The names of both halves: "left right" or ["left", "right"].
static bool split_merge(const cJSON *item, const char *halves[2], size_t lengths[2]) {
    if (cJSON_IsString(item)) {
        const char *space = strchr(item->valuestring, ' ');
        if (!space || strchr(space + 1, ' ')) return false;
        halves[0] = item->valuestring;
        halves[1] = space + 1;
        lengths[0] = (size_t)(space - item->valuestring);
        lengths[1] = strlen(space + 1);
        return true;
    }
    if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != 2) return false;
    for (int i = 0; i < 2; i++) {
        const cJSON *half = cJSON_GetArrayItem(item, i);
        if (!cJSON_IsString(half)) return false;
        halves[i] = half->valuestring;
        lengths[i] = strlen(half->valuestring);
    }
    return true;
}

// Finds the ids of left, right and both together; ids[2] is -1 and so on for what the vocabulary does not have.
static bool find_halves(const struct bpe *b, struct token_text *t, const char *const halves[2], const size_t lengths[2],
                        int32_t ids[3]) {
    if (lengths[0] + lengths[1] > MOST_TOKEN_BYTES || lengths[0] == 0 || lengths[1] == 0) return false;
    size_t left, right;
    if (!byte_level_bytes(halves[0], lengths[0], t->text, &left)) return false;
    if (!byte_level_bytes(halves[1], lengths[1], t->text + left, &right)) return false;
    ids[0] = bpe_find(b, t->text, left, false);
    ids[1] = bpe_find(b, t->text + left, right, false);
    ids[2] = bpe_find(b, t->text, left + right, false);
    return ids[0] >= 0 && ids[1] >= 0 && ids[2] >= 0;
}

static bool read_merges(struct bpe *b, const cJSON *merges, struct token_text *t, const struct report *r) {
    const cJSON *item;
    size_t number = 0;
    cJSON_ArrayForEach(item, merges) {
        static const char version[] = "#version"; // the first line of merges.txt, that some converters left in
        const char *halves[2];
        size_t lengths[2];
        int32_t ids[3];
        if (cJSON_IsString(item) && strncmp(item->valuestring, version, sizeof version - 1) == 0) continue;
        if (!split_merge(item, halves, lengths))
            return refuse(r, "found something else at %zu of merges, wanted \"left right\" or [\"left\", \"right\"]",
                          number);
        if (!find_halves(b, t, halves, lengths, ids))
            return refuse(r,
                          "found %.*s and %.*s to merge (%zu of merges), wanted tokens of vocab for them and for both "
                          "together",
                          (int)(lengths[0] < 100 ? lengths[0] : 100), halves[0],
                          (int)(lengths[1] < 100 ? lengths[1] : 100), halves[1], number);
        bpe_add_merge(b, ids[0], ids[1], ids[2]);
        number++;
    }
    return true;
}

// ---- all of it ----

static bool read_tables(struct bpe *b, const cJSON *model, const struct added_tokens *added, const struct report *r) {
    struct token_text *t = malloc(sizeof *t);
    if (!t) fail_internal(r->path, "no memory to read its tokens");
    bool done = read_vocab(b, cJSON_GetObjectItemCaseSensitive(model, "vocab"), t, r) && find_bytes(b, r);
    for (size_t i = 0; done && i < added->count; i++) done = read_added(b, &added->list[i], t, r);
    done = done && read_merges(b, cJSON_GetObjectItemCaseSensitive(model, "merges"), t, r);
    free(t);
    return done;
}

bool bpe_read(struct bpe *b, const cJSON *model, const struct added_tokens *added, const char *path, char *error,
              size_t error_size) {
    struct report r = {path, error, error_size};
    struct sizes sizes;
    *b = (struct bpe){0};
    if (!check_type(model, &r) || !check_settings(model, &r) || !measure(model, added, &sizes, &r)) return false;
    bpe_create(b, sizes.vocab, sizes.bytes, sizes.merges);
    b->ignore_merges = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(model, "ignore_merges"));
    if (!read_tables(b, model, added, &r)) return false;
    bpe_mark_whole_words(b);
    return true;
}
