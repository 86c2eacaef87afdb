#include "kernels/cuda/scratch.h"

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/scratch_attention.h"
#include "kernels/cuda/scratch_moe.h"
#include "kernels/cuda/scratch_router.h"

int norm_chunk_rows(int rows) {
    const int most = NORM_CHUNKS * NORM_CHUNK_ROWS;
    return NORM_CHUNK_ROWS * (rows / most + (rows % most > 0));
}

// Never less for more rows.
size_t scratch_rmsnorm_backward(int rows, int width) {
    size_t chunks = ((size_t)rows + NORM_CHUNK_ROWS - 1) / NORM_CHUNK_ROWS;
    return sizeof(accum) * (chunks < NORM_CHUNKS ? chunks : NORM_CHUNKS) * (size_t)width;
}

// Appends an array to a layout of `bytes` so far; returns where it begins.
static size_t append(size_t *bytes, size_t size) {
    size_t begin = *bytes;
    *bytes += (size + 255) / 256 * 256;
    return begin;
}

struct embedding_scratch scratch_embedding_layout(int rows, int hidden) {
    struct embedding_scratch s = {0};
    size_t n = (size_t)rows;
    s.keys = append(&s.bytes, sizeof(uint64_t) * n);
    s.sorted = append(&s.bytes, sizeof(uint64_t) * n);
    s.segments = append(&s.bytes, 2 * sizeof(int) * n);
    s.partials = append(&s.bytes, sizeof(accum) * (n / EMBEDDING_CHUNK_ROWS) * (size_t)hidden);
    return s;
}

size_t scratch_embedding_backward(int rows, int hidden) { return scratch_embedding_layout(rows, hidden).bytes; }

size_t scratch_sum(void) { return sizeof(double) * (SUM_PIECES + 1); }

size_t device_scratch_bytes(const struct scratch_sizes *s) {
    struct attention_shape attention = {s->batch, s->length, s->heads, s->nope_dim, s->rope_dim, s->value_dim, 1};
    const size_t needs[] = {
        scratch_rmsnorm_backward(s->rows, s->width),
        scratch_embedding_backward(s->rows, s->width),
        scratch_attention_backward(attention),
        scratch_router_balance(s->rows, s->experts, s->sequences),
        scratch_router_backward(s->rows, s->hidden, s->experts, s->sequences),
        scratch_moe_place(s->rows, s->top_k, s->experts),
        scratch_moe_regroup(s->experts),
        scratch_sum(),
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++)
        if (needs[i] > most) most = needs[i];
    return most;
}

void device_reserve_scratch(size_t bytes) {
    if (bytes) cuda_scratch(bytes);
}
