#include "data/tokenizer.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cjson/cJSON.h>

static const char END_OF_TEXT[] = "<|endoftext|>";

size_t tokenizer_encode(int32_t *ids, const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) ids[i] = (unsigned char)text[i];
    return bytes;
}

static char byte_of_id(int32_t id) {
    if (id == TOKENIZER_END_OF_TEXT) return '\n';
    if (id < 0 || id >= TOKENIZER_BYTE_VOCAB) return '?';
    return (char)(unsigned char)id;
}

size_t tokenizer_decode(char *out, size_t capacity, const int32_t *ids, size_t n) {
    size_t count = n < capacity ? n : capacity;
    for (size_t i = 0; i < count; i++) out[i] = byte_of_id(ids[i]);
    return count;
}

// ---- Hugging Face files ----

// JSON strings cannot hold every byte, so GPT-2 gave each byte a printable character: the printable ones of Latin-1
// stand for themselves, the other 68 are U+0100 and on, in byte order. This writes that character in UTF-8.
static void name_bytes(char names[256][3]) {
    int moved = 0;
    for (int byte = 0; byte < 256; byte++) {
        bool printable =
            (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
        int character = printable ? byte : 0x100 + moved++;
        char *name = names[byte];
        if (character < 0x80) {
            *name++ = (char)character;
        } else {
            *name++ = (char)(0xc0 | (character >> 6));
            *name++ = (char)(0x80 | (character & 0x3f));
        }
        *name = 0;
    }
}

// What Hugging Face calls ByteLevel, as the step before the model and as the decoder after it.
static void add_byte_level(cJSON *parent, const char *key) {
    cJSON *step = cJSON_AddObjectToObject(parent, key);
    cJSON_AddStringToObject(step, "type", "ByteLevel");
    cJSON_AddFalseToObject(step, "add_prefix_space");
    cJSON_AddFalseToObject(step, "trim_offsets");
    cJSON_AddFalseToObject(step, "use_regex"); // no split into words: the tokens are bytes anyway
}

static cJSON *make_end_of_text(void) {
    cJSON *token = cJSON_CreateObject();
    cJSON_AddNumberToObject(token, "id", TOKENIZER_END_OF_TEXT);
    cJSON_AddStringToObject(token, "content", END_OF_TEXT);
    cJSON_AddFalseToObject(token, "single_word");
    cJSON_AddFalseToObject(token, "lstrip");
    cJSON_AddFalseToObject(token, "rstrip");
    cJSON_AddFalseToObject(token, "normalized");
    cJSON_AddTrueToObject(token, "special");
    return token;
}

static void add_model(cJSON *parent) {
    cJSON *model = cJSON_AddObjectToObject(parent, "model");
    cJSON_AddStringToObject(model, "type", "BPE");
    cJSON_AddNullToObject(model, "dropout");
    cJSON_AddNullToObject(model, "unk_token");
    cJSON_AddNullToObject(model, "continuing_subword_prefix");
    cJSON_AddNullToObject(model, "end_of_word_suffix");
    cJSON_AddFalseToObject(model, "fuse_unk");
    cJSON_AddFalseToObject(model, "byte_fallback");
    cJSON_AddFalseToObject(model, "ignore_merges");
    cJSON *vocab = cJSON_AddObjectToObject(model, "vocab");
    char names[256][3];
    name_bytes(names);
    for (int byte = 0; byte < 256; byte++) cJSON_AddNumberToObject(vocab, names[byte], byte);
    cJSON_AddNumberToObject(vocab, END_OF_TEXT, TOKENIZER_END_OF_TEXT);
    cJSON_AddArrayToObject(model, "merges");
}

static cJSON *make_tokenizer(void) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", "1.0");
    cJSON_AddNullToObject(root, "truncation");
    cJSON_AddNullToObject(root, "padding");
    cJSON_AddItemToArray(cJSON_AddArrayToObject(root, "added_tokens"), make_end_of_text());
    cJSON_AddNullToObject(root, "normalizer");
    add_byte_level(root, "pre_tokenizer");
    cJSON_AddNullToObject(root, "post_processor");
    add_byte_level(root, "decoder");
    add_model(root);
    return root;
}

static cJSON *make_tokenizer_config(void) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "tokenizer_class", "PreTrainedTokenizerFast");
    cJSON_AddStringToObject(root, "bos_token", END_OF_TEXT);
    cJSON_AddStringToObject(root, "eos_token", END_OF_TEXT);
    cJSON_AddFalseToObject(root, "add_prefix_space");
    cJSON_AddFalseToObject(root, "clean_up_tokenization_spaces"); // else decoding would drop spaces before commas
    return root;
}

// Flushed to disk before the name of a checkpoint may say that it is complete.
static bool write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    if (!file) return false;
    bool written = fputs(text, file) >= 0 && fputc('\n', file) >= 0 && fflush(file) == 0 && fsync(fileno(file)) == 0;
    int reason = errno;
    bool closed = fclose(file) == 0;
    if (!written) errno = reason;
    return written && closed;
}

// Writes the object to folder/name and frees it.
static bool write_json(const char *folder, const char *name, cJSON *json, char *error, size_t error_size) {
    char *text = cJSON_Print(json);
    cJSON_Delete(json);
    if (!text) {
        snprintf(error, error_size, "%s/%s: no memory to write it", folder, name);
        return false;
    }
    char path[PATH_MAX];
    bool done = false;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) {
        snprintf(error, error_size, "%s/%s: the path is longer than %d bytes", folder, name, PATH_MAX - 1);
    } else if (!write_file(path, text)) {
        snprintf(error, error_size, "%s: cannot be written: %s", path, strerror(errno));
    } else {
        done = true;
    }
    cJSON_free(text);
    return done;
}

bool tokenizer_write_json(const char *folder, char *error, size_t error_size) {
    return write_json(folder, "tokenizer.json", make_tokenizer(), error, error_size) &&
           write_json(folder, "tokenizer_config.json", make_tokenizer_config(), error, error_size);
}
