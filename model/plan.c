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

// What grows with the micro-batch.
static void count_batch(struct plan *plan, const struct options *o, const struct parallel *p, int batch) {
    const struct config *c = &o->model;
    struct activation_table table;
    activations_tabulate(&table, c, batch, o->seq, true, moe_header_bytes(c, &o->moe, p->ep));
    plan->activation_bytes = table.bytes;
    plan->symmetric_bytes = table.symmetric_bytes;
    plan->moe_bytes = model_bias_size(c) * (sizeof(accum) + sizeof(int64_t)); // selection bias, counts
    if (model_moe_blocks(c) > 0 && o->moe.kind == MOE_MOK) {
        struct mok_shape shape = moe_mok_shape(c, p->ep, batch * o->seq, &o->moe);
        plan->moe_bytes += moe_mok_bytes(c, &shape, true);
    } else {
        plan->moe_bytes += moe_alltoall_bytes(c, p->ep, batch, o->seq, true);
    }
}

static size_t batch_bytes(const struct plan *plan) {
    return plan->activation_bytes + plan->symmetric_bytes + plan->moe_bytes;
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
    sharding_free(&sharding);
    params_free(&params);
}

static size_t state_bytes(const struct plan *plan) {
    return plan->weight_bytes + plan->gradient_bytes + plan->master_bytes + plan->moment_bytes;
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

// ---- printing ----

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

// Largest batch whose memory fits into the room beside the state, smaller than that of the options; 0 if none does.
static int largest_batch(const struct options *o, const struct parallel *p, size_t room) {
    int fits = 0, fails = o->batch;
    while (fails - fits > 1) {
        int middle = fits + (fails - fits) / 2;
        struct plan plan;
        count_batch(&plan, o, p, middle);
        if (batch_bytes(&plan) <= room)
            fits = middle;
        else
            fails = middle;
    }
    return fits;
}

static void print_verdict(FILE *file, const struct plan *plan, const struct options *o, const struct parallel *p,
                          int ranks_here) {
    size_t memory = device_memory_bytes(), here = ranks_here ? (size_t)ranks_here : 1, state = state_bytes(plan);
    char label[64];
    snprintf(label, sizeof label, "all of the %zu ranks here", here);
    if (here > 1) plan_print_bytes(file, label, (double)plan->total_bytes * (double)here);
    plan_print_bytes(file, "this machine has", (double)memory);
    if (!ranks_here)
        fprintf(file, "  The %d rank%s of --ranks %s not here: one of them is compared with this machine.\n", p->ranks,
                p->ranks == 1 ? "" : "s", p->ranks == 1 ? "is" : "are");
    if (plan->total_bytes <= memory / here) {
        fprintf(file,
                "  It fits. Not counted: the program and its libraries, data, a checkpoint while it is written.\n");
    } else if (state > memory / here) {
        fprintf(file, "  It does not fit: weights and optimizer state alone are %.1f times this machine's memory.\n",
                (double)state * (double)here / (double)memory);
    } else {
        int fits = largest_batch(o, p, memory / here - state);
        if (fits)
            fprintf(file, "  It does not fit with --batch %d; --batch %d does.\n", o->batch, fits);
        else
            fprintf(file, "  It does not fit: one sequence of --seq %d is already too long.\n", o->seq);
    }
}

static int compare_rows(const void *a, const void *b) {
    size_t x = ((const struct activation_row *)a)->bytes, y = ((const struct activation_row *)b)->bytes;
    return (x < y) - (x > y);
}

void plan_print_activations(FILE *file, const struct options *o, const struct parallel *parallel) {
    struct activation_table table;
    activations_tabulate(&table, &o->model, o->batch, o->seq, true, moe_header_bytes(&o->model, &o->moe, parallel->ep));
    qsort(table.rows, (size_t)table.count, sizeof *table.rows, compare_rows);
    fprintf(file, "Activation buffers of a rank (kept by a block from forward to backward, or shared by all)\n");
    for (int i = 0; i < table.count; i++) {
        char label[64];
        snprintf(label, sizeof label, "%-20s x %d", table.rows[i].name, table.rows[i].copies);
        plan_print_bytes(file, label, (double)table.rows[i].bytes);
    }
}

void plan_check_memory(const struct options *o, const struct parallel *parallel, int ranks_here) {
    struct plan plan;
    plan_make(&plan, o, parallel);
    size_t memory = device_memory_bytes(), here = (size_t)ranks_here;
    if (plan.total_bytes > memory / here)
        fail_user(
            "memory",
            "found %.2f GiB on this machine, wanted %.2f GiB for %d rank%s; see --plan, lower --batch, --seq or the "
            "model's sizes%s",
            (double)memory / (1 << 30), (double)plan.total_bytes * ranks_here / (1 << 30), ranks_here,
            ranks_here == 1 ? "" : "s", ranks_here == 1 ? "" : ", or start fewer ranks on it");
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
    bool grows = o->moe.kind == MOE_ALLTOALL && p->ep > 1; // with the rows that arrive
    if (plan->moe_bytes)
        plan_print_bytes(file, grows ? "MoE layers' own, balanced" : "MoE layers' own", (double)plan->moe_bytes);
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
