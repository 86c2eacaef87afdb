// How much scratch memory the operations take. Each asks here for what it uses, and the plan of a run asks here too.
#ifndef MOK_KERNELS_CUDA_SCRATCH_H
#define MOK_KERNELS_CUDA_SCRATCH_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// rmsnorm_backward: blocks of rows leave their part of dw. There are at most NORM_CHUNKS of them, and each but the last
// one has norm_chunk_rows rows, a multiple of NORM_CHUNK_ROWS.
enum { NORM_CHUNK_ROWS = 16, NORM_CHUNKS = 2048 };
int norm_chunk_rows(int rows);
size_t scratch_rmsnorm_backward(int rows, int width);

// embedding_backward: tokens sorted by id, and the sums of EMBEDDING_CHUNK_ROWS rows of one id where it has many.
enum { EMBEDDING_CHUNK_ROWS = 64 };
struct embedding_scratch {
    size_t keys;     // [rows] 64-bit, sorted in tiles
    size_t sorted;   // [rows] 64-bit, sorted
    size_t segments; // [rows] two ints
    size_t partials; // [rows / EMBEDDING_CHUNK_ROWS, hidden] accum
    size_t bytes;    // of everything; the others are where each begins
};
struct embedding_scratch scratch_embedding_layout(int rows, int hidden);
size_t scratch_embedding_backward(int rows, int hidden);

// device_add_sum, device_sum_squares: sums of at most SUM_PIECES pieces, and the result.
enum { SUM_PIECES = 1 << 14 };
size_t scratch_sum(void);

#ifdef __cplusplus
}
#endif

#endif
