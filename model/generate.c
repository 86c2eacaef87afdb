#include "model/generate.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"
#include "kernels/fail.h"
#include "kernels/random.h"
#include "model/checkpoint.h"

// Uniform in [0, 1), from (seed, position) alone.
static double uniform_at(uint64_t seed, uint64_t position) {
    return random_uniform(random_mix(random_mix(seed) + position));
}

int generate_pick(const float *logits, int V, double temperature, double u) {
    int best = 0;
    for (int v = 1; v < V; v++)
        if (logits[v] > logits[best]) best = v;
    if (temperature <= 0) return best;
    double total = 0, passed = 0;
    for (int v = 0; v < V; v++) total += exp((logits[v] - (double)logits[best]) / temperature);
    for (int v = 0; v < V; v++) {
        passed += exp((logits[v] - (double)logits[best]) / temperature);
        if (u * total < passed) return v;
    }
    return best; // u * total rounded up to total
}

int generate_tokens(struct model *m, int32_t *tokens, int prompt, int count, double temperature, uint64_t seed,
                    int32_t stop) {
    int V = m->config.vocab;
    float *logits = malloc(sizeof *logits * (size_t)V);
    if (!logits) fail_internal("sampling", "found no memory for %d logits", V);
    int added = 0;
    while (added < count) {
        int length = prompt + added, window = length < m->acts.seq ? length : m->acts.seq;
        model_logits(m, tokens + length - window, window, window - 1, logits);
        int32_t next = generate_pick(logits, V, temperature, uniform_at(seed, (uint64_t)length));
        tokens[length] = next;
        added++;
        if (next == stop) break;
    }
    free(logits);
    return added;
}

// Length of the UTF-8 sequence that text begins with, 0 for none.
static size_t utf8_length(const char *text, size_t bytes) {
    unsigned char first = (unsigned char)text[0];
    size_t length = first >= 0xc2 && first < 0xe0   ? 2
                    : first >= 0xe0 && first < 0xf0 ? 3
                    : first >= 0xf0 && first < 0xf5 ? 4
                                                    : 0;
    if (length > bytes) return 0;
    for (size_t i = 1; i < length; i++)
        if (((unsigned char)text[i] & 0xc0) != 0x80) return 0;
    return length;
}

// Noise may hold anything; terminals should see lines of readable characters only.
static void replace_unprintable(char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        size_t length = utf8_length(text + i, bytes - i);
        if (length)
            i += length - 1;
        else if (text[i] != '\n' && (text[i] < 32 || text[i] > 126))
            text[i] = '.';
    }
}

void generate_print_sample(struct model *m, const struct options *o, const char *when) {
    int32_t *tokens = malloc(sizeof *tokens * ((size_t)o->sample_tokens + 1));
    char *text = malloc((size_t)o->sample_tokens + 1);
    if (!tokens || !text) fail_internal("sampling", "found no memory for %d tokens", o->sample_tokens);
    tokens[0] = TOKENIZER_END_OF_TEXT;
    int count = generate_tokens(m, tokens, 1, o->sample_tokens, o->temperature, o->seed, -1);
    struct tokenizer *tokenizer = tokenizer_open_bytes();
    size_t bytes = tokenizer_decode(tokenizer, text, (size_t)o->sample_tokens, tokens + 1, (size_t)count);
    tokenizer_close(tokenizer);
    replace_unprintable(text, bytes);
    printf("--- sample %s ---\n%.*s\n---\n", when, (int)bytes, text);
    fflush(stdout);
    free(text);
    free(tokens);
}

// Tokens that the model of a checkpoint is shown at once: --seq, or what the run was trained with, or as many as the
// model is meant for, within reason.
static int context_of(const struct options *o, const struct config *c, const char *from) {
    enum { REASONABLE = 1024 };
    int seq = o->seq, trained = checkpoint_trained_length(from);
    if (seq == 0) seq = trained > 0 ? trained : c->max_positions < REASONABLE ? c->max_positions : REASONABLE;
    if (seq > c->max_positions)
        fail_user("--seq", "found %d, wanted at most the %d positions of the model in %s", seq, c->max_positions, from);
    return seq;
}

static void open_saved_model(struct model *m, const struct options *o) {
    struct config c = o->model;
    char from[OPTION_TEXT + 32], error[512];
    checkpoint_find(o->from, from, sizeof from);
    if (!checkpoint_read_config(from, &c, error, sizeof error))
        fail_user("--from", "%s; name a checkpoint, or a run folder that holds one", error);
    if (c.vocab < TOKENIZER_BYTE_VOCAB)
        fail_user("--from", "found a vocabulary of %d, wanted at least %d (bytes and end of text)", c.vocab,
                  TOKENIZER_BYTE_VOCAB);
    c.mtp_depth = 0; // sampling does not use it
    config_validate(&c);
    model_open(m, &c, 1, context_of(o, &c, from), false);
    struct checkpoint checkpoint = {.config = &c, .params = &m->params, .weights = m->weights, .bias = m->bias};
    checkpoint_load_weights(from, &checkpoint);
}

void generate_from_checkpoint(const struct options *o) {
    size_t prompt = strlen(o->prompt), length = prompt + 1 + (size_t)o->generate;
    if (length > INT_MAX)
        fail_user("--generate", "found %lld with a prompt of %zu bytes, wanted at most %zu", (long long)o->generate,
                  prompt, INT_MAX - prompt - 1);
    struct model m;
    open_saved_model(&m, o);
    int32_t *tokens = malloc(sizeof *tokens * length);
    char *text = malloc(length);
    if (!tokens || !text) fail_internal("--generate", "found no memory for %zu tokens", length);
    tokens[0] = TOKENIZER_END_OF_TEXT; // a text begins where the last one ended
    struct tokenizer *tokenizer = tokenizer_open_bytes();
    struct token_list ids = {0};
    tokenizer_encode(tokenizer, o->prompt, prompt, false, &ids);
    for (size_t i = 0; i < prompt; i++) tokens[1 + i] = ids.ids[i];
    free(ids.ids);
    int count =
        generate_tokens(&m, tokens, (int)prompt + 1, (int)o->generate, o->temperature, o->seed, TOKENIZER_END_OF_TEXT);
    size_t bytes = tokenizer_decode(tokenizer, text, length, tokens + 1, prompt + (size_t)count);
    tokenizer_close(tokenizer);
    fwrite(text, 1, bytes, stdout);
    if (bytes && text[bytes - 1] != '\n') putchar('\n');
    free(text);
    free(tokens);
    model_close(&m);
}
