// Where tokens come from: the built-in stories or a text file, cut into windows, in an order that depends on the seed
// and the global sequence number only (never on ranks, batch size or what was read before).
#ifndef MOK_DATA_DATA_H
#define MOK_DATA_DATA_H

#include <stdint.h>
#include <stdio.h>

enum data_split { DATA_TRAIN, DATA_EVAL };

struct data;

// spec: "stories", or the path of a text file ("./stories" for a file of that name).
// eval_spec: NULL or "" to hold out the end of spec, else another spec whose whole content is the eval split.
// length: T, tokens per sequence. lookahead: tokens after them that targets need, 1 + MTP depth.
// Files stay open and must not change until data_close. A spec that cannot be used ends the program (exit 2).
struct data *data_open(const char *spec, const char *eval_spec, uint64_t seed, int length, int lookahead);
void data_close(struct data *d);

// Number of token ids: 257, the bytes and the end of text.
int data_vocab(const struct data *d);

// Sequences per epoch of a split; 0: unlimited (stories).
uint64_t data_windows(const struct data *d, enum data_split split);

// Fills tokens [T + lookahead] of a split's global sequence number. Reads no state that other calls change, so threads
// may share d. Training shuffles anew in every epoch; evaluation keeps the order of the file. Both wrap.
void data_read(const struct data *d, enum data_split split, uint64_t sequence, int32_t *tokens);

// The epoch that a sequence number belongs to, 0 first; always 0 for stories.
uint64_t data_epoch(const struct data *d, enum data_split split, uint64_t sequence);

// Two lines, one per split: source, tokens, windows.
void data_describe(const struct data *d, FILE *file);

#endif
