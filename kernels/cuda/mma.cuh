// Tensor cores by the instructions that all GPUs have (mma.sync, m16n8k16): copies into shared memory, fragments, their
// products.
#ifndef MOK_KERNELS_CUDA_MMA_CUH
#define MOK_KERNELS_CUDA_MMA_CUH

#include "kernels/types.h"

// 16 bytes from memory into shared memory, zeros unless `there`. Done after copy_wait.
static __device__ __forceinline__ void copy_async_16(void *shared, const void *memory, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(memory), "r"(there ? 16 : 0)
                 : "memory");
}

// Waits for this thread's copies.
static __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same with copies in groups: copy_group ends a group, which may be empty; copy_wait_but waits for all groups but
// the last so many.
static __device__ __forceinline__ void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> static __device__ __forceinline__ void copy_wait_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets, of each, columns 2 (l % 4) and the
// next of row l / 4.
static __device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const real *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// The same of the transposed matrices: rows 2 (l % 4) and the next of column l / 4.
static __device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], const real *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]. Lane l has columns 2 (l % 4) and the next of rows l / 4 (c[0], c[1]) and l / 4 + 8
// (c[2], c[3]). a: 8x8 matrices (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15). b: the transposed
// matrices of rows 0-7 and 8-15.
static __device__ __forceinline__ void multiply_fragment(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                         uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
