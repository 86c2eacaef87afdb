#include "model/params.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/random.h"
#include "model/normal.h"

const char *const param_kind_names[PARAM_KINDS] = {
    [PARAM_EMBEDDING] = "embedding",
    [PARAM_HEAD] = "head",
    [PARAM_NORM] = "norms",
    [PARAM_ATTENTION] = "attention",
    [PARAM_DENSE_FFN] = "dense FFN",
    [PARAM_ROUTER] = "router",
    [PARAM_SHARED_EXPERT] = "shared experts",
    [PARAM_EXPERT] = "routed experts",
    [PARAM_MTP] = "MTP joins",
};

// ---- the table ----

// Every tensor that a kernel takes as one piece begins at a multiple of this many elements: 256 bytes of float, 128 of
// BF16, which covers the widest loads.
enum { ALIGNMENT = 64 };

static size_t align_next(struct params *p) {
    p->size = (p->size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return p->size;
}

// Appends model.layers.BLOCK.NAME.weight, or NAME.weight when block is -1, right behind the last tensor.
static struct param *append(struct params *p, int block, enum param_kind kind, const char *name, int rows, int cols) {
    struct param *entry = &p->list[p->count++];
    if (block < 0)
        snprintf(entry->name, sizeof entry->name, "%s.weight", name);
    else
        snprintf(entry->name, sizeof entry->name, "model.layers.%d.%s.weight", block, name);
    entry->rows = rows;
    entry->cols = cols;
    entry->decay = cols > 0;
    entry->stored = cols > 0 && kind != PARAM_EMBEDDING && kind != PARAM_ROUTER;
    entry->kind = kind;
    entry->block = block;
    entry->expert = -1;
    entry->offset = p->size;
    p->size += param_size(entry);
    return entry;
}

// The same at an aligned offset, which is returned.
static size_t place(struct params *p, int block, enum param_kind kind, const char *name, int rows, int cols) {
    align_next(p);
    return append(p, block, kind, name, rows, cols)->offset;
}

static void append_gate_up(struct params *p, int block, enum param_kind kind, const char *ffn, int inner, int hidden) {
    char name[64];
    snprintf(name, sizeof name, "%s.gate_proj", ffn);
    append(p, block, kind, name, inner, hidden);
    snprintf(name, sizeof name, "%s.up_proj", ffn);
    append(p, block, kind, name, inner, hidden);
}

static void append_down(struct params *p, int block, enum param_kind kind, const char *ffn, int inner, int hidden) {
    char name[64];
    snprintf(name, sizeof name, "%s.down_proj", ffn);
    append(p, block, kind, name, hidden, inner)->transposed = true;
}

static void place_attention(struct params *p, const struct config *c, int block, struct block_offsets *b) {
    int q_rows = c->heads * config_query_dim(c);
    if (c->q_rank) {
        b->q_a = place(p, block, PARAM_ATTENTION, "self_attn.q_a_proj", c->q_rank, c->hidden);
        b->q_a_norm = place(p, block, PARAM_NORM, "self_attn.q_a_layernorm", c->q_rank, 0);
        b->q_b = place(p, block, PARAM_ATTENTION, "self_attn.q_b_proj", q_rows, c->q_rank);
    } else {
        b->q = place(p, block, PARAM_ATTENTION, "self_attn.q_proj", q_rows, c->hidden);
    }
    b->kv_a = place(p, block, PARAM_ATTENTION, "self_attn.kv_a_proj_with_mqa", c->kv_rank + c->rope_dim, c->hidden);
    b->kv_a_norm = place(p, block, PARAM_NORM, "self_attn.kv_a_layernorm", c->kv_rank, 0);
    b->kv_b =
        place(p, block, PARAM_ATTENTION, "self_attn.kv_b_proj", c->heads * (c->nope_dim + c->value_dim), c->kv_rank);
    b->o = place(p, block, PARAM_ATTENTION, "self_attn.o_proj", c->hidden, c->heads * c->value_dim);
}

// One block without its routed experts.
static void place_dense(struct params *p, const struct config *c, int block, struct block_offsets *b) {
    bool mtp = block >= c->layers;
    if (mtp) {
        b->enorm = place(p, block, PARAM_MTP, "enorm", c->hidden, 0);
        b->hnorm = place(p, block, PARAM_MTP, "hnorm", c->hidden, 0);
        b->eh_proj = place(p, block, PARAM_MTP, "eh_proj", c->hidden, 2 * c->hidden);
    }
    b->input_norm = place(p, block, PARAM_NORM, "input_layernorm", c->hidden, 0);
    place_attention(p, c, block, b);
    b->post_norm = place(p, block, PARAM_NORM, "post_attention_layernorm", c->hidden, 0);
    if (!config_is_moe(c, block)) {
        b->w13 = align_next(p);
        append_gate_up(p, block, PARAM_DENSE_FFN, "mlp", c->intermediate, c->hidden);
        b->w2 = align_next(p);
        append_down(p, block, PARAM_DENSE_FFN, "mlp", c->intermediate, c->hidden);
    } else {
        b->router = place(p, block, PARAM_ROUTER, "mlp.gate", c->experts, c->hidden);
        if (c->shared_experts) {
            int inner = config_shared_intermediate(c);
            b->shared_w13 = align_next(p);
            append_gate_up(p, block, PARAM_SHARED_EXPERT, "mlp.shared_experts", inner, c->hidden);
            b->shared_w2 = align_next(p);
            append_down(p, block, PARAM_SHARED_EXPERT, "mlp.shared_experts", inner, c->hidden);
        }
    }
    if (mtp) b->head_norm = place(p, block, PARAM_MTP, "shared_head.norm", c->hidden, 0);
}

// The tensors from list[first] on are expert e's; they take no room if it is not here.
static void settle_expert(struct params *p, int first, int e, struct expert_range here) {
    bool elsewhere = e < here.first || e >= here.end;
    if (elsewhere) p->size = p->list[first].offset;
    for (int i = first; i < p->count; i++) {
        p->list[i].expert = e;
        if (elsewhere) p->list[i].offset = PARAM_ELSEWHERE;
    }
}

static void place_experts(struct params *p, const struct config *c, struct expert_range here, int block,
                          struct block_offsets *b) {
    char name[32];
    b->expert_w13 = align_next(p);
    for (int e = 0; e < c->experts; e++) {
        int first = p->count;
        snprintf(name, sizeof name, "mlp.experts.%d", e);
        append_gate_up(p, block, PARAM_EXPERT, name, c->expert_intermediate, c->hidden);
        settle_expert(p, first, e, here);
    }
    b->expert_w2 = align_next(p);
    for (int e = 0; e < c->experts; e++) {
        int first = p->count;
        snprintf(name, sizeof name, "mlp.experts.%d", e);
        append_down(p, block, PARAM_EXPERT, name, c->expert_intermediate, c->hidden);
        settle_expert(p, first, e, here);
    }
}

void params_build(struct params *p, const struct config *c) {
    params_build_share(p, c, (struct expert_range){0, c->experts});
}

void params_build_share(struct params *p, const struct config *c, struct expert_range experts) {
    // A block has at most 17 tensors besides its routed experts.
    size_t blocks = (size_t)config_blocks(c);
    size_t most = 3 + 17 * blocks + 3 * (size_t)c->experts * blocks;
    *p = (struct params){.list = calloc(most, sizeof *p->list), .blocks = malloc(blocks * sizeof *p->blocks)};
    if (!p->list || !p->blocks) fail_internal("parameter table", "no memory for %zu entries", most);
    memset(p->blocks, 0xff, blocks * sizeof *p->blocks); // SIZE_MAX: the block has no such tensor

    p->embedding = place(p, -1, PARAM_EMBEDDING, "model.embed_tokens", c->vocab, c->hidden);
    p->final_norm = place(p, -1, PARAM_NORM, "model.norm", c->hidden, 0);
    p->head = place(p, -1, PARAM_HEAD, "lm_head", c->vocab, c->hidden);
    for (int block = 0; block < config_blocks(c); block++) place_dense(p, c, block, &p->blocks[block]);
    p->dense_size = align_next(p);
    for (int block = c->dense_layers; block < config_blocks(c); block++)
        place_experts(p, c, experts, block, &p->blocks[block]);
    align_next(p);
}

void params_free(struct params *p) {
    free(p->list);
    free(p->blocks);
    *p = (struct params){0};
}

size_t params_largest(const struct params *p) {
    size_t largest = 0;
    for (int i = 0; i < p->count; i++)
        if (param_size(&p->list[i]) > largest) largest = param_size(&p->list[i]);
    return largest;
}

size_t params_total(const struct params *p) {
    size_t total = 0;
    for (int i = 0; i < p->count; i++) total += param_size(&p->list[i]);
    return total;
}

// ---- between memory and file ----

// to [cols, rows] = transpose of from [rows, cols], in squares that stay in the cache. Small ones are not worth waking
// other threads.
static void transpose(float *to, const float *from, size_t rows, size_t cols) {
    enum { SQUARE = 32, SMALL = 1 << 20 };
#pragma omp parallel for if (rows * cols > SMALL)
    for (size_t i0 = 0; i0 < rows; i0 += SQUARE)
        for (size_t j0 = 0; j0 < cols; j0 += SQUARE)
            for (size_t i = i0; i < rows && i < i0 + SQUARE; i++)
                for (size_t j = j0; j < cols && j < j0 + SQUARE; j++) to[j * rows + i] = from[i * cols + j];
}

void params_export(float *file, const float *memory, const struct param *p) {
    if (p->transposed)
        transpose(file, memory, (size_t)p->cols, (size_t)p->rows);
    else
        memcpy(file, memory, param_size(p) * sizeof *file);
}

void params_import(float *memory, const float *file, const struct param *p) {
    if (p->transposed)
        transpose(memory, file, (size_t)p->rows, (size_t)p->cols);
    else
        memcpy(memory, file, param_size(p) * sizeof *memory);
}

// ---- first values ----

static uint64_t hash_name(const char *name) { // FNV-1a
    uint64_t hash = 0xcbf29ce484222325ull;
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 0x100000001b3ull;
    return hash;
}

void params_init(float *file, const struct param *p, double std, uint64_t seed) {
    size_t n = param_size(p);
    if (p->cols == 0) // a norm
        for (size_t i = 0; i < n; i++) file[i] = 1;
    else
        normal_fill(file, n, std, random_mix(hash_name(p->name) + random_mix(seed)));
}
