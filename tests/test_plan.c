// Parameters, operations and memory against published numbers and against formulas written down once more.
#include "tests/test.h"

#include <stdbool.h>

#include "kernels/kernels.h"
#include "model/activations.h"
#include "model/plan.h"
#include "model/presets.h"

// Parameters of one layer's attention, its two inner norms included.
static uint64_t attention_formula(const struct config *c) {
    uint64_t h = c->hidden, n = c->heads, dn = c->nope_dim, dr = c->rope_dim, dv = c->value_dim, rq = c->q_rank,
             rk = c->kv_rank;
    uint64_t q = rq ? h * rq + rq + rq * n * (dn + dr) : h * n * (dn + dr);
    return q + h * (rk + dr) + rk + rk * n * (dn + dv) + n * dv * h;
}

// experts: how many routed experts are counted.
static uint64_t moe_formula(const struct config *c, uint64_t experts) {
    uint64_t h = c->hidden, m = c->expert_intermediate;
    return (experts + c->shared_experts) * 3 * h * m + (uint64_t)c->experts * h;
}

static uint64_t total_formula(const struct config *c, uint64_t experts) {
    uint64_t h = c->hidden, L = c->layers, dense = c->dense_layers;
    return 2 * c->vocab * h + h + L * (attention_formula(c) + 2 * h) + dense * 3 * h * c->intermediate +
           (L - dense) * moe_formula(c, experts);
}

static uint64_t mtp_formula(const struct config *c) {
    uint64_t h = c->hidden;
    return c->mtp_depth * (2 * h + 2 * h * h + attention_formula(c) + 2 * h + moe_formula(c, c->experts) + h);
}

static struct config with_vocabulary(const struct preset *p) {
    struct config c = p->model;
    if (!c.vocab) c.vocab = 50304;
    return c;
}

static struct config v2_lite(void) {
    struct config c = preset_find("moonlight")->model;
    c.vocab = 102400;
    c.intermediate = 10944;
    return c;
}

static void counts_equal_the_formulas_for_every_preset(void **state) {
    (void)state;
    for (int i = 0; i < preset_count; i++) {
        struct config c = with_vocabulary(&presets[i]);
        struct plan plan;
        plan_count(&plan, &c);
        double kinds = 0;
        for (int k = 0; k < PARAM_KINDS; k++) kinds += plan.by_kind[k];
        // Integers below 2^53: no rounding.
        assert_true(plan.total == (double)total_formula(&c, c.experts));
        assert_true(plan.active == (double)total_formula(&c, c.top_k));
        assert_true(plan.active - plan.active_without_embedding == (double)c.vocab * c.hidden);
        assert_true(plan.mtp == (double)mtp_formula(&c));
        assert_true(kinds == plan.total + plan.mtp);
    }
}

static void counts_equal_the_published_ones(void **state) {
    (void)state;
    const struct {
        struct config c;
        double total, mtp, active, without_embedding; // billions
    } models[] = {
        {preset_find("dsv3")->model, 671.03, 11.61, 37.55, 36.63},
        {preset_find("moonlight")->model, 15.96, 0, 2.91, 2.58},
        {v2_lite(), 15.71, 0, 2.66, 2.45},
    };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        struct plan plan;
        plan_count(&plan, &models[i].c);
        const double rounding = 0.005001; // two decimals are published
        assert_true(fabs(plan.total / 1e9 - models[i].total) < rounding);
        assert_true(fabs(plan.mtp / 1e9 - models[i].mtp) < rounding);
        assert_true(fabs(plan.active / 1e9 - models[i].active) < rounding);
        assert_true(fabs(plan.active_without_embedding / 1e9 - models[i].without_embedding) < rounding);
    }
}

static void all_dense_and_mtp_only_models_are_counted(void **state) {
    (void)state;
    struct config c = preset_find("unit")->model;
    struct plan plan;
    c.dense_layers = c.layers; // experts in the MTP module alone
    plan_count(&plan, &c);
    assert_true(plan.total == (double)total_formula(&c, 0));
    assert_true(plan.active == plan.total);
    assert_true(plan.mtp == (double)mtp_formula(&c));
    c.mtp_depth = c.experts = c.top_k = 0;
    plan_count(&plan, &c);
    assert_true(plan.active == plan.total && plan.mtp == 0);
}

static void operations_per_token_equal_the_published_ones(void **state) {
    (void)state;
    struct config v3 = preset_find("dsv3")->model, moonlight = preset_find("moonlight")->model, lite = v2_lite();
    struct plan plan;
    v3.mtp_depth = 0; // as published
    plan_make(&plan, &v3, 1, 4096);
    const double rounding = 0.05001e9; // one decimal is published
    assert_true(fabs(plan.flops_per_token - 250.5e9) < rounding);
    assert_true(fabs(plan.attention_flops_per_token / plan.flops_per_token - 0.12) < 0.005);
    assert_true(fabs(plan_flops_per_token(&moonlight, 8192) - 18.9e9) < rounding);
    assert_true(fabs(plan_flops_per_token(&lite, 4096) - 16.4e9) < rounding);
}

static void an_mtp_module_adds_a_block_a_projection_and_a_head(void **state) {
    (void)state;
    struct config c = preset_find("unit")->model, without = c;
    without.mtp_depth = 0;
    const int seq = 33;
    double h = c.hidden, n = c.heads, dq = c.nope_dim + c.rope_dim, dv = c.value_dim;
    double attention = h * c.q_rank + c.q_rank * n * dq + h * (c.kv_rank + c.rope_dim) +
                       c.kv_rank * n * (c.nope_dim + dv) + n * dv * h;
    double moe = 3 * h * c.expert_intermediate * (c.top_k + c.shared_experts) + c.experts * h;
    double wanted = 6 * (2 * h * h + attention + moe + c.vocab * h) + 6 * n * (dq + dv) * (seq + 1) / 2;
    // Sums of integers below 2^53: no rounding.
    assert_true(plan_flops_per_token(&c, seq) - plan_flops_per_token(&without, seq) == wanted);
}

static void memory_is_that_of_the_flat_arrays_and_the_activations(void **state) {
    (void)state;
    struct config c = with_vocabulary(preset_find("tiny"));
    struct plan plan;
    struct params params;
    params_build(&params, &c);
    plan_make(&plan, &c, 8, 256);
    assert_int_equal(plan.weight_bytes, params.size * sizeof(real));
    assert_int_equal(plan.master_bytes, params.size * sizeof(accum));
    assert_int_equal(plan.gradient_bytes, params.size * sizeof(accum));
    assert_int_equal(plan.moment_bytes, 2 * params.size * sizeof(accum));
    assert_int_equal(plan.activation_bytes, activations_bytes(&c, 8, 256));
    assert_int_equal(plan.total_bytes, params.size * (sizeof(real) + 4 * sizeof(accum)) + plan.activation_bytes);
    params_free(&params);
}

// Static, overwritten by the next call.
static const char *print(const struct config *c, int batch, int seq, int64_t tokens_per_step) {
    static char text[16384];
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    plan_print(file, c, batch, seq, tokens_per_step);
    assert_int_equal(fclose(file), 0);
    return text;
}

static void the_printed_plan_says_whether_it_fits(void **state) {
    (void)state;
    struct config tiny = with_vocabulary(preset_find("tiny")), v3 = preset_find("dsv3")->model;
    const char *text = print(&tiny, 1, 64, 0);
    assert_non_null(strstr(text, "It fits."));
    assert_non_null(strstr(text, "per step of 64 tokens"));
    for (int k = 0; k < PARAM_KINDS; k++) assert_true((strstr(text, param_kind_names[k]) != NULL) == (k != PARAM_MTP));

    text = print(&v3, 1, 4096, 62914560);
    assert_non_null(strstr(text, "weights and optimizer state alone"));
    assert_non_null(strstr(text, "671.03B"));
    assert_non_null(strstr(text, "per step of 62914560 tokens"));
    assert_non_null(strstr(text, param_kind_names[PARAM_MTP]));

    // The batch it proposes fits, the next does not.
    struct plan plan;
    int too_many = 1 << 20, proposed;
    text = print(&tiny, too_many, 1024, 0);
    const char *proposal = strstr(text, "; --batch ");
    assert_non_null(proposal);
    assert_int_equal(sscanf(proposal, "; --batch %d does", &proposed), 1);
    plan_make(&plan, &tiny, proposed, 1024);
    assert_true(plan.total_bytes <= device_memory_bytes());
    plan_make(&plan, &tiny, proposed + 1, 1024);
    assert_true(plan.total_bytes > device_memory_bytes());
}

static void counts_are_printed_with_their_unit(void **state) {
    (void)state;
    char text[16];
    assert_string_equal(plan_format_count(text, 960), "960");
    assert_string_equal(plan_format_count(text, 43.1e6), "43.10M");
    assert_string_equal(plan_format_count(text, 671.026e9), "671.03B");
    assert_string_equal(plan_format_count(text, 999.999e6), "1.00B"); // not 1000.00M
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_equal_the_formulas_for_every_preset),
        cmocka_unit_test(counts_equal_the_published_ones),
        cmocka_unit_test(all_dense_and_mtp_only_models_are_counted),
        cmocka_unit_test(operations_per_token_equal_the_published_ones),
        cmocka_unit_test(an_mtp_module_adds_a_block_a_projection_and_a_head),
        cmocka_unit_test(memory_is_that_of_the_flat_arrays_and_the_activations),
        cmocka_unit_test(the_printed_plan_says_whether_it_fits),
        cmocka_unit_test(counts_are_printed_with_their_unit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
