// How rows are moved in the arm "unfused" of bench_layer: by kernels that do nothing else. q: of one macrobatch.
#ifndef MOK_TESTS_BENCH_UNFUSED_H
#define MOK_TESTS_BENCH_UNFUSED_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct mok_parameters; // kernels/cuda/mok_parameters.h

// The most warps that move on each multiprocessor: as many as a block of the megakernel has.
enum { UNFUSED_WARPS = 12 };

// Rows of tokens from their ranks into the ring, by so many warps of every multiprocessor. Many fill the memory's bandwidth;
// with few more rows find one of their token in the ring already, and are copied in place of being pulled again. counters
// [mok_counter_total] become zeros first.
void unfused_pull(const struct mok_parameters *q, int32_t *counters, int warps);
// Rows of out [ring_rows, H] to the slots of their tokens, by UNFUSED_WARPS warps of every multiprocessor. After a pull.
void unfused_push(const struct mok_parameters *q, const real *out);
// d_gates [ring_rows] of rows to their slots in the ranks' [tokens, K], which lie at d_gates_at in symmetric memory.
void unfused_push_gates(const struct mok_parameters *q, size_t d_gates_at, const accum *d_gates);

#ifdef __cplusplus
}
#endif

#endif
