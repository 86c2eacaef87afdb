// Logits, loss and every gradient of a checkpoint that this trainer exported, against Hugging Face transformers in
// FP32 (tests/reference_transformers.py computed them). Run from the root of the repository.
#include "tests/test.h"

#include "model/checkpoint.h"
#include "model/model.h"
#include "model/safetensors.h"

static const char CHECKPOINT[] = "tests/reference/checkpoint", NUMBERS[] = "tests/reference/transformers.safetensors";

// Both sides are FP32 and sum in different orders: chains of some 50 roundings of 6e-8 each, through 3 layers and
// back. Measured: logits 6e-7, loss 6e-8 (one rounding), gradients 1e-6 in the middle and 4e-6 at worst. The margin
// of five is for other compilers and vector widths; even an eps of 1e-5 instead of 1e-6 in MLA's inner norms is
// outside.
static const double LOGITS_TOLERANCE = 3e-6, LOSS_TOLERANCE = 3e-7, GRADIENT_TOLERANCE = 2e-5;

static struct {
    struct safetensors numbers;
    struct model model;
    int32_t *tokens; // [B, T + 1]
    struct batch batch;
} reference;

static const struct safetensors_tensor *find(const char *name) {
    const struct safetensors_tensor *t = safetensors_find(&reference.numbers, name);
    if (!t) fail_msg("%s: no tensor %s", NUMBERS, name);
    return t;
}

static size_t count_elements(const struct safetensors_tensor *t) {
    size_t count = 1;
    for (int i = 0; i < t->rank; i++) count *= t->shape[i];
    return count;
}

// All elements of an F32 tensor, for the caller to free.
static float *read_floats(const char *name, size_t count) {
    char error[FILE_ERROR];
    const struct safetensors_tensor *t = find(name);
    if (count_elements(t) != count) fail_msg("%s: %zu elements, wanted %zu", name, count_elements(t), count);
    float *values = malloc(sizeof *values * count);
    assert_non_null(values);
    if (!safetensors_read_f32(&reference.numbers, t, 0, count, values, error, sizeof error)) fail_msg("%s", error);
    return values;
}

static void read_tokens(void) {
    const struct safetensors_tensor *t = find("tokens");
    assert_int_equal(t->type, SAFETENSORS_I64);
    assert_int_equal(t->rank, 2);
    size_t count = count_elements(t);
    int64_t *wide = malloc(sizeof *wide * count);
    reference.tokens = malloc(sizeof *reference.tokens * count);
    assert_true(wide && reference.tokens);
    assert_int_equal(fseeko(reference.numbers.file, (off_t)(reference.numbers.data_start + t->begin), SEEK_SET), 0);
    assert_int_equal(fread(wide, sizeof *wide, count, reference.numbers.file), count);
    for (size_t i = 0; i < count; i++) reference.tokens[i] = (int32_t)wide[i];
    free(wide);
    reference.batch = (struct batch){reference.tokens, (int)t->shape[0], (int)t->shape[1] - 1, 0};
}

static int open_reference(void **state) {
    (void)state;
    char error[FILE_ERROR];
    struct config c = {0};
    if (!checkpoint_read_config(CHECKPOINT, &c, error, sizeof error)) fail_msg("%s", error);
    c.balance_alpha = 0; // transformers has no balance loss
    config_validate(&c);
    if (!safetensors_open(&reference.numbers, NUMBERS, error, sizeof error)) fail_msg("%s", error);
    read_tokens();
    model_open(&reference.model, &c, reference.batch.B, reference.batch.T, true, NULL, NULL);
    struct model *m = &reference.model;
    struct checkpoint checkpoint = {.config = &m->config, .params = &m->params, .weights = m->weights, .bias = m->bias};
    checkpoint_load_weights(CHECKPOINT, &checkpoint);
    return 0;
}

static int close_reference(void **state) {
    (void)state;
    model_close(&reference.model);
    free(reference.tokens);
    safetensors_close(&reference.numbers);
    return 0;
}

// Otherwise the comparison says little: every branch that transformers has must be in the checkpoint.
static void checkpoint_has_every_branch_that_transformers_has(void **state) {
    (void)state;
    const struct config *c = &reference.model.config;
    assert_true(c->q_rank > 0 && c->groups > 1 && c->top_groups < c->groups && c->shared_experts > 0);
    assert_true(c->dense_layers > 0 && c->dense_layers < c->layers && c->normalize_gates && c->route_scale != 1);
    bool bias_differs = false;
    for (size_t i = 0; i < model_bias_size(c); i++) bias_differs |= reference.model.bias[i] != reference.model.bias[0];
    assert_true(bias_differs);
}

static void logits_are_those_of_transformers(void **state) {
    (void)state;
    struct batch batch = reference.batch;
    size_t V = (size_t)reference.model.config.vocab, count = (size_t)batch.B * (size_t)batch.T * V;
    float *wanted = read_floats("logits", count), *found = malloc(sizeof *found * count);
    assert_non_null(found);
    for (int b = 0; b < batch.B; b++)
        model_logits(&reference.model, reference.tokens + (size_t)b * (size_t)(batch.T + 1), batch.T, 0,
                     found + (size_t)b * (size_t)batch.T * V);
    print_message("logits: relative error %.1e\n", test_relative_norm(found, wanted, count));
    test_assert_close("logits", found, wanted, count, LOGITS_TOLERANCE);
    free(found);
    free(wanted);
}

static void loss_is_that_of_transformers(void **state) {
    (void)state;
    struct step_totals totals = {0};
    model_add_totals(&totals, &reference.model.config, reference.batch);
    float *wanted = read_floats("loss", 1);
    double found = model_evaluate(&reference.model, reference.batch).cross_entropy[0] / (double)totals.targets[0];
    print_message("loss: relative error %.1e\n", test_relative_norm(&found, wanted, 1));
    test_assert_close("loss", &found, wanted, 1, LOSS_TOLERANCE);
    free(wanted);
}

static double compare_gradient(const struct param *p, bool *used) {
    char name[128];
    snprintf(name, sizeof name, "grad.%s", p->name);
    const struct safetensors_tensor *t = find(name);
    used[t - reference.numbers.list] = true;
    assert_int_equal(t->rank, p->cols ? 2 : 1);
    assert_int_equal(t->shape[0], p->rows);
    if (p->cols) assert_int_equal(t->shape[1], p->cols);
    size_t count = param_size(p);
    float *wanted = read_floats(name, count), *found = malloc(sizeof *found * count);
    assert_non_null(found);
    params_export(found, reference.model.grads + p->offset, p);
    // A tensor of zeros (an expert without tokens) has no size to compare with: its error is then absolute, and must
    // be 0.
    double error = test_relative_norm(found, wanted, count), size = 0;
    for (size_t i = 0; i < count; i++) size += fabs((double)wanted[i]);
    if (size == 0 && error != 0) error = INFINITY;
    free(found);
    free(wanted);
    return error;
}

static void every_gradient_is_that_of_transformers(void **state) {
    (void)state;
    struct model *m = &reference.model;
    struct step_totals totals = {0};
    model_add_totals(&totals, &m->config, reference.batch);
    device_zero(m->grads, sizeof(accum) * m->params.size);
    model_gradient(m, reference.batch, &totals);

    bool *used = calloc((size_t)reference.numbers.count, sizeof *used);
    assert_non_null(used);
    double worst = 0;
    int failed = 0;
    for (int i = 0; i < m->params.count; i++) {
        double error = compare_gradient(&m->params.list[i], used);
        if (!(error <= worst)) worst = error;
        if (!(error <= GRADIENT_TOLERANCE) && failed++ < 10)
            print_message("%s: relative error %.2e\n", m->params.list[i].name, error);
    }
    print_message("%d gradients, worst relative error %.1e\n", m->params.count, worst);
    for (int i = 0; i < reference.numbers.count; i++) {
        const char *name = reference.numbers.list[i].name;
        if (strncmp(name, "grad.", 5) == 0 && !used[i]) fail_msg("%s: the model has no such parameter", name);
    }
    free(used);
    if (failed) fail_msg("%d of %d gradients differ by more than %.0e", failed, m->params.count, GRADIENT_TOLERANCE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checkpoint_has_every_branch_that_transformers_has),
        cmocka_unit_test(logits_are_those_of_transformers),
        cmocka_unit_test(loss_is_that_of_transformers),
        cmocka_unit_test(every_gradient_is_that_of_transformers),
    };
    return cmocka_run_group_tests(tests, open_reference, close_reference);
}
