// Host memory that lives for one call of an operation.
#ifndef MOK_KERNELS_CPU_SCRATCH_H
#define MOK_KERNELS_CPU_SCRATCH_H

#include <stdlib.h>

#include "kernels/fail.h"

// Not zeroed, aligned to a cache line. Ends the program when there is no memory.
static inline void *scratch_alloc(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!memory) fail_internal("scratch memory", "found no room for %zu bytes; lower --batch or --seq", bytes);
    return memory;
}

static inline void scratch_free(void *memory) { free(memory); }

#endif
