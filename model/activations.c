#include "model/activations.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "model/rope.h"

enum { ALIGNMENT = 256 }; // bytes, of every buffer
// Elements of logits held at once, 1 GiB of a GPU's memory, but never fewer rows than LOGIT_CHUNK_ROWS: every chunk reads
// and writes the head's whole gradient.
enum { LOGIT_CHUNK = sizeof(real) == 2 ? 1 << 29 : 1 << 24, LOGIT_CHUNK_ROWS = 1024 };

// Hands out pieces of the arena and of the symmetric memory; with base NULL it only counts.
struct layout {
    char *base, *symmetric_base;
    bool symmetric; // there is symmetric memory
    struct activation_table *table;
};

static void *take(struct layout *l, const char *name, size_t count, size_t size, bool symmetric) {
    size_t bytes, total, *taken = symmetric ? &l->table->symmetric_bytes : &l->table->bytes;
    char *base = symmetric ? l->symmetric_base : l->base;
    if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(bytes, ALIGNMENT - 1, &bytes) ||
        __builtin_add_overflow(*taken, bytes, &total))
        fail_user("--batch",
                  "found an activation buffer %s that no memory can hold; lower --batch, --seq or the model's "
                  "sizes",
                  name);
    bytes = bytes / ALIGNMENT * ALIGNMENT;
    void *piece = base ? base + *taken : NULL;
    *taken += bytes;
    if (bytes == 0) return NULL;
    struct activation_row *row = NULL;
    for (int i = 0; i < l->table->count && !row; i++)
        if (strcmp(l->table->rows[i].name, name) == 0) row = &l->table->rows[i];
    if (!row) {
        if (l->table->count == (int)(sizeof l->table->rows / sizeof *l->table->rows))
            fail_internal("activations", "found more than %d kinds of buffers; enlarge activation_table",
                          l->table->count);
        row = &l->table->rows[l->table->count++];
        *row = (struct activation_row){.name = name};
    }
    row->bytes += bytes;
    row->copies++;
    return piece;
}

// A buffer named like the member it goes to.
#define TAKE(owner, member, count) (owner)->member = take(l, #member, count, sizeof *(owner)->member, false)
// One that other ranks reach, where there is symmetric memory.
#define TAKE_SYMMETRIC(owner, member, count)                                                                           \
    (owner)->member = take(l, #member, count, sizeof *(owner)->member, l->symmetric)

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

static void lay_out_attention(struct layout *l, struct block_activations *b, const struct config *c, size_t N) {
    size_t n = (size_t)c->heads, H = (size_t)c->hidden, rq = (size_t)c->q_rank, rk = (size_t)c->kv_rank;
    TAKE(b, attention_norm, N * H);
    TAKE(b, attention_rstd, N);
    TAKE(b, q_a, N * rq);
    TAKE(b, q_a_norm, N * rq);
    TAKE(b, q_a_rstd, rq ? N : 0);
    TAKE(b, q, N * n * (size_t)config_query_dim(c));
    TAKE(b, kv_a, N * (rk + (size_t)c->rope_dim));
    TAKE(b, latent, N * rk);
    TAKE(b, latent_rstd, N);
    TAKE(b, kv, N * n * (size_t)(c->nope_dim + c->value_dim));
    TAKE(b, o, N * n * (size_t)c->value_dim);
    TAKE(b, lse, N * n);
}

// gate_up: columns of it.
static void lay_out_ffn(struct layout *l, struct block_activations *b, const struct config *c, size_t N, size_t batch,
                        bool moe, size_t gate_up) {
    size_t H = (size_t)c->hidden, E = (size_t)c->experts, routes = N * (size_t)c->top_k;
    TAKE(b, middle, N * H);
    if (moe)
        TAKE_SYMMETRIC(b, ffn_norm, N * H);
    else
        TAKE(b, ffn_norm, N * H);
    TAKE(b, ffn_rstd, N);
    TAKE(b, gate_up, N * gate_up);
    if (!moe) return;
    TAKE(b, scores, N * E);
    TAKE_SYMMETRIC(b, ids, routes);
    TAKE_SYMMETRIC(b, gates, routes);
    TAKE(b, balance_f, batch * E);
}

static void lay_out_mtp(struct layout *l, struct block_activations *b, const struct config *c, size_t N) {
    size_t H = (size_t)c->hidden;
    TAKE(b, embedded, N * H);
    TAKE(b, concat, N * 2 * H);
    TAKE(b, embedded_rstd, N);
    TAKE(b, hidden_rstd, N);
    TAKE(b, output, N * H);
}

int activations_logit_rows(int vocab, size_t tokens) {
    size_t rows = vocab ? max_size(LOGIT_CHUNK / (size_t)vocab, LOGIT_CHUNK_ROWS) : tokens;
    return (int)(rows < tokens ? rows : tokens);
}

static void lay_out_heads(struct layout *l, struct activations *a, const struct config *c, size_t N, bool training) {
    size_t V = (size_t)c->vocab;
    for (int k = 0; k <= c->mtp_depth + 1; k++) {
        TAKE(&a->heads[k], ids, N);
        if (k > c->mtp_depth) break;
        TAKE(&a->heads[k], normed, N * (size_t)c->hidden);
        TAKE(&a->heads[k], rstd, N);
        TAKE(&a->heads[k], d_normed, training ? N * (size_t)c->hidden : 0);
    }
    a->logit_rows = activations_logit_rows(c->vocab, N);
    TAKE(a, logits, (size_t)a->logit_rows * V);
    TAKE(a, losses, ((size_t)c->mtp_depth + 1) * N);
}

static void lay_out_backward(struct layout *l, struct activations *a, const struct config *c, size_t N, size_t ffn,
                             bool any_moe) {
    size_t n = (size_t)c->heads, H = (size_t)c->hidden, rq = (size_t)c->q_rank, rk = (size_t)c->kv_rank;
    size_t routes = any_moe ? N * (size_t)c->top_k : 0;
    TAKE_SYMMETRIC(a, dx, N * H);
    TAKE(a, d_norm, N * H);
    TAKE(a, d_q, N * n * (size_t)config_query_dim(c));
    TAKE(a, d_kv, N * n * (size_t)(c->nope_dim + c->value_dim));
    TAKE(a, d_o, N * n * (size_t)c->value_dim);
    TAKE(a, d_kv_a, N * (rk + (size_t)c->rope_dim));
    TAKE(a, d_latent, N * rk);
    TAKE(a, d_q_a, N * rq);
    TAKE(a, d_q_a_norm, N * rq);
    TAKE(a, d_gate_up, N * 2 * ffn);
    TAKE(a, d_hidden, N * ffn);
    TAKE_SYMMETRIC(a, d_gates, routes);
    TAKE(a, d_scores, any_moe ? N * (size_t)c->experts : 0);
    TAKE(a, d_concat, c->mtp_depth ? N * 2 * H : 0);
}

static size_t widest_ffn(const struct config *c) {
    bool any_dense = c->dense_layers > 0, any_moe = config_blocks(c) > c->dense_layers;
    return max_size(any_dense ? (size_t)c->intermediate : 0, any_moe ? (size_t)config_shared_intermediate(c) : 0);
}

static void lay_out_blocks(struct layout *l, struct activations *a, const struct config *c, size_t N, size_t batch,
                           bool shared) {
    size_t H = (size_t)c->hidden, dense = 2 * (size_t)c->intermediate, moe = 2 * (size_t)config_shared_intermediate(c);
    struct block_activations all = {0};
    if (shared) {
        lay_out_attention(l, &all, c, N);
        lay_out_ffn(l, &all, c, N, batch, config_blocks(c) > c->dense_layers, 2 * widest_ffn(c));
    }
    for (int block = 0; block < config_blocks(c); block++) {
        struct block_activations *b = &a->blocks[block];
        bool is_moe = config_is_moe(c, block);
        *b = all;
        TAKE(b, input, N * H);
        if (!shared) {
            lay_out_attention(l, b, c, N);
            lay_out_ffn(l, b, c, N, batch, is_moe, is_moe ? moe : dense);
        }
        if (block >= c->layers) lay_out_mtp(l, b, c, N);
    }
}

static void lay_out(struct layout *l, struct activations *a, const struct config *c, struct activation_use use) {
    size_t batch = (size_t)use.batch, N = batch * (size_t)use.seq, H = (size_t)c->hidden, ffn = widest_ffn(c);
    bool any_moe = config_blocks(c) > c->dense_layers;
    lay_out_blocks(l, a, c, N, batch, !use.training || use.recompute == RECOMPUTE_BLOCK);
    TAKE(a, output, N * H);
    lay_out_heads(l, a, c, N, use.training);
    TAKE(a, angles, (size_t)use.seq * (size_t)c->rope_dim);
    TAKE(a, balance, (size_t)(config_blocks(c) - c->dense_layers) * batch);
    TAKE(a, ffn_hidden, N * ffn);
    TAKE(a, shared_out, any_moe && c->shared_experts ? N * H : 0);
    TAKE_SYMMETRIC(a, slots, any_moe && l->symmetric ? N * (size_t)c->top_k * H : 0);
    if (use.training) lay_out_backward(l, a, c, N, ffn, any_moe);
}

static void lists_alloc(struct activations *a, const struct config *c) {
    a->blocks = calloc((size_t)config_blocks(c), sizeof *a->blocks);
    a->heads = calloc((size_t)c->mtp_depth + 2, sizeof *a->heads);
    if (!a->blocks || !a->heads) fail_internal("activations", "found no memory for the tables of %d blocks", c->layers);
}

static void lists_free(struct activations *a) {
    free(a->blocks);
    free(a->heads);
}

static struct activation_table empty_table(size_t header) {
    return (struct activation_table){.symmetric_bytes = (header + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT};
}

void activations_tabulate(struct activation_table *table, const struct config *c, struct activation_use use) {
    struct activations a = {0};
    lists_alloc(&a, c);
    *table = empty_table(use.header);
    lay_out(&(struct layout){NULL, NULL, use.header > 0, table}, &a, c, use);
    lists_free(&a);
}

void activations_alloc(struct activations *a, const struct config *c, struct activation_use use, struct comm *group) {
    struct activation_table table;
    activations_tabulate(&table, c, use);
    *a = (struct activations){
        .arena = device_alloc(table.bytes), .bytes = table.bytes, .batch = use.batch, .seq = use.seq};
    if (use.header) symm_alloc(&a->symm, group, table.symmetric_bytes);
    lists_alloc(a, c);
    table = empty_table(use.header);
    lay_out(&(struct layout){a->arena, a->symm.mine, use.header > 0, &table}, a, c, use);

    size_t count = (size_t)use.seq * (size_t)c->rope_dim;
    accum *angles = malloc(sizeof(accum) * count);
    if (!angles) fail_internal("rotary angles", "found no memory for %zu numbers", count);
    rope_angles(angles, c, use.seq);
    device_copy_in(a->angles, angles, sizeof(accum) * count);
    free(angles);
}

void activations_free(struct activations *a) {
    if (a->symm.mine) symm_free(&a->symm);
    device_free(a->arena);
    lists_free(a);
    *a = (struct activations){0};
}
