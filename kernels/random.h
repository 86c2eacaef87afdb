// Integer random numbers (splitmix64): the same on every machine, cheap to start anywhere.
#ifndef MOK_KERNELS_RANDOM_H
#define MOK_KERNELS_RANDOM_H

#include <stdint.h>

// A bijection of 64-bit numbers that scatters neighbours: different numbers give different, unrelated ones.
static inline uint64_t random_mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The next 64 random bits of a stream whose state the caller keeps.
static inline uint64_t random_next(uint64_t *state) {
    uint64_t bits = random_mix(*state);
    *state += 0x9e3779b97f4a7c15ull;
    return bits;
}

// Uniform in 0 .. n-1, for n up to 2^32.
static inline uint64_t random_below(uint64_t *state, uint64_t n) { return ((random_next(state) >> 32) * n) >> 32; }

// Uniform in [0, 1) from 64 random bits.
static inline double random_uniform(uint64_t bits) { return (double)(bits >> 11) * 0x1p-53; }

#endif
