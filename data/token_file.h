// Token shards: files of token ids in llm.c's format.
//
// 256 little-endian int32, then the ids. [0] magic: 20240520 for uint16 ids, 20240801 for uint32 ids. [1] version: 1 or
// 7. [2] number of ids, read as uint32. Ours adds, in ints that llm.c leaves 0: [3] size of the vocabulary, [4] and [5]
// low and high half of the hash (data/hash.h) of the id bytes, [6] and [7] the same of the tokenizer that made the ids
// (tokenizer_hash); 0 where they are not there.
//
// Functions return false with one line in error that begins with the path.
#ifndef MOK_DATA_TOKEN_FILE_H
#define MOK_DATA_TOKEN_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "data/files.h"
#include "data/hash.h"

enum { TOKEN_FILE_HEADER = 1024 }; // bytes

// ---- reading ----

struct token_file {
    char *path;
    struct file_id id;
    int fd, id_bytes;   // 2 or 4
    uint64_t count;     // ids
    uint32_t vocab;     // 0: the header has none
    uint64_t hash;      // 0: the header has none
    uint64_t tokenizer; // its hash; 0: the header has none
};

// A regular file that begins with one of the two magics. False for whatever cannot be read too.
bool token_file_is(const char *path);

// What a file that begins with these bytes seems to be, for messages: "an llm.c GPT-2 model", "a gzip file"; NULL when
// nothing is recognised.
const char *token_file_guess(const void *begin, size_t bytes);

// Strict: the size must be the header and the ids that it announces, exactly. The ids themselves are not read.
bool token_file_open(struct token_file *f, const char *path, char *error, size_t error_size);
void token_file_close(struct token_file *f);

// Whether the headers of both speak of the same tokenizer; what one of them lacks, the other must lack too.
bool token_file_is_like(const struct token_file *f, const struct token_file *first, char *error, size_t error_size);

// Bytes of the whole file.
uint64_t token_file_bytes(const struct token_file *f);

// ids [n] from position start on; start + n must not exceed count. An id at or above vocab_limit (0: the file's own
// vocab, if it has one, else 2^31) is an error that names file and position, and so is a file whose size has changed.
// On failure errno is 0 where the file is to blame, else the reason why it could not be read. Threads may share f.
bool token_file_read(const struct token_file *f, uint64_t start, size_t n, uint32_t vocab_limit, int32_t *ids,
                     char *error, size_t error_size);

// Reads it all and compares ids with the vocabulary and bytes with the hash, where the header has them. largest receives
// the largest id, -1 where there are none.
bool token_file_check(const struct token_file *f, int32_t *largest, char *error, size_t error_size);

// ---- writing ----

// Writes path.tmp, which becomes path when all of it is on the disk. A function that returns false has removed path.tmp
// and closed the writer.
struct token_writer {
    FILE *file; // NULL: closed
    char path[FILE_PATH], temporary[FILE_PATH];
    int id_bytes;
    uint32_t vocab;
    uint64_t count, tokenizer;
    struct hash hash;
};

// vocab: every id is below it. Up to 65536 the ids take 2 bytes, else 4. tokenizer: hash of the one that makes the ids,
// 0 if it is not known.
bool token_writer_begin(struct token_writer *w, const char *path, int vocab, uint64_t tokenizer, char *error,
                        size_t error_size);
// Refuses more than 2^31 - 1 ids in all, llm.c's limit, and ids outside the vocabulary, before it writes any.
bool token_writer_append(struct token_writer *w, const int32_t *ids, size_t n, char *error, size_t error_size);
bool token_writer_finish(struct token_writer *w, char *error, size_t error_size);
// Closes and removes path.tmp. Harmless on a closed writer.
void token_writer_abandon(struct token_writer *w);

#endif
