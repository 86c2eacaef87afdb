// Parameters, operations and memory against published numbers and against formulas written down once more.
#include "tests/child.h"
#include "tests/configs.h"

#include <malloc.h>
#include <stdbool.h>

#include "kernels/kernels.h"
#include "model/activations.h"
#include "model/moe.h"
#include "model/moe_alltoall.h"
#include "model/moe_mok.h"
#include "model/plan.h"
#include "model/presets.h"
#include "model/sharding.h"
#include "model/trainer.h"

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

// A run of that model.
static struct options options_of(const struct config *c, int batch, int seq) {
    struct options o;
    assert_true(options_set_preset(&o, "tiny"));
    o.model = *c;
    o.batch = batch;
    o.seq = seq;
    o.tokens_per_step = 0; // one micro-batch of every rank
    return o;
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
    struct options o = options_of(&v3, 1, 4096);
    plan_make(&plan, &o, &parallel_alone);
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

static void memory_of_one_rank_is_that_of_its_arrays(void **state) {
    (void)state;
    struct config c = with_vocabulary(preset_find("tiny"));
    struct options o = options_of(&c, 8, 256);
    for (int way = 0; way < 6; way++) {
        enum moe_kind kind = way < 3 ? MOE_MOK : MOE_ALLTOALL;
        enum recompute level = way % 3;
        struct plan plan;
        struct params params;
        struct activation_table table;
        o.moe.kind = kind;
        o.moe.recompute = level;
        size_t header = moe_header_bytes(&c, &o.moe, 1), bias = (size_t)(3 * c.experts) * 12; // 3 layers have experts
        struct mok_shape shape = moe_mok_shape(&c, 1, 8 * 256, &o.moe);
        activations_tabulate(&table, &c, (struct activation_use){8, 256, true, level, header});
        params_build(&params, &c);
        plan_make(&plan, &o, &parallel_alone);
        assert_int_equal(plan.experts, c.experts);
        assert_int_equal(plan.weight_bytes, params.size * sizeof(real));
        assert_int_equal(plan.gradient_bytes, params.size * sizeof(accum));
        assert_int_equal(plan.master_bytes, params.size * sizeof(accum));
        assert_int_equal(plan.moment_bytes, 2 * params.size * sizeof(accum));
        assert_int_equal(plan.activation_bytes, table.bytes);
        assert_int_equal(plan.symmetric_bytes, table.symmetric_bytes);
        assert_true((plan.symmetric_bytes > 0) == (kind == MOE_MOK));
        assert_int_equal(plan.moe_bytes, bias + (kind == MOE_MOK ? moe_mok_bytes(&c, &shape, true, level)
                                                                 : moe_alltoall_bytes(&c, 1, 8, 256, true, level)));
        assert_int_equal(plan.total_bytes, params.size * (sizeof(real) + 4 * sizeof(accum)) + table.bytes +
                                               table.symmetric_bytes + plan.moe_bytes);
        params_free(&params);
    }
}

// Every rank of the job, by the tables that a run uses: no rank needs more than the plan says, and one needs that.
static void memory_of_several_ranks_is_that_of_the_fullest(void **state) {
    (void)state;
    const int layouts[][2] = {{1, 1}, {4, 1}, {4, 4}, {6, 6}, {8, 4}, {10, 5}, {15, 3}, {64, 4}, {72, 6}};
    struct options o = options_of(&uneven, 2, 16);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        int ranks = layouts[i][0], ep = layouts[i][1];
        size_t weights = 0, shards = 0, all_shards = 0;
        struct parallel suppose = parallel_suppose(ranks, ep, uneven.experts);
        struct plan plan;
        plan_make(&plan, &o, &suppose);
        for (int r = 0; r < ranks; r++) {
            struct parallel p = {r, ranks, ep, r % ep, ranks / ep, r / ep, NULL, NULL, NULL};
            struct params params;
            struct sharding sharding;
            params_build_share(&params, &uneven, parallel_experts(&p, uneven.experts));
            sharding_build(&sharding, &params, &p);
            if (params.size > weights) weights = params.size;
            if (sharding.size > shards) shards = sharding.size;
            all_shards += sharding.size;
            sharding_free(&sharding);
            params_free(&params);
        }
        assert_int_equal(plan.weight_bytes, weights * sizeof(real));
        assert_int_equal(plan.gradient_bytes, weights * sizeof(accum));
        assert_int_equal(plan.master_bytes, shards * sizeof(accum));
        assert_int_equal(plan.moment_bytes, 2 * shards * sizeof(accum));
        assert_true(ranks * plan.master_bytes >= all_shards * sizeof(accum));
        // The parameters are counted once, on any layout.
        assert_true(plan.total == (double)total_formula(&uneven, uneven.experts));
    }
}

// What the allocator handed out says that no buffer was forgotten, and none invented.
static void plan_is_what_a_trainer_takes(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    skip(); // its allocator keeps other books
#endif
    struct options o;
    assert_true(options_set_preset(&o, "tiny"));
    o.model.vocab = 257;
    o.tokens_per_step = (int64_t)o.batch * o.seq;
    for (int way = 0; way < 6; way++) {
        struct plan plan;
        struct trainer t;
        o.moe.kind = way < 3 ? MOE_MOK : MOE_ALLTOALL;
        o.moe.recompute = way % 3;
        plan_make(&plan, &o, &parallel_alone);
        struct data *data = data_open(o.data, o.eval_data, NULL, o.seed, o.seq, 1);
        assert_int_equal(data_settle_vocab(data, 257), 257);
        struct mallinfo2 before = mallinfo2();
        trainer_open(&t, &o, data, NULL, NULL);
        struct mallinfo2 after = mallinfo2();
        double taken = (double)(after.uordblks + after.hblkhd) - (double)(before.uordblks + before.hblkhd);
        // Tables and tokens on the host are not in the plan: less than 2 % of 96 MB.
        if (!(fabs(taken - (double)plan.total_bytes) < 0.02 * taken))
            fail_msg("a trainer takes %.0f bytes, planned were %zu", taken, plan.total_bytes);
        trainer_close(&t);
        data_close(data);
    }
}

// Every level needs less than the one before, and nothing but what the blocks keep.
static void recompute_levels_need_less_and_less(void **state) {
    (void)state;
    struct config c = with_vocabulary(preset_find("moonlight-mini"));
    struct options o = options_of(&c, 2, 1024);
    for (int kind = MOE_MOK; kind <= MOE_ALLTOALL; kind++)
        for (int ep = 1; ep <= 4; ep += 3) {
            struct parallel p = parallel_suppose(ep, ep, c.experts);
            struct plan plans[3];
            o.moe.kind = kind;
            for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
                o.moe.recompute = level;
                plan_make(&plans[level], &o, &p);
            }
            assert_true(plans[0].total_bytes > plans[1].total_bytes && plans[1].total_bytes > plans[2].total_bytes);
            assert_int_equal(plans[0].activation_bytes, plans[1].activation_bytes);
            assert_int_equal(plans[0].symmetric_bytes, plans[1].symmetric_bytes);
            assert_true(plans[1].activation_bytes > plans[2].activation_bytes);
            assert_true((plans[1].symmetric_bytes > plans[2].symmetric_bytes) == (kind == MOE_MOK));
            assert_int_equal(plans[0].weight_bytes, plans[2].weight_bytes);
            assert_true(plans[0].flops_per_token == plans[2].flops_per_token); // recomputation never counts
        }
}

static void all_parts_are_in_the_sum(void **state) {
    (void)state;
    struct options o = options_of(&uneven, 2, 16);
    struct parallel p = parallel_suppose(4, 2, uneven.experts);
    struct plan plan;
    struct scratch_sizes scratch = model_scratch_sizes(&uneven, 2, 16, true);
    plan_make(&plan, &o, &p);
    assert_int_equal(plan.scratch_bytes, device_scratch_bytes(&scratch));
    assert_int_equal(plan.library_bytes, device_library_bytes(4));
    assert_int_equal(plan.total_bytes, plan.weight_bytes + plan.gradient_bytes + plan.master_bytes + plan.moment_bytes +
                                           plan.activation_bytes + plan.symmetric_bytes + plan.moe_bytes +
                                           plan.scratch_bytes + plan.library_bytes);
    assert_true(scratch.rows == 32 && scratch.width == uneven.hidden && scratch.experts == uneven.experts &&
                scratch.top_k == 2 && scratch.sequences == 2);
    assert_true(scratch.batch == 2 && scratch.length == 16 && scratch.heads == 4 && scratch.nope_dim == 16 &&
                scratch.rope_dim == 8 && scratch.value_dim == 10);
    assert_int_equal(model_scratch_sizes(&uneven, 2, 16, false).batch, 0); // no backward pass
}

static void what_was_used_is_printed_where_it_is_known(void **state) {
    (void)state;
    char text[128] = "";
    FILE *file = fmemopen(text, sizeof text, "w");
    plan_print_used(file, (size_t)4 << 30, (size_t)5 << 30);
    assert_int_equal(fclose(file), 0);
    assert_string_equal(text, "memory: planned 4.00 GiB, used 5.00 GiB (125.0 %)\n");
    text[0] = 0;
    file = fmemopen(text, sizeof text, "w");
    plan_print_used(file, (size_t)4 << 30, 0);
    assert_int_equal(fclose(file), 0);
    assert_string_equal(text, "");
}

// Static, overwritten by the next call.
static const char *print(const struct options *o, const struct parallel *parallel, int ranks_here) {
    static char text[16384];
    FILE *file = fmemopen(text, sizeof text, "w");
    assert_non_null(file);
    plan_print(file, o, parallel, ranks_here);
    assert_int_equal(fclose(file), 0);
    return text;
}

static void the_printed_plan_says_whether_it_fits(void **state) {
    (void)state;
    struct config tiny = with_vocabulary(preset_find("tiny")), v3 = preset_find("dsv3")->model;
    struct options small = options_of(&tiny, 1, 64), large = options_of(&v3, 1, 4096);
    const char *text = print(&small, &parallel_alone, 1);
    assert_non_null(strstr(text, "It fits."));
    assert_non_null(strstr(text, "per step of 64 tokens"));
    for (int k = 0; k < PARAM_KINDS; k++) assert_true((strstr(text, param_kind_names[k]) != NULL) == (k != PARAM_MTP));

    large.tokens_per_step = 62914560;
    text = print(&large, &parallel_alone, 1);
    assert_non_null(strstr(text, "weights and optimizer state alone"));
    assert_non_null(strstr(text, "671.03B"));
    assert_non_null(strstr(text, "per step of 62914560 tokens"));
    assert_non_null(strstr(text, param_kind_names[PARAM_MTP]));
}

// The batch it proposes fits, the next does not; so on several ranks that share the memory.
static void the_proposed_batch_is_the_largest_that_fits(void **state) {
    (void)state;
    struct config tiny = with_vocabulary(preset_find("tiny"));
    for (int ranks = 1; ranks <= 4; ranks += 3) {
        struct options o = options_of(&tiny, 1 << 16, 1024);
        struct parallel parallel = parallel_suppose(ranks, ranks, tiny.experts);
        struct plan plan;
        int proposed;
        const char *proposal = strstr(print(&o, &parallel, ranks), "; --batch ");
        assert_non_null(proposal);
        assert_int_equal(sscanf(proposal, "; --batch %d does", &proposed), 1);
        o.batch = proposed;
        plan_make(&plan, &o, &parallel);
        assert_true(plan.total_bytes * (size_t)ranks <= device_memory_bytes());
        o.batch = proposed + 1;
        plan_make(&plan, &o, &parallel);
        assert_true(plan.total_bytes * (size_t)ranks > device_memory_bytes());
    }
}

// The number behind the words, or -1 without them.
static int number_behind(const char *text, const char *words) {
    const char *at = strstr(text, words);
    return at ? atoi(at + strlen(words)) : -1;
}

// --memory stands for one GPU, whatever there is here and however many ranks.
static void a_plan_is_compared_with_memory_that_is_said(void **state) {
    (void)state;
    struct config c = with_vocabulary(preset_find("moonlight-mini"));
    struct options o = options_of(&c, 1, 1024);
    struct parallel p = parallel_suppose(8, 8, c.experts);
    struct plan plan;
    plan_make(&plan, &o, &p);
    const double gib = 1 << 30;
    o.memory = ((double)plan.total_bytes + 1e3) / gib;
    const char *text = print(&o, &p, 8);
    assert_non_null(strstr(text, "--memory says"));
    assert_non_null(strstr(text, "It fits."));
    assert_null(strstr(text, "all of the"));
    assert_null(strstr(text, "this machine has"));
    assert_non_null(strstr(text, "computes in FP32. Plans for GPUs"));
    o.memory = ((double)plan.total_bytes - 1e3) / gib;
    text = print(&o, &p, 0);
    assert_null(strstr(text, "It fits"));
    assert_null(strstr(text, "not here"));
    assert_non_null(strstr(text, "With --recompute moe it fits."));
    assert_int_equal(number_behind(text, "The largest --layers that fits: "), c.layers - 1);
    o.memory = 1e-3;
    text = print(&o, &p, 0);
    assert_non_null(strstr(text, "weights and optimizer state alone"));
    assert_int_equal(number_behind(text, "The largest --layers that fits: "), -1);
    assert_null(strstr(text, "With --recompute"));
}

// So many layers fit, one more does not.
static void the_proposed_layers_are_the_most_that_fit(void **state) {
    (void)state;
    struct options o = options_of(&preset_find("moonlight")->model, 1, 4096);
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
            struct parallel p = parallel_suppose(ranks, ranks, o.model.experts);
            struct plan plan;
            o.model.layers = 27;
            o.memory = 139.8;
            o.moe.recompute = level;
            int layers = number_behind(print(&o, &p, 0), "The largest --layers that fits: ");
            assert_true(layers >= 1 && layers < 27);
            const double room = o.memory * (1 << 30);
            o.model.layers = layers;
            plan_make(&plan, &o, &p);
            assert_true((double)plan.total_bytes <= room);
            o.model.layers = layers + 1;
            plan_make(&plan, &o, &p);
            assert_true((double)plan.total_bytes > room);
        }
}

static void ranks_that_are_here_share_the_memory_and_others_are_compared_alone(void **state) {
    (void)state;
    struct config tiny = with_vocabulary(preset_find("tiny"));
    struct options o = options_of(&tiny, 1, 64);
    struct parallel parallel = parallel_suppose(8, 4, tiny.experts);
    const char *text = print(&o, &parallel, 8);
    assert_non_null(strstr(text, "Memory of one rank of 8, with 4 of 16 experts\n"));
    assert_non_null(strstr(text, "all of the 8 ranks here"));
    assert_null(strstr(text, "not here"));
    assert_non_null(strstr(text, "per step of 512 tokens"));
    text = print(&o, &parallel, 0);
    assert_null(strstr(text, "ranks here"));
    assert_non_null(strstr(text, "The 8 ranks of --ranks are not here: one of them is compared with this machine."));
    text = print(&o, &parallel_alone, 1);
    assert_non_null(strstr(text, "\nMemory\n"));
    assert_null(strstr(text, "ranks"));
}

// So many ranks that one alone would fit.
static int too_many_ranks(const struct options *o) {
    struct plan plan;
    plan_make(&plan, o, &parallel_alone);
    return (int)(device_memory_bytes() / plan.total_bytes) + 1;
}

static void check_memory(void *argument) {
    const struct options *o = argument;
    plan_check_memory(o, &parallel_alone, 1);
    plan_check_memory(o, &parallel_alone, too_many_ranks(o) - 1);
    plan_check_memory(o, &parallel_alone, too_many_ranks(o));
}

static void ranks_that_do_not_fit_together_are_refused(void **state) {
    (void)state;
    struct config tiny = with_vocabulary(preset_find("tiny"));
    struct options o = options_of(&tiny, 8, 256);
    char message[512], ranks[64];
    assert_int_equal(run_child(check_memory, &o, message, sizeof message), 2);
    snprintf(ranks, sizeof ranks, "for %d ranks", too_many_ranks(&o));
    assert_non_null(strstr(message, "memory: found "));
    assert_non_null(strstr(message, ranks));
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
        cmocka_unit_test(ranks_that_do_not_fit_together_are_refused), // forks: before anything is computed in threads
        cmocka_unit_test(memory_of_one_rank_is_that_of_its_arrays),
        cmocka_unit_test(memory_of_several_ranks_is_that_of_the_fullest),
        cmocka_unit_test(plan_is_what_a_trainer_takes),
        cmocka_unit_test(recompute_levels_need_less_and_less),
        cmocka_unit_test(all_parts_are_in_the_sum),
        cmocka_unit_test(what_was_used_is_printed_where_it_is_known),
        cmocka_unit_test(the_printed_plan_says_whether_it_fits),
        cmocka_unit_test(the_proposed_batch_is_the_largest_that_fits),
        cmocka_unit_test(a_plan_is_compared_with_memory_that_is_said),
        cmocka_unit_test(the_proposed_layers_are_the_most_that_fit),
        cmocka_unit_test(ranks_that_are_here_share_the_memory_and_others_are_compared_alone),
        cmocka_unit_test(counts_are_printed_with_their_unit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
