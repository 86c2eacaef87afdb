// A byte-level vocabulary and its merges: the ids of one word.
#ifndef MOK_DATA_BPE_H
#define MOK_DATA_BPE_H

#include "data/hash.h"
#include "data/tokenizer.h"

struct added_tokens;
struct cJSON;

enum { BPE_MOST_IDS = 1 << 24 };

// The text of id i is text + tokens[i].start.
struct bpe_token {
    uint32_t start;
    uint32_t bytes : 28;
    uint32_t present : 1; // ids may have holes
    uint32_t named : 1;   // holds characters outside the alphabet of bytes: no text is ever merged into it
    uint32_t whole : 1;   // a word of exactly this text becomes this id
    uint32_t special : 1;
};

struct bpe {
    struct bpe_token *tokens; // [vocab]
    size_t vocab;
    char *text;
    size_t text_bytes;
    struct bpe_word *words; // hash table [word_mask + 1] from text to id
    size_t word_mask;
    struct bpe_merge *merges;       // hash table [merge_mask + 1] from a pair of ids to the rank and id of their merge
    size_t merge_mask, merge_count; // pairs that come twice are counted twice
    int32_t byte_ids[256];
    bool ignore_merges; // a word that is in the vocabulary is not merged
};

// Reads the "model" of tokenizer.json and gives the added tokens their ids. On failure returns false with one line in
// error; bpe_close either way.
bool bpe_read(struct bpe *b, const struct cJSON *model, const struct added_tokens *added, const char *path, char *error,
              size_t error_size);
void bpe_close(struct bpe *b);

// Appends the ids of a word: its bytes, then again and again the pair of lowest rank, leftmost first, merged.
// Time n log n in its bytes.
void bpe_encode(const struct bpe *b, const char *word, size_t bytes, struct token_list *out);

// Makes room for count more ids. Out of memory ends the program (exit 1), as there is no text without ids.
void token_list_reserve(struct token_list *list, size_t count);

void bpe_add_to_hash(const struct bpe *b, struct hash *h);

// ---- what bpe_read builds the tables with ----

// Empty tables for ids below vocab, texts of text_bytes in all and merges [merges].
void bpe_create(struct bpe *b, size_t vocab, size_t text_bytes, size_t merges);
// A new id below vocab with its text; with find, bpe_find can see it.
void bpe_add_token(struct bpe *b, int32_t id, const char *text, size_t bytes, bool named, bool find);
// Id of a text, -1 if there is none. named: see bpe_token.
int32_t bpe_find(const struct bpe *b, const char *text, size_t bytes, bool named);
// left and right together become id. The last word about a pair counts.
void bpe_add_merge(struct bpe *b, int32_t left, int32_t right, int32_t id);
// Finds the words that need no merging; the tables are complete.
void bpe_mark_whole_words(struct bpe *b);

#endif
