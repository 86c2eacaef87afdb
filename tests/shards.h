// Token shards for tests, made byte by byte.
#ifndef MOK_TESTS_SHARDS_H
#define MOK_TESTS_SHARDS_H

#include "tests/folder.h"

static inline void store(unsigned char *bytes, uint64_t value, int count) {
    for (int i = 0; i < count; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

// A header as llm.c's scripts write it: three ints and zeros.
static inline void make_header(unsigned char header[1024], int id_bytes, uint32_t count) {
    memset(header, 0, 1024);
    store(header, id_bytes == 2 ? 20240520 : 20240801, 4);
    store(header + 4, id_bytes == 2 ? 1 : 7, 4);
    store(header + 8, count, 4);
}

// root/name with the ids begin, begin + step, ...; vocab is 0 in llm.c's files.
static inline void write_shard(const char *name, int id_bytes, uint32_t vocab, uint32_t count, uint32_t begin,
                               uint32_t step) {
    unsigned char *bytes = calloc(1, 1024 + (size_t)count * 4);
    make_header(bytes, id_bytes, count);
    store(bytes + 12, vocab, 4);
    for (uint32_t i = 0; i < count; i++) store(bytes + 1024 + i * (size_t)id_bytes, begin + step * i, id_bytes);
    write_file(name, bytes, 1024 + (size_t)count * (size_t)id_bytes);
    free(bytes);
}

// Says in the header of root/name which tokenizer made its ids.
static inline void set_tokenizer(const char *name, uint64_t hash) {
    unsigned char bytes[8];
    FILE *file = fopen(at(name), "r+b");
    store(bytes, hash, 8);
    assert_non_null(file);
    assert_int_equal(fseeko(file, 24, SEEK_SET), 0);
    assert_int_equal(fwrite(bytes, 1, 8, file), 8);
    assert_int_equal(fclose(file), 0);
}

// A hole with one id at its end; false where the file system has no large files or holes.
static inline bool write_sparse_shard(const char *name, uint32_t count, uint16_t last) {
    unsigned char bytes[1024];
    make_header(bytes, 2, count);
    write_file(name, bytes, sizeof bytes);
    FILE *file = fopen(at(name), "r+b");
    off_t end = 1024 + 2 * (off_t)count;
    store(bytes, last, 2);
    bool made = file && ftruncate(fileno(file), end) == 0 && fseeko(file, end - 2, SEEK_SET) == 0 &&
                fwrite(bytes, 1, 2, file) == 2;
    return file && fclose(file) == 0 && made;
}

static inline void change_byte(const char *name, off_t place) {
    FILE *file = fopen(at(name), "r+b");
    assert_non_null(file);
    assert_int_equal(fseeko(file, place, SEEK_SET), 0);
    int byte = fgetc(file);
    assert_true(byte != EOF);
    assert_int_equal(fseeko(file, place, SEEK_SET), 0);
    assert_int_equal(fputc(byte ^ 1, file), byte ^ 1);
    assert_int_equal(fclose(file), 0);
}

#endif
