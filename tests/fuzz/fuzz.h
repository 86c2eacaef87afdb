// What every fuzz target starts with: inputs that are files, and code that ends the program.
//
// A target is a file fuzz_NAME.c with LLVMFuzzerTestOneInput. It checks more than that nothing crashes: what a parser
// accepts must be what it says, and what it refuses leaves one line that begins with the path.
#ifndef MOK_TESTS_FUZZ_FUZZ_H
#define MOK_TESTS_FUZZ_FUZZ_H

#include <fcntl.h>
#include <ftw.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/hash.h"
#include "data/token_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define fuzz_require(condition)                                                                                        \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: wanted %s\n", __FILE__, __LINE__, #condition);                                     \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

// ---- code that ends the program (fail.c beside this file) ----

// Where fail_user jumps to after fuzz_arm; without it, and in fail_internal, it aborts, which the fuzzer reports:
//
//     fuzz_arm();
//     if (setjmp(fuzz_stop) == 0) options_parse(...);
//     fuzz_disarm();
//
// Memory and descriptors that the code got since fuzz_arm are given back before the jump, as the end of the program
// would do. Streams are not: there may be none open at a user error.
extern jmp_buf fuzz_stop;
void fuzz_arm(void);
void fuzz_disarm(void);

// ---- files ----

static char fuzz_folder[64]; // of this process, made by fuzz_make_folder

static inline int fuzz_remove_entry(const char *path, const struct stat *info, int type, struct FTW *level) {
    (void)info, (void)type, (void)level;
    return remove(path);
}

static inline void fuzz_remove_folder(void) { nftw(fuzz_folder, fuzz_remove_entry, 8, FTW_DEPTH | FTW_PHYS); }

// In memory where there is such a place. A process that crashes leaves it, so fuzz.sh sets TMPDIR.
static inline void fuzz_make_folder(void) {
    const char *parent = getenv("TMPDIR");
    if (fuzz_folder[0]) return;
    snprintf(fuzz_folder, sizeof fuzz_folder, "%s/mok_fuzz_XXXXXX", parent && strlen(parent) < 40 ? parent : "/tmp");
    fuzz_require(mkdtemp(fuzz_folder));
    atexit(fuzz_remove_folder);
}

// The path of a name in the folder, in one of a few buffers that are used in turn.
static inline const char *fuzz_path(const char *name) {
    static char paths[8][128];
    static int next;
    char *path = paths[next++ % 8];
    fuzz_make_folder();
    snprintf(path, sizeof paths[0], "%s/%s", fuzz_folder, name);
    return path;
}

// Writes two pieces as one file and returns its path.
static inline const char *fuzz_write_two(const char *name, const void *head, size_t head_size, const void *data,
                                         size_t size) {
    const char *path = fuzz_path(name);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    fuzz_require(file >= 0);
    fuzz_require(write(file, head, head_size) == (ssize_t)head_size);
    fuzz_require(write(file, data, size) == (ssize_t)size);
    close(file);
    return path;
}

static inline const char *fuzz_write(const char *name, const void *data, size_t size) {
    return fuzz_write_two(name, "", 0, data, size);
}

// A safetensors file. An input that begins with '{' is its header as one line, then the data: the eight bytes of length
// are put before it, because mutations would hardly ever keep them right. Every other input is the file as it is.
static inline const char *fuzz_write_safetensors(const char *name, const uint8_t *data, size_t size) {
    if (!size || data[0] != '{') return fuzz_write(name, data, size);
    const uint8_t *end = memchr(data, '\n', size);
    size_t header = end ? (size_t)(end - data) : size;
    uint64_t length = header; // little-endian, as every machine this runs on
    unsigned char *head = malloc(8 + header);
    memcpy(head, &length, 8);
    memcpy(head + 8, data, header);
    const char *path =
        fuzz_write_two(name, head, 8 + header, data + header + (end != NULL), size - header - (end != NULL));
    free(head);
    return path;
}

// A token shard: a byte of switches, the eight ints of the header that are used, and the ids; the rest of the header is
// zeros. The switches put the right number of ids and the right hash in, which mutations would hardly ever find.
// Shorter inputs, and those with FUZZ_RAW, are the file as it is, behind the switches.
enum { FUZZ_FIX_COUNT = 1, FUZZ_FIX_HASH = 2, FUZZ_RAW = 4, FUZZ_SHARD_INTS = 32 };

static inline const char *fuzz_write_shard(const char *name, const uint8_t *data, size_t size) {
    unsigned char header[TOKEN_FILE_HEADER] = {0};
    uint8_t switches = size ? data[0] : 0;
    if (size < 1 + FUZZ_SHARD_INTS || switches & FUZZ_RAW)
        return fuzz_write(name, data + (size > 0), size - (size > 0));
    const uint8_t *ids = data + 1 + FUZZ_SHARD_INTS;
    size_t bytes = size - 1 - FUZZ_SHARD_INTS;
    memcpy(header, data + 1, FUZZ_SHARD_INTS);
    if (switches & FUZZ_FIX_COUNT) {
        uint32_t magic;
        memcpy(&magic, header, 4);
        uint32_t count = (uint32_t)(bytes / (magic == 20240801 ? 4 : 2));
        memcpy(header + 8, &count, 4);
    }
    if (switches & FUZZ_FIX_HASH) {
        struct hash h = hash_begin();
        hash_add(&h, ids, bytes);
        uint64_t hash = hash_end(&h);
        memcpy(header + 16, &hash, 8);
    }
    return fuzz_write_two(name, header, sizeof header, ids, bytes);
}

// ---- inputs that are lists of lines ----

enum { FUZZ_ARGUMENTS = 64 };

// A command line of the program and one argument per line; text is a copy of the input that the arguments lie in.
struct fuzz_arguments {
    char *text, *argv[FUZZ_ARGUMENTS + 2];
    int argc;
};

static inline struct fuzz_arguments fuzz_cut_arguments(const uint8_t *data, size_t size) {
    struct fuzz_arguments a = {.text = malloc(size + 1), .argv = {"train"}, .argc = 1};
    memcpy(a.text, data, size);
    a.text[size] = 0;
    char *rest = a.text;
    while (rest && a.argc <= FUZZ_ARGUMENTS) a.argv[a.argc++] = strsep(&rest, "\n");
    return a;
}

// ---- inputs of several parts ----

struct fuzz_part {
    const uint8_t *data;
    size_t size;
};

// Cuts an input at its lines "%%" into at most `most` parts; returns how many.
static inline size_t fuzz_cut(const uint8_t *data, size_t size, struct fuzz_part *parts, size_t most) {
    static const char line[] = "\n%%\n";
    size_t count = 0, length = sizeof line - 1;
    while (count + 1 < most) {
        const uint8_t *end = size ? memmem(data, size, line, length) : NULL;
        if (!end) break;
        parts[count++] = (struct fuzz_part){data, (size_t)(end - data)};
        size -= (size_t)(end - data) + length;
        data = end + length;
    }
    parts[count++] = (struct fuzz_part){data, size};
    return count;
}

// ---- what every reader owes ----

// One line that begins with the path, and not more than fits.
static inline void fuzz_check_error(const char *error, size_t error_size, const char *path) {
    fuzz_require(strnlen(error, error_size) < error_size);
    fuzz_require(strncmp(error, path, strlen(path)) == 0);
    fuzz_require(strlen(error) > strlen(path));
}

#endif
