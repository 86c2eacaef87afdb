// Products of a warpgroup on Hopper's tensor cores: wgmma m64nNk16, BF16 factors, FP32 sums.
//
// They run on while the warpgroup does other work: products between wgmma_begin and wgmma_commit are a group, and
// wgmma_wait<n> waits until at most the n last groups are still running. Registers of a running product must not be
// touched, and ptxas must be able to see that: it serializes products, with a note C75xx, where it cannot.
//
// Thread t of the warpgroup has, of d [64, N], rows 16 (t / 32) + t % 32 / 4 (and 8 below it) and columns 2 (t % 4) (and
// the next) of every eight: d[4 j], d[4 j + 1] of the upper row in columns 8 j on, d[4 j + 2], d[4 j + 3] of the lower.
// A first factor in registers is spread likewise over its 16 columns, two numbers in a register: upper row, lower row,
// and the same of columns 8 to 15. So sums rounded to BF16 are a factor as they are.
#ifndef MOK_KERNELS_CUDA_WGMMA_CUH
#define MOK_KERNELS_CUDA_WGMMA_CUH

#include <stdint.h>

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ == 900 && !defined __CUDA_ARCH_FEAT_SM90_ALL
#error "sm_90 has no wgmma, sm_90a has: build with CUDA_ARCH=90a"
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
static constexpr bool WGMMA = true;
#else
static constexpr bool WGMMA = false; // what is compiled for other GPUs has no such instructions
#endif

// ---- where a factor lies in shared memory ----

// Tiles are [columns / 64][rows][64] BF16, each row of 128 bytes swizzled in pieces of 16 bytes by its number mod 8, as
// TMA leaves them with a box of 64 columns. A tile begins at a multiple of 1024 bytes.
//
// Two ways to read one: with the product's inner dimension along the columns (of both factors of x y^T), step k of 16
// columns WGMMA_COLUMN_STEP further inside of 64; or, where a product says so, along the rows, step k of 16 rows
// WGMMA_ROW_STEP further. Descriptors are 64 bits, of which only the lower word differs: the address in units of 16
// bytes, and above it, for the second way, the distance of groups of 64 columns.
enum { CHUNK_COLUMNS = 64, CHUNK_ROW_BYTES = 2 * CHUNK_COLUMNS };
enum { WGMMA_COLUMN_STEP = 2, WGMMA_ROW_STEP = 16 * CHUNK_ROW_BYTES / 16 };

static __device__ __forceinline__ uint32_t wgmma_descriptor(uint32_t tile, int rows) {
    return ((tile & 0x3ffff) >> 4) | (uint32_t)(rows * CHUNK_ROW_BYTES >> 4) << 16;
}

// Eight rows are 1024 bytes from the next eight; swizzled in 128 bytes.
static __device__ __forceinline__ uint64_t wgmma_whole_descriptor(uint32_t lower) {
    uint64_t whole;
    asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(lower), "n"(1024 >> 4 | 1 << 30));
    return whole;
}

// ---- groups ----

// Before the first product of a group, and again after every wait for a barrier inside one.
static __device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// After the wait: keeps the compiler from reading d earlier.
template <int N> static __device__ __forceinline__ void wgmma_read(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- products ----

// d [64, N] = (add ? d : 0) + a b^T of 16 columns, both by descriptor.
template <int N> static __device__ void wgmma_columns(float (&d)[N / 2], uint32_t a, uint32_t b, int add);
// d [64, 256] = (add ? d : 0) + a product of 16 terms, both factors by descriptor and each read in one of the two ways:
// A_ROWS: a^T b..., B_ROWS: ...a b.
template <bool A_ROWS, bool B_ROWS> static __device__ void wgmma_wide(float (&d)[128], uint32_t a, uint32_t b, int add);
// d [64, N] = (add ? d : 0) + a b of 16 rows of b, by descriptor; a in registers.
template <int N> static __device__ void wgmma_rows(float (&d)[N / 2], const uint32_t *a, uint32_t b, int add);

#define WGMMA_NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NUMBERS_32                                                                                               \
    WGMMA_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NUMBERS_40 WGMMA_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NUMBERS_48 WGMMA_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NUMBERS_64                                                                                               \
    WGMMA_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NUMBERS_96                                                                                               \
    WGMMA_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "    \
                     "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NUMBERS_128                                                                                              \
    WGMMA_NUMBERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "  \
                     "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_SUMS_8(i)                                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define WGMMA_SUMS_16  WGMMA_SUMS_8(0), WGMMA_SUMS_8(8)
#define WGMMA_SUMS_32  WGMMA_SUMS_16, WGMMA_SUMS_8(16), WGMMA_SUMS_8(24)
#define WGMMA_SUMS_40  WGMMA_SUMS_32, WGMMA_SUMS_8(32)
#define WGMMA_SUMS_48  WGMMA_SUMS_40, WGMMA_SUMS_8(40)
#define WGMMA_SUMS_64  WGMMA_SUMS_48, WGMMA_SUMS_8(48), WGMMA_SUMS_8(56)
#define WGMMA_SUMS_96  WGMMA_SUMS_64, WGMMA_SUMS_8(64), WGMMA_SUMS_8(72), WGMMA_SUMS_8(80), WGMMA_SUMS_8(88)
#define WGMMA_SUMS_128 WGMMA_SUMS_96, WGMMA_SUMS_8(96), WGMMA_SUMS_8(104), WGMMA_SUMS_8(112), WGMMA_SUMS_8(120)

// SUMS is N / 2; A, B and ADD are the numbers of the operands behind them.
#define WGMMA_COLUMNS(N, SUMS, A, B, ADD)                                                                              \
    template <> __device__ __forceinline__ void wgmma_columns<N>(float(&d)[SUMS], uint32_t a, uint32_t b, int add) {   \
        asm volatile("{\n.reg .pred add;\n"                                                                            \
                     "setp.ne.b32 add, " ADD ", 0;\n"                                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_NUMBERS_##SUMS                 \
                     "}, " A ", " B ", add, 1, 1, 0, 0;\n}"                                                            \
                     : WGMMA_SUMS_##SUMS                                                                               \
                     : "l"(wgmma_whole_descriptor(a)), "l"(wgmma_whole_descriptor(b)), "r"(add));                      \
    }

#define WGMMA_ROWS(N, SUMS, A0, A1, A2, A3, B, ADD)                                                                    \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma_rows<N>(float(&d)[SUMS], const uint32_t *a, uint32_t b, int add) {           \
        asm volatile("{\n.reg .pred add;\n"                                                                            \
                     "setp.ne.b32 add, " ADD ", 0;\n"                                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_NUMBERS_##SUMS                 \
                     "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", add, 1, 1, 1;\n}"                                    \
                     : WGMMA_SUMS_##SUMS                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(wgmma_whole_descriptor(b)), "r"(add));          \
    }

#define WGMMA_WIDE(A_ROWS, B_ROWS)                                                                                     \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma_wide<A_ROWS, B_ROWS>(float(&d)[128], uint32_t a, uint32_t b, int add) {      \
        asm volatile("{\n.reg .pred add;\n"                                                                            \
                     "setp.ne.b32 add, %130, 0;\n"                                                                     \
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_NUMBERS_128                       \
                     "}, %128, %129, add, 1, 1, %131, %132;\n}"                                                        \
                     : WGMMA_SUMS_128                                                                                  \
                     : "l"(wgmma_whole_descriptor(a)), "l"(wgmma_whole_descriptor(b)), "r"(add), "n"(A_ROWS),          \
                       "n"(B_ROWS));                                                                                   \
    }

WGMMA_WIDE(false, false)
WGMMA_WIDE(false, true)
WGMMA_WIDE(true, true)
WGMMA_COLUMNS(64, 32, "%32", "%33", "%34")
WGMMA_COLUMNS(128, 64, "%64", "%65", "%66")
WGMMA_ROWS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_ROWS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_ROWS(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA_ROWS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_ROWS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_ROWS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")

#endif
