// What the files that stand for the GPU as a device share.
#ifndef MOK_KERNELS_CUDA_DEVICE_H
#define MOK_KERNELS_CUDA_DEVICE_H

#ifdef __cplusplus
extern "C" {
#endif

// Compute capability that the kernels were compiled for, 90 for 9.0. They use instructions of that one alone.
int cuda_compiled_capability(void);

#ifdef __cplusplus
}
#endif

#endif
