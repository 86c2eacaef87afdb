// Text to token ids and back: byte-level BPE as in Hugging Face's tokenizer.json (GPT-2, Llama 3, DeepSeek-V3), and the
// byte tokenizer, where every byte is its own token and one more id ends a text.
#ifndef MOK_DATA_TOKENIZER_H
#define MOK_DATA_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TOKENIZER_BYTE_VOCAB = 257, TOKENIZER_END_OF_TEXT = 256 }; // of the byte tokenizer

struct tokenizer; // does not change once it is open: threads may share it

struct tokenizer *tokenizer_open_bytes(void);

// path: a tokenizer.json, or a folder that holds one. The end of text is the eos_token of a tokenizer_config.json beside
// it; without one, the first that the file has of <|endoftext|>, <|end_of_text|>, <｜end▁of▁sentence｜>, </s> and <eos>.
// What would give other ids than Hugging Face's tokenizers is refused. (Characters that are newer than PCRE2's Unicode,
// 14.0 in its release 10.42, may be cut into words otherwise than there.) Returns NULL with one line in error.
struct tokenizer *tokenizer_open(const char *path, char *error, size_t error_size);
void tokenizer_close(struct tokenizer *t);

// Largest id + 1.
int tokenizer_vocab(const struct tokenizer *t);
// -1: the file names none.
int32_t tokenizer_end_of_text(const struct tokenizer *t);
// Id of an added token by its text, -1 if there is none.
int32_t tokenizer_find(const struct tokenizer *t, const char *token);
// Whether it came from tokenizer_open_bytes, or from a file with the same ids for every text.
bool tokenizer_is_bytes(const struct tokenizer *t);
// Bytes of text that an id stands for; 0 for special and unknown ids.
size_t tokenizer_token_bytes(const struct tokenizer *t, int32_t id);
// Fingerprint (data/hash.h) of everything that decides the ids of a text, and of the end of text.
uint64_t tokenizer_hash(const struct tokenizer *t);

// Starts as {0}; free ids with free.
struct token_list {
    int32_t *ids;
    size_t count, capacity;
};

// Appends the ids of text. Any bytes will do: what is not UTF-8 is encoded byte by byte. With special, the texts of
// special tokens become their ids; without, they are plain text. Never adds a token that text does not hold.
void tokenizer_encode(const struct tokenizer *t, const char *text, size_t bytes, bool special, struct token_list *out);

// Writes the text of ids [n] to out, at most capacity bytes and no final zero, and returns its bytes. The end of text
// becomes a newline, so that one text does not run into the next; other special tokens their own text; unknown ids '?'.
size_t tokenizer_decode(const struct tokenizer *t, char *out, size_t capacity, const int32_t *ids, size_t n);
// The capacity that these ids need.
size_t tokenizer_decode_room(const struct tokenizer *t, const int32_t *ids, size_t n);

// Puts tokenizer.json and tokenizer_config.json into an existing folder and on disk, for Hugging Face's
// PreTrainedTokenizerFast: as they were read, or made for bytes. False with one line in error.
bool tokenizer_write(const struct tokenizer *t, const char *folder, char *error, size_t error_size);

#endif
