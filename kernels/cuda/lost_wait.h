// Waits inside kernels are bounded. One that is lost is recorded in host memory; then a store to no address ends the
// kernel, and with it whatever waits for it, in it or on the host. The host looks at the record wherever it waits for the
// GPU (comm_nccl_wait) and when a call of CUDA fails, and ends the job with that line. (A trap, which would be the plain
// way to end a kernel, makes ptxas ignore setmaxnreg.)
//
// Three things are waited for: barriers in shared memory (barrier_wait in hopper.cuh), counters in device memory that other
// blocks raise (counter_wait), and other ranks (mok_barrier.cu).
#ifndef MOK_KERNELS_CUDA_LOST_WAIT_H
#define MOK_KERNELS_CUDA_LOST_WAIT_H

#include "kernels/cuda/cuda.h"

// What threads wait for inside kernels; lost_wait.c has the words.
enum wait_for {
    // barriers in shared memory
    WAIT_ATTENTION_TILE,      // of work, from the block's scheduler
    WAIT_ATTENTION_TILE_ROOM, // to hand the next one out
    WAIT_ATTENTION_FIXED,     // rows that stay for a whole tile
    WAIT_ATTENTION_FIXED_ROOM,
    WAIT_ATTENTION_STREAM, // rows that come by
    WAIT_ATTENTION_STREAM_ROOM,
    WAIT_TILE_TASK,      // from the block's loader; from here on the wait may be for one who waits for a counter
    WAIT_TILE_TASK_ROOM, // to hand the next one out
    WAIT_TILE_FULL,      // factors of a tile
    WAIT_TILE_ROOM,
    WAIT_TILE_STAGED, // results of a tile to store
    WAIT_TILE_STAGING_ROOM,
    // counters, in the order of enum mok_counter_kind
    WAIT_MOK_READY,
    WAIT_MOK_GATE_UP,
    WAIT_MOK_D_HIDDEN,
    WAIT_MOK_OUT, // before the block's place in the ring is used again
    WAIT_MOK_PUSHED,
    WAIT_MOK_EXPERT_D_HIDDEN,
    WAIT_MOK_EXPERT_D_WEIGHTS,
    WAIT_MOK_SHARED_INNER,
    WAIT_MOK_SHARED_ALL,
    // ranks
    WAIT_MOK_BARRIER,
    WAIT_KINDS
};

struct __attribute__((aligned(16))) lost_wait {
    // Written by one store, so that what several threads lost does not mix.
    int what; // one of enum wait_for, counted from 1; 0: none was lost
    int block, thread;
    unsigned phase; // of the barrier that was waited for; of ranks the seconds
    // Of counters and ranks, written before by a thread that has the record for itself.
    int index; // of the counter, or the rank that was waited for
    int wanted, found;
    int rank;      // who waited
    char text[64]; // where ranks waited
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

// After how many ticks the wait for a barrier in shared memory is lost. Where the one who is to arrive may wait for a
// counter himself, one more: then it is he who tells, for he knows more.
static __device__ __forceinline__ unsigned lost_after_ticks(enum wait_for what) {
    return LOST_AFTER_TICKS + (what >= WAIT_TILE_TASK);
}

static __device__ __forceinline__ uint64_t wait_nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

static __device__ __forceinline__ void lost_kernel_end() {
    asm volatile("st.global.b32 [%0], %1;" ::"l"((uint64_t)0), "r"(0) : "memory");
    for (;;) __nanosleep(1000); // until the kernel has ended; nothing behind a lost wait costs registers
}

static __device__ __forceinline__ void lost_wait_end(struct lost_wait *record, enum wait_for what, unsigned phase) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(record), "r"((int)what + 1),
                 "r"((int)blockIdx.x), "r"((int)threadIdx.x), "r"(phase)
                 : "memory");
    __threadfence_system();
    lost_kernel_end();
}

// Whether this thread has the whole record for itself: the first one of those who share the word given_up, which was 0.
// The others leave it the time to write, and end the kernel should it still run.
static __device__ __forceinline__ bool lost_first(int32_t *given_up) {
    const uint64_t time_to_write = 2000000000; // ns
    if (atomicExch(given_up, 1) == 0) return true;
    uint64_t begin = wait_nanoseconds();
    while (wait_nanoseconds() - begin < time_to_write) __nanosleep(1000);
    lost_kernel_end();
    return false;
}

static __device__ __forceinline__ void lost_counter_end(struct lost_wait *record, int32_t *given_up, enum wait_for what,
                                                        int index, int wanted, int found) {
    if (!lost_first(given_up)) return;
    record->index = index;
    record->wanted = wanted;
    record->found = found;
    __threadfence_system();
    lost_wait_end(record, what, 0);
}

// A rank has waited so many seconds for another one, at the place that text names. text: [64], ends with 0.
static __device__ __forceinline__ void lost_rank_end(struct lost_wait *record, int32_t *given_up, enum wait_for what,
                                                     int rank, int other, unsigned seconds, int wanted, int found,
                                                     const char *text) {
    if (!lost_first(given_up)) return;
    record->rank = rank;
    record->index = other;
    record->wanted = wanted;
    record->found = found;
    for (int i = 0; i < (int)sizeof record->text; i++) record->text[i] = text[i];
    __threadfence_system();
    lost_wait_end(record, what, seconds);
}

static __device__ __forceinline__ int counter_read(const int32_t *counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Until a counter in device memory has reached a value; what those who raised it wrote before is then seen by this
// thread.
static __device__ __forceinline__ void counter_wait(const int32_t *counter, int wanted, struct lost_wait *record,
                                                    int32_t *given_up, enum wait_for what, int index) {
    int found = counter_read(counter);
    if (found >= wanted) return;
    unsigned begin = wait_ticks();
    while ((found = counter_read(counter)) < wanted) {
        if (wait_ticks() - begin > LOST_AFTER_TICKS) {
            lost_counter_end(record, given_up, what, index, wanted, found);
            break;
        }
        __nanosleep(32);
    }
}

#endif

#endif
