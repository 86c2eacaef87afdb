// Marks: events on the stream of the operations.
#include <cstdlib>

#include "kernels/clock.h"
#include "kernels/cuda/comm_nccl.h"
#include "kernels/cuda/cuda.h"

static cudaEvent_t *events; // [capacity], made once; the first `count` are marks
static int count, capacity;

// What the host's clock showed when the device had just come to `reference`.
static cudaEvent_t reference;
static double reference_seconds;

static void grow(void) {
    int old = capacity;
    capacity = 2 * capacity + 1024;
    events = (cudaEvent_t *)realloc(events, (size_t)capacity * sizeof *events);
    if (!events) fail_internal("trace", "found no memory for %d marks", capacity);
    for (int i = old; i < capacity; i++) cuda_check(cudaEventCreate(&events[i]));
}

// The last of a few, when nothing else is queued and the driver's ways are warm.
static void set_clock(void) {
    enum { TRIES = 4 };
    if (!reference) cuda_check(cudaEventCreate(&reference));
    device_finish();
    for (int i = 0; i < TRIES; i++) {
        cuda_check(cudaEventRecord(reference, cuda_stream()));
        cuda_check(cudaEventSynchronize(reference));
        reference_seconds = clock_seconds();
    }
}

extern "C" int device_mark(void) {
    if (count == 0) set_clock();
    if (count == capacity) grow();
    cuda_check(cudaEventRecord(events[count], cuda_stream()));
    return count++;
}

extern "C" double device_mark_seconds(int mark) {
    float milliseconds;
    comm_nccl_wait(events[mark], __func__);
    cuda_check(cudaEventElapsedTime(&milliseconds, reference, events[mark]));
    return reference_seconds + 1e-3 * (double)milliseconds;
}

extern "C" void device_clear_marks(void) { count = 0; }
