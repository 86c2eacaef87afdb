// How those at work in a block record what they do. The passes are compiled twice: mok_*_recorded.cu with MOK_RECORDED, which
// records, the other without anything of it. For in the backward pass neither multipliers nor movers have a register left, and
// a branch alone would make them spill.
#ifndef MOK_KERNELS_CUDA_MOK_RECORD_CUH
#define MOK_KERNELS_CUDA_MOK_RECORD_CUH

#include "kernels/cuda/mok_parameters.h"

#ifndef MOK_RECORDED
#define MOK_RECORDED false
#endif

// The lane of the number-th recorder of its kind. Its count stays in memory, in place of one more register.
static __device__ __forceinline__ int mok_own_lane(enum mok_recorder kind, int number) {
    return mok_lane(kind, (int)gridDim.x, number);
}

// Something begins; what began last in a lane ends. By the one thread that writes the lane.
static __device__ __forceinline__ void mok_record_begin(const struct mok_parameters &p, int lane,
                                                        const struct mok_task &task, int bytes) {
    int count = p.log.counts[lane]++;
    struct mok_record *r = p.log.records + (size_t)lane * MOK_RECORDS + count;
    if (count >= MOK_RECORDS) return;
    r->task = task;
    r->bytes = bytes;
    r->begin = wait_nanoseconds();
}
static __device__ __forceinline__ void mok_record_end(const struct mok_parameters &p, int lane) {
    uint64_t now = wait_nanoseconds();
    int count = p.log.counts[lane];
    if (count > 0 && count <= MOK_RECORDS) p.log.records[(size_t)lane * MOK_RECORDS + count - 1].end = now;
}

#endif
