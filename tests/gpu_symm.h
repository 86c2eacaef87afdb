// What tests/gpu_symm.c does on the GPU.
#ifndef MOK_TESTS_GPU_SYMM_H
#define MOK_TESTS_GPU_SYMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// words [n] become the pattern of a rank, which may be another one's piece.
void fill_pattern(uint32_t *words, int rank, size_t n);
// wrong (device) += how many of words [n] are not a rank's pattern; rank -1: not zero
void count_wrong(uint64_t *wrong, const uint32_t *words, int rank, size_t n);

#ifdef __cplusplus
}
#endif

#endif
