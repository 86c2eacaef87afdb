// Multiple-choice questions in llm.c's format: 256 little-endian int32 (magic 20240522, version 1, number of examples,
// bytes of the longest; ours adds, in two ints that llm.c leaves 0, low and high half of the hash of the tokenizer that
// made the ids), then per example a run of little-endian uint16:
//   65535, bytes of the example (these fields too), its index, label, completions, then a length and ids for the
//   context and for every completion.
#ifndef MOK_DATA_CHOICES_H
#define MOK_DATA_CHOICES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "data/files.h"

struct tokenizer;

enum {
    CHOICES_HEADER = 1024,      // bytes
    CHOICES_LEAST = 2,          // completions of one example,
    CHOICES_MOST = 16,          // llm.c has 4
    CHOICES_ID_LIMIT = 65535,   // every id is below it: it marks the start of an example
    CHOICES_EXAMPLES = 65535,   // at most
    CHOICES_EXAMPLE_MAX = 65534 // bytes: they are a uint16, and even
};

struct choice_ids {
    const uint16_t *ids; // into the file's content
    int count;           // at least 1
};

struct choice_example {
    int label, completions;
    struct choice_ids context, completion[CHOICES_MOST];
};

struct choices {
    char *path;
    int count, largest_id;
    uint64_t tokenizer;              // its hash; 0: the header has none
    struct choice_example *examples; // [count]
    uint16_t *content;
};

// Whether a regular file begins with the magic number.
bool choices_is(const char *path);

// Reads the whole file, at most 1 GiB, and checks every number in it. tokenizer: NULL if it is not known, else a
// file whose header names another one is refused. vocab: ids must be below it; 0: not known. On failure there is one
// line in error and nothing to close.
bool choices_open(struct choices *c, const char *path, const struct tokenizer *tokenizer, int vocab, char *error,
                  size_t error_size);
void choices_close(struct choices *c);

// Writes path.tmp; finish flushes it to disk and renames it to path. A function that returns false has removed path.tmp
// and closed the writer.
struct choices_writer {
    FILE *file; // NULL: closed
    char path[FILE_PATH], temporary[FILE_PATH];
    int count, longest;
    uint64_t tokenizer;
};
// tokenizer: hash of the one that makes the ids, 0 if it is not known.
bool choices_writer_begin(struct choices_writer *w, const char *path, uint64_t tokenizer, char *error,
                          size_t error_size);

// The next example. What the format cannot hold is refused: lists that are empty, ids at or above CHOICES_ID_LIMIT,
// more bytes than CHOICES_EXAMPLE_MAX, more examples than CHOICES_EXAMPLES.
struct choice_list {
    const int32_t *ids;
    size_t count;
};
bool choices_writer_append(struct choices_writer *w, int label, struct choice_list context,
                           const struct choice_list *completions, int count, char *error, size_t error_size);
bool choices_writer_finish(struct choices_writer *w, char *error, size_t error_size);
// Closes and removes path.tmp. Harmless on a closed writer.
void choices_writer_abandon(struct choices_writer *w);

#endif
