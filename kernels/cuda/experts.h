// What the kernels of routing and dispatch share.
#ifndef MOK_KERNELS_CUDA_EXPERTS_H
#define MOK_KERNELS_CUDA_EXPERTS_H

#include "kernels/fail.h"

enum { MOST_EXPERTS = 1024 }; // whose numbers fit into shared memory

static const float GATE_EPS = 1e-20f; // in the gates' denominator, as released code has it

static inline void experts_check(int E) {
    if (E > MOST_EXPERTS) fail_user("--experts", "found %d, wanted at most %d on a GPU; lower it", E, MOST_EXPERTS);
}

#endif
