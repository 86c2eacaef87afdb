// The clock of the multiprocessors, by NVML where it is.
#ifndef MOK_TESTS_GPU_CLOCK_H
#define MOK_TESTS_GPU_CLOCK_H

#include <dlfcn.h>

#include "kernels/cuda/cuda.h"

static struct {
    void *device;
    int (*clock)(void *device, int type, unsigned *mhz);
} nvml;

static void nvml_open(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int device;
    char bus[32];
    if (!library) return;
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*find)(const char *, void **) =
        (int (*)(const char *, void **))dlsym(library, "nvmlDeviceGetHandleByPciBusId_v2");
    int (*clock)(void *, int, unsigned *) = (int (*)(void *, int, unsigned *))dlsym(library, "nvmlDeviceGetClockInfo");
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    if (init && find && clock && init() == 0 && find(bus, &nvml.device) == 0) nvml.clock = clock;
}

// 0: not known.
static unsigned nvml_mhz(void) {
    enum { MULTIPROCESSORS = 1 };
    unsigned mhz = 0;
    return nvml.clock && nvml.clock(nvml.device, MULTIPROCESSORS, &mhz) == 0 ? mhz : 0;
}

#endif
