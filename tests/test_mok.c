// The megakernel's numbers: against FP64, and the same bits however the work is dealt out.
//
// All buffers are poisoned before the first pass, so rows that nobody wrote, the tail of a row block among them, would show
// as NaN (transformers issues 48205 and 45621, torchtitan issue 1237: rows of padding reached the results). Every gradient
// is compared on its own (Liger pull 1413: dx alone was wrong by half, all others right), as norms of differences, which a
// gradient that is off by a factor of the ranks does not pass (MegaBlocks issues 86 and 20, DeepSpeed issue 5259).
#include "tests/mok_ranks.h"

// Chains of at most some hundred FP32 multiply-adds: errors of some 1e-7 in the norm. A wrong row or term is off by 1e-3 and
// more. FP32 results are never bounded by an absolute tolerance, which small gradients would pass whatever they are.
static const double TOLERANCE = 2e-6;

static void assert_near(const struct result *r, const struct exact *e, const struct problem *p) {
    size_t N = (size_t)p->tokens, H = (size_t)p->H, w = (size_t)p->E * p->I * H, s = (size_t)p->S * H;
    test_assert_close("y", r->y, e->y, N * H, TOLERANCE);
    test_assert_close("dx", r->dx, e->dx, N * H, TOLERANCE);
    test_assert_close("d gates", r->d_gates, e->d_gates, N * p->K, TOLERANCE);
    for (size_t i = 0; i < (size_t)p->E; i++) {
        size_t half = (size_t)p->I * H;
        test_assert_close("d W gate", r->d_w13 + 2 * i * half, e->d_w13 + 2 * i * half, half, TOLERANCE);
        test_assert_close("d W up", r->d_w13 + (2 * i + 1) * half, e->d_w13 + (2 * i + 1) * half, half, TOLERANCE);
        test_assert_close("d W down", r->d_w2 + i * half, e->d_w2 + i * half, half, TOLERANCE);
    }
    (void)w;
    test_assert_close("d W shared gate", r->d_shared_w13, e->d_shared_w13, s, TOLERANCE);
    test_assert_close("d W shared up", r->d_shared_w13 + s, e->d_shared_w13 + s, s, TOLERANCE);
    test_assert_close("d W shared down", r->d_shared_w2, e->d_shared_w2, s, TOLERANCE);
}

static void assert_bits(const char *what, const void *a, const void *b, size_t bytes) {
    if (memcmp(a, b, bytes) != 0) fail_msg("%s: found other bits than before", what);
}

// The shared expert's weight gradients are sums over ranks, so they are compared only where the ranks are the same.
static void assert_same(const struct result *a, const struct result *b, const struct problem *p, bool same_ranks) {
    size_t N = (size_t)p->tokens, H = (size_t)p->H, w = (size_t)p->E * p->I * H, s = (size_t)p->S * H;
    assert_bits("y", a->y, b->y, sizeof(real) * N * H);
    assert_bits("dx", a->dx, b->dx, sizeof(real) * N * H);
    assert_bits("d gates", a->d_gates, b->d_gates, sizeof(accum) * N * p->K);
    assert_bits("d W13", a->d_w13, b->d_w13, sizeof(accum) * 2 * w);
    assert_bits("d W2", a->d_w2, b->d_w2, sizeof(accum) * w);
    if (!same_ranks) return;
    assert_bits("d shared W13", a->d_shared_w13, b->d_shared_w13, sizeof(accum) * 2 * s);
    assert_bits("d shared W2", a->d_shared_w2, b->d_shared_w2, sizeof(accum) * s);
}

// Deals the problem out and compares with the result `wanted` bit for bit; returns the macrobatches of the busiest rank.
static int assert_dealt_alike(const struct problem *p, struct dealing d, const struct result *wanted,
                              int wanted_ranks) {
    struct result r;
    deal_out(&r, p, &d);
    assert_same(&r, wanted, p, d.ranks == wanted_ranks && !d.tokens);
    int macrobatches = r.most_macrobatches;
    result_close(&r);
    return macrobatches;
}

// One rank against FP64, and then EP 2, 3, 4 and 6 (as far as there are experts) against one rank.
static void check_everywhere(const struct problem *p, bool first_use) {
    struct exact e;
    struct result one;
    exact_open(&e, p, first_use);
    deal_out(&one, p, &(struct dealing){.ranks = 1, .first_use = first_use});
    assert_near(&one, &e, p);
    static const int sizes[] = {2, 3, 4, 6};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] <= p->E)
            assert_dealt_alike(p, (struct dealing){.ranks = sizes[i], .first_use = first_use}, &one, 1);
    result_close(&one);
    exact_close(&e);
}

// ---- counts and sizes ----

static void random_routes_match_fp64_on_any_number_of_ranks(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 300, 12, 3, 40, 24, 16, 1);
    check_everywhere(&p, true);
    check_everywhere(&p, false);
    problem_close(&p);
}

// Wider than one tile everywhere, and no multiple of any tile.
static void sizes_beyond_one_tile(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 150, 4, 2, 300, 290, 140, 2);
    check_everywhere(&p, true);
    problem_close(&p);
}

// Expert counts that do not divide by the ranks, and 257 tokens (Mixture-of-Kittens refuses EP 2, 3 and 6 and tokens that
// are no multiple of 256; torchtitan: EP must divide E).
static void experts_that_do_not_divide(void **state) {
    (void)state;
    static const int experts[] = {1, 5, 7, 13};
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        struct problem p;
        problem_open(&p, 90, experts[i], experts[i] < 3 ? 1 : 3, 16, 12, 8, 3 + i);
        check_everywhere(&p, true);
        problem_close(&p);
    }
    struct problem p;
    problem_open(&p, 257, 64, 6, 16, 12, 8, 7);
    check_everywhere(&p, true);
    problem_close(&p);
}

// counts[e] tokens choose expert e alone.
static void route_by_counts(struct problem *p, const int *counts) {
    int t = 0;
    for (int e = 0; e < p->E; e++)
        for (int i = 0; i < counts[e]; i++) p->ids[t++] = e;
    assert_int_equal(t, p->tokens);
}

// Around the edges of a row block (Marin 8339, 8793: wrong unless offsets are aligned), with empty experts between (Liger
// 1463: hangs; MSLK 158: NaN where an output was never written; TE 2765: wrong if a group is empty).
static void counts_around_a_row_block(void **state) {
    (void)state;
    static const int counts[][8] = {
        {1, 63, 65, 127, 129, 0, 0, 0}, {0, 5, 0, 0, 130, 0, 1, 0}, {128, 0, 64, 0, 0, 256, 0, 0}};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int tokens = 0;
        for (int e = 0; e < 8; e++) tokens += counts[i][e];
        struct problem p;
        problem_open(&p, tokens, 8, 1, 20, 12, 8, 10 + i);
        route_by_counts(&p, counts[i]);
        check_everywhere(&p, true);
        check_everywhere(&p, false);
        problem_close(&p);
    }
}

// Every token chooses the first K experts, so all rows are on rank 0 and the others' gradients are exactly zero. A rank that
// receives nothing hangs (Megatron-LM pull 3626, issue 1877) or skips the backward exchange (Automodel issues 3680 and 935).
static void all_routes_to_one_rank(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 400, 8, 2, 24, 16, 8, 20);
    for (int t = 0; t < p.tokens; t++)
        for (int k = 0; k < p.K; k++) p.ids[t * p.K + k] = k;
    check_everywhere(&p, true);
    struct result r;
    deal_out(&r, &p, &(struct dealing){.ranks = 4, .first_use = true});
    size_t first = (size_t)2 * 2 * p.I * p.H, end = (size_t)p.E * 2 * p.I * p.H;
    for (size_t i = first; i < end; i++)
        if (r.d_w13[i] != 0 || signbit(r.d_w13[i])) fail_msg("element %zu is %g, wanted +0", i, (double)r.d_w13[i]);
    result_close(&r);
    problem_close(&p);
}

// Early imbalance runs out of memory (DeepEP issue 99): every token's eight choices are on one rank, in a ring of one
// minibatch.
static void all_of_eight_choices_on_one_rank_of_a_small_ring(void **state) {
    (void)state;
    struct problem p;
    struct result one;
    problem_open(&p, 130, 16, 8, 24, 16, 8, 25);
    for (int i = 0; i < p.tokens * p.K; i++) p.ids[i] = (i + i / p.K) % p.K;
    check_everywhere(&p, true);
    deal_out(&one, &p, &(struct dealing){.ranks = 1, .first_use = true});
    struct dealing d = {.ranks = 2, .minibatch = 128, .ring = 128, .first_use = true};
    assert_int_equal(assert_dealt_alike(&p, d, &one, 1), 16); // eight experts of two row blocks each
    result_close(&one);
    problem_close(&p);
}

// A masked token (id -1) is placed nowhere (FlashInfer issue 2643: -1 used as an index): its output is the shared expert's and the residual, its gates' gradients are 0.
static void masked_tokens(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 200, 6, 2, 24, 16, 8, 30);
    for (int t = 0; t < p.tokens; t += 3) p.ids[t * p.K] = p.ids[t * p.K + 1] = -1;
    for (int t = 1; t < p.tokens; t += 7) p.ids[t * p.K + 1] = -1;
    check_everywhere(&p, true);
    for (int i = 0; i < p.tokens * p.K; i++) p.ids[i] = -1;
    check_everywhere(&p, true);
    problem_close(&p);
}

// Ranks with different numbers of tokens, and with none (Megatron-LM issue 4851: hang when one rank has no tokens), who still
// serve their experts.
static void ragged_and_empty_ranks(void **state) {
    (void)state;
    static const int tokens[][4] = {{0, 200, 0, 0}, {130, 1, 0, 69}, {0, 0, 0, 200}, {64, 64, 8, 64}};
    struct problem p;
    struct result one;
    problem_open(&p, 200, 6, 2, 24, 16, 8, 40);
    deal_out(&one, &p, &(struct dealing){.ranks = 1, .first_use = true});
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        assert_dealt_alike(&p, (struct dealing){.ranks = 4, .tokens = tokens[i], .first_use = true}, &one, 1);
    result_close(&one);
    problem_close(&p);
    problem_open(&p, 8, 4, 2, 24, 16, 8, 41);
    deal_out(&one, &p, &(struct dealing){.ranks = 1, .first_use = true});
    assert_dealt_alike(&p, (struct dealing){.ranks = 2, .tokens = (int[]){0, 8}, .first_use = true}, &one, 1);
    result_close(&one);
    problem_close(&p);
}

// No token anywhere (SGLang issue 38773): returns, with zero gradients at first use and the old ones otherwise.
static void no_tokens_at_all(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 0, 5, 2, 24, 16, 8, 50);
    check_everywhere(&p, true);
    check_everywhere(&p, false);
    problem_close(&p);
}

static void no_shared_expert(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 150, 6, 2, 24, 16, 0, 60);
    check_everywhere(&p, true);
    problem_close(&p);
}

// A gate of zero still gets its gradient: the dot product is taken before the gate multiplies.
static void a_gate_of_zero_has_a_gradient(void **state) {
    (void)state;
    struct problem p;
    problem_open(&p, 100, 4, 2, 24, 140, 8, 70);
    for (int i = 0; i < p.tokens * p.K; i += 3) p.gates[i] = 0;
    check_everywhere(&p, true);
    problem_close(&p);
}

// ---- the same bits ----

// One expert's rows span three macrobatches of a ring of one minibatch; rings that are exactly full; rings larger than all.
static void rings_and_minibatches_change_no_bit(void **state) {
    (void)state;
    struct problem p;
    struct result wanted;
    problem_open(&p, 400, 5, 2, 24, 16, 8, 80);
    for (int t = 0; t < p.tokens; t++) p.ids[t * p.K] = 2, p.ids[t * p.K + 1] = t % 3 ? 1 : 4; // expert 2 has 400 rows
    for (int first_use = 0; first_use < 2; first_use++) {
        deal_out(&wanted, &p, &(struct dealing){.ranks = 2, .first_use = first_use});
        assert_int_equal(wanted.most_macrobatches, 1);
        static const int minibatches[] = {128, 256, 384, 128, 256, 384, 128, 512};
        static const int rings[] = {128, 256, 384, 384, 512, 768, 1024, 4096};
        int most = 0;
        for (size_t i = 0; i < sizeof rings / sizeof *rings; i++)
            for (int lag = 0; lag < 5; lag += 2) {
                struct dealing d = {.ranks = 2,
                                    .minibatch = minibatches[i],
                                    .ring = rings[i],
                                    .lag = lag,
                                    .workers = 3,
                                    .first_use = first_use};
                int macrobatches = assert_dealt_alike(&p, d, &wanted, 2);
                if (macrobatches > most) most = macrobatches;
            }
        assert_true(most >= 5);
        result_close(&wanted);
    }
    problem_close(&p);
}

// Any number of workers and movers; one worker alone finishes a pass (MoK needs all its communication blocks resident).
static void workers_and_movers_change_no_bit(void **state) {
    (void)state;
    struct problem p;
    struct result wanted;
    problem_open(&p, 500, 8, 2, 24, 16, 8, 90);
    deal_out(&wanted, &p, &(struct dealing){.ranks = 2, .first_use = true});
    for (int workers = 1; workers <= 6; workers++)
        for (int movers = 0; movers < workers; movers++)
            for (int ring = 128; ring <= 2048; ring *= 4) {
                struct dealing d = {.ranks = 2,
                                    .workers = workers,
                                    .comm_workers = movers,
                                    .minibatch = 128,
                                    .ring = ring,
                                    .move_rows = 8 << (workers % 5),
                                    .lag = workers,
                                    .first_use = true};
                assert_dealt_alike(&p, d, &wanted, 2);
            }
    result_close(&wanted);
    problem_close(&p);
}

// Far more workers than cores: whoever waits must let the others run (FlashMoE issue 3: a grid that is larger than what can
// be resident at once never ends).
static void more_workers_than_cores(void **state) {
    (void)state;
    struct problem p;
    struct result wanted;
    problem_open(&p, 300, 8, 2, 24, 16, 8, 95);
    deal_out(&wanted, &p, &(struct dealing){.ranks = 1, .workers = 1, .first_use = true});
    for (int movers = 0; movers <= 60; movers += 30) {
        struct dealing d = {.ranks = 3, .workers = 64, .comm_workers = movers, .minibatch = 128, .ring = 128};
        d.first_use = true;
        assert_dealt_alike(&p, d, &wanted, 1);
    }
    result_close(&wanted);
    problem_close(&p);
}

// Before tasks, and before a rank writes its inputs and arrives at a barrier: whoever reads them must wait (DeepEP issue
// 589, Megatron-LM issue 5749: NaN or a hang where a dependency on a producer is missing).
static void random_delays_change_no_bit(void **state) {
    (void)state;
    struct problem p;
    struct result wanted;
    problem_open(&p, 300, 8, 2, 24, 16, 8, 100);
    deal_out(&wanted, &p, &(struct dealing){.ranks = 1, .first_use = true});
    for (uint64_t seed = 1; seed <= 10; seed++) {
        struct dealing d = {.ranks = 1 + (int)(seed % 4),
                            .workers = 4,
                            .comm_workers = seed % 3 == 0,
                            .minibatch = 128,
                            .ring = 256,
                            .lag = 2,
                            .first_use = true,
                            .delays = seed};
        assert_dealt_alike(&p, d, &wanted, 1);
    }
    result_close(&wanted);
    problem_close(&p);
}

// The same buffers pass after pass, as the layers of a model share them (FlashMoE issue 18: output varies from run to run).
static void ten_passes_in_the_same_buffers(void **state) {
    (void)state;
    struct problem p;
    struct result wanted;
    problem_open(&p, 200, 8, 2, 24, 16, 8, 110);
    deal_out(&wanted, &p, &(struct dealing){.ranks = 1, .first_use = true});
    struct dealing d = {.ranks = 3, .workers = 3, .minibatch = 128, .ring = 128, .first_use = true, .passes = 10};
    assert_dealt_alike(&p, d, &wanted, 1);
    result_close(&wanted);
    problem_close(&p);
}

// Rows of other ranks that a rank's plan has, padding left out.
static size_t rows_from_elsewhere(const struct mok_plan *plan) {
    size_t rows = 0;
    for (int i = 0; i < plan->blocks * MOK_BLOCK_ROWS; i++)
        rows += plan->rows[i].source >= 0 && plan->rows[i].source != plan->rank;
    return rows;
}

static void check_moved_bytes(int rank_count) {
    enum { WORKERS = 2, EVENTS = 1000 };
    struct problem p;
    struct result out;
    char *base[2];
    struct trace traces[2] = {0};
    problem_open(&p, 100, 4, 2, 24, 16, 8, 120);
    result_open(&out, &p);
    struct dealing d = {.ranks = rank_count, .workers = WORKERS, .first_use = true};
    int each = p.tokens / rank_count;
    struct place *ranks = ranks_open(&p, &d, each, base);
    for (int r = 0; r < rank_count; r++) {
        ranks[r].first_token = r * each, ranks[r].tokens = each, ranks[r].out = &out;
        traces[r] = (struct trace){
            .on = true, .tracks = calloc(1 + WORKERS, sizeof(struct trace_track)), .track_count = 1 + WORKERS};
        for (int i = 0; i <= WORKERS; i++)
            traces[r].tracks[i] =
                (struct trace_track){.events = calloc(EVENTS, sizeof(struct trace_event)), .capacity = EVENTS};
        ranks[r].crew.trace = &traces[r];
    }
    ranks_run(ranks, rank_count, run_rank);
    for (int r = 0; r < rank_count; r++) {
        size_t bytes = 0, rows = rows_from_elsewhere(&ranks[r].plan);
        for (int i = 0; i <= WORKERS; i++) {
            for (size_t e = 0; e < traces[r].tracks[i].count; e++) bytes += (size_t)traces[r].tracks[i].events[e].bytes;
            assert_int_equal(traces[r].tracks[i].dropped, 0);
            free(traces[r].tracks[i].events);
        }
        assert_true((rows > 0) == (rank_count > 1));
        assert_int_equal(bytes, 4 * rows * (size_t)p.H * sizeof(real)); // x, y, dy and dx
        free(traces[r].tracks);
    }
    ranks_close(ranks, rank_count, base);
    result_close(&out);
    problem_close(&p);
}

static void trace_counts_the_bytes_of_other_ranks_alone(void **state) {
    (void)state;
    check_moved_bytes(1);
    check_moved_bytes(2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_routes_match_fp64_on_any_number_of_ranks),
        cmocka_unit_test(sizes_beyond_one_tile),
        cmocka_unit_test(experts_that_do_not_divide),
        cmocka_unit_test(counts_around_a_row_block),
        cmocka_unit_test(all_routes_to_one_rank),
        cmocka_unit_test(all_of_eight_choices_on_one_rank_of_a_small_ring),
        cmocka_unit_test(masked_tokens),
        cmocka_unit_test(ragged_and_empty_ranks),
        cmocka_unit_test(no_tokens_at_all),
        cmocka_unit_test(no_shared_expert),
        cmocka_unit_test(a_gate_of_zero_has_a_gradient),
        cmocka_unit_test(rings_and_minibatches_change_no_bit),
        cmocka_unit_test(workers_and_movers_change_no_bit),
        cmocka_unit_test(more_workers_than_cores),
        cmocka_unit_test(random_delays_change_no_bit),
        cmocka_unit_test(ten_passes_in_the_same_buffers),
        cmocka_unit_test(trace_counts_the_bytes_of_other_ranks_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
