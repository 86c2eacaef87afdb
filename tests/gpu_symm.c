// Ranks with a GPU each: symmetric memory, and the collectives of kernels/comm.h on device memory.
// mpirun -n 2 build/cuda/tests/gpu_symm
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "tests/gpu_symm.h"

static struct comm *world;
static int me, n;
static uint64_t *wrong; // device

static void check_right(const char *what, int rank) {
    uint64_t found;
    device_copy_out(&found, wrong, sizeof found);
    if (found) fail_internal(what, "found %llu wrong words of rank %d", (unsigned long long)found, rank);
}

static void check_pattern(const char *what, const void *words, int rank, size_t count) {
    count_wrong(wrong, words, rank, count);
    check_right(what, rank);
}

static void said(const char *what) {
    comm_barrier(world);
    if (me == 0) printf("ok: %s\n", what);
}

// Every rank reads all pieces, and writes the part of every piece that is meant for it.
static void pieces_are_seen_by_all(size_t words) {
    struct symm s;
    symm_alloc(&s, world, words * sizeof(uint32_t) * (size_t)n);
    if (s.peers[me] != s.mine || s.bytes != words * sizeof(uint32_t) * (size_t)n || (uintptr_t)s.mine % 256)
        fail_internal("symm_alloc", "found other addresses or sizes than were promised");
    for (int r = 0; r < n; r++) check_pattern("zeroed memory", s.peers[r], -1, words * (size_t)n);
    comm_barrier(world);
    fill_pattern(s.mine, me, words);
    device_finish();
    comm_barrier(world);
    for (int r = 0; r < n; r++) check_pattern("reading", s.peers[r], r, words);
    comm_barrier(world);
    for (int r = 0; r < n; r++) fill_pattern((uint32_t *)s.peers[r] + (size_t)me * words, me + n * r, words);
    device_finish();
    comm_barrier(world);
    for (int r = 0; r < n; r++)
        check_pattern("written by others", (uint32_t *)s.mine + (size_t)r * words, r + n * me, words);
    symm_free(&s);
}

static void symmetric_memory_works(void) {
    static const size_t sizes[] = {0, 1, 1000, 1 << 22};
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) pieces_are_seen_by_all(sizes[i]);
    said("symmetric memory");
}

static void gathers_work(void) {
    static const size_t counts[] = {1, 65, 100000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint32_t *mine = device_alloc(counts[i] * sizeof *mine),
                 *all = device_alloc(counts[i] * sizeof *all * (size_t)n);
        fill_pattern(mine, me, counts[i]);
        comm_gather_device(world, all, mine, counts[i] * sizeof *mine);
        for (int r = 0; r < n; r++) check_pattern("comm_gather_device", all + (size_t)r * counts[i], r, counts[i]);
        device_free(mine);
        device_free(all);
    }
    said("gather");
}

// Equal pieces, equal ones with a rest, and pieces that become shorter.
static void cut(size_t *offsets, int kind) {
    for (int r = 0; r <= n; r++) {
        offsets[r] = (size_t)r * (kind == 2 ? 20000 - (size_t)r * 100 : 6400);
        if (kind == 1 && r == n) offsets[r] += 77;
    }
}

static void reductions_work(void) {
    size_t *offsets = calloc((size_t)n + 1, sizeof *offsets);
    for (int kind = 0; kind < 3; kind++) {
        cut(offsets, kind);
        size_t total = offsets[n];
        float *host = calloc(total, sizeof *host);
        accum *values = device_alloc(total * sizeof *values);
        for (size_t i = 0; i < total; i++) host[i] = (float)((int)(i % 1000) + me);
        device_accum_from_float(values, host, total);
        comm_reduce_scatter(world, values, offsets);
        device_accum_to_float(host, values, total);
        for (size_t i = offsets[me]; i < offsets[me + 1]; i++)
            if (host[i] != (float)((int)(i % 1000) * n + n * (n - 1) / 2))
                fail_internal("comm_reduce_scatter", "found %g at %zu with pieces of kind %d", host[i], i, kind);
        real *weights = device_alloc(total * sizeof *weights);
        for (size_t i = 0; i < total; i++) host[i] = i >= offsets[me] && i < offsets[me + 1] ? (float)(i % 256) : -1.0f;
        device_real_from_float(weights, host, total);
        comm_all_gather(world, weights, offsets);
        device_real_to_float(host, weights, total);
        for (size_t i = 0; i < total; i++)
            if (host[i] != (float)(i % 256))
                fail_internal("comm_all_gather", "found %g at %zu with pieces of kind %d", host[i], i, kind);
        device_free(values);
        device_free(weights);
        free(host);
    }
    free(offsets);
    said("reduce-scatter and all-gather");
}

// Rank s sends rank r some rows that depend on the pair; row i of them is a pattern of both.
enum { ROW = 96 }; // words
static size_t rows_of_pair(int s, int r, int kind) {
    return kind == 0 ? 0 : kind == 1 ? (size_t)((s * 7 + r * 3) % 5) : 1000 + (size_t)(s * 31 + r * 17) % 100;
}

struct rows {
    uint32_t *from, *to; // device
    size_t *from_offsets, *to_offsets;
};

static void open_rows(struct rows *x, int kind) {
    x->from_offsets = calloc((size_t)n + 1, sizeof *x->from_offsets);
    x->to_offsets = calloc((size_t)n + 1, sizeof *x->to_offsets);
    for (int r = 0; r < n; r++) {
        x->from_offsets[r + 1] = x->from_offsets[r] + rows_of_pair(me, r, kind);
        x->to_offsets[r + 1] = x->to_offsets[r] + rows_of_pair(r, me, kind);
    }
    x->from = device_alloc(x->from_offsets[n] * ROW * sizeof(uint32_t));
    x->to = device_alloc(x->to_offsets[n] * ROW * sizeof(uint32_t));
    for (int r = 0; r < n; r++)
        fill_pattern(x->from + x->from_offsets[r] * ROW, me * n + r, rows_of_pair(me, r, kind) * ROW);
}

static void close_rows(struct rows *x, int kind) {
    for (int r = 0; r < n; r++)
        check_pattern("exchange", x->to + x->to_offsets[r] * ROW, r * n + me, rows_of_pair(r, me, kind) * ROW);
    device_free(x->from);
    device_free(x->to);
    free(x->from_offsets);
    free(x->to_offsets);
}

static void exchanges_work(void) {
    enum { KINDS = 3, BYTES = ROW * sizeof(uint32_t) };
    struct rows x[KINDS];
    struct comm_exchange *e[KINDS];
    for (int round = 0; round < 4; round++) {
        bool hold = round % 2;
        for (int k = 0; k < KINDS; k++) open_rows(&x[k], k);
        if (hold) comm_hold_start(true);
        for (int k = 0; k < KINDS; k++)
            e[k] = comm_exchange_begin(world, x[k].to, x[k].to_offsets, x[k].from, x[k].from_offsets, BYTES);
        if (hold) comm_hold_start(false);
        for (int i = 0; i < KINDS; i++) comm_exchange_finish(e[(i * 2 + me + round) % KINDS]);
        for (int k = 0; k < KINDS; k++) close_rows(&x[k], k);
        for (int k = 0; k < KINDS; k++) {
            open_rows(&x[k], k);
            comm_exchange_rows(world, x[k].to, x[k].to_offsets, x[k].from, x[k].from_offsets, BYTES);
            close_rows(&x[k], k);
        }
    }
    for (int round = 0; round < 3000; round++) { // more than are remembered
        if (round == 0) open_rows(&x[1], 1);
        comm_exchange_finish(comm_exchange_begin(world, x[1].to, x[1].to_offsets, x[1].from, x[1].from_offsets, BYTES));
    }
    close_rows(&x[1], 1);
    said("exchanges");
}

int main(int argc, char **argv) {
    device_start(argv);
    comm_start(&argc, &argv);
    comm_set_timeout(60);
    world = comm_world();
    me = comm_rank(world);
    n = comm_size(world);
    struct comm *host = comm_split_host(world);
    device_open(comm_rank(host), comm_size(host));
    comm_free(host);
    wrong = device_alloc(sizeof *wrong);
    symmetric_memory_works();
    gathers_work();
    reductions_work();
    exchanges_work();
    device_free(wrong);
    comm_stop();
    return 0;
}
