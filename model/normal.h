// Normally distributed numbers, the same on every machine.
#ifndef MOK_MODEL_NORMAL_H
#define MOK_MODEL_NORMAL_H

#include <stddef.h>
#include <stdint.h>

// x[i] = std * number i of the stream that key names, 0 <= i < n: mean 0, standard deviation std. By all threads.
void normal_fill(float *x, size_t n, double std, uint64_t key);

#endif
