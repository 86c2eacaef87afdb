// The GPU as a device: choosing it, its memory, its name and limits.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/comm_mpi.h"
#include "kernels/cuda/comm_nccl.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/lost_wait.h"
#include "kernels/threads.h"

void cuda_check_code(cudaError_t code, const char *place, const char *call) {
    if (code == cudaSuccess) return;
    lost_wait_check(); // the way in which a kernel with a lost wait ends is no news
    fail_internal(place, "%.*s failed: %s (%s)", (int)strcspn(call, "("), call, cudaGetErrorString(code),
                  cudaGetErrorName(code));
}

// The host's threads make the first weights.
void device_start(char **argv) { threads_start(argv); }

// ---- choosing a GPU ----

// What the driver's libraries say when there is no GPU to be seen.
static const char *no_gpu_reason;

static int visible_gpus(void) {
    int count = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    no_gpu_reason = code == cudaSuccess ? "the driver knows none" : cudaGetErrorString(code);
    if (code == cudaSuccess) return count;
    cudaGetLastError(); // not to be found again by a later check
    return 0;
}

static const char *visible_devices(void) {
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    return value ? value : "not set";
}

static const char *host_name(void) {
    static char name[256];
    if (gethostname(name, sizeof name - 1) != 0) snprintf(name, sizeof name, "this host");
    return name;
}

// What is wrong for all ranks of a host, the first of them says, which ends the job while the others wait.
static void let_first_rank_speak(void) {
    if (comm_rank(comm_host()) > 0) comm_barrier(comm_host());
}

static _Noreturn void fail_for_gpus(int ranks, int gpus) {
    let_first_rank_speak();
    fail_user("GPU",
              "found %d rank%s on host %s and %d visible GPU%s (CUDA_VISIBLE_DEVICES: %s), wanted a GPU for each rank; "
              "start fewer ranks per host (mpirun's -ppn or --map-by ppr:N:node), or let them see more GPUs",
              ranks, ranks == 1 ? "" : "s", host_name(), gpus, gpus == 1 ? "" : "s", visible_devices());
}

// Launchers may let every rank see one GPU of its own, so that not the number but the identities decide. Collective
// over the ranks of the host.
static bool gpus_are_distinct(int gpu, int ranks) {
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, gpu));
    cudaUUID_t mine = properties.uuid, *all = comm_take_memory((size_t)ranks, sizeof *all);
    comm_gather_all(comm_host(), all, &mine, sizeof mine);
    bool distinct = true;
    for (int a = 0; a < ranks; a++)
        for (int b = a + 1; b < ranks; b++) distinct &= memcmp(&all[a], &all[b], sizeof mine) != 0;
    free(all);
    return distinct;
}

static int capability_of(const struct cudaDeviceProp *p) { return p->major * 10 + p->minor; }

static void check_capability(const struct cudaDeviceProp *p) {
    int found = capability_of(p), wanted = cuda_compiled_capability();
    if (found == wanted) return;
    char hint[64] = "there is no build for GPUs before 9.0 (Hopper)";
    if (found >= 90) snprintf(hint, sizeof hint, "build with CUDA_ARCH=%da", found);
    fail_user("GPU", "found %s of compute capability %d.%d, wanted %d.%d, which this program was compiled for; %s",
              p->name, found / 10, found % 10, wanted / 10, wanted % 10, hint);
}

void device_open(int local_rank, int local_ranks) {
    int gpus = visible_gpus();
    if (gpus == 0) {
        let_first_rank_speak();
        fail_user("GPU",
                  "found no GPU on host %s (%s; CUDA_VISIBLE_DEVICES: %s), wanted one for each of %d rank%s; see "
                  "nvidia-smi, or use the build for CPUs (make build/cpu/train)",
                  host_name(), no_gpu_reason, visible_devices(), local_ranks, local_ranks == 1 ? "" : "s");
    }
    int gpu = local_rank % gpus;
    bool together = comm_size(comm_host()) == local_ranks && local_ranks > 1;
    if (together ? !gpus_are_distinct(gpu, local_ranks) : gpus < local_ranks) fail_for_gpus(local_ranks, gpus);
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, gpu));
    check_capability(&properties);
    cuda_check(cudaSetDevice(gpu));
}

// ---- the stream, scratch memory ----

cudaStream_t cuda_stream(void) {
    static cudaStream_t stream;
    if (!stream) cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

// Bounded, since what is queued may wait for other ranks. What is on other streams has then ended too, but for
// collectives.
static void finish_operations(void) {
    static cudaEvent_t end;
    if (!end) cuda_check(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
    cuda_check(cudaEventRecord(end, cuda_stream()));
    comm_nccl_wait(end, __func__);
}

void device_finish(void) {
    finish_operations();
    comm_nccl_finish(__func__);
}

static int attribute(enum cudaDeviceAttr which) {
    int gpu, value;
    cuda_check(cudaGetDevice(&gpu));
    cuda_check(cudaDeviceGetAttribute(&value, which, gpu));
    return value;
}

int cuda_multiprocessors(void) {
    static int count;
    if (!count) count = attribute(cudaDevAttrMultiProcessorCount);
    return count;
}

static void *take_memory(size_t bytes) {
    void *memory = NULL;
    cudaError_t code = cudaMalloc(&memory, bytes ? bytes : 1); // aligned to 256 bytes, or more
    if (code == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cuda_check(cudaMemGetInfo(&free_bytes, &total));
        fail_internal(
            "device memory",
            "found no room for %zu bytes (%zu of this GPU's %zu are free); see --plan, lower --batch, --seq or "
            "the model's sizes",
            bytes, free_bytes, total);
    }
    cuda_check(code);
    return memory;
}

void *cuda_scratch(size_t bytes) {
    static void *memory;
    static size_t size;
    if (bytes <= size && memory) return memory;
    device_finish(); // what is queued may use the old one
    cuda_check(cudaFree(memory));
    memory = take_memory(bytes);
    size = bytes;
    return memory;
}

// ---- memory ----

void *device_alloc(size_t bytes) {
    void *memory = take_memory(bytes);
    device_zero(memory, bytes);
    finish_operations(); // other streams may use it at once
    return memory;
}

void device_free(void *memory) {
    if (!memory) return;
    device_finish(); // what is queued may use it
    cuda_check(cudaFree(memory));
}

void device_zero(void *memory, size_t bytes) {
    OPERATION();
    if (bytes) cuda_check(cudaMemsetAsync(memory, 0, bytes, cuda_stream()));
}

// ---- identity ----

// The chosen GPU, or the first one as long as none was chosen; false if there is none.
static bool look_at_gpu(struct cudaDeviceProp *properties) {
    int gpu;
    if (visible_gpus() == 0) return false;
    cuda_check(cudaGetDevice(&gpu));
    cuda_check(cudaGetDeviceProperties(properties, gpu));
    return true;
}

const char *device_name(void) {
    static char name[512];
    struct cudaDeviceProp p;
    int wanted = cuda_compiled_capability();
    if (!look_at_gpu(&p)) {
        snprintf(name, sizeof name, "a GPU (compiled for sm_%d, BF16; none found: %s)", wanted, no_gpu_reason);
        return name;
    }
    int length = snprintf(name, sizeof name, "%s, %d SMs, %.1f GiB, sm_%d, BF16", p.name, p.multiProcessorCount,
                          (double)p.totalGlobalMem / (1 << 30), capability_of(&p));
    if (capability_of(&p) != wanted)
        snprintf(name + length, sizeof name - (size_t)length, " (compiled for sm_%d: does not run here)", wanted);
    return name;
}

// Dense BF16 with FP32 sums, from the makers' data sheets, TFLOP/s. A name that another begins with stands after it.
static const struct {
    const char *name;
    double teraflops;
} known_gpus[] = {
    {"GB300", 2500},    {"GB200", 2500},   {"B300", 2250},    {"B200", 2250},   {"H100 PCIe", 756},
    {"H800 PCIe", 756}, {"H100 NVL", 835}, {"H200 NVL", 835}, {"GH200", 989.4}, {"H200", 989.4},
    {"H100", 989.4},    {"H800", 989.4},   {"H20", 148},
};

double device_peak_flops(void) {
    struct cudaDeviceProp p;
    if (!look_at_gpu(&p)) return 0;
    for (size_t i = 0; i < sizeof known_gpus / sizeof *known_gpus; i++)
        if (strstr(p.name, known_gpus[i].name)) return known_gpus[i].teraflops * 1e12;
    // 2048 multiply-adds a clock and multiprocessor, as of compute capability 9.0.
    return (double)p.multiProcessorCount * 4096 * 1e3 * attribute(cudaDevAttrClockRate);
}

size_t device_memory_bytes(void) {
    struct cudaDeviceProp p;
    return look_at_gpu(&p) ? p.totalGlobalMem : 0;
}

size_t device_memory_used(void) {
    size_t free_bytes = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total));
    return total - free_bytes;
}
