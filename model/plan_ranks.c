#include "model/plan_ranks.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "model/moe_mok.h"
#include "model/plan.h"
#include "model/route.h"
#include "model/share.h"

static void *alloc(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) fail_user("--plan", "found no memory for the routes of an EP group; lower --batch, --seq or --ep");
    return memory;
}

// ---- routes ----

// How many routes of the tokens of each rank of an EP group go to each expert. What one layer does follows from that
// alone: an expert's rows are those of rank 0's tokens, then those of rank 1's, and so on.
struct routes {
    int ranks, experts, top_k;
    int *tokens;  // [ranks]
    int *rows;    // [experts, ranks]
    int32_t *ids; // [tokens, K] of one rank at a time
};

static int rows_of(const struct routes *r, int expert, int source) {
    return r->rows[(size_t)expert * (size_t)r->ranks + (size_t)source];
}

static void routes_open(struct routes *r, const struct options *o, int ranks) {
    size_t most = (size_t)o->batch * (size_t)o->seq * (size_t)o->model.top_k;
    *r = (struct routes){.ranks = ranks, .experts = o->model.experts, .top_k = o->model.top_k};
    r->tokens = alloc((size_t)ranks, sizeof *r->tokens);
    r->rows = alloc((size_t)r->experts * (size_t)ranks, sizeof *r->rows);
    r->ids = alloc(most, sizeof *r->ids);
}

static void routes_close(struct routes *r) {
    free(r->tokens);
    free(r->rows);
    free(r->ids);
}

static int64_t sequences_per_step(const struct options *o, const struct parallel *p) {
    return o->tokens_per_step ? o->tokens_per_step / o->seq : (int64_t)o->batch * p->ranks;
}

// Those of the group's first micro-batch in its first layer with experts; of W7 in the first step that is a burst.
static void routes_count(struct routes *r, const struct options *o, const struct parallel *p, enum moe_route route,
                         int group) {
    struct route_place place = {o->seed, route == ROUTE_W7 ? ROUTE_BURST - 1 : 0, o->model.dense_layers};
    memset(r->rows, 0, sizeof *r->rows * (size_t)r->experts * (size_t)r->ranks);
    for (int rank = 0; rank < r->ranks; rank++) {
        struct parallel there = {.rank = group * r->ranks + rank, .ranks = p->ranks};
        struct share share = share_of(sequences_per_step(o, p), &there, o->batch);
        r->tokens[rank] = share_round(&share, 0, o->batch) * o->seq;
        route_fill(r->ids, route, place, share.first * o->seq, r->tokens[rank], r->experts, r->top_k);
        for (size_t slot = 0; slot < (size_t)r->tokens[rank] * (size_t)r->top_k; slot++)
            if (r->ids[slot] >= 0) r->rows[(size_t)r->ids[slot] * (size_t)r->ranks + (size_t)rank]++;
    }
}

// ---- loads ----

// What both layers move, in loads [ranks].
static void count_rows(struct rank_load *loads, const struct routes *r, int rank) {
    struct rank_load *mine = &loads[rank];
    int first = parallel_first_expert(r->experts, r->ranks, rank);
    int end = parallel_first_expert(r->experts, r->ranks, rank + 1);
    mine->experts = end - first;
    mine->tokens = r->tokens[rank];
    for (int e = first; e < end; e++)
        for (int source = 0; source < r->ranks; source++) {
            int rows = rows_of(r, e, source);
            mine->rows += rows;
            if (source == rank) continue;
            mine->from_others += rows;
            loads[source].to_others += rows;
        }
}

// Numbers that a rank shows to all others: the ids of its routes, or how many rows it has for each expert.
static void count_shown(struct rank_load *loads, const struct routes *r, bool mok) {
    int64_t all = 0;
    for (int rank = 0; rank < r->ranks; rank++) {
        loads[rank].shown = mok ? (int64_t)r->tokens[rank] * r->top_k : r->experts;
        all += loads[rank].shown;
    }
    for (int rank = 0; rank < r->ranks; rank++) loads[rank].seen = all - loads[rank].shown;
}

// ---- loads: the megakernel's plan ----

// The part of a rank's plan that its tasks follow from, in arrays of the host: --plan has no GPU.
static void plan_open(struct mok_plan *p, const struct mok_shape *s) {
    size_t experts = (size_t)mok_most_experts(s);
    *p = (struct mok_plan){.expert_block = alloc(experts + 1, sizeof *p->expert_block),
                           .expert_rows = alloc(experts, sizeof *p->expert_rows),
                           .block_expert = alloc(mok_capacity_blocks(s), sizeof *p->block_expert)};
}

static void plan_close(struct mok_plan *p) {
    free(p->expert_block);
    free(p->expert_rows);
    free(p->block_expert);
}

static void plan_fill(struct mok_plan *p, const struct mok_shape *s, const struct routes *r, int rank) {
    p->rank = rank;
    p->experts = mok_local_experts(s, rank);
    p->tokens = r->tokens[rank];
    p->blocks = 0;
    for (int e = 0; e < p->experts; e++) {
        p->expert_block[e] = p->blocks;
        p->expert_rows[e] = 0;
        for (int source = 0; source < r->ranks; source++)
            p->expert_rows[e] += rows_of(r, mok_first_expert(s, rank) + e, source);
        int end = p->blocks + mok_ceil(p->expert_rows[e], MOK_BLOCK_ROWS);
        while (p->blocks < end) p->block_expert[p->blocks++] = e;
    }
    p->expert_block[p->experts] = p->blocks;
}

// Rows of other ranks that are not in the ring any more when backward begins.
static void count_replayed(struct rank_load *loads, const struct mok_shape *s, const struct mok_plan *p,
                           const struct routes *r) {
    int64_t kept = mok_is_replayed(s, 0) ? 0 : s->ring_rows;
    for (int e = 0; e < p->experts; e++) {
        int64_t row = (int64_t)p->expert_block[e] * MOK_BLOCK_ROWS;
        for (int source = 0; source < r->ranks; source++) {
            int64_t first = row, end = row + rows_of(r, mok_first_expert(s, p->rank) + e, source);
            row = end;
            if (first < kept) first = kept;
            if (source == p->rank || first >= end) continue;
            loads[p->rank].replayed_from_others += end - first;
            loads[source].replayed_to_others += end - first;
        }
    }
}

static void plan_mok(struct rank_load *loads, const struct routes *r, const struct mok_shape *s,
                     enum recompute recompute) {
    struct mok_plan plan;
    plan_open(&plan, s);
    for (int rank = 0; rank < r->ranks; rank++) {
        struct rank_load *mine = &loads[rank];
        plan_fill(&plan, s, r, rank);
        mine->padding = (int64_t)plan.blocks * MOK_BLOCK_ROWS - mine->rows;
        mine->macrobatches = mok_macrobatches(s, &plan);
        mine->tasks_forward = mok_task_total(s, &plan, MOK_FORWARD);
        mine->tasks_backward = mok_task_total(s, &plan, MOK_BACKWARD);
        if (recompute == RECOMPUTE_BLOCK) mine->tasks_backward += mine->tasks_forward;
        count_replayed(loads, s, &plan, r);
    }
    plan_close(&plan);
}

// ---- all loads ----

static struct mok_shape shape_of(const struct options *o, const struct parallel *p) {
    return moe_mok_shape(&o->model, p->ep, o->batch * o->seq, &o->moe);
}

// Groups whose routes can be looked at in some seconds.
static int count_groups(const struct options *o, const struct parallel *p) {
    const double most = 5e8;
    double groups = most / ((double)o->batch * o->seq * o->model.top_k * p->ep);
    return groups < 1 ? 1 : groups < p->dp ? (int)groups : p->dp;
}

void plan_ranks_make(struct plan_ranks *plan, const struct options *o, const struct parallel *parallel) {
    int ep = parallel->ep, groups = count_groups(o, parallel);
    enum moe_route route = o->moe.route == ROUTE_LEARNED ? ROUTE_BALANCED : o->moe.route;
    bool mok = o->moe.kind == MOE_MOK;
    struct mok_shape shape = {0};
    struct routes routes;
    if (mok) shape = shape_of(o, parallel);
    *plan = (struct plan_ranks){.route = route, .groups = groups, .ranks = groups * ep};
    plan->loads = alloc((size_t)plan->ranks, sizeof *plan->loads);
    routes_open(&routes, o, ep);
    for (int group = 0; group < groups; group++) {
        struct rank_load *loads = plan->loads + (size_t)group * (size_t)ep;
        routes_count(&routes, o, parallel, route, group);
        for (int rank = 0; rank < ep; rank++) count_rows(loads, &routes, rank);
        count_shown(loads, &routes, mok);
        if (mok) plan_mok(loads, &routes, &shape, o->moe.recompute);
    }
    routes_close(&routes);
}

void plan_ranks_free(struct plan_ranks *plan) {
    free(plan->loads);
    *plan = (struct plan_ranks){0};
}

// ---- printing: loads ----

enum measure { EXPERTS, TOKENS, ROWS, PADDING, MACROBATCHES, TASKS_FORWARD, TASKS_BACKWARD, MEASURES };

static const char *const measure_names[MEASURES] = {
    [EXPERTS] = "experts",
    [TOKENS] = "tokens",
    [ROWS] = "rows (token, expert)",
    [PADDING] = "padding, % of all rows",
    [MACROBATCHES] = "macrobatches",
    [TASKS_FORWARD] = "tasks, forward",
    [TASKS_BACKWARD] = "tasks, backward",
};

static double measure_of(const struct rank_load *l, enum measure measure) {
    switch (measure) {
    case EXPERTS:
        return l->experts;
    case TOKENS:
        return l->tokens;
    case ROWS:
        return (double)l->rows;
    case PADDING:
        return l->rows ? 100 * (double)l->padding / (double)(l->rows + l->padding) : 0;
    case MACROBATCHES:
        return l->macrobatches;
    case TASKS_FORWARD:
        return l->tasks_forward;
    default:
        return l->tasks_backward;
    }
}

static void print_measure(FILE *file, const struct plan_ranks *plan, enum measure measure) {
    double min = measure_of(&plan->loads[0], measure), max = min, sum = 0;
    int digits = measure == PADDING;
    for (int rank = 0; rank < plan->ranks; rank++) {
        double value = measure_of(&plan->loads[rank], measure);
        if (value < min) min = value;
        if (value > max) max = value;
        sum += value;
    }
    fprintf(file, "  %-28s %10.*f %12.1f %10.*f\n", measure_names[measure], digits, min, sum / plan->ranks, digits,
            max);
}

// Of the tokens' routes, in percent.
static double remote_share(const struct plan_ranks *plan) {
    int64_t rows = 0, remote = 0;
    for (int rank = 0; rank < plan->ranks; rank++) {
        rows += plan->loads[rank].rows;
        remote += plan->loads[rank].from_others;
    }
    return rows ? 100 * (double)remote / (double)rows : 0;
}

static void print_loads(FILE *file, const struct plan_ranks *plan, bool mok) {
    fprintf(file, "  %-28s %10s %12s %10s\n", "of a rank", "min", "mean", "max");
    for (enum measure measure = 0; measure < MEASURES; measure++)
        if (mok || measure < PADDING) print_measure(file, plan, measure);
    fprintf(file, "  %-28s %23.1f\n", "rows of other ranks, %", remote_share(plan));
}

// ---- printing: links ----

// Rows go to their experts, results back to their tokens; what is shown goes to everybody.
enum way { TO_EXPERTS, TO_EXPERTS_AGAIN, TO_TOKENS, TO_EVERYBODY };

struct transfer {
    const char *name;
    bool backward;
    enum way way;
    bool row;                 // of H numbers; else one number
    enum recompute recompute; // the level that makes it necessary; none: always there
};

static const struct transfer mok_transfers[] = {
    {"ids, for the plan", false, TO_EVERYBODY, false, RECOMPUTE_NONE},
    {"gates, for the plan", false, TO_EXPERTS, false, RECOMPUTE_NONE},
    {"x, pulled", false, TO_EXPERTS, true, RECOMPUTE_NONE},
    {"y, pushed", false, TO_TOKENS, true, RECOMPUTE_NONE},
    {"dy, pulled", true, TO_EXPERTS, true, RECOMPUTE_NONE},
    {"x, pulled again", true, TO_EXPERTS_AGAIN, true, RECOMPUTE_NONE},
    {"dx, pushed", true, TO_TOKENS, true, RECOMPUTE_NONE},
    {"gate gradients, pushed", true, TO_TOKENS, false, RECOMPUTE_NONE},
    {"ids, again", true, TO_EVERYBODY, false, RECOMPUTE_BLOCK},
    {"gates, again", true, TO_EXPERTS, false, RECOMPUTE_BLOCK},
    {"x, again", true, TO_EXPERTS, true, RECOMPUTE_BLOCK},
    {"y, again", true, TO_TOKENS, true, RECOMPUTE_BLOCK},
};
static const struct transfer alltoall_transfers[] = {
    {"counts", false, TO_EVERYBODY, false, RECOMPUTE_NONE},
    {"gates, sent", false, TO_EXPERTS, false, RECOMPUTE_NONE},
    {"x, sent", false, TO_EXPERTS, true, RECOMPUTE_NONE},
    {"y, sent back", false, TO_TOKENS, true, RECOMPUTE_NONE},
    {"dy, sent", true, TO_EXPERTS, true, RECOMPUTE_NONE},
    {"dx, sent back", true, TO_TOKENS, true, RECOMPUTE_NONE},
    {"gate gradients, sent back", true, TO_TOKENS, false, RECOMPUTE_NONE},
    {"x, sent again", true, TO_EXPERTS, true, RECOMPUTE_MOE},
    {"counts, again", true, TO_EVERYBODY, false, RECOMPUTE_BLOCK},
    {"gates, again", true, TO_EXPERTS, false, RECOMPUTE_BLOCK},
    {"x, again", true, TO_EXPERTS, true, RECOMPUTE_BLOCK},
    {"y, again", true, TO_TOKENS, true, RECOMPUTE_BLOCK},
};

// Bytes that come to a rank and leave it.
struct traffic {
    double in, out;
};

static struct traffic traffic_of(const struct rank_load *l, const struct transfer *t, const struct options *o, int ep) {
    double number = t->way == TO_EVERYBODY ? sizeof(int32_t) : sizeof(accum);
    double bytes = t->row ? (double)o->model.hidden * sizeof(real) : number;
    switch (t->way) {
    case TO_EXPERTS:
        return (struct traffic){(double)l->from_others * bytes, (double)l->to_others * bytes};
    case TO_EXPERTS_AGAIN:
        return (struct traffic){(double)l->replayed_from_others * bytes, (double)l->replayed_to_others * bytes};
    case TO_TOKENS:
        return (struct traffic){(double)l->to_others * bytes, (double)l->from_others * bytes};
    default:
        return (struct traffic){(double)l->seen * bytes, (double)l->shown * (ep - 1) * bytes};
    }
}

static bool is_there(const struct transfer *t, const struct options *o) {
    return t->recompute == RECOMPUTE_NONE || t->recompute == o->moe.recompute;
}

// The most of any rank of the transfers first .. end - 1 together.
static struct traffic most_traffic(const struct plan_ranks *plan, const struct transfer *first,
                                   const struct transfer *end, const struct options *o, int ep) {
    struct traffic most = {0, 0};
    for (int rank = 0; rank < plan->ranks; rank++) {
        struct traffic sum = {0, 0};
        for (const struct transfer *t = first; t < end; t++) {
            if (!is_there(t, o)) continue;
            struct traffic part = traffic_of(&plan->loads[rank], t, o, ep);
            sum.in += part.in;
            sum.out += part.out;
        }
        if (sum.in > most.in) most.in = sum.in;
        if (sum.out > most.out) most.out = sum.out;
    }
    return most;
}

static void print_traffic(FILE *file, const char *label, struct traffic t) {
    fprintf(file, "  %-28s %10.2f %12.2f\n", label, t.in / (1 << 20), t.out / (1 << 20));
}

static void print_pass(FILE *file, const struct plan_ranks *plan, const struct transfer *first,
                       const struct transfer *end, const struct options *o, int ep) {
    for (const struct transfer *t = first; t < end; t++) {
        char label[64];
        if (!is_there(t, o)) continue;
        snprintf(label, sizeof label, "  %s", t->name);
        print_traffic(file, label, most_traffic(plan, t, t + 1, o, ep));
    }
    print_traffic(file, first->backward ? "backward" : "forward", most_traffic(plan, first, end, o, ep));
}

static void print_links(FILE *file, const struct plan_ranks *plan, const struct options *o, int ep) {
    bool mok = o->moe.kind == MOE_MOK;
    const struct transfer *first = mok ? mok_transfers : alltoall_transfers, *middle = first;
    const struct transfer *end =
        first + (mok ? sizeof mok_transfers / sizeof *first : sizeof alltoall_transfers / sizeof *first);
    int layers = model_moe_blocks(&o->model);
    if (ep == 1) return;
    while (!middle->backward) middle++;
    fprintf(file, "  %-28s %10s %12s\n", "links, most of any rank, MiB", "in", "out");
    print_pass(file, plan, first, middle, o, ep);
    print_pass(file, plan, middle, end, o, ep);
    struct traffic both = most_traffic(plan, first, end, o, ep);
    char label[64];
    snprintf(label, sizeof label, "both, %d layers, GiB", layers);
    print_traffic(file, label, (struct traffic){both.in * layers / (1 << 10), both.out * layers / (1 << 10)});
}

// ---- printing: memory ----

static void print_rows(FILE *file, const char *label, size_t rows) { fprintf(file, "  %-28s %10zu\n", label, rows); }

// A buffer of the activations takes whole pieces of this many bytes.
static double piece_bytes(double bytes) {
    enum { PIECE = 256 };
    size_t pieces = ((size_t)bytes + PIECE - 1) / PIECE;
    return (double)pieces * PIECE;
}

static void print_symmetric_memory(FILE *file, const struct options *o, int ep) {
    double layers = o->moe.recompute == RECOMPUTE_BLOCK ? 1 : model_moe_blocks(&o->model);
    double tokens = (double)o->batch * o->seq, routes = tokens * o->model.top_k;
    double row = sizeof(real) * (double)o->model.hidden;
    const struct {
        const char *name;
        double bytes;
    } parts[] = {
        {"x of all layers", layers * piece_bytes(tokens * row)},
        {"dy", piece_bytes(tokens * row)},
        {"slots", piece_bytes(routes * row)},
        {"ids and gates of all layers",
         layers * (piece_bytes(routes * sizeof(int32_t)) + piece_bytes(routes * sizeof(accum)))},
        {"gate gradients", piece_bytes(routes * sizeof(accum))},
        {"barrier", piece_bytes((double)mok_header_bytes(ep))},
    };
    double all = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char label[64];
        snprintf(label, sizeof label, "  %s", parts[i].name);
        plan_print_bytes(file, label, parts[i].bytes);
        all += parts[i].bytes;
    }
    plan_print_bytes(file, "symmetric memory of a rank", all);
}

static void print_mok_memory(FILE *file, const struct options *o, const struct parallel *p) {
    struct mok_shape s = shape_of(o, p);
    enum recompute recompute = o->moe.recompute;
    double all = (double)moe_mok_bytes(&o->model, &s, true, recompute);
    double rows = model_kept_rows(&o->model, true, recompute) * (double)s.ring_rows * sizeof(real) *
                  ((double)s.hidden + 2.0 * s.intermediate);
    double tables = model_kept_routes(&o->model, true, recompute) * (double)mok_plan_bytes(&s);
    print_rows(file, "minibatch, rows", (size_t)s.minibatch_rows);
    print_rows(file, "ring, rows", (size_t)s.ring_rows);
    print_rows(file, "room of the table, rows", mok_capacity_rows(&s));
    print_symmetric_memory(file, o, p->ep);
    plan_print_bytes(file, "  x, gate, up of all layers", rows);
    plan_print_bytes(file, "  tables of all layers", tables);
    plan_print_bytes(file, "  shared by the layers", all - rows - tables);
    plan_print_bytes(file, "rings and tables of a rank", all);
}

// ---- printing: all ----

static const char *route_name(enum moe_route route) {
    static const char *const names[] = {
        [ROUTE_LEARNED] = "learned", [ROUTE_BALANCED] = "balanced",
        [ROUTE_W1] = "W1",           [ROUTE_W2] = "W2",
        [ROUTE_W3] = "W3",           [ROUTE_W4] = "W4",
        [ROUTE_W5] = "W5",           [ROUTE_W6] = "W6",
        [ROUTE_W7] = "W7",
    };
    return names[route];
}

static void print_heading(FILE *file, const struct plan_ranks *plan, const struct options *o,
                          const struct parallel *p) {
    fprintf(file, "Experts on %d rank%s: EP %d x DP %d, --moe %s\n", p->ranks, p->ranks == 1 ? "" : "s", p->ep, p->dp,
            o->moe.kind == MOE_MOK ? "mok" : "alltoall");
    fprintf(file, "  One layer and micro-batch in %s, --route %s%s.\n", plan_real_name(), route_name(plan->route),
            o->moe.route == ROUTE_LEARNED ? " (what a router learns is less even)"
            : plan->route == ROUTE_W7     ? " (a burst)"
                                          : "");
    if (plan->groups < p->dp)
        fprintf(file, "  Planned: %d of %d EP groups; the others are alike.\n", plan->groups, p->dp);
}

void plan_ranks_print(FILE *file, const struct options *o, const struct parallel *parallel) {
    struct plan_ranks plan;
    if (model_moe_blocks(&o->model) == 0) return;
    plan_ranks_make(&plan, o, parallel);
    print_heading(file, &plan, o, parallel);
    print_loads(file, &plan, o->moe.kind == MOE_MOK);
    print_links(file, &plan, o, parallel->ep);
    if (o->moe.kind == MOE_MOK) print_mok_memory(file, o, parallel);
    plan_ranks_free(&plan);
}
