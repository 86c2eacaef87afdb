// One micro-batch through the model, in FP32: what the losses are divided by, what may depend on what, experts
// without tokens, the balance loss, the MTP modules. (The gradients' values are checked by tests/test_gradients.c.)
#include "tests/configs.h"
#include "tests/test.h"

#include "model/model.h"
#include "model/presets.h"

enum { LENGTH = 8, SEQUENCES = 3 };

// ---- a small model with weights that make attention and routing far from uniform ----

static struct config unit(void) { return preset_find("unit")->model; }

static struct config unit_without_mtp(void) {
    struct config c = unit();
    c.mtp_depth = 0;
    return c;
}

static void open_model(struct model *m, const struct config *c, int batch, int seq) {
    config_validate(c);
    model_open(m, c, batch, seq, true, NULL, NULL);
    init_weights(m->weights, &m->params, 0.15, 1);
}

static void *copy_bytes(const void *from, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    return memcpy(copy, from, bytes);
}

static accum *copy_grads(const struct model *m) { return copy_bytes(m->grads, sizeof(accum) * m->params.size); }

// Random tokens [rows, columns] for the caller to free.
static int32_t *random_tokens(int rows, int columns, int vocab, uint64_t seed) {
    size_t count = (size_t)rows * (size_t)columns;
    int32_t *tokens = malloc(sizeof *tokens * count);
    assert_non_null(tokens);
    for (size_t i = 0; i < count; i++) tokens[i] = (int32_t)(test_uniform(&seed) * vocab);
    return tokens;
}

static struct step_totals totals_of(const struct model *m, struct batch batch) {
    struct step_totals totals = {0};
    model_add_totals(&totals, &m->config, batch);
    return totals;
}

// Gradients of one micro-batch alone.
static struct losses gradient_of(struct model *m, struct batch batch, const struct step_totals *totals) {
    device_zero(m->grads, sizeof(accum) * m->params.size);
    model_gradient(m, batch, totals);
    return model_take_losses(m);
}

static size_t count_nonzero(const accum *values, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += values[i] != 0; // NaN counts
    return count;
}

static int expert_of(const struct param *p) {
    const char *at = strstr(p->name, "mlp.experts.");
    return at ? atoi(at + strlen("mlp.experts.")) : -1;
}

// Every tensor on its own. Both sides are sums of the same FP32 terms in another order, or scaled before instead of
// after: measured 1.2e-6 at worst, where terms cancel. 1e-5 leaves a factor of eight.
static void assert_gradients_close(const struct model *m, const accum *found, const accum *wanted) {
    for (int i = 0; i < m->params.count; i++) {
        const struct param *p = &m->params.list[i];
        test_assert_close(p->name, found + p->offset, wanted + p->offset, param_size(p), 1e-5);
    }
}

// ---- masked targets ----

// (sum 2, 1 token) and (sum 90, 9 tokens) make 9.2, not the 6.0 of a mean of means (torchtitan pulls 2206 and 4167).
static void micro_batches_with_unequal_targets_give_the_mean_over_all_targets(void **state) {
    (void)state;
    enum { T = 9 };
    struct config c = unit_without_mtp();
    c.balance_alpha = 0;
    struct model m;
    open_model(&m, &c, 2, T);
    int32_t *tokens = random_tokens(2, T + 1, c.vocab, 2);
    for (int t = 2; t <= T; t++) tokens[t] = -1; // one target is left in the first sequence
    struct batch both = {tokens, 2, T, 0}, first = {tokens, 1, T, 0}, second = {tokens + T + 1, 1, T, 0};
    struct step_totals totals = totals_of(&m, both), of_first = totals_of(&m, first), of_second = totals_of(&m, second);
    assert_int_equal(of_first.targets[0], 1);
    assert_int_equal(of_second.targets[0], T);
    assert_int_equal(totals.targets[0], 1 + T);

    // The mean over all targets, from each micro-batch's own mean.
    double mean_first = gradient_of(&m, first, &of_first).cross_entropy[0];
    accum *wanted = copy_grads(&m);
    double mean_second = gradient_of(&m, second, &of_second).cross_entropy[0] / T;
    for (size_t i = 0; i < m.params.size; i++) wanted[i] = (accum)((wanted[i] + T * (double)m.grads[i]) / (T + 1));
    double wanted_loss = (mean_first + T * mean_second) / (T + 1);
    assert_true(fabs(wanted_loss - (mean_first + mean_second) / 2) > 1e-3);

    // 1e-6: ten FP32 losses with one rounding each.
    double loss = gradient_of(&m, both, &totals).cross_entropy[0] / (double)totals.targets[0];
    assert_true(fabs(loss - wanted_loss) <= 1e-6 * wanted_loss);
    assert_gradients_close(&m, m.grads, wanted);

    device_zero(m.grads, sizeof(accum) * m.params.size);
    model_gradient(&m, first, &totals);
    model_gradient(&m, second, &totals);
    double sum = model_take_losses(&m).cross_entropy[0];
    assert_true(fabs(sum / (double)totals.targets[0] - wanted_loss) <= 1e-6 * wanted_loss);
    assert_gradients_close(&m, m.grads, wanted);
    free(wanted);
    free(tokens);
    model_close(&m);
}

static void batch_without_any_target_has_gradient_zero(void **state) {
    (void)state;
    struct config c = unit();
    c.balance_alpha = 0;
    struct model m;
    open_model(&m, &c, 1, LENGTH);
    int32_t tokens[LENGTH + 2];
    for (int t = 0; t < LENGTH + 2; t++) tokens[t] = t == 0 ? 5 : -1;
    struct batch batch = {tokens, 1, LENGTH, 0};
    struct step_totals totals = totals_of(&m, batch);
    assert_int_equal(totals.targets[0], 0);
    struct losses sums = gradient_of(&m, batch, &totals);
    assert_true(sums.cross_entropy[0] == 0 && sums.cross_entropy[1] == 0);
    assert_int_equal(count_nonzero(m.grads, m.params.size), 0);
    model_close(&m);
}

// ---- what may depend on what ----

static void check_logits_ignore_later_tokens(const struct config *c) {
    enum { T = 11, LATER = 3 };
    struct model m;
    open_model(&m, c, 1, T + LATER);
    size_t V = (size_t)c->vocab;
    int32_t *tokens = random_tokens(1, T + LATER, c->vocab, 3);
    float *alone = malloc(sizeof(float) * T * V), *longer = malloc(sizeof(float) * (T + LATER) * V);
    assert_true(alone && longer);
    model_logits(&m, tokens, T, 0, alone);
    model_logits(&m, tokens, T + LATER, 0, longer);
    assert_memory_equal(alone, longer, sizeof(float) * T * V);

    model_logits(&m, tokens, T, 4, longer); // and rows do not depend on the first one that is asked for
    assert_memory_equal(alone + 4 * V, longer, sizeof(float) * (T - 4) * V);
    tokens[5]++;
    model_logits(&m, tokens, T, 0, longer);
    assert_memory_equal(alone, longer, sizeof(float) * 5 * V);
    for (size_t t = 5; t < T; t++) assert_memory_not_equal(alone + t * V, longer + t * V, sizeof(float) * V);
    free(longer);
    free(alone);
    free(tokens);
    model_close(&m);
}

static void logits_do_not_depend_on_later_tokens(void **state) {
    (void)state;
    struct config c = unit();
    check_logits_ignore_later_tokens(&c);
    c.vocab = 1003;
    c.q_rank = 0;
    c.groups = c.top_groups = 1;
    check_logits_ignore_later_tokens(&c);
}

static void loss_of_a_sequence_does_not_depend_on_the_others(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, SEQUENCES, LENGTH);
    int columns = LENGTH + 2;
    int32_t *tokens = random_tokens(SEQUENCES, columns, c.vocab, 4);
    struct losses all = model_evaluate(&m, (struct batch){tokens, SEQUENCES, LENGTH, 0}), sums = {0};
    for (int b = 0; b < SEQUENCES; b++) {
        struct losses one = model_evaluate(&m, (struct batch){tokens + b * columns, 1, LENGTH, 0});
        for (int k = 0; k <= 1; k++) sums.cross_entropy[k] += one.cross_entropy[k];
        sums.balance += one.balance;
    }
    // Every token's loss has the same bits in both; only their sums (in double) group differently.
    for (int k = 0; k <= 1; k++)
        assert_true(fabs(sums.cross_entropy[k] - all.cross_entropy[k]) <= 1e-14 * all.cross_entropy[k]);
    assert_true(fabs(sums.balance - all.balance) <= 1e-14 * all.balance);
    free(tokens);
    model_close(&m);
}

// Large vocabularies get their logits in pieces: pieces of 5 rows instead of all 24.
static void pieces_of_logits_change_nothing(void **state) {
    (void)state;
    enum { PIECE = 5 };
    struct config c = unit();
    struct model m;
    open_model(&m, &c, SEQUENCES, LENGTH);
    int32_t *tokens = random_tokens(SEQUENCES, LENGTH + 2, c.vocab, 5);
    struct batch batch = {tokens, SEQUENCES, LENGTH, 0};
    struct step_totals totals = totals_of(&m, batch);
    size_t V = (size_t)c.vocab;
    float *whole = malloc(sizeof(float) * LENGTH * V), *pieces = malloc(sizeof(float) * LENGTH * V);
    assert_true(whole && pieces);
    assert_true(m.acts.logit_rows >= SEQUENCES * LENGTH);

    model_logits(&m, tokens, LENGTH, 0, whole);
    struct losses wanted = gradient_of(&m, batch, &totals);
    accum *wanted_grads = copy_grads(&m);
    m.acts.logit_rows = PIECE;
    model_logits(&m, tokens, LENGTH, 0, pieces);
    struct losses found = gradient_of(&m, batch, &totals);
    struct losses evaluated = model_evaluate(&m, batch);
    assert_memory_equal(whole, pieces, sizeof(float) * LENGTH * V);
    for (int k = 0; k <= 1; k++) {
        assert_true(found.cross_entropy[k] == wanted.cross_entropy[k]);
        assert_true(evaluated.cross_entropy[k] == wanted.cross_entropy[k]);
    }
    assert_memory_equal(m.grads, wanted_grads, sizeof(accum) * m.params.size);
    free(wanted_grads);
    free(pieces);
    free(whole);
    free(tokens);
    model_close(&m);
}

static void gradients_are_added_to_what_is_there(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, SEQUENCES, LENGTH);
    int32_t *tokens = random_tokens(SEQUENCES, LENGTH + 2, c.vocab, 6);
    struct batch batch = {tokens, SEQUENCES, LENGTH, 0};
    struct step_totals totals = totals_of(&m, batch);
    gradient_of(&m, batch, &totals);
    accum *doubled = copy_grads(&m);
    for (size_t i = 0; i < m.params.size; i++) doubled[i] *= 2;
    model_gradient(&m, batch, &totals);
    assert_gradients_close(&m, m.grads, doubled);
    free(doubled);
    free(tokens);
    model_close(&m);
}

// ---- the first pass of a step ----

// Two micro-batches, the first of `rows` sequences: passes that store and then add, against passes that add to zeros.
static void check_step_from_poison(struct moe_settings settings, int rows) {
    struct config c = unit();
    c.mtp_depth = 2;
    config_validate(&c);
    assert_true(c.dense_layers > 0 && c.dense_layers < c.layers && c.shared_experts > 0);
    struct model m;
    model_open(&m, &c, SEQUENCES, LENGTH, true, NULL, &settings);
    init_weights(m.weights, &m.params, 0.15, 1);
    m.acts.logit_rows = 5; // several chunks of every head
    int columns = LENGTH + 1 + c.mtp_depth;
    int32_t *tokens = random_tokens(SEQUENCES, columns, c.vocab, 13);
    struct batch first = {tokens, rows, LENGTH, 0};
    struct batch second = {tokens + rows * columns, SEQUENCES - rows, LENGTH, rows};
    struct step_totals totals = totals_of(&m, first);
    model_add_totals(&totals, &c, second);
    model_gradient(&m, first, &totals);
    model_gradient(&m, second, &totals);
    accum *wanted = copy_grads(&m);

    poison_gradients(m.grads, &m.params);
    model_begin_gradients(&m);
    model_gradient(&m, first, &totals);
    model_evaluate(&m, second);
    model_gradient(&m, second, &totals);
    for (int i = 0; i < m.params.count; i++) {
        const struct param *p = &m.params.list[i];
        if (memcmp(m.grads + p->offset, wanted + p->offset, sizeof(accum) * param_size(p)))
            fail_msg("the gradient of %s depends on what was in its memory", p->name);
    }
    free(wanted);
    free(tokens);
    model_close(&m);
}

static void gradients_of_a_step_do_not_depend_on_what_was_in_their_memory(void **state) {
    (void)state;
    for (int rows = 0; rows < SEQUENCES; rows++)
        for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
            enum recompute recompute = (enum recompute)level;
            check_step_from_poison((struct moe_settings){.kind = MOE_MOK, .recompute = recompute}, rows);
            check_step_from_poison(
                (struct moe_settings){.kind = MOE_ALLTOALL, .alltoall_chunks = 2, .recompute = recompute}, rows);
        }
}

// ---- experts without tokens ----

// All bytes of the arena but the rotary angles, which are set once.
static void poison_activations(struct model *m) {
    char *arena = m->acts.arena, *angles = (char *)m->acts.angles;
    size_t angle_bytes = sizeof(accum) * (size_t)m->acts.seq * (size_t)m->config.rope_dim;
    size_t before = (size_t)(angles - arena);
    memset(arena, 0xff, before);
    memset(angles + angle_bytes, 0xff, m->acts.bytes - before - angle_bytes);
}

// Public bugs: weight gradients of experts without tokens kept whatever was in memory (MSLK pull 158, grouped_gemm
// issue 36, transformers pull 48205).
static void check_idle_experts(const struct config *c, float push, int at_least_idle) {
    enum { T = 8 };
    struct model m;
    open_model(&m, c, 1, T);
    for (int block = c->dense_layers; block < config_blocks(c); block++)
        for (int e = 0; e < c->top_k; e++) model_bias(&m, block)[e] = push;
    int32_t *tokens = random_tokens(1, T + 1 + c->mtp_depth, c->vocab, 7);
    struct batch batch = {tokens, 1, T, 0};
    struct step_totals totals = totals_of(&m, batch);
    struct losses wanted = gradient_of(&m, batch, &totals);
    accum *clean = copy_grads(&m);

    poison_activations(&m);
    memset(m.counts, 0, sizeof(int64_t) * model_bias_size(c));
    struct losses found = gradient_of(&m, batch, &totals);
    assert_true(isfinite(found.cross_entropy[0]) && found.cross_entropy[0] == wanted.cross_entropy[0]);
    assert_true(found.balance == wanted.balance);
    assert_memory_equal(m.grads, clean, sizeof(accum) * m.params.size);
    for (size_t i = 0; i < m.params.size; i++) assert_true(isfinite(m.grads[i]));

    for (int block = c->dense_layers; block < config_blocks(c); block++) {
        int idle = 0;
        for (int e = 0; e < c->experts; e++) idle += model_counts(&m, block)[e] == 0;
        assert_true(idle >= at_least_idle);
    }
    for (int i = 0; i < m.params.count; i++) {
        const struct param *p = &m.params.list[i];
        int e = expert_of(p);
        if (e < 0) continue;
        bool used = model_counts(&m, p->block)[e] > 0;
        if (used != (count_nonzero(m.grads + p->offset, param_size(p)) > 0))
            fail_msg("%s: expert with%s tokens, gradient %s", p->name, used ? "" : "out", used ? "zero" : "not zero");
    }
    free(clean);
    free(tokens);
    model_close(&m);
}

static void experts_without_tokens_have_gradient_zero_whatever_was_in_memory(void **state) {
    (void)state;
    struct config c = unit();
    check_idle_experts(&c, 10, c.experts - c.top_k); // all tokens go to the first top_k experts
    c.experts = 64;
    c.groups = c.top_groups = 1;
    check_idle_experts(&c, 0, 64 - 8 * c.top_k); // 8 tokens cannot reach them all
    c.shared_experts = 0;
    check_idle_experts(&c, -10, 64 - 8 * c.top_k);
}

// ---- balance loss ----

// Scores that are all equal: f sums to E, every P is 1 / E, so each sequence and MoE block adds exactly 1.
static void balance_of_equal_scores_is_one_per_sequence_and_block(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, SEQUENCES, LENGTH);
    for (int block = c.dense_layers; block < config_blocks(&c); block++)
        memset(m.weights + m.params.blocks[block].router, 0, sizeof(real) * (size_t)c.experts * (size_t)c.hidden);
    int32_t *tokens = random_tokens(SEQUENCES, LENGTH + 2, c.vocab, 8);
    double balance = model_evaluate(&m, (struct batch){tokens, SEQUENCES, LENGTH, 0}).balance;
    // 1e-6: P sums to 1 in FP32.
    assert_true(fabs(balance - SEQUENCES * model_moe_blocks(&c)) <= 1e-6 * balance);
    free(tokens);
    model_close(&m);
}

// Its gradient once reached no router at all (Automodel issue 1408). Sequences of one token whose target is masked
// have no other loss. Factors that are powers of two change no bit but the exponent.
static void balance_gradient_is_alpha_over_sequences_and_reaches_every_router(void **state) {
    (void)state;
    enum { B = 16 };
    struct config c = unit();
    struct model m;
    open_model(&m, &c, B, 1);
    int32_t *tokens = random_tokens(B, 3, c.vocab, 9);
    for (int b = 0; b < B; b++) tokens[3 * b + 1] = tokens[3 * b + 2] = -1;
    struct batch batch = {tokens, B, 1, 0};
    struct step_totals totals = totals_of(&m, batch), of_two_batches = {.sequences = 2 * B};
    assert_int_equal(totals.sequences, B);

    m.config.balance_alpha = 0;
    gradient_of(&m, batch, &totals);
    assert_int_equal(count_nonzero(m.grads, m.params.size), 0);

    m.config.balance_alpha = 1;
    gradient_of(&m, batch, &totals);
    accum *one = copy_grads(&m);
    size_t router = (size_t)(c.experts * c.hidden);
    for (int block = c.dense_layers; block < c.layers; block++)
        assert_true(count_nonzero(one + m.params.blocks[block].router, router) > 0);
    // The MTP module's inputs are the masked tokens.
    assert_int_equal(count_nonzero(one + m.params.blocks[c.layers].router, router), 0);
    m.config.balance_alpha = 1024;
    gradient_of(&m, batch, &totals);
    for (size_t i = 0; i < m.params.size; i++) assert_true(m.grads[i] == 1024 * one[i]);
    m.config.balance_alpha = 1;
    gradient_of(&m, batch, &of_two_batches);
    for (size_t i = 0; i < m.params.size; i++) assert_true(m.grads[i] == one[i] / 2);
    free(one);
    free(tokens);
    model_close(&m);
}

// ---- MTP ----

// tokens [SEQUENCES, LENGTH + 2] and, for a model without MTP, the same without the last column.
static void random_tokens_for_both(int32_t **with, int32_t **without, int vocab, uint64_t seed) {
    *with = random_tokens(SEQUENCES, LENGTH + 2, vocab, seed);
    *without = random_tokens(SEQUENCES, LENGTH + 1, vocab, seed);
    for (int b = 0; b < SEQUENCES; b++)
        memcpy(*without + b * (LENGTH + 1), *with + b * (LENGTH + 2), sizeof(int32_t) * (LENGTH + 1));
}

// The balance loss is off, because the module's own balance loss does reach the main model.
static void mtp_of_weight_zero_trains_the_main_model_as_without_mtp(void **state) {
    (void)state;
    struct config c = unit(), off = unit_without_mtp();
    c.balance_alpha = off.balance_alpha = c.mtp_weight = 0;
    struct model m, plain;
    open_model(&m, &c, SEQUENCES, LENGTH);
    open_model(&plain, &off, SEQUENCES, LENGTH);
    int32_t *tokens, *plain_tokens;
    random_tokens_for_both(&tokens, &plain_tokens, c.vocab, 10);
    struct batch batch = {tokens, SEQUENCES, LENGTH, 0}, plain_batch = {plain_tokens, SEQUENCES, LENGTH, 0};
    struct step_totals totals = totals_of(&m, batch), plain_totals = totals_of(&plain, plain_batch);
    double loss = gradient_of(&m, batch, &totals).cross_entropy[0];
    assert_true(loss == gradient_of(&plain, plain_batch, &plain_totals).cross_entropy[0]);

    int shared = 0;
    for (int i = 0; i < m.params.count; i++) {
        const struct param *p = &m.params.list[i];
        const accum *found = m.grads + p->offset;
        if (p->block >= c.layers) {
            assert_int_equal(count_nonzero(found, param_size(p)), 0);
            continue;
        }
        const struct param *q = &plain.params.list[shared++];
        while (strcmp(q->name, p->name) != 0 && shared < plain.params.count) q = &plain.params.list[shared++];
        assert_string_equal(q->name, p->name);
        const accum *wanted = plain.grads + q->offset;
        for (size_t j = 0; j < param_size(p); j++)
            if (found[j] != wanted[j]) fail_msg("%s[%zu]: %.9g, without MTP %.9g", p->name, j, found[j], wanted[j]);
    }
    assert_int_equal(shared, plain.params.count);
    free(plain_tokens);
    free(tokens);
    model_close(&plain);
    model_close(&m);
}

// The module continues the state behind the final norm (as released code does; the concatenation has the embedding
// first). A channel that the final norm switches off is then zero there, and the column of eh_proj that reads it gets
// no gradient at all, while the same channel of the embedding's half does.
static void mtp_reads_the_hidden_state_after_the_final_norm(void **state) {
    (void)state;
    enum { CHANNEL = 5 };
    struct config c = unit();
    struct model m;
    open_model(&m, &c, SEQUENCES, LENGTH);
    m.weights[m.params.final_norm + CHANNEL] = 0;
    int32_t *tokens = random_tokens(SEQUENCES, LENGTH + 1 + c.mtp_depth, c.vocab, 3);
    struct batch batch = {tokens, SEQUENCES, LENGTH, 0};
    struct step_totals totals = totals_of(&m, batch);
    gradient_of(&m, batch, &totals);
    const accum *d_eh_proj = m.grads + m.params.blocks[c.layers].eh_proj;
    for (int row = 0; row < c.hidden; row++) {
        const accum *d_row = d_eh_proj + (size_t)row * 2 * (size_t)c.hidden;
        assert_true(d_row[c.hidden + CHANNEL] == 0 && d_row[c.hidden + CHANNEL + 1] != 0 && d_row[CHANNEL] != 0);
    }
    free(tokens);
    model_close(&m);
}

static void mtp_gradient_is_proportional_to_its_weight(void **state) {
    (void)state;
    struct config c = unit();
    c.balance_alpha = 0;
    struct model m;
    open_model(&m, &c, SEQUENCES, LENGTH);
    int32_t *tokens = random_tokens(SEQUENCES, LENGTH + 2, c.vocab, 11);
    struct batch batch = {tokens, SEQUENCES, LENGTH, 0};
    struct step_totals totals = totals_of(&m, batch);
    m.config.mtp_weight = 0.25;
    gradient_of(&m, batch, &totals);
    accum *quarter = copy_grads(&m);
    m.config.mtp_weight = 1;
    gradient_of(&m, batch, &totals);
    size_t nonzero = 0;
    for (int i = 0; i < m.params.count; i++) {
        const struct param *p = &m.params.list[i];
        if (p->block < c.layers) continue; // main model: its own loss is in there too
        for (size_t j = p->offset; j < p->offset + param_size(p); j++) assert_true(m.grads[j] == 4 * quarter[j]);
        nonzero += count_nonzero(m.grads + p->offset, param_size(p));
    }
    assert_true(nonzero > 0);
    free(quarter);
    free(tokens);
    model_close(&m);
}

// Padding is -1 all the way: it goes to no expert and is not counted (torchtitan issue 4168: in bias-balancing counts), and the
// rest of the sequence does not notice it.
static void padding_changes_nothing_but_the_length(void **state) {
    (void)state;
    enum { SHORT = 3, LONG = 8 };
    struct config c = unit_without_mtp();
    c.balance_alpha = 0.5;
    struct model m;
    open_model(&m, &c, 1, LONG);
    int32_t *tokens = random_tokens(1, LONG + 1, c.vocab, 21);
    for (int t = SHORT + 1; t <= LONG; t++) tokens[t] = -1;
    // The last real target is the first input of the padding: embedded and routed like any other token.
    int inputs = SHORT + 1;
    struct batch padded = {tokens, 1, LONG, 0}, exact = {tokens, 1, inputs, 0};
    struct step_totals totals = totals_of(&m, padded);
    assert_int_equal(totals.targets[0], SHORT);

    device_zero(m.counts, sizeof(int64_t) * model_bias_size(&c));
    struct losses wanted_losses = gradient_of(&m, exact, &totals);
    accum *wanted = copy_grads(&m);
    device_zero(m.counts, sizeof(int64_t) * model_bias_size(&c));
    poison_activations(&m);
    struct losses found_losses = gradient_of(&m, padded, &totals);
    for (int block = c.dense_layers; block < c.layers; block++) {
        int64_t total = 0;
        for (int e = 0; e < c.experts; e++) total += model_counts(&m, block)[e];
        assert_int_equal(total, c.top_k * inputs);
    }
    assert_true(found_losses.cross_entropy[0] == wanted_losses.cross_entropy[0]);
    assert_true(found_losses.balance == wanted_losses.balance);
    for (size_t i = 0; i < m.params.size; i++) assert_true(m.grads[i] == wanted[i]);
    free(wanted);
    free(tokens);
    model_close(&m);
}

// A loader that has no token beyond the last main target masks it. Position T - 1 then drops out of depth 1, which
// must be that of a sequence one shorter, divided by one target fewer (Megatron issue 1532, DeepSeek-V3 issue 839).
static void mtp_with_a_masked_tail_is_that_of_a_shorter_sequence(void **state) {
    (void)state;
    struct config c = unit();
    c.balance_alpha = 0;
    struct model m;
    open_model(&m, &c, 1, LENGTH);
    int32_t *tokens = random_tokens(1, LENGTH + 2, c.vocab, 12);
    struct batch batch = {tokens, 1, LENGTH, 0}, short_batch = {tokens, 1, LENGTH - 1, 0};
    struct losses whole = model_evaluate(&m, batch);
    struct step_totals short_totals = totals_of(&m, short_batch);
    struct losses shorter = gradient_of(&m, short_batch, &short_totals);
    accum *wanted = copy_grads(&m);

    tokens[LENGTH + 1] = -1;
    struct step_totals totals = totals_of(&m, batch);
    struct losses masked = gradient_of(&m, batch, &totals);
    assert_int_equal(totals.targets[0], LENGTH);
    assert_int_equal(totals.targets[1], LENGTH - 1);
    assert_true(masked.cross_entropy[0] == whole.cross_entropy[0]);
    assert_true(masked.cross_entropy[1] == shorter.cross_entropy[1]);
    assert_true(masked.cross_entropy[1] < whole.cross_entropy[1]);
    for (int i = 0; i < m.params.count; i++) {
        const struct param *p = &m.params.list[i];
        if (p->block < c.layers) continue; // the main model has one target more
        for (size_t j = p->offset; j < p->offset + param_size(p); j++) assert_true(m.grads[j] == wanted[j]);
    }
    free(wanted);
    free(tokens);
    model_close(&m);
}

static void sequence_of_one_token_without_mtp_target_is_finite(void **state) {
    (void)state;
    struct config c = unit();
    struct model m;
    open_model(&m, &c, 1, 1);
    const int32_t tokens[] = {3, 4, -1};
    struct batch batch = {tokens, 1, 1, 0};
    struct step_totals totals = totals_of(&m, batch);
    assert_true(totals.targets[0] == 1 && totals.targets[1] == 0);
    struct losses losses = gradient_of(&m, batch, &totals);
    assert_true(losses.cross_entropy[0] > 0 && losses.cross_entropy[1] == 0);
    for (size_t i = 0; i < m.params.size; i++) assert_true(isfinite(m.grads[i]));
    model_close(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(micro_batches_with_unequal_targets_give_the_mean_over_all_targets),
        cmocka_unit_test(batch_without_any_target_has_gradient_zero),
        cmocka_unit_test(logits_do_not_depend_on_later_tokens),
        cmocka_unit_test(loss_of_a_sequence_does_not_depend_on_the_others),
        cmocka_unit_test(pieces_of_logits_change_nothing),
        cmocka_unit_test(gradients_are_added_to_what_is_there),
        cmocka_unit_test(gradients_of_a_step_do_not_depend_on_what_was_in_their_memory),
        cmocka_unit_test(experts_without_tokens_have_gradient_zero_whatever_was_in_memory),
        cmocka_unit_test(balance_of_equal_scores_is_one_per_sequence_and_block),
        cmocka_unit_test(balance_gradient_is_alpha_over_sequences_and_reaches_every_router),
        cmocka_unit_test(mtp_of_weight_zero_trains_the_main_model_as_without_mtp),
        cmocka_unit_test(mtp_reads_the_hidden_state_after_the_final_norm),
        cmocka_unit_test(mtp_gradient_is_proportional_to_its_weight),
        cmocka_unit_test(padding_changes_nothing_but_the_length),
        cmocka_unit_test(mtp_with_a_masked_tail_is_that_of_a_shorter_sequence),
        cmocka_unit_test(sequence_of_one_token_without_mtp_target_is_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
