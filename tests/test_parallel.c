// EP groups and replicas, on any number of ranks: mpirun -n N build/cpu/tests/test_parallel.
#include "tests/ranks.h"

#include "model/parallel.h"

static int me, n;

static int64_t sum_of_ranks(struct comm *c) {
    int64_t sum = me;
    comm_sum_int64(c, &sum, 1);
    return sum;
}

// Every rank's place, and who is together, by the sums of their numbers.
static void check_layout(const struct parallel *p, int ep) {
    int64_t group = 0, replicas = 0;
    assert_int_equal(p->rank, me);
    assert_int_equal(p->ranks, n);
    assert_int_equal(p->ep, ep);
    assert_int_equal(p->dp, n / ep);
    assert_int_equal(p->ep_rank, me % ep);
    assert_int_equal(p->dp_rank, me / ep);
    for (int r = 0; r < n; r++) {
        if (r / ep == me / ep) group += r;
        if (r % ep == me % ep) replicas += r;
    }
    assert_int_equal(comm_size(p->world), n);
    assert_int_equal(comm_size(p->group), ep);
    assert_int_equal(comm_rank(p->group), p->ep_rank);
    assert_int_equal(comm_size(p->replicas), p->dp);
    assert_int_equal(comm_rank(p->replicas), p->dp_rank);
    assert_int_equal(sum_of_ranks(p->group), group);
    assert_int_equal(sum_of_ranks(p->replicas), replicas);
}

static void groups_are_consecutive_ranks_and_replicas_have_the_same_place(void **state) {
    (void)state;
    for (int ep = 1; ep <= n; ep++) {
        struct parallel p;
        if (n % ep) continue;
        parallel_open(&p, ep, n + 1);
        check_layout(&p, ep);
        parallel_close(&p);
        assert_memory_equal(&p, &parallel_alone, sizeof p);
    }
}

// On one host: the largest divisor of the ranks that has an expert for everyone.
static void ep_is_chosen_by_ranks_and_experts(void **state) {
    (void)state;
    for (int experts = 0; experts <= n + 2; experts++) {
        struct parallel p;
        int wanted = 1;
        for (int ep = 2; ep <= n && ep <= experts; ep++)
            if (n % ep == 0) wanted = ep;
        parallel_open(&p, 0, experts);
        check_layout(&p, wanted);
        parallel_close(&p);
    }
}

// A model without experts has no group to speak of, and --ep 1 is right for it.
static void a_model_without_experts_has_groups_of_one(void **state) {
    (void)state;
    struct parallel p;
    parallel_open(&p, 1, 0);
    check_layout(&p, 1);
    assert_int_equal(parallel_experts(&p, 0).end, 0);
    parallel_close(&p);
}

static void experts_are_dealt_once_each(void **state) {
    (void)state;
    for (int ep = 1; ep <= 9; ep++)
        for (int experts = ep; experts <= 40; experts++) {
            assert_int_equal(parallel_first_expert(experts, ep, 0), 0);
            assert_int_equal(parallel_first_expert(experts, ep, ep), experts);
            for (int r = 0; r < ep; r++) {
                int count = parallel_first_expert(experts, ep, r + 1) - parallel_first_expert(experts, ep, r);
                assert_true(count == experts / ep || count == (experts + ep - 1) / ep);
            }
        }
}

static void pieces_cover_everything_and_are_equal_but_for_the_last_ones_rest(void **state) {
    (void)state;
    static const size_t sizes[] = {0, 1, 63, 64, 65, 1000, 64 * 7, ((size_t)1 << 40) + 5};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int pieces = 1; pieces <= 9; pieces++) {
            assert_true(parallel_piece(sizes[s], pieces, 0) == 0);
            assert_true(parallel_piece(sizes[s], pieces, pieces) == sizes[s]);
            for (int r = 0; r < pieces; r++) {
                size_t begin = parallel_piece(sizes[s], pieces, r), end = parallel_piece(sizes[s], pieces, r + 1);
                size_t first = parallel_piece(sizes[s], pieces, 1), rest = end - begin - first;
                assert_true(begin <= end && (begin % 64 == 0 || begin == sizes[s]));
                assert_true(r == pieces - 1 ? rest < 64 * (size_t)pieces : rest == 0);
            }
        }
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        RANKS_TEST(groups_are_consecutive_ranks_and_replicas_have_the_same_place),
        RANKS_TEST(ep_is_chosen_by_ranks_and_experts),
        RANKS_TEST(a_model_without_experts_has_groups_of_one),
        RANKS_TEST(experts_are_dealt_once_each),
        RANKS_TEST(pieces_cover_everything_and_are_equal_but_for_the_last_ones_rest),
    };
    ranks_start(argc, argv);
    me = comm_rank(comm_world());
    n = comm_size(comm_world());
    return ranks_stop(cmocka_run_group_tests(tests, NULL, NULL));
}
