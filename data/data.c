#include "data/data.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/random.h"
#include "data/stories.h"
#include "data/tokenizer.h"
#include "kernels/fail.h"

// A text file, or the stories (fd -1). A file's tokens are its bytes and then one end of text.
struct source {
    char *path;
    int fd;
    uint64_t tokens;
};

// What one split reads: `windows` windows of a source from window `first` on; window w starts at token w * length.
struct part {
    const struct source *source;
    uint64_t first, windows; // both 0 for stories
};

struct data {
    uint64_t seed;
    size_t length, lookahead;
    struct source train, eval; // eval.path is NULL where train serves both splits
    struct part parts[2];      // by enum data_split
};

// ---- opening ----

static bool source_is_stories(const struct source *s) { return s->fd < 0; }

// llm.c's files are int32 headers and binary bodies: bytes of them would train without complaint and teach nothing.
static const struct {
    int32_t magic;
    const char *what;
} llmc_files[] = {
    {20240520, "token shard (uint16)"},
    {20240801, "token shard (uint32)"},
    {20240522, "multiple-choice eval file"},
    {20240326, "GPT-2 model"},
    {20240803, "Llama 3 model"},
    {20240327, "GPT-2 debug state"},
    {20240328, "tokenizer"},
    {20240527, "optimizer state"},
};

static void refuse_llmc_files(const struct source *s, const char *flag) {
    unsigned char b[4];
    if (pread(s->fd, b, sizeof b, 0) != (ssize_t)sizeof b) return; // shorter, or data_read will report the error
    int32_t magic = (int32_t)(b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24);
    for (size_t i = 0; i < sizeof llmc_files / sizeof *llmc_files; i++) {
        if (magic != llmc_files[i].magic) continue;
        fail_user(s->path,
                  "found an llm.c %s (it begins with %d), wanted plain text; give %s the text it was made from",
                  llmc_files[i].what, magic, flag);
    }
}

static struct source source_open(const char *spec, const char *flag) {
    if (!*spec) fail_user(flag, "found nothing, wanted the path of a text file or the word stories");
    struct source s = {.path = strdup(spec), .fd = -1};
    if (!s.path) fail_internal(flag, "no memory");
    if (strcmp(spec, "stories") == 0) return s;

    // Not blocking, so that a pipe without a writer is refused below instead of waited for.
    s.fd = open(spec, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s.fd < 0) fail_user(spec, "cannot be opened (%s), wanted a text file; check %s", strerror(errno), flag);
    struct stat status;
    if (fstat(s.fd, &status) != 0) fail_internal(spec, "cannot be examined: %s", strerror(errno));
    if (S_ISDIR(status.st_mode)) fail_user(spec, "found a directory, wanted one text file for %s", flag);
    if (!S_ISREG(status.st_mode)) {
        fail_user(spec, "found a pipe or device, wanted a regular file for %s; write the text to a file first", flag);
    }
    if (status.st_size == 0) fail_user(spec, "found an empty file, wanted text for %s", flag);
    s.tokens = (uint64_t)status.st_size + 1;
    refuse_llmc_files(&s, flag);
    return s;
}

// Windows that lie wholly inside a file, lookahead included.
static uint64_t count_windows(const struct data *d, const struct source *s) {
    return s->tokens > d->lookahead ? (s->tokens - d->lookahead) / d->length : 0;
}

static void require_windows(const struct data *d, const struct source *s, uint64_t wanted, const char *purpose) {
    if (count_windows(d, s) >= wanted) return;
    fail_user(s->path,
              "found %" PRIu64 " tokens (its bytes and one end of text), wanted at least %" PRIu64 " for %s with --seq "
              "%zu; give a longer text or a smaller --seq",
              s->tokens, wanted * d->length + d->lookahead, purpose, d->length);
}

static struct part take_all(const struct data *d, const struct source *s, const char *purpose) {
    if (source_is_stories(s)) return (struct part){.source = s};
    require_windows(d, s, 1, purpose);
    return (struct part){.source = s, .windows = count_windows(d, s)};
}

// The last twentieth is held out. The first target of eval window v is token v * length + 1, and the train window
// before it reads up to token v * length + lookahead - 1; with MTP windows in between are left out until these two
// do not meet, so that nothing evaluated was trained on.
static void hold_out(struct data *d) {
    const struct source *s = &d->train;
    if (source_is_stories(s)) {
        d->parts[DATA_TRAIN] = d->parts[DATA_EVAL] = (struct part){.source = s};
        return;
    }
    uint64_t gap = (d->lookahead - 1 + d->length - 1) / d->length;
    require_windows(d, s, 2 + gap, "one sequence to train and one to evaluate");
    uint64_t used = count_windows(d, s) - gap;
    uint64_t eval = used / 20 > 0 ? used / 20 : 1;
    d->parts[DATA_TRAIN] = (struct part){.source = s, .first = 0, .windows = used - eval};
    d->parts[DATA_EVAL] = (struct part){.source = s, .first = used - eval + gap, .windows = eval};
}

struct data *data_open(const char *spec, const char *eval_spec, uint64_t seed, int length, int lookahead) {
    if (length < 1 || lookahead < 1) fail_internal("data_open", "length %d and lookahead %d", length, lookahead);
    struct data *d = calloc(1, sizeof *d);
    if (!d) fail_internal("data_open", "no memory");
    d->seed = seed;
    d->length = (size_t)length;
    d->lookahead = (size_t)lookahead;
    d->train = source_open(spec, "--data");
    if (eval_spec && *eval_spec) {
        d->eval = source_open(eval_spec, "--eval-data");
        d->parts[DATA_TRAIN] = take_all(d, &d->train, "one sequence to train");
        d->parts[DATA_EVAL] = take_all(d, &d->eval, "one sequence to evaluate");
    } else {
        hold_out(d);
    }
    return d;
}

static void source_close(struct source *s) {
    if (s->path && s->fd >= 0) close(s->fd); // only read from: nothing can be lost
    free(s->path);
}

void data_close(struct data *d) {
    if (!d) return;
    source_close(&d->train);
    source_close(&d->eval);
    free(d);
}

int data_vocab(const struct data *d) {
    (void)d;
    return TOKENIZER_BYTE_VOCAB;
}

uint64_t data_windows(const struct data *d, enum data_split split) { return d->parts[split].windows; }

uint64_t data_epoch(const struct data *d, enum data_split split, uint64_t sequence) {
    uint64_t windows = d->parts[split].windows;
    return windows ? sequence / windows : 0;
}

// ---- order ----

// A permutation of 0 .. n-1 chosen by key, computed for one index without a table: a Feistel network permutes the
// numbers of 2 * half bits (the smallest such range that holds n), and indices that land at n or above go through it
// again until they come back below n. The range is at most 4n, so that is a few rounds on average.
static uint64_t permute(uint64_t index, uint64_t n, uint64_t key) {
    enum { ROUNDS = 6 }; // four make a Feistel network pseudorandom; two to spare for ranges of a few bits
    int half = 1;
    while (half < 32 && (n - 1) >> (2 * half)) half++;
    uint64_t mask = (1ull << half) - 1;
    do {
        uint64_t left = index >> half, right = index & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (random_mix(random_mix(key + round) + right) & mask);
            left = right;
            right = next;
        }
        index = left << half | right;
    } while (index >= n);
    return index;
}

// The window of the file that a sequence number stands for.
static uint64_t find_window(const struct data *d, enum data_split split, uint64_t sequence) {
    const struct part *p = &d->parts[split];
    uint64_t index = sequence % p->windows, epoch = sequence / p->windows;
    if (split == DATA_TRAIN) index = permute(index, p->windows, random_mix(random_mix(d->seed) + epoch));
    return p->first + index;
}

// ---- reading ----

// n tokens of a file from token `start` on; the caller keeps start + n within source->tokens.
static void read_file(const struct source *s, uint64_t start, size_t n, int32_t *tokens) {
    uint64_t end_of_text = s->tokens - 1;
    if (start + n == s->tokens) tokens[--n] = TOKENIZER_END_OF_TEXT;
    char bytes[4096];
    while (n > 0) {
        ssize_t got = pread(s->fd, bytes, n < sizeof bytes ? n : sizeof bytes, (off_t)start);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) fail_internal(s->path, "cannot be read at byte %" PRIu64 ": %s", start, strerror(errno));
        if (got == 0) {
            fail_user(s->path,
                      "found its end at byte %" PRIu64 ", wanted the %" PRIu64 " bytes it had at the start; "
                      "do not change it during a run",
                      start, end_of_text);
        }
        for (ssize_t i = 0; i < got; i++) *tokens++ = (unsigned char)bytes[i];
        start += (uint64_t)got;
        n -= (size_t)got;
    }
}

// Stories one after another, each behind an end of text, until n tokens are full. Half of the windows begin with a
// story; the others begin somewhere inside one, so that endings are seen also where a story is longer than a window.
static void read_stories(uint64_t rng, size_t n, int32_t *tokens) {
    char story[STORIES_MAX_BYTES];
    int32_t ids[STORIES_MAX_BYTES + 1] = {TOKENIZER_END_OF_TEXT};
    size_t skip = 0, filled = 0;
    while (filled < n) {
        size_t length = 1;
        for (size_t i = 0, bytes = stories_write(&rng, story); i < bytes; i++) ids[length++] = (unsigned char)story[i];
        if (filled == 0 && random_below(&rng, 2)) skip = random_below(&rng, length);
        size_t room = n - filled, taken = length - skip < room ? length - skip : room;
        memcpy(tokens + filled, ids + skip, sizeof *tokens * taken);
        filled += taken;
        skip = 0;
    }
}

void data_read(const struct data *d, enum data_split split, uint64_t sequence, int32_t *tokens) {
    const struct source *s = d->parts[split].source;
    size_t n = d->length + d->lookahead;
    if (source_is_stories(s)) {
        // random_mix is a bijection: no two sequences, of either split, start from the same state.
        read_stories(random_mix(random_mix(d->seed) + 2 * sequence + (split == DATA_EVAL)), n, tokens);
    } else {
        read_file(s, find_window(d, split, sequence) * d->length, n, tokens);
    }
}

// ---- description ----

static void describe_part(const struct data *d, enum data_split split, FILE *file) {
    const struct part *p = &d->parts[split];
    fprintf(file, "%-5s | %s", split == DATA_TRAIN ? "train" : "eval", p->source->path);
    if (source_is_stories(p->source)) {
        fprintf(file, " | built-in tales made from the seed, without end\n");
        return;
    }
    fprintf(file, " | %" PRIu64 " byte tokens | windows of %zu: %" PRIu64 " from %" PRIu64 " on%s\n", p->source->tokens,
            d->length, p->windows, p->first, split == DATA_EVAL && p->source == &d->train ? ", held out" : "");
}

void data_describe(const struct data *d, FILE *file) {
    describe_part(d, DATA_TRAIN, file);
    describe_part(d, DATA_EVAL, file);
}
