// What kernels of Hopper are made of besides products (wgmma.cuh): barriers in shared memory, copies by the tensor
// memory accelerator (TMA), rings of stages, registers moved between warpgroups.
//
// Shared memory is named by its 32-bit address, as the instructions take it.
#ifndef MOK_KERNELS_CUDA_HOPPER_CUH
#define MOK_KERNELS_CUDA_HOPPER_CUH

#include <cuda.h>

#include "kernels/cuda/lost_wait.h"

enum { WARPGROUP = 128 }; // threads

static __device__ __forceinline__ uint32_t shared_address(const void *shared) {
    return (uint32_t)__cvta_generic_to_shared(shared);
}

// ---- barriers: a phase ends when so many have arrived and all announced bytes have come ----

static __device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// After the inits, before other threads and TMA use the barriers; a __syncthreads comes next.
static __device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void barrier_arrive_many(uint32_t barrier, int count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Arrives, and announces so many bytes of copies.
static __device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t phase) {
    uint32_t ended;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(ended)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return ended;
}

// Until the phase of that parity has ended.
static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase, struct lost_wait *record,
                                                    enum wait_for what) {
    if (barrier_try(barrier, phase)) return;
    unsigned begin = wait_ticks();
    while (!barrier_try(barrier, phase)) {
        if (wait_ticks() - begin <= lost_after_ticks(what)) continue;
        lost_wait_end(record, what, phase);
        break;
    }
}

// A stage of a ring: which one, and the parity of its barriers' phase.
template <int STAGES> struct ring_place {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage < STAGES) return;
        stage = 0;
        phase ^= 1;
    }
};

// Barriers of a ring: full[stage], by all who fill it, then empty[stage], by all who read it.
template <int STAGES> struct ring_barriers {
    uint64_t full[STAGES], empty[STAGES];
    __device__ void init(int readers, int fillers = 1) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&full[i]), fillers);
            barrier_init(shared_address(&empty[i]), readers);
        }
    }
};

// Barriers of the block's hardware, by number from 1: of `threads` threads, some arrive and go on, the others wait.
static __device__ __forceinline__ void block_barrier_wait(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
static __device__ __forceinline__ void block_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- copies into shared memory, whose bytes the barrier counts ----

// A box of a tensor, its first element at the coordinates, innermost first.
static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2, int c3,
                                                uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
                 "%5}], [%6];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int c0, int c1, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int c0, int c1, int c2,
                                                uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
                 "%4}], [%5];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
                 : "memory");
}

// Before the first load by a map, so that it need not wait for the map.
static __device__ __forceinline__ void tma_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Consecutive bytes, a multiple of 16.
static __device__ __forceinline__ void bulk_load(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// ---- copies out of shared memory: a thread's copies up to a commit are a group ----

// A box, of which what lies outside of the tensor is left out.
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, int c0, int c1, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(c0),
                 "r"(c1), "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void tma_store(const CUtensorMap *map, int c0, int c1, int c2, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map), "r"(c0),
                 "r"(c1), "r"(c2), "r"(from)
                 : "memory");
}
static __device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most the GROUPS last groups still read shared memory.
template <int GROUPS> static __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}
// Until all groups have been written.
static __device__ __forceinline__ void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- order between plain accesses and copies, and between threads of the whole GPU ----

// Between plain accesses to shared memory and copies out of it, or products of factors in it.
static __device__ __forceinline__ void copies_fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for all memory.
static __device__ __forceinline__ void copies_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// What was done before is seen by whoever finds the counter raised.
static __device__ __forceinline__ void counter_raise(int32_t *counter, int by = 1) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}

// ---- accesses by 32-bit address ----

static __device__ __forceinline__ int shared_load_int(uint32_t from) {
    int value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
    return value;
}
static __device__ __forceinline__ void shared_store_int(uint32_t to, int value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
static __device__ __forceinline__ float2 shared_load_float2(uint32_t from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}
static __device__ __forceinline__ uint4 shared_load_uint4(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void shared_store_float2(uint32_t to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
static __device__ __forceinline__ void shared_store_zeros(uint32_t to) { // 16 bytes
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

// Four 8x8 matrices of BF16: lane l gives the address of row l % 8 of matrix l / 8, and of each matrix columns
// 2 (l % 4) and the next of row l / 4.
static __device__ __forceinline__ void shared_store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2,
                                                             uint32_t m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

static __device__ __forceinline__ void shared_load_matrices(uint32_t row, uint32_t &m0, uint32_t &m1, uint32_t &m2,
                                                            uint32_t &m3) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m0), "=r"(m1), "=r"(m2), "=r"(m3)
                 : "r"(row)
                 : "memory");
}

// ---- registers ----

// All threads of a warpgroup give registers back, down to COUNT, or take them.
template <int COUNT> static __device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif
