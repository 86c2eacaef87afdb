// Matrix products of kernels.h in terms of the one product of gemm.c.
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/scratch.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

static struct view plain(const real *data, size_t cols) { return (struct view){data, cols, 1}; }
static struct view transposed(const real *data, size_t cols) { return (struct view){data, 1, cols}; }

static struct gemm product(real *c, struct view a, struct view b, int M, int N, int K, const real *init) {
    return (struct gemm){M, N, K, a, b, c, (size_t)N, init, (size_t)N};
}

void matmul_nt(real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    OPERATION();
    struct gemm g = product(y, plain(x, (size_t)K), transposed(w, (size_t)K), M, N, K, add);
    gemm_parallel(&g, 1);
}

void matmul_nn(real *y, const real *x, const real *w, int M, int N, int K, const real *add) {
    OPERATION();
    struct gemm g = product(y, plain(x, (size_t)K), plain(w, (size_t)N), M, N, K, add);
    gemm_parallel(&g, 1);
}

void matmul_tn(accum *dw, const real *a, const real *b, int M, int N, int K, bool add) {
    OPERATION();
    struct gemm g = product(dw, transposed(a, (size_t)M), plain(b, (size_t)N), M, N, K, add ? dw : NULL);
    gemm_parallel(&g, 1);
}

static struct gemm *products_alloc(int E) { return scratch_alloc(sizeof(struct gemm) * (size_t)E); }

static void products_run(struct gemm *products, int E) {
    gemm_parallel(products, E);
    scratch_free(products);
}

// y = x w^T or x w, expert by expert. turned: w [E, N, K], else [E, K, N].
static void grouped_rows(real *y, const real *x, const real *w, bool turned, const int *offsets, int E, int N, int K) {
    struct gemm *products = products_alloc(E);
    for (int e = 0; e < E; e++) {
        size_t first = (size_t)offsets[e];
        const real *we = w + (size_t)e * N * K;
        products[e] =
            product(y + first * N, plain(x + first * K, (size_t)K),
                    turned ? transposed(we, (size_t)K) : plain(we, (size_t)N), offsets[e + 1] - offsets[e], N, K, NULL);
    }
    products_run(products, E);
}

void grouped_matmul_nt(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    OPERATION();
    grouped_rows(y, x, w, true, offsets, E, N, K);
}

void grouped_matmul_nn(real *y, const real *x, const real *w, const int *offsets, int E, int N, int K) {
    OPERATION();
    grouped_rows(y, x, w, false, offsets, E, N, K);
}

void grouped_matmul_tn(accum *dw, const real *a, const real *b, const int *offsets, int E, int M, int N, bool add) {
    OPERATION();
    struct gemm *products = products_alloc(E);
    for (int e = 0; e < E; e++) {
        size_t first = (size_t)offsets[e];
        struct view ae = transposed(a + first * M, (size_t)M), be = plain(b + first * N, (size_t)N);
        accum *dwe = dw + (size_t)e * M * N;
        products[e] = product(dwe, ae, be, M, N, offsets[e + 1] - offsets[e], add ? dwe : NULL);
    }
    products_run(products, E);
}

bool grouped_matmul_available(enum grouped_core core) { return core == GROUPED_OWN; }

int grouped_matmul_unit(enum grouped_core core) {
    (void)core;
    return 1;
}

void grouped_matmul_choose(enum grouped_core core) { (void)core; }
