#include "model/plan.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "model/activations.h"
#include "model/moe.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/share.h"
#include "model/sharding.h"

// ---- counting ----

void plan_count(struct plan *plan, const struct config *c) {
    memset(plan, 0, sizeof *plan);
    struct params params;
    params_build(&params, c);
    double embedding = 0, experts = 0; // routed experts outside MTP
    for (int i = 0; i < params.count; i++) {
        const struct param *p = &params.list[i];
        double size = (double)param_size(p);
        plan->by_kind[p->kind] += size;
        if (p->block >= c->layers) {
            plan->mtp += size;
            continue;
        }
        plan->total += size;
        if (p->kind == PARAM_EMBEDDING) embedding += size;
        if (p->kind == PARAM_EXPERT) experts += size;
    }
    double idle = c->experts ? experts * (c->experts - c->top_k) / c->experts : 0;
    plan->active = plan->total - idle;
    plan->active_without_embedding = plan->active - embedding;
    params_free(&params);
}

// Multiply-adds of one token with the matrices of one layer's attention.
static double attention_weights(const struct config *c) {
    double h = c->hidden, n = c->heads, query = n * config_query_dim(c);
    double q = c->q_rank ? h * c->q_rank + c->q_rank * query : h * query;
    double kv = h * (c->kv_rank + c->rope_dim) + n * (c->nope_dim + c->value_dim) * c->kv_rank;
    return q + kv + n * c->value_dim * h;
}

static double moe_weights(const struct config *c) {
    double h = c->hidden;
    return 3 * h * c->expert_intermediate * ((double)c->top_k + c->shared_experts) + h * c->experts;
}

// Scores and weighted values; a token sees (seq + 1) / 2 tokens on average.
static double attention_flops(const struct config *c, int seq) {
    double per_layer = 6.0 * c->heads * (config_query_dim(c) + c->value_dim) * (seq + 1.0) / 2;
    return config_blocks(c) * per_layer;
}

double plan_flops_per_token(const struct config *c, int seq) {
    double h = c->hidden, head = h * c->vocab;
    int moe_layers = c->layers - c->dense_layers;
    double weights = c->layers * attention_weights(c) + c->dense_layers * 3 * h * c->intermediate + head;
    if (moe_layers > 0) weights += moe_layers * moe_weights(c);
    if (c->mtp_depth > 0) weights += c->mtp_depth * (2 * h * h + attention_weights(c) + moe_weights(c) + head);
    return 6 * weights + attention_flops(c, seq);
}

static struct activation_use use_of(const struct options *o, const struct parallel *p, int batch) {
    return (struct activation_use){batch, o->seq, true, o->moe.recompute, moe_header_bytes(&o->model, &o->moe, p->ep)};
}

// What grows with the micro-batch.
static void count_batch(struct plan *plan, const struct options *o, const struct parallel *p, int batch) {
    const struct config *c = &o->model;
    moe_check(c, &o->moe, p->ep, batch * o->seq);
    struct activation_table table;
    activations_tabulate(&table, c, use_of(o, p, batch));
    plan->activation_bytes = table.bytes;
    plan->symmetric_bytes = table.symmetric_bytes;
    plan->moe_bytes = model_bias_size(c) * (sizeof(accum) + sizeof(int64_t)); // selection bias, counts
    if (model_moe_blocks(c) > 0 && o->moe.kind == MOE_MOK) {
        struct mok_shape shape = moe_mok_shape(c, p->ep, batch * o->seq, &o->moe);
        plan->moe_bytes += moe_mok_bytes(c, &shape, true, o->moe.recompute);
    } else {
        plan->moe_bytes += moe_alltoall_bytes(c, p->ep, batch, o->seq, true, o->moe.recompute);
    }
    struct scratch_sizes scratch = model_scratch_sizes(c, batch, o->seq, true);
    plan->scratch_bytes = device_scratch_bytes(&scratch);
}

static size_t batch_bytes(const struct plan *plan) {
    return plan->activation_bytes + plan->symmetric_bytes + plan->moe_bytes + plan->scratch_bytes;
}

// What the last rank has of the model and of the optimizer's state.
static void count_state(struct plan *plan, const struct config *c, const struct parallel *p) {
    struct parallel last = {p->ranks - 1, p->ranks, p->ep, p->ep - 1, p->dp, p->dp - 1, NULL, NULL, NULL};
    struct expert_range experts = parallel_experts(&last, c->experts);
    struct params params;
    struct sharding sharding;
    params_build_share(&params, c, experts);
    sharding_build(&sharding, &params, &last);
    plan->experts = experts.end - experts.first;
    plan->weight_bytes = params.size * sizeof(real);
    plan->gradient_bytes = params.size * sizeof(accum);
    plan->master_bytes = sharding.size * sizeof(accum);
    plan->moment_bytes = 2 * sharding.size * sizeof(accum);
    plan->library_bytes = device_library_bytes(p->ranks);
    sharding_free(&sharding);
    params_free(&params);
}

static size_t state_bytes(const struct plan *plan) {
    return plan->weight_bytes + plan->gradient_bytes + plan->master_bytes + plan->moment_bytes + plan->library_bytes;
}

void plan_make(struct plan *plan, const struct options *o, const struct parallel *parallel) {
    const struct config *c = &o->model;
    plan_count(plan, c);
    count_state(plan, c, parallel);
    count_batch(plan, o, parallel, o->batch);
    plan->total_bytes = state_bytes(plan) + batch_bytes(plan);
    plan->flops_per_token = plan_flops_per_token(c, o->seq);
    plan->attention_flops_per_token = attention_flops(c, o->seq);
}

// ---- printing: numbers ----

// value in units of base, base^2, ... with the letter of the unit behind it.
static const char *format(char text[16], double value, double base, const char *units) {
    int unit = -1;
    while (value >= 999.995 && units[unit + 1]) {
        value /= base;
        unit++;
    }
    if (unit < 0)
        snprintf(text, 16, "%.0f", value);
    else
        snprintf(text, 16, "%.2f%c", value, units[unit]);
    return text;
}

const char *plan_format_count(char text[16], double count) { return format(text, count, 1000, "KMBT"); }

static void print_count(FILE *file, const char *label, double count, double whole) {
    char text[16];
    fprintf(file, "  %-28s %10s", label, plan_format_count(text, count));
    if (whole > 0) fprintf(file, "  %5.1f%%", 100 * count / whole);
    fputc('\n', file);
}

void plan_print_bytes(FILE *file, const char *label, double bytes) {
    if (bytes < 1 << 20)
        fprintf(file, "  %-28s %10.1f KiB\n", label, bytes / (1 << 10));
    else if (bytes < 1 << 30)
        fprintf(file, "  %-28s %10.1f MiB\n", label, bytes / (1 << 20));
    else
        fprintf(file, "  %-28s %10.2f GiB\n", label, bytes / (1 << 30));
}

static void print_flops(FILE *file, const char *label, double flops) {
    char text[16];
    fprintf(file, "  %-28s %10sFLOP\n", label, format(text, flops, 1000, "KMGTPE"));
}

const char *plan_real_name(void) {
    return sizeof(real) == 2 ? "BF16" : sizeof(real) == sizeof(float) ? "FP32" : "FP64";
}

// ---- does it fit? ----

// The memory that a plan is compared with.
struct room {
    size_t bytes; // 0: not known
    int ranks;    // that share it
    const char *name, *holder;
};

static struct room room_of(const struct options *o, int ranks_here) {
    if (o->memory > 0) return (struct room){(size_t)(o->memory * (1 << 30)), 1, "--memory", "--memory says"};
    if (!device_memory_is_shared()) return (struct room){device_memory_bytes(), 1, "this GPU", "this GPU has"};
    return (struct room){device_memory_bytes(), ranks_here ? ranks_here : 1, "this machine", "this machine has"};
}

static bool fits(const struct options *o, const struct parallel *p, const struct room *room) {
    struct plan plan;
    count_state(&plan, &o->model, p);
    count_batch(&plan, o, p, o->batch);
    return state_bytes(&plan) + batch_bytes(&plan) <= room->bytes / (size_t)room->ranks;
}

// The largest --batch below the one that does not fit; 0 if none does.
static int largest_batch(struct options o, const struct parallel *p, const struct room *room) {
    int good = 0, bad = o.batch;
    while (bad - good > 1) {
        o.batch = good + (bad - good) / 2;
        if (fits(&o, p, room))
            good = o.batch;
        else
            bad = o.batch;
    }
    return good;
}

// The same for --layers, of which the dense ones stay.
static int largest_layers(struct options o, const struct parallel *p, const struct room *room) {
    int none = o.model.dense_layers > 0 ? o.model.dense_layers - 1 : 0, good = none, bad = o.model.layers;
    while (bad - good > 1) {
        o.model.layers = good + (bad - good) / 2;
        if (fits(&o, p, room))
            good = o.model.layers;
        else
            bad = o.model.layers;
    }
    return good > none ? good : 0;
}

static void print_ways_out(FILE *file, const struct options *o, const struct parallel *p, const struct room *room) {
    static const char *const names[] = {"none", "moe", "block"};
    struct options less = *o;
    int layers = largest_layers(less, p, room);
    for (int level = o->moe.recompute + 1; level <= RECOMPUTE_BLOCK; level++) {
        less.moe.recompute = (enum recompute)level;
        if (!fits(&less, p, room)) continue;
        fprintf(file, "  With --recompute %s it fits.\n", names[level]);
        break;
    }
    if (layers) fprintf(file, "  The largest --layers that fits: %d\n", layers);
}

static void print_misfit(FILE *file, const struct plan *plan, const struct options *o, const struct parallel *p,
                         const struct room *room) {
    size_t memory = room->bytes / (size_t)room->ranks, state = state_bytes(plan);
    int batch = state > memory ? 0 : largest_batch(*o, p, room);
    if (state > memory)
        fprintf(file, "  It does not fit: weights and optimizer state alone are %.1f times as much.\n",
                (double)state * room->ranks / (double)room->bytes);
    else if (batch)
        fprintf(file, "  It does not fit with --batch %d; --batch %d does.\n", o->batch, batch);
    else
        fprintf(file, "  It does not fit: one sequence of --seq %d is already too long.\n", o->seq);
    print_ways_out(file, o, p, room);
}

// Buffers that grow with the rows that arrive.
static bool moe_grows(const struct options *o, const struct parallel *p) {
    return model_moe_blocks(&o->model) > 0 && o->moe.kind == MOE_ALLTOALL && p->ep > 1;
}

static void print_verdict(FILE *file, const struct plan *plan, const struct options *o, const struct parallel *p,
                          int ranks_here) {
    struct room room = room_of(o, ranks_here);
    char label[64];
    snprintf(label, sizeof label, "all of the %d ranks here", room.ranks);
    if (room.ranks > 1) plan_print_bytes(file, label, (double)plan->total_bytes * room.ranks);
    if (o->memory > 0 && sizeof(real) != 2)
        fprintf(file, "  This program computes in %s. Plans for GPUs come from one that is built for them.\n",
                plan_real_name());
    if (room.bytes == 0) {
        fprintf(file, "  What memory a rank has is not known here: say it by --memory.\n");
        return;
    }
    plan_print_bytes(file, room.holder, (double)room.bytes);
    if (!ranks_here && o->memory == 0)
        fprintf(file, "  The %d rank%s of --ranks %s not here: one of them is compared with %s.\n", p->ranks,
                p->ranks == 1 ? "" : "s", p->ranks == 1 ? "is" : "are", room.name);
    if (plan->total_bytes > room.bytes / (size_t)room.ranks)
        print_misfit(file, plan, o, p, &room);
    else if (device_memory_is_shared())
        fprintf(file,
                "  It fits. Not counted: the program and its libraries, data, a checkpoint while it is written.\n");
    else
        fprintf(file, "  It fits.%s\n", moe_grows(o, p) ? " Not counted: what routes take that are less even." : "");
}

void plan_check_memory(const struct options *o, const struct parallel *parallel, int ranks_here) {
    struct plan plan;
    struct room room = room_of(o, ranks_here);
    const double gib = 1 << 30;
    plan_make(&plan, o, parallel);
    if (room.bytes == 0 || plan.total_bytes <= room.bytes / (size_t)room.ranks) return;
    fail_user(
        "memory",
        "found %.2f GiB (%s), wanted %.2f GiB for %d rank%s; see --plan, lower --batch, --seq or the model's sizes, "
        "or try --recompute%s",
        (double)room.bytes / gib, room.name, (double)plan.total_bytes * room.ranks / gib, room.ranks,
        room.ranks == 1 ? "" : "s", room.ranks == 1 ? "" : ", or start fewer ranks here");
}

void plan_print_used(FILE *file, size_t planned, size_t used) {
    const double gib = 1 << 30;
    if (used == 0) return;
    fprintf(file, "memory: planned %.2f GiB, used %.2f GiB (%.1f %%)\n", (double)planned / gib, (double)used / gib,
            100 * (double)used / (double)planned);
}

// ---- printing: all ----

static int compare_rows(const void *a, const void *b) {
    size_t x = ((const struct activation_row *)a)->bytes, y = ((const struct activation_row *)b)->bytes;
    return (x < y) - (x > y);
}

void plan_print_activations(FILE *file, const struct options *o, const struct parallel *parallel) {
    struct activation_table table;
    activations_tabulate(&table, &o->model, use_of(o, parallel, o->batch));
    qsort(table.rows, (size_t)table.count, sizeof *table.rows, compare_rows);
    fprintf(file, "Activation buffers of a rank (kept by a block from forward to backward, or shared by all)\n");
    for (int i = 0; i < table.count; i++) {
        char label[64];
        snprintf(label, sizeof label, "%-20s x %d", table.rows[i].name, table.rows[i].copies);
        plan_print_bytes(file, label, (double)table.rows[i].bytes);
    }
}

static void print_parameters(FILE *file, const struct plan *plan) {
    double all = plan->total + plan->mtp;
    fprintf(file, "Parameters\n");
    for (int kind = 0; kind < PARAM_KINDS; kind++)
        if (plan->by_kind[kind] > 0) print_count(file, param_kind_names[kind], plan->by_kind[kind], all);
    print_count(file, "all", all, 0);
    if (plan->mtp > 0) print_count(file, "  in MTP modules", plan->mtp, all);
    print_count(file, "  in the model itself", plan->total, all);
    print_count(file, "active for a token", plan->active, all);
    print_count(file, "  without the embedding", plan->active_without_embedding, all);
}

static void print_memory(FILE *file, const struct plan *plan, const struct options *o, const struct parallel *p) {
    char label[64];
    fprintf(file, "Memory");
    if (p->ranks > 1) fprintf(file, " of one rank of %d", p->ranks);
    if (p->ep > 1) fprintf(file, ", with %d of %d experts", plan->experts, o->model.experts);
    fputc('\n', file);
    plan_print_bytes(file, "weights", (double)plan->weight_bytes);
    plan_print_bytes(file, "gradients", (double)plan->gradient_bytes);
    plan_print_bytes(file, p->ranks > 1 ? "master weights, its shard" : "master weights", (double)plan->master_bytes);
    plan_print_bytes(file, p->ranks > 1 ? "moments, its shard" : "moments", (double)plan->moment_bytes);
    snprintf(label, sizeof label, "activations of %d x %d", o->batch, o->seq);
    plan_print_bytes(file, label, (double)plan->activation_bytes);
    if (plan->symmetric_bytes) plan_print_bytes(file, "symmetric memory", (double)plan->symmetric_bytes);
    if (plan->moe_bytes)
        plan_print_bytes(file, moe_grows(o, p) ? "MoE layers' own, 1/8 spare" : "MoE layers' own",
                         (double)plan->moe_bytes);
    if (plan->scratch_bytes) plan_print_bytes(file, "scratch of operations", (double)plan->scratch_bytes);
    if (plan->library_bytes) plan_print_bytes(file, "driver and libraries, about", (double)plan->library_bytes);
    plan_print_bytes(file, "all", (double)plan->total_bytes);
}

static void print_work(FILE *file, const struct plan *plan, const struct options *o, const struct parallel *p) {
    int64_t tokens = o->tokens_per_step ? o->tokens_per_step : (int64_t)o->batch * o->seq * p->ranks;
    struct share share = share_of(tokens / o->seq, p, o->batch);
    char label[64];
    fprintf(file, "Work (training, causal attention, nothing counted twice)\n");
    print_flops(file, "per token", plan->flops_per_token);
    fprintf(file, "  %-28s %9.1f%%\n", "  of it attention scores",
            100 * plan->attention_flops_per_token / plan->flops_per_token);
    snprintf(label, sizeof label, "per step of %lld tokens", (long long)tokens);
    print_flops(file, label, plan->flops_per_token * (double)tokens);
    if (p->ranks > 1) print_flops(file, "  of it on each rank", plan->flops_per_token * (double)tokens / p->ranks);
    fprintf(file, "  %-28s %10lld\n", "micro-batches of a step", (long long)share.rounds);
}

void plan_print(FILE *file, const struct options *o, const struct parallel *parallel, int ranks_here) {
    struct plan plan;
    plan_make(&plan, o, parallel);
    print_parameters(file, &plan);
    print_memory(file, &plan, o, parallel);
    print_verdict(file, &plan, o, parallel, ranks_here);
    print_work(file, &plan, o, parallel);
}
