#include "data/source.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/stories.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "kernels/clock.h"
#include "kernels/fail.h"
#include "kernels/random.h"

// Returns false, so that a check reads "return refuse(...)".
static bool refuse(struct data_error *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
static bool refuse(struct data_error *e, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(e->line, sizeof e->line, format, args);
    va_end(args);
    e->internal = false;
    return false;
}

static bool blame_machine(struct data_error *e, const char *path, const char *what) {
    refuse(e, "%s: %s: %s", path, what, strerror(errno));
    e->internal = true;
    return false;
}

// ---- opening text ----

static bool open_text(struct source *s, const char *flag, struct data_error *e) {
    // Not blocking, so that a pipe without a writer is refused below instead of waited for.
    s->text = open(s->spec, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->text < 0)
        return refuse(e, "%s: cannot be opened (%s), wanted a text file or token shards; check %s", s->spec,
                      strerror(errno), flag);
    struct stat status;
    if (fstat(s->text, &status) != 0) return blame_machine(e, s->spec, "cannot be examined");
    if (S_ISDIR(status.st_mode))
        return refuse(e, "%s: found a directory, wanted a file for %s; give a pattern in quotes for the shards in it",
                      s->spec, flag);
    if (!S_ISREG(status.st_mode))
        return refuse(e, "%s: found a pipe or device, wanted a regular file for %s; write the text to a file first",
                      s->spec, flag);
    if (status.st_size == 0) return refuse(e, "%s: found an empty file, wanted text for %s", s->spec, flag);
    s->text_bytes = (uint64_t)status.st_size;
    s->text_id = (struct file_id){status.st_dev, status.st_ino};
    return true;
}

// llm.c's files are int32 headers and binary bodies: bytes of them would train without complaint and teach nothing.
static bool text_is_llmc(const struct source *s) {
    char begin[64];
    ssize_t got = file_read_at(s->text, begin, sizeof begin, 0);
    const char *guess = got > 0 ? token_file_guess(begin, (size_t)got) : NULL; // an error will come again on reading
    return guess && strncmp(guess, "an llm.c", strlen("an llm.c")) == 0;
}

static bool refuse_changed(const struct source *s, uint64_t found, struct data_error *e) {
    return refuse(e,
                  "%s: found %" PRIu64 " bytes, wanted the %" PRIu64 " bytes it had at the start; do not change it "
                  "during a run",
                  s->spec, found, s->text_bytes);
}

// What takes long is announced, to somebody who waits: the speed of the beginning tells how long.
static void announce_encoding(const struct source *s, const char *text) {
    enum { BEGINNING = 256 << 10 };
    if (s->text_bytes <= BEGINNING || !isatty(STDERR_FILENO)) return;
    struct token_list ids = {0};
    double start = clock_seconds();
    tokenizer_encode(s->tokenizer, text, BEGINNING, false, &ids);
    double seconds = (clock_seconds() - start) * (double)s->text_bytes / BEGINNING;
    free(ids.ids);
    if (seconds > 1)
        fprintf(stderr, "encoding %s: %.0f MB, about %.0f s\n", s->spec, 1e-6 * (double)s->text_bytes, seconds);
}

// All at once: where a tokenizer lets its text be cut depends on its patterns.
static bool encode_text(struct source *s, struct data_error *e) {
    const uint64_t most = 1 << 30;
    if (s->text_bytes > most)
        return refuse(e,
                      "%s: found %" PRIu64 " bytes of text, wanted at most %" PRIu64 " to encode at the start; make "
                      "shards with ./tokenize",
                      s->spec, s->text_bytes, most);
    char *text = malloc(s->text_bytes);
    if (!text) fail_internal(s->spec, "found no memory for its %" PRIu64 " bytes", s->text_bytes);
    ssize_t got = file_read_at(s->text, text, s->text_bytes, 0);
    struct token_list ids = {0};
    if (got == (ssize_t)s->text_bytes) {
        announce_encoding(s, text);
        tokenizer_encode(s->tokenizer, text, s->text_bytes, false, &ids);
    }
    free(text);
    if (got < 0) return blame_machine(e, s->spec, "cannot be read");
    if ((uint64_t)got < s->text_bytes) return refuse_changed(s, (uint64_t)got, e);
    s->kind = SOURCE_ENCODED;
    s->tokens = ids.count + 1;
    s->ids = realloc(ids.ids, sizeof *s->ids * s->tokens);
    if (!s->ids) fail_internal(s->spec, "found no memory for its %" PRIu64 " tokens", s->tokens);
    s->ids[ids.count] = tokenizer_end_of_text(s->tokenizer);
    return true;
}

// ---- opening shards ----

// Where the header names no tokenizer, its vocabulary tells: ids that a tokenizer does not have are another's, though
// it may have got more tokens since.
static bool refuse_foreign(const struct token_file *f, const struct tokenizer *tokenizer, struct data_error *e) {
    if (!tokenizer) return true;
    if (f->tokenizer && f->tokenizer != tokenizer_hash(tokenizer))
        return refuse(e,
                      "%s: found ids of another tokenizer, %016" PRIx64 ", wanted those of the run's tokenizer, "
                      "%016" PRIx64 "; give --tokenizer the one that made the shards",
                      f->path, f->tokenizer, tokenizer_hash(tokenizer));
    if (!f->vocab || (int)f->vocab == tokenizer_vocab(tokenizer)) return true;
    if ((int)f->vocab > tokenizer_vocab(tokenizer))
        return refuse(e,
                      "%s: found a vocabulary of %" PRIu32
                      " in the header, wanted at most the %d ids of the tokenizer; "
                      "give its shards, or --tokenizer with the one that these were made with",
                      f->path, f->vocab, tokenizer_vocab(tokenizer));
    fail_warn(f->path,
              "found a vocabulary of %" PRIu32 " in the header, wanted the %d ids of the tokenizer; is it the one that "
              "the shards were made with?",
              f->vocab, tokenizer_vocab(tokenizer));
    return true;
}

// Every shard stays open, and by default a process may have 1024 files: as many more as there are shards.
static void allow_files(size_t count) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max - limit.rlim_cur > count ? limit.rlim_cur + count : limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit); // where that is not enough, opening a shard will say so
}

static bool open_shards(struct source *s, char *const *paths, size_t count, const struct tokenizer *tokenizer,
                        struct data_error *e) {
    s->kind = SOURCE_SHARDS;
    s->tokenizer = tokenizer;
    s->shards = malloc(sizeof *s->shards * count);
    s->starts = malloc(sizeof *s->starts * (count + 1));
    if (!s->shards || !s->starts) fail_internal(s->spec, "found no memory for %zu shards", count);
    allow_files(count);
    for (size_t i = 0; i < count; i++) {
        e->internal = false;
        if (!token_file_open(&s->shards[i], paths[i], e->line, sizeof e->line)) return false;
        s->shard_count++;
        if (!token_file_is_like(&s->shards[i], &s->shards[0], e->line, sizeof e->line)) return false;
        if (i == 0 && !refuse_foreign(&s->shards[i], tokenizer, e)) return false; // the others are like it
        s->starts[i] = s->tokens;
        s->tokens += s->shards[i].count; // below 2^32 each
    }
    s->starts[count] = s->tokens;
    const struct token_file *first = &s->shards[0];
    s->vocab_known = first->vocab != 0;
    if (s->vocab_known)
        s->vocab = (int)first->vocab;
    else if (tokenizer)
        s->vocab = tokenizer_vocab(tokenizer);
    else
        s->vocab = first->id_bytes == 2 ? 50257 : 128256; // GPT-2's and Llama 3's
    return true;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool refuse_no_match(const char *pattern, const char *flag, struct data_error *e) {
    char folder[FILE_PATH];
    size_t length = strcspn(pattern, "*?[");
    while (length > 0 && pattern[length - 1] != '/') length--;
    snprintf(folder, sizeof folder, "%.*s", (int)length, length ? pattern : "");
    bool there = access(length ? folder : ".", R_OK | X_OK) == 0;
    return refuse(e, "%s: found no file with such a name in %s%s%s%s, wanted token shards; check %s", pattern,
                  length ? folder : "this folder", there ? "" : " (", there ? "" : strerror(errno), there ? "" : ")",
                  flag);
}

static bool open_pattern(struct source *s, const char *flag, const struct tokenizer *tokenizer, struct data_error *e) {
    glob_t found;
    int result = glob(s->spec, GLOB_NOSORT, NULL, &found); // its own order depends on the locale
    bool opened;
    if (result == GLOB_NOSPACE) fail_internal(s->spec, "found no memory for the names");
    if (result == GLOB_NOMATCH) {
        opened = refuse_no_match(s->spec, flag, e);
    } else if (result != 0) {
        opened = blame_machine(e, s->spec, "cannot be searched for");
    } else {
        qsort(found.gl_pathv, found.gl_pathc, sizeof *found.gl_pathv, compare_paths);
        opened = open_shards(s, found.gl_pathv, found.gl_pathc, tokenizer, e);
    }
    globfree(&found);
    return opened;
}

// ---- opening ----

static bool is_pattern(const char *spec) {
    struct stat status;
    return strpbrk(spec, "*?[") && stat(spec, &status) != 0; // a file of that name is itself
}

// Text and stories are encoded here; shards were encoded elsewhere.
static bool use_tokenizer(struct source *s, const struct tokenizer *tokenizer, struct data_error *e) {
    bool bytes = !tokenizer || tokenizer_is_bytes(tokenizer);
    s->tokenizer = bytes ? NULL : tokenizer;
    s->vocab = bytes ? TOKENIZER_BYTE_VOCAB : tokenizer_vocab(tokenizer);
    s->vocab_known = true;
    if (bytes || tokenizer_end_of_text(tokenizer) >= 0) return true;
    return refuse(e,
                  "%s: found a tokenizer that names no end of text, wanted one to put behind a text; give its "
                  "tokenizer_config.json an eos_token",
                  s->spec);
}

static bool is_named_like_shard(const char *path) {
    size_t length = strlen(path);
    return length >= 4 && strcmp(path + length - 4, ".bin") == 0;
}

bool source_is_shards(const char *spec) {
    if (strcmp(spec, "stories") == 0) return false; // whatever file has this name
    return is_named_like_shard(spec) || token_file_is(spec) || is_pattern(spec);
}

// What was meant to be a shard, but is a page that says "not found", would train without complaint.
static bool open_one_shard(struct source *s, bool llmc, const struct tokenizer *tokenizer, struct data_error *e) {
    close(s->text);
    s->text = -1;
    if (open_shards(s, &s->spec, 1, tokenizer, e)) return true;
    size_t used = strlen(e->line);
    if (!llmc) snprintf(e->line + used, sizeof e->line - used, ", or train on its bytes under a name like FILE.txt");
    return false;
}

static bool open_spec(struct source *s, const char *flag, const struct tokenizer *tokenizer, struct data_error *e) {
    if (strcmp(s->spec, "stories") == 0) return use_tokenizer(s, tokenizer, e);
    if (is_pattern(s->spec)) return open_pattern(s, flag, tokenizer, e);
    if (!open_text(s, flag, e)) return false;
    bool llmc = text_is_llmc(s);
    if (llmc || is_named_like_shard(s->spec)) return open_one_shard(s, llmc, tokenizer, e);
    if (!use_tokenizer(s, tokenizer, e)) return false;
    if (s->tokenizer) return encode_text(s, e);
    s->kind = SOURCE_BYTES;
    s->tokens = s->text_bytes + 1;
    return true;
}

bool source_open(struct source *s, const char *spec, const char *flag, const struct tokenizer *tokenizer,
                 struct data_error *e) {
    if (!*spec) return refuse(e, "%s: found nothing, wanted a text file, token shards or the word stories", flag);
    *s = (struct source){.spec = strdup(spec), .text = -1};
    if (!s->spec) fail_internal(flag, "no memory");
    bool opened = open_spec(s, flag, tokenizer, e);
    if (!opened) source_close(s);
    return opened;
}

void source_close(struct source *s) {
    if (!s->spec) return;
    if (s->text >= 0) close(s->text); // only read from: nothing can be lost
    for (size_t i = 0; i < s->shard_count; i++) token_file_close(&s->shards[i]);
    free(s->ids);
    free(s->shards);
    free(s->starts);
    free(s->spec);
    *s = (struct source){.text = -1};
}

// ---- files of two sources ----

static size_t count_files(const struct source *s) {
    return s->kind == SOURCE_SHARDS ? s->shard_count : s->kind != SOURCE_STORIES;
}

static struct file_id file_id_of(const struct source *s, size_t i) {
    return s->kind == SOURCE_SHARDS ? s->shards[i].id : s->text_id;
}

static bool reads_file(const struct source *s, struct file_id id) {
    for (size_t i = 0; i < count_files(s); i++) {
        struct file_id own = file_id_of(s, i);
        if (own.inode == id.inode && own.device == id.device) return true;
    }
    return false;
}

const char *source_find_shared(const struct source *a, const struct source *b) {
    for (size_t i = 0; i < count_files(a); i++)
        if (reads_file(b, file_id_of(a, i))) return a->kind == SOURCE_SHARDS ? a->shards[i].path : a->spec;
    return NULL;
}

// ---- reading ----

static void encode_bytes(int32_t *ids, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ids[i] = (unsigned char)text[i];
}

static bool read_bytes(const struct source *s, uint64_t start, size_t n, int32_t *tokens, struct data_error *e) {
    struct stat status;
    if (fstat(s->text, &status) != 0) return blame_machine(e, s->spec, "cannot be examined");
    if ((uint64_t)status.st_size != s->text_bytes) return refuse_changed(s, (uint64_t)status.st_size, e);
    if (start + n == s->tokens) tokens[--n] = TOKENIZER_END_OF_TEXT;
    for (size_t piece; n > 0; tokens += piece, start += piece, n -= piece) {
        char bytes[4096];
        piece = n < sizeof bytes ? n : sizeof bytes;
        ssize_t got = file_read_at(s->text, bytes, piece, start);
        if (got < 0) return blame_machine(e, s->spec, "cannot be read");
        if ((size_t)got < piece) return refuse_changed(s, start + (uint64_t)got, e);
        encode_bytes(tokens, bytes, piece);
    }
    return true;
}

// The shard that holds a position. Empty ones hold none: of several with the same start it is the last.
static size_t find_shard(const struct source *s, uint64_t position) {
    size_t first = 0, last = s->shard_count - 1;
    while (first < last) {
        size_t middle = first + (last - first + 1) / 2;
        if (s->starts[middle] <= position)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

static bool read_shards(const struct source *s, uint64_t start, size_t n, int vocab, int32_t *tokens,
                        struct data_error *e) {
    // A header's own vocabulary is the stricter limit: an id above it is damage.
    uint32_t limit = s->vocab_known ? (uint32_t)s->vocab : (uint32_t)vocab;
    for (size_t i = n ? find_shard(s, start) : 0, piece; n > 0; i++, start += piece, tokens += piece, n -= piece) {
        uint64_t here = s->starts[i + 1] - start;
        piece = n < here ? n : (size_t)here;
        if (token_file_read(&s->shards[i], start - s->starts[i], piece, limit, tokens, e->line, sizeof e->line))
            continue;
        e->internal = errno != 0;
        return false;
    }
    return true;
}

bool source_read(const struct source *s, uint64_t start, size_t n, int vocab, int32_t *tokens, struct data_error *e) {
    if (s->kind == SOURCE_SHARDS) return read_shards(s, start, n, vocab, tokens, e);
    if (s->kind == SOURCE_BYTES) return read_bytes(s, start, n, tokens, e);
    memcpy(tokens, s->ids + start, sizeof *tokens * n);
    return true;
}

// The next story of rng behind an end of text. ids has room for a story of bytes.
static void encode_story(const struct source *s, uint64_t *rng, struct token_list *ids) {
    char story[STORIES_MAX_BYTES];
    size_t bytes = stories_write(rng, story);
    ids->ids[0] = s->tokenizer ? tokenizer_end_of_text(s->tokenizer) : TOKENIZER_END_OF_TEXT;
    ids->count = 1;
    if (s->tokenizer) {
        tokenizer_encode(s->tokenizer, story, bytes, false, ids);
    } else {
        encode_bytes(ids->ids + 1, story, bytes);
        ids->count += bytes;
    }
}

// Stories one after another until n tokens are full. Half of the windows begin with a story; the others begin somewhere
// inside one, so that endings are seen also where a story is longer than a window.
void source_tell(const struct source *s, uint64_t rng, size_t n, int32_t *tokens) {
    struct token_list ids = {.capacity = STORIES_MAX_BYTES + 1};
    ids.ids = malloc(sizeof *ids.ids * ids.capacity);
    if (!ids.ids) fail_internal("stories", "found no memory for one");
    size_t skip = 0, filled = 0;
    while (filled < n) {
        encode_story(s, &rng, &ids);
        if (filled == 0 && random_below(&rng, 2)) skip = random_below(&rng, ids.count);
        size_t room = n - filled, taken = ids.count - skip < room ? ids.count - skip : room;
        memcpy(tokens + filled, ids.ids + skip, sizeof *tokens * taken);
        filled += taken;
        skip = 0;
    }
    free(ids.ids);
}

// ---- description ----

void source_describe(const struct source *s, FILE *file) {
    if (s->kind == SOURCE_STORIES) {
        fprintf(file, "built-in tales made from the seed, without end");
    } else if (s->kind == SOURCE_BYTES) {
        fprintf(file, "%" PRIu64 " byte tokens", s->tokens);
    } else if (s->kind == SOURCE_ENCODED) {
        fprintf(file, "%" PRIu64 " tokens of %" PRIu64 " bytes of text", s->tokens, s->text_bytes);
    } else {
        fprintf(file, "%zu shard%s, %" PRIu64 " tokens of %d bits", s->shard_count, s->shard_count == 1 ? "" : "s",
                s->tokens, 8 * s->shards[0].id_bytes);
        if (s->vocab_known) fprintf(file, ", vocabulary %d", s->vocab);
    }
}
