// What every rank keeps at the beginning of its symmetric memory, and how kernels reach it.
#ifndef MOK_KERNELS_CUDA_MOK_HEADER_H
#define MOK_KERNELS_CUDA_MOK_HEADER_H

#include "kernels/cuda/cuda.h"
#include "kernels/mok.h"

// A word that another rank writes, alone in 64 bytes.
struct mok_arrival {
    uint64_t epoch;
    char unused[64 - sizeof(uint64_t)];
};

struct mok_header {
    int32_t tokens;   // of this rank in the present pass; the others read it
    int32_t given_up; // threads of this rank have lost a wait at a barrier
    uint64_t epoch;   // barriers to which this rank has come: here, so that a captured graph counts on when replayed
    char unused[64 - 2 * sizeof(int32_t) - sizeof(uint64_t)];
    struct mok_arrival arrivals[]; // [ranks] the last barrier at which each rank has arrived
};

// The addresses of a group's symmetric memory as an argument of kernels, which cannot read the host's array.
enum { MOK_MOST_RANKS = 128 };
struct mok_peers {
    char *base[MOK_MOST_RANKS];
};

static inline struct mok_peers mok_peers_of(const struct mok_group *g) {
    struct mok_peers peers;
    if (g->ranks > MOK_MOST_RANKS)
        fail_user("--ep", "found %d, wanted at most %d for the megakernel of a GPU; lower it, or use --moe alltoall",
                  g->ranks, MOK_MOST_RANKS);
    for (int r = 0; r < MOK_MOST_RANKS; r++) peers.base[r] = r < g->ranks ? g->base[r] : NULL;
    return peers;
}

#endif
