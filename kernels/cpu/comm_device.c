// Collectives on device memory, which is host memory here: messages of MPI.
#include <stdlib.h>
#include <string.h>

#include "kernels/comm_mpi.h"
#include "kernels/operation.h"

void comm_device_free(struct comm *c) { (void)c; }

void comm_gather_device(struct comm *c, void *all, const void *mine, size_t bytes) {
    OPERATION();
    comm_gather_all(c, all, mine, bytes);
}

static size_t at_most(size_t n, size_t limit) { return n < limit ? n : limit; }

// sum [n] = what every rank has, in the order of the ranks: mine is this rank's, the others' lie in theirs [size, chunk].
static void sum_ranks(accum *sum, const struct comm *c, const accum *mine, const accum *theirs, size_t chunk,
                      size_t n) {
    for (int r = 0; r < c->size; r++) {
        const accum *part = r == c->rank ? mine : theirs + (size_t)r * chunk;
        if (r == 0)
            memcpy(sum, part, n * sizeof *sum);
        else
            for (size_t i = 0; i < n; i++) sum[i] += part[i];
    }
}

// Round by round, the next chunk of every piece goes to the rank that it belongs to.
void comm_reduce_scatter(struct comm *c, accum *values, const size_t *offsets) {
    OPERATION();
    if (comm_size(c) == 1) return;
    struct comm_messages m = {0};
    size_t chunk = comm_values_at_once(c, sizeof *values), longest = 0;
    for (int r = 0; r < c->size; r++)
        if (offsets[r + 1] - offsets[r] > longest) longest = offsets[r + 1] - offsets[r];
    chunk = at_most(longest, chunk);
    accum *theirs = comm_take_memory((size_t)c->size * chunk, sizeof *theirs),
          *sum = comm_take_memory(chunk, sizeof *sum);
    accum *mine = values + offsets[c->rank];
    size_t length = offsets[c->rank + 1] - offsets[c->rank];
    for (size_t done = 0; done < longest; done += chunk) {
        size_t n = done < length ? at_most(length - done, chunk) : 0;
        for (int r = 0; r < c->size; r++)
            if (r != c->rank) comm_post_receive(&m, c, theirs + (size_t)r * chunk, n * sizeof *sum, r, TAG_COLLECTIVE);
        for (int r = 0; r < c->size; r++) {
            size_t all = offsets[r + 1] - offsets[r], part = done < all ? at_most(all - done, chunk) : 0;
            if (r != c->rank) comm_post_send(&m, c, values + offsets[r] + done, part * sizeof *sum, r, TAG_COLLECTIVE);
        }
        comm_finish_messages(c, &m, __func__);
        if (n == 0) continue;
        sum_ranks(sum, c, mine + done, theirs, chunk, n);
        memcpy(mine + done, sum, n * sizeof *sum);
    }
    free(theirs);
    free(sum);
}

struct comm_exchange {
    struct comm *comm;
    struct comm_messages messages;
};

static void finish_exchange(struct comm_exchange *e, const char *call) {
    comm_finish_messages(e->comm, &e->messages, call);
    free(e);
}

void comm_exchange_finish(struct comm_exchange *e) {
    OPERATION();
    finish_exchange(e, __func__);
}

struct comm_exchange *comm_all_gather_begin(struct comm *c, real *values, const size_t *offsets) {
    OPERATION();
    struct comm_exchange *e = comm_take_memory(1, sizeof *e);
    int n = comm_size(c), me = comm_rank(c);
    e->comm = c;
    for (int r = 0; r < n; r++) {
        size_t bytes = (offsets[r + 1] - offsets[r]) * sizeof *values;
        if (r != me) comm_post_receive(&e->messages, c, values + offsets[r], bytes, r, TAG_COLLECTIVE);
    }
    size_t bytes = (offsets[me + 1] - offsets[me]) * sizeof *values;
    for (int r = 0; r < n; r++)
        if (r != me) comm_post_send(&e->messages, c, values + offsets[me], bytes, r, TAG_COLLECTIVE);
    return e;
}

void comm_all_gather(struct comm *c, real *values, const size_t *offsets) {
    OPERATION();
    finish_exchange(comm_all_gather_begin(c, values, offsets), __func__);
}

// MPI may move nothing before finish is called: whether it does is its own choice.
struct comm_exchange *comm_exchange_begin(struct comm *c, void *to, const size_t *to_offsets, const void *from,
                                          const size_t *from_offsets, size_t row_bytes) {
    OPERATION();
    struct comm_exchange *e = comm_take_memory(1, sizeof *e);
    struct comm_messages *m = &e->messages;
    char *there = to;
    const char *here = from;
    int n = comm_size(c), me = comm_rank(c);
    e->comm = c;
    for (int r = 0; r < n; r++) {
        size_t bytes = (to_offsets[r + 1] - to_offsets[r]) * row_bytes;
        if (r != me) comm_post_receive(m, c, there + to_offsets[r] * row_bytes, bytes, r, TAG_COLLECTIVE);
    }
    for (int i = 1; i < n; i++) { // from the next rank on, so that not all of them send to rank 0 first
        int r = (me + i) % n;
        size_t bytes = (from_offsets[r + 1] - from_offsets[r]) * row_bytes;
        comm_post_send(m, c, here + from_offsets[r] * row_bytes, bytes, r, TAG_COLLECTIVE);
    }
    size_t own = (from_offsets[me + 1] - from_offsets[me]) * row_bytes;
    if (own) memcpy(there + to_offsets[me] * row_bytes, here + from_offsets[me] * row_bytes, own);
    return e;
}

void comm_hold_start(bool hold) { (void)hold; } // everything that was called has been done

void comm_exchange_rows(struct comm *c, void *to, const size_t *to_offsets, const void *from,
                        const size_t *from_offsets, size_t row_bytes) {
    OPERATION();
    finish_exchange(comm_exchange_begin(c, to, to_offsets, from, from_offsets, row_bytes), __func__);
}
