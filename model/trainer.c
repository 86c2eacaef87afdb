#include "model/trainer.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "model/schedule.h"

static int window_length(const struct options *o) { return o->seq + 1 + o->model.mtp_depth; }

int64_t trainer_sequences_per_step(const struct options *o) {
    return o->tokens_per_step ? o->tokens_per_step / o->seq : o->batch;
}

// One tensor at a time, so that host memory never holds the model a second time.
static void initialise_weights(struct trainer *t) {
    const struct params *p = &t->model.params;
    size_t largest = params_largest(p);
    float *file = malloc(sizeof *file * largest), *memory = malloc(sizeof *memory * largest);
    if (!file || !memory) fail_internal("weights", "found no memory for two tensors of %zu floats", largest);
    for (int i = 0; i < p->count; i++) {
        const struct param *tensor = &p->list[i];
        params_init(file, tensor, t->options.model.init_std, t->options.seed);
        params_import(memory, file, tensor);
        device_real_from_float(t->model.weights + tensor->offset, memory, param_size(tensor));
        device_accum_from_float(t->master + tensor->offset, memory, param_size(tensor));
    }
    free(file);
    free(memory);
}

void trainer_open(struct trainer *t, const struct options *o, const struct data *data) {
    *t = (struct trainer){.options = *o, .data = data};
    model_open(&t->model, &o->model, o->batch, o->seq, true);
    size_t bytes = sizeof(accum) * t->model.params.size;
    t->master = device_alloc(bytes);
    t->m = device_alloc(bytes);
    t->v = device_alloc(bytes);
    t->prefetch = prefetch_open(data, (size_t)window_length(o), trainer_sequences_per_step(o));
    size_t tokens = (size_t)o->batch * (size_t)window_length(o);
    t->eval_window = malloc(sizeof *t->eval_window * tokens);
    if (!t->eval_window) fail_internal("data", "found no memory for %zu tokens to evaluate", tokens);
    initialise_weights(t);
}

void trainer_close(struct trainer *t) {
    prefetch_close(t->prefetch);
    free(t->eval_window);
    device_free(t->v);
    device_free(t->m);
    device_free(t->master);
    model_close(&t->model);
    *t = (struct trainer){0};
}

void trainer_restore(struct trainer *t, const char *folder) {
    struct checkpoint c = trainer_checkpoint(t);
    checkpoint_load_progress(folder, &c);
    cJSON_Delete(c.options);
    checkpoint_load_state(folder, &c);
    t->step = c.step;
    t->sequences = c.sequences;
    t->tokens = c.tokens;
    printf("going on from %s\n", folder);
}

void trainer_start_from(struct trainer *t, const char *folder) {
    struct checkpoint c = trainer_checkpoint(t);
    checkpoint_load_weights(folder, &c);
    printf("starting from the weights in %s\n", folder);
}

static void report_losses(struct trainer *t, struct step_report *report, struct losses sums,
                          const struct step_totals *totals) {
    const struct config *c = &t->options.model;
    report->loss = sums.cross_entropy[0] / (double)totals->targets[0];
    for (int k = 1; k <= c->mtp_depth; k++)
        report->mtp += sums.cross_entropy[k] / (double)totals->targets[k] / c->mtp_depth;
    report->balance = c->balance_alpha * sums.balance / (double)totals->sequences;
}

static void report_loads(const struct trainer *t, struct step_report *report) {
    struct moe_load *loads = trainer_loads(t);
    for (int i = 0; i < model_moe_blocks(&t->options.model); i++) {
        if (loads[i].max_over_mean > report->load_max_over_mean) report->load_max_over_mean = loads[i].max_over_mean;
        report->dead += loads[i].dead;
    }
    free(loads);
}

void trainer_accumulate(struct trainer *t, struct step_report *report) {
    const struct options *o = &t->options;
    const struct config *c = &o->model;
    int64_t count = trainer_sequences_per_step(o);
    int length = window_length(o);
    t->window = prefetch_take(t->prefetch, t->sequences, &report->data_seconds);

    struct step_totals totals = {0};
    model_add_totals(&totals, c, (struct batch){t->window, (int)count, o->seq});
    device_zero(t->model.grads, sizeof(accum) * t->model.params.size);
    device_zero(t->model.counts, sizeof(int64_t) * model_bias_size(c));
    struct losses sums = {0};
    for (int64_t first = 0; first < count; first += o->batch) {
        struct batch batch = {t->window + (size_t)first * (size_t)length, o->batch, o->seq};
        struct losses part = model_gradient(&t->model, batch, &totals);
        for (int k = 0; k <= c->mtp_depth; k++) sums.cross_entropy[k] += part.cross_entropy[k];
        sums.balance += part.balance;
    }
    report_losses(t, report, sums, &totals);
    report_loads(t, report);
}

// Matrices decay, norms do not; one call per stretch of neighbours that are treated alike.
static void update_weights(struct trainer *t, struct adamw a, double weight_decay) {
    const struct params *p = &t->model.params;
    for (int first = 0, last; first < p->count; first = last) {
        bool decay = p->list[first].decay;
        for (last = first + 1; last < p->count && p->list[last].decay == decay;) last++;
        size_t begin = p->list[first].offset, end = last < p->count ? p->list[last].offset : p->size;
        a.weight_decay = decay ? weight_decay : 0;
        adamw_update(t->master + begin, t->m + begin, t->v + begin, t->model.weights + begin, t->model.grads + begin,
                     end - begin, a);
    }
}

void trainer_update(struct trainer *t, struct step_report *report) {
    const struct options *o = &t->options;
    const struct config *c = &o->model;
    report->step = t->step + 1;
    report->norm = sqrt(device_sum_squares(t->model.grads, t->model.params.size));
    report->lr = schedule_lr(o, t->step);
    report->finite = isfinite(report->norm) && isfinite(report->loss);
    if (!report->finite) return;

    double clip = o->clip > 0 && report->norm > o->clip ? o->clip / report->norm : 1;
    update_weights(t, (struct adamw){report->lr, o->beta1, o->beta2, o->adam_eps, 0, clip, t->step + 1},
                   o->weight_decay);
    for (int block = c->dense_layers; block < config_blocks(c); block++)
        router_update_bias(model_bias(&t->model, block), model_counts(&t->model, block), c->experts, c->bias_rate);
    t->step++;
    t->sequences += trainer_sequences_per_step(o);
    t->tokens += trainer_sequences_per_step(o) * o->seq;
}

bool trainer_is_finite(const struct trainer *t) {
    return isfinite(device_sum_squares(t->master, t->model.params.size));
}

struct step_report trainer_step(struct trainer *t) {
    struct step_report report = {0};
    trainer_accumulate(t, &report);
    trainer_update(t, &report);
    return report;
}

double trainer_evaluate(struct trainer *t, int sequences) {
    const struct options *o = &t->options;
    size_t length = (size_t)window_length(o);
    struct step_totals totals = {0};
    double sum = 0;
    for (int first = 0; first < sequences; first += o->batch) {
        int count = sequences - first < o->batch ? sequences - first : o->batch;
        for (int b = 0; b < count; b++)
            data_read_or_fail(t->data, DATA_EVAL, (uint64_t)first + (uint64_t)b, t->eval_window + (size_t)b * length);
        struct batch batch = {t->eval_window, count, o->seq};
        model_add_totals(&totals, &o->model, batch);
        sum += model_evaluate(&t->model, batch).cross_entropy[0];
    }
    return sum / (double)totals.targets[0];
}

static struct moe_load load_of(const int64_t *counts, const accum *bias, int E) {
    struct moe_load load = {.min_over_mean = INFINITY, .bias_min = INFINITY, .bias_max = -INFINITY};
    double total = 0;
    for (int e = 0; e < E; e++) total += (double)counts[e];
    double mean = total > 0 ? total / E : 1;
    for (int e = 0; e < E; e++) {
        double ratio = (double)counts[e] / mean, share = ratio / E;
        load.max_over_mean = fmax(load.max_over_mean, ratio);
        load.min_over_mean = fmin(load.min_over_mean, ratio);
        if (share > 0) load.entropy -= share * log(share) / log(E > 1 ? E : 2);
        load.dead += counts[e] == 0;
        load.bias_min = fmin(load.bias_min, (double)bias[e]);
        load.bias_max = fmax(load.bias_max, (double)bias[e]);
    }
    return load;
}

struct moe_load *trainer_loads(const struct trainer *t) {
    const struct config *c = &t->options.model;
    size_t blocks = (size_t)model_moe_blocks(c), size = model_bias_size(c);
    struct moe_load *loads = malloc(sizeof *loads * (blocks + 1));
    int64_t *counts = malloc(sizeof *counts * (size + 1));
    accum *bias = malloc(sizeof *bias * (size + 1));
    if (!loads || !counts || !bias) fail_internal("expert load", "found no memory for %zu experts", size);
    device_copy_out(counts, t->model.counts, sizeof *counts * size);
    device_copy_out(bias, t->model.bias, sizeof *bias * size);
    for (size_t i = 0; i < blocks; i++)
        loads[i] = load_of(counts + i * (size_t)c->experts, bias + i * (size_t)c->experts, c->experts);
    free(counts);
    free(bias);
    return loads;
}

struct checkpoint trainer_checkpoint(struct trainer *t) {
    return (struct checkpoint){.config = &t->model.config,
                               .params = &t->model.params,
                               .weights = t->model.weights,
                               .master = t->master,
                               .m = t->m,
                               .v = t->v,
                               .bias = t->model.bias,
                               .step = t->step,
                               .sequences = t->sequences,
                               .tokens = t->tokens,
                               .seed = t->options.seed};
}
