// A folder under /tmp for every test, and its files.
#ifndef MOK_TESTS_FOLDER_H
#define MOK_TESTS_FOLDER_H

#include "tests/test.h"

#include <ftw.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64]; // of this test, empty at its start

static inline int make_root(void **state) {
    (void)state;
    strcpy(root, "/tmp/mok_test_XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static inline int remove_entry(const char *path, const struct stat *info, int type, struct FTW *level) {
    (void)info, (void)type, (void)level;
    return remove(path);
}

static inline void remove_tree(const char *path) {
    assert_int_equal(nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS), 0);
}

static inline int remove_root(void **state) {
    (void)state;
    return nftw(root, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

// root/name, in one of a few buffers that are used in turn.
static inline const char *at(const char *name) {
    static char paths[16][256];
    static int next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

static inline bool exists(const char *name) {
    struct stat info;
    return lstat(at(name), &info) == 0;
}

static inline void write_file(const char *name, const void *data, size_t bytes) {
    FILE *file = fopen(at(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

// The file's bytes and a final zero; free with free().
static inline char *read_bytes(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("cannot open %s", path);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *data = calloc(1, *bytes + 1);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    fclose(file);
    return data;
}

static inline void assert_contains(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("found \"%s\", wanted it to contain \"%s\"", text, part);
}

#endif
