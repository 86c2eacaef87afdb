#include "model/plan.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "model/activations.h"

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

    plan->weight_bytes = params.size * sizeof(real);
    plan->master_bytes = params.size * sizeof(accum);
    plan->moment_bytes = 2 * params.size * sizeof(accum);
    plan->gradient_bytes = params.size * sizeof(accum);
    plan->total_bytes = plan->weight_bytes + plan->master_bytes + plan->moment_bytes + plan->gradient_bytes;
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

void plan_make(struct plan *plan, const struct config *c, int batch, int seq) {
    plan_count(plan, c);
    plan->activation_bytes = activations_bytes(c, batch, seq);
    plan->total_bytes += plan->activation_bytes;
    plan->flops_per_token = plan_flops_per_token(c, seq);
    plan->attention_flops_per_token = attention_flops(c, seq);
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

static void print_bytes(FILE *file, const char *label, size_t bytes) {
    if (bytes < (size_t)1 << 30)
        fprintf(file, "  %-28s %10.1f MiB\n", label, (double)bytes / (1 << 20));
    else
        fprintf(file, "  %-28s %10.2f GiB\n", label, (double)bytes / (1 << 30));
}

static void print_flops(FILE *file, const char *label, double flops) {
    char text[16];
    fprintf(file, "  %-28s %10sFLOP\n", label, format(text, flops, 1000, "KMGTPE"));
}

// Largest batch whose activations fit beside the rest, at most limit; 0 if none does.
static int largest_batch(const struct config *c, int seq, size_t room, int limit) {
    int fits = 0, fails = limit + 1;
    while (fails - fits > 1) {
        int middle = fits + (fails - fits) / 2;
        if (activations_bytes(c, middle, seq) <= room)
            fits = middle;
        else
            fails = middle;
    }
    return fits;
}

static void print_verdict(FILE *file, const struct plan *plan, const struct config *c, int batch, int seq) {
    size_t memory = device_memory_bytes(), state = plan->total_bytes - plan->activation_bytes;
    print_bytes(file, "this machine has", memory);
    if (plan->total_bytes <= memory) {
        fprintf(file,
                "  It fits. Not counted: the program and its libraries, data, a checkpoint while it is written.\n");
    } else if (state > memory) {
        fprintf(file, "  It does not fit: weights and optimizer state alone are %.1f times this machine's memory.\n",
                (double)state / (double)memory);
    } else {
        int fits = largest_batch(c, seq, memory - state, batch);
        if (fits)
            fprintf(file, "  It does not fit with --batch %d; --batch %d does.\n", batch, fits);
        else
            fprintf(file, "  It does not fit: one sequence of --seq %d is already too long.\n", seq);
    }
}

static int compare_rows(const void *a, const void *b) {
    size_t x = ((const struct activation_row *)a)->bytes, y = ((const struct activation_row *)b)->bytes;
    return (x < y) - (x > y);
}

void plan_print_activations(FILE *file, const struct config *c, int batch, int seq) {
    struct activation_table table;
    activations_tabulate(&table, c, batch, seq, true);
    qsort(table.rows, (size_t)table.count, sizeof *table.rows, compare_rows);
    fprintf(file, "Activation buffers (kept by a block from forward to backward, or shared by all)\n");
    for (int i = 0; i < table.count; i++) {
        char label[64];
        snprintf(label, sizeof label, "%-20s x %d", table.rows[i].name, table.rows[i].copies);
        print_bytes(file, label, table.rows[i].bytes);
    }
}

void plan_check_memory(const struct config *c, int batch, int seq) {
    struct plan plan;
    plan_make(&plan, c, batch, seq);
    size_t memory = device_memory_bytes();
    if (plan.total_bytes > memory)
        fail_user("memory",
                  "found %.2f GiB on this machine, wanted %.2f GiB; see --plan, lower --batch, --seq or the "
                  "model's sizes",
                  (double)memory / (1 << 30), (double)plan.total_bytes / (1 << 30));
}

void plan_print(FILE *file, const struct config *c, int batch, int seq, int64_t tokens_per_step) {
    struct plan plan;
    plan_make(&plan, c, batch, seq);
    double all = plan.total + plan.mtp;
    double tokens = tokens_per_step ? (double)tokens_per_step : (double)batch * seq;

    fprintf(file, "Parameters\n");
    for (int kind = 0; kind < PARAM_KINDS; kind++)
        if (plan.by_kind[kind] > 0) print_count(file, param_kind_names[kind], plan.by_kind[kind], all);
    print_count(file, "all", all, 0);
    if (plan.mtp > 0) print_count(file, "  in MTP modules", plan.mtp, all);
    print_count(file, "  in the model itself", plan.total, all);
    print_count(file, "active for a token", plan.active, all);
    print_count(file, "  without the embedding", plan.active_without_embedding, all);

    fprintf(file, "Memory\n");
    print_bytes(file, "weights", plan.weight_bytes);
    print_bytes(file, "master weights", plan.master_bytes);
    print_bytes(file, "moments", plan.moment_bytes);
    print_bytes(file, "gradients", plan.gradient_bytes);
    char label[64];
    snprintf(label, sizeof label, "activations of %d x %d", batch, seq);
    print_bytes(file, label, plan.activation_bytes);
    print_bytes(file, "all", plan.total_bytes);
    print_verdict(file, &plan, c, batch, seq);

    fprintf(file, "Work (training, causal attention, nothing counted twice)\n");
    print_flops(file, "per token", plan.flops_per_token);
    fprintf(file, "  %-28s %9.1f%%\n", "  of it attention scores",
            100 * plan.attention_flops_per_token / plan.flops_per_token);
    snprintf(label, sizeof label, "per step of %.0f tokens", tokens);
    print_flops(file, label, plan.flops_per_token * tokens);
}
