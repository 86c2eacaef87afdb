// The megakernel's plan without any multiplication: where rows lie, and which tasks there are in which order.
#include "tests/mok_plans.h"

#include <omp.h>

// ---- routes ----

enum routing { ROUTE_AT_RANDOM, ROUTE_TO_ONE_EXPERT, ROUTE_TO_ONE_RANK, ROUTE_BY_COUNTS, ROUTINGS };

// Chooses `wanted` different ones of the experts first .. first + count - 1 for a token's choices, at random places; the
// other choices are -1.
static void choose(int32_t *ids, int K, int first, int count, int wanted, uint64_t *seed) {
    int experts[64];
    for (int i = 0; i < count; i++) experts[i] = first + i;
    for (int k = 0; k < K; k++) ids[k] = -1;
    for (int i = 0; i < wanted; i++) {
        int other = i + (int)random_below(seed, (uint64_t)(count - i)), expert = experts[other];
        experts[other] = experts[i];
        int k = (int)random_below(seed, (uint64_t)K);
        while (ids[k] >= 0) k = (k + 1) % K;
        ids[k] = expert;
    }
}

// Tokens 0 .. 300 of each rank, ragged and sometimes none, routed in one of the ways.
static void route(struct plans *w, enum routing routing, uint64_t *seed) {
    const struct mok_shape *s = &w->s;
    static const int counts[] = {1, 63, 65, 127, 129};
    if (routing == ROUTE_BY_COUNTS) {
        int each_count[13];
        for (int e = 0; e < s->experts; e++) each_count[e] = counts[random_below(seed, 5)];
        plans_route_counts(w, each_count, 1 + (int)random_below(seed, 9));
        return;
    }
    int only = (int)random_below(seed, (uint64_t)s->experts), rank = (int)random_below(seed, (uint64_t)s->ranks);
    int first = 0, count = s->experts;
    if (routing == ROUTE_TO_ONE_EXPERT) first = only, count = 1;
    if (routing == ROUTE_TO_ONE_RANK) first = mok_first_expert(s, rank), count = mok_local_experts(s, rank);
    bool masks = random_below(seed, 2);
    for (int r = 0; r < s->ranks; r++) {
        w->tokens[r] = random_below(seed, 4) ? (int)random_below(seed, (uint64_t)mok_min(300, s->max_tokens) + 1) : 0;
        for (int t = 0; t < w->tokens[r]; t++) {
            int wanted = mok_min(s->top_k, count);
            if (masks && !random_below(seed, 3)) wanted = (int)random_below(seed, (uint64_t)wanted + 1);
            choose(w->ids[r] + t * s->top_k, s->top_k, first, count, wanted, seed);
        }
    }
}

// ---- rows ----

// A segment holds, in the order of (rank, slot), exactly the routes to its expert: `seen` [ranks][slots] counts them.
static void check_segment(const struct plans *w, const struct mok_plan *p, int e, int **seen) {
    const struct mok_shape *s = &w->s;
    int blocks = p->expert_block[e + 1] - p->expert_block[e], rows = p->expert_rows[e], last = -1, source = 0;
    const struct mok_row *row = p->rows + (size_t)p->expert_block[e] * MOK_BLOCK_ROWS;
    assert_int_equal(blocks, mok_ceil(rows, MOK_BLOCK_ROWS));
    for (int i = 0; i < rows; i++) {
        assert_in_range(row[i].source, 0, s->ranks - 1);
        for (; source < row[i].source; source++, last = -1)
            assert_int_equal(p->source_rows[e * s->ranks + source + 1], i); // rows before the source's are all here
        assert_int_equal(row[i].source, source);
        assert_true(row[i].slot > last && row[i].slot < w->tokens[source] * s->top_k);
        last = row[i].slot;
        assert_int_equal(w->ids[source][last], mok_first_expert(s, p->rank) + e);
        assert_true(row[i].gate == w->gates[source][last]);
        seen[source][last]++;
    }
    assert_int_equal(p->source_rows[e * s->ranks], 0);
    for (; source + 1 < s->ranks; source++) assert_int_equal(p->source_rows[e * s->ranks + source + 1], rows);
    for (int i = rows; i < blocks * MOK_BLOCK_ROWS; i++) assert_true(row[i].source == -1 && row[i].gate == 0);
    for (int b = 0; b < blocks; b++) {
        int block = p->expert_block[e] + b;
        assert_int_equal(p->block_expert[block], e);
        assert_int_equal(mok_block_rows(p, block), mok_min(MOK_BLOCK_ROWS, rows - b * MOK_BLOCK_ROWS));
    }
}

static bool has_row_of(const struct mok_plan *p, int block, int source) {
    for (int i = 0; i < MOK_BLOCK_ROWS; i++)
        if (p->rows[(size_t)block * MOK_BLOCK_ROWS + (size_t)i].source == source) return true;
    return false;
}

// Each piece that a minibatch has of a segment is walked from its first block with a row of the next rank to its end,
// then from its beginning.
static void check_walk(const struct mok_shape *s, const struct mok_plan *p) {
    int phase = mok_phase_blocks(s), next = (p->rank + 1) % s->ranks, end;
    for (int first = 0; first < p->blocks; first = end) {
        for (end = first + 1; end < p->blocks && p->block_expert[end] == p->block_expert[first] && end % phase;) end++;
        int start = first;
        while (start < end && !has_row_of(p, start, next)) start++;
        if (start == end) start = p->walk[first]; // nobody to begin with: any turn will do
        assert_true(start >= first && start < end);
        for (int at = first; at < end; at++)
            assert_int_equal(p->walk[at], first + (start - first + at - first) % (end - first));
    }
}

static void check_plan(const struct plans *w, int rank, int **seen) {
    const struct mok_shape *s = &w->s;
    const struct mok_plan *p = &w->plan[rank];
    assert_int_equal(p->rank, rank);
    assert_int_equal(p->tokens, w->tokens[rank]);
    assert_int_equal(p->experts, mok_local_experts(s, rank));
    assert_true(p->experts <= mok_most_experts(s));
    assert_int_equal(p->expert_block[0], 0);
    assert_int_equal(p->expert_block[p->experts], p->blocks);
    assert_true((size_t)p->blocks * MOK_BLOCK_ROWS <= mok_capacity_rows(s));
    for (int e = 0; e < p->experts; e++) check_segment(w, p, e, seen);
    check_walk(s, p);
}

// All plans: every route is in one row, what is not placed in none.
static void check_plans(const struct plans *w) {
    const struct mok_shape *s = &w->s;
    int *seen[PLANS_MOST_RANKS];
    size_t slots = (size_t)s->max_tokens * (size_t)s->top_k;
    for (int r = 0; r < s->ranks; r++)
        if (!(seen[r] = calloc(slots + 1, sizeof(int)))) abort();
    for (int r = 0; r < s->ranks; r++) check_plan(w, r, seen);
    for (int r = 0; r < s->ranks; r++) {
        for (int slot = 0; slot < w->tokens[r] * s->top_k; slot++)
            assert_int_equal(seen[r][slot], w->ids[r][slot] >= 0);
        free(seen[r]);
    }
}

// The same global batch on one rank has the same segments: experts one behind the other over the ranks, rows in the same
// order, named by global token.
static void check_same_on_one_rank(const struct plans *w) {
    struct plans one;
    struct mok_shape s = w->s;
    int first_token[PLANS_MOST_RANKS + 1] = {0}, K = s.top_k;
    for (int r = 0; r < s.ranks; r++) first_token[r + 1] = first_token[r] + w->tokens[r];
    s.ranks = 1;
    s.max_tokens = first_token[w->s.ranks];
    plans_open(&one, &s);
    one.tokens[0] = s.max_tokens;
    for (int r = 0; r < w->s.ranks; r++) {
        size_t slots = (size_t)w->tokens[r] * (size_t)K, at = (size_t)first_token[r] * (size_t)K;
        memcpy(one.ids[0] + at, w->ids[r], slots * sizeof(int32_t));
        memcpy(one.gates[0] + at, w->gates[r], slots * sizeof(accum));
    }
    plans_make(&one);
    const struct mok_plan *whole = &one.plan[0];
    for (int r = 0, expert = 0; r < w->s.ranks; r++)
        for (int e = 0; e < w->plan[r].experts; e++, expert++) {
            const struct mok_plan *p = &w->plan[r];
            const struct mok_row *row = p->rows + (size_t)p->expert_block[e] * MOK_BLOCK_ROWS;
            const struct mok_row *wanted = whole->rows + (size_t)whole->expert_block[expert] * MOK_BLOCK_ROWS;
            assert_int_equal(p->expert_rows[e], whole->expert_rows[expert]);
            for (int i = 0; i < p->expert_rows[e]; i++) {
                assert_int_equal(row[i].slot + first_token[row[i].source] * K, wanted[i].slot);
                assert_true(row[i].gate == wanted[i].gate);
            }
        }
    plans_close(&one);
}

static struct mok_shape shape_of_rows(int ranks, int experts, int K, int tokens, uint64_t *seed) {
    int minibatch = 1 + (int)random_below(seed, 4), ring = minibatch * (1 + (int)random_below(seed, 4));
    return (struct mok_shape){.ranks = ranks,
                              .experts = experts,
                              .top_k = K,
                              .hidden = 256,
                              .intermediate = 256,
                              .max_tokens = tokens,
                              .minibatch_rows = minibatch * MOK_BLOCK_ROWS,
                              .ring_rows = ring * MOK_BLOCK_ROWS,
                              .move_rows = 16};
}

static void check_rows(int ranks, int experts, int K, int tokens, enum routing routing, uint64_t *seed) {
    struct plans w;
    struct mok_shape s = shape_of_rows(ranks, experts, K, tokens, seed);
    plans_open(&w, &s);
    omp_set_num_threads(random_below(seed, 16) ? 1 : 3);
    route(&w, routing, seed);
    plans_make(&w);
    check_plans(&w);
    check_same_on_one_rank(&w);
    plans_close(&w);
}

static void test_every_route_is_one_row_in_the_same_order_on_any_number_of_ranks(void **state) {
    (void)state;
    static const int ranks[] = {1, 2, 3, 4, 6};
    uint64_t seed = 701;
    int rounds = getenv("MOK_LONG") ? 30 : 3;
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < 5; i++)
            for (int experts = ranks[i]; experts <= 13; experts++)
                for (int K = 1; K <= mok_min(4, experts); K++)
                    for (enum routing routing = 0; routing < ROUTINGS; routing++)
                        check_rows(ranks[i], experts, K, 13 * 129, routing, &seed);
}

static void test_plans_of_64_and_72_ranks(void **state) {
    (void)state;
    static const int experts[] = {64, 72, 100, 256};
    uint64_t seed = 702;
    omp_set_num_threads(1);
    for (int ranks = 64; ranks <= 72; ranks += 8)
        for (int i = 0; i < 4; i++) {
            if (experts[i] < ranks) continue;
            struct plans w;
            struct mok_shape s = shape_of_rows(ranks, experts[i], 8, 20, &seed);
            plans_open(&w, &s);
            for (int r = 0; r < ranks; r++) {
                w.tokens[r] = (int)random_below(&seed, 21);
                for (int t = 0; t < w.tokens[r]; t++) {
                    int first = (int)random_below(&seed, (uint64_t)mok_min(experts[i] - 63, 9)); // some get many
                    choose(w.ids[r] + t * 8, 8, first, 64, 8, &seed);
                }
            }
            plans_make(&w);
            check_plans(&w);
            check_same_on_one_rank(&w);
            plans_close(&w);
        }
}

// A layer whose tokens change between calls, with one plan's memory: none, few, as many as there may be, none again.
static void test_a_plan_follows_token_counts_that_change(void **state) {
    (void)state;
    static const int tokens[][2] = {{0, 0}, {1, 0}, {0, 300}, {300, 300}, {7, 2}, {0, 0}};
    uint64_t seed = 703;
    struct plans w;
    struct mok_shape s = shape_of_rows(2, 5, 2, 300, &seed);
    plans_open(&w, &s);
    for (int i = 0; i < 6; i++) {
        for (int r = 0; r < 2; r++) {
            w.tokens[r] = tokens[i][r];
            for (int t = 0; t < 300; t++) choose(w.ids[r] + t * 2, 2, 0, 5, 2, &seed);
        }
        plans_make(&w);
        check_plans(&w);
    }
    plans_close(&w);
}

// ---- capacity ----

// The counts [experts] of one rank that need the most row blocks when it gets `routes` routes, at most `most` per expert:
// one row each, then whole blocks, so that as many last blocks as possible hold one row; what is left goes anywhere.
// Returns the blocks; *at_will: whether `most` was no obstacle.
static int worst_counts(int *counts, int experts, int routes, int most, bool *at_will) {
    for (int e = 0; e < experts; e++) counts[e] = e < routes ? 1 : 0;
    *at_will = routes >= experts;
    routes -= mok_min(experts, routes);
    for (int e = 0; e < experts; e++)
        while (routes >= MOK_BLOCK_ROWS && counts[e] + MOK_BLOCK_ROWS <= most) {
            counts[e] += MOK_BLOCK_ROWS;
            routes -= MOK_BLOCK_ROWS;
        }
    *at_will = *at_will && routes < MOK_BLOCK_ROWS;
    int blocks = 0;
    for (int e = 0; e < experts; e++) {
        int more = mok_min(routes, most - counts[e]);
        counts[e] += more;
        routes -= more;
        blocks += mok_ceil(counts[e], MOK_BLOCK_ROWS);
    }
    assert_int_equal(routes, 0);
    return blocks;
}

// Routes counts [experts] routes to the last rank's experts, every token `each` different ones.
static void route_worst(struct plans *w, const int *counts, int experts, int each) {
    int T = w->s.max_tokens, all = w->s.ranks * T, at = 0, first = mok_first_expert(&w->s, w->s.ranks - 1);
    for (int e = 0; e < experts; e++)
        for (int i = 0; i < counts[e]; i++, at++) {
            int token = at % all; // an expert's routes are consecutive and no more than tokens: each token once
            w->ids[token / T][token % T * w->s.top_k + at / all] = first + e;
        }
    assert_int_equal(at, all * each);
    for (int r = 0; r < w->s.ranks; r++) w->tokens[r] = T;
}

// All tokens choose as many experts of the last rank, which has the most, as they can. Returns whether the table is full.
static bool check_capacity(const struct mok_shape *s) {
    struct plans w;
    bool at_will;
    int last = s->ranks - 1, counts[13], local = mok_local_experts(s, last), each = mok_min(s->top_k, local);
    int all = s->ranks * s->max_tokens, blocks = worst_counts(counts, local, all * each, all, &at_will);
    assert_int_equal(local, mok_most_experts(s));
    assert_true((size_t)blocks <= mok_capacity_blocks(s));
    if (at_will) assert_int_equal(blocks, mok_capacity_blocks(s));
    plans_open(&w, s);
    route_worst(&w, counts, local, each);
    plans_make_one(&w, last);
    assert_int_equal(w.plan[last].blocks, blocks);
    plans_close(&w);
    return at_will;
}

// A formula for the capacity that ignores the padding, or the choices per token, reads and writes beyond the table in the
// worst case (NCCL PR 2123).
static void test_the_worst_routing_fits_the_table_and_can_fill_it(void **state) {
    (void)state;
    static const int ranks[] = {1, 2, 3, 4, 6}, tokens[] = {1, 2, 43, 63, 64, 65, 127, 128, 129, 257};
    int full = 0;
    uint64_t seed = 704;
    omp_set_num_threads(1);
    for (int i = 0; i < 5; i++)
        for (int experts = ranks[i]; experts <= 13; experts++)
            for (int K = 1; K <= mok_min(4, experts); K++)
                for (int t = 0; t < 10; t++) {
                    struct mok_shape s = shape_of_rows(ranks[i], experts, K, tokens[t], &seed);
                    full += check_capacity(&s);
                }
    assert_true(full > 1000); // most of them
}

static void test_default_sizes(void **state) {
    (void)state;
    static const int experts[] = {8, 64, 100, 256}, ranks[] = {1, 6, 8, 64}, tokens[] = {0, 1, 100, 4096, 32768};
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < 5; t++)
            for (int intermediate = 100; intermediate < 3000; intermediate += 700) {
                int multipliers = 1 + 33 * t, minibatch = mok_default_minibatch(intermediate, multipliers);
                struct mok_shape s = {.ranks = ranks[i], .experts = experts[i], .top_k = 8, .hidden = 512};
                s.intermediate = intermediate;
                s.max_tokens = tokens[t];
                s.minibatch_rows = minibatch;
                assert_int_equal(minibatch % MOK_BLOCK_ROWS, 0);
                assert_true(minibatch / MOK_BLOCK_ROWS * mok_gate_up_tiles(&s) >= 4 * multipliers);
                int ring = mok_default_ring(&s);
                assert_true(ring >= minibatch && ring % minibatch == 0);
                size_t balanced = (size_t)tokens[t] * 8 + (size_t)MOK_BLOCK_ROWS * (size_t)mok_most_experts(&s);
                size_t capacity = mok_capacity_rows(&s);
                assert_true((size_t)ring >= (balanced < capacity ? balanced : capacity));
                assert_true((size_t)ring < capacity + (size_t)minibatch);
            }
}

// ---- tasks ----

// A list of tasks in the order of the design, written down one by one.
struct list {
    struct mok_task *tasks;
    int count, room;
};

static void add(struct list *l, enum mok_task_kind kind, int block, int tile, int expert) {
    if (l->count == l->room) {
        l->room = 2 * l->room + 64;
        l->tasks = realloc(l->tasks, (size_t)l->room * sizeof *l->tasks);
        if (!l->tasks) abort();
    }
    l->tasks[l->count++] = (struct mok_task){(int32_t)kind, block, tile, expert};
}

static void add_tiles(struct list *l, enum mok_task_kind kind, int block, int tiles, int expert) {
    for (int tile = 0; tile < tiles; tile++) add(l, kind, block, tile, expert);
}

// Tasks of places first .. end - 1 of the walk.
static void add_walked(struct list *l, const struct mok_plan *p, enum mok_task_kind kind, int first, int end,
                       int tiles) {
    for (int at = first; at < end; at++) add_tiles(l, kind, p->walk[at], tiles, p->block_expert[p->walk[at]]);
}

// Of d x, up to 16 blocks of one expert at a time, one column tile of all of them after the other.
static void add_columns(struct list *l, const struct mok_plan *p, int first, int end, int tiles) {
    for (int after; first < end; first = after) {
        int e = p->block_expert[p->walk[first]];
        for (after = first; after < mok_min(first + 16, end) && p->block_expert[p->walk[after]] == e;) after++;
        for (int tile = 0; tile < tiles; tile++)
            for (int at = first; at < after; at++) add(l, MOK_TASK_D_X, p->walk[at], tile, e);
    }
}

// The second stage of a phase.
static void add_second(struct list *l, const struct mok_shape *s, const struct mok_plan *p, bool forward, int first,
                       int end) {
    if (forward)
        add_walked(l, p, MOK_TASK_DOWN, first, end, mok_ceil(s->hidden, 256));
    else
        add_columns(l, p, first, end, mok_ceil(s->hidden, 256));
}

static void add_shared(struct list *l, const struct mok_shape *s, const struct mok_plan *p, bool forward) {
    if (s->shared == 0) return;
    int blocks = mok_ceil(p->tokens, 128), across = mok_ceil(s->hidden, 256);
    for (int b = 0; b < blocks; b++)
        add_tiles(l, forward ? MOK_TASK_SHARED_GATE_UP : MOK_TASK_SHARED_D_HIDDEN, b,
                  mok_ceil(s->shared, forward ? 128 : 256), -1);
    for (int b = 0; b < blocks; b++) add_tiles(l, forward ? MOK_TASK_SHARED_DOWN : MOK_TASK_SHARED_D_X, b, across, -1);
    if (forward) return;
    add_tiles(l, MOK_TASK_SHARED_D_W2, 0, mok_ceil(s->shared, 128) * across, -1);
    add_tiles(l, MOK_TASK_SHARED_D_W13, 0, mok_ceil(2 * s->shared, 128) * across, -1);
}

// Phase by phase, the second stage of a phase behind the first `lag` tasks of the next phase's first stage.
static void add_stages(struct list *l, const struct mok_shape *s, const struct mok_plan *p, bool forward, int m) {
    int phase = s->minibatch_rows / 128, begin = m * (s->ring_rows / 128);
    int stop = mok_min(begin + s->ring_rows / 128, p->blocks), before = -1;
    for (int first = begin; first < stop; first += phase) {
        struct list stage = {0};
        int end = mok_min(first + phase, stop), done = 0;
        if (forward || m > 0 || s->replay)
            add_walked(&stage, p, MOK_TASK_GATE_UP, first, end, mok_ceil(s->intermediate, 128));
        if (!forward) add_walked(&stage, p, MOK_TASK_D_HIDDEN, first, end, mok_ceil(s->intermediate, 256));
        for (; before >= 0 && done < mok_min(s->lag, stage.count); done++) {
            struct mok_task t = stage.tasks[done];
            add(l, (enum mok_task_kind)t.kind, t.block, t.tile, t.expert);
        }
        if (before >= 0) add_second(l, s, p, forward, before, first);
        for (; done < stage.count; done++) {
            struct mok_task t = stage.tasks[done];
            add(l, (enum mok_task_kind)t.kind, t.block, t.tile, t.expert);
        }
        before = first;
        free(stage.tasks);
    }
    if (before >= 0) add_second(l, s, p, forward, before, stop);
}

// Whether macrobatch m takes part in an expert's weight gradients: where it has rows; without rows where those of its next
// neighbour with rows begin, or in the last macrobatch.
static bool takes_part(const struct mok_shape *s, const struct mok_plan *p, int e, int m) {
    int ring = s->ring_rows / 128, first = p->expert_block[e], end = p->expert_block[e + 1];
    if (first == end) return m == (p->blocks == 0 ? 0 : mok_min(first, p->blocks - 1) / ring);
    return m >= first / ring && m <= (end - 1) / ring;
}

static struct list list_tasks(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass) {
    struct list l = {0};
    bool forward = pass == MOK_FORWARD;
    int ring = s->ring_rows / 128, macrobatches = p->blocks ? mok_ceil(p->blocks, ring) : 1;
    add_shared(&l, s, p, forward);
    for (int i = 0; i < macrobatches; i++) {
        int m = forward ? macrobatches - 1 - i : i, across = mok_ceil(s->hidden, 256);
        add_stages(&l, s, p, forward, m);
        for (int e = 0; e < p->experts && !forward; e++) {
            if (!takes_part(s, p, e, m)) continue;
            add_tiles(&l, MOK_TASK_D_W2, m, mok_ceil(s->intermediate, 128) * across, e);
            add_tiles(&l, MOK_TASK_D_W13, m, mok_ceil(2 * s->intermediate, 128) * across, e);
        }
    }
    return l;
}

static bool is_weights(struct mok_task t) { return t.kind == MOK_TASK_D_W2 || t.kind == MOK_TASK_D_W13; }

// What the order promises, whatever it is in detail: macrobatch after macrobatch, forward from the last to the first;
// weight gradients last; nothing of the next before all of this one.
static void check_macrobatches_stay_apart(const struct mok_shape *s, const struct list *l, enum mok_pass pass) {
    int now = -1;
    bool weights = false;
    for (int i = 0; i < l->count; i++) {
        struct mok_task t = l->tasks[i];
        if (t.expert < 0) {
            assert_int_equal(now, -1); // the shared expert comes first
            continue;
        }
        int m = is_weights(t) ? t.block : t.block / (s->ring_rows / 128);
        if (m != now) {
            if (now >= 0) assert_int_equal(m, pass == MOK_FORWARD ? now - 1 : now + 1);
            weights = false;
        }
        now = m;
        if (weights) assert_true(is_weights(t));
        weights = is_weights(t);
    }
}

static int compare_tasks(const void *a, const void *b) { return memcmp(a, b, sizeof(struct mok_task)); }

static void check_tasks(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass) {
    struct list wanted = list_tasks(s, p, pass), found = {0};
    assert_int_equal(mok_task_total(s, p, pass), wanted.count);
    for (int i = 0; i < wanted.count; i++) {
        struct mok_task t = mok_task_at(s, p, pass, i), w = wanted.tasks[i];
        if (memcmp(&t, &w, sizeof t) != 0)
            fail_msg("task %d of pass %d is kind %d block %d tile %d expert %d, wanted %d %d %d %d", i, pass, t.kind,
                     t.block, t.tile, t.expert, w.kind, w.block, w.tile, w.expert);
        add(&found, (enum mok_task_kind)t.kind, t.block, t.tile, t.expert);
    }
    check_macrobatches_stay_apart(s, &found, pass);
    if (found.count) qsort(found.tasks, (size_t)found.count, sizeof *found.tasks, compare_tasks);
    for (int i = 1; i < found.count; i++) assert_true(compare_tasks(found.tasks + i - 1, found.tasks + i) != 0);
    free(found.tasks);
    free(wanted.tasks);
}

// Either mover queue: the groups of all blocks once, in the order in which the tasks first need the blocks.
static void check_moves(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass) {
    int ring = s->ring_rows / 128, macrobatches = mok_ceil(p->blocks, ring), index = 0;
    for (int i = 0; i < macrobatches; i++) {
        int m = pass == MOK_FORWARD ? macrobatches - 1 - i : i;
        for (int at = m * ring; at < mok_min((m + 1) * ring, p->blocks); at++)
            for (int first = 0; first < MOK_BLOCK_ROWS; first += s->move_rows) {
                struct mok_move move = mok_move_at(s, p, pass, index++);
                assert_int_equal(move.block, p->walk[at]);
                assert_int_equal(move.first, first);
            }
    }
    assert_int_equal(index, mok_move_total(s, p));
}

// Which blocks and rows an expert has in each macrobatch, and in how many so far: counted block by block.
static void check_macrobatches(const struct mok_shape *s, const struct mok_plan *p) {
    int ring = s->ring_rows / 128;
    for (int e = 0; e < p->experts; e++)
        for (int m = -1, turns = 0; m < mok_macrobatches(s, p); m++) {
            int count = 0, first = 0, rows = 0;
            for (int b = m * ring; m >= 0 && b < mok_min((m + 1) * ring, p->blocks); b++) {
                if (p->block_expert[b] != e) continue;
                if (count++ == 0) first = b;
                rows += mok_block_rows(p, b);
            }
            turns += count > 0;
            assert_int_equal(mok_expert_turns(s, p, e, m), turns);
            if (m < 0) continue;
            struct mok_stretch found = mok_expert_stretch(s, p, e, m);
            assert_int_equal(found.end - found.first, count);
            assert_int_equal(mok_stretch_rows(p, e, found), rows);
            if (count) assert_int_equal(found.first, first);
        }
}

// Counts of an expert's rows that give so many blocks, the last of them with one row.
static int rows_of_blocks(int blocks) { return blocks ? (blocks - 1) * MOK_BLOCK_ROWS + 1 : 0; }

// A plan of two ranks with the blocks dealt to six experts of each at random, some of them empty.
static void open_random_blocks(struct plans *w, struct mok_shape *s, int blocks, uint64_t *seed) {
    int counts[12] = {0};
    for (int r = 0; r < 2; r++) {
        int used = 1 + (int)random_below(seed, 6), dealt[6] = {0};
        for (int b = 0; b < blocks; b++) dealt[random_below(seed, (uint64_t)used)]++;
        int turn = (int)random_below(seed, 6); // the empty ones lie anywhere
        for (int e = 0; e < 6; e++) counts[r * 6 + (e + turn) % 6] = rows_of_blocks(dealt[e]);
    }
    s->max_tokens = plans_most_tokens(counts, 12, 2, 7);
    plans_open(w, s);
    plans_route_counts(w, counts, 7);
    plans_make(w);
}

// Every tile of a weight gradient has a corner of its own. With 1024 terms or more 16 of them come one below the other, with
// fewer they come row by row.
static void test_tiles_of_weight_gradients_cover_them(void **state) {
    (void)state;
    static const int heights[] = {8, 128, 1408, 2048, 2049, 4096}, widths[] = {8, 256, 2048, 7168};
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 4; j++) {
            struct mok_shape s = {.hidden = widths[j]};
            int down = mok_ceil(heights[i], 128), across = mok_ceil(widths[j], 256);
            for (int terms = 1023; terms <= 1024; terms++) {
                int *seen = calloc(33 * 32, sizeof *seen);
                if (!seen) abort();
                for (int tile = 0; tile < down * across; tile++) {
                    struct mok_corner c = mok_d_weight_corner(&s, heights[i], terms, tile);
                    assert_true(c.row % 128 == 0 && c.row < heights[i]);
                    assert_true(c.column % 256 == 0 && c.column < widths[j]);
                    assert_int_equal(seen[c.row / 128 * 32 + c.column / 256]++, 0);
                    if (terms == 1024 && tile < mok_min(16, down)) assert_true(c.row == 128 * tile && c.column == 0);
                    if (terms == 1024 && tile == 16 && down >= 16 && across > 1)
                        assert_true(c.row == 0 && c.column == 256);
                    if (terms == 1023 && tile < across) assert_true(c.row == 0 && c.column == 256 * tile);
                }
                free(seen);
            }
        }
}

static void test_tasks_are_those_of_the_design_in_its_order(void **state) {
    (void)state;
    uint64_t seed = 705;
    int rounds = getenv("MOK_LONG") ? 20000 : 1500;
    omp_set_num_threads(1);
    for (int round = 0; round < rounds; round++) {
        struct plans w;
        struct mok_shape s = shape_of_rows(2, 12, 1, 0, &seed);
        s.lag = (int)random_below(&seed, 21);
        s.replay = random_below(&seed, 2);
        s.hidden = 1 + (int)random_below(&seed, 700);
        s.intermediate = 1 + (int)random_below(&seed, 600);
        s.shared = random_below(&seed, 2) ? 1 + (int)random_below(&seed, 600) : 0;
        s.move_rows = 1 << random_below(&seed, 8);
        int longer = round % 10 ? 1 : 12; // some minibatches have more blocks of an expert than take turns
        s.minibatch_rows *= longer;
        s.ring_rows *= longer;
        open_random_blocks(&w, &s, (int)random_below(&seed, 20 * (uint64_t)longer), &seed);
        for (int r = 0; r < 2; r++) {
            check_macrobatches(&s, &w.plan[r]);
            for (enum mok_pass pass = MOK_FORWARD; pass <= MOK_BACKWARD; pass++) {
                check_tasks(&s, &w.plan[r], pass);
                check_moves(&s, &w.plan[r], pass);
            }
        }
        plans_close(&w);
    }
}

// mok_interleave against its comment, on all small cases.
static void check_interleave(int blocks, int phase, int a, int b, int lag) {
    int index = 0, phases = mok_ceil(blocks, phase);
    for (int p = 0; p <= phases; p++) {
        int own = p < phases ? mok_min(phase, blocks - p * phase) : 0, ahead = p == 0 ? own * a : mok_min(lag, own * a);
        int before = p > 0 ? mok_min(phase, blocks - (p - 1) * phase) : 0;
        for (int at = 0; at < own * a + before * b; at++, index++) {
            bool second = at >= ahead && at < ahead + before * b;
            struct mok_place found = mok_interleave(index, blocks, phase, a, b, lag);
            assert_int_equal(found.second, second);
            assert_int_equal(found.phase_first, (second ? p - 1 : p) * phase);
            assert_int_equal(found.phase_blocks, second ? before : own);
            assert_int_equal(found.at, second ? at - ahead : at < ahead ? at : at - before * b);
        }
    }
    assert_int_equal(index, blocks * (a + b));
}

static void test_two_stages_are_interleaved_as_said(void **state) {
    (void)state;
    for (int blocks = 1; blocks <= 12; blocks++)
        for (int phase = 1; phase <= 5; phase++)
            for (int a = 1; a <= 4; a++)
                for (int b = 1; b <= 3; b++)
                    for (int lag = 0; lag <= 20; lag++) check_interleave(blocks, phase, a, b, lag);
}

// The tiles of the tasks cover every column of every product once: nothing at the edges is left out.
static void test_tiles_cover_all_columns(void **state) {
    (void)state;
    for (int n = 1; n < 1200; n++) {
        struct mok_shape s = {.hidden = n, .intermediate = n, .move_rows = 16};
        assert_true(mok_gate_up_tiles(&s) * 128 >= n && (mok_gate_up_tiles(&s) - 1) * 128 < n);
        assert_true(mok_d_hidden_tiles(&s) * 256 >= n && (mok_d_hidden_tiles(&s) - 1) * 256 < n);
        assert_true(mok_out_tiles(&s) * 256 >= n && (mok_out_tiles(&s) - 1) * 256 < n);
        assert_int_equal(mok_groups(&s), 8);
        assert_int_equal(mok_d_w2_tiles(&s, n), ((n + 127) / 128) * ((n + 255) / 256));
        assert_int_equal(mok_d_w13_tiles(&s, n), ((2 * n + 127) / 128) * ((n + 255) / 256));
    }
}

static void test_every_counter_has_its_own_place(void **state) {
    (void)state;
    uint64_t seed = 706;
    for (int round = 0; round < 200; round++) {
        struct mok_shape s = shape_of_rows(1 + (int)random_below(&seed, 6), 13, 1 + (int)random_below(&seed, 4),
                                           (int)random_below(&seed, 400), &seed);
        int blocks = (int)mok_capacity_blocks(&s), experts = mok_most_experts(&s),
            tokens = mok_ceil(s.max_tokens, MOK_BLOCK_ROWS);
        size_t total = mok_counter_total(&s);
        char *used = calloc(total, 1);
        if (!used) abort();
        for (enum mok_counter_kind kind = 0; kind <= MOK_SHARED_ALL; kind++) {
            int count = kind < MOK_BLOCK_COUNTERS      ? blocks
                        : kind <= MOK_EXPERT_D_WEIGHTS ? experts
                        : kind == MOK_SHARED_INNER     ? tokens
                                                       : 1;
            for (int i = 0; i < count; i++) {
                size_t at = mok_counter(&s, kind, i);
                assert_true(at < total);
                assert_int_equal(used[at]++, 0);
            }
        }
        free(used);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_route_is_one_row_in_the_same_order_on_any_number_of_ranks),
        cmocka_unit_test(test_plans_of_64_and_72_ranks),
        cmocka_unit_test(test_a_plan_follows_token_counts_that_change),
        cmocka_unit_test(test_the_worst_routing_fits_the_table_and_can_fill_it),
        cmocka_unit_test(test_default_sizes),
        cmocka_unit_test(test_tiles_of_weight_gradients_cover_them),
        cmocka_unit_test(test_tasks_are_those_of_the_design_in_its_order),
        cmocka_unit_test(test_two_stages_are_interleaved_as_said),
        cmocka_unit_test(test_tiles_cover_all_columns),
        cmocka_unit_test(test_every_counter_has_its_own_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
