// What a plan says of a GPU's memory without touching it: no call of CUDA, so that plans are made where there is none.
#include "kernels/cuda/matmul.h"
#include "kernels/kernels.h"

// Memory in use after two steps, less what was allocated here.
static const double CONTEXT_GIB = 0.55; // context, code of kernels and libraries
static const double NCCL_GIB = 1.7;     // channels and buffers of two groups, with several ranks

bool device_memory_is_shared(void) { return false; }

size_t device_library_bytes(int ranks) {
    double gib = CONTEXT_GIB + (ranks > 1 ? NCCL_GIB : 0);
    return (size_t)(gib * (1 << 30)) + MATMUL_WORKSPACE_BYTES;
}
