#include "data/tokenizer.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/byte_level.h"
#include "data/files.h"
#include "data/hash.h"
#include "data/pretokenizer.h"
#include "kernels/fail.h"

struct text_file {
    char *text; // NULL: there is none
    size_t bytes;
};

struct tokenizer {
    struct added_tokens added;
    struct bpe bpe;
    struct pretokenizer words;
    int32_t end_of_text;
    bool is_bytes;
    uint64_t hash;
    struct text_file file, config; // tokenizer.json and tokenizer_config.json as they were read
};

// ---- opening ----

static bool check_normalizer(const cJSON *json, const char *path, char *error, size_t error_size) {
    if (!json || cJSON_IsNull(json)) return true;
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "(no type)";
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(json, "normalizers");
    if (strcmp(name, "Sequence") != 0 || !cJSON_IsArray(list))
        return file_error(error, error_size, "%s: found the normalizer %.100s, wanted none", path, name);
    const cJSON *item;
    cJSON_ArrayForEach(item, list) if (!check_normalizer(item, path, error, error_size)) return false;
    return true;
}

static bool check_decoder(const cJSON *json, const char *path, char *error, size_t error_size) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "(none)";
    return strcmp(name, "ByteLevel") == 0 ||
           file_error(error, error_size,
                      "%s: found the decoder %.100s, wanted ByteLevel; only byte-level BPE is read here", path, name);
}

// The model first: its error says best what kind of file it is.
static bool read_tokenizer(struct tokenizer *t, const cJSON *root, const char *path, char *error, size_t error_size) {
    const cJSON *added = cJSON_GetObjectItemCaseSensitive(root, "added_tokens");
    const cJSON *model = cJSON_GetObjectItemCaseSensitive(root, "model");
    const cJSON *words = cJSON_GetObjectItemCaseSensitive(root, "pre_tokenizer");
    return added_tokens_read(&t->added, added, path, error, error_size) &&
           bpe_read(&t->bpe, model, &t->added, path, error, error_size) &&
           check_normalizer(cJSON_GetObjectItemCaseSensitive(root, "normalizer"), path, error, error_size) &&
           pretokenizer_read(&t->words, words, path, error, error_size) &&
           check_decoder(cJSON_GetObjectItemCaseSensitive(root, "decoder"), path, error, error_size);
}

static void find_usual_end_of_text(struct tokenizer *t) {
    static const char *const names[] = {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>"};
    for (size_t i = 0; i < sizeof names / sizeof *names && t->end_of_text < 0; i++)
        t->end_of_text = tokenizer_find(t, names[i]);
}

// eos_token is a string, or an object with its content, or null.
static bool read_config(struct tokenizer *t, const char *path, char *error, size_t error_size) {
    cJSON *root = file_parse_json(t->config.text, t->config.bytes, path, error, error_size);
    if (!root) return false;
    const cJSON *token = cJSON_GetObjectItemCaseSensitive(root, "eos_token");
    const cJSON *name = cJSON_IsObject(token) ? cJSON_GetObjectItemCaseSensitive(token, "content") : token;
    bool done = true;
    if (cJSON_IsString(name)) {
        t->end_of_text = tokenizer_find(t, name->valuestring);
        done = t->end_of_text >= 0 ||
               file_error(error, error_size, "%s: found the eos_token %.100s, wanted an added token of tokenizer.json",
                          path, name->valuestring);
    } else if (name && !cJSON_IsNull(name)) {
        done = file_error(error, error_size, "%s: found something else as eos_token, wanted a string", path);
    }
    cJSON_Delete(root);
    return done;
}

// Every byte is its own id, whatever the words are, and the one token beside them ends a text.
static bool equals_bytes(const struct tokenizer *t) {
    if (t->bpe.vocab != TOKENIZER_BYTE_VOCAB || t->bpe.merge_count || t->added.count != 1) return false;
    if (!pretokenizer_keeps_text(&t->words)) return false;
    for (int byte = 0; byte < 256; byte++)
        if (t->bpe.byte_ids[byte] != byte) return false;
    const struct added_token *token = t->added.list;
    return token->special && token->id == TOKENIZER_END_OF_TEXT && t->end_of_text == token->id &&
           strcmp(token->text, "<|endoftext|>") == 0;
}

static uint64_t fingerprint(const struct tokenizer *t) {
    struct hash h = hash_begin();
    bpe_add_to_hash(&t->bpe, &h);
    for (size_t i = 0; i < t->added.count; i++) {
        const struct added_token *a = &t->added.list[i];
        const int32_t numbers[] = {a->id, a->special, a->late};
        hash_add(&h, numbers, sizeof numbers);
        hash_add(&h, a->text, a->bytes + 1);
    }
    if (!t->is_bytes) pretokenizer_add_to_hash(&t->words, &h); // single bytes are not merged, however they are cut
    hash_add(&h, &t->end_of_text, sizeof t->end_of_text);
    return hash_end(&h);
}

static bool read_files(struct tokenizer *t, const char *path, const char *config_path, char *error, size_t error_size) {
    cJSON *root = file_parse_json(t->file.text, t->file.bytes, path, error, error_size);
    bool done = root && read_tokenizer(t, root, path, error, error_size);
    cJSON_Delete(root);
    done = done && (!t->config.text || read_config(t, config_path, error, error_size));
    if (!done) return false;
    find_usual_end_of_text(t);
    t->is_bytes = equals_bytes(t);
    t->hash = fingerprint(t);
    return true;
}

static struct tokenizer *create(void) {
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t) fail_internal("tokenizer", "no memory");
    t->end_of_text = -1;
    return t;
}

// Takes over the object. As file_write_json would write it.
static struct text_file print_json(cJSON *json) {
    struct text_file file = {.text = cJSON_Print(json)};
    cJSON_Delete(json);
    if (!file.text) fail_internal("tokenizer", "no memory for its text");
    file.bytes = strlen(file.text);
    file.text[file.bytes++] = '\n'; // in place of the final zero
    return file;
}

struct tokenizer *tokenizer_open_bytes(void) {
    char error[256];
    struct tokenizer *t = create();
    t->file = print_json(byte_level_make_tokenizer());
    t->config = print_json(byte_level_make_config());
    if (!read_files(t, "tokenizer.json", "tokenizer_config.json", error, sizeof error))
        fail_internal("tokenizer", "of bytes is not read: %s", error);
    return t;
}

// path itself, or tokenizer.json in it, and tokenizer_config.json in the same folder.
static void find_files(const char *path, char file[FILE_PATH], char config[FILE_PATH]) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        file_path(file, path, "tokenizer.json");
        file_path(config, path, "tokenizer_config.json");
        return;
    }
    file_path(file, path, ""); // for its check of the length
    file[strlen(path)] = 0;
    char folder[FILE_PATH];
    const char *slash = strrchr(path, '/');
    size_t length = slash ? (size_t)(slash - path) : 1;
    memcpy(folder, slash ? path : ".", length);
    folder[length] = 0;
    file_path(config, folder, "tokenizer_config.json");
}

struct tokenizer *tokenizer_open(const char *path, char *error, size_t error_size) {
    char file[FILE_PATH], config[FILE_PATH];
    find_files(path, file, config);
    struct tokenizer *t = create();
    struct stat info;
    bool has_config = stat(config, &info) == 0 || errno != ENOENT;
    bool done = (t->file.text = file_read(file, &t->file.bytes, error, error_size)) &&
                (!has_config || (t->config.text = file_read(config, &t->config.bytes, error, error_size))) &&
                read_files(t, file, config, error, error_size);
    if (done) return t;
    tokenizer_close(t);
    return NULL;
}

void tokenizer_close(struct tokenizer *t) {
    if (!t) return;
    added_tokens_close(&t->added);
    bpe_close(&t->bpe);
    pretokenizer_close(&t->words);
    free(t->file.text);
    free(t->config.text);
    free(t);
}

// ---- questions ----

int tokenizer_vocab(const struct tokenizer *t) { return (int)t->bpe.vocab; }

int32_t tokenizer_end_of_text(const struct tokenizer *t) { return t->end_of_text; }

int32_t tokenizer_find(const struct tokenizer *t, const char *token) {
    const struct added_token *found = added_tokens_find(&t->added, token, strlen(token));
    return found ? found->id : -1;
}

bool tokenizer_is_bytes(const struct tokenizer *t) { return t->is_bytes; }

static const struct bpe_token *find_token(const struct tokenizer *t, int32_t id) {
    return id >= 0 && (size_t)id < t->bpe.vocab && t->bpe.tokens[id].present ? &t->bpe.tokens[id] : NULL;
}

size_t tokenizer_token_bytes(const struct tokenizer *t, int32_t id) {
    const struct bpe_token *token = find_token(t, id);
    return token && !token->special ? token->bytes : 0;
}

uint64_t tokenizer_hash(const struct tokenizer *t) { return t->hash; }

// ---- encoding ----

struct encoder {
    const struct tokenizer *t;
    struct token_list *out;
    bool special;
};

static void encode_word(void *context, const char *word, size_t bytes) {
    const struct encoder *e = context;
    bpe_encode(&e->t->bpe, word, bytes, e->out);
}

// Looks for added tokens of one kind, for those of the next between them, and cuts what is left into words. A special
// token that is not wanted still hides those that begin inside it, as in Hugging Face's tokenizers.
static void encode_from(struct encoder *e, int late, const char *text, size_t bytes) {
    if (late > 1) {
        if (bytes) pretokenizer_split(&e->t->words, text, bytes, encode_word, e);
        return;
    }
    size_t done = 0, at = 0;
    for (const struct added_token *a; (a = added_tokens_next(&e->t->added, late, text, bytes, &at)); at += a->bytes) {
        if (a->special && !e->special) continue;
        encode_from(e, late + 1, text + done, at - done);
        token_list_reserve(e->out, 1);
        e->out->ids[e->out->count++] = a->id;
        done = at + a->bytes;
    }
    encode_from(e, late + 1, text + done, bytes - done);
}

void tokenizer_encode(const struct tokenizer *t, const char *text, size_t bytes, bool special, struct token_list *out) {
    struct encoder e = {t, out, special};
    encode_from(&e, 0, text, bytes);
}

// ---- decoding ----

static const char *text_of(const struct tokenizer *t, int32_t id, size_t *bytes) {
    const struct bpe_token *token = find_token(t, id);
    *bytes = 1;
    if (!token) return "?";
    if (id == t->end_of_text) return "\n";
    *bytes = token->bytes;
    return t->bpe.text + token->start;
}

size_t tokenizer_decode(const struct tokenizer *t, char *out, size_t capacity, const int32_t *ids, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n && used < capacity; i++) {
        size_t bytes;
        const char *text = text_of(t, ids[i], &bytes);
        if (bytes > capacity - used) bytes = capacity - used;
        memcpy(out + used, text, bytes);
        used += bytes;
    }
    return used;
}

size_t tokenizer_decode_room(const struct tokenizer *t, const int32_t *ids, size_t n) {
    size_t room = 0;
    for (size_t i = 0; i < n; i++) {
        size_t bytes;
        text_of(t, ids[i], &bytes);
        room += bytes;
    }
    return room;
}

// ---- writing ----

// A folder without tokenizer_config.json gets one that says how to read the other file.
static struct text_file make_config(const struct tokenizer *t) {
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "tokenizer_class", "PreTrainedTokenizerFast");
    for (size_t i = 0; i < t->added.count; i++)
        if (t->added.list[i].id == t->end_of_text) cJSON_AddStringToObject(root, "eos_token", t->added.list[i].text);
    cJSON_AddFalseToObject(root, "clean_up_tokenization_spaces");
    return print_json(root);
}

bool tokenizer_write(const struct tokenizer *t, const char *folder, char *error, size_t error_size) {
    char path[FILE_PATH];
    struct text_file made = t->config.text ? (struct text_file){0} : make_config(t);
    const struct text_file *config = t->config.text ? &t->config : &made;
    file_path(path, folder, "tokenizer.json");
    bool done = file_write(path, t->file.text, t->file.bytes, error, error_size);
    file_path(path, folder, "tokenizer_config.json");
    done = done && file_write(path, config->text, config->bytes, error, error_size);
    free(made.text);
    return done;
}
