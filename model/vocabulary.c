#include "model/vocabulary.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/source.h"
#include "kernels/fail.h"

static bool has_tokenizer(const char *folder) {
    char path[FILE_PATH];
    file_path(path, folder, "tokenizer.json");
    return access(path, F_OK) == 0;
}

// Text to make ids of. What is not there is neither text nor shards, and opening it will say so.
static bool is_text(const char *data) {
    return strcmp(data, "stories") == 0 || (access(data, F_OK) == 0 && !source_is_shards(data));
}

// The first text that training or evaluation reads; NULL: none.
static const char *find_text(const struct options *o) {
    const char *eval = o->eval_data[0] ? o->eval_data : o->data;
    if (!o->evaluate && is_text(o->data)) return o->data;
    return is_text(eval) ? eval : NULL;
}

static void folder_of(char folder[OPTION_TEXT], const char *path) {
    const char *slash = strrchr(path, '/');
    snprintf(folder, OPTION_TEXT, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
}

// required: the run cannot do without knowing what its ids stand for.
static struct tokenizer *open_found(const char *folder, bool required) {
    char error[FILE_ERROR];
    struct tokenizer *t = tokenizer_open(folder, error, sizeof error);
    if (!t && required) fail_user("tokenizer", "%s; name another one with --tokenizer", error);
    if (!t) fail_warn("tokenizer", "%s; samples are printed as ids", error);
    return t;
}

struct tokenizer *vocabulary_open(const struct options *o, const char *named, const char *folder) {
    char error[FILE_ERROR], beside[OPTION_TEXT];
    if (strcmp(named, "bytes") == 0) return tokenizer_open_bytes();
    if (named[0]) {
        struct tokenizer *t = tokenizer_open(named, error, sizeof error);
        if (!t) fail_user("--tokenizer", "%s", error);
        return t;
    }
    bool shards = source_is_shards(o->data);
    const char *text = find_text(o);
    if (folder[0] && has_tokenizer(folder)) return open_found(folder, o->generate || text);
    folder_of(beside, o->data);
    if (shards && has_tokenizer(beside)) return open_found(beside, text);
    if (!shards && !folder[0]) return tokenizer_open_bytes();
    if (!o->generate && text)
        fail_user("--tokenizer",
                  "found none beside %s, wanted the one of its ids to read %s; name it, or give bytes where every byte "
                  "is an id",
                  folder[0] ? folder : o->data, text);
    return NULL;
}
