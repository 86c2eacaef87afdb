// What every rank keeps at the beginning of its symmetric memory.
#ifndef MOK_KERNELS_CPU_MOK_HEADER_H
#define MOK_KERNELS_CPU_MOK_HEADER_H

#include "kernels/mok.h"

// A word that another rank writes, alone in its cache line.
struct mok_arrival {
    uint64_t epoch;
    char unused[64 - sizeof(uint64_t)];
};

struct mok_header {
    int32_t tokens; // of this rank in the present pass
    char unused[64 - sizeof(int32_t)];
    struct mok_arrival arrivals[]; // [ranks] the last barrier at which each rank has arrived
};

static inline struct mok_header *mok_header_of(const struct mok_group *g, int rank) {
    return (struct mok_header *)g->base[rank];
}

#endif
