// Who keeps what: every element of the model's state once, whatever the layout, and every rank knows it of all others.
#include "tests/configs.h"
#include "tests/test.h"

#include "model/sharding.h"

// As parallel_open makes it, without groups.
static struct parallel place_of(int rank, int ranks, int ep) {
    return (struct parallel){
        .rank = rank, .ranks = ranks, .ep = ep, .ep_rank = rank % ep, .dp = ranks / ep, .dp_rank = rank / ep};
}

// What one rank of a job has.
struct seat {
    struct parallel parallel;
    struct params params;
    struct sharding sharding;
};

static struct seat *take_seats(const struct config *c, int ranks, int ep) {
    struct seat *seats = malloc((size_t)ranks * sizeof *seats);
    for (int r = 0; r < ranks; r++) {
        seats[r].parallel = place_of(r, ranks, ep);
        params_build_share(&seats[r].params, c, parallel_experts(&seats[r].parallel, c->experts));
        sharding_build(&seats[r].sharding, &seats[r].params, &seats[r].parallel);
    }
    return seats;
}

static void leave_seats(struct seat *seats, int ranks) {
    for (int r = 0; r < ranks; r++) {
        sharding_free(&seats[r].sharding);
        params_free(&seats[r].params);
    }
    free(seats);
}

static struct config with_experts(int experts) {
    struct config c = uneven;
    c.experts = experts;
    if (!experts) c.dense_layers = config_blocks(&c); // a model without MoE blocks
    return c;
}

// Layouts with more ranks than experts, experts that no EP size divides, and one EP group after the other.
static const struct {
    int ranks, ep, experts;
} layouts[] = {{1, 1, 6},  {2, 1, 6}, {2, 2, 6}, {3, 3, 6}, {4, 2, 6},  {4, 4, 6},    {6, 2, 6},  {6, 3, 7},
               {6, 6, 6},  {5, 5, 8}, {7, 7, 8}, {8, 4, 5}, {12, 3, 4}, {72, 8, 9},   {72, 1, 2}, {72, 72, 72},
               {64, 1, 0}, {1, 1, 0}, {2, 1, 1}, {9, 3, 3}, {97, 1, 3}, {150, 50, 53}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

// Pieces of the flat arrays follow each other, begin at multiples of 64 elements and leave nothing out, in the state too.
static void shards_lie_one_behind_the_other(void **state) {
    (void)state;
    for (int l = 0; l < LAYOUTS; l++) {
        struct config c = with_experts(layouts[l].experts);
        int ranks = layouts[l].ranks, ep = layouts[l].ep;
        struct seat *seats = take_seats(&c, ranks, ep);
        for (int r = 0; r < ranks; r++) {
            const struct sharding *s = &seats[r].sharding;
            const struct params *p = &seats[r].params;
            assert_true(s->dense.begin == (r ? seats[r - 1].sharding.dense.end : 0));
            assert_true(s->dense.begin == s->dense_offsets[r] && s->dense.end == s->dense_offsets[r + 1]);
            assert_true(s->experts.begin == (r >= ep ? seats[r - ep].sharding.experts.end : p->dense_size));
            assert_true(s->experts.begin == s->expert_offsets[r / ep] &&
                        s->experts.end == s->expert_offsets[r / ep + 1]);
            if (r / ep == ranks / ep - 1) assert_int_equal(s->experts.end, p->size);
            assert_true(s->dense.begin % 64 == 0 && s->experts.begin % 64 == 0 && s->experts.state % 64 == 0);
            size_t dense = s->dense.end - s->dense.begin, experts = s->experts.end - s->experts.begin;
            assert_true(s->dense.state == 0 && s->experts.state == dense && s->size == dense + experts);
            // All have equally many; the last one also has the rest, less than 64 elements for each rank.
            size_t even = p->dense_size / 64 / (size_t)ranks * 64;
            assert_true(r < ranks - 1 ? dense == even : dense >= even && dense < even + 64 * (size_t)ranks);
        }
        assert_int_equal(seats[ranks - 1].sharding.dense.end, seats[0].params.dense_size);
        if (!layouts[l].experts) assert_int_equal(seats[0].params.size, seats[0].params.dense_size);
        leave_seats(seats, ranks);
    }
}

// counts [elements of tensor i]: how often a rank keeps each, and that no element of its state is used twice.
static void count_pieces(const struct seat *seat, int i, unsigned char *counts, unsigned char *used) {
    const struct param *t = &seat->params.list[i];
    struct piece piece = sharding_piece(&seat->sharding, t);
    const struct shard *shard = t->expert < 0 ? &seat->sharding.dense : &seat->sharding.experts;
    for (size_t k = 0; k < piece.count; k++) {
        assert_true(piece.first + k < param_size(t) && piece.state + k < seat->sharding.size);
        counts[piece.first + k]++;
        if (used[piece.state + k]++) fail_msg("%s: state %zu is used twice", t->name, piece.state + k);
        // The same element of the flat arrays, where the optimizer finds it.
        assert_int_equal(piece.state + k - shard->state, t->offset + piece.first + k - shard->begin);
    }
}

static void every_element_is_kept_once_over_all_ranks(void **state) {
    (void)state;
    for (int l = 0; l < LAYOUTS; l++) {
        struct config c = with_experts(layouts[l].experts);
        int ranks = layouts[l].ranks;
        struct seat *seats = take_seats(&c, ranks, layouts[l].ep);
        unsigned char **used = malloc((size_t)ranks * sizeof *used);
        for (int r = 0; r < ranks; r++) used[r] = calloc(seats[r].sharding.size + 1, 1);
        for (int i = 0; i < seats[0].params.count; i++) {
            const struct param *t = &seats[0].params.list[i];
            unsigned char *counts = calloc(param_size(t), 1);
            for (int r = 0; r < ranks; r++) count_pieces(&seats[r], i, counts, used[r]);
            for (size_t k = 0; k < param_size(t); k++)
                if (counts[k] != 1)
                    fail_msg("%d ranks, EP %d, %d experts: %s[%zu] is kept %d times, wanted once", ranks, layouts[l].ep,
                             layouts[l].experts, t->name, k, counts[k]);
            free(counts);
        }
        for (int r = 0; r < ranks; r++) free(used[r]);
        free(used);
        leave_seats(seats, ranks);
    }
}

// What one rank works out about all others is what they say themselves; an expert's holder in the first EP group too.
static void a_rank_knows_what_the_others_keep(void **state) {
    (void)state;
    for (int l = 0; l < LAYOUTS; l++) {
        struct config c = with_experts(layouts[l].experts);
        int ranks = layouts[l].ranks, ep = layouts[l].ep;
        struct seat *seats = take_seats(&c, ranks, ep);
        struct layout layout;
        const struct params *mine = &seats[ranks / 2].params; // whoever asks
        layout_build(&layout, &c, mine, &seats[ranks / 2].parallel);
        for (int i = 0; i < mine->count; i++) {
            for (int r = 0; r < ranks; r++) {
                struct piece a = layout_piece(&layout, mine, i, r);
                struct piece b = sharding_piece(&seats[r].sharding, &seats[r].params.list[i]);
                assert_true(a.first == b.first && a.count == b.count && a.state == b.state);
            }
            int holder = layout.holders[i];
            assert_true((holder < 0) == (mine->list[i].expert < 0) && holder < ep);
            for (int r = 0; r < ep; r++)
                assert_true((seats[r].params.list[i].offset != PARAM_ELSEWHERE) == (holder < 0 || holder == r));
        }
        layout_free(&layout);
        leave_seats(seats, ranks);
    }
}

// A model of so few elements that most ranks have nothing to keep.
static void ranks_without_anything_to_keep_have_empty_shards(void **state) {
    (void)state;
    struct params p = {.dense_size = 128, .size = 192}; // three units of 64
    size_t kept = 0;
    for (int r = 0; r < 10; r++) {
        struct parallel parallel = place_of(r, 10, 1);
        struct sharding s;
        sharding_build(&s, &p, &parallel);
        kept += s.size;
        assert_true(s.dense.begin <= s.dense.end && s.dense.end <= 128);
        assert_true(s.experts.begin >= 128 && s.experts.begin <= s.experts.end && s.experts.end <= 192);
        assert_true(s.size % 64 == 0);
        sharding_free(&s);
    }
    assert_int_equal(kept, 192);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_lie_one_behind_the_other),
        cmocka_unit_test(every_element_is_kept_once_over_all_ranks),
        cmocka_unit_test(a_rank_knows_what_the_others_keep),
        cmocka_unit_test(ranks_without_anything_to_keep_have_empty_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
