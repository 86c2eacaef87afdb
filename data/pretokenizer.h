// The "pre_tokenizer" of tokenizer.json: where a text is cut into the words that merges stay inside of.
#ifndef MOK_DATA_PRETOKENIZER_H
#define MOK_DATA_PRETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

#include "data/hash.h"

struct cJSON;

struct pretokenizer {
    struct pretokenizer_step *steps; // each cuts the pieces of the one before
    size_t count;
};

// Reads ByteLevel, alone or behind Split and Digits in a Sequence. On failure returns false with one line in error;
// pretokenizer_close either way.
bool pretokenizer_read(struct pretokenizer *p, const struct cJSON *json, const char *path, char *error,
                       size_t error_size);
void pretokenizer_close(struct pretokenizer *p);

// Whether no text is left out or added to, so that the words together are the text.
bool pretokenizer_keeps_text(const struct pretokenizer *p);

// Calls emit(context, word, bytes) for every word of text, in order. Any bytes will do: one that is no part of a UTF-8
// character is a word of its own, and patterns do not see across it.
typedef void pretokenizer_emit(void *context, const char *word, size_t bytes);
void pretokenizer_split(const struct pretokenizer *p, const char *text, size_t bytes, pretokenizer_emit *emit,
                        void *context);

void pretokenizer_add_to_hash(const struct pretokenizer *p, struct hash *h);

#endif
