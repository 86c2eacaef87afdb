// One stream of tokens, whatever is behind it: the built-in stories, a text file, or token shards put end to end.
#ifndef MOK_DATA_SOURCE_H
#define MOK_DATA_SOURCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "data/files.h"

struct token_file;
struct tokenizer;

// Why something could not be opened or read: one line that begins with the place.
struct data_error {
    bool internal; // the machine is to blame, not the user
    char line[FILE_ERROR];
};

enum source_kind {
    SOURCE_STORIES, // without end, told from a random state
    SOURCE_BYTES,   // a text file whose bytes are its tokens, and one end of text
    SOURCE_ENCODED, // a text file that a tokenizer turned into ids when it was opened, and one end of text
    SOURCE_SHARDS,
};

struct source {
    char *spec; // as it was given
    enum source_kind kind;
    const struct tokenizer *tokenizer; // NULL: text and stories are bytes, of shards it is not known
    uint64_t tokens;                   // 0: without end
    int vocab;                         // every id is below it, or should be:
    bool vocab_known;                  // a shard's header need not say

    int text; // text files: the descriptor
    struct file_id text_id;
    uint64_t text_bytes;
    int32_t *ids; // SOURCE_ENCODED: [tokens]

    struct token_file *shards; // SOURCE_SHARDS: [shard_count], in the order of the stream
    uint64_t *starts;          // [shard_count + 1] the stream's position of each shard's first token, and the end
    size_t shard_count;
};

// Whether the spec stands for token shards: a pattern (* ? [) that is no file's name, a file that is one, or one that
// should be by its name, NAME.bin.
bool source_is_shards(const char *spec);

// spec: "stories", the path of a text file or token shard, or a pattern (* ? [) of token shards, which are put end to
// end in the order of their paths' bytes. A file named like a shard must be one. flag: where the spec was given, for
// messages. tokenizer: NULL for bytes; it must outlive the source. A text file that it encodes stays in memory and may
// have 1 GiB; shards whose header names another tokenizer or has a larger vocabulary are refused, and a smaller one gets
// a warning. false with the reason in e, and nothing to close.
bool source_open(struct source *s, const char *spec, const char *flag, const struct tokenizer *tokenizer,
                 struct data_error *e);
void source_close(struct source *s);

// The path of the first file of a that b reads too, under whatever name; NULL: none.
const char *source_find_shared(const struct source *a, const struct source *b);

// tokens [n] from position start on; start + n must not exceed s->tokens. Ids at or above vocab (0: not settled yet)
// are an error, and so is a file whose size has changed. Not for stories. Threads may share s.
bool source_read(const struct source *s, uint64_t start, size_t n, int vocab, int32_t *tokens, struct data_error *e);

// tokens [n] of the stories that the random state rng (kernels/random.h) stands for.
void source_tell(const struct source *s, uint64_t rng, size_t n, int32_t *tokens);

// Prints "3 shards, 1200 tokens of 16 bits", or what else it is.
void source_describe(const struct source *s, FILE *file);

#endif
