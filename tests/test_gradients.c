// The whole model against central differences, in double precision (the same sources with a double real): every
// tensor's gradient on its own, for several configurations that together switch every branch on and off.
#include "tests/configs.h"
#include "tests/test.h"

#include <omp.h>

#include "model/model.h"
#include "model/presets.h"

// Central differences with step h on a loss L of about 10 err by h^2 L''' relative to the gradient (1e-8 here) and,
// whatever the gradient, by the rounding of L (1e-15) over 2 h: 5e-11 an entry. A wrong term in the backward pass is off
// by 1e-3 of the gradient at least (tests/test_mistakes.sh builds such terms in).
enum { SAMPLES = 6 };
static const double STEP = 1e-5, TOLERANCE = 1e-6, ROUNDING = 5e-11;

struct problem {
    struct model model;
    int32_t *tokens;
    struct batch batch;
    struct step_totals totals;
};

static double total_loss(struct problem *p) {
    const struct config *c = &p->model.config;
    struct losses sums = model_evaluate(&p->model, p->batch);
    double loss = sums.cross_entropy[0] / (double)p->totals.targets[0];
    for (int k = 1; k <= c->mtp_depth; k++)
        loss += c->mtp_weight / c->mtp_depth * sums.cross_entropy[k] / (double)p->totals.targets[k];
    return loss + c->balance_alpha * sums.balance / (double)p->totals.sequences;
}

// Weights large enough that attention and routing are far from uniform, selection biases that change the choice, masked
// targets, tokens that repeat.
static void open_problem(struct problem *p, struct config c, int sequences, int length, uint64_t seed) {
    *p = (struct problem){0};
    c.vocab = 31;
    c.balance_alpha = 0.3;
    c.mtp_weight = 0.3;
    model_open(&p->model, &c, sequences, length, true, NULL, NULL);
    for (int i = 0; i < p->model.params.count; i++) {
        const struct param *t = &p->model.params.list[i];
        double std = t->cols ? 1.2 / sqrt(t->cols) : 0.3;
        if (t->kind == PARAM_EMBEDDING) std = 1;
        for (size_t j = 0; j < param_size(t); j++)
            p->model.weights[t->offset + j] = (t->cols ? 0 : 1) + std * test_normal(&seed);
    }
    for (size_t i = 0; i < model_bias_size(&c); i++) p->model.bias[i] = 0.2 * test_normal(&seed);
    int columns = length + 1 + c.mtp_depth, count = sequences * columns;
    p->tokens = malloc(sizeof(int32_t) * (size_t)count);
    for (int i = 0; i < count; i++) p->tokens[i] = (int32_t)(test_uniform(&seed) * c.vocab);
    p->tokens[columns - 1] = p->tokens[count - columns + 3] = -1;
    p->batch = (struct batch){p->tokens, sequences, length, 0};
    model_add_totals(&p->totals, &c, p->batch);
}

static void close_problem(struct problem *p) {
    free(p->tokens);
    model_close(&p->model);
}

// Tokens whose experts are not simply the top-K of their scores: bias and groups have had a say.
static int count_rerouted(const struct problem *p) {
    const struct config *c = &p->model.config;
    int rerouted = 0;
    for (int block = c->dense_layers; block < config_blocks(c); block++) {
        const struct block_activations *a = &p->model.acts.blocks[block];
        for (int t = 0; t < p->batch.B * p->batch.T; t++) {
            const accum *s = a->scores + (size_t)t * c->experts;
            bool differs = false;
            for (int k = 0; k < c->top_k; k++) {
                int better = 0;
                for (int e = 0; e < c->experts; e++) better += s[e] > s[a->ids[t * c->top_k + k]];
                differs |= better >= c->top_k;
            }
            rerouted += differs;
        }
    }
    return rerouted;
}

static double difference_quotient(struct problem *p, size_t index) {
    real saved = p->model.weights[index];
    p->model.weights[index] = saved + STEP;
    double above = total_loss(p);
    p->model.weights[index] = saved - STEP;
    double below = total_loss(p);
    p->model.weights[index] = saved;
    return (above - below) / (2 * STEP);
}

static void check_config(struct config c, int sequences, int length, uint64_t seed) {
    struct problem p;
    open_problem(&p, c, sequences, length, seed);
    // NaN everywhere first: whatever is read before it is written shows.
    memset(p.model.acts.arena, 0xff, (size_t)((char *)p.model.acts.angles - (char *)p.model.acts.arena));
    poison_gradients(p.model.grads, &p.model.params);
    model_begin_gradients(&p.model);
    model_gradient(&p.model, p.batch, &p.totals);
    if (model_moe_blocks(&c)) assert_true(count_rerouted(&p) > 0);

    int failed = 0;
    double worst = 0;
    for (int i = 0; i < p.model.params.count; i++) {
        const struct param *t = &p.model.params.list[i];
        double difference = 0, size = 0;
        for (int s = 0; s < SAMPLES; s++) {
            size_t index = t->offset + (size_t)(test_uniform(&seed) * (double)param_size(t));
            double found = p.model.grads[index], wanted = difference_quotient(&p, index);
            difference += (found - wanted) * (found - wanted);
            size += wanted * wanted;
        }
        // As a share of what is allowed. Where no token comes by (an embedding row, an expert), both are zero.
        double error = sqrt(difference) / (TOLERANCE * sqrt(size) + ROUNDING * sqrt(SAMPLES));
        if (error > worst) worst = error;
        if (!(error <= 1)) {
            if (failed++ < 5) print_message("%s: %.2g times the allowed error\n", t->name, error);
        }
    }
    print_message("%d tensors, worst at %.2g of the allowed error\n", p.model.params.count, worst);
    if (failed) fail_msg("%d of %d tensors have a wrong gradient", failed, p.model.params.count);
    close_problem(&p);
}

static struct config unit(void) { return preset_find("unit")->model; }

static void test_unit_with_every_branch(void **state) {
    (void)state;
    struct config c = unit();
    assert_true(c.q_rank > 0 && c.groups > 1 && c.dense_layers > 0 && c.shared_experts > 0 && c.mtp_depth > 0);
    check_config(c, 3, 8, 1);
}

static void test_without_q_compression_and_groups(void **state) {
    (void)state;
    struct config c = unit();
    c.q_rank = 0;
    c.groups = c.top_groups = 1;
    check_config(c, 3, 8, 2);
}

static void test_two_mtp_depths_without_shared_expert(void **state) {
    (void)state;
    struct config c = unit();
    c.mtp_depth = 2;
    c.shared_experts = 0;
    c.layers = 2;
    check_config(c, 3, 8, 3);
}

static void test_gates_without_normalisation(void **state) {
    (void)state;
    struct config c = unit();
    c.normalize_gates = false;
    c.dense_layers = 0;
    c.mtp_depth = 0;
    c.layers = 2;
    check_config(c, 3, 8, 4);
}

static void test_all_layers_dense(void **state) {
    (void)state;
    struct config c = unit();
    c.mtp_depth = 0;
    c.dense_layers = c.layers;
    check_config(c, 3, 8, 5);
}

// Longer than the attention kernel's block of queries.
static void test_sequence_of_several_query_blocks(void **state) {
    (void)state;
    struct config c = unit();
    c.mtp_depth = 0;
    c.layers = 2;
    check_config(c, 1, 140, 6);
}

int main(void) {
    omp_set_num_threads(1); // with so few tokens, waking threads costs more than they gain
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unit_with_every_branch),
        cmocka_unit_test(test_without_q_compression_and_groups),
        cmocka_unit_test(test_two_mtp_depths_without_shared_expert),
        cmocka_unit_test(test_gates_without_normalisation),
        cmocka_unit_test(test_all_layers_dense),
        cmocka_unit_test(test_sequence_of_several_query_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
