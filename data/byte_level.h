// The alphabet of byte-level vocabularies, and the vocabulary that is nothing but bytes, in Hugging Face's words.
#ifndef MOK_DATA_BYTE_LEVEL_H
#define MOK_DATA_BYTE_LEVEL_H

#include <stdbool.h>
#include <stddef.h>

struct cJSON;

enum { BYTE_LEVEL_NAME = 3 }; // bytes of a name with its final zero

// JSON strings cannot hold every byte, so GPT-2 gave each byte a printable character. Writes that character in UTF-8.
void byte_level_name(unsigned char byte, char name[BYTE_LEVEL_NAME]);

// Writes the bytes that a token's name stands for to out [length] and their number to bytes. False if a character of
// name is not in the alphabet; then out is undefined.
bool byte_level_bytes(const char *name, size_t length, char *out, size_t *bytes);

// What tokenizer.json and tokenizer_config.json hold for the vocabulary of bytes: id = byte, 256 is the special token
// "<|endoftext|>". Free with cJSON_Delete.
struct cJSON *byte_level_make_tokenizer(void);
struct cJSON *byte_level_make_config(void);

#endif
