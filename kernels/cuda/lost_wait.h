// Waits for barriers inside kernels are bounded. One that is lost is recorded in host memory; then a store to no address
// ends the kernel, and with it whatever waits for it, in it or on the host. The host looks at the record wherever it waits
// for the GPU (comm_nccl_wait) and when a call of CUDA fails, and ends the job with that line. (A trap, which would be the
// plain way to end a kernel, makes ptxas ignore setmaxnreg.)
#ifndef MOK_KERNELS_CUDA_LOST_WAIT_H
#define MOK_KERNELS_CUDA_LOST_WAIT_H

#include "kernels/cuda/cuda.h"

// What threads wait for inside kernels; lost_wait.c has the words.
enum wait_for {
    WAIT_ATTENTION_TILE,      // of work, from the block's scheduler
    WAIT_ATTENTION_TILE_ROOM, // to hand the next one out
    WAIT_ATTENTION_FIXED,     // rows that stay for a whole tile
    WAIT_ATTENTION_FIXED_ROOM,
    WAIT_ATTENTION_STREAM, // rows that come by
    WAIT_ATTENTION_STREAM_ROOM,
    WAIT_KINDS
};

// Written by one store, so that what several threads lost does not mix.
struct __attribute__((aligned(16))) lost_wait {
    int what; // one of enum wait_for, counted from 1; 0: none was lost
    int block, thread;
    unsigned phase; // of the barrier that was waited for
};

#ifdef __cplusplus
extern "C" {
#endif

// The record as kernels reach it; an argument of every kernel that waits.
struct lost_wait *lost_wait_record(void);
// Ends the job if a wait was lost. A single look at host memory otherwise; calls nothing of CUDA.
void lost_wait_check(void);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__

// Counts in steps of 2^32 nanoseconds: a wait is lost after 8.6 to 12.9 seconds.
enum { LOST_AFTER_TICKS = 2 };
static __device__ __forceinline__ unsigned wait_ticks() {
    unsigned ticks;
    asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(ticks));
    return ticks;
}

static __device__ __forceinline__ void lost_wait_end(struct lost_wait *record, enum wait_for what, unsigned phase) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(record), "r"((int)what + 1),
                 "r"((int)blockIdx.x), "r"((int)threadIdx.x), "r"(phase)
                 : "memory");
    __threadfence_system();
    asm volatile("st.global.b32 [%0], %1;" ::"l"((uint64_t)0), "r"(0) : "memory");
}

#endif

#endif
