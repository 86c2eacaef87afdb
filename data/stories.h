// The built-in data: short English tales from a small grammar, so that training needs no download. Integers only, so
// every machine tells the same tale from the same random state.
#ifndef MOK_DATA_STORIES_H
#define MOK_DATA_STORIES_H

#include <stddef.h>
#include <stdint.h>

enum { STORIES_MAX_BYTES = 2048 };

// Writes the next story of the stream rng (kernels/random.h) to out [STORIES_MAX_BYTES] and returns its bytes: ASCII, one
// paragraph of 60 to 150 words, no final zero or newline.
size_t stories_write(uint64_t *rng, char *out);

#endif
