// The plan: count the routes to this rank's experts, turn counts into places, place the rows.
//
// All ranks' routes are cut into tiles of tokens. A tile's routes to one expert stand together, tile behind tile in the
// order of ranks and tokens; so the first row of every (tile, expert) follows from sums of counts, and tiles can be counted
// and placed at the same time by anybody.
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/mok_header.h"
#include "kernels/cpu/scratch.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "kernels/mok.h"
#include "kernels/operation.h"

enum { TILE_TOKENS = 256 };

// Arrays of a plan behind each other in one piece of memory; with base NULL it only counts.
static size_t lay_out(struct mok_plan *p, const struct mok_shape *s, char *base) {
    size_t experts = (size_t)mok_most_experts(s), blocks = mok_capacity_blocks(s), bytes = 0;
    p->rows = (struct mok_row *)base;
    bytes += blocks * MOK_BLOCK_ROWS * sizeof *p->rows;
    int **const arrays[] = {&p->expert_block, &p->expert_rows, &p->block_expert, &p->walk, &p->source_rows};
    const size_t sizes[] = {experts + 1, experts, blocks, blocks, experts * (size_t)s->ranks};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        *arrays[i] = base ? (int *)(base + bytes) : NULL;
        bytes += sizes[i] * sizeof(int);
    }
    return bytes;
}

size_t mok_plan_bytes(const struct mok_shape *s) {
    struct mok_plan p;
    return lay_out(&p, s, NULL);
}

void mok_plan_alloc(struct mok_plan *p, const struct mok_shape *s) {
    *p = (struct mok_plan){0};
    lay_out(p, s, device_alloc(mok_plan_bytes(s)));
}

void mok_plan_free(struct mok_plan *p) {
    device_free(p->rows);
    *p = (struct mok_plan){0};
}

void mok_plan_read(struct mok_plan *host, const struct mok_plan *p, const struct mok_shape *s) {
    char *copy = malloc(mok_plan_bytes(s));
    if (!copy) fail_internal("megakernel", "found no host memory for a plan of %zu bytes", mok_plan_bytes(s));
    memcpy(copy, p->rows, mok_plan_bytes(s));
    *host = *p;
    lay_out(host, s, copy);
}

// A tile of one rank's tokens.
struct tile {
    int source, first, end;
};

// Cuts all ranks' tokens; returns the number of tiles. tiles may be NULL to count them only.
static int cut_tiles(struct tile *tiles, const struct mok_group *g, const struct mok_shape *s) {
    int count = 0;
    for (int source = 0; source < g->ranks; source++) {
        int tokens = mok_header_of(g, source)->tokens;
        if (tokens < 0 || tokens > s->max_tokens)
            fail_internal("megakernel", "found %d tokens on rank %d, wanted 0 to %d", tokens, source, s->max_tokens);
        for (int first = 0; first < tokens; first += TILE_TOKENS, count++)
            if (tiles) tiles[count] = (struct tile){source, first, mok_min(first + TILE_TOKENS, tokens)};
    }
    return count;
}

// counts [experts] of one tile's routes to this rank's experts
static void count_tile(int *counts, struct tile t, const int32_t *ids, int first_expert, int experts, int K) {
    memset(counts, 0, sizeof *counts * (size_t)experts);
    for (size_t slot = (size_t)t.first * (size_t)K; slot < (size_t)t.end * (size_t)K; slot++) {
        int e = ids[slot] - first_expert; // negative for id -1 too
        if (e >= 0 && e < experts) counts[e]++;
    }
}

// Turns the counts [tiles, experts] into the first row of each, and fills in what follows from them.
static void sum_counts(struct mok_plan *p, const struct mok_shape *s, int *counts, const struct tile *tiles,
                       int tile_count) {
    p->blocks = 0;
    for (int e = 0; e < p->experts; e++) {
        int rows = 0, source = 0, first_row = p->blocks * MOK_BLOCK_ROWS;
        int *before = p->source_rows + (size_t)e * (size_t)s->ranks;
        p->expert_block[e] = p->blocks;
        for (int t = 0; t < tile_count; t++) {
            int *count = counts + (size_t)t * (size_t)p->experts + e, here = *count;
            while (source <= tiles[t].source) before[source++] = rows;
            *count = first_row + rows;
            rows += here;
        }
        while (source < s->ranks) before[source++] = rows;
        p->expert_rows[e] = rows;
        p->blocks += mok_ceil(rows, MOK_BLOCK_ROWS);
    }
    p->expert_block[p->experts] = p->blocks;
}

// next [experts]: the next free row of each, for this tile
static void place_tile(struct mok_plan *p, int *next, struct tile t, const int32_t *ids, const accum *gates,
                       int first_expert, int K) {
    for (int slot = t.first * K; slot < t.end * K; slot++) {
        int e = ids[slot] - first_expert;
        if (e >= 0 && e < p->experts) p->rows[next[e]++] = (struct mok_row){t.source, slot, gates[slot]};
    }
}

static void pad_expert(struct mok_plan *p, int e) {
    size_t first = (size_t)p->expert_block[e] * MOK_BLOCK_ROWS + (size_t)p->expert_rows[e];
    for (size_t row = first; row < (size_t)p->expert_block[e + 1] * MOK_BLOCK_ROWS; row++)
        p->rows[row] = (struct mok_row){-1, 0, 0};
}

void mok_plan_make(struct mok_plan *p, const struct mok_shape *s, const struct mok_group *g, const int32_t *ids,
                   const accum *gates) {
    OPERATION();
    int K = s->top_k, first_expert = mok_first_expert(s, g->rank);
    p->rank = g->rank;
    p->experts = mok_local_experts(s, g->rank);
    p->tokens = mok_header_of(g, g->rank)->tokens;

    int tile_count = cut_tiles(NULL, g, s);
    struct tile *tiles = scratch_alloc(sizeof *tiles * (size_t)tile_count);
    int *counts = scratch_alloc(sizeof *counts * (size_t)tile_count * (size_t)p->experts);
    cut_tiles(tiles, g, s);
#pragma omp parallel for
    for (int t = 0; t < tile_count; t++)
        count_tile(counts + (size_t)t * (size_t)p->experts, tiles[t], mok_peer(g, tiles[t].source, ids), first_expert,
                   p->experts, K);
    sum_counts(p, s, counts, tiles, tile_count);
#pragma omp parallel for
    for (int t = 0; t < tile_count; t++)
        place_tile(p, counts + (size_t)t * (size_t)p->experts, tiles[t], mok_peer(g, tiles[t].source, ids),
                   mok_peer(g, tiles[t].source, gates), first_expert, K);
    for (int e = 0; e < p->experts; e++) {
        pad_expert(p, e);
        for (int b = p->expert_block[e]; b < p->expert_block[e + 1]; b++) p->block_expert[b] = e;
    }
    for (int at = 0; at < p->blocks; at++) p->walk[at] = mok_walk_at(s, p, at);
    scratch_free(counts);
    scratch_free(tiles);
}
