// The megakernel pass after pass in the same buffers, while routes, numbers of tokens and the pace of every rank change:
// what one pass leaves behind (epochs of barriers, counters, rows in the ring, slots) must mean nothing to the next. Reported
// of others: a hang after hundreds of calls (FlashInfer issue 3279), a count of calls that the ranks do not agree on, so that
// peers wait for ever.
//
// MOK_LONG=1 makes 4000 calls instead of 600.
#include "tests/mok_ranks.h"

#include <omp.h>
#include <unistd.h>

enum { RANKS = 3, KINDS = 7, MOST = 150 };

// One global batch that calls have in turn, and what one rank gives for it.
struct kind {
    struct problem p;
    struct result wanted;
    int tokens[RANKS];
};
static struct kind kinds[KINDS];

static void open_kind(struct kind *k, const int tokens[RANKS], uint64_t seed) {
    int all = 0;
    for (int r = 0; r < RANKS; r++) all += k->tokens[r] = tokens[r];
    problem_open(&k->p, all, 7, 2, 16, 12, 8, seed);
}

static void open_kinds(void) {
    static const int tokens[KINDS][RANKS] = {{40, 40, 40}, {0, 0, 0}, {MOST, 0, 1},    {0, 0, 8},
                                             {5, 64, 65},  {1, 1, 1}, {MOST, 20, MOST}};
    for (int i = 0; i < KINDS; i++) open_kind(&kinds[i], tokens[i], 500 + (uint64_t)i);
    struct problem *hot = &kinds[4].p, *masked = &kinds[6].p;
    for (int t = 0; t < hot->tokens; t++) hot->ids[2 * t] = 6, hot->ids[2 * t + 1] = 5; // both of the last rank
    for (int t = 0; t < masked->tokens; t += 2) masked->ids[2 * t] = masked->ids[2 * t + 1] = -1;
    for (int i = 0; i < KINDS; i++)
        deal_out(&kinds[i].wanted, &kinds[i].p, &(struct dealing){.ranks = 1, .first_use = true});
}

static void close_kinds(void) {
    for (int i = 0; i < KINDS; i++) {
        result_close(&kinds[i].wanted);
        problem_close(&kinds[i].p);
    }
}

// ---- one rank ----

static int calls;              // of every rank
static int wrong_calls[RANKS]; // with other bits than wanted

static struct kind *kind_of_call(int call) {
    uint64_t seed = (uint64_t)call * 7919 + 1;
    return &kinds[(int)(test_uniform(&seed) * KINDS)];
}

// Peers write to the slots again only after the barrier that this rank is not yet at.
static void poison_for_call(struct place *me) {
    size_t R = (size_t)me->shape.ring_rows, N = (size_t)me->shape.max_tokens, H = (size_t)me->p->H;
    memset(me->work.out, 0xff, sizeof(real) * R * H);
    memset(me->work.hidden, 0xff, sizeof(real) * R * (size_t)me->p->I);
    memset(me->layer.x_rows, 0xff, sizeof(real) * R * H);
    memset(me->work.shared_out, 0xff, sizeof(real) * N * H);
    memset(me->slots, 0xff, sizeof(real) * N * (size_t)me->p->K * H);
    memset(me->work.counters, 0xff, sizeof(int32_t) * mok_counter_total(&me->shape));
}

static bool has_wanted_bits(const struct place *me, const struct result *wanted) {
    size_t N = (size_t)me->tokens, first = (size_t)me->first_token, H = (size_t)me->p->H, K = (size_t)me->p->K;
    struct experts_here w = experts_of(me);
    const struct result *found = me->out;
    return memcmp(found->y + first * H, wanted->y + first * H, sizeof(real) * N * H) == 0 &&
           memcmp(found->dx + first * H, wanted->dx + first * H, sizeof(real) * N * H) == 0 &&
           memcmp(found->d_gates + first * K, wanted->d_gates + first * K, sizeof(accum) * N * K) == 0 &&
           memcmp(found->d_w13 + 2 * w.first, wanted->d_w13 + 2 * w.first, sizeof(accum) * 2 * w.size) == 0 &&
           memcmp(found->d_w2 + w.first, wanted->d_w2 + w.first, sizeof(accum) * w.size) == 0;
}

static void take_kind(struct place *me, const struct kind *k) {
    me->p = &k->p;
    me->tokens = k->tokens[me->group.rank];
    me->first_token = 0;
    for (int r = 0; r < me->group.rank; r++) me->first_token += k->tokens[r];
}

static void *run_calls(void *argument) {
    struct place *me = argument;
    struct result out;
    int wrong = 0;
    result_open(&out, &kinds[KINDS - 1].p); // room for the largest
    me->out = &out;
    for (int call = 0; call < calls; call++) {
        struct kind *k = kind_of_call(call);
        take_kind(me, k);
        poison_for_call(me);
        me->seed += RANKS;
        rank_pass(me);
        wrong += !has_wanted_bits(me, &k->wanted);
    }
    wrong_calls[me->group.rank] = wrong;
    result_close(&out);
    me->out = NULL;
    return NULL;
}

// ---- tests ----

static void many_calls_that_all_differ(void **state) {
    (void)state;
    static const struct dealing dealings[] = {
        {.ranks = RANKS, .workers = 2, .minibatch = 128, .ring = 128, .lag = 1, .first_use = true, .delays = 1},
        {.ranks = RANKS,
         .workers = 3,
         .comm_workers = 1,
         .minibatch = 128,
         .ring = 256,
         .first_use = true,
         .delays = 9}};
    calls = getenv("MOK_LONG") ? 2000 : 300;
    alarm(getenv("MOK_LONG") ? 500 : 120); // a hang ends
    for (int i = 0; i < 2; i++) {
        char *base[RANKS];
        struct place *ranks = ranks_open(&kinds[0].p, &dealings[i], MOST, base);
        ranks_run(ranks, RANKS, run_calls);
        for (int r = 0; r < RANKS; r++) {
            assert_int_equal(wrong_calls[r], 0);
            assert_true(ranks[r].group.epoch == 4 * (uint64_t)calls);
        }
        ranks_close(ranks, RANKS, base);
    }
    alarm(0);
}

// ---- two models at once ----

struct user {
    const struct dealing *d;
    int wrong;
};

static void *use_layer(void *argument) {
    struct user *user = argument;
    for (int i = 0; i < 12; i++) {
        const struct kind *k = &kinds[(i * 3 + user->d->ranks) % KINDS];
        struct result found;
        deal_out(&found, &k->p, user->d);
        size_t N = (size_t)k->p.tokens * (size_t)k->p.H, w = (size_t)k->p.E * (size_t)k->p.I * (size_t)k->p.H;
        user->wrong += memcmp(found.y, k->wanted.y, sizeof(real) * N) != 0 ||
                       memcmp(found.dx, k->wanted.dx, sizeof(real) * N) != 0 ||
                       memcmp(found.d_w13, k->wanted.d_w13, sizeof(accum) * 2 * w) != 0;
        result_close(&found);
    }
    return NULL;
}

// Two models whose ranks share a process run their passes at the same time: nothing is shared behind the scenes, as the
// buffers and epochs of one communicator are for two streams (NCCL issue 522, SGLang issue 31117: both hang).
static void two_models_of_a_process_at_the_same_time(void **state) {
    (void)state;
    static const struct dealing dealings[] = {
        {.ranks = 2, .minibatch = 128, .ring = 128, .first_use = true, .delays = 21},
        {.ranks = 3, .workers = 3, .minibatch = 128, .ring = 256, .first_use = true, .delays = 22}};
    struct user users[] = {{&dealings[0], 0}, {&dealings[1], 0}};
    pthread_t other;
    alarm(120);
    assert_int_equal(pthread_create(&other, NULL, use_layer, &users[1]), 0);
    use_layer(&users[0]);
    pthread_join(other, NULL);
    alarm(0);
    assert_int_equal(users[0].wrong, 0);
    assert_int_equal(users[1].wrong, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_calls_that_all_differ),
        cmocka_unit_test(two_models_of_a_process_at_the_same_time),
    };
    omp_set_num_threads(1);
    open_kinds();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_kinds();
    return failed;
}
