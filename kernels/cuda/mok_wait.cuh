// Waits of the megakernel for its counters.
#ifndef MOK_KERNELS_CUDA_MOK_WAIT_CUH
#define MOK_KERNELS_CUDA_MOK_WAIT_CUH

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mok_parameters.h"

// Counters of tiles are raised by each half of a tile.
enum { TILE_HALVES = 2 };

// The counters that forward waits for.
static __device__ __forceinline__ void mok_wait_for(const struct mok_parameters &p, struct mok_wait wait) {
    enum wait_for what = wait.kind == MOK_READY     ? WAIT_MOK_READY
                         : wait.kind == MOK_GATE_UP ? WAIT_MOK_GATE_UP
                         : wait.kind == MOK_OUT     ? WAIT_MOK_OUT
                                                    : WAIT_MOK_SHARED_INNER;
    counter_wait(p.counters[wait.kind] + wait.index, wait.kind == MOK_READY ? wait.value : TILE_HALVES * wait.value,
                 p.lost, p.tickets[MOK_GIVEN_UP], what, wait.index);
}

// For tests: a pause of up to 16 microseconds before some of what is numbered.
static __device__ __forceinline__ void mok_delay(const struct mok_parameters &p, unsigned number) {
    if (p.delays == 0) return;
    uint64_t mixed = (p.delays + number + 1) * 0x9e3779b97f4a7c15u;
    mixed ^= mixed >> 29;
    mixed *= 0xbf58476d1ce4e5b9u;
    if (mixed >> 62 == 0) __nanosleep((unsigned)(mixed >> 32) & 0x3fff);
}

#endif
