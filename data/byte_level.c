#include "data/byte_level.h"

#include <cjson/cJSON.h>

#include "data/tokenizer.h"

// ---- the alphabet ----

// The printable characters of Latin-1 stand for themselves, the other 68 bytes are U+0100 and on, in byte order.
static bool is_printable(int byte) {
    return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
}

void byte_level_name(unsigned char byte, char name[BYTE_LEVEL_NAME]) {
    int character = byte;
    if (!is_printable(byte)) {
        character = 0x100;
        for (int before = 0; before < byte; before++) character += !is_printable(before);
    }
    if (character < 0x80) {
        *name++ = (char)character;
    } else {
        *name++ = (char)(0xc0 | (character >> 6));
        *name++ = (char)(0x80 | (character & 0x3f));
    }
    *name = 0;
}

// The bytes that are not printable: 0 to 32, 127 to 160 and 173.
static int byte_of_character(unsigned character) {
    if (character < 0x100) return is_printable((int)character) ? (int)character : -1;
    unsigned moved = character - 0x100;
    if (moved < 33) return (int)moved;
    if (moved < 67) return (int)moved - 33 + 127;
    return moved == 67 ? 173 : -1;
}

bool byte_level_bytes(const char *name, size_t length, char *out, size_t *bytes) {
    const unsigned char *next = (const unsigned char *)name, *end = next + length;
    char *start = out;
    while (next < end) {
        unsigned character = *next++;
        if (character >= 0x80) { // the alphabet ends before U+0800: two bytes each
            if (character < 0xc2 || character > 0xdf || next == end || (*next & 0xc0) != 0x80) return false;
            character = (character & 0x1f) << 6 | (*next++ & 0x3f);
        }
        int byte = byte_of_character(character);
        if (byte < 0) return false;
        *out++ = (char)(unsigned char)byte;
    }
    *bytes = (size_t)(out - start);
    return true;
}

// ---- the vocabulary of bytes ----

static const char END_OF_TEXT[] = "<|endoftext|>";

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
    for (int byte = 0; byte < 256; byte++) {
        char name[BYTE_LEVEL_NAME];
        byte_level_name((unsigned char)byte, name);
        cJSON_AddNumberToObject(vocab, name, byte);
    }
    cJSON_AddNumberToObject(vocab, END_OF_TEXT, TOKENIZER_END_OF_TEXT);
    cJSON_AddArrayToObject(model, "merges");
}

cJSON *byte_level_make_tokenizer(void) {
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

cJSON *byte_level_make_config(void) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "tokenizer_class", "PreTrainedTokenizerFast");
    cJSON_AddStringToObject(root, "bos_token", END_OF_TEXT);
    cJSON_AddStringToObject(root, "eos_token", END_OF_TEXT);
    cJSON_AddFalseToObject(root, "add_prefix_space");
    cJSON_AddFalseToObject(root, "clean_up_tokenization_spaces"); // else decoding would drop spaces before commas
    return root;
}
