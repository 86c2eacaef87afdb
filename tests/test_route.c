// Forced routes: the same for every layout of ranks, and as unbalanced as their names say.
#include "tests/test.h"

#include "tests/configs.h"

#include "model/model.h"
#include "model/route.h"

enum { TOKENS = 4096, E = 64, K = 6, HOT = 8, ROUTES = TOKENS * K };

static const struct route_place start = {.seed = 7, .step = 3, .block = 2};

static struct route_place at(int64_t step, int block) { return (struct route_place){start.seed, step, block}; }

// Memory of one fill.
static int32_t *fill(enum moe_route route, struct route_place place, int64_t first, int n, int experts, int top_k) {
    int32_t *ids = malloc(sizeof *ids * (size_t)n * (size_t)top_k + 1);
    memset(ids, 0x7f, sizeof *ids * (size_t)n * (size_t)top_k);
    route_fill(ids, route, place, first, n, experts, top_k);
    return ids;
}

static void count(int *counts, const int32_t *ids, size_t n, int experts) {
    memset(counts, 0, sizeof *counts * (size_t)experts);
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= 0) counts[ids[i]]++;
}

static void counts_of(int counts[E], enum moe_route route, struct route_place place) {
    int32_t *ids = fill(route, place, 1000, TOKENS, E, K);
    count(counts, ids, ROUTES, E);
    free(ids);
}

static bool same(enum moe_route route, struct route_place a, struct route_place b) {
    int32_t *x = fill(route, a, 0, TOKENS, E, K), *y = fill(route, b, 0, TOKENS, E, K);
    bool equal = memcmp(x, y, sizeof *x * ROUTES) == 0;
    free(x);
    free(y);
    return equal;
}

// ---- what holds for all ----

static void check_tokens(enum moe_route route, int experts, int top_k, int64_t step) {
    enum { N = 300 };
    int32_t *ids = fill(route, at(step, 1), 5, N, experts, top_k);
    for (int t = 0; t < N; t++) {
        const int32_t *of_token = ids + t * top_k;
        for (int k = 0; k < top_k; k++) {
            if ((of_token[k] < 0) != (of_token[0] < 0) || of_token[k] < -1 || of_token[k] >= experts)
                fail_msg("route %d, E %d, K %d, token %d: found expert %d", route, experts, top_k, t, of_token[k]);
            for (int j = 0; j < k; j++)
                if (of_token[k] >= 0 && of_token[j] == of_token[k])
                    fail_msg("route %d, E %d, K %d, token %d: found expert %d twice", route, experts, top_k, t,
                             of_token[k]);
        }
        if (route != ROUTE_W4) assert_true(of_token[0] >= 0);
    }
    free(ids);
}

static void every_token_has_k_different_experts_or_none(void **state) {
    (void)state;
    static const int shapes[][2] = {{64, 6}, {8, 2}, {8, 8}, {7, 6}, {1, 1}, {2, 2}, {3, 1}, {13, 4}, {6, 4}};
    for (int route = ROUTE_BALANCED; route <= ROUTE_W7; route++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int64_t step = 6; step <= 8; step++) check_tokens(route, shapes[s][0], shapes[s][1], step);
}

// Cut anywhere, as ranks and micro-batches do, the batch has the same routes.
static void a_token_has_the_same_experts_in_every_layout(void **state) {
    (void)state;
    for (int route = ROUTE_BALANCED; route <= ROUTE_W7; route++) {
        int32_t *all = fill(route, start, 100, TOKENS, E, K);
        for (int first = 0, n = 1; first + n <= TOKENS; first += n, n = n * 3 + 1) {
            int32_t *part = fill(route, start, 100 + first, n, E, K);
            assert_memory_equal(part, all + first * K, sizeof *part * (size_t)n * K);
            free(part);
        }
        free(all);
    }
}

static void routes_change_with_seed_step_and_block(void **state) {
    (void)state;
    for (int route = ROUTE_BALANCED; route <= ROUTE_W7; route++) {
        assert_true(same(route, start, start));
        assert_false(same(route, start, at(4, 2)));
        assert_false(same(route, start, at(3, 1)));
        assert_false(same(route, start, (struct route_place){8, 3, 2}));
    }
}

// ---- loads ----

static void balanced_loads_differ_by_one_at_most_over_any_stretch(void **state) {
    (void)state;
    static const int shapes[][2] = {{64, 6}, {13, 4}, {8, 8}, {5, 1}};
    for (int s = 0; s < 4; s++)
        for (int n = 1; n < 400; n += 37) {
            int counts[64], least = TOKENS * 8, most = 0, experts = shapes[s][0];
            int32_t *ids = fill(ROUTE_BALANCED, start, 1000003 * (int64_t)n, n, experts, shapes[s][1]);
            count(counts, ids, (size_t)n * (size_t)shapes[s][1], experts);
            for (int e = 0; e < experts; e++) {
                least = counts[e] < least ? counts[e] : least;
                most = counts[e] > most ? counts[e] : most;
            }
            assert_true(most - least <= 1);
            free(ids);
        }
}

// The experts of the hot set and their share of the routes; returns the set as bits.
static uint64_t hot_set(const int counts[E], double *share) {
    uint64_t set = 0;
    int sum = 0;
    for (int e = 0; e < E; e++) {
        // On average a hot expert has 0.75 / 8 of the routes, another one 0.25 / 56.
        if (counts[e] < ROUTES / 40) continue;
        set |= (uint64_t)1 << e;
        sum += counts[e];
    }
    *share = (double)sum / ROUTES;
    return set;
}

// A share of 0.75 of 24576 choices has a deviation of 0.0028; four of them.
static bool is_hot_share(double share) { return fabs(share - ROUTE_HOT_SHARE) < 0.0112; }

static uint64_t checked_hot_set(enum moe_route route, struct route_place place) {
    int counts[E];
    double share;
    counts_of(counts, route, place);
    uint64_t set = hot_set(counts, &share);
    assert_int_equal(__builtin_popcountll(set), HOT);
    if (!is_hot_share(share))
        fail_msg("route %d: %.4f of the routes are hot, wanted %.2f", route, share, ROUTE_HOT_SHARE);
    return set;
}

static void w1_has_scattered_hot_experts_that_stay(void **state) {
    (void)state;
    assert_int_equal(route_hot_experts(E, K), HOT);
    uint64_t set = checked_hot_set(ROUTE_W1, start);
    assert_true(set == checked_hot_set(ROUTE_W1, at(4, 2)));
    assert_true(set != checked_hot_set(ROUTE_W1, at(3, 1)));
    assert_true(set != checked_hot_set(ROUTE_W2, start));
}

// Memory of the rank that gets nearly everything runs out in others (DeepEP issue 99).
static void w2_heats_the_first_rank_and_w3_all_ranks_alike(void **state) {
    (void)state;
    assert_true(checked_hot_set(ROUTE_W2, start) == 0xff);
    assert_true(checked_hot_set(ROUTE_W3, start) == 0x0101010101010101);
    int counts[E];
    counts_of(counts, ROUTE_W3, start);
    for (int rank = 0; rank < 8; rank++) {
        int sum = 0;
        for (int e = 0; e < 8; e++) sum += counts[8 * rank + e];
        assert_true(abs(sum - ROUTES / 8) < ROUTES / 8 / 10); // 3072, deviation at most 52: six of them
    }
    assert_int_equal(route_hot_experts(8, 6), 6); // enough for a token
    assert_int_equal(route_hot_experts(4, 4), 4);
}

static void w4_leaves_stretches_of_tokens_without_experts(void **state) {
    (void)state;
    int32_t *ids = fill(ROUTE_W4, start, 0, TOKENS, E, K);
    int none = 0, some = 0, whole = 0, sum = 0;
    for (int s = 0; s < TOKENS / ROUTE_STRETCH; s++) {
        int live = 0;
        for (int t = 0; t < ROUTE_STRETCH; t++) {
            bool is_live = ids[(s * ROUTE_STRETCH + t) * K] >= 0;
            assert_true(!is_live || live == t); // the first ones of a stretch
            live += is_live;
        }
        none += live == 0;
        whole += live == ROUTE_STRETCH;
        some += live > 0 && live < ROUTE_STRETCH;
        sum += live;
    }
    // Of 64 stretches: a quarter, with a deviation of 3.5, and nearly all others.
    assert_true(none > 4 && none < 28 && some > 32 && whole < 8);
    // A live token's experts are any: 3/8 of the tokens on average, deviation 0.04.
    assert_true(sum > TOKENS / 5 && sum < TOKENS * 11 / 20);
    int counts[E];
    count(counts, ids, ROUTES, E);
    for (int e = 0; e < E; e++) assert_true(abs(counts[e] - sum * K / E) < 6 * sqrt(sum * K / E));
    free(ids);
}

static void w5_leaves_experts_and_half_of_the_ranks_without_load(void **state) {
    (void)state;
    int counts[E];
    counts_of(counts, ROUTE_W5, start);
    for (int e = 0; e < E; e++) {
        if (e >= E / 2 || e % 4 == 1)
            assert_int_equal(counts[e], 0);
        else
            assert_true(abs(counts[e] - ROUTES / 24) < 6 * sqrt(ROUTES / 24)); // alike
    }
}

static void w6_moves_its_hot_experts_every_step(void **state) {
    (void)state;
    for (int step = 0; step < 20; step++)
        assert_true(checked_hot_set(ROUTE_W6, at(step, 2)) == (uint64_t)0xff << step % 8 * 8);
}

static void w7_is_balanced_until_a_step_bursts(void **state) {
    (void)state;
    for (int step = 0; step < 3 * ROUTE_BURST; step++) {
        if (step % ROUTE_BURST == ROUTE_BURST - 1) {
            assert_true(checked_hot_set(ROUTE_W7, at(step, 2)) == 0xff);
        } else {
            int counts[E];
            counts_of(counts, ROUTE_W7, at(step, 2));
            for (int e = 0; e < E; e++) assert_int_equal(counts[e], ROUTES / E);
        }
    }
}

// ---- in the model ----

static void check_ids(const struct model *m, struct batch batch) {
    int top_k = m->config.top_k;
    size_t n = (size_t)batch.B * (size_t)batch.T * (size_t)top_k;
    int32_t *found = malloc(sizeof *found * n);
    for (int block = m->config.dense_layers; block < config_blocks(&m->config); block++) {
        int32_t *wanted = fill(m->moe.route, (struct route_place){m->seed, m->step, block}, batch.first * batch.T,
                               batch.B * batch.T, m->config.experts, top_k);
        for (int b = 0; b < batch.B; b++)
            for (int t = 0; t < batch.T; t++) {
                int depth = block < m->config.layers ? 0 : block - m->config.layers + 1;
                if (batch.tokens[b * (batch.T + 1 + m->config.mtp_depth) + t + depth] >= 0) continue;
                for (int k = 0; k < top_k; k++) wanted[(b * batch.T + t) * top_k + k] = -1;
            }
        device_copy_out(found, m->acts.blocks[block].ids, sizeof *found * n);
        assert_memory_equal(found, wanted, sizeof *found * n);
        free(wanted);
    }
    free(found);
}

// The router's weights still give the gates; masked tokens go nowhere; two micro-batches are parts of one batch.
static void the_model_takes_forced_routes_for_the_place_of_its_tokens(void **state) {
    (void)state;
    enum { B = 2, T = 12, COLUMNS = T + 2 };
    struct moe_settings settings = {.kind = MOE_ALLTOALL, .route = ROUTE_W2};
    struct model m;
    model_open(&m, &uneven, B, T, true, NULL, &settings);
    float *flat = calloc(m.params.size, sizeof *flat);
    init_weights(flat, &m.params, 0.1, 5);
    device_real_from_float(m.weights, flat, m.params.size);
    free(flat);
    m.seed = 11;
    m.step = 5;
    int32_t tokens[2 * B * COLUMNS];
    uint64_t seed = 3;
    for (int i = 0; i < 2 * B * COLUMNS; i++) tokens[i] = (int32_t)(test_uniform(&seed) * 257);
    for (int i = 5; i < 9; i++) tokens[i] = -1;
    for (int half = 0; half < 2; half++) {
        struct batch batch = {tokens + half * B * COLUMNS, B, T, 6 + half * B};
        struct step_totals totals = {0};
        model_add_totals(&totals, &uneven, batch);
        model_gradient(&m, batch, &totals);
        assert_true(isfinite(model_take_losses(&m).cross_entropy[0]));
        check_ids(&m, batch);
    }
    double router = 0;
    size_t n = (size_t)uneven.experts * (size_t)uneven.hidden;
    float *grads = malloc(sizeof *grads * n);
    device_accum_to_float(grads, m.grads + m.params.blocks[1].router, n);
    for (size_t i = 0; i < n; i++) router += fabs(grads[i]);
    assert_true(isfinite(router) && router > 0);
    free(grads);
    model_close(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_has_k_different_experts_or_none),
        cmocka_unit_test(a_token_has_the_same_experts_in_every_layout),
        cmocka_unit_test(routes_change_with_seed_step_and_block),
        cmocka_unit_test(balanced_loads_differ_by_one_at_most_over_any_stretch),
        cmocka_unit_test(w1_has_scattered_hot_experts_that_stay),
        cmocka_unit_test(w2_heats_the_first_rank_and_w3_all_ranks_alike),
        cmocka_unit_test(w4_leaves_stretches_of_tokens_without_experts),
        cmocka_unit_test(w5_leaves_experts_and_half_of_the_ranks_without_load),
        cmocka_unit_test(w6_moves_its_hot_experts_every_step),
        cmocka_unit_test(w7_is_balanced_until_a_step_bursts),
        cmocka_unit_test(the_model_takes_forced_routes_for_the_place_of_its_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
