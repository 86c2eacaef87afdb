// The barrier at the edges of a pass: a kernel of its own, of one block, never part of the pass.
#include <cstring>

#include "kernels/cuda/lost_wait.h"
#include "kernels/cuda/mok_header.h"

extern "C" size_t mok_header_bytes(int ranks) {
    return sizeof(struct mok_header) + (size_t)ranks * sizeof(struct mok_arrival);
}

static __global__ void set_tokens_kernel(struct mok_header *header, int tokens) { header->tokens = tokens; }

extern "C" void mok_set_tokens(struct mok_group *g, int tokens) {
    g->tokens = tokens;
    set_tokens_kernel<<<1, 1, 0, cuda_stream()>>>((struct mok_header *)g->base[g->rank], tokens);
    cuda_check_launch();
}

struct barrier_call {
    struct mok_peers peers;
    int rank, ranks;
    uint64_t patience; // ns
    struct lost_wait *record;
    char what[sizeof(((struct lost_wait *)0)->text)];
};

// Kernels that came before in the stream have ended, so all they wrote, by whatever path, happened before everything here.
// A release is cumulative: whoever acquires the epoch sees that too, though other threads wrote it.
static __device__ __forceinline__ void arrive(uint64_t *arrival, uint64_t epoch) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(arrival), "l"(epoch) : "memory");
}

// And what was acquired here happened before every kernel that comes after in the stream.
static __device__ __forceinline__ uint64_t arrived(const uint64_t *arrival) {
    uint64_t epoch;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(epoch) : "l"(arrival) : "memory");
    return epoch;
}

// Thread r tells rank r, then waits for it.
static __global__ void barrier_kernel(const __grid_constant__ struct barrier_call c) {
    struct mok_header *own = (struct mok_header *)c.peers.base[c.rank];
    int r = threadIdx.x;
    uint64_t epoch = own->epoch + 1, found;
    __syncthreads(); // all have read it
    if (r == 0) own->epoch = epoch;
    if (r >= c.ranks) return;
    arrive(&((struct mok_header *)c.peers.base[r])->arrivals[c.rank].epoch, epoch);
    if (arrived(&own->arrivals[r].epoch) >= epoch) return;
    uint64_t begin = wait_nanoseconds();
    while ((found = arrived(&own->arrivals[r].epoch)) < epoch) {
        uint64_t waited = wait_nanoseconds() - begin;
        if (waited > c.patience) {
            lost_rank_end(c.record, &own->given_up, WAIT_MOK_BARRIER, c.rank, r,
                          (unsigned)((waited + 500000000) / 1000000000), (int)epoch, (int)found, c.what);
            break;
        }
        __nanosleep(64);
    }
}

extern "C" void mok_barrier(struct mok_group *g, const char *what) {
    OPERATION();
    const double most_seconds = 1e9; // in nanoseconds they fit
    struct barrier_call c = {};
    c.peers = mok_peers_of(g);
    c.rank = g->rank;
    c.ranks = g->ranks;
    c.patience = (uint64_t)((g->timeout < most_seconds ? g->timeout : most_seconds) * 1e9);
    c.record = lost_wait_record();
    strncpy(c.what, what, sizeof c.what - 1);
    barrier_kernel<<<1, (unsigned)mok_ceil(g->ranks, 32) * 32, 0, cuda_stream()>>>(c);
    cuda_check_launch();
}
