// Presets, and the rules between the sizes of a model.
#include "tests/options.h"

#include <limits.h>

static void every_preset_is_valid_and_parses(void **state) {
    (void)state;
    for (int i = 0; i < preset_count; i++) {
        char message[1024], line[64];
        int code = run_child(validate, (void *)valid_config(&presets[i]), message, sizeof message);
        if (code) fail_msg("preset %s: %s", presets[i].name, message);
        snprintf(line, sizeof line, "--preset %s", presets[i].name);
        code = run_child(parse_line, line, message, sizeof message);
        if (code) fail_msg("%s: %s", line, message);
        struct options o;
        set_preset(&o, presets[i].name);
        char *text = print_options(&o);
        assert_non_null(strstr(text, presets[i].name));
        free(text);
    }
    struct config unknown_vocab = preset_find("tiny")->model;
    assert_int_equal(unknown_vocab.vocab, 0);
    config_validate(&unknown_vocab);
}

static void unit_presets_have_what_the_tests_count_on(void **state) {
    (void)state;
    const struct config *unit = &preset_find("unit")->model, *aligned = &preset_find("unit-128")->model;
    assert_true(unit->q_rank > 0 && unit->dense_layers > 0 && unit->dense_layers < unit->layers && unit->groups > 1 &&
                unit->top_groups < unit->groups && unit->shared_experts > 0 && unit->mtp_depth > 0 &&
                unit->normalize_gates && unit->balance_alpha > 0);
    assert_int_equal(preset_find("unit-12")->model.experts, 12);
    int widths[] = {aligned->hidden,
                    aligned->intermediate,
                    aligned->expert_intermediate,
                    config_shared_intermediate(aligned),
                    aligned->q_rank,
                    aligned->kv_rank,
                    aligned->vocab,
                    aligned->heads * config_query_dim(aligned),
                    aligned->heads * aligned->value_dim,
                    aligned->heads * (aligned->nope_dim + aligned->value_dim)};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) assert_int_equal(widths[i] % 128, 0);
}

static void every_broken_rule_names_both_flags_and_values(void **state) {
    (void)state;
    const struct {
        const char *patch, *words[5]; // patch of the unit preset: 8 experts, groups 4, top_groups 2, top_k 2
    } cases[] = {
        {"{\"groups\": 3}", {"--groups: found 3", "--experts 8"}},
        {"{\"groups\": 8}", {"--groups: found 8", "--experts 8", "at least 2"}},
        {"{\"top-groups\": 5}", {"--top-groups: found 5", "--groups 4"}},
        {"{\"top-groups\": 1, \"top-k\": 3}", {"--top-groups: found 1", "--top-k 3", "--groups 4", "--experts 8"}},
        {"{\"top-k\": 9}", {"--top-k: found 9", "--experts 8"}},
        {"{\"top-k\": 1}", {"--normalize-gates: found true", "--top-k 1"}},
        {"{\"rope-dim\": 7}", {"--rope-dim: found 7", "even"}},
        {"{\"dense-layers\": 4}", {"--dense-layers: found 4", "--layers 3"}},
        {"{\"intermediate\": 0}", {"--intermediate: found 0", "--dense-layers 1"}},
        {"{\"experts\": 0}", {"--experts: found 0", "--dense-layers 1", "--layers 3"}},
        {"{\"dense-layers\": 3, \"experts\": 0}", {"--experts: found 0", "--mtp-depth 1"}},
        {"{\"expert-intermediate\": 0}", {"--expert-intermediate: found 0", "--dense-layers 1"}},
        {"{\"top-k\": 0}", {"--top-k: found 0", "--dense-layers 1"}},
        {"{\"groups\": 0}", {"--groups: found 0", "--dense-layers 1"}},
        {"{\"top-groups\": 0}", {"--top-groups: found 0", "--dense-layers 1"}},
        {"{\"hidden\": 2000000000}", {"--hidden: found 2000000000", "1 to 1073741823"}},
        {"{\"layers\": 100000}", {"--layers: found 100000", "65536"}},
        {"{\"heads\": 1000000, \"nope-dim\": 10000}", {"--heads: found 1000000", "--nope-dim + --rope-dim = 10008"}},
        {"{\"heads\": 1000000, \"value-dim\": 10000}", {"--heads: found 1000000", "--nope-dim + --value-dim = 10016"}},
        {"{\"shared-experts\": 1000000, \"expert-intermediate\": 10000}",
         {"--shared-experts: found 1000000", "--expert-intermediate = 10000"}},
        {"{\"experts\": 1000000000}", {"--experts: found 1000000000", "--layers + --mtp-depth = 4"}},
        {"{\"hidden\": 1000000000, \"layers\": 1000}", {"--hidden: found 1000000000", "--layers 1000"}},
        {"{\"yarn-factor\": 0.5}", {"--yarn-factor: found 0.5", "at least 1"}},
        {"{\"yarn-factor\": 2, \"max-positions\": 8193}",
         {"--max-positions: found 8193", "--yarn-factor 2", "--yarn-original-length 4096"}},
        {"{\"yarn-factor\": 2, \"yarn-beta-fast\": 1}", {"--yarn-beta-fast: found 1", "--yarn-beta-slow 1"}},
        {"{\"yarn-factor\": 2, \"yarn-beta-slow\": 0}", {"--yarn-beta-fast: found 32", "--yarn-beta-slow 0"}},
        {"{\"yarn-factor\": 2, \"rope-theta\": 1}", {"--rope-theta: found 1", "--yarn-factor 2"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct options o;
        set_preset(&o, "unit");
        const char *wrong = read_options(&o, cases[i].patch);
        if (wrong) fail_msg("%s: %s", cases[i].patch, wrong);
        char message[1024];
        const char *words[6] = {0};
        memcpy(words, cases[i].words, sizeof cases[i].words);
        int code = run_child(validate, &o.model, message, sizeof message);
        assert_refused(cases[i].patch, code, message, words);
    }
}

// A configuration may come from a file, past the ranges of the flags.
static void values_that_no_flag_would_take_are_refused_too(void **state) {
    (void)state;
    const struct config unit = preset_find("unit")->model;
#define BROKEN(flag, member, value)                                                                                    \
    {                                                                                                                  \
        flag, ({                                                                                                       \
            struct config c = unit;                                                                                    \
            c.member = value;                                                                                          \
            c;                                                                                                         \
        })                                                                                                             \
    }
    struct {
        const char *flag;
        struct config c;
    } cases[] = {
        BROKEN("--vocab", vocab, -1),
        BROKEN("--hidden", hidden, 0),
        BROKEN("--layers", layers, 0),
        BROKEN("--dense-layers", dense_layers, -1),
        BROKEN("--heads", heads, 0),
        BROKEN("--q-rank", q_rank, -1),
        BROKEN("--kv-rank", kv_rank, 0),
        BROKEN("--nope-dim", nope_dim, 0),
        BROKEN("--rope-dim", rope_dim, 0),
        BROKEN("--value-dim", value_dim, 0),
        BROKEN("--shared-experts", shared_experts, -1),
        BROKEN("--mtp-depth", mtp_depth, -1),
        BROKEN("--mtp-depth", mtp_depth, MTP_MAX + 1),
        BROKEN("--max-positions", max_positions, 0),
        BROKEN("--groups", groups, -4),
        BROKEN("--experts", experts, INT_MAX),
        BROKEN("--route-scale", route_scale, 0),
        BROKEN("--route-scale", route_scale, (double)NAN),
        BROKEN("--rms-eps", rms_eps, 0),
        BROKEN("--rope-theta", rope_theta, -1),
        BROKEN("--init-std", init_std, (double)INFINITY),
        BROKEN("--balance-alpha", balance_alpha, (double)NAN),
        BROKEN("--bias-rate", bias_rate, -1),
        BROKEN("--mtp-weight", mtp_weight, -1),
        BROKEN("--yarn-factor", yarn.factor, (double)NAN),
        BROKEN("--yarn-original-length", yarn, ((struct yarn){40, 0, 32, 1, 1, 1})),
        BROKEN("--yarn-mscale", yarn, ((struct yarn){40, 4096, 32, 1, (double)NAN, 1})),
        BROKEN("--yarn-mscale", yarn, ((struct yarn){40, 4096, 32, 1, 1, -1})),
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char message[1024], place[64];
        snprintf(place, sizeof place, "error: %s: found", cases[i].flag);
        int code = run_child(validate, &cases[i].c, message, sizeof message);
        assert_refused(cases[i].flag, code, message, (const char *[]){place, NULL});
    }
}

static void corner_configurations_are_valid(void **state) {
    (void)state;
    const char *patches[] = {
        ("{\"dense-layers\": 3, \"mtp-depth\": 0, \"experts\": 0, \"top-k\": 0, \"groups\": 0, \"top-groups\": 0, "
         "\"expert-intermediate\": 0}"),              // all layers dense
        "{\"dense-layers\": 0, \"intermediate\": 0}", // none
        "{\"experts\": 1, \"top-k\": 1, \"groups\": 1, \"top-groups\": 1, \"normalize-gates\": false}", // one expert
        "{\"groups\": 1, \"top-groups\": 1, \"top-k\": 8}",                                             // K = E
        "{\"top-k\": 4}", // K = all of top_groups
        "{\"shared-experts\": 0, \"q-rank\": 0}",
        "{\"yarn-factor\": 40, \"max-positions\": 163840}", // DeepSeek-V3 as released
    };
    for (size_t i = 0; i < sizeof patches / sizeof *patches; i++) {
        struct options o;
        set_preset(&o, "unit");
        assert_null(read_options(&o, patches[i]));
        char message[1024];
        int code = run_child(validate, &o.model, message, sizeof message);
        if (code) fail_msg("%s: %s", patches[i], message);
    }
}

static void attention_scale_has_yarns_square(void **state) {
    (void)state;
    struct config c = preset_find("dsv3")->model; // heads 128 + 64 wide
    // The published factors have five digits.
    assert_true(fabs(config_attention_scale(&c) * sqrt(192) - 1) < 1e-12);
    c.yarn = (struct yarn){40, 4096, 32, 1, 1.0, 1.0};
    assert_true(fabs(config_attention_scale(&c) * sqrt(192) - 1.8739) < 5e-5);
    c.yarn.mscale = c.yarn.mscale_all_dim = 0.707; // DeepSeek-V2-Lite
    assert_true(fabs(config_attention_scale(&c) * sqrt(192) - 1.5896) < 5e-5);
    c.yarn.mscale_all_dim = 0;
    assert_true(fabs(config_attention_scale(&c) * sqrt(192) - 1) < 1e-12);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_preset_is_valid_and_parses),
        cmocka_unit_test(unit_presets_have_what_the_tests_count_on),
        cmocka_unit_test(every_broken_rule_names_both_flags_and_values),
        cmocka_unit_test(values_that_no_flag_would_take_are_refused_too),
        cmocka_unit_test(corner_configurations_are_valid),
        cmocka_unit_test(attention_scale_has_yarns_square),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
