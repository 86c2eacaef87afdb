// Causal attention against FP64: values, gradients by central differences, causality, and bits.
#include "tests/test.h"

#include "tests/reference.h"

// The inputs of one case, as FP64 numbers a float holds exactly, and as device memory.
struct attention_case {
    struct attention_shape shape;
    int kr_stride, dkr_stride, tokens;
    size_t nq, nkv, nkr, ndkr, no, nlse;
    double *q, *kv, *kr, *d_o, *o, *lse; // o and lse are scratch of the FP64 forward
    real *dev_q, *dev_kv, *dev_kr, *dev_d_o;
};

static void put_case(struct attention_case *c) {
    c->dev_q = put_real(c->q, c->nq);
    c->dev_kv = put_real(c->kv, c->nkv);
    c->dev_kr = put_real(c->kr, c->nkr);
    c->dev_d_o = put_real(c->d_o, c->no);
}

// kr has `gap` columns more than it uses, NaN in them; dkr has another gap.
static struct attention_case make_case(struct attention_shape s, int gap, double deviation, uint64_t *seed) {
    struct attention_case c = {.shape = s, .kr_stride = s.rope_dim + gap, .dkr_stride = s.rope_dim + 2 * gap};
    c.tokens = s.batch * s.length;
    c.nq = (size_t)c.tokens * s.heads * (s.nope_dim + s.rope_dim);
    c.nkv = (size_t)c.tokens * s.heads * (s.nope_dim + s.value_dim);
    c.nkr = (size_t)c.tokens * c.kr_stride;
    c.ndkr = (size_t)c.tokens * c.dkr_stride;
    c.no = (size_t)c.tokens * s.heads * s.value_dim;
    c.nlse = (size_t)c.tokens * s.heads;
    c.q = normals(c.nq, deviation, seed);
    c.kv = normals(c.nkv, deviation, seed);
    c.kr = normals(c.nkr, deviation, seed);
    c.d_o = normals(c.no, 1, seed);
    c.o = host_doubles(c.no);
    c.lse = host_doubles(c.nlse);
    for (size_t i = 0; i < c.nkr; i++)
        if (i % c.kr_stride >= (size_t)s.rope_dim) c.kr[i] = NAN;
    put_case(&c);
    return c;
}

static double weighted_output(const void *context) {
    const struct attention_case *c = context;
    reference_attention(c->o, c->lse, c->q, c->kv, c->kr, c->kr_stride, c->shape);
    return dot(c->d_o, c->o, c->no);
}

struct attention_result {
    real *o, *dq, *dkv, *dkr;
    accum *lse;
};

static struct attention_result run_forward(const struct attention_case *c) {
    struct attention_result r = {.o = poisoned_real(c->no), .lse = poisoned_accum(c->nlse)};
    attention_forward(r.o, r.lse, c->dev_q, c->dev_kv, c->dev_kr, c->kr_stride, c->shape);
    return r;
}

static struct attention_result run(const struct attention_case *c) {
    struct attention_result r = run_forward(c);
    r.dq = poisoned_real(c->nq);
    r.dkv = poisoned_real(c->nkv);
    r.dkr = poisoned_real(c->ndkr);
    attention_backward(r.dq, r.dkv, r.dkr, c->dkr_stride, c->dev_d_o, c->dev_q, c->dev_kv, c->dev_kr, c->kr_stride, r.o,
                       r.lse, c->shape);
    return r;
}

// The first `columns` of each row of `stride`, rows close to each other.
static double *packed(const double *x, int rows, int stride, int columns) {
    double *y = host_doubles((size_t)rows * columns);
    for (size_t i = 0; i < (size_t)rows; i++)
        for (int j = 0; j < columns; j++) y[i * columns + j] = x[i * stride + j];
    return y;
}

static struct attention_shape shape_of(int batch, int length, int heads, int nope, int rope, int value) {
    return (struct attention_shape){batch, length, heads, nope, rope, value, 1 / sqrt(nope + rope)};
}

// Unequal key and value sizes, single tokens, both sides of 64, several heads and sequences.
static const int dimensions[][6] = {
    // batch, length, heads, nope, rope, value
    {1, 1, 1, 8, 4, 6},  {2, 2, 3, 5, 2, 7},   {3, 17, 2, 8, 4, 6},    {2, 64, 2, 5, 2, 11},   {1, 65, 3, 16, 8, 16},
    {2, 65, 1, 3, 4, 1}, {1, 130, 2, 7, 6, 5}, {1, 33, 1, 33, 18, 65}, {1, 40, 2, 64, 32, 64},
};
enum { CASES = sizeof dimensions / sizeof *dimensions };

static struct attention_shape shape_number(int c) {
    const int *d = dimensions[c];
    return shape_of(d[0], d[1], d[2], d[3], d[4], d[5]);
}

// A score is rounded about sqrt(key size) times and exp passes its absolute error on as a relative one; the weighted
// sum adds as many roundings again as terms weigh in. 32 halves of a last place, 1.9e-6, are for key sizes up to 100.
static double forward_tolerance(void) { return roundings(32); }

static void test_forward_matches_fp64(void **state) {
    (void)state;
    uint64_t seed = 201;
    for (int c = 0; c < CASES; c++) {
        struct attention_case a = make_case(shape_number(c), 3, 1, &seed);
        struct attention_result r = run_forward(&a);
        weighted_output(&a);
        assert_real("o", r.o, a.o, a.no, forward_tolerance());
        assert_accum("lse", r.lse, a.lse, a.nlse, forward_tolerance());
        watch_release();
    }
}

static void test_backward_matches_central_differences(void **state) {
    (void)state;
    uint64_t seed = 202;
    // dS = P (dP - D) is a difference of two sums like o, so its error is a few times that of o.
    const double tolerance = gradient_roundings(80);
    for (int c = 0; c < CASES; c++) {
        struct attention_case a = make_case(shape_number(c), 3, 1, &seed);
        struct attention_shape s = a.shape;
        struct attention_result r = run(&a);
        // About forty entries of each tensor of a long case; primes walk through all columns, rows and heads.
        size_t every_q = a.nq > 300 ? a.nq / 40 | 1 : 1, every_kv = a.nkv > 300 ? a.nkv / 40 | 1 : 1;
        double *dq = central_difference(a.q, a.nq, every_q, weighted_output, &a);
        double *dkv = central_difference(a.kv, a.nkv, every_kv, weighted_output, &a);
        assert_finite("dq", get_real(r.dq, a.nq), a.nq);
        assert_finite("dkv", get_real(r.dkv, a.nkv), a.nkv);
        size_t some_q = (a.nq + every_q - 1) / every_q, some_kv = (a.nkv + every_kv - 1) / every_kv;
        assert_close("dq", sample(get_real(r.dq, a.nq), a.nq, every_q), dq, some_q, tolerance);
        assert_close("dkv", sample(get_real(r.dkv, a.nkv), a.nkv, every_kv), dkv, some_kv, tolerance);

        // The shared rope keys on their own: with no gap every entry counts.
        size_t nkr = (size_t)a.tokens * s.rope_dim, every_kr = nkr > 300 ? nkr / 40 | 1 : 1;
        a.kr = packed(a.kr, a.tokens, a.kr_stride, s.rope_dim);
        a.kr_stride = s.rope_dim;
        double *dkr = central_difference(a.kr, nkr, every_kr, weighted_output, &a);
        double *found = packed(get_real(r.dkr, a.ndkr), a.tokens, a.dkr_stride, s.rope_dim);
        assert_finite("dkr", found, nkr);
        assert_close("dkr", sample(found, nkr, every_kr), dkr, (nkr + every_kr - 1) / every_kr, tolerance);
        watch_release();
    }
}

static void test_a_single_token_returns_its_value_and_no_key_gradient(void **state) {
    (void)state;
    uint64_t seed = 203;
    struct attention_case a = make_case(shape_of(3, 1, 2, 8, 4, 6), 0, 1, &seed);
    struct attention_result r = run(&a);
    double *o = get_real(r.o, a.no), *dkv = get_real(r.dkv, a.nkv), *dq = get_real(r.dq, a.nq);
    for (size_t i = 0; i < a.no; i++) {
        size_t value = i / 6 * 14 + 8 + i % 6;
        // exp(0) / 1 is exact
        if (o[i] != a.kv[value]) fail_msg("o[%zu] is %.9g, wanted the value %.9g", i, o[i], a.kv[value]);
        if (dkv[value] != a.d_o[i]) fail_msg("dv of o[%zu] is %.9g, wanted %.9g", i, dkv[value], a.d_o[i]);
    }
    // dP - D = 0 up to the roundings of two sums of six terms near 1, times keys near 1
    for (size_t i = 0; i < a.nq; i++) assert_true(fabs(dq[i]) <= roundings(100));
    for (size_t i = 0; i < a.nkv; i++)
        if (i % 14 < 8) assert_true(fabs(dkv[i]) <= roundings(100));
}

static void test_strides_leave_gaps_untouched(void **state) {
    (void)state;
    uint64_t seed = 204;
    struct attention_case a = make_case(shape_of(2, 17, 2, 8, 4, 6), 5, 1, &seed);
    struct attention_result r = run(&a);
    for (int i = 0; i < a.tokens; i++)
        assert_poison("gap of dkr", r.dkr + i * a.dkr_stride + 4, (a.dkr_stride - 4) * sizeof(real));
}

// ---- large scores ----

static void test_large_scores_stay_finite_and_right(void **state) {
    (void)state;
    uint64_t seed = 205;
    struct attention_case a = make_case(shape_of(1, 65, 2, 8, 4, 6), 0, 30, &seed);
    a.shape.scale = 1; // scores are then about 30 * 30 * sqrt(12) = 3000 wide
    struct attention_result r = run(&a);
    weighted_output(&a);
    double largest = 0;
    for (size_t i = 0; i < a.nlse; i++) largest = fmax(largest, fabs(a.lse[i]));
    assert_true(largest > 1e3);
    assert_finite("dq", get_real(r.dq, a.nq), a.nq);
    assert_finite("dkv", get_real(r.dkv, a.nkv), a.nkv);
    assert_finite("dkr", get_real(r.dkr, a.ndkr), a.ndkr);
    // The rounding of a score of 3000 (about 4 roundings, 7e-4) is the relative error of its weight; most rows have one
    // weight near 1, where the error cancels.
    assert_real("o", r.o, a.o, a.no, 3000 * roundings(4));
    assert_accum("lse", r.lse, a.lse, a.nlse, forward_tolerance());
}

static void test_equal_scores_of_any_size_give_the_mean(void **state) {
    (void)state;
    uint64_t seed = 206;
    static const double scores[] = {-1e3, 0, 1e3, 1e5};
    for (int c = 0; c < 4; c++) {
        struct attention_case a = make_case(shape_of(1, 65, 1, 4, 2, 3), 0, 1, &seed);
        for (size_t i = 0; i < a.nq; i++) a.q[i] = i % 6 == 0 ? scores[c] : 0;
        for (size_t i = 0; i < a.nkv; i++)
            if (i % 7 == 0) a.kv[i] = 1;
        a.shape.scale = 1;
        put_case(&a);
        struct attention_result r = run_forward(&a);
        double *mean = host_doubles(a.no), *lse = host_doubles(a.nlse);
        for (int t = 0; t < 65; t++) {
            lse[t] = scores[c] + log(t + 1);
            for (int j = 0; j <= t; j++)
                for (int v = 0; v < 3; v++) mean[t * 3 + v] += a.kv[j * 7 + 4 + v] / (t + 1);
        }
        assert_real("o", r.o, mean, a.no, forward_tolerance());
        assert_accum("lse", r.lse, lse, a.nlse, forward_tolerance());
        watch_release();
    }
}

// ---- causality and bits ----

// One case in which token CHANGED gets other inputs, or the tokens before CHANGED another output gradient.
enum { CAUSAL_T = 70, CAUSAL_HEADS = 2, CHANGED = 37 };

static void replace(double *x, size_t first, size_t count, const double *with) {
    memcpy(x + first, with, count * sizeof *x);
}

static void test_a_later_token_never_reaches_an_earlier_row(void **state) {
    (void)state;
    uint64_t seed = 207;
    double *change = normals(CAUSAL_HEADS * 14, 10, &seed);
    struct attention_case a = make_case(shape_of(1, CAUSAL_T, CAUSAL_HEADS, 8, 4, 6), 0, 1, &seed);
    struct attention_result r = run(&a);
    replace(a.q, CHANGED * CAUSAL_HEADS * 12, CAUSAL_HEADS * 12, change);
    replace(a.kv, CHANGED * CAUSAL_HEADS * 14, CAUSAL_HEADS * 14, change);
    replace(a.kr, CHANGED * 4, 4, change);
    put_case(&a);
    struct attention_result changed = run(&a);
    assert_same_bits("o", changed.o, r.o, CHANGED * CAUSAL_HEADS * 6 * sizeof(real));
    assert_same_bits("dq", changed.dq, r.dq, CHANGED * CAUSAL_HEADS * 12 * sizeof(real));
    for (int h = 0; h < CAUSAL_HEADS; h++)
        assert_same_bits("lse", changed.lse + h * CAUSAL_T, r.lse + h * CAUSAL_T, CHANGED * sizeof(accum));
    double *before = get_real(r.o, a.no), *after = get_real(changed.o, a.no);
    for (size_t i = CHANGED * CAUSAL_HEADS * 6; i < a.no; i++)
        if (after[i] == before[i]) fail_msg("o[%zu] of token %zu did not see token %d", i, i / 12, CHANGED);
}

static void test_an_earlier_gradient_never_reaches_a_later_key(void **state) {
    (void)state;
    uint64_t seed = 208;
    double *change = normals(CHANGED * CAUSAL_HEADS * 6, 1000, &seed);
    struct attention_case a = make_case(shape_of(1, CAUSAL_T, CAUSAL_HEADS, 8, 4, 6), 0, 1, &seed);
    struct attention_result r = run(&a);
    replace(a.d_o, 0, CHANGED * CAUSAL_HEADS * 6, change);
    put_case(&a);
    struct attention_result changed = run(&a);
    size_t kv = CHANGED * CAUSAL_HEADS * 14, kr = CHANGED * 4;
    assert_same_bits("dkv", changed.dkv + kv, r.dkv + kv, (a.nkv - kv) * sizeof(real));
    assert_same_bits("dkr", changed.dkr + kr, r.dkr + kr, (a.ndkr - kr) * sizeof(real));
}

static void test_rows_have_the_same_bits_in_a_shorter_sequence(void **state) {
    (void)state;
    uint64_t seed = 209;
    static const int lengths[] = {1, 2, 17, 31, 63, 64, 65, 127};
    enum { T = 130, HEADS = 2 };
    struct attention_case a = make_case(shape_of(1, T, HEADS, 9, 4, 6), 2, 1, &seed);
    struct attention_result r = run(&a);
    for (int c = 0; c < 8; c++) {
        int t = lengths[c];
        struct attention_shape s = a.shape;
        s.length = t;
        size_t nq = (size_t)t * HEADS * 13, nkv = (size_t)t * HEADS * 15, no = (size_t)t * HEADS * 6;
        real *o = poisoned_real(no), *dq = poisoned_real(nq), *dkv = poisoned_real(nkv);
        real *dkr = poisoned_real((size_t)t * 4);
        accum *lse = poisoned_accum((size_t)t * HEADS);
        attention_forward(o, lse, a.dev_q, a.dev_kv, a.dev_kr, a.kr_stride, s);
        attention_backward(dq, dkv, dkr, 4, a.dev_d_o, a.dev_q, a.dev_kv, a.dev_kr, a.kr_stride, o, lse, s);
        assert_same_bits("o", o, r.o, no * sizeof(real));
        assert_same_bits("dq", dq, r.dq, nq * sizeof(real));
        for (int h = 0; h < HEADS; h++) assert_same_bits("lse", lse + h * t, r.lse + h * T, t * sizeof(accum));
    }
}

static void test_a_sequence_has_the_same_bits_alone_and_in_a_batch(void **state) {
    (void)state;
    uint64_t seed = 210;
    enum { B = 3, T = 37, HEADS = 2 };
    struct attention_case a = make_case(shape_of(B, T, HEADS, 9, 4, 6), 1, 1, &seed);
    struct attention_result r = run(&a);
    size_t nq = a.nq / B, nkv = a.nkv / B, nkr = a.nkr / B, no = a.no / B, nlse = a.nlse / B, ndkr = a.ndkr / B;
    for (int b = 0; b < B; b++) {
        struct attention_case one = a;
        one.shape.batch = 1;
        one.dev_q += b * nq, one.dev_kv += b * nkv, one.dev_kr += b * nkr, one.dev_d_o += b * no;
        one.nq = nq, one.nkv = nkv, one.no = no, one.nlse = nlse, one.ndkr = ndkr;
        struct attention_result alone = run(&one);
        assert_same_bits("o", alone.o, r.o + b * no, no * sizeof(real));
        assert_same_bits("lse", alone.lse, r.lse + b * nlse, nlse * sizeof(accum));
        assert_same_bits("dq", alone.dq, r.dq + b * nq, nq * sizeof(real));
        assert_same_bits("dkv", alone.dkv, r.dkv + b * nkv, nkv * sizeof(real));
        assert_same_bits("dkr", alone.dkr, r.dkr + b * ndkr, ndkr * sizeof(real));
    }
}

// Columns of head h out of rows of all heads.
static real *put_head(const double *x, int rows, int heads, int columns, int h) {
    double *one = host_doubles((size_t)rows * columns);
    for (size_t i = 0; i < (size_t)rows; i++)
        memcpy(one + i * columns, x + (i * heads + h) * columns, columns * sizeof *one);
    return put_real(one, (size_t)rows * columns);
}

static void test_a_head_has_the_same_bits_alone_and_among_others(void **state) {
    (void)state;
    uint64_t seed = 211;
    enum { T = 66, HEADS = 3 };
    struct attention_case a = make_case(shape_of(1, T, HEADS, 9, 4, 6), 1, 1, &seed);
    struct attention_result r = run(&a);
    double *o = get_real(r.o, a.no), *dq = get_real(r.dq, a.nq), *dkv = get_real(r.dkv, a.nkv);
    for (int h = 0; h < HEADS; h++) {
        struct attention_case one = a;
        one.shape.heads = 1;
        one.dev_q = put_head(a.q, T, HEADS, 13, h);
        one.dev_kv = put_head(a.kv, T, HEADS, 15, h);
        one.dev_d_o = put_head(a.d_o, T, HEADS, 6, h);
        one.nq /= HEADS, one.nkv /= HEADS, one.no /= HEADS, one.nlse /= HEADS;
        struct attention_result alone = run(&one);
        assert_same_bits("o", alone.o, put_head(o, T, HEADS, 6, h), one.no * sizeof(real));
        assert_same_bits("lse", alone.lse, r.lse + h * T, T * sizeof(accum));
        assert_same_bits("dq", alone.dq, put_head(dq, T, HEADS, 13, h), one.nq * sizeof(real));
        assert_same_bits("dkv", alone.dkv, put_head(dkv, T, HEADS, 15, h), one.nkv * sizeof(real));
    }
}

static void test_bits_do_not_depend_on_the_number_of_threads(void **state) {
    (void)state;
    uint64_t seed = 212;
    static const int cases[] = {2, 3, 6, 8};
    for (int c = 0; c < 4; c++) {
        struct attention_case a = make_case(shape_number(cases[c]), 1, 1, &seed);
        void *o = NULL, *lse = NULL, *dq = NULL, *dkv = NULL, *dkr = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            struct attention_result r = run(&a);
            assert_same_as_first("o", &o, r.o, a.no * sizeof(real));
            assert_same_as_first("lse", &lse, r.lse, a.nlse * sizeof(accum));
            assert_same_as_first("dq", &dq, r.dq, a.nq * sizeof(real));
            assert_same_as_first("dkv", &dkv, r.dkv, a.nkv * sizeof(real));
            assert_same_as_first("dkr", &dkr, r.dkr, a.ndkr * sizeof(real));
        }
        watch_release();
    }
}

static void test_size_zero_does_nothing(void **state) {
    (void)state;
    uint64_t seed = 213;
    static const int empty[][3] = {{0, 5, 2}, {2, 0, 2}, {2, 5, 0}};
    for (int c = 0; c < 3; c++) {
        struct attention_case a =
            make_case(shape_of(empty[c][0], empty[c][1], c == 2 ? 1 : empty[c][2], 8, 4, 6), 0, 1, &seed);
        a.shape.heads = empty[c][2];
        if (a.shape.heads == 0) a.nq = a.nkv = a.no = a.nlse = 0; // dkr, a sum over no heads, may become zeros
        run(&a);
        watch_release();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        watched_test(test_forward_matches_fp64),
        watched_test(test_backward_matches_central_differences),
        watched_test(test_a_single_token_returns_its_value_and_no_key_gradient),
        watched_test(test_strides_leave_gaps_untouched),
        watched_test(test_large_scores_stay_finite_and_right),
        watched_test(test_equal_scores_of_any_size_give_the_mean),
        watched_test(test_a_later_token_never_reaches_an_earlier_row),
        watched_test(test_an_earlier_gradient_never_reaches_a_later_key),
        watched_test(test_rows_have_the_same_bits_in_a_shorter_sequence),
        watched_test(test_a_sequence_has_the_same_bits_alone_and_in_a_batch),
        watched_test(test_a_head_has_the_same_bits_alone_and_among_others),
        watched_test(test_bits_do_not_depend_on_the_number_of_threads),
        watched_test(test_size_zero_does_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
