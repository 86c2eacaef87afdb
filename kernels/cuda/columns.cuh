// Neighbouring columns of a row as FP32 numbers: by 16-byte accesses where everything is aligned to them (WIDTH 8, or 4
// of accum), one by one where not.
#ifndef MOK_KERNELS_CUDA_COLUMNS_CUH
#define MOK_KERNELS_CUDA_COLUMNS_CUH

#include "kernels/cuda/cuda.h"

// Whether rows that begin at this address, and every so many bytes on, can be read in 16-byte pieces.
static inline bool columns_aligned(const void *memory, size_t bytes_apart) {
    return ((uintptr_t)memory | bytes_apart) % 16 == 0;
}

// Eight BF16 numbers in the four words of one access, the first in the lower half of x.
static __device__ __forceinline__ uint4 columns_read_packed(const real *from) { return *(const uint4 *)from; }

static __device__ __forceinline__ uint4 columns_packed_zeros(void) { return make_uint4(0, 0, 0, 0); }

static __device__ __forceinline__ void columns_unpack(float *values, const uint4 &packed) {
    const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
    for (int i = 0; i < 4; i++) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

// Rounded to nearest even.
static __device__ __forceinline__ uint4 columns_pack(const float *values) {
    unsigned words[4];
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        words[i] = *(const unsigned *)&pair;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <int WIDTH> static __device__ __forceinline__ void columns_read(float *values, const real *from) {
    if constexpr (WIDTH == 8)
        columns_unpack(values, columns_read_packed(from));
    else
        for (int i = 0; i < WIDTH; i++) values[i] = __bfloat162float(from[i]);
}

template <int WIDTH> static __device__ __forceinline__ void columns_write(real *to, const float *values) {
    if constexpr (WIDTH == 8)
        *(uint4 *)to = columns_pack(values);
    else
        for (int i = 0; i < WIDTH; i++) to[i] = __float2bfloat16_rn(values[i]);
}

template <int WIDTH> static __device__ __forceinline__ void columns_read(float *values, const accum *from) {
    if constexpr (WIDTH == 8 || WIDTH == 4) {
        for (int i = 0; i < WIDTH; i += 4) {
            float4 four = *(const float4 *)(from + i);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
    } else {
        for (int i = 0; i < WIDTH; i++) values[i] = from[i];
    }
}

template <int WIDTH> static __device__ __forceinline__ void columns_write(accum *to, const float *values) {
    if constexpr (WIDTH == 8)
        for (int i = 0; i < WIDTH; i += 4)
            *(float4 *)(to + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    else
        for (int i = 0; i < WIDTH; i++) to[i] = values[i];
}

#endif
