// Waits of the megakernel for its counters.
#ifndef MOK_KERNELS_CUDA_MOK_WAIT_CUH
#define MOK_KERNELS_CUDA_MOK_WAIT_CUH

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/mok_parameters.h"

// Counters of tiles are raised by each half of a tile.
enum { TILE_HALVES = 2 };

// The whole plan. Its pointers stay where parameters are, and take no registers.
static __device__ __forceinline__ struct mok_plan mok_plan_of(const struct mok_parameters &p) {
    struct mok_plan plan = p.plan;
    plan.blocks = plan.device->blocks;
    for (int pass = 0; pass < MOK_PASSES; pass++) plan.task_total[pass] = plan.device->task_total[pass];
    return plan;
}

static_assert((int)WAIT_MOK_SHARED_ALL - (int)WAIT_MOK_READY == (int)MOK_SHARED_ALL - (int)MOK_READY,
              "waits are named in the order of the counters");

// What the counter must have reached.
static __device__ __forceinline__ int mok_wanted(struct mok_wait wait) {
    return wait.kind == MOK_READY ? wait.value : TILE_HALVES * wait.value;
}

static __device__ __forceinline__ bool mok_is_reached(const struct mok_parameters &p, struct mok_wait wait) {
    return counter_read(p.counters[wait.kind] + wait.index) >= mok_wanted(wait);
}

static __device__ __forceinline__ void mok_wait_for(const struct mok_parameters &p, struct mok_wait wait) {
    counter_wait(p.counters[wait.kind] + wait.index, mok_wanted(wait), p.lost, p.tickets[MOK_GIVEN_UP],
                 (enum wait_for)(WAIT_MOK_READY + wait.kind), wait.index);
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
