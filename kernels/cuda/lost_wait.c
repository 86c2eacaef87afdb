#include "kernels/cuda/lost_wait.h"

static const char *const words[] = {
    [WAIT_ATTENTION_TILE] = "a tile of attention's work",
    [WAIT_ATTENTION_TILE_ROOM] = "room for the next tile of attention's work",
    [WAIT_ATTENTION_FIXED] = "the rows that stay for a tile of attention",
    [WAIT_ATTENTION_FIXED_ROOM] = "room for the rows that stay for a tile of attention",
    [WAIT_ATTENTION_STREAM] = "the rows that pass by a tile of attention",
    [WAIT_ATTENTION_STREAM_ROOM] = "room for the rows that pass by a tile of attention",
};
_Static_assert(sizeof words / sizeof *words == WAIT_KINDS, "every wait has its words");

static struct lost_wait *record; // in host memory that kernels reach

struct lost_wait *lost_wait_record(void) {
    static struct lost_wait *device;
    if (device) return device;
    struct lost_wait *host;
    cuda_check(cudaHostAlloc((void **)&host, sizeof *host, cudaHostAllocMapped));
    *host = (struct lost_wait){0};
    cuda_check(cudaHostGetDevicePointer((void **)&device, host, 0));
    record = host;
    return device;
}

// In one load, as the device writes it in one store: many threads may lose their waits at once.
static struct lost_wait read_record(void) {
    typedef int vector __attribute__((vector_size(sizeof(struct lost_wait)), may_alias));
    vector v = *(const volatile vector *)record;
    return (struct lost_wait){.what = v[0], .block = v[1], .thread = v[2], .phase = (unsigned)v[3]};
}

static bool was_lost(void) { return record && ((const volatile struct lost_wait *)record)->what; }

void lost_wait_check(void) {
    if (!was_lost()) return;
    struct lost_wait lost = read_record();
    // That long: LOST_AFTER_TICKS.
    fail_internal("GPU",
                  "thread %d of block %d waited over 8 seconds inside a kernel for %s (barrier phase %u); a fault of "
                  "this program or of the GPU: please report it with this line",
                  lost.thread, lost.block, words[lost.what - 1], lost.phase);
}
