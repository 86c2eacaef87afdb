// The matrix products against FP64, and the promise that every element's bits depend on its own inputs only.
#include "tests/test.h"

#include "tests/reference.h"

typedef void matmul_function(real *y, const real *x, const real *w, int M, int N, int K, const real *add);

// One, primes, and both sides of what tiles and vectors are likely to be.
static const int sizes[] = {1, 2, 3, 5, 6, 7, 15, 16, 17, 31, 33, 64, 65, 127, 129, 255, 257, 300, 513, 1031};
enum { SIZES = sizeof sizes / sizeof *sizes };

// Rounding errors of a sum of K terms in sequence: partial sums grow like sqrt(k), so K roundings add up to about
// 0.4 sqrt(K) of the terms' norm; 2 sqrt(K) leaves room for a single element. Two more for the terms and for `add`.
static double product_tolerance(int K) { return roundings(2 + 2 * sqrt(K)); }

// Relative to the terms, not to the sums: a single sum may be close to zero.
static void assert_product(const char *name, const double *found, const double *wanted, const double *size, size_t n,
                           double tolerance) {
    double difference = 0, scale = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (found[i] - wanted[i]) * (found[i] - wanted[i]);
        scale += size[i] * size[i];
    }
    if (!(sqrt(difference) <= tolerance * sqrt(scale)))
        fail_msg("%s: error %.3g of the terms, wanted at most %.3g", name, sqrt(difference / scale), tolerance);
}

static struct reference_strides strides_nt(int K) { return (struct reference_strides){K, 1, K, 1}; }
static struct reference_strides strides_nn(int N, int K) { return (struct reference_strides){K, 1, 1, N}; }
static struct reference_strides strides_tn(int M, int N) { return (struct reference_strides){1, M, 1, N}; }

// y = x w^T or x w, without add, with another add, and with add = y.
static void check_product(bool transposed, int M, int N, int K, uint64_t *seed) {
    matmul_function *multiply = transposed ? matmul_nt : matmul_nn;
    struct reference_strides strides = transposed ? strides_nt(K) : strides_nn(N, K);
    size_t n = (size_t)M * N;
    char name[64];
    double *x = normals((size_t)M * K, 1, seed), *w = normals((size_t)N * K, 1, seed), *add = normals(n, 1, seed);
    double *wanted = host_doubles(n), *size = host_doubles(n);
    real *dx = put_real(x, (size_t)M * K), *dw = put_real(w, (size_t)N * K), *dadd = put_real(add, n);

    snprintf(name, sizeof name, "%s M %d N %d K %d, add NULL", transposed ? "nt" : "nn", M, N, K);
    reference_product(wanted, size, x, w, M, N, K, strides, NULL);
    real *y = poisoned_real(n);
    multiply(y, dx, dw, M, N, K, NULL);
    assert_product(name, get_real(y, n), wanted, size, n, product_tolerance(K));

    snprintf(name, sizeof name, "%s M %d N %d K %d, add", transposed ? "nt" : "nn", M, N, K);
    reference_product(wanted, size, x, w, M, N, K, strides, add);
    y = poisoned_real(n);
    multiply(y, dx, dw, M, N, K, dadd);
    assert_product(name, get_real(y, n), wanted, size, n, product_tolerance(K));

    snprintf(name, sizeof name, "%s M %d N %d K %d, add = y", transposed ? "nt" : "nn", M, N, K);
    multiply(dadd, dx, dw, M, N, K, dadd);
    assert_same_bits(name, dadd, y, n * sizeof(real));
    watch_release();
}

static void check_tn(int M, int N, int K, uint64_t *seed) {
    size_t n = (size_t)M * N;
    char name[64];
    snprintf(name, sizeof name, "tn M %d N %d K %d", M, N, K);
    double *a = normals((size_t)K * M, 1, seed), *b = normals((size_t)K * N, 1, seed), *before = normals(n, 1, seed);
    double *wanted = host_doubles(n), *size = host_doubles(n);
    reference_product(wanted, size, a, b, M, N, K, strides_tn(M, N), before);
    accum *dw = put_accum(before, n);
    real *da = put_real(a, (size_t)K * M), *db = put_real(b, (size_t)K * N);
    matmul_tn(dw, da, db, M, N, K, true);
    assert_product(name, get_accum(dw, n), wanted, size, n, product_tolerance(K));

    snprintf(name, sizeof name, "tn M %d N %d K %d, stored", M, N, K);
    accum *stored = poisoned_accum(n), *added = put_accum(host_doubles(n), n);
    matmul_tn(stored, da, db, M, N, K, false);
    matmul_tn(added, da, db, M, N, K, true);
    assert_same_bits(name, stored, added, n * sizeof(accum));
    watch_release();
}

static void check_products(int M, int N, int K, uint64_t *seed) {
    check_product(true, M, N, K, seed);
    check_product(false, M, N, K, seed);
    check_tn(M, N, K, seed);
}

static void test_products_match_fp64_when_one_size_varies(void **state) {
    (void)state;
    uint64_t seed = 101;
    for (int i = 0; i < SIZES; i++) {
        check_products(sizes[i], 31, 65, &seed);
        check_products(33, sizes[i], 65, &seed);
        check_products(33, 31, sizes[i], &seed);
    }
}

static void test_products_match_fp64_at_mixed_sizes(void **state) {
    (void)state;
    uint64_t seed = 102;
    for (int i = 0; i < 24; i++)
        check_products(sizes[random_below(SIZES - 2, &seed)], sizes[random_below(SIZES - 2, &seed)],
                       sizes[random_below(SIZES, &seed)], &seed);
    check_products(1, 1, 1, &seed);
    check_products(1, 300, 513, &seed);
    check_products(300, 1, 513, &seed);
}

// An empty sum is zero: y becomes add, or zeros; dw keeps its bits, or becomes zeros.
static void test_products_of_empty_sums_are_add_or_zero(void **state) {
    (void)state;
    uint64_t seed = 103;
    check_products(7, 17, 0, &seed);
    check_products(65, 33, 0, &seed);
}

static void test_products_without_rows_or_columns_write_nothing(void **state) {
    (void)state;
    uint64_t seed = 104;
    check_products(0, 17, 33, &seed);
    check_products(17, 0, 33, &seed);
    check_products(0, 0, 0, &seed);
}

static void test_weight_gradients_add_up_over_calls(void **state) {
    (void)state;
    uint64_t seed = 105;
    enum { M = 17, N = 33, K = 65 };
    double *a = normals(K * M, 1, &seed), *b = normals(K * N, 1, &seed), *wanted = host_doubles(M * N);
    double *size = host_doubles(M * N);
    reference_product(wanted, size, a, b, M, N, K, strides_tn(M, N), NULL);
    for (int i = 0; i < M * N; i++) wanted[i] *= 2;
    real *da = put_real(a, K * M), *db = put_real(b, K * N);
    accum *dw = put_accum(host_doubles(M * N), M * N);
    matmul_tn(dw, da, db, M, N, K, true);
    matmul_tn(dw, da, db, M, N, K, true);
    assert_accum("dw", dw, wanted, M * N, product_tolerance(2 * K));
}

// ---- bits ----

// One element as the header promises it: from `start`, k ascending. Whether the multiply-add rounds once or twice is
// the machine's choice, but one choice for all elements.
static real ascending_sum(real start, const real *x, size_t x_k, const real *w, size_t w_k, int K, bool fused) {
    real sum = start;
    for (int k = 0; k < K; k++) {
        real a = x[k * x_k], b = w[k * w_k];
        sum = !fused ? sum + a * b : sizeof(real) == 4 ? (real)fmaf(a, b, sum) : (real)fma(a, b, sum);
    }
    return sum;
}

static void assert_ascending(const char *name, const real *y, const real *x, const real *w, const real *add, int M,
                             int N, int K, struct reference_strides s) {
    size_t equal[2] = {0, 0};
    for (int fused = 0; fused < 2; fused++)
        for (size_t i = 0; i < (size_t)M; i++)
            for (size_t j = 0; j < (size_t)N; j++) {
                real start = add != NULL ? add[i * N + j] : 0;
                real sum = ascending_sum(start, x + i * s.x_row, s.x_k, w + j * s.w_row, s.w_k, K, fused);
                equal[fused] += memcmp(&sum, &y[i * N + j], sizeof(real)) == 0;
            }
    size_t n = (size_t)M * N;
    if (equal[0] != n && equal[1] != n)
        fail_msg("%s: of %zu elements %zu are the ascending sum, %zu with fused multiply-adds", name, n, equal[0],
                 equal[1]);
}

static void test_products_are_sums_in_ascending_order_from_add(void **state) {
    (void)state;
    uint64_t seed = 106;
    static const int shapes[][3] = {{17, 33, 513}, {65, 129, 1031}, {7, 5, 2050}, {1, 300, 700}, {130, 6, 31}};
    for (int c = 0; c < 5; c++) {
        int M = shapes[c][0], N = shapes[c][1], K = shapes[c][2];
        size_t n = (size_t)M * N, nx = (size_t)M * K, nw = (size_t)N * K;
        real *x = put_real(normals(nx, 1, &seed), nx), *w = put_real(normals(nw, 1, &seed), nw);
        real *add = put_real(normals(n, 1, &seed), n), *y = poisoned_real(n);
        const real *hx = get_bytes(x, nx * sizeof(real)), *hw = get_bytes(w, nw * sizeof(real));
        const real *hadd = get_bytes(add, n * sizeof(real));
        matmul_nt(y, x, w, M, N, K, NULL);
        assert_ascending("nt", get_bytes(y, n * sizeof(real)), hx, hw, NULL, M, N, K, strides_nt(K));
        matmul_nt(y, x, w, M, N, K, add);
        assert_ascending("nt add", get_bytes(y, n * sizeof(real)), hx, hw, hadd, M, N, K, strides_nt(K));
        matmul_nn(y, x, w, M, N, K, add);
        assert_ascending("nn add", get_bytes(y, n * sizeof(real)), hx, hw, hadd, M, N, K, strides_nn(N, K));
        watch_release();
    }
}

static void test_a_row_has_the_same_bits_alone_and_among_others(void **state) {
    (void)state;
    uint64_t seed = 107;
    static const int shapes[][3] = {{129, 65, 300}, {17, 300, 513}, {66, 7, 33}, {257, 129, 17}};
    for (int c = 0; c < 4; c++) {
        int M = shapes[c][0], N = shapes[c][1], K = shapes[c][2];
        size_t n = (size_t)M * N, nx = (size_t)M * K, nw = (size_t)N * K;
        real *x = put_real(normals(nx, 1, &seed), nx), *w = put_real(normals(nw, 1, &seed), nw);
        real *add = put_real(normals(n, 1, &seed), n), *y = poisoned_real(n), *alone = poisoned_real(n);
        for (int transposed = 0; transposed < 2; transposed++) {
            matmul_function *multiply = transposed ? matmul_nt : matmul_nn;
            multiply(y, x, w, M, N, K, add);
            for (size_t i = 0; i < (size_t)M; i++) multiply(alone + i * N, x + i * K, w, 1, N, K, add + i * N);
            assert_same_bits(transposed ? "nt, rows alone" : "nn, rows alone", alone, y, n * sizeof(real));
            for (size_t first = 0; first < (size_t)M; first += 5) {
                int rows = first + 5 > (size_t)M ? M - (int)first : 5;
                multiply(alone + first * N, x + first * K, w, rows, N, K, add + first * N);
            }
            assert_same_bits(transposed ? "nt, five rows" : "nn, five rows", alone, y, n * sizeof(real));
        }
        watch_release();
    }
}

// Column j of a matrix [rows, columns], in device memory.
static real *put_column(const double *matrix, int rows, int columns, int j) {
    double *column = host_doubles(rows);
    for (size_t i = 0; i < (size_t)rows; i++) column[i] = matrix[i * columns + j];
    return put_real(column, rows);
}

static void test_an_element_has_the_same_bits_alone_and_among_others(void **state) {
    (void)state;
    uint64_t seed = 108;
    enum { M = 37, N = 70, K = 531 };
    double *x = normals(M * K, 1, &seed), *w = normals(N * K, 1, &seed), *before = normals(M * N, 1, &seed);
    real *dx = put_real(x, M * K), *dw = put_real(w, N * K), *one = poisoned_real(1);
    real *nt = poisoned_real(M * N), *nn = poisoned_real(M * N);
    accum *tn = put_accum(before, M * N);
    matmul_nt(nt, dx, dw, M, N, K, NULL);
    matmul_nn(nn, dx, dw, M, N, K, NULL);
    matmul_tn(tn, dx, dw, M, N, K, true);
    for (int i = 0; i < M; i += 6)
        for (int j = 0; j < N; j += 3) {
            matmul_nt(one, dx + i * K, dw + j * K, 1, 1, K, NULL);
            assert_same_bits("nt", one, nt + i * N + j, sizeof(real));
            matmul_nn(one, dx + i * K, put_column(w, K, N, j), 1, 1, K, NULL);
            assert_same_bits("nn", one, nn + i * N + j, sizeof(real));
            accum *sum = put_accum(before + i * N + j, 1);
            matmul_tn(sum, put_column(x, K, M, i), put_column(w, K, N, j), 1, 1, K, true);
            assert_same_bits("tn", sum, tn + i * N + j, sizeof(accum));
        }
}

static void test_products_have_the_same_bits_with_any_number_of_threads(void **state) {
    (void)state;
    uint64_t seed = 109;
    static const int shapes[][3] = {{129, 65, 513}, {3, 300, 129}, {300, 3, 129}, {257, 257, 64}, {1, 513, 300}};
    for (int c = 0; c < 5; c++) {
        int M = shapes[c][0], N = shapes[c][1], K = shapes[c][2];
        size_t n = (size_t)M * N, nx = (size_t)M * K, nw = (size_t)N * K;
        real *x = put_real(normals(nx, 1, &seed), nx), *w = put_real(normals(nw, 1, &seed), nw);
        double *before = normals(n, 1, &seed);
        void *nt = NULL, *nn = NULL, *tn = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            real *y = poisoned_real(n);
            matmul_nt(y, x, w, M, N, K, NULL);
            assert_same_as_first("nt", &nt, y, n * sizeof(real));
            matmul_nn(y, x, w, M, N, K, NULL);
            assert_same_as_first("nn", &nn, y, n * sizeof(real));
            accum *dw = put_accum(before, n);
            matmul_tn(dw, x, w, M, N, K, true);
            assert_same_as_first("tn", &tn, dw, n * sizeof(accum));
        }
        watch_release();
    }
}

// ---- grouped ----

enum { EXPERTS_MAX = 8, ROWS_BEFORE = 3, ROWS_AFTER = 4 };

struct routing {
    int E, counts[EXPERTS_MAX];
};
static const struct routing routings[] = {
    {7, {1, 63, 65, 127, 129, 0, 0}}, {5, {0, 0, 300, 0, 0}}, {4, {0, 0, 0, 0}}, {1, {17}}, {3, {0, 1, 0}},
    {8, {5, 0, 16, 2, 31, 1, 0, 8}},
};
enum { ROUTINGS = sizeof routings / sizeof *routings };

// Rows of no expert come before the first and after the last: nothing may write them.
static int *put_offsets(struct routing r, int *rows) {
    int offsets[EXPERTS_MAX + 1] = {ROWS_BEFORE};
    for (int e = 0; e < r.E; e++) offsets[e + 1] = offsets[e] + r.counts[e];
    *rows = offsets[r.E] + ROWS_AFTER;
    return put_int(offsets, r.E + 1);
}

static void assert_only_experts_rows(const char *name, const real *y, int rows, int columns) {
    size_t row = columns * sizeof(real);
    assert_poison(name, y, ROWS_BEFORE * row);
    assert_poison(name, y + (size_t)(rows - ROWS_AFTER) * columns, ROWS_AFTER * row);
}

// grouped_matmul_nt, _nn and _tn of one routing; w [E, N, K] or [E, K, N].
static void check_grouped(struct routing r, int N, int K, uint64_t *seed) {
    int rows;
    int *doffsets = put_offsets(r, &rows);
    size_t each = (size_t)N * K, n = (size_t)rows * N;
    double *x = normals((size_t)rows * K, 1, seed), *w = normals(each * r.E, 1, seed), *b = normals(n, 1, seed);
    double *before = normals(each * r.E, 1, seed);
    real *dx = put_real(x, (size_t)rows * K), *dw = put_real(w, each * r.E), *db = put_real(b, n);
    real *nt = poisoned_real(n), *nn = poisoned_real(n);
    accum *tn = put_accum(before, each * r.E), *untouched = put_accum(before, each * r.E);
    grouped_matmul_nt(nt, dx, dw, doffsets, r.E, N, K);
    grouped_matmul_nn(nn, dx, dw, doffsets, r.E, N, K);
    grouped_matmul_tn(tn, dx, db, doffsets, r.E, K, N, true);
    assert_only_experts_rows("grouped nt", nt, rows, N);
    assert_only_experts_rows("grouped nn", nn, rows, N);

    double *wanted = host_doubles(n + each), *size = host_doubles(n + each);
    size_t first = ROWS_BEFORE;
    for (int e = 0; e < r.E; first += r.counts[e], e++) {
        int count = r.counts[e];
        const double *xe = x + first * K, *we = w + e * each;
        reference_product(wanted, size, xe, we, count, N, K, strides_nt(K), NULL);
        assert_product("grouped nt", get_real(nt + first * N, (size_t)count * N), wanted, size, (size_t)count * N,
                       product_tolerance(K));
        reference_product(wanted, size, xe, we, count, N, K, strides_nn(N, K), NULL);
        assert_product("grouped nn", get_real(nn + first * N, (size_t)count * N), wanted, size, (size_t)count * N,
                       product_tolerance(K));
        if (count == 0) assert_same_bits("dw without rows", tn + e * each, untouched + e * each, each * sizeof(accum));
        reference_product(wanted, size, xe, b + first * N, K, N, count, strides_tn(K, N), before + e * each);
        assert_product("grouped tn", get_accum(tn + e * each, each), wanted, size, each, product_tolerance(count));
    }
    watch_release();
}

static void test_grouped_products_match_fp64_and_leave_other_rows_alone(void **state) {
    (void)state;
    uint64_t seed = 110;
    static const int shapes[][2] = {{17, 33}, {64, 65}, {1, 1}, {129, 31}, {6, 513}, {1, 16}, {31, 1}};
    for (int c = 0; c < ROUTINGS; c++)
        for (int s = 0; s < 7; s++) check_grouped(routings[c], shapes[s][0], shapes[s][1], &seed);
}

static void test_grouped_weight_gradient_without_rows_keeps_even_nan(void **state) {
    (void)state;
    uint64_t seed = 111;
    enum { E = 3, M = 5, N = 7, ROWS = 4 };
    int *offsets = put_int((int[]){0, 0, ROWS, ROWS}, E + 1);
    accum *dw = poisoned_accum(E * M * N);
    grouped_matmul_tn(dw, put_real(normals(ROWS * M, 1, &seed), ROWS * M),
                      put_real(normals(ROWS * N, 1, &seed), ROWS * N), offsets, E, M, N, true);
    assert_poison("dw of expert 0", dw, M * N * sizeof(accum));
    assert_poison("dw of expert 2", dw + 2 * M * N, M * N * sizeof(accum));
}

static void test_grouped_weight_gradient_may_be_stored(void **state) {
    (void)state;
    uint64_t seed = 113;
    enum { E = 4, M = 5, N = 7, ROWS = 4 };
    int *offsets = put_int((int[]){0, 0, ROWS, ROWS, ROWS}, E + 1);
    real *a = put_real(normals(ROWS * M, 1, &seed), ROWS * M), *b = put_real(normals(ROWS * N, 1, &seed), ROWS * N);
    accum *stored = poisoned_accum(E * M * N), *added = put_accum((double[E *M *N]){0}, E * M * N);
    grouped_matmul_tn(stored, a, b, offsets, E, M, N, false);
    grouped_matmul_tn(added, a, b, offsets, E, M, N, true);
    assert_memory_equal(stored, added, E * M * N * sizeof(accum));
}

static void test_grouped_products_have_the_bits_of_single_products(void **state) {
    (void)state;
    uint64_t seed = 112;
    enum { N = 33, K = 65, EACH = N * K };
    for (int c = 0; c < ROUTINGS; c++) {
        struct routing r = routings[c];
        int rows;
        int *offsets = put_offsets(r, &rows);
        size_t n = (size_t)rows * N, nx = (size_t)rows * K, nw = (size_t)r.E * EACH;
        real *x = put_real(normals(nx, 1, &seed), nx), *w = put_real(normals(nw, 1, &seed), nw);
        real *b = put_real(normals(n, 1, &seed), n);
        double *before = normals(nw, 1, &seed);
        void *first_nt = NULL, *first_nn = NULL, *first_tn = NULL;
        real *nt = poisoned_real(n), *nn = poisoned_real(n);
        accum *tn = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            tn = put_accum(before, nw);
            grouped_matmul_nt(nt, x, w, offsets, r.E, N, K);
            grouped_matmul_nn(nn, x, w, offsets, r.E, N, K);
            grouped_matmul_tn(tn, x, b, offsets, r.E, K, N, true);
            assert_same_as_first("grouped nt, threads", &first_nt, nt, n * sizeof(real));
            assert_same_as_first("grouped nn, threads", &first_nn, nn, n * sizeof(real));
            assert_same_as_first("grouped tn, threads", &first_tn, tn, nw * sizeof(accum));
        }
        size_t first = ROWS_BEFORE;
        for (int e = 0; e < r.E; first += r.counts[e], e++) {
            real *alone = poisoned_real(N);
            for (size_t i = first; i < first + r.counts[e]; i++) {
                matmul_nt(alone, x + i * K, w + (size_t)e * EACH, 1, N, K, NULL);
                assert_same_bits("grouped nt", nt + i * N, alone, N * sizeof(real));
                matmul_nn(alone, x + i * K, w + (size_t)e * EACH, 1, N, K, NULL);
                assert_same_bits("grouped nn", nn + i * N, alone, N * sizeof(real));
            }
            accum *dw = put_accum(before + (size_t)e * EACH, EACH);
            matmul_tn(dw, x + first * K, b + first * N, K, N, r.counts[e], true);
            assert_same_bits("grouped tn", tn + (size_t)e * EACH, dw, EACH * sizeof(accum));
        }
        watch_release();
    }
}

static void test_grouped_products_of_size_zero_do_nothing(void **state) {
    (void)state;
    uint64_t seed = 113;
    int *offsets = put_int((int[]){0, 2, 5}, 3);
    real *y = poisoned_real(8), *x = put_real(normals(8, 1, &seed), 8);
    accum *dw = poisoned_accum(8);
    grouped_matmul_nt(y, x, x, offsets, 0, 3, 2);
    grouped_matmul_nn(y, x, x, offsets, 0, 3, 2);
    grouped_matmul_tn(dw, x, x, offsets, 0, 3, 2, true);
    grouped_matmul_nt(y, x, x, offsets, 2, 0, 2);
    grouped_matmul_nn(y, x, x, offsets, 2, 0, 2);
    grouped_matmul_tn(dw, x, x, offsets, 2, 0, 2, false);
    grouped_matmul_tn(dw, x, x, offsets, 2, 2, 0, false);
    assert_poison("y", y, 8 * sizeof(real));
    assert_poison("dw", dw, 8 * sizeof(accum));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        watched_test(test_products_match_fp64_when_one_size_varies),
        watched_test(test_products_match_fp64_at_mixed_sizes),
        watched_test(test_products_of_empty_sums_are_add_or_zero),
        watched_test(test_products_without_rows_or_columns_write_nothing),
        watched_test(test_weight_gradients_add_up_over_calls),
        watched_test(test_products_are_sums_in_ascending_order_from_add),
        watched_test(test_a_row_has_the_same_bits_alone_and_among_others),
        watched_test(test_an_element_has_the_same_bits_alone_and_among_others),
        watched_test(test_products_have_the_same_bits_with_any_number_of_threads),
        watched_test(test_grouped_products_match_fp64_and_leave_other_rows_alone),
        watched_test(test_grouped_weight_gradient_without_rows_keeps_even_nan),
        watched_test(test_grouped_weight_gradient_may_be_stored),
        watched_test(test_grouped_products_have_the_bits_of_single_products),
        watched_test(test_grouped_products_of_size_zero_do_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
