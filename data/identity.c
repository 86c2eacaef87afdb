#include "data/identity.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/data.h"
#include "data/hash.h"
#include "data/stories.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "kernels/fail.h"

// ---- fingerprints ----

// Files are hashed whole as long as there are at most WHOLE bytes of them. Of more, the size and SAMPLES blocks of each
// file, evenly spread, the first and the last bytes among them, are hashed: that tells other data from the same, though
// not every damaged byte, and does not read a terabyte at every start.
enum { WHOLE = 256 << 20, SAMPLES = 1024, SAMPLE_BYTES = 4096 };

static bool hash_range(struct hash *h, int descriptor, uint64_t begin, uint64_t end) {
    for (size_t piece; begin < end; begin += piece) {
        char bytes[1 << 16];
        piece = end - begin < sizeof bytes ? (size_t)(end - begin) : sizeof bytes;
        errno = 0;
        if (file_read_at(descriptor, bytes, piece, begin) != (ssize_t)piece) return false;
        hash_add(h, bytes, piece);
    }
    return true;
}

static bool hash_samples(struct hash *h, int descriptor, uint64_t bytes) {
    uint64_t last = bytes > SAMPLE_BYTES ? bytes - SAMPLE_BYTES : 0;
    for (uint64_t i = 0; i < SAMPLES; i++) {
        uint64_t begin = last * i / (SAMPLES - 1), end = bytes - begin < SAMPLE_BYTES ? bytes : begin + SAMPLE_BYTES;
        if (!hash_range(h, descriptor, begin, end)) return false;
    }
    return true;
}

// Reads `size` bytes of a file in the way that suits it.
enum extent { EXTENT_HEADER, EXTENT_SAMPLES, EXTENT_ALL };

static bool hash_file(uint64_t *hash, int descriptor, uint64_t bytes, enum extent extent) {
    struct hash h = hash_begin();
    hash_add(&h, &bytes, sizeof bytes);
    bool done = extent == EXTENT_SAMPLES
                    ? hash_samples(&h, descriptor, bytes)
                    : hash_range(&h, descriptor, 0, extent == EXTENT_ALL ? bytes : TOKEN_FILE_HEADER);
    *hash = hash_end(&h);
    return done;
}

static uint64_t hash_stories(void) {
    struct hash h = hash_begin();
    uint64_t rng = 1;
    for (int i = 0; i < 8; i++) {
        char story[STORIES_MAX_BYTES];
        hash_add(&h, story, stories_write(&rng, story));
    }
    return hash_end(&h);
}

// ---- the object ----

static void add_hash(struct cJSON *object, const char *name, uint64_t hash) {
    char digits[17];
    snprintf(digits, sizeof digits, "%016" PRIx64, hash);
    cJSON_AddStringToObject(object, name, digits);
}

static bool add_file(struct cJSON *files, const char *path, int descriptor, uint64_t bytes, enum extent extent,
                     struct data_error *e) {
    uint64_t hash;
    if (!hash_file(&hash, descriptor, bytes, extent)) {
        e->internal = errno != 0;
        return file_error(e->line, sizeof e->line,
                          "%s: cannot be read (%s), wanted %" PRIu64 " bytes; do not change it during a run", path,
                          errno ? strerror(errno) : "it has become shorter", bytes);
    }
    struct cJSON *file = cJSON_CreateObject();
    const char *slash = strrchr(path, '/');
    cJSON_AddStringToObject(file, "name", slash ? slash + 1 : path);
    file_json_add_integer(file, "bytes", bytes);
    add_hash(file, "hash", hash);
    cJSON_AddItemToArray(files, file);
    return true;
}

static bool add_shards(struct cJSON *files, const struct source *s, struct data_error *e) {
    uint64_t bytes = 0; // of shards whose header has no hash
    for (size_t i = 0; i < s->shard_count; i++) bytes += s->shards[i].hash ? 0 : token_file_bytes(&s->shards[i]);
    for (size_t i = 0; i < s->shard_count; i++) {
        const struct token_file *f = &s->shards[i];
        enum extent extent = f->hash ? EXTENT_HEADER : bytes <= WHOLE ? EXTENT_ALL : EXTENT_SAMPLES;
        if (!add_file(files, f->path, f->fd, token_file_bytes(f), extent, e)) return false;
    }
    return true;
}

static bool add_files(struct cJSON *identity, const struct source *s, struct data_error *e) {
    struct cJSON *files = cJSON_AddArrayToObject(identity, "files");
    file_json_add_integer(identity, "tokens", s->tokens);
    if (s->kind == SOURCE_SHARDS) {
        cJSON_AddTrueToObject(identity, "shards");
        return add_shards(files, s, e);
    }
    return add_file(files, s->spec, s->text, s->text_bytes, s->text_bytes <= WHOLE ? EXTENT_ALL : EXTENT_SAMPLES, e);
}

struct cJSON *source_identity(const struct source *s, struct data_error *e) {
    struct cJSON *identity = cJSON_CreateObject();
    if (s->kind == SOURCE_STORIES) {
        add_hash(identity, "stories", hash_stories());
    } else if (!add_files(identity, s, e)) {
        cJSON_Delete(identity);
        return NULL;
    }
    if (s->tokenizer) add_hash(identity, "tokenizer", tokenizer_hash(s->tokenizer));
    return identity;
}

// ---- comparison ----

// One side of it. It may come from a damaged checkpoint: what is not there is NULL, and integers are 0.
struct side {
    const struct cJSON *files;
    const char *stories, *tokenizer;
    bool shards;
    uint64_t tokens, length, windows;
};

static const char *text_of(const struct cJSON *object, const char *name) {
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
}

// Read from a file it is a number; as file_json_add_integer made it, its digits.
static uint64_t integer_of(const struct cJSON *object, const char *name) {
    const struct cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    uint64_t value = 0;
    if (cJSON_IsRaw(item)) return strtoull(item->valuestring, NULL, 10);
    return file_json_integer(item, &value) ? value : 0;
}

static struct side side_of(const struct cJSON *identity) {
    return (struct side){.files = cJSON_GetObjectItemCaseSensitive(identity, "files"),
                         .stories = text_of(identity, "stories"),
                         .tokenizer = text_of(identity, "tokenizer"),
                         .shards = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(identity, "shards")),
                         .tokens = integer_of(identity, "tokens"),
                         .length = integer_of(identity, "length"),
                         .windows = integer_of(identity, "windows")};
}

static bool same_text(const char *a, const char *b) { return a == b || (a && b && strcmp(a, b) == 0); }

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// The hashes of the files, sorted; for the caller to free.
static const char **sorted_hashes(const struct cJSON *files, size_t count) {
    const char **hashes = malloc(sizeof *hashes * count);
    if (!hashes) fail_internal("data", "found no memory for the hashes of %zu files", count);
    const struct cJSON *file;
    size_t i = 0;
    cJSON_ArrayForEach(file, files) {
        const char *hash = text_of(file, "hash");
        hashes[i++] = hash ? hash : "";
    }
    qsort(hashes, count, sizeof *hashes, compare_names);
    return hashes;
}

static bool same_in_another_order(const struct cJSON *before, const struct cJSON *now, size_t count) {
    const char **a = sorted_hashes(before, count), **b = sorted_hashes(now, count);
    size_t same = 0;
    while (same < count && strcmp(a[same], b[same]) == 0) same++;
    free(a);
    free(b);
    return same == count;
}

static bool compare_file(const struct cJSON *before, const struct cJSON *now, size_t number, size_t count,
                         char *difference, size_t size) {
    if (same_text(text_of(before, "hash"), text_of(now, "hash"))) return true;
    const char *name = text_of(now, "name");
    uint64_t old_bytes = integer_of(before, "bytes"), bytes = integer_of(now, "bytes");
    if (old_bytes == bytes)
        return file_error(difference, size, "file %zu of %zu (%.200s): other content", number, count, name ? name : "");
    return file_error(difference, size, "file %zu of %zu (%.200s): %" PRIu64 " bytes before, %" PRIu64 " now", number,
                      count, name ? name : "", old_bytes, bytes);
}

static bool compare_files(const struct cJSON *before, const struct cJSON *now, char *difference, size_t size) {
    size_t old_count = (size_t)cJSON_GetArraySize(before), count = (size_t)cJSON_GetArraySize(now), number = 1;
    if (old_count != count)
        return file_error(difference, size, "%zu file%s before, %zu now", old_count, old_count == 1 ? "" : "s", count);
    const struct cJSON *old = before->child, *file;
    cJSON_ArrayForEach(file, now) {
        if (!compare_file(old, file, number++, count, difference, size))
            return same_in_another_order(before, now, count)
                       ? file_error(difference, size, "the same %zu files in another order", count)
                       : false;
        old = old->next;
    }
    return true;
}

// The files are the same, so shards are shards on both sides.
static bool compare_tokenizers(const struct side *before, const struct side *now, char *difference, size_t size) {
    if (same_text(before->tokenizer, now->tokenizer)) return true;
    if (before->tokenizer && now->tokenizer) return file_error(difference, size, "another tokenizer than before");
    if (now->shards)
        return !before->tokenizer || file_error(difference, size, "a tokenizer was known before and none is known now");
    return file_error(difference, size,
                      now->tokenizer ? "text was bytes before and a tokenizer encodes it now"
                                     : "a tokenizer encoded the text before and it is bytes now");
}

static bool compare_windows(const struct side *before, const struct side *now, char *difference, size_t size) {
    if (before->tokens != now->tokens)
        return file_error(difference, size, "%" PRIu64 " tokens before, %" PRIu64 " now", before->tokens, now->tokens);
    if (before->length != now->length)
        return file_error(difference, size, "sequences of %" PRIu64 " tokens before, %" PRIu64 " now", before->length,
                          now->length);
    if (before->windows == now->windows) return true;
    return file_error(difference, size,
                      "%" PRIu64 " sequences before, %" PRIu64 " now: evaluation data was %s before and is %s now",
                      before->windows, now->windows, before->windows < now->windows ? "held out" : "not held out",
                      before->windows < now->windows ? "not" : "held out");
}

bool data_identity_equal(const struct cJSON *before, const struct cJSON *now, char *difference, size_t size) {
    struct side a = side_of(before), b = side_of(now);
    if (!a.stories && !cJSON_IsArray(a.files))
        return file_error(difference, size, "neither files nor stories in what is known of the data before");
    if (!a.stories != !b.stories)
        return file_error(difference, size,
                          a.stories ? "the built-in stories before, files now"
                                    : "files before, the built-in stories now");
    if (!same_text(a.stories, b.stories))
        return file_error(difference, size, "the built-in stories are others than those before");
    if (a.stories) return compare_tokenizers(&a, &b, difference, size);
    return compare_files(a.files, b.files, difference, size) && compare_tokenizers(&a, &b, difference, size) &&
           compare_windows(&a, &b, difference, size);
}
