// For tests that ranks run on a GPU each, or on the CPU (tests/ranks.h): the start, and bits that are compared with a line
// that says whose they are.
#ifndef MOK_TESTS_GPU_RANKS_H
#define MOK_TESTS_GPU_RANKS_H

#include "tests/ranks.h"

#include "model/parallel.h"

// What is being looked at: layer or layout, and the way it is computed.
static char looking_at[256];

#define look_at(...) snprintf(looking_at, sizeof looking_at, __VA_ARGS__)

#define fail_here(...)                                                                                                 \
    do {                                                                                                               \
        char text_[256];                                                                                               \
        snprintf(text_, sizeof text_, __VA_ARGS__);                                                                    \
        fail_msg("rank %d of %d: %s: %s", comm_rank(comm_world()), comm_size(comm_world()), looking_at, text_);        \
    } while (0)

// Both in host memory.
static inline void check_bits(const char *array, const void *found, const void *wanted, size_t bytes) {
    const unsigned char *a = found, *b = wanted;
    size_t at = 0;
    if (bytes == 0 || memcmp(a, b, bytes) == 0) return;
    while (a[at] == b[at]) at++;
    fail_here("%s: found other bits from byte %zu of %zu on", array, at, bytes);
}

static inline void *take_host(size_t bytes) {
    void *memory = malloc(bytes + 1);
    if (!memory) fail_here("found no host memory for %zu bytes", bytes);
    return memory;
}

// A copy, free with free.
static inline void *read_device(const void *device, size_t bytes) {
    void *host = take_host(bytes);
    if (bytes) device_copy_out(host, device, bytes);
    return host;
}

// In the GPU build `real` is BF16; the CPU's build, which has float, is slower by more than ten times.
static inline bool on_gpu(void) { return sizeof(real) == 2; }

// ranks_start of tests/ranks.h, and a device for this rank.
static inline void gpu_ranks_start(int argc, char **argv) {
    ranks_start(argc, argv);
    struct comm *here = comm_split_host(comm_world());
    device_open(comm_rank(here), comm_size(here));
    comm_free(here);
}

#endif
