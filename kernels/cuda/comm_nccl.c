// Collectives on device memory by NCCL.
//
// All of them are queued on one stream beside the one that computes, in the order of the calls, which is the same on
// every rank: collectives of several groups can then not wait for each other in a circle. A collective begins when what
// was called before it has been computed; what is called after it (an exchange: after its finish) waits for its end.
// The host waits for none of this.
//
// NCCL is never called for a group of one rank.
#include "kernels/cuda/comm_nccl.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/backoff.h"
#include "kernels/comm_mpi.h"
#include "kernels/cuda/lost_wait.h"

struct group { // comm->device
    ncclComm_t nccl;
    struct group *next;
};

struct collective {
    cudaEvent_t ready, done; // it may begin; it has ended
    const char *call;
    int ranks;
};

enum { COLLECTIVES = 1024 }; // on their way at once; the host waits before it queues more

static struct group *groups;
static cudaStream_t stream;
static cudaStream_t copies;       // of rows that stay on this rank: beside the exchange with the others
static cudaEvent_t copied, start; // start: of exchanges while it is held
static bool start_is_held;
// Number i is in place i % COLLECTIVES. Those below `ended` have ended, those from `begun` on were not called yet.
static struct collective collectives[COLLECTIVES];
static size_t begun, ended;

void nccl_check_code(ncclResult_t code, const char *place, const char *call) {
    if (code == ncclSuccess) return;
    const char *more = ncclGetLastError(NULL);
    fail_internal(place, "%.*s failed: %s (%s); with NCCL_DEBUG=INFO in the environment NCCL says more",
                  (int)strcspn(call, "("), call, ncclGetErrorString(code), more && *more ? more : "no details");
}

// ---- waiting ----

static bool has_happened(cudaEvent_t event) {
    cudaError_t code = cudaEventQuery(event);
    if (code == cudaErrorNotReady) {
        (void)cudaGetLastError(); // "not yet" would be found there by the next check of a launch
        return false;
    }
    cuda_check_code(code, __func__, "cudaEventQuery");
    return true;
}

void comm_nccl_check_async(void) {
    for (struct group *g = groups; g; g = g->next) {
        ncclResult_t state = ncclSuccess;
        nccl_check(ncclCommGetAsyncError(g->nccl, &state));
        if (state != ncclInProgress) nccl_check_code(state, "NCCL", "a collective");
    }
}

// Forgets those that have ended. The oldest other one, if it may go on and so waits for other ranks, else NULL.
static const struct collective *find_waiting(void) {
    while (ended < begun && has_happened(collectives[ended % COLLECTIVES].done)) ended++;
    if (ended == begun) return NULL;
    const struct collective *oldest = &collectives[ended % COLLECTIVES];
    return has_happened(oldest->ready) ? oldest : NULL;
}

static void pause_between_looks(double waited) {
    if (waited < 20e-3) return; // what a step waits for comes soon, and the GPU has nothing to do while we oversleep
    nanosleep(&(struct timespec){.tv_nsec = waited < 0.1 ? 20000 : 100000}, NULL);
}

void comm_nccl_wait(cudaEvent_t event, const char *call) {
    const double check_every = 0.1;
    struct waited waited = {0};
    double since = 0, checked = 0; // seconds of this wait: the oldest collective waits since; the last check for errors
    size_t oldest = ended;
    while (!has_happened(event)) {
        lost_wait_check();
        double now = waited_seconds(&waited);
        const struct collective *waiting = find_waiting();
        if (!waiting || ended != oldest) since = now;
        oldest = ended;
        if (waiting && now - since > comm_timeout())
            fail_internal(
                call,
                "waited %g s for the other ranks of a group of %d to do their part of %s; a rank has stopped, "
                "makes other calls or is very slow: if it is only slow, raise --timeout",
                comm_timeout(), waiting->ranks, waiting->call);
        if (now - checked > check_every) {
            comm_nccl_check_async();
            checked = now;
        }
        pause_between_looks(now);
    }
    lost_wait_check(); // should the kernel have ended all the same
}

// One stream has them all: its last one ends last.
void comm_nccl_finish(const char *call) {
    if (begun) comm_nccl_wait(collectives[(begun - 1) % COLLECTIVES].done, call);
}

// ---- groups ----

static void open_streams(void) {
    int least, greatest;
    if (stream) return;
    // Products fill the GPU for a while: an exchange that waits behind them would not overlap.
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    cuda_check(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, greatest));
    cuda_check(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
    cuda_check(cudaEventCreateWithFlags(&start, cudaEventDisableTiming));
    for (int i = 0; i < COLLECTIVES; i++) {
        cuda_check(cudaEventCreateWithFlags(&collectives[i].ready, cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&collectives[i].done, cudaEventDisableTiming));
    }
}

// NCCL's own waits have no bound while it connects ranks, hence the barrier in front of them.
ncclComm_t comm_nccl(struct comm *c) {
    if (c->device) return ((struct group *)c->device)->nccl;
    struct group *g = comm_take_memory(1, sizeof *g);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    open_streams();
    // Sums inside the switches would have an order that nobody promises, and some systems cannot set them up.
    if (!groups) setenv("NCCL_NVLS_ENABLE", "0", 0);
    if (c->rank == 0) nccl_check(ncclGetUniqueId(&id));
    comm_broadcast(c, &id, sizeof id, 0);
    comm_barrier(c);
    nccl_check(ncclCommInitRankConfig(&g->nccl, c->size, id, c->rank, &config));
    g->next = groups;
    groups = g;
    c->device = g;
    return g->nccl;
}

void comm_device_free(struct comm *c) {
    struct group *g = c->device;
    if (!g) return;
    comm_nccl_finish(__func__);
    nccl_check(ncclCommDestroy(g->nccl));
    struct group **link = &groups;
    while (*link != g) link = &(*link)->next;
    *link = g->next;
    free(g);
    c->device = NULL;
}

// ---- collectives ----

void comm_hold_start(bool hold) {
    open_streams();
    if (hold) cuda_check(cudaEventRecord(start, cuda_stream()));
    start_is_held = hold;
}

// What NCCL is given until collective_end begins when everything has been computed that was called before, or before
// the start that is held.
static void collective_begin(struct comm *c, const char *call) {
    comm_nccl(c);
    if (begun - ended == COLLECTIVES) {
        comm_nccl_wait(collectives[ended % COLLECTIVES].done, call);
        find_waiting();
    }
    struct collective *now = &collectives[begun % COLLECTIVES];
    now->call = call;
    now->ranks = c->size;
    if (start_is_held) {
        cuda_check(cudaStreamWaitEvent(stream, start, 0));
        cuda_check(cudaEventRecord(now->ready, stream));
    } else {
        cuda_check(cudaEventRecord(now->ready, cuda_stream()));
        cuda_check(cudaStreamWaitEvent(stream, now->ready, 0));
    }
}

static size_t collective_end(void) {
    cuda_check(cudaEventRecord(collectives[begun % COLLECTIVES].done, stream));
    return begun++;
}

// What is called next waits for it. The place of one that has ended may hold a later one.
static void collective_wait(size_t number) {
    if (number >= ended) cuda_check(cudaStreamWaitEvent(cuda_stream(), collectives[number % COLLECTIVES].done, 0));
}

static void copy(void *to, const void *from, size_t bytes, cudaStream_t where) {
    if (bytes && to != from) cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, where));
}

void comm_gather_device(struct comm *c, void *all, const void *mine, size_t bytes) {
    OPERATION();
    if (bytes == 0) return;
    if (comm_size(c) == 1) {
        copy(all, mine, bytes, cuda_stream());
        return;
    }
    collective_begin(c, __func__);
    nccl_check(ncclAllGather(mine, all, bytes, ncclInt8, comm_nccl(c), stream));
    collective_wait(collective_end());
}

// Elements of each piece when all are equally long, but for `tail` more of the last one: one call then does the most.
// false: they are not so.
static bool pieces_are_even(const size_t *offsets, int pieces, size_t *length, size_t *tail) {
    *length = offsets[1] - offsets[0];
    for (int r = 1; r < pieces - 1; r++)
        if (offsets[r + 1] - offsets[r] != *length) return false;
    size_t last = offsets[pieces] - offsets[pieces - 1];
    if (last < *length) return false;
    *tail = last - *length;
    return true;
}

void comm_reduce_scatter(struct comm *c, accum *values, const size_t *offsets) {
    OPERATION();
    int n = comm_size(c);
    size_t length, tail;
    if (n == 1 || offsets[n] == offsets[0]) return;
    collective_begin(c, __func__);
    ncclComm_t nccl = comm_nccl(c);
    nccl_check(ncclGroupStart());
    if (pieces_are_even(offsets, n, &length, &tail)) {
        accum *first = values + offsets[0], *rest = first + length * (size_t)n;
        if (length)
            nccl_check(
                ncclReduceScatter(first, first + length * (size_t)c->rank, length, ncclFloat32, ncclSum, nccl, stream));
        if (tail) nccl_check(ncclReduce(rest, rest, tail, ncclFloat32, ncclSum, n - 1, nccl, stream));
    } else {
        for (int r = 0; r < n; r++) {
            accum *piece = values + offsets[r];
            size_t count = offsets[r + 1] - offsets[r];
            if (count) nccl_check(ncclReduce(piece, piece, count, ncclFloat32, ncclSum, r, nccl, stream));
        }
    }
    nccl_check(ncclGroupEnd());
    collective_wait(collective_end());
}

struct comm_exchange {
    size_t number;
    bool alone; // a group of one rank, or nothing to move: nothing to wait for
};

static struct comm_exchange begin_all_gather(struct comm *c, real *values, const size_t *offsets, const char *call) {
    int n = comm_size(c);
    size_t length, tail;
    if (n == 1 || offsets[n] == offsets[0]) return (struct comm_exchange){.alone = true};
    collective_begin(c, call);
    ncclComm_t nccl = comm_nccl(c);
    nccl_check(ncclGroupStart());
    if (pieces_are_even(offsets, n, &length, &tail)) {
        real *first = values + offsets[0], *rest = first + length * (size_t)n;
        if (length)
            nccl_check(ncclAllGather(first + length * (size_t)c->rank, first, length, ncclBfloat16, nccl, stream));
        if (tail) nccl_check(ncclBroadcast(rest, rest, tail, ncclBfloat16, n - 1, nccl, stream));
    } else {
        for (int r = 0; r < n; r++) {
            real *piece = values + offsets[r];
            size_t count = offsets[r + 1] - offsets[r];
            if (count) nccl_check(ncclBroadcast(piece, piece, count, ncclBfloat16, r, nccl, stream));
        }
    }
    nccl_check(ncclGroupEnd());
    return (struct comm_exchange){.number = collective_end()};
}

static struct comm_exchange *keep(struct comm_exchange e) {
    struct comm_exchange *kept = comm_take_memory(1, sizeof *kept);
    *kept = e;
    return kept;
}

static void finish_exchange(struct comm_exchange e) {
    if (!e.alone) collective_wait(e.number);
}

void comm_exchange_finish(struct comm_exchange *e) {
    OPERATION();
    finish_exchange(*e);
    free(e);
}

struct comm_exchange *comm_all_gather_begin(struct comm *c, real *values, const size_t *offsets) {
    OPERATION();
    return keep(begin_all_gather(c, values, offsets, __func__));
}

void comm_all_gather(struct comm *c, real *values, const size_t *offsets) {
    OPERATION();
    finish_exchange(begin_all_gather(c, values, offsets, __func__));
}

// ---- exchanges ----

// Both sides know how many rows a pair exchanges; of none, neither says anything to NCCL.
static void exchange_with_others(struct comm *c, char *to, const size_t *to_offsets, const char *from,
                                 const size_t *from_offsets, size_t row_bytes) {
    ncclComm_t nccl = comm_nccl(c);
    nccl_check(ncclGroupStart());
    for (int i = 1; i < c->size; i++) {
        int receiver = (c->rank + i) % c->size, sender = (c->rank + c->size - i) % c->size;
        size_t sent = (from_offsets[receiver + 1] - from_offsets[receiver]) * row_bytes;
        size_t received = (to_offsets[sender + 1] - to_offsets[sender]) * row_bytes;
        if (sent)
            nccl_check(ncclSend(from + from_offsets[receiver] * row_bytes, sent, ncclInt8, receiver, nccl, stream));
        if (received)
            nccl_check(ncclRecv(to + to_offsets[sender] * row_bytes, received, ncclInt8, sender, nccl, stream));
    }
    nccl_check(ncclGroupEnd());
}

static struct comm_exchange begin_exchange(struct comm *c, char *to, const size_t *to_offsets, const char *from,
                                           const size_t *from_offsets, size_t row_bytes, const char *call) {
    int me = comm_rank(c);
    size_t own = (from_offsets[me + 1] - from_offsets[me]) * row_bytes;
    char *there = to + to_offsets[me] * row_bytes;
    const char *here = from + from_offsets[me] * row_bytes;
    if (comm_size(c) == 1) {
        copy(there, here, own, cuda_stream());
        return (struct comm_exchange){.alone = true};
    }
    collective_begin(c, call);
    if (own) {
        cuda_check(cudaStreamWaitEvent(copies, collectives[begun % COLLECTIVES].ready, 0));
        copy(there, here, own, copies);
        cuda_check(cudaEventRecord(copied, copies));
    }
    exchange_with_others(c, to, to_offsets, from, from_offsets, row_bytes);
    if (own) cuda_check(cudaStreamWaitEvent(stream, copied, 0));
    return (struct comm_exchange){.number = collective_end()};
}

struct comm_exchange *comm_exchange_begin(struct comm *c, void *to, const size_t *to_offsets, const void *from,
                                          const size_t *from_offsets, size_t row_bytes) {
    OPERATION();
    return keep(begin_exchange(c, to, to_offsets, from, from_offsets, row_bytes, __func__));
}

void comm_exchange_rows(struct comm *c, void *to, const size_t *to_offsets, const void *from,
                        const size_t *from_offsets, size_t row_bytes) {
    OPERATION();
    finish_exchange(begin_exchange(c, to, to_offsets, from, from_offsets, row_bytes, __func__));
}
