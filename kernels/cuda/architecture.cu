// What the kernels were compiled for.
#include "kernels/cuda/device.h"

// nvcc's list has one entry, 900 for sm_90a.
extern "C" int cuda_compiled_capability(void) { return __CUDA_ARCH_LIST__ / 10; }
