// What the experts of every rank do, planned in one process: against counting by hand, between layouts, and for a rack.
#include "tests/child.h"
#include "tests/mok_plans.h"

#include <stdbool.h>

#include "kernels/mok.h"
#include "model/moe_mok.h"
#include "model/plan.h"
#include "model/plan_ranks.h"
#include "model/presets.h"
#include "model/route.h"
#include "model/share.h"

// ---- runs to plan ----

// H 64, I 32, one shared expert of 32; MTP and dense layers are left out.
static struct options unit(int experts, int top_k, int seq) {
    struct options o;
    assert_true(options_set_preset(&o, "unit"));
    o.model.experts = experts;
    o.model.top_k = top_k;
    o.model.mtp_depth = o.model.dense_layers = 0;
    o.batch = 1;
    o.seq = seq;
    return o;
}

static struct options of_preset(const char *name, int seq) {
    struct options o;
    assert_true(options_set_preset(&o, name));
    if (!o.model.vocab) o.model.vocab = 50304;
    o.seq = seq;
    o.batch = 1;
    o.tokens_per_step = 0;
    return o;
}

// Static, overwritten by the next call.
static const char *print(const struct options *o, const struct parallel *p) {
    static char text[16384];
    text[0] = 0; // a stream without output leaves it as it is
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    plan_ranks_print(file, o, p);
    assert_int_equal(fclose(file), 0);
    return text;
}

// ---- by hand ----

// 2 ranks of 2 experts and 8 tokens with 2 routes each, all alike: an expert has 8 rows, 4 of them from the other rank.
static void a_small_case_is_as_counted_by_hand(void **state) {
    (void)state;
    struct options o = unit(4, 2, 8);
    struct parallel p = parallel_suppose(2, 2, 4);
    struct plan_ranks plan;
    plan_ranks_make(&plan, &o, &p);
    assert_int_equal(plan.ranks, 2);
    assert_int_equal(plan.groups, 1);
    assert_int_equal(plan.route, ROUTE_BALANCED);
    for (int rank = 0; rank < 2; rank++) {
        const struct rank_load *l = &plan.loads[rank];
        assert_int_equal(l->experts, 2);
        assert_int_equal(l->tokens, 8);
        assert_int_equal(l->rows, 16);
        assert_int_equal(l->padding, 2 * 128 - 16);
        assert_int_equal(l->macrobatches, 1);
        // One tile of each kind: of 1 block of tokens and 2 of rows; weight gradients of 2 experts and the shared one.
        assert_int_equal(l->tasks_forward, 2 + 2 * 2);
        assert_int_equal(l->tasks_backward, 2 + 2 + 2 * 2 + 2 * 2);
        assert_int_equal(l->from_others, 8);
        assert_int_equal(l->to_others, 8);
        assert_int_equal(l->replayed_from_others, 0);
        assert_int_equal(l->replayed_to_others, 0);
        assert_int_equal(l->shown, 16);
        assert_int_equal(l->seen, 16);
    }
    plan_ranks_free(&plan);
}

// 2 ranks of 2 experts and 1024 tokens with 2 routes: an expert's 8 row blocks are 4 of rank 0's tokens, then 4 of rank
// 1's. In a ring of 2 blocks only the first 2 of a rank's 16 are not replayed: both are of rank 0's tokens.
static void replayed_rows_are_those_outside_the_first_ring(void **state) {
    (void)state;
    struct options o = unit(4, 2, 1024);
    struct parallel p = parallel_suppose(2, 2, 4);
    struct plan_ranks plan;
    o.moe.minibatch_rows = 128;
    o.moe.ring_rows = 256;
    plan_ranks_make(&plan, &o, &p);
    for (int rank = 0; rank < 2; rank++) {
        assert_int_equal(plan.loads[rank].rows, 2048);
        assert_int_equal(plan.loads[rank].padding, 0);
        assert_int_equal(plan.loads[rank].macrobatches, 8);
        assert_int_equal(plan.loads[rank].from_others, 1024);
    }
    assert_int_equal(plan.loads[0].replayed_from_others, 1024);
    assert_int_equal(plan.loads[1].replayed_from_others, 1024 - 256);
    assert_int_equal(plan.loads[0].replayed_to_others, 1024 - 256);
    assert_int_equal(plan.loads[1].replayed_to_others, 1024);
    plan_ranks_free(&plan);
}

// The numbers of a printed line, wherever it begins.
static void assert_line(const char *text, const char *label, double first, double second) {
    double a, b;
    const char *line = strstr(text, label);
    if (!line || sscanf(line + strlen(label), " %lf %lf", &a, &b) != 2) fail_msg("no line '%s' in:\n%s", label, text);
    const double rounding = 0.00501; // two decimals are printed
    if (!(fabs(a - first) < rounding && fabs(b - second) < rounding))
        fail_msg("%s: printed %g and %g, wanted %g and %g", label, a, b, first, second);
}

// The case above with rows of 1024 numbers: 256 of them are a MiB in FP32.
static void link_bytes_are_printed_per_rank_and_layer(void **state) {
    (void)state;
    const double mib = 1 << 20, row = 1024 * sizeof(real), ids = 2048 * sizeof(int32_t), gates = 1024 * sizeof(accum);
    struct options o = unit(4, 2, 1024);
    struct parallel p = parallel_suppose(2, 2, 4);
    o.model.hidden = 1024;
    o.moe.minibatch_rows = 128;
    o.moe.ring_rows = 256;
    const char *text = print(&o, &p);
    double x = 1024 * row / mib;
    assert_non_null(strstr(text, "Experts on 2 ranks: EP 2 x DP 1, --moe mok\n"));
    assert_line(text, "    ids, for the plan", ids / mib, ids / mib);
    assert_line(text, "    gates, for the plan", gates / mib, gates / mib);
    assert_line(text, "    x, pulled  ", x, x);
    assert_line(text, "    y, pushed", x, x);
    assert_line(text, "\n  forward ", 2 * x + (ids + gates) / mib, 2 * x + (ids + gates) / mib);
    assert_line(text, "    dy, pulled", x, x);
    assert_line(text, "    x, pulled again", x, x);
    assert_line(text, "    dx, pushed", x, x);
    assert_line(text, "    gate gradients, pushed", gates / mib, gates / mib);
    assert_line(text, "\n  backward ", 3 * x + gates / mib, 3 * x + gates / mib);

    o.moe.kind = MOE_ALLTOALL;
    text = print(&o, &p);
    assert_non_null(strstr(text, "Experts on 2 ranks: EP 2 x DP 1, --moe alltoall\n"));
    assert_line(text, "    x, sent", x, x);
    assert_line(text, "    y, sent back", x, x);
    assert_line(text, "\n  forward ", 2 * x + gates / mib, 2 * x + gates / mib);
    assert_line(text, "    dx, sent back", x, x);
    assert_line(text, "\n  backward ", 2 * x + gates / mib, 2 * x + gates / mib);
    assert_null(strstr(text, "ring"));
}

// ---- between layouts ----

// Routes of the job's first micro-batch that have an expert, by the workload alone.
static int64_t placed_routes(const struct options *o, const struct parallel *p) {
    int K = o->model.top_k, n = o->batch * o->seq;
    int32_t *ids = malloc(sizeof *ids * (size_t)n * (size_t)K);
    int64_t placed = 0, sequences = o->tokens_per_step ? o->tokens_per_step / o->seq : (int64_t)o->batch * p->ranks;
    struct route_place place = {o->seed, o->moe.route == ROUTE_W7 ? ROUTE_BURST - 1 : 0, o->model.dense_layers};
    for (int rank = 0; rank < p->ranks; rank++) {
        struct parallel there = {.rank = rank, .ranks = p->ranks};
        struct share share = share_of(sequences, &there, o->batch);
        int tokens = share_round(&share, 0, o->batch) * o->seq;
        route_fill(ids, o->moe.route, place, share.first * o->seq, tokens, o->model.experts, K);
        for (int i = 0; i < tokens * K; i++) placed += ids[i] >= 0;
    }
    free(ids);
    return placed;
}

static struct rank_load sum_of(const struct plan_ranks *plan) {
    struct rank_load sum = {0};
    for (int rank = 0; rank < plan->ranks; rank++) {
        const struct rank_load *l = &plan->loads[rank];
        sum.experts += l->experts;
        sum.tokens += l->tokens;
        sum.rows += l->rows;
        sum.from_others += l->from_others;
        sum.to_others += l->to_others;
        sum.replayed_from_others += l->replayed_from_others;
        sum.replayed_to_others += l->replayed_to_others;
        sum.shown += l->shown;
        sum.seen += l->seen;
        assert_true(l->macrobatches >= 0 && l->padding >= 0 && l->replayed_from_others <= l->from_others);
        assert_true(l->padding < MOK_BLOCK_ROWS * l->experts);
    }
    return sum;
}

static void check_sums(const struct options *o, const struct parallel *p) {
    struct plan_ranks plan;
    plan_ranks_make(&plan, o, p);
    struct rank_load sum = sum_of(&plan);
    assert_int_equal(plan.groups, p->dp);
    assert_int_equal(sum.experts, o->model.experts * p->dp);
    assert_int_equal(sum.rows, placed_routes(o, p));
    // What one rank takes another one gives.
    assert_int_equal(sum.from_others, sum.to_others);
    assert_int_equal(sum.replayed_from_others, sum.replayed_to_others);
    assert_int_equal(sum.seen, sum.shown * (p->ep - 1));
    if (p->ep == 1) assert_int_equal(sum.from_others, 0);
    plan_ranks_free(&plan);
}

// What the megakernel's plan of one rank says, row by row.
static void count_plan(struct rank_load *loads, const struct mok_shape *s, const struct mok_plan *p) {
    struct rank_load *mine = &loads[p->rank];
    for (int e = 0; e < p->experts; e++) mine->rows += p->expert_rows[e];
    mine->padding = (int64_t)p->blocks * MOK_BLOCK_ROWS - mine->rows;
    mine->macrobatches = mok_macrobatches(s, p);
    mine->tasks_forward = mok_task_total(s, p, MOK_FORWARD);
    mine->tasks_backward = mok_task_total(s, p, MOK_BACKWARD);
    for (int row = 0; row < p->blocks * MOK_BLOCK_ROWS; row++) {
        int source = p->rows[row].source;
        if (source < 0 || source == p->rank) continue;
        bool replayed = mok_is_replayed(s, mok_macrobatch_of(s, row / MOK_BLOCK_ROWS));
        mine->from_others++;
        loads[source].to_others++;
        mine->replayed_from_others += replayed;
        loads[source].replayed_to_others += replayed;
    }
}

// One EP group's plans, really made.
static void make_plans(struct rank_load *loads, const struct options *o, const struct parallel *p) {
    struct mok_shape s = moe_mok_shape(&o->model, p->ep, o->batch * o->seq, &o->moe);
    struct route_place place = {o->seed, o->moe.route == ROUTE_W7 ? ROUTE_BURST - 1 : 0, o->model.dense_layers};
    struct plans w;
    plans_open(&w, &s);
    for (int rank = 0; rank < p->ep; rank++) {
        struct parallel there = {.rank = rank, .ranks = p->ranks};
        struct share share = share_of((int64_t)o->batch * p->ranks, &there, o->batch);
        w.tokens[rank] = share_round(&share, 0, o->batch) * o->seq;
        route_fill(w.ids[rank], o->moe.route, place, share.first * o->seq, w.tokens[rank], s.experts, s.top_k);
    }
    plans_make(&w);
    for (int rank = 0; rank < p->ep; rank++) count_plan(loads, &s, &w.plan[rank]);
    plans_close(&w);
}

static void check_made_plans_agree(const struct options *o, const struct parallel *p) {
    struct rank_load *made = calloc((size_t)p->ep, sizeof *made);
    struct plan_ranks plan;
    make_plans(made, o, p);
    plan_ranks_make(&plan, o, p);
    for (int rank = 0; rank < p->ep; rank++) {
        const struct rank_load *l = &plan.loads[rank], *wanted = &made[rank];
        assert_int_equal(l->rows, wanted->rows);
        assert_int_equal(l->padding, wanted->padding);
        assert_int_equal(l->macrobatches, wanted->macrobatches);
        assert_int_equal(l->tasks_forward, wanted->tasks_forward);
        assert_int_equal(l->tasks_backward, wanted->tasks_backward);
        assert_int_equal(l->from_others, wanted->from_others);
        assert_int_equal(l->to_others, wanted->to_others);
        assert_int_equal(l->replayed_from_others, wanted->replayed_from_others);
        assert_int_equal(l->replayed_to_others, wanted->replayed_to_others);
    }
    plan_ranks_free(&plan);
    free(made);
}

static void loads_are_those_of_plans_that_are_made(void **state) {
    (void)state;
    const int ranks[] = {1, 2, 3, 6, 13};
    struct options o = unit(13, 3, 300);
    o.batch = 2;
    o.moe.minibatch_rows = 128;
    for (int route = ROUTE_BALANCED; route <= ROUTE_W7; route++)
        for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
            for (int ring_rows = 0; ring_rows <= 256; ring_rows += 128) {
                struct parallel p = parallel_suppose(ranks[i], ranks[i], 13);
                o.moe.route = route;
                o.moe.ring_rows = ring_rows;
                o.moe.recompute = ring_rows == 128 && i % 2 ? RECOMPUTE_MOE : RECOMPUTE_NONE;
                check_made_plans_agree(&o, &p);
            }
}

static void check_both_layers_agree(struct options o, const struct parallel *p) {
    struct plan_ranks mok, alltoall;
    o.moe.kind = MOE_MOK;
    plan_ranks_make(&mok, &o, p);
    o.moe.kind = MOE_ALLTOALL;
    plan_ranks_make(&alltoall, &o, p);
    for (int rank = 0; rank < p->ranks; rank++) {
        assert_int_equal(mok.loads[rank].rows, alltoall.loads[rank].rows);
        assert_int_equal(mok.loads[rank].from_others, alltoall.loads[rank].from_others);
        assert_int_equal(mok.loads[rank].to_others, alltoall.loads[rank].to_others);
        assert_int_equal(mok.loads[rank].tokens, alltoall.loads[rank].tokens);
    }
    plan_ranks_free(&mok);
    plan_ranks_free(&alltoall);
}

static void sums_over_the_ranks_are_those_of_the_routes(void **state) {
    (void)state;
    const int layouts[][2] = {{1, 1}, {2, 2}, {3, 3}, {6, 3}, {6, 6}, {12, 6}, {5, 5}, {13, 13}};
    struct options o = unit(13, 3, 100);
    o.moe.minibatch_rows = 128;
    for (int route = ROUTE_BALANCED; route <= ROUTE_W7; route++)
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            struct parallel p = parallel_suppose(layouts[i][0], layouts[i][1], 13);
            o.moe.route = route;
            o.moe.ring_rows = i % 2 ? 128 : 0;
            check_sums(&o, &p);
            check_both_layers_agree(o, &p);
        }
}

// A rank without a sequence still serves its experts.
static void ranks_without_tokens_have_rows(void **state) {
    (void)state;
    struct options o = unit(12, 3, 64);
    struct parallel p = parallel_suppose(6, 6, 12);
    struct plan_ranks plan;
    o.moe.route = ROUTE_BALANCED;
    o.tokens_per_step = 4 * 64; // 4 sequences for 6 ranks
    check_sums(&o, &p);
    plan_ranks_make(&plan, &o, &p);
    int idle = 0;
    for (int rank = 0; rank < 6; rank++) {
        idle += plan.loads[rank].tokens == 0;
        if (plan.loads[rank].tokens == 0) assert_int_equal(plan.loads[rank].to_others, 0);
        assert_int_equal(plan.loads[rank].rows, 4 * 64 * 3 / 6);
    }
    assert_int_equal(idle, 2);
    plan_ranks_free(&plan);
}

// ---- a rack ----

static void a_rack_is_planned_in_one_process(void **state) {
    (void)state;
    const struct {
        const char *preset;
        int ranks, ep, seq, least, most; // experts of a rank
    } racks[] = {
        {"dsv3", 72, 72, 1024, 3, 4},          {"dsv3", 64, 64, 1024, 4, 4},     {"dsv3", 72, 36, 512, 7, 8},
        {"moonlight", 64, 64, 1024, 1, 1},     {"moonlight", 72, 36, 512, 1, 2}, {"qwen3-moe-mini", 72, 72, 512, 1, 2},
        {"qwen3-moe-mini", 64, 64, 512, 2, 2},
    };
    for (size_t i = 0; i < sizeof racks / sizeof *racks; i++) {
        struct options o = of_preset(racks[i].preset, racks[i].seq);
        struct parallel p = parallel_suppose(racks[i].ranks, racks[i].ep, o.model.experts);
        struct plan_ranks plan;
        plan_ranks_make(&plan, &o, &p);
        struct rank_load sum = sum_of(&plan);
        int64_t routes = (int64_t)racks[i].ranks * racks[i].seq * o.model.top_k;
        assert_int_equal(plan.ranks, racks[i].ranks);
        assert_int_equal(sum.rows, routes);
        assert_int_equal(sum.experts, o.model.experts * p.dp);
        for (int rank = 0; rank < plan.ranks; rank++) {
            const struct rank_load *l = &plan.loads[rank];
            assert_true(l->experts >= racks[i].least && l->experts <= racks[i].most);
            // Balanced over each group of ranks, so rows go by experts: one more or less for each of them.
            double fair = (double)l->experts * (double)routes / p.dp / o.model.experts;
            assert_true(fabs((double)l->rows - fair) <= l->experts);
            assert_int_equal(l->macrobatches, 1);
        }
        // Of evenly spread routes 1 / EP stay; experts that do not divide by EP change little.
        assert_true(fabs((double)sum.from_others / (double)routes - (1 - 1.0 / p.ep)) < 0.01);
        plan_ranks_free(&plan);
    }
}

// Far more rows than the ring has: several macrobatches on the hot ranks, and the table still holds them.
static void a_hot_rank_of_a_rack_fits_its_table(void **state) {
    (void)state;
    struct options o = of_preset("dsv3", 1024);
    struct parallel p = parallel_suppose(72, 72, 256);
    struct mok_shape s = moe_mok_shape(&o.model, 72, 1024, &o.moe);
    struct plan_ranks plan;
    o.moe.route = ROUTE_W2;
    plan_ranks_make(&plan, &o, &p);
    int most = 0;
    for (int rank = 0; rank < 72; rank++) {
        const struct rank_load *l = &plan.loads[rank];
        assert_true((size_t)(l->rows + l->padding) <= mok_capacity_rows(&s));
        if (l->macrobatches > most) most = l->macrobatches;
        assert_true((l->replayed_from_others > 0) == (l->macrobatches > 1));
    }
    assert_true(most >= 4); // W2: an eighth of the experts has three quarters of the routes, six times the fair share
    plan_ranks_free(&plan);
}

// "label  bytes" as a plan prints it.
static const char *bytes_line(const char *label, size_t bytes) {
    static char text[128];
    FILE *file = fmemopen(text, sizeof text, "w");
    plan_print_bytes(file, label, (double)bytes);
    assert_int_equal(fclose(file), 0);
    return text;
}

// The parts that the section adds up are what the memory table has, and a line fits on a screen.
static void printed_memory_is_the_plans_for_every_preset(void **state) {
    (void)state;
    for (int i = 0; i < preset_count; i++)
        for (int way = 0; way < 4; way++) {
            struct options o = of_preset(presets[i].name, 256);
            int ranks = way == 0 ? 64 : 72;
            o.moe.recompute = way == 0 ? RECOMPUTE_NONE : way - 1;
            struct parallel p = parallel_suppose(ranks, 0, o.model.experts);
            struct mok_shape s = moe_mok_shape(&o.model, p.ep, 256, &o.moe);
            struct plan plan;
            plan_make(&plan, &o, &p);
            const char *text = print(&o, &p);
            if (!strstr(text, bytes_line("symmetric memory of a rank", plan.symmetric_bytes)))
                fail_msg("%s, %d ranks: wanted %s in %s", presets[i].name, ranks,
                         bytes_line("symmetric memory of a rank", plan.symmetric_bytes), text);
            size_t own = moe_mok_bytes(&o.model, &s, true, o.moe.recompute);
            assert_non_null(strstr(text, bytes_line("rings and tables of a rank", own)));
            for (const char *line = text; *line; line = strchr(line, '\n') + 1) assert_true(strcspn(line, "\n") <= 100);
        }
}

// With "moe" all x comes once more in backward; with "block" forward is done twice.
static void recomputing_moves_and_works_more(void **state) {
    (void)state;
    struct options o = unit(8, 2, 512);
    struct parallel p = parallel_suppose(4, 4, 8);
    struct plan_ranks plans[3];
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        o.moe.recompute = level;
        plan_ranks_make(&plans[level], &o, &p);
        for (int kind = MOE_MOK; kind <= MOE_ALLTOALL; kind++) {
            o.moe.kind = kind;
            const char *text = print(&o, &p);
            assert_true((strstr(text, "x, sent again ") != NULL) == (kind == MOE_ALLTOALL && level == RECOMPUTE_MOE));
            assert_true((strstr(text, "y, again ") != NULL) == (level == RECOMPUTE_BLOCK));
        }
        o.moe.kind = MOE_MOK;
    }
    for (int rank = 0; rank < 4; rank++) {
        const struct rank_load *none = &plans[0].loads[rank], *moe = &plans[1].loads[rank];
        assert_true(none->from_others > 0);
        assert_int_equal(none->replayed_from_others, 0);
        assert_int_equal(moe->replayed_from_others, moe->from_others);
        assert_int_equal(moe->replayed_to_others, moe->to_others);
        int blocks = (int)((none->rows + none->padding) / MOK_BLOCK_ROWS);
        assert_int_equal(moe->tasks_backward, none->tasks_backward + blocks); // a gate/up tile for each
        assert_int_equal(plans[2].loads[rank].tasks_backward, none->tasks_backward + none->tasks_forward);
    }
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) plan_ranks_free(&plans[level]);
}

static void a_model_without_experts_has_no_such_section(void **state) {
    (void)state;
    struct options o = of_preset("unit", 32);
    o.model.dense_layers = o.model.layers;
    o.model.mtp_depth = 0;
    assert_string_equal(print(&o, &parallel_alone), "");
}

static void one_rank_has_no_links(void **state) {
    (void)state;
    struct options o = of_preset("unit", 32);
    const char *text = print(&o, &parallel_alone);
    assert_non_null(strstr(text, "Experts on 1 rank: EP 1 x DP 1, --moe mok\n"));
    assert_null(strstr(text, "links"));
    assert_non_null(strstr(text, "symmetric memory of a rank"));
}

// Learned routes are not known before they are learned.
static void the_planned_route_is_named(void **state) {
    (void)state;
    struct options o = of_preset("unit", 32);
    assert_non_null(strstr(print(&o, &parallel_alone), "--route balanced (what a router learns is less even)."));
    o.moe.route = ROUTE_W2;
    assert_non_null(strstr(print(&o, &parallel_alone), "--route W2."));
    o.moe.route = ROUTE_W7;
    assert_non_null(strstr(print(&o, &parallel_alone), "--route W7 (a burst)."));
}

// ---- layouts that are only supposed ----

static void ep_is_the_largest_that_ranks_and_experts_allow(void **state) {
    (void)state;
    const int cases[][3] = {{72, 256, 72}, {72, 64, 36}, {64, 64, 64}, {7, 0, 1}, {7, 6, 1}, {1, 8, 1}, {12, 11, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct parallel p = parallel_suppose(cases[i][0], 0, cases[i][1]);
        assert_int_equal(p.ep, cases[i][2]);
        assert_int_equal(p.ranks, cases[i][0]);
        assert_int_equal(p.ep * p.dp, p.ranks);
        assert_int_equal(p.rank, p.dp_rank * p.ep + p.ep_rank);
        assert_int_equal(p.rank, p.ranks - 1);
    }
}

static void suppose(void *layout) {
    const int *numbers = layout;
    parallel_suppose(numbers[0], numbers[1], numbers[2]);
}

static void layouts_that_cannot_be_are_refused(void **state) {
    (void)state;
    const struct {
        int layout[3]; // ranks, ep, experts
        const char *message;
    } cases[] = {
        {{72, 72, 64}, "--ep: found 72, more than the 64 experts"},
        {{72, 5, 256}, "--ep: found 5 with 72 ranks, wanted a divisor"},
        {{72, 72, 0}, "--ep: found 72 and a model without experts"},
        {{2000000000, 0, 64}, "--ranks: found 2000000000, wanted at most"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char message[512];
        assert_int_equal(run_child(suppose, (void *)cases[i].layout, message, sizeof message), 2);
        assert_non_null(strstr(message, cases[i].message));
    }
}

static void shape_of_many_workers(void *workers) {
    struct options o = unit(4, 2, 8);
    o.moe.workers = *(int *)workers;
    moe_mok_shape(&o.model, 1, 8, &o.moe);
}

// Their minibatch would not fit into an int.
static void more_workers_than_any_machine_has_are_refused(void **state) {
    (void)state;
    int workers = 2000000000;
    char message[512];
    assert_int_equal(run_child(shape_of_many_workers, &workers, message, sizeof message), 2);
    assert_non_null(strstr(message, "--workers: found 2000000000, wanted at most 65536"));
}

static void shape_of_huge_batch(void *tokens) {
    struct options o = unit(4, 2, 8);
    o.moe.workers = 7; // a minibatch that divides no power of two, which a ring that has wrapped around would be
    moe_mok_shape(&o.model, 8, *(int *)tokens, &o.moe);
}

// Rows that an int cannot number, in the default ring too (Transformer Engine issue 2908, torchtitan issue 2430: 32-bit
// products overflow): the batch is named, not a ring of a negative size.
static void more_rows_than_an_int_numbers_are_refused(void **state) {
    (void)state;
    static int tokens[] = {1 << 28, 1000000000, 2000000000};
    for (int i = 0; i < 3; i++) {
        char message[512], wanted[64];
        snprintf(wanted, sizeof wanted, "--batch: found %d tokens on each of 8 ranks", tokens[i]);
        assert_int_equal(run_child(shape_of_huge_batch, &tokens[i], message, sizeof message), 2);
        if (!strstr(message, wanted)) fail_msg("found \"%s\", wanted \"%s\"", message, wanted);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_that_cannot_be_are_refused), // forks: before anything is computed in threads
        cmocka_unit_test(more_workers_than_any_machine_has_are_refused),
        cmocka_unit_test(more_rows_than_an_int_numbers_are_refused),
        cmocka_unit_test(ep_is_the_largest_that_ranks_and_experts_allow),
        cmocka_unit_test(a_small_case_is_as_counted_by_hand),
        cmocka_unit_test(replayed_rows_are_those_outside_the_first_ring),
        cmocka_unit_test(link_bytes_are_printed_per_rank_and_layer),
        cmocka_unit_test(loads_are_those_of_plans_that_are_made),
        cmocka_unit_test(sums_over_the_ranks_are_those_of_the_routes),
        cmocka_unit_test(ranks_without_tokens_have_rows),
        cmocka_unit_test(a_rack_is_planned_in_one_process),
        cmocka_unit_test(a_hot_rank_of_a_rack_fits_its_table),
        cmocka_unit_test(printed_memory_is_the_plans_for_every_preset),
        cmocka_unit_test(recomputing_moves_and_works_more),
        cmocka_unit_test(a_model_without_experts_has_no_such_section),
        cmocka_unit_test(one_rank_has_no_links),
        cmocka_unit_test(the_planned_route_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
