// The byte tokenizer: every byte of the text is its own token, and one more id ends a text.
#ifndef MOK_DATA_TOKENIZER_H
#define MOK_DATA_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TOKENIZER_BYTE_VOCAB = 257, TOKENIZER_END_OF_TEXT = 256 };

// Writes one id per byte to ids [bytes] and returns bytes. Never adds the end of text; its name in the text is plain
// bytes too.
size_t tokenizer_encode(int32_t *ids, const char *text, size_t bytes);

// Writes one byte per id to out, at most capacity bytes and no final zero, and returns how many it wrote. The end of
// text becomes a newline, so that one text does not run into the next; ids outside the vocabulary become '?'.
size_t tokenizer_decode(char *out, size_t capacity, const int32_t *ids, size_t n);

// Writes tokenizer.json (byte-level BPE without merges: id = byte; 256 is the special token "<|endoftext|>") and
// tokenizer_config.json into an existing folder, for Hugging Face's PreTrainedTokenizerFast, and flushes both to disk.
// On failure returns false with the file and the reason in error [error_size].
bool tokenizer_write_json(const char *folder, char *error, size_t error_size);

#endif
