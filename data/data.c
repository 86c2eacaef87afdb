#include "data/data.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "data/identity.h"
#include "data/token_file.h"
#include "kernels/fail.h"
#include "kernels/random.h"

// What one split reads: `windows` windows of a source; window w starts at token first + w * length.
struct part {
    const struct source *source;
    uint64_t first, windows; // both 0 for stories
};

struct data {
    uint64_t seed;
    size_t length, lookahead;
    int vocab;                 // 0: not settled yet
    struct source train, eval; // eval.spec is NULL where train serves both splits
    struct part parts[2];      // by enum data_split
};

// ---- opening ----

static bool source_is_stories(const struct source *s) { return s->kind == SOURCE_STORIES; }

// Windows that lie wholly inside so many tokens, lookahead included.
static uint64_t count_windows(const struct data *d, uint64_t tokens) {
    return tokens > d->lookahead ? (tokens - d->lookahead) / d->length : 0;
}

static void require_tokens(const struct data *d, const struct source *s, uint64_t wanted, const char *purpose) {
    if (s->tokens >= wanted) return;
    fail_user(s->spec,
              "found %" PRIu64 " tokens%s, wanted at least %" PRIu64
              " for %s with --seq %zu; give %s or a smaller --seq",
              s->tokens, s->kind == SOURCE_SHARDS ? "" : " (its text and one end of text)", wanted, purpose, d->length,
              s->kind == SOURCE_SHARDS ? "more shards" : "a longer text");
}

static struct part take_all(const struct data *d, const struct source *s, const char *purpose) {
    if (source_is_stories(s)) return (struct part){.source = s};
    require_tokens(d, s, d->length + d->lookahead, purpose);
    return (struct part){.source = s, .windows = count_windows(d, s->tokens)};
}

// The last twentieth of the tokens is held out, or as much more as one window takes. Where it begins does not depend on
// how long the windows are, unless there is but one: what a run has trained on is not held out from another --seq or MTP
// depth either.
static void hold_out(struct data *d) {
    const struct source *s = &d->train;
    if (source_is_stories(s)) {
        d->parts[DATA_TRAIN] = d->parts[DATA_EVAL] = (struct part){.source = s};
        return;
    }
    uint64_t one = d->length + d->lookahead;
    require_tokens(d, s, 2 * one, "one sequence to train and one to evaluate");
    uint64_t held = s->tokens / 20 > one ? s->tokens / 20 : one, border = s->tokens - held;
    d->parts[DATA_TRAIN] = (struct part){.source = s, .windows = count_windows(d, border)};
    d->parts[DATA_EVAL] = (struct part){.source = s, .first = border, .windows = count_windows(d, held)};
}

static void open_source(struct source *s, const char *spec, const char *flag, const struct tokenizer *tokenizer) {
    struct data_error e;
    if (!source_open(s, spec, flag, tokenizer, &e)) data_fail(&e);
}

// Ids of two tokenizers would train on the one and evaluate the other.
static void require_one_tokenizer(const struct source *train, const struct source *eval) {
    if (train->kind != SOURCE_SHARDS || eval->kind != SOURCE_SHARDS) return;
    struct data_error e = {0};
    if (!token_file_is_like(&eval->shards[0], &train->shards[0], e.line, sizeof e.line)) data_fail(&e);
}

// A pattern easily matches the evaluation shard as well.
static void warn_of_shared_file(const struct source *train, const struct source *eval) {
    const char *path = source_find_shared(eval, train);
    if (path)
        fail_warn(path, "found in --data and in --eval-data, wanted in one of them: what is evaluated is trained on");
}

struct data *data_open(const char *spec, const char *eval_spec, const struct tokenizer *tokenizer, uint64_t seed,
                       int length, int lookahead) {
    if (length < 1 || lookahead < 1) fail_internal("data_open", "length %d and lookahead %d", length, lookahead);
    struct data *d = calloc(1, sizeof *d);
    if (!d) fail_internal("data_open", "no memory");
    d->seed = seed;
    d->length = (size_t)length;
    d->lookahead = (size_t)lookahead;
    open_source(&d->train, spec, "--data", tokenizer);
    if (eval_spec && *eval_spec) {
        open_source(&d->eval, eval_spec, "--eval-data", tokenizer);
        require_one_tokenizer(&d->train, &d->eval);
        warn_of_shared_file(&d->train, &d->eval);
        d->parts[DATA_TRAIN] = take_all(d, &d->train, "one sequence to train");
        d->parts[DATA_EVAL] = take_all(d, &d->eval, "one sequence to evaluate");
    } else {
        hold_out(d);
    }
    return d;
}

void data_close(struct data *d) {
    if (!d) return;
    source_close(&d->train);
    source_close(&d->eval);
    free(d);
}

static void require_vocab(const struct source *s, const char *flag, int vocab) {
    if (!s->spec || !s->vocab_known || vocab >= s->vocab) return;
    fail_user("--vocab", "found %d, wanted at least %d, the token ids of %s %s; 0 takes those of the data", vocab,
              s->vocab, flag, s->spec);
}

int data_settle_vocab(struct data *d, int wanted) {
    int found = d->train.vocab > d->eval.vocab ? d->train.vocab : d->eval.vocab;
    d->vocab = wanted ? wanted : found;
    require_vocab(&d->train, "--data", d->vocab);
    require_vocab(&d->eval, "--eval-data", d->vocab);
    return d->vocab;
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

// The first token of the window that a sequence number stands for.
static uint64_t find_window(const struct data *d, enum data_split split, uint64_t sequence) {
    const struct part *p = &d->parts[split];
    uint64_t index = sequence % p->windows, epoch = sequence / p->windows;
    if (split == DATA_TRAIN) index = permute(index, p->windows, random_mix(random_mix(d->seed) + epoch));
    return p->first + index * d->length;
}

// ---- reading ----

bool data_read(const struct data *d, enum data_split split, uint64_t sequence, int32_t *tokens, struct data_error *e) {
    const struct source *s = d->parts[split].source;
    size_t n = d->length + d->lookahead;
    if (!source_is_stories(s)) return source_read(s, find_window(d, split, sequence), n, d->vocab, tokens, e);
    // random_mix is a bijection: no two sequences, of either split, start from the same state.
    source_tell(s, random_mix(random_mix(d->seed) + 2 * sequence + (split == DATA_EVAL)), n, tokens);
    return true;
}

_Noreturn void data_fail(const struct data_error *e) {
    // The line is already what fail_user makes of a place and a message; where it is cut does not show.
    const char *colon = strstr(e->line, ": ");
    int place = colon ? (int)(colon - e->line) : 0;
    char text[FILE_ERROR];
    snprintf(text, sizeof text, "%.*s", place, e->line);
    if (e->internal) fail_internal(place ? text : "data", "%s", colon ? colon + 2 : e->line);
    fail_user(place ? text : "data", "%s", colon ? colon + 2 : e->line);
}

void data_read_or_fail(const struct data *d, enum data_split split, uint64_t sequence, int32_t *tokens) {
    struct data_error e;
    if (!data_read(d, split, sequence, tokens, &e)) data_fail(&e);
}

// ---- description and identity ----

static void describe_part(const struct data *d, enum data_split split, FILE *file) {
    const struct part *p = &d->parts[split];
    fprintf(file, "%-5s | %s | ", split == DATA_TRAIN ? "train" : "eval", p->source->spec);
    source_describe(p->source, file);
    if (!source_is_stories(p->source))
        fprintf(file, " | windows of %zu: %" PRIu64 " from token %" PRIu64 " on%s", d->length, p->windows, p->first,
                split == DATA_EVAL && p->source == &d->train ? ", held out" : "");
    fputc('\n', file);
}

void data_describe(const struct data *d, FILE *file) {
    describe_part(d, DATA_TRAIN, file);
    describe_part(d, DATA_EVAL, file);
}

struct cJSON *data_identity(const struct data *d) {
    struct data_error e;
    struct cJSON *identity = source_identity(&d->train, &e);
    if (!identity) data_fail(&e);
    if (source_is_stories(&d->train)) return identity;
    file_json_add_integer(identity, "length", d->length);
    file_json_add_integer(identity, "windows", d->parts[DATA_TRAIN].windows);
    return identity;
}
