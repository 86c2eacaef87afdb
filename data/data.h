// Where training and evaluation get their tokens: a source (data/source.h) cut into windows, in an order that depends on
// the seed and the global sequence number only (never on ranks, batch size or what was read before).
#ifndef MOK_DATA_DATA_H
#define MOK_DATA_DATA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "data/source.h"

enum data_split { DATA_TRAIN, DATA_EVAL };

struct cJSON;
struct data;

// spec: "stories", the path of a text file ("./stories" for a file of that name) or token shard, or a pattern of token
// shards. eval_spec: NULL or "" to hold out the end of spec, else another spec whose whole content is the eval split.
// tokenizer: NULL if text is bytes; it must outlive the data.
// length: T, tokens per sequence. lookahead: tokens after them that targets need, 1 + MTP depth.
// Files stay open and must not change until data_close. A spec that cannot be used ends the program (exit 2); a file
// that both splits read gets a warning.
struct data *data_open(const char *spec, const char *eval_spec, const struct tokenizer *tokenizer, uint64_t seed,
                       int length, int lookahead);
void data_close(struct data *d);

// Settles the vocabulary and returns it: wanted, or with wanted 0 that of the data. One that does not hold every id the
// data may have ends the program (exit 2). Shards whose header has no vocabulary get the tokenizer's if there is one,
// else 50257 (uint16 ids) or 128256 (uint32 ids); any wanted one will do for them, since ids at or above the settled
// vocabulary are refused when they are read.
int data_settle_vocab(struct data *d, int wanted);

// Sequences per epoch of a split; 0: unlimited (stories).
uint64_t data_windows(const struct data *d, enum data_split split);

// Fills tokens [T + lookahead] of a split's global sequence number; false with the reason in e where they cannot be
// read. Reads no state that other calls change, so threads may share d. Training shuffles anew in every epoch;
// evaluation keeps the order of the file. Both wrap.
bool data_read(const struct data *d, enum data_split split, uint64_t sequence, int32_t *tokens, struct data_error *e);

// The same, and a failure ends the program: exit 1 where the machine is to blame, else 2.
void data_read_or_fail(const struct data *d, enum data_split split, uint64_t sequence, int32_t *tokens);
_Noreturn void data_fail(const struct data_error *e);

// The epoch that a sequence number belongs to, 0 first; always 0 for stories.
uint64_t data_epoch(const struct data *d, enum data_split split, uint64_t sequence);

// Two lines, one per split: source, tokens, windows.
void data_describe(const struct data *d, FILE *file);

// ---- identity: what a resumed run must find again ----

// The train split, for the caller to free: {"files": [{"name", "bytes", "hash"}...], "tokens", "shards": true where
// they are, "length", "windows", "tokenizer": hash of the one that encoded the text or that the ids of shards are said
// to be of}, or {"stories": hash, "tokenizer"}. Without "tokenizer", text and stories are bytes, and of shards it is
// not known. Reads files (up to 256 MiB of them, some of larger ones); one that cannot be read ends the program.
struct cJSON *data_identity(const struct data *d);

// Whether both stand for the same sequences; names of files may differ, and shards may have got a tokenizer where none
// was known. If not, the first difference goes to difference [size], in words.
bool data_identity_equal(const struct cJSON *before, const struct cJSON *now, char *difference, size_t size);

#endif
