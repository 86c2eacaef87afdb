#include "model/trainer.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "model/leader.h"
#include "model/schedule.h"
#include "model/trace.h"

static int window_length(const struct options *o) { return o->seq + 1 + o->model.mtp_depth; }

int64_t trainer_sequences_per_step(const struct options *o) { return o->tokens_per_step / o->seq; }

// One tensor at a time, so that host memory never holds the model a second time.
static void initialise_weights(struct trainer *t) {
    const struct params *p = &t->model.params;
    size_t largest = params_largest(p);
    float *file = malloc(sizeof *file * largest), *memory = malloc(sizeof *memory * largest);
    if (!file || !memory) fail_internal("weights", "found no memory for two tensors of %zu floats", largest);
    for (int i = 0; i < p->count; i++) {
        const struct param *tensor = &p->list[i];
        if (tensor->offset == PARAM_ELSEWHERE) continue;
        params_init(file, tensor, t->options.model.init_std, t->options.seed);
        params_import(memory, file, tensor);
        device_real_from_float(t->model.weights + tensor->offset, memory, param_size(tensor));
        struct piece piece = sharding_piece(&t->sharding, tensor);
        device_accum_from_float(t->master + piece.state, memory + piece.first, piece.count);
    }
    free(file);
    free(memory);
}

void trainer_open(struct trainer *t, const struct options *o, const struct data *data,
                  const struct tokenizer *tokenizer, const struct parallel *parallel) {
    *t = (struct trainer){.options = *o,
                          .data = data,
                          .tokenizer = tokenizer,
                          .identity = data_identity(data),
                          .parallel = parallel ? parallel : &parallel_alone};
    model_open(&t->model, &o->model, o->batch, o->seq, true, t->parallel, &o->moe);
    t->model.seed = o->seed;
    sharding_build(&t->sharding, &t->model.params, t->parallel);
    size_t bytes = sizeof(accum) * t->sharding.size;
    t->master = device_alloc(bytes);
    t->m = device_alloc(bytes);
    t->v = device_alloc(bytes);
    int64_t sequences = trainer_sequences_per_step(o);
    t->share = share_of(sequences, t->parallel, o->batch);
    t->prefetch = prefetch_open(data, (size_t)window_length(o), t->share.count, sequences);
    initialise_weights(t);
}

void trainer_close(struct trainer *t) {
    prefetch_close(t->prefetch);
    device_free(t->v);
    device_free(t->m);
    device_free(t->master);
    sharding_free(&t->sharding);
    model_close(&t->model);
    cJSON_Delete(t->identity);
    *t = (struct trainer){0};
}

static void check_same_data(const struct trainer *t, const struct cJSON *before) {
    char difference[512];
    if (data_identity_equal(before, t->identity, difference, sizeof difference)) return;
    if (!t->options.override)
        fail_user("--data",
                  "%s; give the data that the run began with, go on with this one by --override, or start a "
                  "new run with another --out",
                  difference);
    printf("other training data than before: %s\n", difference);
}

void trainer_restore(struct trainer *t, const char *folder) {
    struct checkpoint c = trainer_checkpoint(t);
    checkpoint_load_progress(folder, &c);
    leader_begin(t->parallel->world);
    check_same_data(t, c.data);
    leader_end(t->parallel->world);
    cJSON_Delete(c.data);
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

// ---- sums over the ranks ----

// What the losses of the step are divided by, on all ranks, before any of them is computed.
static struct step_totals step_totals(const struct trainer *t) {
    const struct options *o = &t->options;
    struct step_totals totals = {0};
    model_add_totals(&totals, &o->model, (struct batch){t->window, (int)t->share.count, o->seq, t->share.first});
    comm_sum_int64(t->parallel->world, totals.targets, MTP_MAX + 1);
    comm_sum_int64(t->parallel->world, &totals.sequences, 1);
    return totals;
}

static void sum_losses(const struct trainer *t, struct losses *sums) {
    comm_sum_double(t->parallel->world, sums->cross_entropy, MTP_MAX + 1);
    comm_sum_double(t->parallel->world, &sums->balance, 1);
}

static void sum_counts(struct trainer *t) {
    size_t size = model_bias_size(&t->options.model);
    if (t->parallel->ranks == 1 || size == 0) return;
    int64_t *counts = malloc(sizeof *counts * size);
    if (!counts) fail_internal("expert load", "found no memory for %zu counts", size);
    device_copy_out(counts, t->model.counts, sizeof *counts * size);
    comm_sum_int64(t->parallel->world, counts, size);
    device_copy_in(t->model.counts, counts, sizeof *counts * size);
    free(counts);
}

// Dense gradients over all ranks. An expert's are summed over its replicas only: the tokens of all ranks of its group are
// in them already.
static void sum_gradients(struct trainer *t) {
    comm_reduce_scatter(t->parallel->world, t->model.grads, t->sharding.dense_offsets);
    comm_reduce_scatter(t->parallel->replicas, t->model.grads, t->sharding.expert_offsets);
}

static double shard_squares(const accum *values, const struct shard *s) {
    return device_sum_squares(values + s->begin, s->end - s->begin);
}

// Norm over all ranks: the shards have every parameter once.
static double gradient_norm(const struct trainer *t) {
    const accum *grads = t->model.grads;
    double squares = shard_squares(grads, &t->sharding.dense) + shard_squares(grads, &t->sharding.experts);
    comm_sum_double(t->parallel->world, &squares, 1);
    return sqrt(squares);
}

// ---- the step ----

static void pass_over_step(struct trainer *t, const struct step_totals *totals) {
    const struct options *o = &t->options;
    size_t length = (size_t)window_length(o);
    t->model.step = t->step;
    for (int64_t round = 0; round < t->share.rounds; round++) {
        int64_t first = round * o->batch;
        int rows = share_round(&t->share, round, o->batch);
        struct batch batch = {rows ? t->window + (size_t)first * length : NULL, rows, o->seq, t->share.first + first};
        model_gradient(&t->model, batch, totals);
    }
}

void trainer_accumulate(struct trainer *t, struct step_report *report) {
    int begin = trace_mark(t->model.trace);
    t->window = prefetch_take(t->prefetch, t->sequences + t->share.first, &report->data_seconds);
    struct step_totals totals = step_totals(t);
    model_begin_gradients(&t->model);
    device_zero(t->model.counts, sizeof(int64_t) * model_bias_size(&t->options.model));
    trace_add_phase(t->model.trace, "read data", -1, begin);
    pass_over_step(t, &totals);
    begin = trace_mark(t->model.trace);
    sum_gradients(t); // on its way before the host waits for the losses
    struct losses sums = model_take_losses(&t->model);
    sum_losses(t, &sums);
    sum_counts(t);
    trace_add_phase(t->model.trace, "sum gradients", -1, begin);
    report_losses(t, report, sums, &totals);
    report_loads(t, report);
}

static void update_stretch(struct trainer *t, const struct shard *s, size_t offset, size_t size, struct adamw a) {
    struct piece piece = sharding_cut(s, offset, size);
    size_t first = offset + piece.first;
    if (piece.count)
        adamw_update(t->master + piece.state, t->m + piece.state, t->v + piece.state, t->model.weights + first,
                     t->model.grads + first, piece.count, a);
}

// The next tensor of this rank from number i on.
static int next_here(const struct params *p, int i) {
    while (i < p->count && p->list[i].offset == PARAM_ELSEWHERE) i++;
    return i;
}

// What this rank keeps of one shard. Matrices decay, norms do not; one call per stretch of neighbours that are treated
// alike.
static void update_shard(struct trainer *t, const struct shard *shard, struct adamw a, double weight_decay) {
    const struct params *p = &t->model.params;
    for (int first = next_here(p, 0), last; first < p->count; first = last) {
        bool decay = p->list[first].decay;
        for (last = next_here(p, first + 1); last < p->count && p->list[last].decay == decay;)
            last = next_here(p, last + 1);
        size_t offset = p->list[first].offset, size = (last < p->count ? p->list[last].offset : p->size) - offset;
        a.weight_decay = decay ? weight_decay : 0;
        update_stretch(t, shard, offset, size, a);
    }
}

// The dense weights are on their way to the other ranks while the experts are updated.
static void update_weights(struct trainer *t, struct adamw a, double weight_decay) {
    real *weights = t->model.weights;
    int begin = trace_mark(t->model.trace);
    update_shard(t, &t->sharding.dense, a, weight_decay);
    struct comm_exchange *dense = comm_all_gather_begin(t->parallel->world, weights, t->sharding.dense_offsets);
    update_shard(t, &t->sharding.experts, a, weight_decay);
    trace_add_phase(t->model.trace, "update weights", -1, begin);
    begin = trace_mark(t->model.trace);
    comm_all_gather(t->parallel->replicas, weights, t->sharding.expert_offsets);
    comm_exchange_finish(dense);
    trace_add_phase(t->model.trace, "gather weights", -1, begin);
}

void trainer_update(struct trainer *t, struct step_report *report) {
    const struct options *o = &t->options;
    const struct config *c = &o->model;
    report->step = t->step + 1;
    report->norm = gradient_norm(t);
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
    double squares = device_sum_squares(t->master, t->sharding.size);
    comm_sum_double(t->parallel->world, &squares, 1);
    return isfinite(squares);
}

struct step_report trainer_step(struct trainer *t) {
    struct step_report report = {0};
    trainer_accumulate(t, &report);
    trainer_update(t, &report);
    return report;
}

struct evaluation trainer_evaluate(struct trainer *t, int sequences) {
    return evaluate_heldout(&t->model, t->data, t->tokenizer, t->options.batch, t->options.seq, sequences);
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
    return (struct checkpoint){.tokenizer = t->tokenizer,
                               .data = t->identity,
                               .config = &t->model.config,
                               .params = &t->model.params,
                               .parallel = t->parallel,
                               .sharding = &t->sharding,
                               .weights = t->model.weights,
                               .master = t->master,
                               .m = t->m,
                               .v = t->v,
                               .bias = t->model.bias,
                               .step = t->step,
                               .sequences = t->sequences,
                               .tokens = t->tokens,
                               .seed = t->options.seed,
                               .bf16 = sizeof(real) == sizeof(uint16_t)};
}
