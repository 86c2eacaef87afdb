// The megakernel's forward pass in two builds: the CPU build records, the GPU build compares (tests/scene.h), and each
// by itself finds the same bits however the work is dealt out. One process plays all ranks (tests/gpu_mok_ranks.h).
//
//   build/cpu/tests/gpu_mok --record FILE
//   build/cuda/tests/gpu_mok --compare FILE
//   build/cuda/tests/gpu_mok --soak [CALLS]
//
// --small leaves the large layer out; --tiny, for sanitizers, does a few small ones.
#include "tests/gpu_mok_checks.h"

#include "kernels/clock.h"
#include "kernels/comm.h"
#include "kernels/fail.h"

#define COUNT_OF(list) ((int)(sizeof(list) / sizeof *(list)))

static const int ep_sizes[] = {1, 2, 3, 4, 6};

// ---- dealing out ----

// Deals the problem out to new ranks, computes y and checks what must hold beside it. Returns the macrobatches of the
// busiest rank.
static int deal_out(const struct problem *p, const struct dealing *d, real *y) {
    struct ranks all;
    int most = 0;
    ranks_open(&all, p, d, most_tokens(p, d), 1);
    ranks_forward(&all, 0, p, d, y);
    ranks_check(&all, 0);
    for (int r = 0; r < all.count; r++) {
        struct mok_plan plan;
        mok_plan_read(&plan, &all.list[r].layers[0].plan, &all.list[r].shape);
        int macrobatches = mok_macrobatches(&all.list[r].shape, &plan);
        if (macrobatches > most) most = macrobatches;
        free(plan.rows);
    }
    ranks_close(&all);
    return most;
}

// The same bits as wanted?
static int deal_alike(const struct problem *p, struct dealing d, const real *wanted) {
    real *y = result_open(p);
    int macrobatches = deal_out(p, &d, y);
    same_y(dealing_text(&d), p, y, wanted);
    free(y);
    return macrobatches;
}

static real *deal_to_one(const struct problem *p) {
    real *y = result_open(p);
    deal_out(p, &(struct dealing){.ranks = 1}, y);
    return y;
}

static bool is_ep_size(int ranks, int experts) { return ranks <= experts && ranks <= mok_most_ranks(); }

// ---- layers against the record, and on any number of ranks ----

enum routes {
    ROUTES_RANDOM,
    ROUTES_FIRST,
    ROUTES_HALF,
    ROUTES_EVEN,
    ROUTES_LAST,
    ROUTES_COUNTS,
    ROUTES_MASKED,
    ROUTES_NONE
};
enum gates { GATES_POSITIVE, GATES_ANY }; // any: zeros and negative ones too

struct layer_case {
    const char *name;
    int tokens, E, K, H, I, S;
    enum routes routes;
    enum gates gates;
    bool residual;
    int counts[8];       // of ROUTES_COUNTS: so many tokens choose expert e alone
    int minibatch, ring; // 0: the tests' own
    bool tiny, large;
};

static const struct layer_case layers[] = {
    {"random routes", 300, 12, 3, 256, 128, 256, .residual = true},
    {"several tiles of everything", 190, 4, 2, 512, 384, 256, .routes = ROUTES_RANDOM},
    {"no multiple of a tile", 150, 4, 2, 200, 72, 40, .residual = true},
    {"beyond one tile, no multiple", 190, 4, 2, 328, 296, 136, .routes = ROUTES_RANDOM},
    {"narrow", 33, 4, 1, 72, 8, 8, .tiny = true},
    {"smallest widths", 70, 3, 2, 8, 8, 8, .residual = true, .tiny = true},
    {"one expert", 140, 1, 1, 128, 128, 64, .routes = ROUTES_RANDOM},
    {"5 experts", 90, 5, 3, 128, 128, 64, .residual = true},
    {"7 experts", 90, 7, 3, 128, 128, 64, .routes = ROUTES_RANDOM},
    {"13 experts", 90, 13, 3, 128, 128, 64, .tiny = true},
    {"64 experts", 257, 64, 6, 128, 128, 128, .residual = true},
    {"every expert chosen", 65, 4, 4, 128, 128, 128, .routes = ROUTES_RANDOM},
    {"one choice", 129, 6, 1, 256, 128, 128, .routes = ROUTES_RANDOM},
    {"eight choices on one rank, ring of one minibatch", 130, 16, 8, 128, 128, 64, .routes = ROUTES_FIRST,
     .minibatch = 128, .ring = 128},
    {"one rank, many macrobatches", 400, 8, 2, 256, 128, 128, .routes = ROUTES_FIRST, .residual = true,
     .minibatch = 128, .ring = 256},
    {"one rank, one macrobatch", 400, 8, 2, 256, 128, 128, .routes = ROUTES_FIRST},
    {"one expert, many macrobatches", 500, 6, 1, 256, 128, 128, .routes = ROUTES_LAST, .minibatch = 128, .ring = 128},
    {"half of the experts", 200, 8, 2, 128, 256, 128, .routes = ROUTES_HALF, .residual = true},
    {"every other expert", 200, 8, 3, 128, 128, 128, .routes = ROUTES_EVEN},
    {"around a row block", 385, 8, 1, 128, 128, 64, .routes = ROUTES_COUNTS, .counts = {1, 63, 65, 127, 129}},
    {"empty experts between", 136, 8, 1, 128, 128, 64, .routes = ROUTES_COUNTS, .residual = true,
     .counts = {0, 5, 0, 0, 130, 0, 1}},
    {"full row blocks", 448, 8, 1, 128, 128, 64, .routes = ROUTES_COUNTS, .counts = {128, 0, 64, 0, 0, 256}},
    {"masked tokens", 200, 6, 2, 128, 128, 128, .routes = ROUTES_MASKED, .residual = true, .tiny = true},
    {"all masked", 200, 6, 2, 128, 128, 128, .routes = ROUTES_NONE},
    {"all masked, no shared expert", 100, 6, 2, 128, 128, 0, .routes = ROUTES_NONE, .residual = true},
    {"zero and negative gates", 200, 6, 3, 128, 128, 128, .gates = GATES_ANY},
    {"no shared expert", 150, 6, 2, 256, 128, 0, .residual = true, .tiny = true},
    {"no shared expert, no residual", 150, 6, 2, 128, 256, 0, .routes = ROUTES_RANDOM},
    {"wide shared expert", 150, 6, 2, 128, 128, 520, .routes = ROUTES_RANDOM},
    {"one token", 1, 6, 2, 128, 128, 64, .residual = true, .tiny = true},
    {"no token", 0, 5, 2, 128, 128, 64, .residual = true, .tiny = true},
    {"large", 2048, 16, 4, 1024, 768, 768, .residual = true, .minibatch = 2048, .large = true},
    {"large, many macrobatches", 2048, 16, 4, 1024, 768, 0, .minibatch = 1024, .ring = 3072, .large = true},
};

static void route(struct problem *p, const struct layer_case *c) {
    size_t K = (size_t)p->K, slots = (size_t)p->tokens * K;
    int token = 0;
    for (int e = 0; e < 8 && c->routes == ROUTES_COUNTS; e++)
        for (int i = 0; i < c->counts[e]; i++) p->ids[token++] = e;
    if (c->routes == ROUTES_COUNTS && token != p->tokens) abort();
    for (size_t i = 0; i < slots; i++) {
        int t = (int)(i / K), k = (int)(i % K);
        if (c->routes == ROUTES_FIRST) p->ids[i] = (t + k) % p->K;
        if (c->routes == ROUTES_HALF) p->ids[i] = (t + k) % (p->E / 2);
        if (c->routes == ROUTES_EVEN) p->ids[i] = 2 * ((t + k) % (p->E / 2));
        if (c->routes == ROUTES_LAST) p->ids[i] = p->E - 1 - k;
        if (c->routes == ROUTES_MASKED && (t % 3 == 0 || (t % 7 == 1 && k == 1))) p->ids[i] = -1;
        if (c->routes == ROUTES_NONE) p->ids[i] = -1;
        if (c->gates == GATES_ANY) p->gates[i] = (accum)(i % 3 == 0 ? 0 : i % 3 == 1 ? -p->gates[i] : p->gates[i]);
    }
}

// Every route's y, what stays of one rank, and its plan.
static void one_rank_against_record(const struct place *me, const struct problem *p) {
    enum { MOST_KEPT = 1 << 20 }; // elements of one array
    struct mok_plan plan;
    const struct own_layer *own = &me->layers[0];
    size_t slots = (size_t)p->tokens * (size_t)p->K, H = (size_t)p->H;
    mok_plan_read(&plan, &own->plan, &me->shape);
    plan_against_record(me, &plan);
    if (slots * (size_t)(p->H + 2 * p->I) <= MOST_KEPT) {
        against_record("slots", memory_of(&me->symmetric, me->slots), slots * H, H, FORWARD);
        kept_against_record("gate and up", me, &plan, own->layer.gate_up, 2 * p->I, ROUNDED);
        kept_against_record("hidden", me, &plan, me->work.hidden, p->I, FORWARD);
        if (p->S)
            against_record("shared gate and up", memory_of(&me->own, own->layer.shared_gate_up),
                           (size_t)p->tokens * 2 * (size_t)p->S, 2 * (size_t)p->S, ROUNDED);
    }
    free(plan.rows);
}

// Recording needs only the plans.
static void more_ranks(const struct problem *p, const struct dealing *d, const real *wanted) {
    struct ranks all;
    real *y = result_open(p);
    ranks_open(&all, p, d, most_tokens(p, d), 1);
    if (scene.recording) {
        ranks_put(&all, 0, p, d);
        ranks_plan(&all, 0);
    } else {
        ranks_forward(&all, 0, p, d, y);
        same_y(dealing_text(d), p, y, wanted);
        ranks_check(&all, 0);
    }
    for (int r = 0; r < all.count; r++) {
        struct mok_plan plan;
        mok_plan_read(&plan, &all.list[r].layers[0].plan, &all.list[r].shape);
        plan_against_record(&all.list[r], &plan);
        free(plan.rows);
    }
    ranks_close(&all);
    free(y);
}

static void case_forward(const struct layer_case *c) {
    if ((scene.small && c->large) || (scene.tiny && !c->tiny)) return;
    if (!scene_begin("forward", 0, "%s", c->name)) return;
    struct problem p;
    struct ranks all;
    struct dealing d = {.ranks = 1, .minibatch = c->minibatch, .ring = c->ring};
    problem_open(&p, c->tokens, c->E, c->K, c->H, c->I, c->S, c->residual);
    route(&p, c);
    real *y = result_open(&p);
    ranks_open(&all, &p, &d, p.tokens, 1);
    ranks_forward(&all, 0, &p, &d, y);
    ranks_check(&all, 0);
    against_record("y", y, (size_t)p.tokens * (size_t)p.H, (size_t)p.H, FORWARD);
    one_rank_against_record(&all.list[0], &p);
    ranks_close(&all);
    for (int i = 1; i < COUNT_OF(ep_sizes); i++) {
        d.ranks = ep_sizes[i];
        if (is_ep_size(d.ranks, p.E) && !(scene.tiny && d.ranks > 3)) more_ranks(&p, &d, y);
    }
    if (!scene.recording) against_separate(&p, y);
    free(y);
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
    real *wanted = result_open(&p);
    scene_check(deal_out(&p, &(struct dealing){.ranks = 1, .ring = 4096}, wanted) == 1);
    // Experts 1, 2 and 4 have 267, 400 and 133 rows: 3 + 4 + 2 row blocks on one rank, 1152 rows.
    static const int minibatches[] = {128, 256, 384, 128, 384, 1152, 256, 512};
    static const int rings[] = {128, 256, 384, 384, 1152, 1152, 1024, 4096};
    static const int lags[] = {-1, 1, 2, 0};
    for (int i = 0; i < COUNT_OF(rings); i++)
        for (int ranks = 1; ranks <= 3; ranks++) {
            struct dealing d = {
                .ranks = ranks, .minibatch = minibatches[i], .ring = rings[i], .lag = lags[(i + ranks) % 4]};
            if (!is_ep_size(ranks, p.E)) continue;
            int macrobatches = deal_alike(&p, d, wanted);
            if (ranks == 1) scene_check(macrobatches == mok_ceil(1152, rings[i]));
        }
    free(wanted);
    problem_close(&p);
}

// One worker alone finishes a pass, whatever the ring.
static void case_grids(void) {
    if (!begin_bits("grids", "workers and movers")) return;
    struct problem p;
    problem_open(&p, 500, 8, 2, 256, 256, 128, true);
    real *wanted = deal_to_one(&p);
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
                                    .move_rows = moves[(i + j + k) % 4]};
                if (comm_workers[j] < here && is_ep_size(d.ranks, p.E)) deal_alike(&p, d, wanted);
            }
    free(wanted);
    problem_close(&p);
}

static void case_moves(void) {
    if (!begin_bits("moves", "rows of a ticket")) return;
    struct problem p;
    problem_open(&p, 260, 8, 3, 200, 128, 64, false);
    real *wanted = deal_to_one(&p);
    static const int moves[] = {1, 2, 8, 32};
    for (int i = 0; i < COUNT_OF(moves); i++)
        for (int ranks = 1; ranks <= 4; ranks++)
            for (int comm = 0; comm < 2 && comm < mok_default_workers(); comm++) {
                struct dealing d = {.ranks = ranks, .comm_workers = comm, .move_rows = moves[i]};
                if (ranks % 2) d.minibatch = d.ring = 256;
                if (is_ep_size(ranks, p.E)) deal_alike(&p, d, wanted);
            }
    free(wanted);
    problem_close(&p);
}

static void case_delays(void) {
    if (!begin_bits("delays", "random pauses")) return;
    struct problem p;
    problem_open(&p, 300, 8, 2, 256, 128, 128, true);
    real *wanted = deal_to_one(&p);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct dealing d = {.ranks = 1 + (int)(seed % 4),
                            .comm_workers = seed % 3 == 0 && mok_default_workers() > 1,
                            .minibatch = 128,
                            .ring = 128 << seed % 3,
                            .delays = seed << 8};
        if (is_ep_size(d.ranks, p.E)) deal_alike(&p, d, wanted);
    }
    free(wanted);
    problem_close(&p);
}

// Many tiles for all workers of a GPU: phases, the lag between them, dedicated movers, as the trainer has them.
static void case_large(void) {
    if (scene.small || !begin_bits("large", "many workers")) return;
    struct problem p;
    problem_open(&p, 2048, 16, 4, 1024, 768, 768, true);
    real *wanted = deal_to_one(&p);
    int workers = mok_default_workers(), minibatch = mok_default_minibatch(p.I, workers);
    const struct dealing dealings[] = {
        {.ranks = 1, .minibatch = minibatch},
        {.ranks = 1, .minibatch = 512, .ring = 2048, .comm_workers = 1},
        {.ranks = 1, .minibatch = 1024, .ring = 4096, .lag = -1, .move_rows = 32},
        {.ranks = 1, .workers = 7, .minibatch = 1024},
        {.ranks = 2, .minibatch = minibatch, .comm_workers = 4},
        {.ranks = 2, .minibatch = 1024, .ring = 2048, .delays = 77},
        {.ranks = 3, .minibatch = 768, .comm_workers = 16, .move_rows = 1, .delays = 78},
        {.ranks = 4, .minibatch = 512, .ring = 1024, .move_rows = 32},
        {.ranks = 6, .minibatch = minibatch, .delays = 79},
    };
    for (int i = 0; i < COUNT_OF(dealings); i++)
        if (is_ep_size(dealings[i].ranks, p.E) && dealings[i].comm_workers < workers)
            deal_alike(&p, dealings[i], wanted);
    free(wanted);
    problem_close(&p);
}

// Ranks with different numbers of tokens, and with none, who still serve their experts.
static void case_ragged(void) {
    if (!begin_bits("ragged", "tokens of each rank")) return;
    static const int tokens[][4] = {{0, 200, 0, 0}, {130, 1, 0, 69}, {0, 0, 0, 200}, {64, 64, 8, 64}, {1, 127, 72, 0}};
    struct problem p;
    problem_open(&p, 200, 6, 2, 128, 128, 128, true);
    real *wanted = deal_to_one(&p);
    for (int i = 0; i < COUNT_OF(tokens); i++)
        if (is_ep_size(4, p.E)) deal_alike(&p, (struct dealing){.ranks = 4, .tokens = tokens[i]}, wanted);
    free(wanted);
    problem_close(&p);
}

// Ten calls in the same buffers, which hold poison or what the call before has left there.
static void case_repeats(void) {
    if (!begin_bits("repeats", "ten calls")) return;
    struct problem p;
    struct ranks all;
    struct dealing d = {.ranks = 3, .minibatch = 128, .ring = 256};
    problem_open(&p, 350, 8, 2, 256, 128, 128, true);
    real *wanted = deal_to_one(&p), *y = result_open(&p);
    ranks_open(&all, &p, &d, most_tokens(&p, &d), 1);
    for (int call = 0; call < 10; call++) {
        if (call % 3 == 2) ranks_poison(&all);
        ranks_forward(&all, 0, &p, &d, y);
        same_y(dealing_text(&d), &p, y, wanted);
    }
    ranks_close(&all);
    free(wanted);
    free(y);
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
        real *wanted = deal_to_one(&p), *y = result_open(&p);
        ranks_forward(&all, 0, &p, &d, y);
        same_y(dealing_text(&d), &p, y, wanted);
        free(wanted);
        free(y);
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

// Two layers share one workspace and the slots; what the first one keeps is not touched by the second.
static void case_two_layers(void) {
    if (!begin_bits("two layers", "one workspace")) return;
    enum { RANKS = 2 };
    struct problem p[2];
    struct ranks all;
    struct dealing d = {.ranks = RANKS, .minibatch = 128, .ring = 512};
    real *wanted[2], *y[2];
    for (int l = 0; l < 2; l++) {
        problem_open(&p[l], l ? 211 : 300, 6, 2, 256, 128, 128, true);
        wanted[l] = deal_to_one(&p[l]);
        y[l] = result_open(&p[l]);
    }
    ranks_open(&all, &p[0], &d, most_tokens(&p[0], &d), 2);
    for (int call = 0; call < 3; call++) {
        unsigned char *kept[RANKS];
        size_t bytes[RANKS];
        ranks_forward(&all, 0, &p[0], &d, y[0]);
        for (int r = 0; r < RANKS; r++) kept[r] = copy_of_kept(&all.list[r], &bytes[r]);
        ranks_forward(&all, 1, &p[1], &d, y[1]);
        for (int l = 0; l < 2; l++) same_y(l ? "layer 1" : "layer 0", &p[l], y[l], wanted[l]);
        for (int r = 0; r < RANKS; r++) {
            size_t bytes_after;
            unsigned char *after = copy_of_kept(&all.list[r], &bytes_after);
            scene_check(bytes_after == bytes[r]);
            if (bytes_after == bytes[r]) same_bytes("kept", "layer 0's, after layer 1", after, kept[r], bytes[r]);
            free(after);
            free(kept[r]);
        }
    }
    ranks_close(&all);
    for (int l = 0; l < 2; l++) {
        free(wanted[l]);
        free(y[l]);
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

// Calls with changing routes, tokens and delays: the same bits on one rank and on three.
static void soak(int calls) {
    scene_begin("soak", 0, "%d calls", calls);
    struct problem pool;
    int tokens[SOAK_RANKS], failures = scene.operation->failures;
    struct dealing one = {.ranks = 1}, more = {.ranks = SOAK_RANKS, .minibatch = 128, .ring = 256, .tokens = tokens};
    struct ranks a, b;
    double begin = clock_seconds();
    problem_open(&pool, 2 * SOAK_TOKENS, 8, 3, 128, 128, 64, true);
    ranks_open(&a, &pool, &one, SOAK_TOKENS, 1);
    ranks_open(&b, &pool, &more, SOAK_TOKENS, 1);
    for (int call = 0; call < calls && scene.operation->failures < failures + 20; call++) {
        struct problem p = pool;
        p.tokens = scene_below(10) == 0 ? scene_below(3) : scene_below(SOAK_TOKENS + 1);
        p.x += (size_t)scene_below(SOAK_TOKENS) * (size_t)p.H;
        route_anyhow(&p);
        deal_anyhow(tokens, SOAK_RANKS, p.tokens);
        more.delays = scene_below(4) == 0 ? 0 : random_next(&scene.seed) | 1;
        for (int r = 0; r < SOAK_RANKS; r++) b.list[r].crew.delays = more.delays ? more.delays + 2 * (uint64_t)r : 0;
        real *wanted = result_open(&p), *found = result_open(&p);
        ranks_poison(&a);
        ranks_poison(&b);
        ranks_forward(&a, 0, &p, &one, wanted);
        ranks_forward(&b, 0, &p, &more, found);
        char what[32];
        snprintf(what, sizeof what, "call %d", call);
        same_y(what, &p, found, wanted);
        // Poison that was added up: nobody wrote what was read.
        for (size_t i = 0; i < (size_t)p.tokens * (size_t)p.H; i++)
            if (isnan(host_double(found[i]))) {
                scene_fail("y", "%s: element %zu is NaN", what, i);
                break;
            }
        if (call % 10 == 0) ranks_check(&b, 0);
        free(wanted);
        free(found);
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
    if (!mok_available(MOK_FORWARD)) {
        printf("1..1\nok 1 - megakernel # SKIP this build has none\n");
        scene.finished = true;
        comm_stop();
        return 0;
    }
    if (soaking) {
        soak(calls);
    } else {
        for (int i = 0; i < COUNT_OF(layers); i++) case_forward(&layers[i]);
        if (!scene.tiny) {
            case_rings();
            case_grids();
            case_moves();
            case_delays();
            case_large();
            case_ragged();
            case_repeats();
            case_changing_tokens();
            case_two_layers();
        }
    }
    int code = scene_finish();
    comm_stop();
    return code;
}
