// Tokens beside the vocabulary, such as <|endoftext|>: found in the text before it is cut into words.
#ifndef MOK_DATA_ADDED_TOKENS_H
#define MOK_DATA_ADDED_TOKENS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cJSON;

struct added_token {
    char *text;
    size_t bytes; // at least 1
    int32_t id;
    bool special;
    bool late; // looked for only where no token that is not late was found (Hugging Face's "normalized")
};

struct added_tokens {
    struct added_token *list; // ordered by late, then by text
    size_t count;
    size_t first[2][257]; // where in list the texts begin that start with a byte: [late][byte] to [late][byte + 1]
};

// Reads the array "added_tokens" (NULL: none). On failure returns false with one line in error; added_tokens_close either
// way.
bool added_tokens_read(struct added_tokens *a, const struct cJSON *json, const char *path, char *error,
                       size_t error_size);
void added_tokens_close(struct added_tokens *a);

// The first place from *at on where a token of this kind stands, the longest one if there are several; moves *at there.
// NULL: none up to the end.
const struct added_token *added_tokens_next(const struct added_tokens *a, bool late, const char *text, size_t bytes,
                                            size_t *at);
// By its whole text; NULL: none.
const struct added_token *added_tokens_find(const struct added_tokens *a, const char *text, size_t bytes);

#endif
