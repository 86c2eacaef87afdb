// What blocks compute again instead of keeping it changes no bit: losses, gradients and counts of every level against those
// of none, for both MoE layers, alone and on several ranks, over several micro-batches.
#include "tests/configs.h"
#include "tests/ranks.h"

#include <omp.h>

#include "model/model.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/presets.h"

enum { SEQUENCES = 3, LENGTH = 24, ROUNDS = 3 };

// Twelve experts, which 1, 2, 3, 4 and 6 ranks can share.
static struct config config_of(int dense_layers, int mtp_depth) {
    struct config c = preset_find("unit-12")->model;
    c.dense_layers = dense_layers;
    c.mtp_depth = mtp_depth;
    config_validate(&c);
    return c;
}

// A small ring makes several macrobatches; without recomputation all but the first one are replayed, with it that one too.
static const struct moe_settings ways[] = {
    {.kind = MOE_ALLTOALL, .alltoall_chunks = 1},
    {.kind = MOE_ALLTOALL, .alltoall_chunks = 3},
    {.kind = MOE_ALLTOALL, .alltoall_chunks = 2, .route = ROUTE_W2},
    {.kind = MOE_MOK},
    {.kind = MOE_MOK, .workers = 2, .minibatch_rows = 128, .ring_rows = 256},
    {.kind = MOE_MOK, .workers = 3, .comm_workers = 1, .minibatch_rows = 128, .ring_rows = 128, .route = ROUTE_W2},
};

struct found {
    struct losses losses[ROUNDS];
    struct losses between; // an evaluation after the first round
    accum *grads;
    int64_t *counts;
};

static void *copy_out(const void *device, size_t bytes) {
    void *copy = malloc(bytes ? bytes : 1);
    assert_non_null(copy);
    device_copy_out(copy, device, bytes);
    return copy;
}

// This rank's tokens of a round, a few of them masked. In the last round the first of several ranks has none.
static struct batch batch_of(const struct config *c, const struct parallel *p, int round, int32_t *tokens) {
    uint64_t seed = 1000 + (uint64_t)(round * p->ranks + p->rank);
    int columns = LENGTH + 1 + c->mtp_depth, B = SEQUENCES - round;
    if (round == ROUNDS - 1 && p->ranks > 1 && p->rank == 0) B = 0;
    for (int i = 0; i < B * columns; i++) {
        tokens[i] = (int32_t)(test_uniform(&seed) * c->vocab);
        if (test_uniform(&seed) < 0.05) tokens[i] = -1;
    }
    return (struct batch){tokens, B, LENGTH, (int64_t)SEQUENCES * (round * p->ranks + p->rank)};
}

// Every rank has weights of its own making: any will do, as long as all levels have them.
static void run_step(struct found *f, const struct config *c, const struct parallel *p, struct moe_settings settings,
                     enum recompute level) {
    struct model m;
    int32_t tokens[SEQUENCES * (LENGTH + 1 + MTP_MAX)];
    struct step_totals totals = {.targets = {300, 290, 280}, .sequences = 9};
    settings.recompute = level;
    model_open(&m, c, SEQUENCES, LENGTH, true, p, &settings);
    m.seed = 5;
    float *flat = malloc(sizeof *flat * (m.params.size + 1));
    assert_non_null(flat);
    uint64_t seed = 7;
    for (size_t i = 0; i < m.params.size; i++) flat[i] = (float)(0.3 * (test_uniform(&seed) - 0.5));
    device_real_from_float(m.weights, flat, m.params.size);
    free(flat);
    model_begin_gradients(&m);
    for (int round = 0; round < ROUNDS; round++) {
        struct batch batch = batch_of(c, p, round, tokens);
        model_gradient(&m, batch, &totals);
        f->losses[round] = model_take_losses(&m);
        if (round == 0) f->between = model_evaluate(&m, batch);
    }
    f->grads = copy_out(m.grads, sizeof(accum) * m.params.size);
    f->counts = copy_out(m.counts, sizeof(int64_t) * model_bias_size(c));
    model_close(&m);
}

static void check_same(const struct found *found, const struct found *wanted, const struct config *c,
                       const struct parallel *p) {
    struct params params;
    params_build_share(&params, c, parallel_experts(p, c->experts));
    assert_memory_equal(found->losses, wanted->losses, sizeof found->losses);
    assert_memory_equal(&found->between, &wanted->between, sizeof found->between);
    assert_memory_equal(found->counts, wanted->counts, sizeof(int64_t) * model_bias_size(c));
    for (int i = 0; i < params.count; i++) {
        const struct param *tensor = &params.list[i];
        if (tensor->offset == PARAM_ELSEWHERE) continue;
        if (memcmp(found->grads + tensor->offset, wanted->grads + tensor->offset, sizeof(accum) * param_size(tensor)))
            fail_msg("the gradient of %s has other bits", tensor->name);
    }
    params_free(&params);
}

static void check_levels(const struct config *c) {
    struct parallel p;
    parallel_open(&p, comm_size(comm_world()), c->experts);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        struct found wanted = {0};
        run_step(&wanted, c, &p, ways[way], RECOMPUTE_NONE);
        for (int level = RECOMPUTE_MOE; level <= RECOMPUTE_BLOCK; level++) {
            struct found found = {0};
            run_step(&found, c, &p, ways[way], (enum recompute)level);
            check_same(&found, &wanted, c, &p);
            free(found.grads);
            free(found.counts);
        }
        double sum = 0;
        for (size_t i = 0; i < model_bias_size(c); i++) sum += (double)wanted.counts[i];
        assert_true((sum > 0) == (model_moe_blocks(c) > 0));
        free(wanted.grads);
        free(wanted.counts);
    }
    parallel_close(&p);
}

static void dense_and_moe_blocks_have_the_same_bits(void **state) {
    (void)state;
    struct config c = config_of(1, 0);
    check_levels(&c);
}

static void mtp_modules_have_the_same_bits(void **state) {
    (void)state;
    struct config c = config_of(1, 2);
    check_levels(&c);
}

static void a_model_of_moe_blocks_alone_has_the_same_bits(void **state) {
    (void)state;
    struct config c = config_of(0, 1);
    c.shared_experts = 0;
    check_levels(&c);
}

// The wider dense FFN shares its memory with the shared experts, and the other way round.
static void blocks_of_other_widths_share_memory(void **state) {
    (void)state;
    struct config c = config_of(2, 0);
    c.intermediate = 24;
    check_levels(&c);
    c.dense_layers = c.layers; // no experts at all
    check_levels(&c);
}

// ---- memory ----

static size_t bytes_at(const struct config *c, enum recompute level, size_t header, const char *name, int *copies) {
    struct activation_table table;
    activations_tabulate(&table, c, (struct activation_use){SEQUENCES, LENGTH, true, level, header});
    *copies = 0;
    for (int i = 0; i < table.count; i++)
        if (strcmp(table.rows[i].name, name) == 0) *copies = table.rows[i].copies;
    return table.bytes + table.symmetric_bytes;
}

static void less_is_kept_at_every_level(void **state) {
    (void)state;
    struct config c = config_of(1, 1);
    const char *const shared[] = {"q", "kv", "attention_norm", "middle", "ffn_norm", "gate_up", "scores", "ids"};
    int copies, blocks = config_blocks(&c);
    for (size_t header = 0; header <= 64; header += 64) {
        size_t none = bytes_at(&c, RECOMPUTE_NONE, header, "input", &copies);
        assert_int_equal(copies, blocks);
        assert_int_equal(bytes_at(&c, RECOMPUTE_MOE, header, "input", &copies), none);
        assert_true(bytes_at(&c, RECOMPUTE_BLOCK, header, "input", &copies) < none);
        assert_int_equal(copies, blocks);
        for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
            bytes_at(&c, RECOMPUTE_NONE, header, shared[i], &copies);
            assert_true(copies >= blocks - 1);
            bytes_at(&c, RECOMPUTE_BLOCK, header, shared[i], &copies);
            assert_int_equal(copies, strcmp(shared[i], "ids") == 0 ? 1 + 2 + c.mtp_depth : 1); // those of heads too
        }
    }
    struct moe_settings settings = {.kind = MOE_MOK};
    struct mok_shape s = moe_mok_shape(&c, 2, SEQUENCES * LENGTH, &settings);
    size_t mok[3], alltoall[3], row = (size_t)c.hidden + 2 * (size_t)c.expert_intermediate;
    size_t others = (size_t)model_moe_blocks(&c) - 1;
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        mok[level] = moe_mok_bytes(&c, &s, true, (enum recompute)level);
        alltoall[level] = moe_alltoall_bytes(&c, 2, SEQUENCES, LENGTH, true, (enum recompute)level);
    }
    assert_int_equal(mok[0] - mok[1], others * (size_t)s.ring_rows * row * sizeof(real));
    assert_int_equal(mok[1] - mok[2], others * mok_plan_bytes(&s));
    assert_true(alltoall[0] > alltoall[1] && alltoall[1] > alltoall[2]);
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        RANKS_TEST(less_is_kept_at_every_level),         RANKS_TEST(dense_and_moe_blocks_have_the_same_bits),
        RANKS_TEST(mtp_modules_have_the_same_bits),      RANKS_TEST(a_model_of_moe_blocks_alone_has_the_same_bits),
        RANKS_TEST(blocks_of_other_widths_share_memory),
    };
    ranks_start(argc, argv);
    if (comm_size(comm_world()) > 1) omp_set_num_threads(1);
    return ranks_stop(cmocka_run_group_tests(tests, NULL, NULL));
}
