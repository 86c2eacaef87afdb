// How matrix products are made by cuBLASLt: which algorithm, and the room it has.
//
// The algorithm of a product is a function of its key alone, never of what was measured or called before, so that two
// runs have the same bits. The default is cuBLASLt's first proposal; a table that `make tune` wrote may name another.
#ifndef MOK_KERNELS_CUDA_MATMUL_H
#define MOK_KERNELS_CUDA_MATMUL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cublasLt.h>

#include "kernels/types.h"

// Products of experts are spread over so many streams: one alone seldom fills the last wave of its thread blocks.
enum { MATMUL_LANES = 4 };
// What cuBLASLt may use of memory, for the sums of a product that is cut along K; every lane has its own.
#define MATMUL_LANE_BYTES      ((size_t)32 << 20)
#define MATMUL_WORKSPACE_BYTES (MATMUL_LANES * MATMUL_LANE_BYTES)

enum matmul_kind { MATMUL_NT, MATMUL_NN, MATMUL_TN };

// All that the choice of an algorithm may depend on. Names and sizes are those of kernels.h: first is x or a, second is
// w or b. The *_bytes are what a matrix and its rows are aligned to, a power of two of at most 16; add_bytes 0: nothing
// is added.
struct matmul_key {
    int32_t kind, M, N, K;
    int32_t first_bytes, second_bytes, add_bytes, out_bytes;
};

// A product as cuBLASLt is told of it.
struct matmul_layouts {
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t first, second, out; // add has out's
};

#define matmul_check(call) matmul_check_code(call, __func__, #call)
void matmul_check_code(cublasStatus_t code, const char *place, const char *call);

cublasLtHandle_t matmul_handle(void);

void matmul_layouts_make(struct matmul_layouts *layouts, const struct matmul_key *key);

// first and the others may be NULL: only what they are aligned to matters; add NULL: nothing is added.
struct matmul_key matmul_key_make(enum matmul_kind kind, int M, int N, int K, const void *first, const void *second,
                                  const void *add, const void *out);
// The same with its rows (M of nt and nn, K of tn) rounded up: products of equal rounded keys have the same algorithm,
// if it fits the true sizes too.
struct matmul_key matmul_key_round(const struct matmul_key *key);

// false: cuBLASLt has none for this product.
bool matmul_choose(cublasLtMatmulAlgo_t *algorithm, struct matmul_layouts *layouts, const struct matmul_key *key);

// ---- for make tune ----

// An algorithm by its configuration, in the order of the table's numbers; unlike a cublasLtMatmulAlgo_t it can be
// written down and made again.
enum {
    ALGORITHM_ID,
    ALGORITHM_TILE,
    ALGORITHM_SPLITS,
    ALGORITHM_REDUCTION,
    ALGORITHM_SWIZZLE,
    ALGORITHM_CUSTOM,
    ALGORITHM_STAGES,
    ALGORITHM_INNER_SHAPE,
    ALGORITHM_CLUSTER_SHAPE,
    ALGORITHM_FIELDS
};
struct matmul_algorithm {
    uint32_t fields[ALGORITHM_FIELDS];
};
// Whether its sums have a fixed order and are kept in FP32.
bool matmul_algorithm_allowed(const struct matmul_algorithm *algorithm);

// What cuBLASLt proposes for a rounded key and can be made again, best guess first; returns how many, at most `most`.
enum { MATMUL_PROPOSALS = 32 };
int matmul_propose(struct matmul_algorithm *algorithms, int most, const struct matmul_key *key);
// From now on every product has this algorithm, which must suit it; NULL: its own again.
void matmul_force(const struct matmul_algorithm *algorithm);

// This GPU, as tables name it, and the table that belongs to it: MOK_TUNE if that is set, else tune/NAME.txt.
const char *matmul_machine(void);
const char *matmul_table_path(void);

// ---- without cuBLASLt ----

// The same products without cuBLASLt, in plain arithmetic, for what it does not do. Element (i, k) of the first operand
// is first[i * first_row + k * first_col], of the second, (k, j), second[k * second_row + j * second_col].
// out_accum: out and add [M, N] are accum, else real; add may be NULL or out.
struct matmul_fallback {
    int M, N, K;
    const real *first, *second;
    size_t first_row, first_col, second_row, second_col;
    const void *add;
    void *out;
    bool out_accum;
};
#ifdef __cplusplus
extern "C"
#endif
    void
    matmul_fallback(const struct matmul_fallback *product);

#endif
