// Matrix products of kernels.h in terms of the one product of gemm.c.
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/scratch.h"
#include "kernels/kernels.h"

static struct view plain(const real *data, size_t cols) { return (struct view){data, cols, 1}; }
static struct view transposed(const real *data, size_t cols) { return (struct view){data, 1, cols}; }

static struct gemm product(real *c, struct view a, struct view b, int M, int N, int K, const real *init) {
    return (struct gemm){M, N, K, a, b, c, (size_t)N, init, (size_t)N};
}

void matmul_nt(real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    struct gemm g = product(y, plain(x, (size_t)K), transposed(w, (size_t)K), M, N, K, add);
    gemm_parallel(&g, 1);
}

void matmul_nn(real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    struct gemm g = product(y, plain(x, (size_t)K), plain(w, (size_t)N), M, N, K, add);
    gemm_parallel(&g, 1);
}

void matmul_tn(accum *dw, const real *a, const real *b, int M, int N, int K) {
    struct gemm g = product(dw, transposed(a, (size_t)M), plain(b, (size_t)N), M, N, K, dw);
    gemm_parallel(&g, 1);
}

void grouped_matmul_nt(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    struct gemm *products = scratch_alloc(sizeof(struct gemm) * (size_t)E);
    for (int e = 0; e < E; e++) {
        size_t first = (size_t)offsets[e];
        products[e] = product(y + first * N, plain(x + first * K, (size_t)K),
                              transposed(w + (size_t)e * N * K, (size_t)K), offsets[e + 1] - offsets[e], N, K, NULL);
    }
    gemm_parallel(products, E);
    scratch_free(products);
}

void grouped_matmul_nn(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    struct gemm *products = scratch_alloc(sizeof(struct gemm) * (size_t)E);
    for (int e = 0; e < E; e++) {
        size_t first = (size_t)offsets[e];
        products[e] = product(y + first * N, plain(x + first * K, (size_t)K), plain(w + (size_t)e * N * K, (size_t)N),
                              offsets[e + 1] - offsets[e], N, K, NULL);
    }
    gemm_parallel(products, E);
    scratch_free(products);
}

void grouped_matmul_tn(accum *dw, const real *a, const real *b, const int *offsets, int E, int M, int N) {
    struct gemm *products = scratch_alloc(sizeof(struct gemm) * (size_t)E);
    for (int e = 0; e < E; e++) {
        size_t first = (size_t)offsets[e];
        accum *expert_dw = dw + (size_t)e * M * N;
        products[e] = product(expert_dw, transposed(a + first * M, (size_t)M), plain(b + first * N, (size_t)N), M, N,
                              offsets[e + 1] - offsets[e], expert_dw);
    }
    gemm_parallel(products, E);
    scratch_free(products);
}
