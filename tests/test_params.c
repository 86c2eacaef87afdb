// The parameter table: names, shapes and places in memory, the way to and from files, first values, published sizes.
#include "tests/configs.h"
#include "tests/test.h"

#include "model/parallel.h"
#include "model/params.h"

static const struct param *find(const struct params *p, const char *name) {
    for (int i = 0; i < p->count; i++)
        if (strcmp(p->list[i].name, name) == 0) return &p->list[i];
    fail_msg("found no tensor %s", name);
    return NULL;
}

static bool exists(const struct params *p, const char *name) {
    for (int i = 0; i < p->count; i++)
        if (strcmp(p->list[i].name, name) == 0) return true;
    return false;
}

static void assert_tensor(const struct params *p, const char *name, int rows, int cols, enum param_kind kind, int block,
                          size_t offset) {
    const struct param *t = find(p, name);
    if (t->rows != rows || t->cols != cols || t->kind != kind || t->block != block || t->offset != offset)
        fail_msg("%s: found [%d, %d] kind %d block %d at %zu, wanted [%d, %d] kind %d block %d at %zu", name, t->rows,
                 t->cols, t->kind, t->block, t->offset, rows, cols, kind, block, offset);
}

static void names_shapes_and_offsets_follow_the_specification(void **state) {
    (void)state;
    struct params p;
    params_build(&p, &uneven);
    const struct block_offsets *b = p.blocks;
    const int h = 24, queries = 4 * (16 + 8);
    assert_tensor(&p, "model.embed_tokens.weight", 257, h, PARAM_EMBEDDING, -1, p.embedding);
    assert_tensor(&p, "model.norm.weight", h, 0, PARAM_NORM, -1, p.final_norm);
    assert_tensor(&p, "lm_head.weight", 257, h, PARAM_HEAD, -1, p.head);
    assert_tensor(&p, "model.layers.0.input_layernorm.weight", h, 0, PARAM_NORM, 0, b[0].input_norm);
    assert_tensor(&p, "model.layers.0.post_attention_layernorm.weight", h, 0, PARAM_NORM, 0, b[0].post_norm);
    assert_tensor(&p, "model.layers.1.self_attn.q_a_proj.weight", 20, h, PARAM_ATTENTION, 1, b[1].q_a);
    assert_tensor(&p, "model.layers.1.self_attn.q_a_layernorm.weight", 20, 0, PARAM_NORM, 1, b[1].q_a_norm);
    assert_tensor(&p, "model.layers.1.self_attn.q_b_proj.weight", queries, 20, PARAM_ATTENTION, 1, b[1].q_b);
    assert_tensor(&p, "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 20, h, PARAM_ATTENTION, 1, b[1].kv_a);
    assert_tensor(&p, "model.layers.1.self_attn.kv_a_layernorm.weight", 12, 0, PARAM_NORM, 1, b[1].kv_a_norm);
    assert_tensor(&p, "model.layers.1.self_attn.kv_b_proj.weight", 4 * 26, 12, PARAM_ATTENTION, 1, b[1].kv_b);
    assert_tensor(&p, "model.layers.1.self_attn.o_proj.weight", h, 40, PARAM_ATTENTION, 1, b[1].o);
    assert_tensor(&p, "model.layers.0.mlp.gate_proj.weight", 40, h, PARAM_DENSE_FFN, 0, b[0].w13);
    assert_tensor(&p, "model.layers.0.mlp.down_proj.weight", h, 40, PARAM_DENSE_FFN, 0, b[0].w2);
    assert_tensor(&p, "model.layers.2.mlp.gate.weight", 6, h, PARAM_ROUTER, 2, b[2].router);
    assert_tensor(&p, "model.layers.2.mlp.shared_experts.gate_proj.weight", 18, h, PARAM_SHARED_EXPERT, 2,
                  b[2].shared_w13);
    assert_tensor(&p, "model.layers.2.mlp.shared_experts.down_proj.weight", h, 18, PARAM_SHARED_EXPERT, 2,
                  b[2].shared_w2);
    // The MTP module is block 3 = layers + k - 1.
    assert_tensor(&p, "model.layers.3.enorm.weight", h, 0, PARAM_MTP, 3, b[3].enorm);
    assert_tensor(&p, "model.layers.3.hnorm.weight", h, 0, PARAM_MTP, 3, b[3].hnorm);
    assert_tensor(&p, "model.layers.3.eh_proj.weight", h, 2 * h, PARAM_MTP, 3, b[3].eh_proj);
    assert_tensor(&p, "model.layers.3.shared_head.norm.weight", h, 0, PARAM_MTP, 3, b[3].head_norm);
    assert_tensor(&p, "model.layers.3.mlp.gate.weight", 6, h, PARAM_ROUTER, 3, b[3].router);
    // 3 outside blocks; 8 of norms and attention + 1 by q_b; FFN 3; MoE 1 + 3 + 6 * 3; MTP 4.
    assert_int_equal(p.count, 3 + 4 * 9 + 3 + 3 * 22 + 4);
    assert_false(exists(&p, "model.layers.3.embed_tokens.weight"));
    assert_false(exists(&p, "model.layers.3.shared_head.head.weight"));
    params_free(&p);
}

static void experts_lie_one_behind_the_other_for_the_grouped_product(void **state) {
    (void)state;
    struct params p;
    char name[96];
    params_build(&p, &uneven);
    const size_t matrix = 9 * 24;
    for (int block = 1; block < 4; block++)
        for (int e = 0; e < 6; e++) {
            size_t w13 = p.blocks[block].expert_w13, w2 = p.blocks[block].expert_w2;
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.gate_proj.weight", block, e);
            assert_tensor(&p, name, 9, 24, PARAM_EXPERT, block, w13 + 2 * (size_t)e * matrix);
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.up_proj.weight", block, e);
            assert_tensor(&p, name, 9, 24, PARAM_EXPERT, block, w13 + (2 * (size_t)e + 1) * matrix);
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.down_proj.weight", block, e);
            assert_tensor(&p, name, 24, 9, PARAM_EXPERT, block, w2 + (size_t)e * matrix);
            assert_true(w13 >= p.dense_size && w2 >= p.dense_size);
        }
    // The same for the FFNs that every token takes.
    assert_int_equal(find(&p, "model.layers.0.mlp.up_proj.weight")->offset, p.blocks[0].w13 + 40 * 24);
    assert_int_equal(find(&p, "model.layers.1.mlp.shared_experts.up_proj.weight")->offset,
                     p.blocks[1].shared_w13 + 18 * 24);
    params_free(&p);
}

static void memory_order_has_no_overlap_and_aligned_pieces(void **state) {
    (void)state;
    struct params p;
    params_build(&p, &uneven);
    size_t end = 0;
    for (int i = 0; i < p.count; i++) {
        const struct param *t = &p.list[i];
        assert_true(t->offset >= end && t->offset - end < 64);
        assert_true((t->kind == PARAM_EXPERT) == (t->offset >= p.dense_size));
        assert_true(t->decay == (t->cols > 0));
        assert_true(t->stored == (t->cols > 0 && t->kind != PARAM_EMBEDDING && t->kind != PARAM_ROUTER));
        assert_true(t->transposed == (strstr(t->name, "down_proj") != NULL));
        // Inside a row of gate and up matrices, or of down matrices, nothing is aligned; everything else is.
        bool inside = strstr(t->name, "up_proj") || strstr(t->name, ".experts.");
        if (!inside) assert_int_equal(t->offset % 64, 0);
        end = t->offset + param_size(t);
    }
    assert_true(p.size >= end && p.size - end < 64 && p.size % 64 == 0 && p.dense_size % 64 == 0);
    for (int block = 1; block < 4; block++) {
        assert_int_equal(p.blocks[block].expert_w13 % 64, 0);
        assert_int_equal(p.blocks[block].expert_w2 % 64, 0);
    }
    params_free(&p);
}

static void tensors_that_a_block_lacks_are_marked(void **state) {
    (void)state;
    struct params p;
    struct config c = uneven;
    c.q_rank = 0;
    c.shared_experts = 0;
    c.mtp_depth = 0;
    params_build(&p, &c);
    assert_tensor(&p, "model.layers.0.self_attn.q_proj.weight", 96, 24, PARAM_ATTENTION, 0, p.blocks[0].q);
    assert_true(p.blocks[0].q_a == SIZE_MAX && p.blocks[0].q_a_norm == SIZE_MAX && p.blocks[0].q_b == SIZE_MAX);
    assert_true(p.blocks[0].router == SIZE_MAX && p.blocks[0].expert_w13 == SIZE_MAX);
    assert_true(p.blocks[1].w13 == SIZE_MAX && p.blocks[1].shared_w13 == SIZE_MAX);
    assert_true(p.blocks[2].enorm == SIZE_MAX && p.blocks[2].eh_proj == SIZE_MAX);
    assert_false(exists(&p, "model.layers.0.self_attn.q_a_proj.weight"));
    assert_false(exists(&p, "model.layers.1.mlp.shared_experts.gate_proj.weight"));
    assert_false(exists(&p, "model.layers.3.enorm.weight"));
    params_free(&p);
}

static void export_and_import_turn_down_projections_and_come_back(void **state) {
    (void)state;
    struct params p;
    params_build(&p, &uneven);
    float *flat = calloc(p.size, sizeof *flat), *back = calloc(p.size, sizeof *back);
    float *file = calloc(257 * 24, sizeof *file);
    for (int i = 0; i < p.count; i++)
        for (size_t j = 0; j < param_size(&p.list[i]); j++) flat[p.list[i].offset + j] = (float)(p.list[i].offset + j);
    for (int i = 0; i < p.count; i++) {
        params_export(file, flat + p.list[i].offset, &p.list[i]);
        params_import(back + p.list[i].offset, file, &p.list[i]);
    }
    assert_memory_equal(flat, back, p.size * sizeof *flat);

    const struct param *down = find(&p, "model.layers.2.mlp.experts.4.down_proj.weight"); // [24, 9], memory [9, 24]
    params_export(file, flat + down->offset, down);
    for (int r = 0; r < 24; r++)
        for (int c = 0; c < 9; c++) assert_true(file[r * 9 + c] == flat[down->offset + (size_t)(c * 24 + r)]);
    const struct param *eh = find(&p, "model.layers.3.eh_proj.weight");
    params_export(file, flat + eh->offset, eh);
    assert_memory_equal(file, flat + eh->offset, param_size(eh) * sizeof *file);
    free(flat);
    free(back);
    free(file);
    params_free(&p);
}

// Large enough for several threads, and no multiple of anything.
static void large_matrices_are_turned_too(void **state) {
    (void)state;
    const size_t rows = 1031, cols = 1500, n = rows * cols;
    struct param down = {.rows = (int)rows, .cols = (int)cols, .transposed = true};
    float *memory = malloc(n * sizeof *memory), *file = malloc(n * sizeof *file), *back = malloc(n * sizeof *back);
    assert_true(memory && file && back);
    for (size_t i = 0; i < n; i++) memory[i] = (float)i;
    params_export(file, memory, &down);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) assert_true(file[r * cols + c] == memory[c * rows + r]);
    params_import(back, file, &down);
    assert_memory_equal(memory, back, n * sizeof *back);
    free(memory);
    free(file);
    free(back);
}

// What one tensor holds at first, in file orientation.
static void first_values(float *file, const struct config *c, const char *name, uint64_t seed) {
    struct params p;
    params_build(&p, c);
    params_init(file, find(&p, name), 0.02, seed);
    params_free(&p);
}

static void init_depends_on_name_and_seed_only(void **state) {
    (void)state;
    struct config other = uneven; // the same tensors at other offsets, among others
    other.q_rank = 0;
    other.shared_experts = 0;
    other.experts = 8;
    other.vocab = 300;
    const char *names[] = {"model.layers.2.mlp.experts.4.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"};
    float a[24 * 40], b[24 * 40];
    for (int i = 0; i < 2; i++) {
        size_t bytes = (i ? 24 * 40 : 24 * 9) * sizeof(float);
        first_values(a, &uneven, names[i], 7);
        first_values(b, &other, names[i], 7);
        assert_memory_equal(a, b, bytes);
        first_values(b, &uneven, names[i], 8);
        assert_memory_not_equal(a, b, bytes);
    }
    first_values(a, &uneven, names[0], 7);
    first_values(b, &uneven, "model.layers.2.mlp.experts.5.down_proj.weight", 7);
    assert_memory_not_equal(a, b, 24 * 9 * sizeof(float));
}

static void init_is_normal_for_matrices_and_one_for_norms(void **state) {
    (void)state;
    struct config c = uneven;
    c.hidden = 128;
    struct params p;
    params_build(&p, &c);
    float *flat = calloc(p.size, sizeof *flat);
    init_weights(flat, &p, 0.02, 1);
    double sum = 0, squares = 0, fourth = 0, neighbours = 0, n = 0;
    for (int i = 0; i < p.count; i++) {
        const float *x = flat + p.list[i].offset;
        for (size_t j = 0; j < param_size(&p.list[i]); j++) {
            if (!p.list[i].cols) {
                assert_true(x[j] == 1.0f);
                continue;
            }
            double z = x[j] / 0.02;
            sum += z;
            squares += z * z;
            fourth += z * z * z * z;
            if (j) neighbours += z * (x[j - 1] / 0.02);
            n++;
        }
    }
    // Five standard errors of each moment of n normal numbers: 1, sqrt(2), sqrt(96), 1 over sqrt(n).
    double five = 5 / sqrt(n);
    assert_true(n > 1e5);
    assert_true(fabs(sum / n) < five);
    assert_true(fabs(squares / n - 1) < five * sqrt(2));
    assert_true(fabs(fourth / n - 3) < five * sqrt(96));
    assert_true(fabs(neighbours / n) < five);
    free(flat);
    params_free(&p);
}

// ---- ranks that hold some of the experts ----

// Where the experts of a rank must lie: in the order of their numbers from the block's offset on.
static void assert_contiguous(const struct params *p, const struct expert_range *here, int block) {
    const size_t matrix = 9 * 24;
    char name[96];
    for (int e = here->first; e < here->end; e++) {
        size_t place = (size_t)(e - here->first);
        size_t w13 = p->blocks[block].expert_w13 + 2 * place * matrix, w2 = p->blocks[block].expert_w2 + place * matrix;
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.gate_proj.weight", block, e);
        assert_tensor(p, name, 9, 24, PARAM_EXPERT, block, w13);
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.up_proj.weight", block, e);
        assert_tensor(p, name, 9, 24, PARAM_EXPERT, block, w13 + matrix);
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.down_proj.weight", block, e);
        assert_tensor(p, name, 24, 9, PARAM_EXPERT, block, w2);
    }
}

// A share against the whole table: the same tensors, those of the dense part at the same places, experts one behind the
// other and inside the arrays. Adds one for every expert tensor that is here.
static void assert_share(const struct params *share, const struct params *all, struct expert_range here, int *holders) {
    size_t end = share->dense_size;
    assert_true(share->count == all->count && share->dense_size == all->dense_size && share->size % 64 == 0);
    assert_true(params_total(share) == params_total(all) && params_largest(share) == params_largest(all));
    for (int i = 0; i < all->count; i++) {
        const struct param *a = &all->list[i], *b = &share->list[i];
        assert_string_equal(a->name, b->name);
        assert_true(a->rows == b->rows && a->cols == b->cols && a->kind == b->kind && a->expert == b->expert);
        assert_true((a->expert >= 0) == (a->kind == PARAM_EXPERT));
        bool is_here = a->expert < 0 || (a->expert >= here.first && a->expert < here.end);
        assert_true((b->offset != PARAM_ELSEWHERE) == is_here);
        if (a->expert < 0) assert_int_equal(a->offset, b->offset);
        if (a->expert < 0 || !is_here) continue;
        assert_true(b->offset >= end && b->offset - end < 64);
        end = b->offset + param_size(b);
        holders[i]++;
    }
    assert_true(share->size >= end && share->size - end < 64);
}

static void ranks_hold_every_expert_once_and_all_the_rest(void **state) {
    (void)state;
    const int splits[][2] = {{6, 1}, {6, 2}, {6, 3}, {6, 4}, {6, 5}, {6, 6}, {7, 4}, {64, 6}, {1, 1}, {5, 2}};
    for (size_t n = 0; n < sizeof splits / sizeof *splits; n++) {
        struct config c = uneven;
        c.experts = splits[n][0];
        int ep = splits[n][1], next = 0;
        struct params all;
        params_build(&all, &c);
        int *holders = calloc((size_t)all.count, sizeof *holders);
        for (int rank = 0; rank < ep; rank++) {
            struct parallel parallel = {.ep = ep, .ep_rank = rank};
            struct expert_range here = parallel_experts(&parallel, c.experts);
            struct params share;
            assert_true(here.first == next && here.end > here.first);
            assert_true(here.end - here.first <= (c.experts + ep - 1) / ep);
            next = here.end;
            params_build_share(&share, &c, here);
            assert_share(&share, &all, here, holders);
            for (int block = 1; block < 4; block++) assert_contiguous(&share, &here, block);
            params_free(&share);
        }
        assert_int_equal(next, c.experts);
        for (int i = 0; i < all.count; i++) assert_int_equal(holders[i], all.list[i].expert >= 0);
        free(holders);
        params_free(&all);
    }
}

// The whole range is the whole table, to the last byte of it.
static void one_rank_holds_what_there_is(void **state) {
    (void)state;
    struct params all, share;
    params_build(&all, &uneven);
    params_build_share(&share, &uneven, (struct expert_range){0, 6});
    assert_true(all.count == share.count && all.size == share.size);
    assert_memory_equal(all.list, share.list, (size_t)all.count * sizeof *all.list);
    assert_memory_equal(all.blocks, share.blocks, 4 * sizeof *all.blocks);
    params_free(&all);
    params_free(&share);
}

static const struct config dsv3 = {
    .vocab = 129280,
    .hidden = 7168,
    .layers = 61,
    .dense_layers = 3,
    .heads = 128,
    .q_rank = 1536,
    .kv_rank = 512,
    .nope_dim = 128,
    .rope_dim = 64,
    .value_dim = 128,
    .intermediate = 18432,
    .expert_intermediate = 2048,
    .experts = 256,
    .shared_experts = 1,
    .top_k = 8,
    .groups = 8,
    .top_groups = 4,
    .mtp_depth = 1,
};
static const struct config moonlight = {
    .vocab = 163840,
    .hidden = 2048,
    .layers = 27,
    .dense_layers = 1,
    .heads = 16,
    .q_rank = 0,
    .kv_rank = 512,
    .nope_dim = 128,
    .rope_dim = 64,
    .value_dim = 128,
    .intermediate = 11264,
    .expert_intermediate = 1408,
    .experts = 64,
    .shared_experts = 2,
    .top_k = 6,
    .groups = 1,
    .top_groups = 1,
};

static void published_models_have_their_published_sizes(void **state) {
    (void)state;
    struct params p;
    size_t mtp = 0;
    params_build(&p, &dsv3);
    for (int i = 0; i < p.count; i++)
        if (p.list[i].block == 61) mtp += param_size(&p.list[i]);
    // Half of the last published digit.
    assert_true(fabs((double)(params_total(&p) - mtp) / 1e9 - 671.03) < 0.005);
    assert_true(fabs((double)mtp / 1e9 - 11.61) < 0.005);
    assert_true(p.size - params_total(&p) < 64 * (size_t)p.count);
    assert_true(p.count > 45000);
    params_free(&p);
    params_build(&p, &moonlight);
    assert_true(fabs((double)params_total(&p) / 1e9 - 15.96) < 0.005);
    params_free(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_shapes_and_offsets_follow_the_specification),
        cmocka_unit_test(experts_lie_one_behind_the_other_for_the_grouped_product),
        cmocka_unit_test(memory_order_has_no_overlap_and_aligned_pieces),
        cmocka_unit_test(tensors_that_a_block_lacks_are_marked),
        cmocka_unit_test(export_and_import_turn_down_projections_and_come_back),
        cmocka_unit_test(large_matrices_are_turned_too),
        cmocka_unit_test(init_depends_on_name_and_seed_only),
        cmocka_unit_test(init_is_normal_for_matrices_and_one_for_norms),
        cmocka_unit_test(ranks_hold_every_expert_once_and_all_the_rest),
        cmocka_unit_test(one_rank_holds_what_there_is),
        cmocka_unit_test(published_models_have_their_published_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
