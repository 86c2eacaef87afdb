// A thread that reads the training data of the next step while the present one computes.
#ifndef MOK_DATA_PREFETCH_H
#define MOK_DATA_PREFETCH_H

#include <stddef.h>
#include <stdint.h>

struct data;
struct prefetch;

// Reads `count` sequences of the train split at a time, every block stride sequences behind the one before it; in
// between are those of other ranks. window_tokens: of one sequence, the length + lookahead of d, which must outlive it.
struct prefetch *prefetch_open(const struct data *d, size_t window_tokens, int64_t count, int64_t stride);

// The sequences first .. first + count - 1, [count, window_tokens], valid until the next call. Where the thread has not
// read them yet, waits for it and adds the seconds to *waited. Any `first` may be asked for; the thread then begins with
// the block a stride further on. Ends the program when the data cannot be read. For one thread.
const int32_t *prefetch_take(struct prefetch *p, int64_t first, double *waited);

// Waits for the thread to end. NULL is fine.
void prefetch_close(struct prefetch *p);

#endif
