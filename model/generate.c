#include "model/generate.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/random.h"
#include "kernels/stop.h"
#include "model/safetensors.h"
#include "model/saved_model.h"
#include "model/vocabulary.h"

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

// The token that follows `length` others, chosen by rank 0. logits [V]: room.
static int32_t next_token(struct model *m, const int32_t *tokens, int length, double temperature, uint64_t seed,
                          float *logits) {
    int32_t next = 0;
    if (m->parallel->rank == 0) {
        int window = length < m->acts.seq ? length : m->acts.seq;
        model_logits(m, tokens + length - window, window, window - 1, logits);
        next = generate_pick(logits, m->config.vocab, temperature, uniform_at(seed, (uint64_t)length));
    } else {
        model_logits(m, tokens, 0, 0, logits);
    }
    comm_broadcast(m->parallel->world, &next, sizeof next, 0);
    return next;
}

int generate_tokens(struct model *m, int32_t *tokens, int prompt, int count, double temperature, uint64_t seed,
                    int32_t stop) {
    float *logits = malloc(sizeof *logits * (size_t)m->config.vocab);
    if (!logits) fail_internal("sampling", "found no memory for %d logits", m->config.vocab);
    int added = 0;
    while (added < count && !stop_agree(m->parallel->world)) {
        int32_t next = next_token(m, tokens, prompt + added, temperature, seed, logits);
        tokens[prompt + added++] = next;
        if (next == stop) break;
    }
    free(logits);
    return added;
}

// Length of the UTF-8 sequence that text begins with; 0 for none, and for U+0080 to U+009F, which terminals obey.
static size_t utf8_length(const char *text, size_t bytes) {
    unsigned char first = (unsigned char)text[0];
    size_t length = first >= 0xc2 && first < 0xe0   ? 2
                    : first >= 0xe0 && first < 0xf0 ? 3
                    : first >= 0xf0 && first < 0xf5 ? 4
                                                    : 0;
    if (length > bytes || (first == 0xc2 && (unsigned char)text[1] < 0xa0)) return 0;
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

// What a text begins with: the end of the one before it.
static int32_t first_token(const struct model *m, const struct tokenizer *tokenizer) {
    int32_t id = tokenizer ? tokenizer_end_of_text(tokenizer) : -1;
    return id >= 0 && id < m->config.vocab ? id : 0;
}

// Text of the ids, or the ids themselves where nothing says what they stand for.
static void print_tokens(const struct tokenizer *tokenizer, const int32_t *tokens, size_t count) {
    if (!tokenizer) {
        for (size_t i = 0; i < count; i++) printf("%s%d", i ? " " : "", tokens[i]);
        return;
    }
    size_t room = tokenizer_decode_room(tokenizer, tokens, count);
    char *text = malloc(room + 1);
    if (!text) fail_internal("sampling", "found no memory for %zu bytes of text", room);
    size_t bytes = tokenizer_decode(tokenizer, text, room, tokens, count);
    replace_unprintable(text, bytes);
    fwrite(text, 1, bytes, stdout);
    free(text);
}

void generate_print_sample(struct model *m, const struct options *o, const struct tokenizer *tokenizer,
                           const char *when) {
    int32_t *tokens = malloc(sizeof *tokens * ((size_t)o->sample_tokens + 1));
    if (!tokens) fail_internal("sampling", "found no memory for %d tokens", o->sample_tokens);
    tokens[0] = first_token(m, tokenizer);
    int count = generate_tokens(m, tokens, 1, o->sample_tokens, o->temperature, o->seed, -1);
    printf("--- sample %s ---\n", when);
    print_tokens(tokenizer, tokens + 1, (size_t)count);
    printf("\n---\n");
    fflush(stdout);
    free(tokens);
}

// [end of text, prompt], with room for what will be generated.
static struct token_list encode_prompt(const struct model *m, const struct tokenizer *tokenizer,
                                       const struct options *o) {
    struct token_list list = {0};
    tokenizer_encode(tokenizer, o->prompt, strlen(o->prompt), true, &list);
    for (size_t i = 0; i < list.count; i++)
        if (list.ids[i] >= m->config.vocab)
            fail_user("--tokenizer",
                      "found id %d in the prompt, wanted one below the model's vocabulary of %d; use "
                      "the tokenizer that the model was trained with",
                      list.ids[i], m->config.vocab);
    size_t length = list.count + 1 + (size_t)o->generate;
    int32_t *ids = malloc(sizeof *ids * length);
    if (!ids) fail_internal("--generate", "found no memory for %zu tokens", length);
    ids[0] = first_token(m, tokenizer);
    for (size_t i = 0; i < list.count; i++) ids[1 + i] = list.ids[i];
    free(list.ids);
    return (struct token_list){ids, list.count + 1, length};
}

static void print_text(const struct tokenizer *tokenizer, const int32_t *tokens, size_t count) {
    size_t room = tokenizer_decode_room(tokenizer, tokens, count);
    char *text = malloc(room + 1);
    if (!text) fail_internal("--generate", "found no memory for %zu bytes of text", room);
    size_t bytes = tokenizer_decode(tokenizer, text, room, tokens, count);
    fwrite(text, 1, bytes, stdout);
    if (bytes && text[bytes - 1] != '\n') putchar('\n');
    free(text);
}

// What other programs can be compared with: tokens and the logits of all positions, at once.
static void write_logits(struct model *m, const struct token_list *prompt, const char *path) {
    size_t T = prompt->count, V = (size_t)m->config.vocab;
    char error[FILE_ERROR];
    if (T > (size_t)m->acts.seq)
        fail_user("--logits", "found a prompt of %zu tokens, wanted at most %d of them; shorten it or raise --seq", T,
                  m->acts.seq);
    int64_t *tokens = malloc(sizeof *tokens * T);
    float *logits = malloc(sizeof *logits * T * V);
    if (!tokens || !logits) fail_internal("--logits", "found no memory for %zu x %zu logits", T, V);
    for (size_t t = 0; t < T; t++) tokens[t] = prompt->ids[t];
    model_logits(m, prompt->ids, (int)T, 0, logits);
    struct safetensors_tensor list[] = {{.name = "tokens", .type = SAFETENSORS_I64, .rank = 1, .shape = {T}},
                                        {.name = "logits", .type = SAFETENSORS_F32, .rank = 2, .shape = {T, V}}};
    struct safetensors_writer file;
    if (!safetensors_begin(&file, path, list, 2, error, sizeof error) ||
        !safetensors_append(&file, tokens, sizeof *tokens * T, error, sizeof error) ||
        !safetensors_append(&file, logits, sizeof *logits * T * V, error, sizeof error) ||
        !safetensors_finish(&file, error, sizeof error))
        fail_user("--logits", "%s; name a file in a folder that exists, with room for it", error);
    free(logits);
    free(tokens);
}

void generate_from_checkpoint(const struct options *o) {
    struct model m;
    char folder[OPTION_TEXT + 32];
    size_t prompt_bytes = strlen(o->prompt); // and at most as many tokens
    if (prompt_bytes + 1 + (size_t)o->generate > INT_MAX)
        fail_user("--generate", "found %lld with a prompt of %zu bytes, wanted at most %zu", (long long)o->generate,
                  prompt_bytes, INT_MAX - prompt_bytes - 1);
    saved_model_open(&m, o, NULL, 1, folder, sizeof folder);
    struct tokenizer *tokenizer = vocabulary_open(o, o->tokenizer, folder);
    if (!tokenizer)
        fail_user(folder, "found no tokenizer.json, wanted one to make text of ids; name it with --tokenizer");
    struct token_list list = encode_prompt(&m, tokenizer, o);
    if (o->logits[0]) write_logits(&m, &list, o->logits);
    int stop = tokenizer_end_of_text(tokenizer), prompt = (int)list.count;
    int count = generate_tokens(&m, list.ids, prompt, (int)o->generate, o->temperature, o->seed, stop);
    print_text(tokenizer, list.ids + 1, (size_t)(prompt - 1 + count));
    free(list.ids);
    tokenizer_close(tokenizer);
    model_close(&m);
}
