// Sampling: the choice from logits, and the loop around the model.
#include "tests/configs.h"
#include "tests/test.h"

#include "model/generate.h"
#include "model/presets.h"

// ---- the choice ----

static void temperature_zero_takes_the_first_of_the_largest(void **state) {
    (void)state;
    const float logits[] = {-1, 3, 2, 3, -5};
    for (int i = 0; i < 100; i++) assert_int_equal(generate_pick(logits, 5, 0, i / 100.0), 1);
    const float first[] = {4, 4}, last[] = {-3, -2, -1}, one[] = {0};
    assert_int_equal(generate_pick(first, 2, 0, 0.9), 0);
    assert_int_equal(generate_pick(last, 3, 0, 0), 2);
    assert_int_equal(generate_pick(one, 1, 0, 0.5), 0);
}

// llm.c's sampler subtracts no maximum, so that such logits make infinity / infinity.
static void logits_of_ten_thousand_are_no_trouble(void **state) {
    (void)state;
    const float logits[] = {-1e4f, 1e4f, 0, 9.99e3f};
    const float equal[] = {1e4f, 1e4f}, low[] = {-1e4f, -1e4f};
    for (int i = 0; i < 100; i++) {
        double u = i / 100.0;
        assert_int_equal(generate_pick(logits, 4, 1, u), 1); // the next one has probability exp(-10) = 5e-5
        assert_int_equal(generate_pick(logits, 4, 1e-3, u), 1);
        assert_int_equal(generate_pick(equal, 2, 1, u), u >= 0.5);
        assert_int_equal(generate_pick(low, 2, 1, u), u >= 0.5);
    }
}

static double softmax_at(const float *logits, int V, double temperature, int v) {
    double total = 0;
    for (int i = 0; i < V; i++) total += exp(logits[i] / temperature);
    return exp(logits[v] / temperature) / total;
}

// Evenly spaced u: the share of each index is its probability but for one step at either end.
static void choices_have_the_probabilities_of_the_softmax(void **state) {
    (void)state;
    enum { V = 300, DRAWS = 100000 };
    float logits[V];
    uint64_t seed = 1;
    for (int v = 0; v < V; v++) logits[v] = (float)(2 * test_normal(&seed));
    const double temperatures[] = {0.5, 1, 1.7};
    for (int i = 0; i < 3; i++) {
        int drawn[V] = {0};
        for (int j = 0; j < DRAWS; j++) {
            int v = generate_pick(logits, V, temperatures[i], (j + 0.5) / DRAWS);
            assert_true(v >= 0 && v < V);
            drawn[v]++;
        }
        for (int v = 0; v < V; v++) {
            double wanted = softmax_at(logits, V, temperatures[i], v);
            if (!(fabs(drawn[v] / (double)DRAWS - wanted) <= 2.0 / DRAWS))
                fail_msg("temperature %g, index %d: share %g, wanted %g", temperatures[i], v, drawn[v] / (double)DRAWS,
                         wanted);
        }
    }
}

static void u_at_its_ends_gives_an_index_that_is_possible(void **state) {
    (void)state;
    enum { V = 100000 };
    const double largest = 1 - 0x1p-53;
    const float ends_impossible[] = {-1e4f, 0, 1, -1e4f};
    assert_int_equal(generate_pick(ends_impossible, 4, 1, 0), 1);
    assert_int_equal(generate_pick(ends_impossible, 4, 1, largest), 2);
    float *logits = calloc(V, sizeof *logits); // so many that the sum is rounded often
    assert_non_null(logits);
    assert_int_equal(generate_pick(logits, V, 1, 0), 0);
    assert_int_equal(generate_pick(logits, V, 1, largest), V - 1);
    for (int v = 0; v < V; v++) logits[v] = (float)(v % 7) - 3.1f;
    int last = generate_pick(logits, V, 0.9, largest);
    assert_true(last >= V - 10 && last < V);
    free(logits);
}

// ---- the loop ----

enum { SEQ = 8, ROOM = 40 };

// Weights large enough that the next token depends on all before it; no MTP, as --generate opens it.
static void open_model(struct model *m, int vocab) {
    struct config c = preset_find("unit")->model;
    c.mtp_depth = 0;
    c.vocab = vocab;
    config_validate(&c);
    model_open(m, &c, 1, SEQ, false, NULL, NULL);
    init_weights(m->weights, &m->params, 0.2, 3);
}

static void assert_tokens_valid(const int32_t *tokens, int count, int vocab) {
    for (int i = 0; i < count; i++) assert_in_range(tokens[i], 0, vocab - 1);
}

static void check_seeds(int vocab) {
    struct model m;
    open_model(&m, vocab);
    int32_t a[ROOM] = {5, 6, 7}, b[ROOM] = {5, 6, 7};
    assert_int_equal(generate_tokens(&m, a, 3, 20, 0.8, 11, -1), 20);
    assert_int_equal(generate_tokens(&m, b, 3, 20, 0.8, 11, -1), 20);
    assert_memory_equal(a, b, sizeof a);
    assert_tokens_valid(a, 23, vocab);
    assert_true(a[0] == 5 && a[1] == 6 && a[2] == 7);
    for (int i = 23; i < ROOM; i++) assert_int_equal(a[i], 0); // nothing beyond what was asked for
    assert_int_equal(generate_tokens(&m, b, 3, 20, 0.8, 12, -1), 20);
    assert_memory_not_equal(a, b, sizeof a);
    model_close(&m);
}

static void same_seed_gives_the_same_text_and_another_seed_another(void **state) {
    (void)state;
    check_seeds(257);
    check_seeds(2003);
}

static void text_of_a_large_vocabulary_uses_ids_beyond_the_bytes(void **state) {
    (void)state;
    struct model m;
    open_model(&m, 2003);
    int32_t tokens[ROOM] = {1};
    generate_tokens(&m, tokens, 1, 30, 1, 1, -1);
    int beyond = 0;
    for (int i = 1; i <= 30; i++) beyond += tokens[i] > 256;
    assert_true(beyond > 0);
    model_close(&m);
}

static void sampling_stops_behind_the_stop_token(void **state) {
    (void)state;
    struct model m;
    open_model(&m, 257);
    int32_t whole[ROOM] = {5}, stopped[ROOM] = {5};
    generate_tokens(&m, whole, 1, 20, 0.8, 1, -1);
    int first = 1;
    while (whole[first] != whole[6]) first++; // where the sixth new token comes for the first time
    assert_int_equal(generate_tokens(&m, stopped, 1, 20, 0.8, 1, whole[6]), first);
    assert_memory_equal(stopped, whole, sizeof(int32_t) * (size_t)(first + 1));
    for (int i = first + 1; i < ROOM; i++) assert_int_equal(stopped[i], 0);
    assert_int_equal(generate_tokens(&m, stopped, 1, 0, 0.8, 1, -1), 0);
    // In the prompt it stops nothing: a text begins behind such a token.
    assert_true(whole[1] != 5);
    assert_true(generate_tokens(&m, stopped, 1, 20, 0.8, 1, 5) > 1);
    model_close(&m);
}

// Drawing all at once, or some and then more from the longer prompt: the choice depends on seed and position alone.
static void text_does_not_depend_on_where_the_prompt_ended(void **state) {
    (void)state;
    struct model m;
    open_model(&m, 257);
    int32_t whole[ROOM] = {5, 9}, parts[ROOM] = {5, 9};
    generate_tokens(&m, whole, 2, 24, 0.8, 1, -1);
    generate_tokens(&m, parts, 2, 3, 0.8, 1, -1);
    generate_tokens(&m, parts, 5, 7, 0.8, 1, -1);
    generate_tokens(&m, parts, 12, 14, 0.8, 1, -1);
    assert_memory_equal(whole, parts, sizeof whole);
    model_close(&m);
}

// Beyond the model's length the window slides: every token follows from the last SEQ before it.
static void text_longer_than_the_window_follows_from_its_last_tokens(void **state) {
    (void)state;
    struct model m;
    open_model(&m, 257);
    float logits[257];
    int32_t tokens[ROOM] = {5, 9, 17};
    const int prompt = 3, count = 3 * SEQ;
    assert_int_equal(generate_tokens(&m, tokens, prompt, count, 0, 1, -1), count);
    for (int i = prompt; i < prompt + count; i++) {
        int window = i < SEQ ? i : SEQ;
        model_logits(&m, tokens + i - window, window, window - 1, logits);
        assert_int_equal(tokens[i], generate_pick(logits, 257, 0, 0));
    }
    int32_t copy[ROOM]; // a prompt that is longer than the window itself
    memcpy(copy, tokens, sizeof copy);
    memset(copy + 2 * SEQ, 0, sizeof copy - sizeof(int32_t) * 2 * SEQ);
    generate_tokens(&m, copy, 2 * SEQ, prompt + count - 2 * SEQ, 0, 1, -1);
    assert_memory_equal(copy, tokens, sizeof copy);
    model_close(&m);
}

// All tokens alike likely: a draw that did not depend on the position would take the same one every time.
static void every_position_draws_anew(void **state) {
    (void)state;
    struct config c = preset_find("unit")->model;
    struct model m;
    model_open(&m, &c, 1, 16, false, NULL, NULL); // weights of zero
    int32_t tokens[33] = {0};
    assert_int_equal(generate_tokens(&m, tokens, 1, 32, 1, 5, -1), 32);
    int repeats = 0;
    for (int i = 2; i <= 32; i++) repeats += tokens[i] == tokens[i - 1];
    assert_in_range(repeats, 0, 4); // 31/257 are expected
    model_close(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_position_draws_anew),
        cmocka_unit_test(temperature_zero_takes_the_first_of_the_largest),
        cmocka_unit_test(logits_of_ten_thousand_are_no_trouble),
        cmocka_unit_test(choices_have_the_probabilities_of_the_softmax),
        cmocka_unit_test(u_at_its_ends_gives_an_index_that_is_possible),
        cmocka_unit_test(same_seed_gives_the_same_text_and_another_seed_another),
        cmocka_unit_test(text_of_a_large_vocabulary_uses_ids_beyond_the_bytes),
        cmocka_unit_test(sampling_stops_behind_the_stop_token),
        cmocka_unit_test(text_does_not_depend_on_where_the_prompt_ended),
        cmocka_unit_test(text_longer_than_the_window_follows_from_its_last_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
