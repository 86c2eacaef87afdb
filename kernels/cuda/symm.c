// Symmetric memory: windows of NCCL, which maps the pieces of all ranks into every rank's addresses.
#include <stdlib.h>

#include "kernels/comm_mpi.h"
#include "kernels/cuda/comm_nccl.h"
#include "kernels/cuda/symm.h"

struct window {
    struct comm *comm;
    ncclWindow_t nccl;
};

// All ranks of the group see the same: the first one says it for all, which ends the job.
static _Noreturn void fail_for_team(struct comm *c, const char *found) {
    if (c->rank > 0) comm_barrier(c);
    fail_user("--ep",
              "found a group of %d ranks %s, wanted all of them to load and store in each other's GPU memory (NVLink), "
              "as --moe mok does; use --moe alltoall, or a smaller --ep",
              c->size, found);
}

static void *allocate(size_t bytes) {
    const double gib = (double)(1 << 30);
    void *memory = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (bytes > free_bytes)
        fail_user(
            "GPU memory",
            "found %.2f GiB free, wanted %.2f GiB that all ranks of a group share; lower --batch or --seq, or use "
            "--moe alltoall",
            (double)free_bytes / gib, (double)bytes / gib);
    nccl_check(ncclMemAlloc(&memory, bytes));
    return memory;
}

// A window is made of whole units of this size, and is never empty.
static size_t window_bytes(size_t bytes) {
    const size_t unit = NCCL_WIN_REQUIRED_ALIGNMENT;
    return bytes > SIZE_MAX / 2 ? bytes : (bytes + unit) / unit * unit;
}

// Addresses in the order of the group's ranks, which the team has when it is the whole group.
static void find_peers(struct symm *s, ncclWindow_t window, int n) {
    size_t bytes = (size_t)n * sizeof *s->peers;
    void **peers = device_alloc(bytes);
    symm_write_peers(peers, window, n);
    device_copy_out(s->peers, peers, bytes);
    device_free(peers);
}

void symm_alloc(struct symm *s, struct comm *c, size_t bytes) {
    int n = comm_size(c);
    *s = (struct symm){.bytes = bytes, .peers = comm_take_memory((size_t)n, sizeof *s->peers)};
    if (n == 1) {
        s->mine = s->peers[0] = device_alloc(bytes);
        return;
    }
    struct window *w = comm_take_memory(1, sizeof *w);
    ncclComm_t nccl = comm_nccl(c);
    w->comm = c;
    if (symm_team_size(nccl) < n) fail_for_team(c, "that NCCL sees in several domains");
    size_t whole = window_bytes(bytes);
    s->mine = allocate(whole);
    s->handle = w;
    comm_barrier(c); // NCCL's own waits have no bound
    nccl_check(ncclCommWindowRegister(nccl, s->mine, whole, &w->nccl, NCCL_WIN_COLL_SYMMETRIC));
    if (!w->nccl) fail_for_team(c, "whose memory NCCL cannot map");
    find_peers(s, w->nccl, n);
    s->peers[c->rank] = s->mine; // NCCL has mapped this rank's piece a second time, among those of the others
    device_zero(s->mine, whole);
    device_finish();
    comm_barrier(c); // all are zeroed
}

void symm_free(struct symm *s) {
    struct window *w = s->handle;
    if (w) {
        device_finish();
        comm_barrier(w->comm); // nobody uses this rank's any more
        nccl_check(ncclCommWindowDeregister(comm_nccl(w->comm), w->nccl));
        nccl_check(ncclMemFree(s->mine));
        free(w);
    } else {
        device_free(s->mine);
    }
    free(s->peers);
    *s = (struct symm){0};
}
