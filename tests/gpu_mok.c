// The megakernel's passes in two builds: the CPU build records, the GPU build compares (tests/scene.h), and each by itself
// finds the same bits however the work is dealt out. One process plays all ranks (tests/gpu_mok_ranks.h).
//
//   build/cpu/tests/gpu_mok --record FILE
//   build/cuda/tests/gpu_mok --compare FILE
//   build/cuda/tests/gpu_mok --soak [CALLS]
//
// --small leaves the large layer out; --tiny, for sanitizers, does a few small ones.
#include "tests/gpu_mok_gradients.h"
#include "tests/gpu_mok_layers.h"
#include "tests/gpu_mok_separate.h"

#include "kernels/clock.h"
#include "kernels/comm.h"
#include "kernels/fail.h"

static const int ep_sizes[] = {1, 2, 3, 4, 6, 8};

// ---- dealing out ----

// Call number `call` of both passes, over poison.
static void run_passes(struct ranks *all, int l, const struct problem *p, const struct dealing *d, int call,
                       struct results *r) {
    if (call > 0) ranks_poison(all);
    ranks_forward(all, l, p, d, r);
    ranks_check(all, l, MOK_FORWARD);
    ranks_backward(all, l, p, d->add || call > 0, r);
    ranks_check(all, l, MOK_BACKWARD);
}

static void deal_to(struct ranks *all, const struct problem *p, const struct dealing *d, struct results *r) {
    ranks_open(all, p, d, most_tokens(p, d), 1);
    if (d->add) ranks_start_gradients(all, 0);
    for (int call = 0; call < (d->calls ? d->calls : 1); call++) run_passes(all, 0, p, d, call, r);
    check_results(p, r);
}

static int most_macrobatches(const struct ranks *all) {
    int most = 0;
    for (int r = 0; r < all->count; r++) {
        struct mok_plan plan;
        mok_plan_read(&plan, &all->list[r].layers[0].plan, &all->list[r].shape);
        int macrobatches = mok_macrobatches(&all->list[r].shape, &plan);
        if (macrobatches > most) most = macrobatches;
        free(plan.rows);
    }
    return most;
}

// Deals the problem out to new ranks, runs it and checks what must hold beside the results. Returns the macrobatches of
// the busiest rank.
static int deal_out(const struct problem *p, const struct dealing *d, struct results *r) {
    struct ranks all;
    deal_to(&all, p, d, r);
    int most = most_macrobatches(&all);
    if (!d->add && d->calls <= 1) check_gradients(&all.list[0], 0);
    ranks_close(&all);
    return most;
}

// The same bits as wanted?
static int deal_alike(const struct problem *p, struct dealing d, const struct results *wanted) {
    struct results r = results_open(p);
    int macrobatches = deal_out(p, &d, &r);
    same_results(dealing_text(&d), d.ranks, p, &r, wanted);
    results_close(&r);
    return macrobatches;
}

static struct results deal_to_one(const struct problem *p) {
    struct results r = results_open(p);
    deal_out(p, &(struct dealing){.ranks = 1}, &r);
    return r;
}

static bool is_ep_size(int ranks, int experts) { return ranks <= experts && ranks <= mok_most_ranks(); }

// ---- layers against the record, and on any number of ranks ----

// Elements of one array of the record; of a gradient of weights, of which there are many.
enum { MOST_KEPT = 1 << 19, MOST_GRADIENT = 1 << 18 };

// Rows first .. first + count - 1 of every `period` rows of a weight's gradient, or every so many of them.
static void weights_against_record(const char *output, const accum *dw, size_t experts, size_t period, size_t first,
                                   size_t count, size_t H) {
    size_t rows = experts * count, step = rows * H / MOST_GRADIENT + 1, n = 0;
    float *values = malloc(sizeof *values * ((rows / step + 1) * H + 1));
    if (!values) abort();
    for (size_t r = 0; r < rows; r += step)
        for (size_t h = 0; h < H; h++) values[n++] = (float)dw[(r / count * period + first + r % count) * H + h];
    scene_floats(output, values, n, H, limit_of(GRADIENT_OF_WEIGHT));
    free(values);
}

static void results_against_record(const struct problem *p, const struct results *r) {
    size_t N = (size_t)p->tokens, H = (size_t)p->H, K = (size_t)p->K, E = (size_t)p->E, I = (size_t)p->I,
           S = (size_t)p->S;
    against_record("y", r->y, N * H, H, FORWARD);
    against_record("dx", r->dx, N * H, H, GRADIENT);
    float *d_gates = malloc(sizeof *d_gates * (N * K + 1));
    for (size_t i = 0; i < N * K; i++) d_gates[i] = (float)r->d_gates[i];
    scene_floats("d gates", d_gates, N * K, N > 0 ? N * K : 1, limit_of(gradient_of_gates(N * K, p->H)));
    free(d_gates);
    weights_against_record("d w gate", r->d_w13, E, 2 * I, 0, I, H);
    weights_against_record("d w up", r->d_w13, E, 2 * I, I, I, H);
    weights_against_record("d w down", r->d_w2, E, I, 0, I, H);
    if (S == 0) return;
    weights_against_record("d shared w gate", r->d_shared_w13, 1, 2 * S, 0, S, H);
    weights_against_record("d shared w up", r->d_shared_w13, 1, 2 * S, S, S, H);
    weights_against_record("d shared w down", r->d_shared_w2, 1, S, 0, S, H);
}

// Every route's y or dx, and what stays on one rank: what lies between input and results.
static void rows_against_record(const struct place *me, const struct problem *p, enum mok_pass pass) {
    struct mok_plan plan;
    const struct own_layer *own = &me->layers[0];
    size_t slots = (size_t)p->tokens * (size_t)p->K, H = (size_t)p->H;
    mok_plan_read(&plan, &own->plan, &me->shape);
    if (slots * (size_t)(p->H + 2 * p->I) > MOST_KEPT) {
        free(plan.rows);
        return;
    }
    const real *rows = memory_of(&me->symmetric, me->slots);
    if (pass == MOK_FORWARD) {
        against_record("slots", rows, slots * H, H, FORWARD);
        ring_against_record("gate and up", me, &plan, pass, own->layer.gate_up, 2 * p->I, ROUNDED);
        ring_against_record("hidden", me, &plan, pass, me->work.hidden, p->I, FORWARD);
        if (p->S)
            against_record("shared gate and up", memory_of(&me->own, own->layer.shared_gate_up),
                           (size_t)p->tokens * 2 * (size_t)p->S, 2 * (size_t)p->S, ROUNDED);
    } else {
        against_record("d slots", rows, slots * H, H, GRADIENT);
        ring_against_record("d gate and up", me, &plan, pass, me->work.d_gate_up, 2 * p->I, GRADIENT);
        ring_against_record("hidden again", me, &plan, pass, me->work.hidden, p->I, FORWARD);
    }
    free(plan.rows);
}

static void plans_against_record(const struct ranks *all) {
    for (int r = 0; r < all->count; r++) {
        struct mok_plan plan;
        mok_plan_read(&plan, &all->list[r].layers[0].plan, &all->list[r].shape);
        plan_against_record(&all->list[r], &plan);
        free(plan.rows);
    }
}

// The layer on one rank against the record. Kept rows of a pass are looked at before the next one takes their memory.
static void one_rank(const struct problem *p, const struct dealing *d, struct results *r) {
    struct ranks all;
    ranks_open(&all, p, d, p->tokens, 1);
    ranks_forward(&all, 0, p, d, r);
    ranks_check(&all, 0, MOK_FORWARD);
    plans_against_record(&all);
    rows_against_record(&all.list[0], p, MOK_FORWARD);
    ranks_backward(&all, 0, p, false, r);
    ranks_check(&all, 0, MOK_BACKWARD);
    rows_against_record(&all.list[0], p, MOK_BACKWARD);
    check_gradients(&all.list[0], 0);
    check_results(p, r);
    results_against_record(p, r);
    ranks_close(&all);
}

// Recording needs only the plans.
static void more_ranks(const struct problem *p, const struct dealing *d, const struct results *wanted) {
    struct ranks all;
    if (scene.recording) {
        ranks_open(&all, p, d, most_tokens(p, d), 1);
        ranks_put(&all, 0, p, d);
        ranks_plan(&all, 0);
    } else {
        struct results r = results_open(p);
        deal_to(&all, p, d, &r);
        same_results(dealing_text(d), d->ranks, p, &r, wanted);
        results_close(&r);
    }
    plans_against_record(&all);
    ranks_close(&all);
}

// The same again where backward has nothing of forward's rows; and twice, added to what was there, as by separate
// operations.
static void again(const struct problem *p, struct dealing d, const struct results *wanted) {
    d.replay = true;
    deal_alike(p, d, wanted);
    struct results added = results_open(p);
    d.replay = false, d.add = true, d.calls = 2;
    deal_out(p, &d, &added);
    against_separate(p, d.add, d.calls, &added);
    results_close(&added);
}

static void case_layer(const struct layer_case *c) {
    if ((scene.small && c->large) || (scene.tiny && !c->tiny)) return;
    if (!scene_begin("layer", 0, "%s", c->name)) return;
    struct problem p;
    struct dealing d = {.ranks = 1, .minibatch = c->minibatch, .ring = c->ring};
    problem_open(&p, c->tokens, c->E, c->K, c->H, c->I, c->S, c->residual);
    layer_route(&p, c);
    struct results wanted = results_open(&p);
    one_rank(&p, &d, &wanted);
    if (!scene.recording) {
        against_separate(&p, false, 1, &wanted);
        again(&p, d, &wanted);
    }
    for (int i = 1; i < COUNT_OF(ep_sizes); i++) {
        d.ranks = ep_sizes[i];
        if (is_ep_size(d.ranks, p.E) && !(scene.tiny && d.ranks > 3)) more_ranks(&p, &d, &wanted);
    }
    results_close(&wanted);
    problem_close(&p);
}

// ---- the same bits however the work is dealt out ----

// These compare with nothing that was recorded.
static bool begin_bits(const char *operation, const char *name) {
    return !scene.recording && scene_begin(operation, 0, "%s", name);
}

// One expert's rows span three macrobatches and more; rings of one minibatch; rings that are exactly full.
static void case_rings(void) {
    if (!begin_bits("rings", "400 rows of one expert")) return;
    struct problem p;
    problem_open(&p, 400, 5, 2, 128, 128, 128, true);
    for (int t = 0; t < p.tokens; t++) p.ids[2 * t] = 2, p.ids[2 * t + 1] = t % 3 ? 1 : 4;
    struct results wanted = results_open(&p);
    scene_check(deal_out(&p, &(struct dealing){.ranks = 1, .ring = 4096}, &wanted) == 1);
    // Experts 1, 2 and 4 have 267, 400 and 133 rows: 3 + 4 + 2 row blocks on one rank, 1152 rows.
    static const int minibatches[] = {128, 256, 384, 128, 384, 1152, 256, 512};
    static const int rings[] = {128, 256, 384, 384, 1152, 1152, 1024, 4096};
    static const int lags[] = {-1, 1, 2, 0};
    for (int i = 0; i < COUNT_OF(rings); i++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            struct dealing d = {.ranks = ranks,
                                .minibatch = minibatches[i],
                                .ring = rings[i],
                                .lag = lags[(i + ranks) % 4],
                                .replay = (i + ranks) % 3 == 0};
            if (!is_ep_size(ranks, p.E)) continue;
            int macrobatches = deal_alike(&p, d, &wanted);
            if (ranks == 1) scene_check(macrobatches == mok_ceil(1152, rings[i]));
        }
    results_close(&wanted);
    problem_close(&p);
}

// One worker alone finishes a pass, whatever the ring.
static void case_grids(void) {
    if (!begin_bits("grids", "workers and movers")) return;
    struct problem p;
    problem_open(&p, 500, 8, 2, 256, 256, 128, true);
    struct results wanted = deal_to_one(&p);
    static const int workers[] = {1, 2, 7, 0}, comm_workers[] = {0, 1, 4}, rings[] = {128, 512, 0},
                     moves[] = {1, 2, 8, 32};
    for (int i = 0; i < COUNT_OF(workers); i++)
        for (int j = 0; j < COUNT_OF(comm_workers); j++)
            for (int k = 0; k < COUNT_OF(rings); k++) {
                int here = workers[i] ? workers[i] : mok_default_workers();
                struct dealing d = {.ranks = 1 + (i + k) % 2,
                                    .workers = workers[i],
                                    .comm_workers = comm_workers[j],
                                    .minibatch = k < 2 ? 128 : mok_min(mok_default_minibatch(p.I, here), 4096),
                                    .ring = rings[k],
                                    .move_rows = moves[(i + j + k) % 4],
                                    .replay = (i + j) % 3 == 1};
                if (comm_workers[j] < here && is_ep_size(d.ranks, p.E)) deal_alike(&p, d, &wanted);
            }
    results_close(&wanted);
    problem_close(&p);
}

static void case_moves(void) {
    if (!begin_bits("moves", "rows of a ticket")) return;
    struct problem p;
    problem_open(&p, 260, 8, 3, 200, 128, 64, false);
    struct results wanted = deal_to_one(&p);
    static const int moves[] = {1, 2, 8, 32};
    for (int i = 0; i < COUNT_OF(moves); i++)
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int comm = 0; comm < 2 && comm < mok_default_workers(); comm++) {
                struct dealing d = {.ranks = ranks, .comm_workers = comm, .move_rows = moves[i]};
                if (ranks % 2) d.minibatch = d.ring = 256;
                if (is_ep_size(ranks, p.E)) deal_alike(&p, d, &wanted);
            }
    results_close(&wanted);
    problem_close(&p);
}

static void case_delays(void) {
    if (!begin_bits("delays", "random pauses")) return;
    struct problem p;
    problem_open(&p, 300, 8, 2, 256, 128, 128, true);
    // Blocks of expert 2 lie in several macrobatches, and the last one's second half is padding.
    for (int t = 0; t < p.tokens; t++) p.ids[2 * t] = 2, p.ids[2 * t + 1] = t % 2 ? 3 + t % 5 : t % 4 / 2;
    struct results wanted = deal_to_one(&p);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct dealing d = {.ranks = 1 + (int)(seed % 4),
                            .comm_workers = seed % 3 == 0 && mok_default_workers() > 1,
                            .minibatch = 128,
                            .ring = 128 << seed % 3,
                            .delays = seed << 8,
                            .replay = seed % 5 == 0};
        if (is_ep_size(d.ranks, p.E)) deal_alike(&p, d, &wanted);
    }
    results_close(&wanted);
    problem_close(&p);
}

// Many tiles for all workers of a GPU: phases, the lag between them, dedicated movers, as the trainer has them.
static void case_large(void) {
    if (scene.small || !begin_bits("large", "many workers")) return;
    struct problem p;
    problem_open(&p, 2048, 8, 4, 1024, 768, 768, true);
    struct results wanted = deal_to_one(&p);
    int workers = mok_default_workers(), minibatch = mok_default_minibatch(p.I, workers);
    const struct dealing dealings[] = {
        {.ranks = 1, .minibatch = minibatch},
        {.ranks = 1, .minibatch = 512, .ring = 2048, .comm_workers = 1},
        {.ranks = 1, .minibatch = 1024, .ring = 4096, .lag = -1, .move_rows = 32},
        {.ranks = 1, .workers = 7, .minibatch = 1024},
        {.ranks = 2, .minibatch = minibatch, .comm_workers = 4},
        {.ranks = 2, .minibatch = 1024, .ring = 2048, .delays = 77, .replay = true},
        {.ranks = 3, .minibatch = 768, .comm_workers = 16, .move_rows = 1, .delays = 78},
        {.ranks = 4, .minibatch = 512, .ring = 1024, .move_rows = 32},
        {.ranks = 6, .minibatch = minibatch, .delays = 79},
        {.ranks = 8, .minibatch = 1024, .ring = 1024, .comm_workers = 8, .delays = 80},
    };
    for (int i = 0; i < COUNT_OF(dealings); i++)
        if (is_ep_size(dealings[i].ranks, p.E) && dealings[i].comm_workers < workers)
            deal_alike(&p, dealings[i], &wanted);
    results_close(&wanted);
    problem_close(&p);
}

// Ranks with different numbers of tokens, and with none, who still serve their experts.
static void case_ragged(void) {
    if (!begin_bits("ragged", "tokens of each rank")) return;
    static const int tokens[][4] = {{0, 200, 0, 0}, {130, 1, 0, 69}, {0, 0, 0, 200}, {64, 64, 8, 64}, {1, 127, 72, 0}};
    struct problem p;
    problem_open(&p, 200, 6, 2, 128, 128, 128, true);
    struct results wanted = deal_to_one(&p);
    for (int i = 0; i < COUNT_OF(tokens); i++)
        if (is_ep_size(4, p.E))
            deal_alike(&p, (struct dealing){.ranks = 4, .tokens = tokens[i], .replay = i == 1}, &wanted);
    results_close(&wanted);
    problem_close(&p);
}

// Gradients that are added to others, of one call or more, wherever macrobatches cut the sums.
static void case_added(void) {
    if (!begin_bits("added", "to what was there")) return;
    struct problem p;
    problem_open(&p, 400, 5, 2, 128, 128, 128, true);
    for (int t = 0; t < p.tokens; t++) p.ids[2 * t] = 2, p.ids[2 * t + 1] = t % 3 ? 1 : 4; // 0 and 3 have no rows
    static const struct dealing ways[] = {{.calls = 2}, {.add = true, .calls = 1}, {.add = true, .calls = 3}};
    static const int rings[] = {128, 384, 1152, 4096};
    for (int i = 0; i < COUNT_OF(ways); i++) {
        struct results wanted = results_open(&p);
        struct dealing d = ways[i];
        d.ranks = 1;
        deal_out(&p, &d, &wanted);
        against_separate(&p, d.add, d.calls, &wanted);
        d.minibatch = 128;
        for (int k = 0; k < COUNT_OF(rings); k++)
            for (d.ranks = 1; d.ranks <= 3; d.ranks++) {
                d.ring = rings[k], d.replay = (k + d.ranks) % 2;
                if (is_ep_size(d.ranks, p.E)) deal_alike(&p, d, &wanted);
            }
        results_close(&wanted);
    }
    problem_close(&p);
}

// Both passes over what is there.
static void pass_and_back(struct ranks *all, int l, const struct problem *p, const struct dealing *d,
                          struct results *r) {
    ranks_forward(all, l, p, d, r);
    ranks_backward(all, l, p, false, r);
    check_results(p, r);
}

// Ten calls in the same buffers, which hold poison or what the call before has left there.
static void case_repeats(void) {
    if (!begin_bits("repeats", "ten calls")) return;
    struct problem p;
    struct ranks all;
    struct dealing d = {.ranks = 3, .minibatch = 128, .ring = 256};
    problem_open(&p, 350, 8, 2, 256, 128, 128, true);
    struct results wanted = deal_to_one(&p), r = results_open(&p);
    ranks_open(&all, &p, &d, most_tokens(&p, &d), 1);
    for (int call = 0; call < 10; call++) {
        if (call % 3 == 2) ranks_poison(&all), ranks_poison_gradients(&all);
        pass_and_back(&all, 0, &p, &d, &r);
        same_results(dealing_text(&d), d.ranks, &p, &r, &wanted);
    }
    ranks_close(&all);
    results_close(&wanted);
    results_close(&r);
    problem_close(&p);
}

// The numbers of tokens and the routes change from call to call; buffers and what is in them stay.
static void case_changing_tokens(void) {
    if (!begin_bits("changes", "tokens and routes")) return;
    static const int counts[] = {300, 0, 17, 257, 1, 0, 128, 129, 300};
    enum { MOST = 300, RANKS = 3 };
    struct problem p;
    struct ranks all;
    struct dealing d = {.ranks = RANKS, .minibatch = 128, .ring = 384};
    problem_open(&p, MOST, 7, 2, 128, 128, 64, true);
    ranks_open(&all, &p, &d, MOST, 1);
    for (int call = 0; call < COUNT_OF(counts); call++) {
        int n = p.tokens = counts[call], dealt[RANKS] = {n / 2, n - n / 2, 0};
        if (call % 3 == 1) dealt[0] = 0, dealt[1] = 0, dealt[2] = n;
        d.tokens = call % 3 == 2 ? NULL : dealt;
        choose_at_random(&p);
        struct results wanted = deal_to_one(&p), r = results_open(&p);
        pass_and_back(&all, 0, &p, &d, &r);
        same_results(dealing_text(&d), d.ranks, &p, &r, &wanted);
        results_close(&wanted);
        results_close(&r);
    }
    ranks_close(&all);
    problem_close(&p);
}

// What layer 0 keeps, one array behind the other, the rows of its plan among them.
static unsigned char *copy_of_kept(struct place *me, size_t *bytes) {
    const struct mok_shape *s = &me->shape;
    const struct own_layer *own = &me->layers[0];
    struct mok_plan plan;
    mok_plan_read(&plan, &own->plan, s);
    memory_read(&me->own);
    const struct {
        const void *memory;
        size_t bytes;
    } kept[] = {
        {memory_of(&me->own, own->layer.x_rows), sizeof(real) * (size_t)s->ring_rows * (size_t)s->hidden},
        {memory_of(&me->own, own->layer.gate_up), sizeof(real) * (size_t)s->ring_rows * 2 * (size_t)s->intermediate},
        {memory_of(&me->own, own->layer.shared_gate_up), sizeof(real) * (size_t)own->tokens * 2 * (size_t)s->shared},
        {plan.rows, sizeof *plan.rows * (size_t)plan.blocks * MOK_BLOCK_ROWS},
    };
    unsigned char *copy = NULL;
    *bytes = 0;
    for (int i = 0; i < COUNT_OF(kept); i++) {
        copy = realloc(copy, *bytes + kept[i].bytes + 1);
        if (!copy) abort();
        memcpy(copy + *bytes, kept[i].memory, kept[i].bytes);
        *bytes += kept[i].bytes;
    }
    free(plan.rows);
    return copy;
}

// What layer 0 keeps is not touched by the passes of the other layer.
static void same_kept(struct ranks *all, unsigned char **kept, const size_t *bytes, const char *when) {
    for (int r = 0; r < all->count; r++) {
        size_t now;
        unsigned char *after = copy_of_kept(&all->list[r], &now);
        scene_check(now == bytes[r]);
        if (now == bytes[r]) same_bytes("kept", when, after, kept[r], bytes[r]);
        free(after);
    }
}

// Two layers share one workspace and the slots, and with replay one ring: forward, forward, backward, backward.
static void case_two_layers(bool replay) {
    if (!begin_bits("two layers", replay ? "one workspace, one ring" : "one workspace")) return;
    enum { RANKS = 2 };
    struct problem p[2];
    struct ranks all;
    struct dealing d = {.ranks = RANKS, .minibatch = 128, .ring = 512, .replay = replay};
    struct results wanted[2], r[2];
    for (int l = 0; l < 2; l++) {
        problem_open(&p[l], l ? 211 : 300, 6, 2, 256, 128, 128, true);
        wanted[l] = deal_to_one(&p[l]);
        r[l] = results_open(&p[l]);
    }
    ranks_open(&all, &p[0], &d, most_tokens(&p[0], &d), 2);
    for (int call = 0; call < 3; call++) {
        unsigned char *kept[RANKS];
        size_t bytes[RANKS];
        ranks_forward(&all, 0, &p[0], &d, &r[0]);
        for (int i = 0; i < RANKS; i++) kept[i] = copy_of_kept(&all.list[i], &bytes[i]);
        ranks_forward(&all, 1, &p[1], &d, &r[1]);
        if (!replay) same_kept(&all, kept, bytes, "layer 0's, after layer 1's forward pass");
        ranks_backward(&all, 1, &p[1], false, &r[1]);
        if (!replay) same_kept(&all, kept, bytes, "layer 0's, after layer 1's backward pass");
        ranks_backward(&all, 0, &p[0], false, &r[0]);
        for (int l = 0; l < 2; l++) same_results(l ? "layer 1" : "layer 0", d.ranks, &p[l], &r[l], &wanted[l]);
        for (int i = 0; i < RANKS; i++) free(kept[i]);
    }
    ranks_close(&all);
    for (int l = 0; l < 2; l++) {
        results_close(&wanted[l]);
        results_close(&r[l]);
        problem_close(&p[l]);
    }
}

// ---- soak ----

enum { SOAK_CALLS = 2000, SOAK_TOKENS = 300, SOAK_RANKS = 3 };

static void route_anyhow(struct problem *p) {
    int way = scene_below(8), hot = scene_below(p->E);
    choose_at_random(p);
    for (int t = 0; t < p->tokens; t++)
        for (int k = 0; k < p->K; k++) {
            int32_t *id = &p->ids[t * p->K + k];
            if (way == 0) *id = (hot + k) % p->E; // all alike
            if (way == 1) *id = (t + k) % (p->K + 1);
            if (way == 2 && scene_below(3) == 0) *id = -1;
            if (way == 3 && t % 16) *id = -1;
        }
}

// So many tokens on each rank, at random.
static void deal_anyhow(int *tokens, int ranks, int n) {
    int left = n;
    for (int r = 0; r < ranks; r++) {
        tokens[r] = r == ranks - 1 ? left : scene_below(3) == 0 ? 0 : scene_below(left + 1);
        left -= tokens[r];
    }
}

static void soak_call(struct ranks *all, const struct problem *p, const struct dealing *d, bool add, bool checked,
                      struct results *r) {
    ranks_poison(all);
    ranks_poison_gradients(all);
    if (add) ranks_start_gradients(all, 0);
    ranks_forward(all, 0, p, d, r);
    if (checked) ranks_check(all, 0, MOK_FORWARD);
    ranks_backward(all, 0, p, add, r);
    if (checked) ranks_check(all, 0, MOK_BACKWARD);
    check_results(p, r);
}

// Calls with changing routes, tokens and delays, gradients stored or added: the same bits on one rank, whose backward pass
// has nothing of forward's rows, and on three with many macrobatches.
static void soak(int calls) {
    scene_begin("soak", 0, "%d calls", calls);
    struct problem pool;
    int tokens[SOAK_RANKS], failures = scene.operation->failures;
    struct dealing one = {.ranks = 1, .replay = true},
                   more = {.ranks = SOAK_RANKS, .minibatch = 128, .ring = 256, .tokens = tokens};
    struct ranks a, b;
    double begin = clock_seconds();
    problem_open(&pool, 2 * SOAK_TOKENS, 8, 3, 128, 128, 64, true);
    ranks_open(&a, &pool, &one, SOAK_TOKENS, 1);
    ranks_open(&b, &pool, &more, SOAK_TOKENS, 1);
    for (int call = 0; call < calls && scene.operation->failures < failures + 20; call++) {
        struct problem p = pool;
        p.tokens = scene_below(10) == 0 ? scene_below(3) : scene_below(SOAK_TOKENS + 1);
        size_t first = (size_t)scene_below(SOAK_TOKENS) * (size_t)p.H;
        p.x += first, p.dy += first;
        route_anyhow(&p);
        deal_anyhow(tokens, SOAK_RANKS, p.tokens);
        more.delays = scene_below(4) == 0 ? 0 : random_next(&scene.seed) | 1;
        for (int r = 0; r < SOAK_RANKS; r++) b.list[r].crew.delays = more.delays ? more.delays + 2 * (uint64_t)r : 0;
        bool add = scene_below(2);
        struct results wanted = results_open(&p), found = results_open(&p);
        soak_call(&a, &p, &one, add, call % 10 == 0, &wanted);
        soak_call(&b, &p, &more, add, call % 10 == 0, &found);
        char what[32];
        snprintf(what, sizeof what, "call %d%s", call, add ? ", added" : "");
        same_results(what, more.ranks, &p, &found, &wanted);
        results_close(&wanted);
        results_close(&found);
    }
    printf("# table: soak: %d calls in %.1f s\n", calls, clock_seconds() - begin);
    ranks_close(&a);
    ranks_close(&b);
    problem_close(&pool);
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    bool soaking = argc > 1 && strcmp(argv[1], "--soak") == 0;
    int calls = argc > 2 ? atoi(argv[2]) : SOAK_CALLS;
    if (!soaking) scene_start(argc, argv);
    if (soaking && calls < 1) fail_user("--soak", "found '%s', wanted a number of calls from 1 on", argv[2]);
    device_open(0, 1);
    printf("# %s\n", device_name());
    if (!mok_available()) {
        printf("1..1\nok 1 - megakernel # SKIP this build has none\n");
        scene.finished = true;
        comm_stop();
        return 0;
    }
    if (soaking) {
        soak(calls);
    } else {
        for (int i = 0; i < COUNT_OF(layers); i++) case_layer(&layers[i]);
        if (!scene.tiny) {
            case_rings();
            case_grids();
            case_moves();
            case_delays();
            case_large();
            case_ragged();
            case_repeats();
            case_changing_tokens();
            case_added();
            case_two_layers(false);
            case_two_layers(true);
        }
    }
    int code = scene_finish();
    comm_stop();
    return code;
}
