// --trace on a GPU: the blocks of the megakernel record what they do (kernels/mok_events.h) in device memory, in the first
// forward and the first backward pass of one layer.
#ifndef MOK_KERNELS_CUDA_MOK_RECORD_H
#define MOK_KERNELS_CUDA_MOK_RECORD_H

#include "kernels/mok.h"
#include "kernels/mok_events.h"

#ifdef __cplusplus
extern "C" {
#endif

// Where the blocks of the pass that is queued next record, nothing being there yet. Without records if nobody wants them.
struct mok_log mok_record_pass(const struct mok_shape *s, const struct mok_crew *crew, enum mok_pass pass);

#ifdef __cplusplus
}
#endif

#endif
