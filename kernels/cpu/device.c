// The CPU as a device: its memory is the host's.
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/gemm.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"

// Threads that wait for the others at the end of a loop spin, by OpenMP's default, for as long as a time slice: 10 %
// faster than a short spin on an idle machine, but two to three times slower as soon as other programs want the cores.
// So they spin for some microseconds and then sleep. The library reads this when it is loaded, hence the second start.
void device_start(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length <= 0 || setenv("GOMP_SPINCOUNT", "5000", 1) != 0) return;
    path[length] = 0;
    execv(path, argv); // if it fails: go on as it is
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
void device_zero(void *memory, size_t bytes) { memset(memory, 0, bytes); }
void device_copy_in(void *device, const void *host, size_t bytes) { memcpy(device, host, bytes); }
void device_copy_out(void *host, const void *device, size_t bytes) { memcpy(host, device, bytes); }

void device_real_from_float(real *device, const float *host, size_t n) {
    for (size_t i = 0; i < n; i++) device[i] = (real)host[i];
}

void device_real_to_float(float *host, const real *device, size_t n) {
    for (size_t i = 0; i < n; i++) host[i] = (float)device[i];
}

void device_accum_from_float(accum *device, const float *host, size_t n) {
    for (size_t i = 0; i < n; i++) device[i] = (accum)host[i];
}

void device_accum_to_float(float *host, const accum *device, size_t n) {
    for (size_t i = 0; i < n; i++) host[i] = (float)device[i];
}

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
