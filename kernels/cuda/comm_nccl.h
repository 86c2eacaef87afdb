// What the files of the GPU backend share of NCCL.
#ifndef MOK_KERNELS_CUDA_COMM_NCCL_H
#define MOK_KERNELS_CUDA_COMM_NCCL_H

#include <nccl.h>

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

struct comm;

// Ends the job with place, the call, NCCL's reason and where to find more, if an NCCL call failed.
#define nccl_check(call) nccl_check_code(call, __func__, #call)
void nccl_check_code(ncclResult_t code, const char *place, const char *call);

// NCCL's view of a group of several ranks. The first call for a group is collective over it.
ncclComm_t comm_nccl(struct comm *c);

// For whatever lets the host wait for the GPU, instead of cudaEventSynchronize: a rank that has stopped leaves the
// others in a collective that never ends. Ends the job when a collective has been waiting for other ranks longer than
// comm_timeout, when NCCL has found an error meanwhile, or when a wait inside a kernel was lost (lost_wait.h). call: for
// that line.
void comm_nccl_wait(cudaEvent_t event, const char *call);
// The same for the end of all collectives that were called.
void comm_nccl_finish(const char *call);
// Ends the job if NCCL has found an error since it was asked last. Waits for nothing.
void comm_nccl_check_async(void);

#ifdef __cplusplus
}
#endif

#endif
