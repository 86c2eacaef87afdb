#include "model/vocabulary.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/token_file.h"
#include "kernels/fail.h"

static bool has_tokenizer(const char *folder) {
    char path[FILE_PATH];
    file_path(path, folder, "tokenizer.json");
    return access(path, F_OK) == 0;
}

// Token shards: one, or a pattern of them.
static bool is_shards(const char *data) {
    return token_file_is(data) || (strpbrk(data, "*?[") && access(data, F_OK) != 0);
}

static void folder_of(char folder[OPTION_TEXT], const char *path) {
    const char *slash = strrchr(path, '/');
    snprintf(folder, OPTION_TEXT, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
}

// ids_given: the run can do without knowing what its ids stand for.
static struct tokenizer *open_found(const char *folder, bool ids_given) {
    char error[FILE_ERROR];
    struct tokenizer *t = tokenizer_open(folder, error, sizeof error);
    if (!t && !ids_given) fail_user("tokenizer", "%s; name another one with --tokenizer", error);
    if (!t) fail_warn("tokenizer", "%s; samples are printed as ids", error);
    return t;
}

struct tokenizer *vocabulary_open(const struct options *o, const char *folder) {
    char error[FILE_ERROR], beside[OPTION_TEXT];
    bool shards = is_shards(o->data);
    if (strcmp(o->tokenizer, "bytes") == 0) return tokenizer_open_bytes();
    if (o->tokenizer[0]) {
        struct tokenizer *t = tokenizer_open(o->tokenizer, error, sizeof error);
        if (!t) fail_user("--tokenizer", "%s", error);
        return t;
    }
    if (folder[0] && has_tokenizer(folder)) return open_found(folder, shards);
    folder_of(beside, o->data);
    if (shards && has_tokenizer(beside)) return open_found(beside, true);
    return shards || folder[0] ? NULL : tokenizer_open_bytes();
}
