// The optimizer step and what surrounds it: accumulation, the guard, clipping, AdamW, the selection bias,
// repeatability, resume, and configurations at the edges.
#include "tests/child.h"
#include "tests/configs.h"
#include "tests/test.h"

#include <cjson/cJSON.h>
#include <limits.h>
#include <omp.h>
#include <unistd.h>

#include "model/checkpoint.h"
#include "data/files.h"
#include "model/schedule.h"
#include "model/trainer.h"

// ---- runs ----

struct run {
    struct data *data;
    struct trainer t;
};

static struct options unit(void) {
    struct options o;
    assert_true(options_set_preset(&o, "unit"));
    o.seq = 16;
    o.warmup = 0;
    o.steps = 20;
    o.model.init_std = 0.1; // routing and attention far from uniform from the first step
    return o;
}

static struct moe_load loads_of(const struct trainer *t, int block) {
    struct moe_load *loads = trainer_loads(t), load = loads[block - t->options.model.dense_layers];
    free(loads);
    return load;
}

static void open_run(struct run *r, const struct options *o) {
    config_validate(&o->model);
    r->data = data_open(o->data, o->eval_data, NULL, o->seed, o->seq, 1 + o->model.mtp_depth);
    assert_int_equal(data_settle_vocab(r->data, o->model.vocab), o->model.vocab);
    struct options settled = *o;
    if (!settled.tokens_per_step) settled.tokens_per_step = (int64_t)o->batch * o->seq;
    trainer_open(&r->t, &settled, r->data, NULL, NULL);
}

static void close_run(struct run *r) {
    trainer_close(&r->t);
    data_close(r->data);
}

static size_t state_bytes(const struct trainer *t) { return sizeof(accum) * t->model.params.size; }
static size_t bias_bytes(const struct trainer *t) { return sizeof(accum) * model_bias_size(&t->model.config); }
static size_t count_bytes(const struct trainer *t) { return sizeof(int64_t) * model_bias_size(&t->model.config); }

static void *copy_bytes(const void *from, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    return memcpy(copy, from, bytes);
}

// What a step changes and a checkpoint keeps.
struct snapshot {
    real *weights;
    accum *master, *m, *v, *bias;
    int64_t step, sequences, tokens;
};

static struct snapshot take_snapshot(const struct trainer *t) {
    return (struct snapshot){
        .weights = copy_bytes(t->model.weights, sizeof(real) * t->model.params.size),
        .master = copy_bytes(t->master, state_bytes(t)),
        .m = copy_bytes(t->m, state_bytes(t)),
        .v = copy_bytes(t->v, state_bytes(t)),
        .bias = copy_bytes(t->model.bias, bias_bytes(t)),
        .step = t->step,
        .sequences = t->sequences,
        .tokens = t->tokens,
    };
}

static void free_snapshot(struct snapshot *s) {
    free(s->weights);
    free(s->master);
    free(s->m);
    free(s->v);
    free(s->bias);
}

static void assert_state_is(const struct trainer *t, const struct snapshot *s) {
    assert_memory_equal(t->model.weights, s->weights, sizeof(real) * t->model.params.size);
    assert_memory_equal(t->master, s->master, state_bytes(t));
    assert_memory_equal(t->m, s->m, state_bytes(t));
    assert_memory_equal(t->v, s->v, state_bytes(t));
    assert_memory_equal(t->model.bias, s->bias, bias_bytes(t));
    assert_true(t->step == s->step && t->sequences == s->sequences && t->tokens == s->tokens);
}

static void assert_same_state(const struct trainer *a, const struct trainer *b) {
    struct snapshot s = take_snapshot(b);
    assert_state_is(a, &s);
    free_snapshot(&s);
}

static void assert_same_report(struct step_report a, struct step_report b) {
    assert_true(a.step == b.step && a.loss == b.loss && a.mtp == b.mtp && a.balance == b.balance);
    assert_true(a.norm == b.norm && a.finite == b.finite && a.lr == b.lr);
    assert_true(a.load_max_over_mean == b.load_max_over_mean && a.dead == b.dead);
}

static void run_steps(struct trainer *t, int steps) {
    for (int i = 0; i < steps; i++) assert_true(trainer_step(t).finite);
}

// ---- accumulation ----

// Every tensor on its own. The same terms in another order where two places share a weight: measured 3e-7, and 3e-6
// leaves a factor of ten.
static void assert_gradients_close(const struct model *found, const struct model *wanted) {
    for (int i = 0; i < wanted->params.count; i++) {
        const struct param *p = &wanted->params.list[i];
        test_assert_close(p->name, found->grads + p->offset, wanted->grads + p->offset, param_size(p), 3e-6);
    }
}

// The cut of a step's 8 sequences changes the order of FP32 sums only. Measured: equal losses and norms within 3e-9
// in the first step; the runs then drift apart, by 2e-7 in four steps. 1e-6 leaves a factor of five. A balance
// gradient scaled by the micro-batch (Megatron pull 5798) would differ by its whole size, and alpha is large here.
static void cut_into_micro_batches_changes_nothing(void **state) {
    (void)state;
    enum { CUTS = 3, STEPS = 4, SEQUENCES = 8 };
    const int batches[CUTS] = {8, 4, 1};
    struct run runs[CUTS];
    for (int i = 0; i < CUTS; i++) {
        struct options o = unit();
        o.batch = batches[i];
        o.tokens_per_step = SEQUENCES * o.seq;
        o.model.balance_alpha = 1;
        open_run(&runs[i], &o);
    }
    for (int step = 0; step < STEPS; step++) {
        struct step_report first = trainer_step(&runs[0].t);
        assert_true(first.finite && first.balance > 1);
        for (int i = 1; i < CUTS; i++) {
            struct step_report other = trainer_step(&runs[i].t);
            assert_true(fabs(other.loss - first.loss) <= 1e-6);
            assert_true(fabs(other.mtp - first.mtp) <= 1e-6);
            assert_true(fabs(other.balance - first.balance) <= 1e-6 * first.balance);
            assert_true(fabs(other.norm / first.norm - 1) <= 1e-6);
            assert_memory_equal(runs[i].t.model.counts, runs[0].t.model.counts, count_bytes(&runs[0].t));
            if (step == 0) assert_gradients_close(&runs[i].t.model, &runs[0].t.model);
        }
    }
    for (int i = 0; i < CUTS; i++) close_run(&runs[i]);
}

static void every_step_takes_the_next_sequences_of_the_data(void **state) {
    (void)state;
    struct options o = unit();
    o.batch = 2;
    o.tokens_per_step = 6 * o.seq;
    assert_int_equal(trainer_sequences_per_step(&o), 6);
    struct run r;
    open_run(&r, &o);
    size_t length = (size_t)(o.seq + 1 + o.model.mtp_depth);
    int32_t *tokens = malloc(sizeof *tokens * length);
    assert_non_null(tokens);
    for (uint64_t step = 0; step < 3; step++) {
        run_steps(&r.t, 1);
        for (uint64_t i = 0; i < 6; i++) {
            data_read_or_fail(r.data, DATA_TRAIN, 6 * step + i, tokens);
            assert_memory_equal(r.t.window + i * length, tokens, sizeof *tokens * length);
        }
    }
    assert_int_equal(r.t.sequences, 18);
    assert_int_equal(r.t.tokens, 18 * o.seq);
    free(tokens);
    close_run(&r);
}

// Every sequence is some rank's and nobody else's, nobody has two more than another, and all do as many rounds.
static void shares_of_ranks_are_stretches_without_gaps(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 7; ranks++)
        for (int64_t total = 0; total <= 30; total++)
            for (int batch = 1; batch <= 5; batch++) {
                int64_t next = 0, rounds = -1;
                for (int rank = 0; rank < ranks; rank++) {
                    struct parallel p = {.rank = rank, .ranks = ranks};
                    struct share share = share_of(total, &p, batch);
                    int64_t seen = 0;
                    assert_true(share.first == next && share.count >= total / ranks);
                    assert_true(share.count <= total / ranks + 1 && (rank == 0 || share.rounds == rounds));
                    for (int64_t round = 0; round < share.rounds; round++) seen += share_round(&share, round, batch);
                    assert_true(seen == share.count);
                    assert_int_equal(share_round(&share, share.rounds, batch), 0);
                    next += share.count;
                    rounds = share.rounds;
                }
                int64_t fullest = (total + ranks - 1) / ranks;
                assert_true(next == total && rounds == (fullest + batch - 1) / batch); // none in vain
            }
    struct parallel last = {.rank = INT_MAX - 1, .ranks = INT_MAX};
    struct share share = share_of(INT_MAX, &last, 1);
    assert_true(share.first == INT_MAX - 1 && share.count == 1 && share.rounds == 1);
}

// ---- gradients that are not finite ----

// The guard looks at the norm, before anything is changed (mlx-lm issue 1658: the loss was finite, the norm NaN, and
// one batch ruined the run). A run that skips such a step goes on as one that never had it.
static void check_guard(float poison, bool first_element) {
    struct options o = unit();
    struct run r, undisturbed;
    open_run(&r, &o);
    open_run(&undisturbed, &o);
    run_steps(&r.t, 2);
    run_steps(&undisturbed.t, 2);
    struct snapshot before = take_snapshot(&r.t);

    const struct params *p = &r.t.model.params;
    const struct param *last = &p->list[p->count - 1];
    struct step_report report = {0};
    trainer_accumulate(&r.t, &report);
    assert_true(isfinite(report.loss));
    r.t.model.grads[first_element ? 0 : last->offset + param_size(last) - 1] = poison;
    trainer_update(&r.t, &report);
    assert_false(report.finite);
    assert_false(isfinite(report.norm));
    assert_int_equal(report.step, 3);
    assert_state_is(&r.t, &before);

    assert_same_report(trainer_step(&r.t), trainer_step(&undisturbed.t));
    assert_same_state(&r.t, &undisturbed.t);
    free_snapshot(&before);
    close_run(&undisturbed);
    close_run(&r);
}

static void step_with_a_gradient_that_is_not_finite_changes_nothing(void **state) {
    (void)state;
    check_guard(INFINITY, true);
    check_guard(-INFINITY, false);
    check_guard(NAN, false);
}

static void step_with_a_loss_that_is_not_finite_changes_nothing(void **state) {
    (void)state;
    struct options o = unit();
    struct run r;
    open_run(&r, &o);
    struct snapshot before = take_snapshot(&r.t);
    struct step_report report = {0};
    trainer_accumulate(&r.t, &report);
    report.loss = INFINITY;
    trainer_update(&r.t, &report);
    assert_false(report.finite);
    assert_state_is(&r.t, &before);
    free_snapshot(&before);
    close_run(&r);
}

// Finite numbers whose squares overflow FP32: the norm is taken in double and clipping brings them back.
static void huge_but_finite_gradient_is_clipped(void **state) {
    (void)state;
    struct options o = unit();
    struct run r;
    open_run(&r, &o);
    struct step_report report = {0};
    trainer_accumulate(&r.t, &report);
    r.t.model.grads[r.t.model.params.head] = 1e30f;
    trainer_update(&r.t, &report);
    assert_true(report.finite && fabs(report.norm / 1e30 - 1) < 1e-6);
    for (size_t i = 0; i < r.t.model.params.size; i++) assert_true(isfinite(r.t.master[i]) && isfinite(r.t.v[i]));
    close_run(&r);
}

static void weight_that_is_nan_from_the_start_stops_every_step(void **state) {
    (void)state;
    struct options o = unit();
    for (int place = 0; place < 3; place++) {
        struct run r;
        open_run(&r, &o);
        const struct params *p = &r.t.model.params;
        size_t index = place == 0 ? p->head + 7 : place == 1 ? p->blocks[1].router + 3 : p->blocks[0].kv_b + 5;
        r.t.model.weights[index] = r.t.master[index] = NAN;
        struct snapshot before = take_snapshot(&r.t);
        for (int i = 0; i < 2; i++) {
            struct step_report report = trainer_step(&r.t);
            assert_false(report.finite);
            assert_int_equal(report.step, 1);
            assert_state_is(&r.t, &before);
        }
        free_snapshot(&before);
        close_run(&r);
    }
}

// ---- norm and clipping ----

static void fill_gradients(struct model *m, accum value) {
    device_zero(m->grads, sizeof(accum) * m->params.size);
    for (int i = 0; i < m->params.count; i++)
        for (size_t j = 0; j < param_size(&m->params.list[i]); j++) m->grads[m->params.list[i].offset + j] = value;
}

static void norm_is_that_of_all_gradients_exactly(void **state) {
    (void)state;
    struct options o = unit();
    struct run r;
    open_run(&r, &o);
    struct model *m = &r.t.model;
    struct step_report report = {0};
    fill_gradients(m, 1);
    trainer_update(&r.t, &report);
    assert_true(report.norm == sqrt((double)params_total(&m->params)));
    // One dense tensor and one expert, as 3 and 4 (under expert parallelism others missed one: Megatron pull 5916).
    fill_gradients(m, 0);
    m->grads[m->params.embedding] = 3;
    m->grads[m->params.blocks[1].expert_w2] = -4;
    trainer_update(&r.t, &report);
    assert_true(report.norm == 5);
    close_run(&r);
}

// Clipping to an eighth of the norm has the factor 1/8 exactly, so that moments and weights must have the very bits
// of gradients divided by 8.
static void norm_is_logged_before_clipping_and_clipping_scales_every_gradient(void **state) {
    (void)state;
    struct options o = unit();
    struct run clipped, scaled, plain;
    o.clip = 0;
    open_run(&plain, &o);
    open_run(&scaled, &o);
    struct step_report report = trainer_step(&plain.t), other = {0};
    trainer_accumulate(&scaled.t, &other);
    for (size_t i = 0; i < scaled.t.model.params.size; i++) scaled.t.model.grads[i] /= 8;
    trainer_update(&scaled.t, &other);

    o.clip = report.norm / 8;
    open_run(&clipped, &o);
    assert_true(trainer_step(&clipped.t).norm == report.norm);
    assert_same_state(&clipped.t, &scaled.t);
    assert_memory_not_equal(clipped.t.v, plain.t.v, state_bytes(&plain.t));

    o.clip = report.norm * 1.001; // not reached: as without clipping
    close_run(&clipped);
    open_run(&clipped, &o);
    trainer_step(&clipped.t);
    assert_same_state(&clipped.t, &plain.t);
    close_run(&clipped);
    close_run(&scaled);
    close_run(&plain);
}

// ---- AdamW ----

// With gradients of zero only the decay is left.
static void decay_shrinks_matrices_and_nothing_else(void **state) {
    (void)state;
    struct options o = unit();
    o.lr = 0.125;
    o.weight_decay = 0.5;
    struct run r;
    open_run(&r, &o);
    for (size_t i = 0; i < model_bias_size(&o.model); i++) r.t.model.bias[i] = 7;
    struct snapshot before = take_snapshot(&r.t);
    struct step_report report = {0};
    fill_gradients(&r.t.model, 0);
    trainer_update(&r.t, &report);
    assert_true(report.finite && report.norm == 0 && report.lr == 0.125); // the bias is not in the norm
    const accum keep = 1 - 0.125f * 0.5f;
    int matrices = 0, norms = 0;
    for (int i = 0; i < r.t.model.params.count; i++) {
        const struct param *p = &r.t.model.params.list[i];
        assert_true(p->decay == (p->cols > 0));
        matrices += p->decay;
        norms += !p->decay;
        for (size_t j = p->offset; j < p->offset + param_size(p); j++) {
            accum wanted = p->decay ? keep * before.master[j] : before.master[j];
            if (r.t.master[j] != wanted || r.t.model.weights[j] != (real)wanted)
                fail_msg("%s: %.9g became %.9g, wanted %.9g", p->name, before.master[j], r.t.master[j], wanted);
        }
    }
    assert_true(matrices > 0 && norms > 0);
    assert_memory_equal(r.t.model.bias, before.bias, bias_bytes(&r.t)); // no counts: the mean is reached
    free_snapshot(&before);
    close_run(&r);
}

// Loshchilov and Hutter's algorithm 2 in double, for one weight of a matrix over several steps.
static void weights_follow_adamw_with_its_bias_correction(void **state) {
    (void)state;
    const double grads[] = {0.5, -0.25, 1, 0.125, 0.5};
    struct options o = unit();
    o.clip = 0;
    struct run r;
    open_run(&r, &o);
    size_t index = r.t.model.params.blocks[1].o + 3;
    double weight = (double)r.t.master[index], m = 0, v = 0;
    for (int i = 0; i < 5; i++) {
        struct step_report report = {0};
        fill_gradients(&r.t.model, (accum)grads[i]);
        trainer_update(&r.t, &report);
        m = o.beta1 * m + (1 - o.beta1) * grads[i];
        v = o.beta2 * v + (1 - o.beta2) * grads[i] * grads[i];
        double m_hat = m / (1 - pow(o.beta1, i + 1)), v_hat = v / (1 - pow(o.beta2, i + 1));
        double lr = schedule_lr(&o, i);
        weight -= lr * (m_hat / (sqrt(v_hat) + o.adam_eps) + o.weight_decay * weight);
        // Five steps of some ten FP32 roundings each.
        assert_true(fabs((double)r.t.m[index] - m) <= 1e-6 * fabs(m));
        assert_true(fabs((double)r.t.v[index] - v) <= 1e-6 * v);
        assert_true(fabs((double)r.t.master[index] - weight) <= 1e-6 * fabs(weight));
    }
    close_run(&r);
}

static void assert_padding_is_zero(const struct params *p, const accum *array) {
    size_t end = 0;
    for (int i = 0; i <= p->count; i++) {
        size_t next = i < p->count ? p->list[i].offset : p->size;
        for (size_t j = end; j < next; j++) assert_true(array[j] == 0);
        if (i < p->count) end = next + param_size(&p->list[i]);
    }
}

static void padding_between_tensors_stays_zero(void **state) {
    (void)state;
    struct options o = unit();
    o.model.kv_rank = 23; // odd sizes leave gaps
    o.model.expert_intermediate = 31;
    struct run r;
    open_run(&r, &o);
    assert_true(params_total(&r.t.model.params) < r.t.model.params.size);
    run_steps(&r.t, 3);
    assert_padding_is_zero(&r.t.model.params, r.t.model.weights);
    assert_padding_is_zero(&r.t.model.params, r.t.model.grads);
    assert_padding_is_zero(&r.t.model.params, r.t.master);
    assert_padding_is_zero(&r.t.model.params, r.t.m);
    assert_padding_is_zero(&r.t.model.params, r.t.v);
    close_run(&r);
}

static void rate_of_a_step_is_that_of_the_schedule(void **state) {
    (void)state;
    struct options o = unit();
    o.warmup = 2;
    o.steps = 6;
    struct run r;
    open_run(&r, &o);
    for (int step = 0; step < 6; step++) {
        struct step_report report = trainer_step(&r.t);
        assert_int_equal(report.step, step + 1);
        assert_true(report.lr == schedule_lr(&o, step));
    }
    close_run(&r);
}

// ---- counts and selection bias ----

static void counts_cover_the_whole_step_and_move_the_bias_by_its_rate(void **state) {
    (void)state;
    struct options o = unit();
    const struct config *c = &o.model;
    o.batch = 2;
    o.tokens_per_step = 8 * o.seq;
    struct run r;
    open_run(&r, &o);
    for (int step = 0; step < 3; step++) {
        struct snapshot before = take_snapshot(&r.t);
        struct step_report report = trainer_step(&r.t);
        int moved = 0, dead = 0;
        double worst = 0;
        for (int block = c->dense_layers; block < config_blocks(c); block++) {
            const int64_t *counts = model_counts(&r.t.model, block);
            const accum *old = before.bias + (model_bias(&r.t.model, block) - r.t.model.bias);
            int64_t total = 0;
            for (int e = 0; e < c->experts; e++) total += counts[e];
            assert_int_equal(total, c->top_k * 8 * o.seq);
            for (int e = 0; e < c->experts; e++) {
                int64_t missing = total - c->experts * counts[e]; // E times (mean - count)
                double change = missing > 0 ? c->bias_rate : missing < 0 ? -c->bias_rate : 0;
                assert_true(model_bias(&r.t.model, block)[e] == old[e] + (accum)change);
                moved += change != 0;
            }
            struct moe_load load = loads_of(&r.t, block);
            worst = fmax(worst, load.max_over_mean);
            dead += load.dead;
        }
        assert_true(moved > 0);
        assert_true(report.load_max_over_mean == worst && report.dead == dead);
        free_snapshot(&before);
    }
    close_run(&r);
}

// Public bug: tokens counted a second time (torchtitan pull 1593).
static void evaluation_leaves_counts_and_training_alone(void **state) {
    (void)state;
    struct options o = unit();
    struct run r, undisturbed;
    open_run(&r, &o);
    open_run(&undisturbed, &o);
    run_steps(&r.t, 1);
    run_steps(&undisturbed.t, 1);
    struct snapshot before = take_snapshot(&r.t);
    int64_t *counts = copy_bytes(r.t.model.counts, count_bytes(&r.t));
    float *logits = malloc(sizeof *logits * (size_t)o.model.vocab);
    assert_non_null(logits);
    double loss = trainer_evaluate(&r.t, 3).loss;
    assert_true(isfinite(loss) && loss > 0);
    assert_true(loss == trainer_evaluate(&r.t, 3).loss);
    model_logits(&r.t.model, (int32_t[]){1, 2, 3}, 3, 2, logits);
    assert_memory_equal(r.t.model.counts, counts, count_bytes(&r.t));
    assert_state_is(&r.t, &before);
    assert_same_report(trainer_step(&r.t), trainer_step(&undisturbed.t));
    assert_same_state(&r.t, &undisturbed.t);
    free(logits);
    free(counts);
    free_snapshot(&before);
    close_run(&undisturbed);
    close_run(&r);
}

static void evaluation_is_the_mean_over_the_first_sequences_of_the_eval_split(void **state) {
    (void)state;
    struct options o = unit();
    int sequences = 3 * o.batch - 1; // the last micro-batch is not full
    struct run r;
    open_run(&r, &o);
    size_t length = (size_t)(o.seq + 1 + o.model.mtp_depth);
    int32_t *tokens = malloc(sizeof *tokens * length);
    assert_non_null(tokens);
    double sum = 0;
    for (int i = 0; i < sequences; i++) {
        data_read_or_fail(r.data, DATA_EVAL, (uint64_t)i, tokens);
        sum += model_evaluate(&r.t.model, (struct batch){tokens, 1, o.seq, 0}).cross_entropy[0] / o.seq;
    }
    // The same losses of tokens, whose sums in double group differently.
    assert_true(fabs(trainer_evaluate(&r.t, sequences).loss * sequences / sum - 1) <= 1e-12);
    free(tokens);
    close_run(&r);
}

static void load_is_that_of_known_counts(void **state) {
    (void)state;
    struct options o = unit();
    assert_int_equal(o.model.experts, 8);
    struct run r;
    open_run(&r, &o);
    // Shares 1/4, 1/4, 1/4, 1/8, 1/8: entropy (3/4 ln 4 + 1/4 ln 8) / ln 8 = 3/4.
    const struct {
        int64_t counts[8];
        double max, min, entropy;
        int dead;
    } table[] = {
        {{8, 0, 0, 4, 4, 0, 8, 8}, 2, 0, 0.75, 3},    {{5, 5, 5, 5, 5, 5, 5, 5}, 1, 1, 1, 0},
        {{0, 0, 0, 0, 0, 0, 0, 16}, 8, 0, 0, 7},      {{0, 0, 0, 0, 0, 0, 0, 0}, 0, 0, 0, 8},
        {{7, 1, 1, 1, 1, 1, 3, 1}, 3.5, 0.5, NAN, 0},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        memcpy(model_counts(&r.t.model, 2), table[i].counts, sizeof table[i].counts);
        struct moe_load load = loads_of(&r.t, 2);
        assert_true(load.max_over_mean == table[i].max && load.min_over_mean == table[i].min);
        assert_int_equal(load.dead, table[i].dead);
        if (!isnan(table[i].entropy)) assert_true(fabs(load.entropy - table[i].entropy) < 1e-12); // logs in double
    }
    accum *bias = model_bias(&r.t.model, 2);
    bias[3] = -0.5f;
    bias[5] = 0.25f;
    struct moe_load load = loads_of(&r.t, 2);
    assert_true(load.bias_min == -0.5 && load.bias_max == 0.25);
    close_run(&r);
}

// ---- experts without tokens ----

// Everything that a step might read before it writes it.
static void poison_scratch(struct trainer *t) {
    struct activations *a = &t->model.acts;
    char *arena = a->arena, *angles = (char *)a->angles;
    size_t before = (size_t)(angles - arena);
    size_t angle_bytes = sizeof(accum) * (size_t)a->seq * (size_t)t->model.config.rope_dim;
    memset(arena, 0xff, before);
    memset(angles + angle_bytes, 0xff, a->bytes - before - angle_bytes);
    poison_gradients(t->model.grads, &t->model.params);
}

// The selection bias sends every token to the first top_k experts. Two steps, because in the bugs of others the NaN
// of an idle expert's gradient showed in the second (MSLK pull 158, torchtitan pull 1166).
static void idle_experts_only_decay_whatever_was_in_memory(void **state) {
    (void)state;
    struct options o = unit();
    const struct config *c = &o.model;
    struct run clean, poisoned;
    open_run(&clean, &o);
    open_run(&poisoned, &o);
    for (int block = c->dense_layers; block < config_blocks(c); block++)
        for (int e = 0; e < c->top_k; e++)
            model_bias(&clean.t.model, block)[e] = model_bias(&poisoned.t.model, block)[e] = 10;

    struct snapshot before = take_snapshot(&clean.t);
    for (int step = 0; step < 2; step++) {
        poison_scratch(&poisoned.t);
        struct step_report report = trainer_step(&clean.t);
        assert_true(report.finite);
        assert_int_equal(report.dead, model_moe_blocks(c) * (c->experts - c->top_k));
        assert_same_report(trainer_step(&poisoned.t), report);
        assert_same_state(&poisoned.t, &clean.t);
        accum keep = (accum)(1 - report.lr * o.weight_decay);
        for (int i = 0; i < clean.t.model.params.count; i++) {
            const struct param *p = &clean.t.model.params.list[i];
            if (p->kind != PARAM_EXPERT) continue;
            bool idle = atoi(strstr(p->name, "experts.") + strlen("experts.")) >= c->top_k, moved = false;
            for (size_t j = p->offset; j < p->offset + param_size(p); j++) {
                before.master[j] *= keep;
                moved |= clean.t.master[j] != before.master[j];
                if (idle) assert_true(clean.t.model.grads[j] == 0);
            }
            if (moved == idle) fail_msg("%s: moved %d, idle %d", p->name, moved, idle);
        }
    }
    free_snapshot(&before);
    close_run(&poisoned);
    close_run(&clean);
}

// ---- repeatability ----

static void run_with_threads(struct run *r, const struct options *o, int threads) {
    omp_set_num_threads(threads);
    open_run(r, o);
    run_steps(&r->t, 5);
    omp_set_num_threads(1);
}

static void runs_are_byte_equal_for_any_number_of_threads(void **state) {
    (void)state;
    struct options o = unit();
    struct run first;
    run_with_threads(&first, &o, 2);
    const int threads[] = {2, 1, 3};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        struct run other;
        run_with_threads(&other, &o, threads[i]);
        assert_same_state(&other.t, &first.t);
        close_run(&other);
    }
    o.seed++;
    struct run other;
    run_with_threads(&other, &o, 1);
    assert_memory_not_equal(other.t.master, first.t.master, state_bytes(&first.t));
    close_run(&other);
    close_run(&first);
}

// ---- resume ----

static char folder[] = "/tmp/mok-test-trainer-XXXXXX";

// One thread, except where threads are the question: models this small gain nothing from more, and on a busy machine
// threads that wait for each other take minutes.
static int make_folder(void **state) {
    (void)state;
    omp_set_num_threads(1);
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    checkpoint_remove_all(folder);
    return rmdir(folder);
}

static void save_run(struct trainer *t) {
    struct checkpoint c = trainer_checkpoint(t);
    c.options = options_to_json(&t->options);
    checkpoint_save(&c, folder, 0);
    cJSON_Delete(c.options);
}

static void newest(char path[FILE_PATH]) { assert_true(checkpoint_newest(folder, path, FILE_PATH, NULL)); }

static void resumed_run_is_the_straight_run_byte_for_byte(void **state) {
    (void)state;
    struct options o = unit();
    o.batch = 2;
    o.tokens_per_step = 4 * o.seq;
    o.warmup = 2;
    o.steps = 6;
    char path[FILE_PATH];
    struct run straight, resumed;
    open_run(&straight, &o);
    open_run(&resumed, &o);
    run_steps(&straight.t, 3);
    run_steps(&resumed.t, 3);
    save_run(&resumed.t);
    close_run(&resumed);

    open_run(&resumed, &o);
    newest(path);
    trainer_restore(&resumed.t, path);
    assert_same_state(&resumed.t, &straight.t);
    for (int step = 3; step < 6; step++) assert_same_report(trainer_step(&resumed.t), trainer_step(&straight.t));
    assert_same_state(&resumed.t, &straight.t);
    assert_true(trainer_evaluate(&resumed.t, 2).loss == trainer_evaluate(&straight.t, 2).loss);
    close_run(&resumed);
    close_run(&straight);
}

// Weights and bias are those of the checkpoint; the run is a new one.
static void run_that_starts_from_weights_is_a_new_run(void **state) {
    (void)state;
    struct options o = unit();
    struct run trained, started;
    char path[FILE_PATH];
    open_run(&trained, &o);
    run_steps(&trained.t, 8); // newer than other checkpoints in the folder
    save_run(&trained.t);
    newest(path);

    o.seed++;
    open_run(&started, &o);
    trainer_start_from(&started.t, path);
    size_t weights = trained.t.model.params.size, biases = model_bias_size(&o.model);
    assert_memory_equal(started.t.master, trained.t.master, sizeof(accum) * weights);
    assert_memory_equal(started.t.model.weights, trained.t.model.weights, sizeof(real) * weights);
    assert_memory_equal(started.t.model.bias, trained.t.model.bias, sizeof(accum) * biases);
    assert_true(started.t.step == 0 && started.t.sequences == 0 && started.t.tokens == 0);
    for (size_t i = 0; i < weights; i++) assert_true(started.t.m[i] == 0 && started.t.v[i] == 0);
    assert_true(trainer_step(&started.t).finite);
    close_run(&started);
    close_run(&trained);
}

// ---- configurations at the edges ----

static void loss_of_one_repeated_batch_falls_far(void **state) {
    (void)state;
    struct options o = unit();
    o.model.init_std = 0.02;
    o.steps = 100;
    o.schedule = SCHEDULE_CONSTANT;
    struct run r;
    open_run(&r, &o);
    double first = 0, last = 0;
    for (int step = 0; step < 60; step++) {
        r.t.sequences = 0; // the same sequences again
        struct step_report report = trainer_step(&r.t);
        assert_true(report.finite);
        if (step == 0) first = report.loss;
        last = report.loss;
    }
    print_message("loss %.3f to %.3f\n", first, last);
    assert_true(fabs(first - log(257)) < 0.1); // nothing is known yet
    assert_true(last < 0.5 * first);
    close_run(&r);
}

static void check_steps(const char *name, struct options o) {
    struct run r;
    open_run(&r, &o);
    struct snapshot before = take_snapshot(&r.t);
    for (int step = 0; step < 2; step++) {
        struct step_report report = trainer_step(&r.t);
        if (!report.finite || !isfinite(report.loss) || !isfinite(report.mtp) || !isfinite(report.balance) ||
            !isfinite(report.load_max_over_mean) || !(report.norm > 0))
            fail_msg("%s: loss %g, MTP %g, balance %g, norm %g, load %g", name, report.loss, report.mtp, report.balance,
                     report.norm, report.load_max_over_mean);
    }
    if (!isfinite(trainer_evaluate(&r.t, 1).loss)) fail_msg("%s: evaluation", name);
    for (size_t i = 0; i < r.t.model.params.size; i++)
        if (!isfinite(r.t.master[i])) fail_msg("%s: weight %zu is %g", name, i, r.t.master[i]);
    assert_memory_not_equal(r.t.master, before.master, state_bytes(&r.t));
    assert_int_equal(r.t.tokens, 2 * trainer_sequences_per_step(&r.t.options) * o.seq);
    free_snapshot(&before);
    close_run(&r);
}

static void models_at_the_edges_train(void **state) {
    (void)state;
    struct options o = unit();
    o.model.dense_layers = o.model.layers;
    check_steps("only MTP has experts", o);
    o.model.mtp_depth = 0;
    check_steps("all layers dense", o);
    o = unit();
    o.model.dense_layers = 0;
    check_steps("no layer dense", o);
    o = unit();
    o.model.top_k = o.model.experts;
    o.model.top_groups = o.model.groups;
    check_steps("every expert selected", o);
    o = unit();
    o.model.shared_experts = 0;
    check_steps("no shared expert", o);
    o.model.shared_experts = 3;
    check_steps("three shared experts", o);
    o = unit();
    o.model.groups = o.model.top_groups = 1;
    check_steps("one group", o);
    o.model.experts = o.model.top_k = 1;
    o.model.normalize_gates = false;
    check_steps("one expert", o);
    o = unit();
    o.model.layers = o.model.heads = 1;
    o.model.dense_layers = 0;
    o.model.q_rank = 0;
    check_steps("one layer, one head, no q compression", o);
    o = unit();
    o.model.vocab = 300;
    check_steps("more ids than the data has", o);
    o = unit();
    o.model.mtp_depth = 3;
    check_steps("three MTP modules", o);
}

static void batches_at_the_edges_train(void **state) {
    (void)state;
    struct options o = unit();
    o.seq = 1;
    check_steps("T 1", o);
    o.batch = 1;
    check_steps("B 1, T 1", o);
    o.seq = 17;
    check_steps("B 1, T 17", o);
    o.batch = 3;
    check_steps("B 3, T 17", o);
    o.tokens_per_step = 9 * 17;
    check_steps("B 3, T 17, three micro-batches", o);
}

static void weights_that_are_not_finite_are_noticed(void **state) {
    (void)state;
    struct options o = unit();
    struct run r;
    open_run(&r, &o);
    assert_true(trainer_is_finite(&r.t));
    r.t.master[r.t.model.params.list[7].offset] = NAN;
    assert_false(trainer_is_finite(&r.t));
    r.t.master[r.t.model.params.list[7].offset] = INFINITY;
    assert_false(trainer_is_finite(&r.t));
    close_run(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_that_are_not_finite_are_noticed),
        cmocka_unit_test(cut_into_micro_batches_changes_nothing),
        cmocka_unit_test(every_step_takes_the_next_sequences_of_the_data),
        cmocka_unit_test(shares_of_ranks_are_stretches_without_gaps),
        cmocka_unit_test(step_with_a_gradient_that_is_not_finite_changes_nothing),
        cmocka_unit_test(step_with_a_loss_that_is_not_finite_changes_nothing),
        cmocka_unit_test(huge_but_finite_gradient_is_clipped),
        cmocka_unit_test(weight_that_is_nan_from_the_start_stops_every_step),
        cmocka_unit_test(norm_is_that_of_all_gradients_exactly),
        cmocka_unit_test(norm_is_logged_before_clipping_and_clipping_scales_every_gradient),
        cmocka_unit_test(decay_shrinks_matrices_and_nothing_else),
        cmocka_unit_test(weights_follow_adamw_with_its_bias_correction),
        cmocka_unit_test(padding_between_tensors_stays_zero),
        cmocka_unit_test(rate_of_a_step_is_that_of_the_schedule),
        cmocka_unit_test(counts_cover_the_whole_step_and_move_the_bias_by_its_rate),
        cmocka_unit_test(evaluation_leaves_counts_and_training_alone),
        cmocka_unit_test(evaluation_is_the_mean_over_the_first_sequences_of_the_eval_split),
        cmocka_unit_test(load_is_that_of_known_counts),
        cmocka_unit_test(idle_experts_only_decay_whatever_was_in_memory),
        cmocka_unit_test(runs_are_byte_equal_for_any_number_of_threads),
        cmocka_unit_test(resumed_run_is_the_straight_run_byte_for_byte),
        cmocka_unit_test(run_that_starts_from_weights_is_a_new_run),
        cmocka_unit_test(loss_of_one_repeated_batch_falls_far),
        cmocka_unit_test(models_at_the_edges_train),
        cmocka_unit_test(batches_at_the_edges_train),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
