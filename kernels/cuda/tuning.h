// The table that `make tune` writes: for the products of a training run, which of cuBLASLt's algorithms was fastest. A
// text file, good for one kind of GPU and one version of cuBLASLt:
//
//   mok-tune 1
//   machine NVIDIA H200, 132 multiprocessors
//   cublaslt 130100
//   products 2
//   nt 8192 3072 2048 16 16 0 16 = 66 23 1 0 0 0 36 0 5
//   tn 2048 2048 8192 16 16 16 16 = 66 23 4 2 0 0 36 0 3
//
// A product is its struct matmul_key, an algorithm its struct matmul_algorithm.
#ifndef MOK_KERNELS_CUDA_TUNING_H
#define MOK_KERNELS_CUDA_TUNING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/matmul.h"

enum { TUNING_MACHINE = 320, TUNING_PRODUCTS = 1 << 16 }; // bytes of a machine's name; products at most

struct tuned_product {
    struct matmul_key key;
    struct matmul_algorithm algorithm;
};

struct tuning {
    char machine[TUNING_MACHINE];
    uint64_t version;               // of cuBLASLt
    struct tuned_product *products; // in the order of their keys' bytes
    int count;
    uint64_t hash; // of the file, to tell tables apart
};

// false: there is no such file. Ends the program (exit 2) with the line at which a file is not such a table.
bool tuning_read(struct tuning *t, const char *path);

// Sorts the products and writes the file, and the folder that it is in if need be.
void tuning_write(struct tuning *t, const char *path);

// NULL: the table has nothing for this product.
const struct matmul_algorithm *tuning_find(const struct tuning *t, const struct matmul_key *key);

#endif
