// The CPU as a device: its memory is the host's.
#include <omp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/gemm.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"
#include "kernels/operation.h"
#include "kernels/threads.h"

void device_start(char **argv) { threads_start(argv); }

void device_open(int local_rank, int local_ranks) {
    (void)local_rank;
    (void)local_ranks;
}

void *device_alloc(size_t bytes) {
    size_t rounded = (bytes + 256) / 256 * 256; // never zero
    void *memory = rounded > bytes ? aligned_alloc(256, rounded) : NULL;
    if (!memory)
        fail_internal("device memory",
                      "found no room for %zu bytes (this machine has %zu); see --plan, lower --batch, "
                      "--seq or the model's sizes",
                      bytes, device_memory_bytes());
    memset(memory, 0, rounded);
    return memory;
}

void device_free(void *memory) { free(memory); }
void device_zero(void *memory, size_t bytes) {
    OPERATION();
    memset(memory, 0, bytes);
}
void device_copy_in(void *device, const void *host, size_t bytes) {
    OPERATION();
    memcpy(device, host, bytes);
}
void device_copy_out(void *host, const void *device, size_t bytes) {
    OPERATION();
    memcpy(host, device, bytes);
}

// The only read under way.
static const void *read_from;
void device_read_begin(const void *device, size_t bytes) {
    OPERATION();
    (void)bytes;
    read_from = device;
}
void device_read_finish(void *host, size_t bytes) {
    OPERATION();
    memcpy(host, read_from, bytes);
}
void device_finish(void) {}

void device_real_from_float(real *device, const float *host, size_t n) {
    OPERATION();
    for (size_t i = 0; i < n; i++) device[i] = (real)host[i];
}

void device_real_to_float(float *host, const real *device, size_t n) {
    OPERATION();
    for (size_t i = 0; i < n; i++) host[i] = (float)device[i];
}

void device_accum_from_float(accum *device, const float *host, size_t n) {
    OPERATION();
    for (size_t i = 0; i < n; i++) device[i] = (accum)host[i];
}

void device_accum_to_float(float *host, const accum *device, size_t n) {
    OPERATION();
    for (size_t i = 0; i < n; i++) host[i] = (float)device[i];
}

const char *device_tuning(void) { return "default"; }

const char *device_name(void) {
    static char name[96];
    int threads = omp_get_max_threads();
    snprintf(name, sizeof name, "CPU, %d thread%s, %s, %s", threads, threads == 1 ? "" : "s", gemm_vector_name(),
             sizeof(real) == sizeof(float) ? "FP32" : "FP64");
    return name;
}

double device_peak_flops(void) {
    static double peak;
    if (peak == 0) peak = gemm_measure_peak_flops();
    return peak;
}

size_t device_memory_bytes(void) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
    return pages > 0 && page > 0 ? (size_t)pages * (size_t)page : 0;
}

bool device_memory_is_shared(void) { return true; }

size_t device_memory_used(void) { return 0; }

size_t device_library_bytes(int ranks) {
    (void)ranks;
    return 0;
}

size_t device_scratch_bytes(const struct scratch_sizes *s) {
    (void)s;
    return 0;
}
void device_reserve_scratch(size_t bytes) { (void)bytes; }
