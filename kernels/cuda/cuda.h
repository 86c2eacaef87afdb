// What the files of the GPU backend share: checked calls, the stream, scratch memory, reading and writing of BF16.
//
// All operations are queued on one stream, in the order of their calls; only what returns numbers to the host waits.
#ifndef MOK_KERNELS_CUDA_CUDA_H
#define MOK_KERNELS_CUDA_CUDA_H

#include <cuda_runtime.h>

#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"

#ifdef __cplusplus
extern "C" {
#endif

// Ends the job with place, the call and CUDA's reason, if a call of the runtime failed.
#define cuda_check(call) cuda_check_code(call, __func__, #call)
void cuda_check_code(cudaError_t code, const char *place, const char *call);
// After a launch: whether it could be made. What fails later is found by the next call that waits.
#define cuda_check_launch() cuda_check_code(cudaGetLastError(), __func__, "launch")

// The stream of all operations.
cudaStream_t cuda_stream(void);
// Multiprocessors of this rank's GPU.
int cuda_multiprocessors(void);

// Scratch memory of at least so many bytes, 256-byte aligned, for the operation that is being queued: the next one that
// asks gets the same bytes. What it holds is undefined.
void *cuda_scratch(size_t bytes);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__

// Threads that cover n, in blocks of `threads`.
static inline unsigned cuda_blocks(size_t n, int threads) {
    return (unsigned)((n + (size_t)threads - 1) / (size_t)threads);
}

// Launches a kernel whose blocks may start while the last blocks of the kernel before it run, or earlier, when those
// call cudaTriggerProgrammaticLaunchCompletion. All of its threads call cudaGridDependencySynchronize before they touch
// global memory: that waits until the other kernel has ended and its writes are seen, and, since the other one waited
// likewise, for all before it. An operation's first kernel is launched normally, and so begins when everything before
// it has ended: scratch memory can be used again.
template <typename... Parameters, typename... Arguments>
static inline void cuda_launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, Arguments... arguments) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = cuda_stream();
    config.attrs = &early;
    config.numAttrs = 1;
    cuda_check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Lets a kernel take so many bytes of shared memory, the same in every call: more than a kernel may without asking.
template <auto kernel> static inline void cuda_allow_shared(size_t shared_bytes) {
    static bool allowed;
    cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (!allowed) cuda_check(cudaFuncSetAttribute(kernel, attribute, (int)shared_bytes));
    allowed = true;
}

// Launches a kernel that takes the same bytes of shared memory in every call.
template <auto kernel, class... Arguments>
static inline void cuda_launch_shared(dim3 grid, int threads, size_t shared_bytes, const Arguments &...arguments) {
    cuda_allow_shared<kernel>(shared_bytes);
    kernel<<<grid, (unsigned)threads, shared_bytes, cuda_stream()>>>(arguments...);
    cuda_check_launch();
}

// Eight BF16 numbers in one 16-byte access.
union bf16x8 {
    uint4 words;
    __nv_bfloat162 pairs[4];
};

static const unsigned ALL_LANES = 0xffffffffu; // of a warp

// Sum over a warp's lanes, in every lane; one fixed order.
static __device__ __forceinline__ float warp_sum(float value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(ALL_LANES, value, lanes);
    return value;
}

// Sum over a block of at most 1024 threads, in every thread; one fixed order. sums: 33 floats of shared memory, for the
// next block_sum at once, for others after the next __syncthreads.
static __device__ __forceinline__ float block_sum(float value, float *sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    value = warp_sum(value);
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    if (warp == 0) {
        value = warp_sum(lane < warps ? sums[lane] : 0.0f);
        if (lane == 0) sums[32] = value;
    }
    __syncthreads();
    return sums[32];
}

#endif

#endif
