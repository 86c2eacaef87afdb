#include "data/pretokenizer.h"

#include <cjson/cJSON.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "data/files.h"
#include "data/pattern.h"
#include "kernels/fail.h"

enum { MOST_STEPS = 32 };

struct pretokenizer_step {
    pcre2_code *code; // NULL: puts a space before a piece that has none there
    char *pattern;    // its source, for the fingerprint
    bool literal;
    bool drop_matches, drop_others;
};

// ---- reading ----

struct reader {
    struct pretokenizer *p;
    bool complete; // ByteLevel was read: it must be the last, as steps behind it would see its alphabet
    const char *path;
    char *error;
    size_t error_size;
};
#define refuse(r, format, ...) file_error((r)->error, (r)->error_size, "%s: " format, (r)->path, __VA_ARGS__)

static struct pretokenizer_step *add_step(struct reader *r) {
    if (r->p->count == MOST_STEPS) {
        refuse(r, "found more than %d steps in pre_tokenizer, wanted fewer", MOST_STEPS);
        return NULL;
    }
    return &r->p->steps[r->p->count++];
}

static bool add_split(struct reader *r, const char *pattern, bool literal, bool drop_matches, bool drop_others) {
    struct pretokenizer_step *step = add_step(r);
    if (!step) return false;
    char reason[512];
    *step = (struct pretokenizer_step){
        .literal = literal, .drop_matches = drop_matches, .drop_others = drop_others, .pattern = strdup(pattern)};
    if (!step->pattern) fail_internal(r->path, "no memory for a pattern");
    step->code = pattern_compile(pattern, literal, reason, sizeof reason);
    return step->code || refuse(r, "%s, in pre_tokenizer", reason);
}

static bool read_flag(struct reader *r, const cJSON *json, const char *name, bool without, bool *flag) {
    const cJSON *value = cJSON_GetObjectItemCaseSensitive(json, name);
    *flag = value ? cJSON_IsTrue(value) : without;
    return !value || cJSON_IsBool(value) ||
           refuse(r, "found no true or false for %s in pre_tokenizer, wanted it", name);
}

static bool read_byte_level(struct reader *r, const cJSON *json) {
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    bool prefix, regex;
    if (!read_flag(r, json, "add_prefix_space", true, &prefix) || !read_flag(r, json, "use_regex", true, &regex))
        return false;
    if (prefix) {
        struct pretokenizer_step *step = add_step(r);
        if (!step) return false;
        *step = (struct pretokenizer_step){0};
    }
    r->complete = true;
    return !regex || add_split(r, gpt2, false, false, false);
}

static bool read_split(struct reader *r, const cJSON *json) {
    const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(json, "pattern");
    const cJSON *regex = cJSON_GetObjectItemCaseSensitive(pattern, "Regex");
    const cJSON *string = cJSON_GetObjectItemCaseSensitive(pattern, "String");
    const cJSON *text = regex ? regex : string;
    if (!cJSON_IsString(text)) return refuse(r, "found a Split without %s, wanted one", "a Regex or String pattern");
    const cJSON *behavior = cJSON_GetObjectItemCaseSensitive(json, "behavior");
    const char *name = cJSON_IsString(behavior) ? behavior->valuestring : "(no string)";
    bool removed = strcmp(name, "Removed") == 0, invert;
    if (!removed && strcmp(name, "Isolated") != 0)
        return refuse(r, "found a Split with behavior %.100s, wanted Isolated or Removed", name);
    if (!read_flag(r, json, "invert", false, &invert)) return false;
    return add_split(r, text->valuestring, !regex, removed && !invert, removed && invert);
}

// Runs of digits stay together, or every digit stands alone.
static bool read_digits(struct reader *r, const cJSON *json) {
    bool individual;
    if (!read_flag(r, json, "individual_digits", false, &individual)) return false;
    return add_split(r, individual ? "\\p{N}" : "\\p{N}+", false, false, false);
}

static bool read_step(struct reader *r, const cJSON *json) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "(no type)";
    if (r->complete) return refuse(r, "found %.100s behind ByteLevel in pre_tokenizer, wanted ByteLevel last", name);
    if (strcmp(name, "Sequence") == 0) {
        const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "pretokenizers"), *item;
        if (!cJSON_IsArray(list)) return refuse(r, "found a %s without pretokenizers, wanted a list", name);
        cJSON_ArrayForEach(item, list) if (!read_step(r, item)) return false;
        return true;
    }
    if (strcmp(name, "ByteLevel") == 0) return read_byte_level(r, json);
    if (strcmp(name, "Split") == 0) return read_split(r, json);
    if (strcmp(name, "Digits") == 0) return read_digits(r, json);
    return refuse(r, "found %.100s in pre_tokenizer, wanted ByteLevel, Split, Digits or a Sequence of them", name);
}

bool pretokenizer_read(struct pretokenizer *p, const cJSON *json, const char *path, char *error, size_t error_size) {
    *p = (struct pretokenizer){.steps = calloc(MOST_STEPS, sizeof *p->steps)};
    if (!p->steps) fail_internal(path, "no memory for its pre_tokenizer");
    struct reader r = {.p = p, .path = path, .error = error, .error_size = error_size};
    if (cJSON_IsObject(json) && !read_step(&r, json)) return false;
    return r.complete ||
           refuse(&r, "found no %s, wanted it last; only byte-level BPE is read here", "ByteLevel in pre_tokenizer");
}

void pretokenizer_close(struct pretokenizer *p) {
    for (size_t i = 0; i < p->count; i++) {
        pcre2_code_free(p->steps[i].code);
        free(p->steps[i].pattern);
    }
    free(p->steps);
}

bool pretokenizer_keeps_text(const struct pretokenizer *p) {
    for (size_t i = 0; i < p->count; i++)
        if (!p->steps[i].code || p->steps[i].drop_matches || p->steps[i].drop_others) return false;
    return true;
}

void pretokenizer_add_to_hash(const struct pretokenizer *p, struct hash *h) {
    for (size_t i = 0; i < p->count; i++) {
        const struct pretokenizer_step *s = &p->steps[i];
        const char kind[] = {s->code != NULL, s->literal, s->drop_matches, s->drop_others};
        hash_add(h, kind, sizeof kind);
        if (s->pattern) hash_add(h, s->pattern, strlen(s->pattern) + 1);
    }
}

// ---- splitting ----

struct splitter {
    const struct pretokenizer *p;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    uint32_t given_up; // bit i: step i met the limit in this text
    pretokenizer_emit *emit;
    void *context;
};

static void split_piece(struct splitter *s, size_t step, const char *text, size_t bytes);

static void split_with_space(struct splitter *s, size_t step, const char *text, size_t bytes) {
    if (*text == ' ') {
        split_piece(s, step, text, bytes);
        return;
    }
    char *copy = malloc(bytes + 1);
    if (!copy) fail_internal("tokenizer", "no memory for %zu bytes", bytes + 1);
    copy[0] = ' ';
    memcpy(copy + 1, text, bytes);
    split_piece(s, step, copy, bytes + 1);
    free(copy);
}

// The first match at or behind `from`. A pattern that takes too many steps is given up for the rest of the text, so that
// no pattern hangs or fails on any text; no published one comes near the limit.
static bool find_match(struct splitter *s, size_t step, const char *text, size_t bytes, size_t from, size_t *start,
                       size_t *end) {
    if (s->given_up >> step & 1) return false;
    const pcre2_code *code = s->p->steps[step].code;
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int result = pcre2_match(code, subject, bytes, from, PCRE2_NO_UTF_CHECK, s->match, s->limits);
    if (result == PCRE2_ERROR_JIT_STACKLIMIT)
        result = pcre2_match(code, subject, bytes, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match, s->limits);
    if (result < 0 && result != PCRE2_ERROR_NOMATCH) s->given_up |= 1u << step;
    if (result < 0) return false;
    const size_t *places = pcre2_get_ovector_pointer(s->match);
    *start = places[0];
    *end = places[1];
    return *start <= *end;
}

static size_t character_bytes(const char *text, size_t bytes) {
    unsigned character;
    return pattern_read_utf8(text, bytes, &character);
}

// Matches and what is between them become pieces. As in Oniguruma's loop, an empty match right behind another match does
// not count; the search goes on one character later.
static void split_by_pattern(struct splitter *s, size_t step, const char *text, size_t bytes) {
    const struct pretokenizer_step *p = &s->p->steps[step];
    size_t from = 0, cut = 0, start, end;
    bool matched = false;
    while (from < bytes && find_match(s, step, text, bytes, from, &start, &end)) {
        if (start == end && matched && end == cut) {
            from += character_bytes(text + from, bytes - from);
            continue;
        }
        if (!p->drop_others) split_piece(s, step + 1, text + cut, start - cut);
        if (!p->drop_matches) split_piece(s, step + 1, text + start, end - start);
        cut = from = end;
        matched = true;
    }
    if (!p->drop_others) split_piece(s, step + 1, text + cut, bytes - cut);
}

static void split_piece(struct splitter *s, size_t step, const char *text, size_t bytes) {
    if (bytes == 0) return;
    if (step == s->p->count)
        s->emit(s->context, text, bytes);
    else if (s->p->steps[step].code)
        split_by_pattern(s, step, text, bytes);
    else
        split_with_space(s, step + 1, text, bytes);
}

// Bytes from the start on that are UTF-8.
static size_t valid_bytes(const char *text, size_t bytes) {
    size_t valid = 0;
    while (valid < bytes) {
        uint64_t eight;
        if (bytes - valid >= sizeof eight) {
            memcpy(&eight, text + valid, sizeof eight);
            if (!(eight & 0x8080808080808080ull)) {
                valid += sizeof eight;
                continue;
            }
        }
        size_t length = character_bytes(text + valid, bytes - valid);
        if (length == 0) break;
        valid += length;
    }
    return valid;
}

void pretokenizer_split(const struct pretokenizer *p, const char *text, size_t bytes, pretokenizer_emit *emit,
                        void *context) {
    enum { MATCH_LIMIT = 10000000 }; // PCRE2's usual one, but no matter how it was built
    struct splitter s = {.p = p, .emit = emit, .context = context};
    s.match = pcre2_match_data_create(1, NULL);
    s.limits = pcre2_match_context_create(NULL);
    if (!s.match || !s.limits) fail_internal("tokenizer", "no memory to match patterns");
    pcre2_set_match_limit(s.limits, MATCH_LIMIT);
    while (bytes > 0) {
        size_t valid = valid_bytes(text, bytes);
        split_piece(&s, 0, text, valid);
        if (valid < bytes) emit(context, text + valid++, 1);
        text += valid;
        bytes -= valid;
    }
    pcre2_match_data_free(s.match);
    pcre2_match_context_free(s.limits);
}
