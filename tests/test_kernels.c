// The operations outside of matrix products, attention and the router, in the order of kernels/kernels.h: against FP64,
// with gradients by central differences, and bit by bit where the header promises bits.
#include "tests/child.h"
#include "tests/test.h"

#include <complex.h>
#undef I // a size in kernels/kernels.h

#include "tests/reference.h"

#include "kernels/cpu/rowmath.h"

// ---- device ----

static void test_allocated_memory_is_zero_and_aligned_even_after_use(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 255, 256, 257, 4096, 1000003};
    for (int round = 0; round < 3; round++)
        for (int c = 0; c < 6; c++) {
            unsigned char *memory = device_alloc(sizes[c]), *host = malloc(sizes[c]);
            assert_true((uintptr_t)memory % 256 == 0);
            device_copy_out(host, memory, sizes[c]);
            for (size_t i = 0; i < sizes[c]; i++)
                if (host[i] != 0) fail_msg("byte %zu of %zu is %d", i, sizes[c], host[i]);
            memset(host, 0xff, sizes[c]);
            device_copy_in(memory, host, sizes[c]); // the next round may get the same memory
            device_free(memory);
            free(host);
        }
    device_free(device_alloc(0));
}

// Under the address sanitizer a refused allocation returns NULL, as it does without.
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

static void ask_for_too_much(void *nothing) {
    (void)nothing;
    device_alloc((size_t)1 << 60);
}

static void test_memory_that_does_not_exist_ends_with_the_size_asked_for(void **state) {
    (void)state;
    char message[1024];
    assert_int_equal(run_child(ask_for_too_much, NULL, message, sizeof message), 1);
    // 2^60 in bytes, or in whatever unit the message prefers
    bool says_size = strstr(message, "1152921504606846976") || strstr(message, "1073741824") ||
                     strstr(message, "1099511627776") || strstr(message, "1048576");
    if (!says_size) fail_msg("the message does not say how much was asked for: %s", message);
}

static void test_copies_and_conversions_return_what_went_in(void **state) {
    (void)state;
    uint64_t seed = 301;
    enum { N = 1001 };
    float in[N], out[N];
    for (int i = 0; i < N; i++) in[i] = (float)test_normal(&seed);
    in[0] = 0, in[1] = -0.0f, in[2] = INFINITY, in[3] = -INFINITY, in[4] = 1e-40f, in[5] = 3.4e38f;
    real *r = poisoned_real(N);
    device_real_from_float(r, in, N);
    device_real_to_float(out, r, N);
    assert_memory_equal(out, in, sizeof in);
    accum *a = poisoned_accum(N);
    device_accum_from_float(a, in, N);
    memset(out, 0xff, sizeof out);
    device_accum_to_float(out, a, N);
    assert_memory_equal(out, in, sizeof in);
    double *values = get_real(r, N);
    for (int i = 0; i < N; i++) assert_true(values[i] == (double)in[i]);

    device_zero(r + 3, 7 * sizeof(real));
    device_real_to_float(out, r, N);
    for (int i = 0; i < N; i++) assert_true(out[i] == (i >= 3 && i < 10 ? 0 : in[i]));
}

static void test_the_device_names_itself_and_its_limits(void **state) {
    (void)state;
    assert_non_null(device_name());
    assert_true(strlen(device_name()) > 0 && strchr(device_name(), '\n') == NULL);
    double peak = device_peak_flops();
    assert_true(peak > 1e8 && peak < 1e17);
    assert_true(device_peak_flops() == peak); // measured once
    assert_true(device_memory_bytes() > (size_t)64 << 20);
}

// ---- embedding ----

static void test_embedding_copies_rows_and_gives_zeros_for_no_token(void **state) {
    (void)state;
    uint64_t seed = 311;
    enum { V = 11, H = 17, N = 9 };
    static const int ids[N] = {3, 10, -1, 3, 0, 3, -1, 10, 7};
    double *table = normals(V * H, 1, &seed), *wanted = host_doubles(N * H);
    real *x = poisoned_real(N * H);
    embedding_forward(x, put_real(table, V * H), put_int(ids, N), N, H);
    for (int i = 0; i < N; i++)
        for (int h = 0; h < H; h++) wanted[i * H + h] = ids[i] < 0 ? 0 : table[ids[i] * H + h];
    assert_same_bits("x", x, put_real(wanted, N * H), N * H * sizeof(real));
}

static void test_embedding_gradient_adds_rows_in_ascending_order(void **state) {
    (void)state;
    uint64_t seed = 312;
    enum { V = 13, H = 33, N = 400 };
    int ids[N];
    for (int i = 0; i < N; i++) ids[i] = random_below(V, &seed) - 1; // -1 .. V-2: the last token never comes
    double *dx = normals(N * H, 1, &seed), *before = normals(V * H, 1, &seed);
    real *ddx = put_real(dx, N * H);
    int *dids = put_int(ids, N);
    accum sums[V * H];
    for (int i = 0; i < V * H; i++) sums[i] = (accum)before[i];
    for (int i = 0; i < N; i++)
        for (int h = 0; ids[i] >= 0 && h < H; h++) sums[ids[i] * H + h] += (accum)dx[i * H + h];
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        accum *dtable = put_accum(before, V * H);
        embedding_backward(dtable, ddx, dids, N, H);
        assert_memory_equal(get_bytes(dtable, sizeof sums), sums, sizeof sums);
    }
}

// ---- rmsnorm ----

struct rmsnorm_case {
    double *x, *w, *dy, *y, *rstd, eps;
    int x_stride, N, C;
};

static double weighted_rmsnorm(const void *context) {
    const struct rmsnorm_case *c = context;
    reference_rmsnorm(c->y, c->rstd, c->x, c->x_stride, c->w, c->N, c->C, c->eps);
    return dot(c->dy, c->y, (size_t)c->N * c->C);
}

// Rows of C values in a matrix of `stride` columns; the gaps hold NaN.
static real *put_rows(const double *x, int rows, int columns, int stride) {
    double *spread = host_doubles((size_t)rows * stride);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < stride; j++) spread[i * stride + j] = j < columns ? x[i * columns + j] : NAN;
    return put_real(spread, (size_t)rows * stride);
}

static double *get_rows(const real *x, int rows, int columns, int stride) {
    double *spread = get_real(x, (size_t)rows * stride), *packed = host_doubles((size_t)rows * columns);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) packed[i * columns + j] = spread[i * stride + j];
    return packed;
}

static void assert_gaps_poisoned(const char *name, const real *x, int rows, int columns, int stride) {
    for (int i = 0; i < rows; i++)
        assert_poison(name, x + (size_t)i * stride + columns, (stride - columns) * sizeof(real));
}

static void check_rmsnorm(int N, int C, double deviation, double eps, uint64_t *seed) {
    int sx = C + 3, sy = C + 5, sdx = C + 1, sdy = C + 2;
    size_t n = (size_t)N * C;
    struct rmsnorm_case c = {.eps = eps, .x_stride = C, .N = N, .C = C};
    c.x = normals(n, deviation, seed), c.w = normals(C, 1, seed), c.dy = normals(n, 1, seed);
    c.y = host_doubles(n), c.rstd = host_doubles(N);
    double *before = normals(n, 1, seed), *dw_before = normals(C, 1, seed);
    real *x = put_rows(c.x, N, C, sx), *w = put_real(c.w, C), *dy = put_rows(c.dy, N, C, sdy);
    real *y = poisoned_real((size_t)N * sy), *dx = poisoned_real((size_t)N * sdx);
    accum *rstd = poisoned_accum(N), *dw = put_accum(dw_before, C);

    rmsnorm_forward(y, sy, rstd, x, sx, w, N, C, c.eps);
    weighted_rmsnorm(&c);
    // Positive terms: the mean of squares loses less than its terms' roundings, and y takes three more.
    assert_close("y", get_rows(y, N, C, sy), c.y, n, roundings(16));
    assert_accum("rstd", rstd, c.rstd, N, roundings(16));
    assert_gaps_poisoned("gaps of y", y, N, C, sy);

    rmsnorm_backward(dx, sdx, false, dw, dy, sdy, x, sx, w, rstd, N, C);
    // t - xhat mean(t xhat) subtracts a small part of t, so dx keeps about the accuracy of its terms. One column alone
    // cancels to eps r^2, which no float has: there dx is compared with the terms instead.
    double *wanted = central_difference(c.x, n, 1, weighted_rmsnorm, &c), *found = get_rows(dx, N, C, sdx);
    if (C > 1) assert_close("dx", found, wanted, n, gradient_roundings(32) * (C < 8 ? 8 : 1));
    for (size_t i = 0; C == 1 && i < n; i++)
        assert_true(fabs(found[i] - wanted[i]) <= gradient_roundings(16) * fabs(c.w[0] * c.dy[i] * c.rstd[i]));
    assert_gaps_poisoned("gaps of dx", dx, N, C, sdx);
    double *dw_wanted = added(central_difference(c.w, C, 1, weighted_rmsnorm, &c), dw_before, C);
    // a sum of N rows in sequence
    assert_accum("dw", dw, dw_wanted, C, gradient_roundings(16 + 2 * sqrt(N)));

    real *sum = put_rows(before, N, C, sdx);
    rmsnorm_backward(sum, sdx, true, dw, dy, sdy, x, sx, w, rstd, N, C);
    double *added_to = get_rows(sum, N, C, sdx);
    for (size_t i = 0; i < n; i++) // the same dx, plus one rounding of the sum
        assert_true(fabs(added_to[i] - (before[i] + found[i])) <= roundings(4) * (fabs(before[i]) + fabs(found[i])));
    watch_release();
}

static void test_rmsnorm_matches_fp64_and_central_differences(void **state) {
    (void)state;
    uint64_t seed = 321;
    static const int shapes[][2] = {{1, 1}, {5, 2}, {3, 7}, {17, 16}, {4, 33}, {9, 65}, {2, 300}, {65, 24}};
    for (int c = 0; c < 8; c++) check_rmsnorm(shapes[c][0], shapes[c][1], 1, 1e-6, &seed);
}

// With inputs of 0.1 the mean square is as large as eps: forgetting eps, or adding it elsewhere, is seen.
static void test_rmsnorm_adds_eps_to_the_mean_square(void **state) {
    (void)state;
    uint64_t seed = 322;
    check_rmsnorm(7, 33, 0.1, 0.01, &seed);
    enum { C = 5 };
    real *y = poisoned_real(C);
    accum *rstd = poisoned_accum(1);
    rmsnorm_forward(y, C, rstd, put_real(host_doubles(C), C), C, put_real(normals(C, 1, &seed), C), 1, C, 1e-6);
    double wanted = 1000;
    assert_accum("rstd of zeros", rstd, &wanted, 1, roundings(4));
    for (int i = 0; i < C; i++) assert_true(get_real(y, C)[i] == 0);
}

static void test_rmsnorm_rows_have_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 323;
    enum { N = 70, C = 37, S = 40 };
    double *w_before = normals(C, 1, &seed);
    real *x = put_real(normals(N * S, 1, &seed), N * S), *w = put_real(normals(C, 1, &seed), C);
    real *dy = put_real(normals(N * S, 1, &seed), N * S), *y = poisoned_real(N * C), *dx = poisoned_real(N * C);
    accum *rstd = poisoned_accum(N);
    void *first[4] = {NULL, NULL, NULL, NULL};
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        accum *dw = put_accum(w_before, C);
        rmsnorm_forward(y, C, rstd, x, S, w, N, C, 1e-6);
        rmsnorm_backward(dx, C, false, dw, dy, S, x, S, w, rstd, N, C);
        assert_same_as_first("y", &first[0], y, N * C * sizeof(real));
        assert_same_as_first("rstd", &first[1], rstd, N * sizeof(accum));
        assert_same_as_first("dx", &first[2], dx, N * C * sizeof(real));
        assert_same_as_first("dw", &first[3], dw, C * sizeof(accum));
    }
    for (int i = 0; i < N; i += 3) {
        real *y1 = poisoned_real(C), *dx1 = poisoned_real(C);
        accum *r1 = poisoned_accum(1), *dw = put_accum(w_before, C);
        rmsnorm_forward(y1, C, r1, x + i * S, S, w, 1, C, 1e-6);
        rmsnorm_backward(dx1, C, false, dw, dy + i * S, S, x + i * S, S, w, r1, 1, C);
        assert_same_bits("y", y1, y + i * C, C * sizeof(real));
        assert_same_bits("rstd", r1, rstd + i, sizeof(accum));
        assert_same_bits("dx", dx1, dx + i * C, C * sizeof(real));
    }
}

// ---- rotary position ----

enum { ROPE_T = 7, ROPE_N = 21, ROPE_HEADS = 3, ROPE_DIM = 6, ROPE_HEAD = 11, ROPE_FIRST = 4, ROPE_STRIDE = 35 };

static double rope_frequency(int pair) { return pow(100, -2.0 * pair / ROPE_DIM); }

static accum *put_angles(void) {
    double *angles = host_doubles(ROPE_T * ROPE_DIM);
    for (int t = 0; t < ROPE_T; t++)
        for (int j = 0; j < ROPE_DIM / 2; j++) {
            angles[t * ROPE_DIM + 2 * j] = cos(t * rope_frequency(j));
            angles[t * ROPE_DIM + 2 * j + 1] = sin(t * rope_frequency(j));
        }
    return put_accum(angles, ROPE_T * ROPE_DIM);
}

// Each pair is a complex number, multiplied by exp(i t f).
static void reference_rope(double *x, double direction) {
    for (int i = 0; i < ROPE_N; i++)
        for (int h = 0; h < ROPE_HEADS; h++)
            for (int j = 0; j < ROPE_DIM / 2; j++) {
                double *pair = x + i * ROPE_STRIDE + h * ROPE_HEAD + ROPE_FIRST + 2 * j;
                double angle = direction * (i % ROPE_T) * rope_frequency(j);
                double complex z = (pair[0] + pair[1] * _Complex_I) * cexp(angle * _Complex_I);
                pair[0] = creal(z), pair[1] = cimag(z);
            }
}

// The exponential that softmax and SwiGLU are made of: two units in the last place, zero far below, no infinity.
static void test_row_exp_is_right_to_two_units(void **state) {
    (void)state;
    for (double x = -86.9; x < 88; x += 0.00137) {
        double wanted = exp((double)(real)x), error = fabs((double)row_exp((real)x) - wanted);
        if (!(error <= 2 * 0x1p-23 * wanted)) fail_msg("exp(%g): relative error %g", x, error / wanted);
    }
    assert_true(row_exp(-88) == 0 && row_exp(-1e30f) == 0 && row_exp(0) == 1);
    assert_true(isfinite(row_exp(1000)) && isnan(row_exp(NAN)));
}

static bool rope_turns(int column) {
    return column < ROPE_HEADS * ROPE_HEAD && column % ROPE_HEAD >= ROPE_FIRST &&
           column % ROPE_HEAD < ROPE_FIRST + ROPE_DIM;
}

static void test_rope_multiplies_adjacent_pairs_by_complex_angles(void **state) {
    (void)state;
    uint64_t seed = 331;
    enum { SIZE = ROPE_N * ROPE_STRIDE };
    for (int inverse = 0; inverse < 2; inverse++) {
        double *x = normals(SIZE, 1, &seed), *wanted = host_doubles(SIZE);
        memcpy(wanted, x, SIZE * sizeof *x);
        reference_rope(wanted, inverse ? -1 : 1);
        real *turned = put_real(x, SIZE);
        rope_rotate(turned, ROPE_STRIDE, ROPE_HEADS, ROPE_HEAD, ROPE_FIRST, ROPE_DIM, put_angles(), ROPE_N, ROPE_T,
                    inverse);
        // the table's rounding, two products, one sum
        assert_real("x", turned, wanted, SIZE, roundings(4));
        double *found = get_real(turned, SIZE);
        for (int i = 0; i < SIZE; i++)
            if (!rope_turns(i % ROPE_STRIDE)) assert_true(found[i] == x[i]);
    }
}

static void test_inverse_rope_undoes_rope(void **state) {
    (void)state;
    uint64_t seed = 332;
    enum { SIZE = ROPE_N * ROPE_STRIDE };
    double *x = normals(SIZE, 1, &seed);
    real *turned = put_real(x, SIZE);
    accum *angles = put_angles();
    for (int inverse = 0; inverse < 2; inverse++)
        rope_rotate(turned, ROPE_STRIDE, ROPE_HEADS, ROPE_HEAD, ROPE_FIRST, ROPE_DIM, angles, ROPE_N, ROPE_T, inverse);
    assert_real("x", turned, x, SIZE, roundings(8)); // two rotations
}

struct rope_case {
    double *x, *dy;
};
static double weighted_rope(const void *context) {
    const struct rope_case *c = context;
    double y[ROPE_N * ROPE_STRIDE];
    memcpy(y, c->x, sizeof y);
    reference_rope(y, 1);
    return dot(c->dy, y, ROPE_N * ROPE_STRIDE);
}

static void test_inverse_rope_is_the_gradient_of_rope(void **state) {
    (void)state;
    uint64_t seed = 333;
    enum { SIZE = ROPE_N * ROPE_STRIDE };
    struct rope_case c = {normals(SIZE, 1, &seed), normals(SIZE, 1, &seed)};
    real *gradient = put_real(c.dy, SIZE);
    rope_rotate(gradient, ROPE_STRIDE, ROPE_HEADS, ROPE_HEAD, ROPE_FIRST, ROPE_DIM, put_angles(), ROPE_N, ROPE_T, true);
    assert_real("dx", gradient, central_difference(c.x, SIZE, 1, weighted_rope, &c), SIZE, gradient_roundings(4));
}

static void test_rope_rows_have_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 334;
    enum { SIZE = ROPE_N * ROPE_STRIDE };
    double *x = normals(SIZE, 1, &seed);
    accum *angles = put_angles();
    void *first = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        real *turned = put_real(x, SIZE);
        rope_rotate(turned, ROPE_STRIDE, ROPE_HEADS, ROPE_HEAD, ROPE_FIRST, ROPE_DIM, angles, ROPE_N, ROPE_T, false);
        assert_same_as_first("x", &first, turned, SIZE * sizeof(real));
    }
    real *alone = put_real(x, SIZE);
    for (int i = 0; i < ROPE_N; i++) // a row of position t alone is position 0 of a table that begins at t
        rope_rotate(alone + i * ROPE_STRIDE, ROPE_STRIDE, ROPE_HEADS, ROPE_HEAD, ROPE_FIRST, ROPE_DIM,
                    angles + i % ROPE_T * ROPE_DIM, 1, 1, false);
    assert_same_bits("x", alone, first, SIZE * sizeof(real));
}

// ---- SwiGLU ----

struct swiglu_case {
    double *gate_up, *gates, *d_hidden, *hidden; // gates NULL: weight 1
    const int *slot_of_row;
    int rows, I;
};

static double weighted_swiglu(const void *context) {
    const struct swiglu_case *c = context;
    reference_swiglu(c->hidden, c->gate_up, c->gates, c->slot_of_row, c->rows, c->I);
    return dot(c->d_hidden, c->hidden, (size_t)c->rows * c->I);
}

static struct swiglu_case make_swiglu(int rows, int width, uint64_t *seed) {
    size_t n = (size_t)rows * width;
    return (struct swiglu_case){normals(2 * n, 2, seed), NULL, normals(n, 1, seed), host_doubles(n), NULL, rows, width};
}

// sigmoid, two or three products and the sum in its derivative, each rounded once; exp may be off by a few last places.
static double swiglu_tolerance(void) { return gradient_roundings(24); }

static void test_swiglu_matches_fp64_and_central_differences(void **state) {
    (void)state;
    uint64_t seed = 341;
    static const int shapes[][2] = {{1, 1}, {3, 5}, {7, 16}, {17, 33}, {2, 130}};
    for (int s = 0; s < 5; s++) {
        int rows = shapes[s][0], width = shapes[s][1];
        size_t n = (size_t)rows * width;
        struct swiglu_case c = make_swiglu(rows, width, &seed);
        real *gate_up = put_real(c.gate_up, 2 * n), *hidden = poisoned_real(n), *again = poisoned_real(n);
        real *d_gate_up = poisoned_real(2 * n);
        swiglu_forward(hidden, gate_up, NULL, NULL, rows, width);
        swiglu_backward(d_gate_up, again, NULL, put_real(c.d_hidden, n), gate_up, NULL, NULL, rows, width);
        double *wanted = central_difference(c.gate_up, 2 * n, 1, weighted_swiglu, &c);
        weighted_swiglu(&c);
        assert_real("hidden", hidden, c.hidden, n, swiglu_tolerance());
        assert_real("hidden again", again, c.hidden, n, swiglu_tolerance());
        assert_real("d_gate_up", d_gate_up, wanted, 2 * n, swiglu_tolerance());
        watch_release();
    }
}

// Ten rows on slots of six tokens, two each: slots 4 and 9 have no row here, and two rows no slot.
enum { SLOTS = 12, SWIGLU_ROWS = 12, SWIGLU_I = 19, SWIGLU_N = SWIGLU_ROWS * SWIGLU_I };
static const int slot_of_row[SWIGLU_ROWS] = {3, 0, 11, -1, 7, 1, 10, 5, 2, 8, 6, -1};

static struct swiglu_case make_gated(uint64_t *seed) {
    struct swiglu_case c = make_swiglu(SWIGLU_ROWS, SWIGLU_I, seed);
    c.gates = normals(SLOTS, 1, seed);
    c.gates[7] = 0;
    c.slot_of_row = slot_of_row;
    return c;
}

static void test_swiglu_gates_weigh_rows_and_a_zero_gate_has_a_gradient(void **state) {
    (void)state;
    uint64_t seed = 342;
    struct swiglu_case c = make_gated(&seed);
    real *gate_up = put_real(c.gate_up, 2 * SWIGLU_N), *hidden = poisoned_real(SWIGLU_N);
    real *again = poisoned_real(SWIGLU_N), *d_gate_up = poisoned_real(2 * SWIGLU_N);
    accum *gates = put_accum(c.gates, SLOTS), *d_gates = poisoned_accum(SLOTS);
    int *slots = put_int(slot_of_row, SWIGLU_ROWS);
    swiglu_forward(hidden, gate_up, gates, slots, SWIGLU_ROWS, SWIGLU_I);
    swiglu_backward(d_gate_up, again, d_gates, put_real(c.d_hidden, SWIGLU_N), gate_up, gates, slots, SWIGLU_ROWS,
                    SWIGLU_I);
    double *wanted = central_difference(c.gate_up, 2 * SWIGLU_N, 1, weighted_swiglu, &c);
    double *wanted_gates = central_difference(c.gates, SLOTS, 1, weighted_swiglu, &c);
    weighted_swiglu(&c);
    assert_real("hidden", hidden, c.hidden, SWIGLU_N, swiglu_tolerance());
    assert_real("hidden again", again, c.hidden, SWIGLU_N, swiglu_tolerance());
    assert_real("d_gate_up", d_gate_up, wanted, 2 * SWIGLU_N, swiglu_tolerance());
    assert_poison("d_gates of a slot without a row", d_gates + 4, sizeof(accum));
    assert_poison("d_gates of a slot without a row", d_gates + 9, sizeof(accum));
    double *found = get_accum(d_gates, SLOTS);
    found[4] = found[9] = 0; // what the reference has for slots without a row
    assert_close("d_gates", found, wanted_gates, SLOTS, swiglu_tolerance());
    assert_true(fabs(wanted_gates[7]) > 1e-2);
    assert_true(fabs(found[7] - wanted_gates[7]) <= 1e-4 * fabs(wanted_gates[7])); // a sum of 19 terms, not zero
}

static void test_swiglu_rows_without_a_slot_become_zeros_whatever_they_hold(void **state) {
    (void)state;
    uint64_t seed = 343;
    struct swiglu_case c = make_gated(&seed);
    for (int i = 0; i < 2 * SWIGLU_I; i++) c.gate_up[3 * 2 * SWIGLU_I + i] = NAN;
    for (int i = 0; i < SWIGLU_I; i++) c.d_hidden[3 * SWIGLU_I + i] = NAN;
    real *gate_up = put_real(c.gate_up, 2 * SWIGLU_N), *hidden = poisoned_real(SWIGLU_N);
    real *again = poisoned_real(SWIGLU_N), *d_gate_up = poisoned_real(2 * SWIGLU_N);
    accum *gates = put_accum(c.gates, SLOTS), *d_gates = poisoned_accum(SLOTS);
    int *slots = put_int(slot_of_row, SWIGLU_ROWS);
    swiglu_forward(hidden, gate_up, gates, slots, SWIGLU_ROWS, SWIGLU_I);
    swiglu_backward(d_gate_up, again, d_gates, put_real(c.d_hidden, SWIGLU_N), gate_up, gates, slots, SWIGLU_ROWS,
                    SWIGLU_I);
    for (int r = 3; r < SWIGLU_ROWS; r += 8)
        for (int i = 0; i < SWIGLU_I; i++) {
            assert_true(get_real(hidden, SWIGLU_N)[r * SWIGLU_I + i] == 0);
            assert_true(get_real(again, SWIGLU_N)[r * SWIGLU_I + i] == 0);
            assert_true(get_real(d_gate_up, 2 * SWIGLU_N)[r * 2 * SWIGLU_I + i] == 0);
            assert_true(get_real(d_gate_up, 2 * SWIGLU_N)[(r * 2 + 1) * SWIGLU_I + i] == 0);
        }
}

static void test_swiglu_of_large_inputs_is_finite_and_right(void **state) {
    (void)state;
    enum { N = 6 };
    static const double large[N] = {100, -100, 100, -100, 88.5, -88.5};
    struct swiglu_case c = {host_doubles(2 * N), NULL, host_doubles(N), host_doubles(N), NULL, 1, N};
    for (int i = 0; i < N; i++) c.gate_up[i] = large[i], c.gate_up[N + i] = i < 2 ? 100 : -100, c.d_hidden[i] = 100;
    real *gate_up = put_real(c.gate_up, 2 * N), *hidden = poisoned_real(N), *d_gate_up = poisoned_real(2 * N);
    swiglu_forward(hidden, gate_up, NULL, NULL, 1, N);
    swiglu_backward(d_gate_up, hidden, NULL, put_real(c.d_hidden, N), gate_up, NULL, NULL, 1, N);
    double *wanted = central_difference(c.gate_up, 2 * N, 1, weighted_swiglu, &c);
    weighted_swiglu(&c);
    assert_finite("d_gate_up", get_real(d_gate_up, 2 * N), 2 * N);
    assert_real("hidden", hidden, c.hidden, N, swiglu_tolerance());
    assert_real("d_gate_up", d_gate_up, wanted, 2 * N, swiglu_tolerance());
}

static void test_swiglu_rows_have_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 344;
    struct swiglu_case c = make_gated(&seed);
    real *gate_up = put_real(c.gate_up, 2 * SWIGLU_N), *d_hidden = put_real(c.d_hidden, SWIGLU_N);
    accum *gates = put_accum(c.gates, SLOTS);
    int *slots = put_int(slot_of_row, SWIGLU_ROWS);
    real *hidden = poisoned_real(SWIGLU_N), *again = poisoned_real(SWIGLU_N), *d_gate_up = poisoned_real(2 * SWIGLU_N);
    accum *d_gates = poisoned_accum(SLOTS);
    void *first[3] = {NULL, NULL, NULL};
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        swiglu_forward(hidden, gate_up, gates, slots, SWIGLU_ROWS, SWIGLU_I);
        swiglu_backward(d_gate_up, again, d_gates, d_hidden, gate_up, gates, slots, SWIGLU_ROWS, SWIGLU_I);
        assert_same_bits("hidden of both passes", again, hidden, SWIGLU_N * sizeof(real));
        assert_same_as_first("hidden", &first[0], hidden, SWIGLU_N * sizeof(real));
        assert_same_as_first("d_gate_up", &first[1], d_gate_up, 2 * SWIGLU_N * sizeof(real));
        assert_same_as_first("d_gates", &first[2], d_gates, SLOTS * sizeof(accum));
    }
    real *hidden1 = poisoned_real(SWIGLU_I), *again1 = poisoned_real(SWIGLU_I), *d1 = poisoned_real(2 * SWIGLU_I);
    accum *d_gates1 = poisoned_accum(SLOTS);
    for (int r = 0; r < SWIGLU_ROWS; r++) {
        swiglu_forward(hidden1, gate_up + r * 2 * SWIGLU_I, gates, slots + r, 1, SWIGLU_I);
        swiglu_backward(d1, again1, d_gates1, d_hidden + r * SWIGLU_I, gate_up + r * 2 * SWIGLU_I, gates, slots + r, 1,
                        SWIGLU_I);
        assert_same_bits("hidden", hidden1, hidden + r * SWIGLU_I, SWIGLU_I * sizeof(real));
        assert_same_bits("d_gate_up", d1, d_gate_up + r * 2 * SWIGLU_I, 2 * SWIGLU_I * sizeof(real));
    }
    assert_same_bits("d_gates", d_gates1, d_gates, SLOTS * sizeof(accum));
}

// A kernel that works on tiles of columns gets the same bits: the whole row's gradient is the sum of those of its pieces.
static void test_swiglu_gate_gradient_is_the_sum_of_chunks_of_columns(void **state) {
    (void)state;
    enum { I = 2 * GATE_GRADIENT_COLUMNS + 44 };
    static const int slot = 0;
    uint64_t seed = 345;
    struct swiglu_case c = make_swiglu(1, I, &seed);
    double gate = -0.75;
    accum *gates = put_accum(&gate, 1), *d_gate = poisoned_accum(1), sum = 0;
    real *hidden = poisoned_real(I), *d_gate_up = poisoned_real(2 * I);
    int *slots = put_int(&slot, 1);
    swiglu_backward(d_gate_up, hidden, d_gate, put_real(c.d_hidden, I), put_real(c.gate_up, 2 * I), gates, slots, 1, I);
    for (int i = 0; i < I; i += GATE_GRADIENT_COLUMNS) {
        int n = I - i < GATE_GRADIENT_COLUMNS ? I - i : GATE_GRADIENT_COLUMNS;
        double *piece = host_doubles(2 * (size_t)n);
        memcpy(piece, c.gate_up + i, sizeof(double) * (size_t)n);
        memcpy(piece + n, c.gate_up + I + i, sizeof(double) * (size_t)n);
        accum *part = poisoned_accum(1);
        swiglu_backward(poisoned_real(2 * (size_t)n), poisoned_real((size_t)n), part,
                        put_real(c.d_hidden + i, (size_t)n), put_real(piece, 2 * (size_t)n), gates, slots, 1, n);
        sum += *(accum *)get_bytes(part, sizeof(accum));
    }
    assert_memory_equal(get_bytes(d_gate, sizeof(accum)), &sum, sizeof sum);
}

// ---- loss ----

struct loss_case {
    double *logits, scale;
    const int *targets;
    int rows, V;
};

static double scaled_loss(const void *context) {
    const struct loss_case *c = context;
    double sum = 0;
    for (int i = 0; i < c->rows; i++)
        sum += c->scale * reference_cross_entropy(c->logits + (size_t)i * c->V, c->targets[i], c->V);
    return sum;
}

static void check_cross_entropy(int rows, int V, double deviation, double gradient_tolerance, uint64_t *seed) {
    size_t n = (size_t)rows * V;
    int *targets = host_ints(rows);
    for (int i = 0; i < rows; i++) targets[i] = i % 4 == 2 ? -1 : random_below(V, seed);
    targets[0] = V - 1;
    struct loss_case c = {normals(n, deviation, seed), 0.37, targets, rows, V};
    double *wanted = host_doubles(rows);
    for (int i = 0; i < rows; i++) wanted[i] = reference_cross_entropy(c.logits + (size_t)i * V, targets[i], V);

    int *dtargets = put_int(targets, rows);
    accum *loss = poisoned_accum(rows), *loss_again = poisoned_accum(rows);
    cross_entropy(put_real(c.logits, n), loss, dtargets, rows, V, false, 0.37);
    // logsumexp is a positive sum and its logarithm; the difference from the target's logit is rounded relative to the
    // logits, not to the loss, which is smaller by at most a few times.
    assert_accum("loss", loss, wanted, rows, roundings(32));

    real *logits = put_real(c.logits, n);
    cross_entropy(logits, loss_again, dtargets, rows, V, true, 0.37);
    assert_same_bits("loss with gradient", loss_again, loss, rows * sizeof(accum));
    double *gradient = central_difference(c.logits, n, 1, scaled_loss, &c), *found = get_real(logits, n);
    assert_close("gradient", found, gradient, n, gradient_tolerance);
    for (int i = 0; i < rows; i++)
        for (int v = 0; targets[i] < 0 && v < V; v++) assert_true(found[(size_t)i * V + v] == 0);
    for (int i = 0; i < rows; i++)
        if (targets[i] < 0) assert_true(get_accum(loss, rows)[i] == 0);
    watch_release();
}

static void test_cross_entropy_matches_fp64_and_central_differences(void **state) {
    (void)state;
    uint64_t seed = 351;
    static const int vocabularies[] = {2, 5, 17, 63, 65, 131};
    // exp of a difference up to 20 passes its rounding on, on probabilities that are small then; 32 covers it
    for (int c = 0; c < 6; c++) check_cross_entropy(7, vocabularies[c], 3, gradient_roundings(32), &seed);
}

static void test_cross_entropy_of_one_class_is_zero(void **state) {
    (void)state;
    uint64_t seed = 352;
    check_cross_entropy(5, 1, 3, 0, &seed);
}

static void test_cross_entropy_of_large_logits_is_finite_and_right(void **state) {
    (void)state;
    uint64_t seed = 353;
    // One class wins each row; its probability's error is exp of the rounding of 1e4, if anything. The central
    // difference of a loss of 1e4 has an error of 1e4 * 2^-53 / 1e-5 per element, 1e-7.
    check_cross_entropy(9, 37, 1e4, 1e-5, &seed);
    enum { V = 3 };
    static const int targets[3] = {0, 1, 2};
    static const double extremes[3 * V] = {1e4, -1e4, -1e4, 1e4, -1e4, 1e4, -1e4, -1e4, -1e4};
    double wanted[3] = {0, 2e4 + log(2), log(3)};
    double gradients[3 * V] = {0, 0, 0, 0.5, -1, 0.5, 1.0 / 3, 1.0 / 3, -2.0 / 3};
    real *logits = put_real(extremes, 3 * V);
    accum *loss = poisoned_accum(3);
    cross_entropy(logits, loss, put_int(targets, 3), 3, V, true, 1);
    for (int i = 0; i < 3; i++) // each on its own, for the sizes differ; halves of a last place as above
        assert_true(fabs(get_accum(loss, 3)[i] - wanted[i]) <= roundings(8) * wanted[i]);
    assert_real("gradient", logits, gradients, 3 * V, roundings(8));
}

static void test_cross_entropy_ignores_what_a_row_without_target_holds(void **state) {
    (void)state;
    enum { V = 3 };
    static const int targets[2] = {-1, 1};
    static const double rows[2 * V] = {NAN, INFINITY, -INFINITY, 1, 2, 3};
    real *logits = put_real(rows, 2 * V);
    accum *loss = poisoned_accum(2);
    cross_entropy(logits, loss, put_int(targets, 2), 2, V, true, 1);
    assert_true(get_accum(loss, 2)[0] == 0);
    for (int v = 0; v < V; v++) assert_true(get_real(logits, 2 * V)[v] == 0);
}

static void test_cross_entropy_rows_have_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 354;
    enum { ROWS = 33, V = 71 };
    int targets[ROWS];
    for (int i = 0; i < ROWS; i++) targets[i] = random_below(V + 1, &seed) - 1;
    double *values = normals(ROWS * V, 3, &seed);
    int *dtargets = put_int(targets, ROWS);
    void *loss = NULL, *gradient = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        real *logits = put_real(values, ROWS * V);
        accum *losses = poisoned_accum(ROWS);
        cross_entropy(logits, losses, dtargets, ROWS, V, true, 0.3);
        assert_same_as_first("gradient", &gradient, logits, ROWS * V * sizeof(real));
        assert_same_as_first("loss", &loss, losses, ROWS * sizeof(accum));
    }
    real *alone = put_real(values, ROWS * V);
    accum *losses = poisoned_accum(ROWS);
    for (int i = 0; i < ROWS; i++) cross_entropy(alone + i * V, losses + i, dtargets + i, 1, V, true, 0.3);
    assert_same_bits("gradient", alone, gradient, ROWS * V * sizeof(real));
    assert_same_bits("loss", losses, loss, ROWS * sizeof(accum));
}

// ---- sums ----

// device_add_sum to what is `before`.
static double sum_after(double before, const accum *values, size_t n) {
    double *sum = device_alloc(sizeof *sum), result;
    device_copy_in(sum, &before, sizeof before);
    device_add_sum(sum, values, n);
    device_copy_out(&result, sum, sizeof result);
    device_free(sum);
    return result;
}

static void test_device_add_sum_adds_the_ascending_sum_in_fp64(void **state) {
    (void)state;
    uint64_t seed = 361;
    static const size_t counts[] = {0, 1, 2, 17, 1000, 65537};
    for (int c = 0; c < 6; c++) {
        double *values = normals(counts[c], 1, &seed), sum = 0;
        for (size_t i = 0; i < counts[c]; i++) sum += values[i];
        accum *device = put_accum(values, counts[c]);
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            assert_true(sum_after(0, device, counts[c]) == sum);
            assert_true(sum_after(0.1, device, counts[c]) == 0.1 + sum);
        }
    }
}

static void test_sums_of_ten_million_values_are_exact_to_twelve_digits(void **state) {
    (void)state;
    uint64_t seed = 362;
    enum { N = 10000000, PIECE = 10000 };
    accum *device = device_alloc(N * sizeof(accum)), piece[PIECE]; // not watched: a second copy takes a second
    long double sum = 0, squares = 0;
    for (size_t first = 0; first < N; first += PIECE) {
        for (size_t i = 0; i < PIECE; i++) {
            piece[i] = (accum)(1e3 * test_uniform(&seed));
            sum += piece[i], squares += (long double)piece[i] * piece[i];
        }
        device_copy_in(device + first, piece, sizeof piece);
    }
    double found[4], total = sum_after(0, device, N);
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        found[threads] = device_sum_squares(device, N);
    }
    device_free(device);
    // FP64 in sequence: sqrt(1e7) roundings of 1e-16 are 4e-13 at worst; a float sum is off by 1e-3.
    assert_true(fabs(found[1] - (double)squares) <= 1e-12 * (double)squares);
    assert_true(fabs(total - (double)sum) <= 1e-12 * (double)sum);
    assert_true(found[2] == found[1] && found[3] == found[1]); // bits for any number of threads
}

static void test_sums_keep_nan_infinity_and_values_whose_square_is_no_float(void **state) {
    (void)state;
    uint64_t seed = 363;
    enum { N = 1000 };
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    static const size_t places[] = {0, 17, 500, N - 1};
    for (int b = 0; b < 3; b++)
        for (int p = 0; p < 4; p++) {
            double *values = normals(N, 1, &seed);
            values[places[p]] = bad[b];
            accum *device = put_accum(values, N);
            double squares = device_sum_squares(device, N), sum = sum_after(0, device, N);
            assert_true(b == 0 ? isnan(squares) : isinf(squares) && squares > 0);
            assert_true(b == 0 ? isnan(sum) : isinf(sum) && (sum > 0) == (bad[b] > 0));
        }
    double large[2] = {1e30f, -1e30f}, small[2] = {1e-30f, 1e-30f};
    assert_true(fabs(device_sum_squares(put_accum(large, 2), 2) / 2e60 - 1) < 1e-6); // 1e30f is 1e30 to 3e-8
    assert_true(fabs(device_sum_squares(put_accum(small, 2), 2) / 2e-60 - 1) < 1e-6);
    assert_true(device_sum_squares(put_accum(large, 0), 0) == 0);
}

// ---- optimizer ----

struct adamw_state {
    double *master, *m, *v;
    accum *dev_master, *dev_m, *dev_v;
    real *weight;
};

static struct adamw_state make_adamw(size_t n, uint64_t *seed) {
    struct adamw_state s = {normals(n, 1, seed), host_doubles(n), host_doubles(n), NULL, NULL, NULL, poisoned_real(n)};
    s.dev_master = put_accum(s.master, n), s.dev_m = put_accum(s.m, n), s.dev_v = put_accum(s.v, n);
    return s;
}

// Ten steps of random gradients of the given size, on the device and in FP64.
static void check_adamw(size_t n, struct adamw a, double gradient_size, uint64_t *seed) {
    struct adamw_state s = make_adamw(n, seed);
    double *start = host_doubles(n), *moved = host_doubles(n), *wanted = host_doubles(n);
    memcpy(start, s.master, n * sizeof *start);
    for (int step = 0; step < 10; step++, a.step++) {
        double *grad = normals(n, gradient_size, seed);
        adamw_update(s.dev_master, s.dev_m, s.dev_v, s.weight, put_accum(grad, n), n, a);
        for (size_t i = 0; i < n; i++) reference_adamw(&s.master[i], &s.m[i], &s.v[i], grad[i], a);
        const real *weight = get_bytes(s.weight, n * sizeof(real));
        const accum *master = get_bytes(s.dev_master, n * sizeof(accum));
        for (size_t i = 0; i < n; i++) assert_true(weight[i] == (real)master[i]);
    }
    const double *found = get_accum(s.dev_master, n);
    for (size_t i = 0; i < n; i++) moved[i] = found[i] - start[i], wanted[i] = s.master[i] - start[i];
    // Ten steps with about five roundings each; 1 - beta rounded to a float instead would be off by 1e-5.
    assert_accum("m", s.dev_m, s.m, n, roundings(24));
    assert_accum("v", s.dev_v, s.v, n, roundings(24));
    // The distance covered, not the weight, which hides it. Ten weights near 1 are rounded to 2^-24, beside ten steps
    // of lr each; both are random.
    assert_close("distance", moved, wanted, n, roundings(24) + roundings(4) / (a.lr * sqrt(10)));
    watch_release();
}

static void test_adamw_follows_fp64_for_ten_steps(void **state) {
    (void)state;
    uint64_t seed = 371;
    struct adamw a = {.lr = 0.03, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_scale = 1, .step = 1};
    static const size_t counts[] = {1, 7, 33, 1000, 10007};
    for (int c = 0; c < 5; c++) check_adamw(counts[c], a, 1, &seed);
    a.weight_decay = 0.1;
    check_adamw(1001, a, 1, &seed);
    a.beta2 = 0.999, a.grad_scale = 0.173;
    check_adamw(1001, a, 5, &seed);
    a.step = 100000; // bias corrections are over
    check_adamw(1001, a, 1, &seed);
}

// Gradients as small as eps: eps belongs outside the square root and is not scaled by the bias correction.
static void test_adamw_adds_eps_to_the_root(void **state) {
    (void)state;
    uint64_t seed = 372;
    struct adamw a = {.lr = 0.03, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .grad_scale = 1, .step = 1};
    check_adamw(1001, a, 1e-6, &seed);
}

static void test_adamw_decays_weights_without_gradient_and_keeps_them_without_decay(void **state) {
    (void)state;
    uint64_t seed = 373;
    enum { N = 100 };
    struct adamw a = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .grad_scale = 1, .step = 1};
    struct adamw_state s = make_adamw(N, &seed);
    accum *zero = put_accum(host_doubles(N), N), *start = put_accum(s.master, N);
    adamw_update(s.dev_master, s.dev_m, s.dev_v, s.weight, zero, N, a);
    assert_same_bits("master without decay", s.dev_master, start, N * sizeof(accum));
    a.weight_decay = 0.5, a.step = 2;
    adamw_update(s.dev_master, s.dev_m, s.dev_v, s.weight, zero, N, a);
    for (int i = 0; i < N; i++) s.master[i] *= 1 - 0.1 * 0.5;
    assert_accum("master with decay", s.dev_master, s.master, N, roundings(4)); // a product and a sum
}

static void test_adamw_has_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 374;
    enum { N = 5003 };
    struct adamw a = {
        .lr = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.7, .step = 3};
    double *master = normals(N, 1, &seed), *m = normals(N, 1, &seed), *v = normals(N, 1, &seed);
    for (int i = 0; i < N; i++) v[i] = fabs(v[i]);
    accum *grad = put_accum(normals(N, 1, &seed), N);
    void *first[3] = {NULL, NULL, NULL};
    for (int threads = 1; threads <= 4; threads++) {
        omp_set_num_threads(threads);
        accum *w1 = put_accum(master, N), *m1 = put_accum(m, N), *v1 = put_accum(v, N);
        real *weight = poisoned_real(N);
        if (threads < 4) adamw_update(w1, m1, v1, weight, grad, N, a);
        for (int i = 0; threads == 4 && i < N; i++) adamw_update(w1 + i, m1 + i, v1 + i, weight + i, grad + i, 1, a);
        assert_same_as_first("master", &first[0], w1, N * sizeof(accum));
        assert_same_as_first("m", &first[1], m1, N * sizeof(accum));
        assert_same_as_first("v", &first[2], v1, N * sizeof(accum));
    }
}

// ---- nothing to do ----

static void test_sizes_of_zero_do_nothing(void **state) {
    (void)state;
    uint64_t seed = 381;
    enum { N = 8 };
    real *x = put_real(normals(N, 1, &seed), N), *y = poisoned_real(N);
    accum *a = poisoned_accum(N);
    int *ids = put_int((int[N]){0}, N);
    embedding_forward(y, x, ids, 0, 4);
    embedding_backward(a, x, ids, 0, 4);
    rmsnorm_forward(y, 4, a, x, 4, x, 0, 4, 1e-6);
    rmsnorm_backward(y, 4, false, a, x, 4, x, 4, x, a, 0, 4);
    rope_rotate(y, 4, 1, 4, 0, 4, a, 0, 1, false);
    rope_rotate(y, 4, 0, 4, 0, 4, a, 2, 1, false);
    rope_rotate(y, 4, 1, 4, 0, 0, a, 2, 1, false);
    swiglu_forward(y, x, NULL, NULL, 0, 2);
    swiglu_backward(y, y, NULL, x, x, NULL, NULL, 0, 2);
    cross_entropy(y, a, ids, 0, 4, true, 1);
    adamw_update(a, a, a, y, a, 0, (struct adamw){.lr = 1, .beta1 = 0.9, .beta2 = 0.9, .eps = 1, .step = 1});
    device_zero(y, 0);
    device_copy_in(y, x, 0);
    device_real_from_float(y, NULL, 0);
    device_accum_from_float(a, NULL, 0);
    assert_poison("y", y, N * sizeof(real));
    assert_poison("a", a, N * sizeof(accum));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_row_exp_is_right_to_two_units),
        watched_test(test_allocated_memory_is_zero_and_aligned_even_after_use),
        watched_test(test_memory_that_does_not_exist_ends_with_the_size_asked_for),
        watched_test(test_copies_and_conversions_return_what_went_in),
        watched_test(test_the_device_names_itself_and_its_limits),
        watched_test(test_embedding_copies_rows_and_gives_zeros_for_no_token),
        watched_test(test_embedding_gradient_adds_rows_in_ascending_order),
        watched_test(test_rmsnorm_matches_fp64_and_central_differences),
        watched_test(test_rmsnorm_adds_eps_to_the_mean_square),
        watched_test(test_rmsnorm_rows_have_the_same_bits_alone_and_with_any_threads),
        watched_test(test_rope_multiplies_adjacent_pairs_by_complex_angles),
        watched_test(test_inverse_rope_undoes_rope),
        watched_test(test_inverse_rope_is_the_gradient_of_rope),
        watched_test(test_rope_rows_have_the_same_bits_alone_and_with_any_threads),
        watched_test(test_swiglu_matches_fp64_and_central_differences),
        watched_test(test_swiglu_gates_weigh_rows_and_a_zero_gate_has_a_gradient),
        watched_test(test_swiglu_rows_without_a_slot_become_zeros_whatever_they_hold),
        watched_test(test_swiglu_of_large_inputs_is_finite_and_right),
        watched_test(test_swiglu_rows_have_the_same_bits_alone_and_with_any_threads),
        watched_test(test_swiglu_gate_gradient_is_the_sum_of_chunks_of_columns),
        watched_test(test_cross_entropy_matches_fp64_and_central_differences),
        watched_test(test_cross_entropy_of_one_class_is_zero),
        watched_test(test_cross_entropy_of_large_logits_is_finite_and_right),
        watched_test(test_cross_entropy_ignores_what_a_row_without_target_holds),
        watched_test(test_cross_entropy_rows_have_the_same_bits_alone_and_with_any_threads),
        watched_test(test_device_add_sum_adds_the_ascending_sum_in_fp64),
        watched_test(test_sums_of_ten_million_values_are_exact_to_twelve_digits),
        watched_test(test_sums_keep_nan_infinity_and_values_whose_square_is_no_float),
        watched_test(test_adamw_follows_fp64_for_ten_steps),
        watched_test(test_adamw_adds_eps_to_the_root),
        watched_test(test_adamw_decays_weights_without_gradient_and_keeps_them_without_decay),
        watched_test(test_adamw_has_the_same_bits_alone_and_with_any_threads),
        watched_test(test_sizes_of_zero_do_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
