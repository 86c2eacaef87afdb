// Rotary frequencies and YaRN against numbers worked out by hand from the papers and the released configurations.
#include "tests/test.h"

#include "model/presets.h"
#include "model/rope.h"

// Double arithmetic with a pow, a log and a few products: a handful of roundings of 1e-16 each.
static const double EXACT = 1e-14;

static void assert_near(const char *name, double found, double wanted, double tolerance) {
    if (!(fabs(found - wanted) <= tolerance * fmax(1, fabs(wanted))))
        fail_msg("%s: found %.17g, wanted %.17g", name, found, wanted);
}

// DeepSeek-V3 as released: 40 times the 4096 positions it was pre-trained on.
static struct config deepseek_v3(void) {
    struct config c = preset_find("dsv3")->model;
    c.yarn = (struct yarn){
        .factor = 40, .original_length = 4096, .beta_fast = 32, .beta_slow = 1, .mscale = 1, .mscale_all_dim = 1};
    return c;
}

static struct config deepseek_v2_lite(void) {
    struct config c = deepseek_v3();
    c.yarn.mscale = c.yarn.mscale_all_dim = 0.707;
    return c;
}

static void frequencies_without_yarn_are_powers_of_theta(void **state) {
    (void)state;
    struct config c = preset_find("dsv3")->model;
    assert_int_equal(c.rope_dim, 64);
    c.yarn.factor = 0;
    assert_near("pair 0", rope_frequency(&c, 0), 1, EXACT);
    assert_near("pair 8", rope_frequency(&c, 8), 0.1, EXACT);
    assert_near("pair 16", rope_frequency(&c, 16), 0.01, EXACT);
    assert_near("pair 24", rope_frequency(&c, 24) / 0.001, 1, EXACT);
    assert_near("pair 31", rope_frequency(&c, 31) / 1.333521432163324e-4, 1, EXACT);
}

static void yarn_of_deepseek_v3_blends_pairs_10_to_23(void **state) {
    (void)state;
    struct config c = deepseek_v3();
    int low, high;
    rope_yarn_range(&c, &low, &high);
    assert_int_equal(low, 10);
    assert_int_equal(high, 23);
}

static void yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between(void **state) {
    (void)state;
    struct config c = deepseek_v3(), off = c;
    off.yarn.factor = 0;
    for (int j = 0; j < c.rope_dim / 2; j++) {
        double kept = rope_frequency(&off, j);
        double slow = j <= 10 ? 0 : j >= 23 ? 1 : (j - 10) / 13.0; // share of the divided frequency
        assert_near("frequency / unstretched", rope_frequency(&c, j) / kept, 1 - slow + slow / 40, EXACT);
    }
}

static void yarn_range_stays_inside_the_head(void **state) {
    (void)state;
    struct config c = deepseek_v3();
    int low, high;
    c.yarn.original_length = 4; // no pair turns even once
    rope_yarn_range(&c, &low, &high);
    assert_int_equal(low, 0);
    c.yarn.original_length = 1 << 30; // the slowest pair turns often
    rope_yarn_range(&c, &low, &high);
    assert_int_equal(high, c.rope_dim - 1);
    for (int length = 4; length < 1 << 30; length *= 4) {
        c.yarn.original_length = length;
        for (int j = 0; j < c.rope_dim / 2; j++) {
            double f = rope_frequency(&c, j);
            assert_true(isfinite(f) && f > 0 && f <= 1);
        }
    }
}

// The papers' values have five digits.
static void yarn_scales_the_softmax_as_released_models_do(void **state) {
    (void)state;
    struct config v3 = deepseek_v3(), lite = deepseek_v2_lite(), off = v3;
    off.yarn.factor = 0;
    assert_near("without YaRN", config_attention_scale(&off), 1 / sqrt(192), EXACT);
    assert_near("V3", config_attention_scale(&v3) / config_attention_scale(&off), 1.8739, 5e-5);
    assert_near("V2-Lite", config_attention_scale(&lite) / config_attention_scale(&off), 1.5896, 5e-5);
    assert_near("V3", pow(rope_yarn_scale(40, 1), 2), 1.8739, 5e-5);
    assert_near("V2-Lite", pow(rope_yarn_scale(40, 0.707), 2), 1.5896, 5e-5);
    assert_true(rope_yarn_scale(1, 1) == 1);
    assert_true(rope_yarn_scale(0, 1) == 1);
}

// cos and sin are rounded to FP32 once, which is 2^-25 of a number up to 1 (and of the scale).
static const double ROUNDED = 0x1p-24;

static void check_angles(const struct config *c, int T, double scale) {
    accum *angles = malloc(sizeof(accum) * (size_t)T * (size_t)c->rope_dim);
    assert_non_null(angles);
    rope_angles(angles, c, T);
    for (int t = 0; t < T; t++)
        for (int j = 0; j < c->rope_dim / 2; j++) {
            const accum *pair = angles + (size_t)t * (size_t)c->rope_dim + 2 * (size_t)j;
            double angle = t * rope_frequency(c, j);
            assert_near("cos", (double)pair[0], scale * cos(angle), ROUNDED);
            assert_near("sin", (double)pair[1], scale * sin(angle), ROUNDED);
        }
    free(angles);
}

static void angles_hold_cos_and_sin_of_position_times_frequency(void **state) {
    (void)state;
    struct config c = deepseek_v3();
    check_angles(&c, 200, 1);
    c.yarn.factor = 0;
    check_angles(&c, 4096, 1);
    check_angles(&c, 1, 1);
}

// 1 + 0.1 ln 40 over 1 + 0.0707 ln 40. It is 1 in all released models, which have both weights equal.
static void angles_are_scaled_when_the_two_weights_differ(void **state) {
    (void)state;
    struct config c = deepseek_v3(), lite = deepseek_v2_lite();
    check_angles(&lite, 50, 1);
    c.yarn.mscale_all_dim = 0.707;
    check_angles(&c, 50, 1.368887945411394 / 1.2608037774058555);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies_without_yarn_are_powers_of_theta),
        cmocka_unit_test(yarn_of_deepseek_v3_blends_pairs_10_to_23),
        cmocka_unit_test(yarn_keeps_fast_pairs_divides_slow_ones_and_blends_between),
        cmocka_unit_test(yarn_range_stays_inside_the_head),
        cmocka_unit_test(yarn_scales_the_softmax_as_released_models_do),
        cmocka_unit_test(angles_hold_cos_and_sin_of_position_times_frequency),
        cmocka_unit_test(angles_are_scaled_when_the_two_weights_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
