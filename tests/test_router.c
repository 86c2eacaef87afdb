// The router and the dispatch on one device: hand-written tables where a likely mistake gives another answer, FP64
// references on random scores, and gradients by central differences.
#include "tests/test.h"

#include "tests/reference.h"

// ---- scores ----

struct score_case {
    double *x, *w, *scores;
    int N, E, H;
};

static void reference_scores(const struct score_case *c) {
    for (int i = 0; i < c->N; i++)
        for (int e = 0; e < c->E; e++)
            c->scores[i * c->E + e] = reference_sigmoid(dot(c->x + (size_t)i * c->H, c->w + (size_t)e * c->H, c->H));
}

static void test_scores_are_sigmoids_of_fp32_products(void **state) {
    (void)state;
    uint64_t seed = 401;
    static const int shapes[][3] = {{1, 1, 1}, {3, 5, 7}, {17, 8, 64}, {33, 31, 65}, {130, 16, 300}, {2, 257, 513}};
    for (int s = 0; s < 6; s++) {
        int N = shapes[s][0], E = shapes[s][1], H = shapes[s][2];
        size_t n = (size_t)N * E;
        struct score_case c = {
            normals((size_t)N * H, 1, &seed), normals((size_t)E * H, 1 / sqrt(H), &seed), host_doubles(n), N, E, H};
        reference_scores(&c);
        accum *scores = poisoned_accum(n);
        router_score(scores, put_real(c.x, (size_t)N * H), put_real(c.w, (size_t)E * H), N, E, H);
        // A logit near 1 has an error of about sqrt(H) roundings of its terms, which are 1 / sqrt(H) each: a few
        // roundings; the sigmoid adds a few and never amplifies.
        assert_accum("scores", scores, c.scores, n, roundings(16));
        watch_release();
    }
}

static void test_scores_of_large_logits_stay_between_zero_and_one(void **state) {
    (void)state;
    static const double x[2] = {100, -100}, w[2] = {1, 10};
    accum *scores = poisoned_accum(4);
    router_score(scores, put_real(x, 2), put_real(w, 2), 2, 2, 1);
    double *found = get_accum(scores, 4);
    assert_true(found[0] == 1 && found[1] == 1);
    assert_true(found[2] >= 0 && found[2] < 1e-37 && found[3] >= 0 && found[3] < 1e-37);
}

static void test_score_rows_have_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 402;
    enum { N = 67, E = 13, H = 300 };
    real *x = put_real(normals(N * H, 1, &seed), N * H), *w = put_real(normals(E * H, 0.1, &seed), E * H);
    accum *scores = poisoned_accum(N * E), *alone = poisoned_accum(N * E);
    void *first = NULL;
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        router_score(scores, x, w, N, E, H);
        assert_same_as_first("scores", &first, scores, N * E * sizeof(accum));
    }
    for (int i = 0; i < N; i++) router_score(alone + i * E, x + i * H, w, 1, E, H);
    assert_same_bits("scores alone", alone, scores, N * E * sizeof(accum));
}

// ---- selection ----

// One token each. Values are multiples of 1/64, so that sums with the bias are exact and ties are ties.
// Ties go by number, so that a choice that is made again is the same one (Automodel issue 3325, Liger issue 1255).
struct selection {
    const char *name;
    struct router_shape shape;
    double scores[8], bias[8];
    int wanted[4];
};

static const struct selection selections[] = {
    {"plain top-K, largest first",
     {8, 3, 1, 1, true, 1},
     {.25, .5, .125, .875, .75, .0625, .625, .375},
     {0},
     {3, 4, 6}},
    {"the bias moves the selection",
     {8, 3, 1, 1, true, 1},
     {.25, .5, .125, .875, .75, .0625, .625, .375},
     {0, .5, 0, -.5, 0, .75, 0, 0},
     {1, 5, 4}},
    // Groups of two: sums 1.0, .9375, .875, .75; the largest score of all is in the last group and is out.
    {"two best groups by the sum of two",
     {8, 2, 4, 2, true, 1},
     {.5, .5, .5, .4375, .4375, .4375, .75, 0},
     {0},
     {0, 1}},
    // Groups of four: the sums of two are 1.25 and 1.3125; by the largest (.9375) or by all four (1.9375 against
    // 1.3125) the first group would win.
    {"a group's rank is its two largest, not one and not all",
     {8, 2, 2, 1, true, 1},
     {.9375, .3125, .3125, .3125, .6875, .625, 0, 0},
     {0},
     {4, 5}},
    {"the bias moves the groups",
     {8, 2, 4, 1, true, 1},
     {.5, .5, .25, .25, .125, .125, .25, .125},
     {0, 0, 0, 0, .5, .5, 0, 0},
     {4, 5}},
    // All biased scores are negative. Group 1 wins with -0.5 and -0.75; a mask of 0 would pick from the others.
    {"masked experts are out when all biased scores are negative",
     {8, 2, 4, 1, true, 1},
     {.25, .25, .5, .25, .125, .125, .25, .125},
     {-1, -1, -1, -1, -1, -1, -1, -1},
     {2, 3}},
    {"negative and positive biased scores in one group",
     {8, 2, 2, 1, true, 1},
     {.5, .25, .25, .25, .5, .5, .5, .5},
     {.5, -.5, -.5, -.5, -.25, -.25, -.25, -.25},
     {0, 1}},
    {"exactly enough experts in the best groups",
     {8, 4, 4, 2, true, 1},
     {.125, .25, .75, .0625, .5, .25, .5, .5},
     {0},
     {2, 6, 7, 3}},
    {"exactly enough, with negative biased scores",
     {8, 4, 4, 2, true, 1},
     {.125, .25, .75, .0625, .5, .25, .5, .5},
     {-2, -2, -2, -2, -2, -2, -2, -2},
     {2, 6, 7, 3}},
    {"ties go to the lower expert", {8, 3, 1, 1, true, 1}, {.5, .25, .5, .5, .25, .5, .5, .5}, {0}, {0, 2, 3}},
    {"all equal", {8, 4, 1, 1, true, 1}, {.5, .5, .5, .5, .5, .5, .5, .5}, {0}, {0, 1, 2, 3}},
    {"ties of biased scores, not of scores",
     {8, 2, 1, 1, true, 1},
     {.25, .5, .75, .5, 0, 0, 0, 0},
     {.5, .25, 0, .25, 0, 0, 0, 0},
     {0, 1}},
    {"ties of groups go to the lower group",
     {8, 2, 4, 1, true, 1},
     {.25, .125, .5, .25, .25, .5, .375, .375},
     {0},
     {2, 3}},
    {"a tie at the last place", {8, 2, 1, 1, true, 1}, {.25, .5, .25, .75, .5, .5, .25, .5}, {0}, {3, 1}},
    {"one expert", {8, 1, 1, 1, false, 1}, {.25, .5, .25, .75, .5, .5, .25, .75}, {0}, {3}},
    {"all experts", {4, 4, 1, 1, true, 1}, {.25, .5, .125, .75}, {0}, {3, 1, 0, 2}},
    {"all groups kept is no limit",
     {8, 3, 4, 4, true, 1},
     {.25, .5, .125, .875, .75, .0625, .625, .375},
     {0},
     {3, 4, 6}},
};
enum { SELECTIONS = sizeof selections / sizeof *selections };

static void test_selection_gives_the_hand_written_answers(void **state) {
    (void)state;
    for (int c = 0; c < SELECTIONS; c++) {
        const struct selection *s = &selections[c];
        int K = s->shape.top_k, reference[8];
        int32_t *ids = poisoned_int(K);
        accum *gates = poisoned_accum(K);
        router_select(ids, gates, put_accum(s->scores, 8), put_accum(s->bias, 8), NULL, 1, s->shape);
        reference_select(reference, s->scores, s->bias, s->shape);
        const int *found = get_int(ids, K);
        for (int k = 0; k < K; k++) {
            if (found[k] != s->wanted[k])
                fail_msg("%s: choice %d is %d, wanted %d", s->name, k, found[k], s->wanted[k]);
            assert_int_equal(reference[k], s->wanted[k]);
        }
        watch_release();
    }
}

// Random scores on a coarse grid: exact sums and many ties, in every combination of groups.
static void test_selection_and_gates_match_the_reference_on_random_scores(void **state) {
    (void)state;
    uint64_t seed = 411;
    static const struct router_shape shapes[] = {
        {8, 2, 1, 1, true, 1},    {8, 2, 4, 2, true, 2.5},     {16, 4, 4, 1, true, 2.5}, {16, 4, 8, 2, false, 16},
        {64, 6, 1, 1, true, 2.5}, {256, 8, 8, 4, true, 2.446}, {6, 3, 3, 2, true, 1},    {33, 5, 11, 7, false, 1.5},
    };
    enum { N = 41 };
    for (int c = 0; c < 8; c++) {
        struct router_shape s = shapes[c];
        int E = s.experts, K = s.top_k, *wanted = host_ints(N * K);
        double *scores = host_doubles(N * E), *bias = host_doubles(E), *gates = host_doubles(N * K);
        for (int i = 0; i < N * E; i++) scores[i] = (1 + random_below(63, &seed)) / 64.0;
        for (int e = 0; e < E; e++) bias[e] = (random_below(33, &seed) - 24) / 64.0; // mostly below zero
        for (int i = 0; i < N; i++) {
            reference_select(wanted + i * K, scores + i * E, bias, s);
            reference_gates(gates + i * K, wanted + i * K, scores + i * E, s);
        }
        accum *dscores = put_accum(scores, N * E), *dbias = put_accum(bias, E), *dgates = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            int32_t *ids = poisoned_int(N * K);
            dgates = poisoned_accum(N * K);
            router_select(ids, dgates, dscores, dbias, NULL, N, s);
            assert_memory_equal(get_int(ids, N * K), wanted, N * K * sizeof(int));
            assert_accum("gates", dgates, gates, N * K, roundings(K + 4)); // a sum of K, a quotient, a product
        }
        double *found = get_accum(dgates, N * K);
        for (int i = 0; i < N && s.normalize; i++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += found[i * K + k];
            assert_true(fabs(sum - s.scale) <= s.scale * roundings(K + 4));
        }
        watch_release();
    }
}

static void test_gates_use_scores_and_never_the_bias(void **state) {
    (void)state;
    static const double scores[4] = {.5, .25, .125, .75}, bias[4] = {-1, 2, 3, -4};
    struct router_shape s = {4, 2, 1, 1, true, 3};
    accum *gates = poisoned_accum(2);
    int32_t *ids = poisoned_int(2);
    router_select(ids, gates, put_accum(scores, 4), put_accum(bias, 4), NULL, 1, s);
    assert_int_equal(get_int(ids, 2)[0], 2);
    assert_int_equal(get_int(ids, 2)[1], 1);
    double normalized[2] = {1, 2}, raw[2] = {.375, .75};
    assert_accum("normalized gates", gates, normalized, 2, roundings(4));
    s.normalize = false;
    router_select(ids, gates, put_accum(scores, 4), put_accum(bias, 4), NULL, 1, s);
    assert_accum("gates without normalizing", gates, raw, 2, roundings(2));
}

// Gates of a choice made elsewhere are those of select for the same ids; a masked token loses its experts.
static void test_gates_of_given_experts_are_those_of_the_selection(void **state) {
    (void)state;
    uint64_t seed = 424;
    enum { N = 37, E = 16, K = 4 };
    for (int normalize = 0; normalize <= 1; normalize++) {
        struct router_shape s = {E, K, 1, 1, normalize, 2.5};
        double *values = normals(N * E, 1, &seed);
        for (int i = 0; i < N * E; i++) values[i] = (float)reference_sigmoid(values[i]);
        accum *scores = put_accum(values, N * E), *bias = put_accum(host_doubles(E), E);
        int tokens[N], *ids = poisoned_int(N * K), *all = poisoned_int(N * K);
        accum *wanted = poisoned_accum(N * K), *gates = poisoned_accum(N * K);
        for (int t = 0; t < N; t++) tokens[t] = t % 5 == 2 ? -1 : t;
        router_select(all, wanted, scores, bias, NULL, N, s);
        router_select(ids, wanted, scores, bias, put_int(tokens, N), N, s);
        router_gates(all, gates, scores, put_int(tokens, N), N, s);
        assert_same_bits("ids", all, ids, N * K * sizeof(int));
        assert_same_bits("gates", gates, wanted, N * K * sizeof(accum));
        router_gates(all, gates, scores, NULL, N, s); // tokens whose ids are -1 already
        assert_same_bits("ids", all, ids, N * K * sizeof(int));
        assert_same_bits("gates", gates, wanted, N * K * sizeof(accum));
    }
}

static void test_gates_of_vanishing_scores_stay_finite(void **state) {
    (void)state;
    static const double scores[4] = {0, 0, 0, 0}, zero[4] = {0};
    accum *gates = poisoned_accum(2);
    router_select(poisoned_int(2), gates, put_accum(scores, 4), put_accum(zero, 4), NULL, 1,
                  (struct router_shape){4, 2, 1, 1, true, 2.5});
    assert_accum("gates", gates, zero, 2, 0); // 0 / 1e-20
}

// ---- counts and the bias ----

static int64_t *put_counts(const int64_t *counts, int E) {
    int64_t *device = watch_alloc(E * sizeof *device, 0xff, true);
    device_copy_in(device, counts, E * sizeof *device);
    return device;
}

static void test_counts_add_up_beyond_what_a_float_counts(void **state) {
    (void)state;
    static const int64_t before[5] = {0, 1 << 24, (int64_t)1 << 40, 7, ((int64_t)1 << 53) + 1};
    static const int ids[12] = {1, 2, -1, 2, 4, 1, 1, -1, 4, 0, 2, 2};
    static const int64_t wanted[5] = {1, (1 << 24) + 3, ((int64_t)1 << 40) + 4, 7, ((int64_t)1 << 53) + 3};
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        int64_t *counts = put_counts(before, 5);
        router_count(counts, put_int(ids, 12), 12, 5);
        assert_memory_equal(get_bytes(counts, sizeof wanted), wanted, sizeof wanted);
    }
}

static void test_counts_of_many_ids_match_a_loop(void **state) {
    (void)state;
    uint64_t seed = 421;
    enum { N = 100001, E = 37 };
    int *ids = host_ints(N);
    int64_t wanted[E] = {0}, zero[E] = {0};
    for (int i = 0; i < N; i++) {
        ids[i] = random_below(E + 1, &seed) - 1;
        if (ids[i] >= 0) wanted[ids[i]]++;
    }
    int64_t *counts = put_counts(zero, E);
    router_count(counts, put_int(ids, N), N, E);
    assert_memory_equal(get_bytes(counts, sizeof wanted), wanted, sizeof wanted);
}

static void check_bias(const int64_t *counts, const double *signs, int E) {
    static const double rate = 0.001;
    uint64_t seed = 422;
    double *before = normals(E, 0.1, &seed), *wanted = host_doubles(E), *moved = host_doubles(E);
    accum *zero = put_accum(host_doubles(E), E), *bias = put_accum(before, E);
    for (int e = 0; e < E; e++) wanted[e] = before[e] + rate * signs[e], moved[e] = (accum)rate * signs[e];
    router_update_bias(zero, put_counts(counts, E), E, rate);
    assert_accum("bias from zero", zero, moved, E, roundings(2));
    router_update_bias(bias, put_counts(counts, E), E, rate);
    double *found = get_accum(bias, E); // one rounding of rate, one of the sum
    for (int e = 0; e < E; e++)
        if (!(fabs(found[e] - wanted[e]) <= roundings(2) * fabs(wanted[e])))
            fail_msg("bias[%d] is %.9g after %.9g, wanted %.9g", e, found[e], before[e], wanted[e]);
    watch_release();
}

static void test_the_bias_moves_against_the_sign_of_the_excess(void **state) {
    (void)state;
    check_bias((int64_t[]){3, 1, 2, 2}, (double[]){-1, 1, 0, 0}, 4);
    check_bias((int64_t[]){5, 5, 5}, (double[]){0, 0, 0}, 3);
    check_bias((int64_t[]){0, 0, 1}, (double[]){1, 1, -1}, 3); // the mean is no integer
    check_bias((int64_t[]){0, 0}, (double[]){0, 0}, 2);
}

// Counts kept in BF16 or FP32 lose such differences: Megatron-LM pull 7081.
static void test_the_bias_moves_for_differences_that_floats_lose(void **state) {
    (void)state;
    check_bias((int64_t[]){40840, 41080, 40960, 40960}, (double[]){1, -1, 0, 0}, 4);
    int64_t a = (1 << 24) + 2, b = ((int64_t)1 << 40) + 1, c = ((int64_t)1 << 55) + 1;
    check_bias((int64_t[]){a, a + 1, a - 1, a}, (double[]){0, -1, 1, 0}, 4);
    check_bias((int64_t[]){b, b + 1, b, b}, (double[]){1, -1, 1, 1}, 4);
    check_bias((int64_t[]){c, c + 1, c - 1, c}, (double[]){0, -1, 1, 0}, 4); // beyond what a double counts
}

// ---- balance loss ----

static void test_balance_loss_of_a_balanced_sequence_is_exactly_one(void **state) {
    (void)state;
    // Two tokens prefer opposite halves; all quotients are exact.
    static const double scores[8] = {.75, .75, .25, .25, .25, .25, .75, .75}, ones[5] = {1, 1, 1, 1, 1};
    accum *f = poisoned_accum(4), *loss = poisoned_accum(1);
    router_balance(f, loss, put_accum(scores, 8), NULL, 1, 2, (struct router_shape){4, 2, 1, 1, true, 2.5});
    assert_accum("f", f, ones, 4, 0);
    assert_accum("loss", loss, ones, 1, 0);
}

static void test_balance_loss_matches_the_paper_on_random_scores(void **state) {
    (void)state;
    uint64_t seed = 431;
    static const int shapes[][4] = {{1, 1, 4, 2}, {3, 17, 8, 2}, {2, 65, 16, 4}, {5, 33, 37, 6}};
    for (int c = 0; c < 4; c++) {
        int B = shapes[c][0], T = shapes[c][1], E = shapes[c][2];
        // Groups must not matter: the top-K here is plain.
        struct router_shape s = {E, shapes[c][3], E % 4 == 0 ? 4 : 1, 1, true, 2.5};
        size_t n = (size_t)B * T * E;
        double *scores = host_doubles(n), *f = host_doubles(B * E), *loss = host_doubles(B);
        for (size_t i = 0; i < n; i++) scores[i] = (float)reference_sigmoid(test_normal(&seed));
        for (int b = 0; b < B; b++) loss[b] = reference_balance(f + b * E, scores + (size_t)b * T * E, T, s);
        accum *dscores = put_accum(scores, n);
        void *first_f = NULL, *first_loss = NULL;
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            accum *found_f = poisoned_accum(B * E), *found_loss = poisoned_accum(B);
            router_balance(found_f, found_loss, dscores, NULL, B, T, s);
            assert_accum("f", found_f, f, B * E, roundings(4)); // E / (K T) times an integer
            // all terms are positive: sums over E and T round like sqrt of their lengths
            assert_accum("loss", found_loss, loss, B, roundings(8 + 2 * sqrt(T) + 2 * sqrt(E)));
            assert_same_as_first("f", &first_f, found_f, B * E * sizeof(accum));
            assert_same_as_first("loss", &first_loss, found_loss, B * sizeof(accum));
        }
        for (int b = 0; b < B; b++) { // each sequence alone
            accum *one_f = poisoned_accum(E), *one_loss = poisoned_accum(1);
            router_balance(one_f, one_loss, dscores + (size_t)b * T * E, NULL, 1, T, s);
            assert_same_bits("f alone", one_f, (accum *)first_f + b * E, E * sizeof(accum));
            assert_same_bits("loss alone", one_loss, (accum *)first_loss + b, sizeof(accum));
        }
        watch_release();
    }
}

// Ties at the last place of the top-K go to the lower id here as well.
static void test_balance_counts_ties_once(void **state) {
    (void)state;
    static const double scores[8] = {.5, .5, .5, .5, .25, .5, .25, .25}, wanted[4] = {2, 2, 0, 0};
    accum *f = poisoned_accum(4), *loss = poisoned_accum(1);
    router_balance(f, loss, put_accum(scores, 8), NULL, 1, 2, (struct router_shape){4, 2, 1, 1, true, 1});
    assert_accum("f", f, wanted, 4, roundings(2));
}

// ---- backward ----

// The loss that router_backward differentiates: <d_gates, gates> + balance_scale sum_t sum_i f_i s_ti / sum_j s_tj with
// ids and f held fixed.
struct backward_case {
    struct router_shape shape;
    int B, T, H;
    double balance_scale;
    double *x, *w, *z, *d_gates, *f; // z [N, E], the logits
    int *ids;
};

static double loss_of_logits(const void *context) {
    const struct backward_case *c = context;
    int E = c->shape.experts, K = c->shape.top_k;
    double loss = 0, s[64], gates[64];
    for (int t = 0; t < c->B * c->T; t++) {
        double sum = 0, weighted = 0;
        for (int e = 0; e < E; e++) {
            s[e] = reference_sigmoid(c->z[t * E + e]);
            sum += s[e];
            weighted += c->f[t / c->T * E + e] * s[e];
        }
        reference_gates(gates, c->ids + t * K, s, c->shape);
        loss += dot(c->d_gates + t * K, gates, K) + c->balance_scale * weighted / sum;
    }
    return loss;
}

static double loss_of_inputs(const void *context) {
    const struct backward_case *c = context;
    int E = c->shape.experts;
    for (int t = 0; t < c->B * c->T; t++)
        for (int e = 0; e < E; e++) c->z[t * E + e] = dot(c->x + (size_t)t * c->H, c->w + (size_t)e * c->H, c->H);
    return loss_of_logits(c);
}

static struct backward_case make_backward(int B, int T, int H, struct router_shape shape, double balance_scale,
                                          uint64_t *seed) {
    int N = B * T, E = shape.experts, K = shape.top_k;
    struct backward_case c = {shape, B, T, H, balance_scale, .ids = host_ints(N * K)};
    c.x = normals((size_t)N * H, 1, seed), c.w = normals((size_t)E * H, 1 / sqrt(H), seed);
    c.z = host_doubles(N * E), c.d_gates = normals(N * K, 1, seed), c.f = host_doubles(B * E);
    for (int i = 0; i < B * E; i++) c.f[i] = (float)(2 * test_uniform(seed));
    loss_of_inputs(&c);
    // Any K different experts: the gradient holds for a selection that no score explains.
    for (int t = 0; t < N; t++)
        for (int k = 0; k < K; k++) c.ids[t * K + k] = (t * 3 + k * 5) % E;
    return c;
}

struct backward_device {
    real *x, *w;
    accum *scores, *d_gates, *f;
    int32_t *ids;
};

static struct backward_device put_backward(const struct backward_case *c) {
    int N = c->B * c->T, E = c->shape.experts, K = c->shape.top_k;
    struct backward_device d = {
        put_real(c->x, (size_t)N * c->H), put_real(c->w, (size_t)E * c->H), poisoned_accum(N * E),
        put_accum(c->d_gates, N * K),     put_accum(c->f, c->B * E),        put_int(c->ids, N * K)};
    router_score(d.scores, d.x, d.w, N, E, c->H);
    return d;
}

static const struct router_shape backward_shapes[] = {
    {8, 2, 1, 1, true, 2.5},
    {8, 2, 4, 2, false, 2.5},
    {16, 4, 1, 1, true, 1},
    {7, 3, 1, 1, false, 0.5},
};

static void test_router_gradient_matches_central_differences(void **state) {
    (void)state;
    uint64_t seed = 441;
    static const double balance_scales[] = {0, 0.05, 3};
    for (int shape = 0; shape < 4; shape++)
        for (int scale = 0; scale < 3; scale++) {
            struct backward_case c = make_backward(2, 5, 19, backward_shapes[shape], balance_scales[scale], &seed);
            struct backward_device d = put_backward(&c);
            int N = 10, E = c.shape.experts, H = c.H;
            double *dx_before = normals(N * H, 1, &seed), *dw_before = normals(E * H, 1, &seed);
            real *dx = put_real(dx_before, N * H);
            accum *dw = put_accum(dw_before, E * H), *dz = poisoned_accum(N * E);
            router_backward(dx, dw, dz, d.d_gates, d.scores, d.ids, d.f, c.balance_scale * c.T, d.x, d.w, c.B, c.T, H,
                            c.shape);
            // dg - mu and f - fbar are differences of numbers near 1, which cost a few bits of the 16 roundings or so
            // on the way; a logit's own error adds sqrt(H) more.
            double tolerance = gradient_roundings(64);
            loss_of_inputs(&c);
            assert_accum("dz", dz, central_difference(c.z, N * E, 1, loss_of_logits, &c), N * E, tolerance);
            double *wanted = central_difference(c.x, N * H, 1, loss_of_inputs, &c);
            assert_real("dx", dx, added(dx_before, wanted, N * H), N * H, tolerance);
            wanted = central_difference(c.w, E * H, 1, loss_of_inputs, &c);
            assert_accum("dw", dw, added(dw_before, wanted, E * H), E * H, tolerance);
            watch_release();
        }
}

// Normalized gates and the balance term do not change when all scores of a token grow by one factor: the derivative
// along the scores is zero, sum_j ds_j s_j = sum_j dz_j / (1 - s_j).
static void test_score_gradient_is_orthogonal_to_the_scores(void **state) {
    (void)state;
    uint64_t seed = 442;
    struct backward_case c = make_backward(3, 7, 19, (struct router_shape){16, 4, 1, 1, true, 2.5}, 2, &seed);
    struct backward_device d = put_backward(&c);
    enum { N = 21, E = 16 };
    accum *dz = poisoned_accum(N * E), *dw = put_accum(host_doubles(E * 19), E * 19);
    router_backward(put_real(host_doubles(N * 19), N * 19), dw, dz, d.d_gates, d.scores, d.ids, d.f,
                    c.balance_scale * c.T, d.x, d.w, c.B, c.T, c.H, c.shape);
    double *found = get_accum(dz, N * E), *s = get_accum(d.scores, N * E);
    for (int t = 0; t < N; t++) {
        double sum = 0, size = 0;
        for (int e = 0; e < E; e++) {
            double term = found[t * E + e] / (1 - s[t * E + e]);
            sum += term, size += fabs(term);
        }
        // the terms carry about 16 roundings each and are summed in FP64
        if (!(fabs(sum) <= size * roundings(16))) fail_msg("token %d: sum of ds s is %g beside %g", t, sum, size);
    }
}

static void test_router_gradient_has_the_same_bits_alone_and_with_any_threads(void **state) {
    (void)state;
    uint64_t seed = 443;
    enum { B = 3, T = 23, N = B * T, E = 16, K = 4, H = 37 };
    struct backward_case c = make_backward(B, T, H, (struct router_shape){E, K, 1, 1, true, 2.5}, 0.7, &seed);
    struct backward_device d = put_backward(&c);
    double *dx_before = normals(N * H, 1, &seed), *dw_before = normals(E * H, 1, &seed);
    void *first[3] = {NULL, NULL, NULL};
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        real *dx = put_real(dx_before, N * H);
        accum *dw = put_accum(dw_before, E * H), *dz = poisoned_accum(N * E);
        router_backward(dx, dw, dz, d.d_gates, d.scores, d.ids, d.f, 0.7 * T, d.x, d.w, B, T, H, c.shape);
        assert_same_as_first("dx", &first[0], dx, N * H * sizeof(real));
        assert_same_as_first("dw", &first[1], dw, E * H * sizeof(accum));
        assert_same_as_first("dz", &first[2], dz, N * E * sizeof(accum));
    }
    real *dx = put_real(dx_before, N * H);
    accum *dz = poisoned_accum(N * E), *dw = put_accum(dw_before, E * H);
    for (int t = 0; t < N; t++)
        router_backward(dx + t * H, dw, dz + t * E, d.d_gates + t * K, d.scores + t * E, d.ids + t * K, d.f + t / T * E,
                        0.7, d.x + t * H, d.w, 1, 1, H, c.shape);
    assert_same_bits("dx alone", dx, first[0], N * H * sizeof(real));
    assert_same_bits("dz alone", dz, first[2], N * E * sizeof(accum));
}

// ---- dispatch and combine ----

struct placement {
    int *offsets, *slot_of_row, *row_of_slot;
};

static struct placement place(const int *ids, int N, int K, int E) {
    struct placement p = {poisoned_int(E + 1), poisoned_int((size_t)N * K), poisoned_int((size_t)N * K)};
    moe_place(p.offsets, p.slot_of_row, p.row_of_slot, put_int(ids, (size_t)N * K), NULL, N, K, E);
    return p;
}

// Rows in the order of (expert, token, k), by one search per expert.
static void check_place(const int *ids, int N, int K, int E) {
    int slots = N * K, row = 0;
    int *offsets = host_ints(E + 1), *slot_of_row = host_ints(slots), *row_of_slot = host_ints(slots);
    for (int i = 0; i < slots; i++) slot_of_row[i] = row_of_slot[i] = -1;
    for (int e = 0; e < E; e++) {
        offsets[e] = row;
        for (int slot = 0; slot < slots; slot++)
            if (ids[slot] == e) slot_of_row[row] = slot, row_of_slot[slot] = row, row++;
    }
    offsets[E] = row;
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        struct placement p = place(ids, N, K, E);
        assert_memory_equal(get_int(p.offsets, E + 1), offsets, (E + 1) * sizeof(int));
        if (slots == 0) continue;
        assert_memory_equal(get_int(p.slot_of_row, slots), slot_of_row, slots * sizeof(int));
        assert_memory_equal(get_int(p.row_of_slot, slots), row_of_slot, slots * sizeof(int));
    }
    watch_release();
}

static void test_place_orders_rows_by_expert_token_and_k(void **state) {
    (void)state;
    static const int ids[8] = {2, 0, 0, 3, 2, 3, -1, 0};
    struct placement p = place(ids, 4, 2, 5);
    assert_memory_equal(get_int(p.offsets, 6), ((int[]){0, 3, 3, 5, 7, 7}), 6 * sizeof(int));
    assert_memory_equal(get_int(p.slot_of_row, 8), ((int[]){1, 2, 7, 0, 4, 3, 5, -1}), 8 * sizeof(int));
    assert_memory_equal(get_int(p.row_of_slot, 8), ((int[]){3, 0, 1, 5, 4, 6, -1, 2}), 8 * sizeof(int));
}

static void test_place_matches_a_search_per_expert(void **state) {
    (void)state;
    uint64_t seed = 451;
    static const int shapes[][3] = {{1, 1, 1}, {17, 2, 8}, {129, 4, 16}, {65, 6, 64}, {1000, 8, 5}};
    for (int c = 0; c < 5; c++) {
        int N = shapes[c][0], K = shapes[c][1], E = shapes[c][2], *ids = host_ints(N * K);
        for (int i = 0; i < N * K; i++) ids[i] = random_below(E + 1, &seed) - 1;
        check_place(ids, N, K, E);
    }
    int all_one[12], none[12], zero[1] = {0};
    for (int i = 0; i < 12; i++) all_one[i] = 3, none[i] = -1;
    check_place(all_one, 6, 2, 5);
    check_place(none, 6, 2, 5);
    check_place(zero, 0, 2, 5); // no tokens: all offsets are 0
}

static void test_place_takes_experts_in_a_given_order(void **state) {
    (void)state;
    static const int ids[8] = {2, 0, 0, 3, 2, 3, -1, 0}, order[5] = {3, 0, 4, 1, 2};
    int *offsets = poisoned_int(6), *slot_of_row = poisoned_int(8), *row_of_slot = poisoned_int(8);
    moe_place(offsets, slot_of_row, row_of_slot, put_int(ids, 8), put_int(order, 5), 4, 2, 5);
    assert_memory_equal(get_int(offsets, 6), ((int[]){0, 0, 2, 2, 5, 7}), 6 * sizeof(int));
    assert_memory_equal(get_int(slot_of_row, 8), ((int[]){3, 5, 1, 2, 7, 0, 4, -1}), 8 * sizeof(int));
    assert_memory_equal(get_int(row_of_slot, 8), ((int[]){5, 2, 3, 0, 6, 1, -1, 4}), 8 * sizeof(int));
}

// Three sources, of whose five experts the middle three are regrouped; rows are numbered from 10 on.
static void test_regroup_brings_rows_from_the_order_of_sources_to_that_of_experts(void **state) {
    (void)state;
    static const int offsets[18] = {0, 9, 11, 11, 12, 21, 0, 9, 9, 9, 9, 18, 0, 9, 10, 10, 12, 21};
    int *arrival_of_row = poisoned_int(16), *row_of_arrival = poisoned_int(16);
    moe_regroup(arrival_of_row, row_of_arrival, put_int(offsets, 18) + 1, 3, 6, 3, 10, 6);
    // Arrivals: source 0 has rows 10, 11 of the first and 12 of the last expert, source 2 13 of the first, 14, 15 of the last.
    assert_memory_equal(get_int(arrival_of_row, 16) + 10, ((int[]){10, 11, 13, 12, 14, 15}), 6 * sizeof(int));
    assert_memory_equal(get_int(row_of_arrival, 16) + 10, ((int[]){10, 11, 13, 12, 14, 15}), 6 * sizeof(int));
    assert_memory_equal(get_int(arrival_of_row, 16), get_int(poisoned_int(10), 10), 10 * sizeof(int));
    assert_memory_equal(get_int(row_of_arrival, 16), get_int(poisoned_int(10), 10), 10 * sizeof(int));
    static const int shifted[6] = {0, 1, 4, 0, 1, 1}; // the two permutations differ
    moe_regroup(arrival_of_row, row_of_arrival, put_int(shifted, 6), 2, 3, 2, 0, 5);
    assert_memory_equal(get_int(arrival_of_row, 5), ((int[]){0, 4, 1, 2, 3}), 5 * sizeof(int));
    assert_memory_equal(get_int(row_of_arrival, 5), ((int[]){0, 2, 3, 4, 1}), 5 * sizeof(int));
}

static void test_gather_of_gates_gives_zero_for_no_slot(void **state) {
    (void)state;
    static const int index[5] = {2, -1, 0, 2, -1};
    static const double gates[3] = {0.5, -1, 3};
    accum *out = poisoned_accum(5);
    moe_gather_gates(out, put_accum(gates, 3), put_int(index, 5), 5);
    const double *found = get_accum(out, 5);
    assert_true(found[0] == 3 && found[1] == 0 && found[2] == 0.5 && found[3] == 3 && found[4] == 0);
}

static void test_gather_copies_rows_and_zeros_for_no_index(void **state) {
    (void)state;
    uint64_t seed = 452;
    enum { N = 5, H = 19, R = 9 };
    static const int index[R] = {4, 0, 0, -1, 2, 0, 1, 4, -1};
    double *x = normals(N * H, 1, &seed), *wanted = host_doubles(R * H);
    for (int r = 0; r < R; r++)
        for (int h = 0; h < H; h++) wanted[r * H + h] = index[r] < 0 ? 0 : x[index[r] * H + h];
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        real *rows = poisoned_real(R * H);
        moe_gather(rows, put_real(x, N * H), put_int(index, R), R, H);
        assert_same_bits("rows", rows, put_real(wanted, R * H), R * H * sizeof(real));
    }
}

static void test_scatter_copies_every_token_to_the_rows_of_its_slots_and_writes_no_others(void **state) {
    (void)state;
    uint64_t seed = 456;
    enum { N = 4, K = 3, H = 19, R = N * K };
    static const int row_of_slot[N * K] = {8, 0, 3, -1, -1, -1, 5, -1, 1, 4, 7, 2}; // nobody has rows 6, 9, 10, 11
    real *x = put_real(normals(N * H, 1, &seed), N * H), *wanted = poisoned_real(R * H);
    for (int slot = 0; slot < N * K; slot++)
        if (row_of_slot[slot] >= 0)
            device_copy_in(wanted + row_of_slot[slot] * H, get_bytes(x + slot / K * H, H * sizeof(real)),
                           H * sizeof(real));
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        real *rows = poisoned_real(R * H);
        moe_scatter(rows, x, put_int(row_of_slot, N * K), N, K, H);
        assert_same_bits("rows", rows, wanted, R * H * sizeof(real));
    }
}

// Slots in order, then shared, then residual: bit by bit what this loop gives.
static void test_combine_adds_slots_then_shared_then_residual(void **state) {
    (void)state;
    uint64_t seed = 453;
    enum { N = 33, K = 6, E = 8, H = 37 };
    int ids[N * K];
    for (int i = 0; i < N * K; i++) ids[i] = random_below(E + 1, &seed) - 1;
    for (int k = 0; k < K; k++) ids[7 * K + k] = -1; // a token of no expert
    struct placement p = place(ids, N, K, E);
    const int *row_of_slot = get_int(p.row_of_slot, N * K);
    real *rows = put_real(normals(N * K * H, 1, &seed), N * K * H), *shared = put_real(normals(N * H, 1, &seed), N * H);
    real *residual = put_real(normals(N * H, 1, &seed), N * H);
    const real *hrows = get_bytes(rows, N * K * H * sizeof(real)), *hshared = get_bytes(shared, N * H * sizeof(real));
    const real *hresidual = get_bytes(residual, N * H * sizeof(real));
    for (int which = 0; which < 4; which++) {
        real wanted[N * H];
        for (int t = 0; t < N; t++)
            for (int h = 0; h < H; h++) {
                real sum = 0;
                for (int k = 0; k < K; k++)
                    if (row_of_slot[t * K + k] >= 0) sum += hrows[row_of_slot[t * K + k] * H + h];
                if (which & 1) sum += hshared[t * H + h];
                if (which & 2) sum += hresidual[t * H + h];
                wanted[t * H + h] = sum;
            }
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            real *y = poisoned_real(N * H);
            moe_combine(y, rows, p.row_of_slot, which & 1 ? shared : NULL, which & 2 ? residual : NULL, N, K, H);
            assert_memory_equal(get_bytes(y, sizeof wanted), wanted, sizeof wanted);
        }
    }
}

// The sum over slots is the same code: equal bits for rows that lie in the order of slots. Those of id -1 are poisoned.
static void test_the_sum_over_slots_has_the_bits_of_combine(void **state) {
    (void)state;
    uint64_t seed = 455;
    enum { N = 9, K = 3, E = 4, H = 70 };
    int ids[N * K];
    for (int i = 0; i < N * K; i++) ids[i] = i == 4 || i / K == 6 ? -1 : random_below(E, &seed);
    struct placement p = place(ids, N, K, E);
    const int *row_of_slot = get_int(p.row_of_slot, N * K);
    real *slots = put_real(normals(N * K * H, 1, &seed), N * K * H), *rows = poisoned_real(N * K * H);
    real *shared = put_real(normals(N * H, 1, &seed), N * H), *residual = put_real(normals(N * H, 1, &seed), N * H);
    const real *poison = get_bytes(poisoned_real(H), H * sizeof(real));
    for (int s = 0; s < N * K; s++) {
        int row = row_of_slot[s];
        if (row < 0)
            device_copy_in(slots + s * H, poison, H * sizeof(real));
        else
            device_copy_in(rows + row * H, get_bytes(slots + s * H, H * sizeof(real)), H * sizeof(real));
    }
    for (int which = 0; which < 4; which++) {
        real *y = poisoned_real(N * H), *combined = poisoned_real(N * H);
        const real *s = which & 1 ? shared : NULL, *r = which & 2 ? residual : NULL;
        moe_combine(combined, rows, p.row_of_slot, s, r, N, K, H);
        moe_sum_slots(y, slots, put_int(ids, N * K), s, r, N, K, H);
        assert_finite("y", get_real(y, N * H), N * H);
        assert_same_bits("y", y, combined, N * H * sizeof(real));
    }
}

// Dispatch and combine are transposes of each other: <combine(rows), y> = <rows, scatter(y)>.
static void test_scatter_is_the_transpose_of_combine(void **state) {
    (void)state;
    uint64_t seed = 454;
    enum { N = 21, K = 4, E = 8, H = 13, R = N * K };
    int ids[R];
    for (int i = 0; i < R; i++) ids[i] = random_below(E + 1, &seed) - 1;
    struct placement p = place(ids, N, K, E);
    double *rows = normals(R * H, 1, &seed), *y = normals(N * H, 1, &seed);
    real *combined = poisoned_real(N * H), *scattered = put_real(host_doubles(R * H), R * H);
    moe_combine(combined, put_real(rows, R * H), p.row_of_slot, NULL, NULL, N, K, H);
    moe_scatter(scattered, put_real(y, N * H), p.row_of_slot, N, K, H);
    double a = dot(get_real(combined, N * H), y, N * H), b = dot(rows, get_real(scattered, R * H), R * H);
    // Both are sums of R H products near 1: about sqrt(R H) large, with as many roundings in sequence.
    assert_true(fabs(a - b) <= roundings(sqrt(R * H)) * sqrt(R * H));
}

static void test_sizes_of_zero_do_nothing(void **state) {
    (void)state;
    uint64_t seed = 461;
    struct router_shape s = {4, 2, 1, 1, true, 1};
    real *x = put_real(normals(16, 1, &seed), 16), *y = poisoned_real(16);
    accum *a = poisoned_accum(16), *scores = put_accum(normals(16, 1, &seed), 16);
    int *ids = poisoned_int(16), *before = poisoned_int(16);
    int64_t *counts = put_counts((int64_t[4]){1, 2, 3, 4}, 4), *same = put_counts((int64_t[4]){1, 2, 3, 4}, 4);
    router_score(a, x, x, 0, 4, 4);
    router_score(a, x, x, 4, 0, 4);
    router_select(ids, a, scores, scores, NULL, 0, s);
    router_count(counts, ids, 0, 4);
    router_balance(a, a, scores, NULL, 0, 4, s);
    router_backward(y, a, a, scores, scores, ids, scores, 1, x, x, 0, 4, 4, s);
    router_update_bias(a, counts, 0, 1);
    moe_scatter(y, x, ids, 0, 2, 4);
    moe_gather(y, x, ids, 0, 4);
    moe_combine(y, x, ids, x, x, 0, 2, 4);
    moe_sum_slots(y, x, ids, x, x, 0, 2, 4);
    assert_poison("y", y, 16 * sizeof(real));
    assert_poison("a", a, 16 * sizeof(accum));
    assert_same_bits("ids", ids, before, 16 * sizeof(int));
    assert_same_bits("counts", counts, same, 4 * sizeof *counts);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        watched_test(test_scores_are_sigmoids_of_fp32_products),
        watched_test(test_scores_of_large_logits_stay_between_zero_and_one),
        watched_test(test_score_rows_have_the_same_bits_alone_and_with_any_threads),
        watched_test(test_selection_gives_the_hand_written_answers),
        watched_test(test_selection_and_gates_match_the_reference_on_random_scores),
        watched_test(test_gates_use_scores_and_never_the_bias),
        watched_test(test_gates_of_given_experts_are_those_of_the_selection),
        watched_test(test_gates_of_vanishing_scores_stay_finite),
        watched_test(test_counts_add_up_beyond_what_a_float_counts),
        watched_test(test_counts_of_many_ids_match_a_loop),
        watched_test(test_the_bias_moves_against_the_sign_of_the_excess),
        watched_test(test_the_bias_moves_for_differences_that_floats_lose),
        watched_test(test_balance_loss_of_a_balanced_sequence_is_exactly_one),
        watched_test(test_balance_loss_matches_the_paper_on_random_scores),
        watched_test(test_balance_counts_ties_once),
        watched_test(test_router_gradient_matches_central_differences),
        watched_test(test_score_gradient_is_orthogonal_to_the_scores),
        watched_test(test_router_gradient_has_the_same_bits_alone_and_with_any_threads),
        watched_test(test_place_orders_rows_by_expert_token_and_k),
        watched_test(test_place_matches_a_search_per_expert),
        watched_test(test_place_takes_experts_in_a_given_order),
        watched_test(test_regroup_brings_rows_from_the_order_of_sources_to_that_of_experts),
        watched_test(test_gather_of_gates_gives_zero_for_no_slot),
        watched_test(test_gather_copies_rows_and_zeros_for_no_index),
        watched_test(test_scatter_copies_every_token_to_the_rows_of_its_slots_and_writes_no_others),
        watched_test(test_combine_adds_slots_then_shared_then_residual),
        watched_test(test_the_sum_over_slots_has_the_bits_of_combine),
        watched_test(test_scatter_is_the_transpose_of_combine),
        watched_test(test_sizes_of_zero_do_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
