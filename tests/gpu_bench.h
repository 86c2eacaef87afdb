// What the programs that time the GPU share: buffers of random data in so many copies that no call finds its input in
// the L2 cache, and the median time of a call by events.
#ifndef MOK_TESTS_GPU_BENCH_H
#define MOK_TESTS_GPU_BENCH_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/random.h"

enum { BENCH_REPEATS = 20, BENCH_WARMUPS = 3, BENCH_BUFFERS = 32 };
#define BENCH_POOL_BYTES    ((size_t)64 << 20)
#define BENCH_ROTATED_BYTES ((size_t)256 << 20) // several L2 caches
#define BENCH_BALLAST_BYTES ((size_t)1 << 30)

enum bench_data { BENCH_REALS, BENCH_ACCUMS, BENCH_EMPTY }; // random from -1 to 1; zeros

struct buffer {
    char *memory;
    size_t stride; // bytes from one copy to the next
};

struct sample {
    double seconds; // 0: nothing ran
    unsigned mhz;   // of the multiprocessors; 0: not known
};

static struct {
    void *pools[BENCH_EMPTY], *ballast;
    cudaEvent_t starts[BENCH_REPEATS], ends[BENCH_REPEATS];
    void *taken[BENCH_BUFFERS];
    int count, copies;
    unsigned turn; // of the calls, chooses the copy
} bench;

// ---- the clock of the multiprocessors, by NVML where it is ----

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

static unsigned nvml_mhz(void) {
    enum { MULTIPROCESSORS = 1 };
    unsigned mhz = 0;
    return nvml.clock && nvml.clock(nvml.device, MULTIPROCESSORS, &mhz) == 0 ? mhz : 0;
}

// ---- buffers ----

// A pool holds a random block of a length that is no round number, again and again, so that rows differ.
static void *pool_make(enum bench_data data) {
    enum { BLOCK = 1000003 };
    static float values[BLOCK];
    size_t element = data == BENCH_REALS ? sizeof(real) : sizeof(accum), bytes = BLOCK * element;
    uint64_t state = 1;
    for (int i = 0; i < BLOCK; i++) values[i] = (float)((double)(random_next(&state) >> 11) * 0x1p-52 - 1);
    char *pool = device_alloc(BENCH_POOL_BYTES);
    if (data == BENCH_REALS)
        device_real_from_float((real *)pool, values, BLOCK);
    else
        device_accum_from_float((accum *)pool, values, BLOCK);
    for (; bytes < BENCH_POOL_BYTES; bytes *= 2) {
        size_t rest = BENCH_POOL_BYTES - bytes;
        cuda_check(
            cudaMemcpyAsync(pool + bytes, pool, rest < bytes ? rest : bytes, cudaMemcpyDeviceToDevice, cuda_stream()));
    }
    return pool;
}

static void bench_open(void) {
    nvml_open();
    bench.pools[BENCH_REALS] = pool_make(BENCH_REALS);
    bench.pools[BENCH_ACCUMS] = pool_make(BENCH_ACCUMS);
    bench.ballast = device_alloc(BENCH_BALLAST_BYTES);
    for (int i = 0; i < BENCH_REPEATS; i++) {
        cuda_check(cudaEventCreate(&bench.starts[i]));
        cuda_check(cudaEventCreate(&bench.ends[i]));
    }
}

// Frees all buffers, and begins with others of which one call uses so many bytes.
static void bench_begin(double bytes_of_a_call) {
    device_finish();
    for (int i = 0; i < bench.count; i++) device_free(bench.taken[i]);
    bench.count = 0;
    bench.copies = 1;
    if (bytes_of_a_call < (double)BENCH_ROTATED_BYTES)
        bench.copies += (int)((double)BENCH_ROTATED_BYTES / (bytes_of_a_call + 65536));
}

static struct buffer buffer_take(size_t bytes, enum bench_data data) {
    struct buffer b = {.stride = (bytes + 255) / 256 * 256};
    size_t all = b.stride * (size_t)bench.copies;
    if (bench.count == BENCH_BUFFERS) fail_internal("bench", "found more than %d buffers", BENCH_BUFFERS);
    b.memory = bench.taken[bench.count++] = device_alloc(all);
    for (size_t done = 0; data != BENCH_EMPTY && done < all; done += BENCH_POOL_BYTES) {
        size_t rest = all - done < BENCH_POOL_BYTES ? all - done : BENCH_POOL_BYTES;
        cuda_check(cudaMemcpyAsync(b.memory + done, bench.pools[data], rest, cudaMemcpyDeviceToDevice, cuda_stream()));
    }
    return b;
}

static struct buffer buffer_reals(size_t n) { return buffer_take(n * sizeof(real), BENCH_REALS); }
static struct buffer buffer_accums(size_t n) { return buffer_take(n * sizeof(accum), BENCH_ACCUMS); }

// The copy of this turn.
static void *at(struct buffer b) { return b.memory + bench.turn % (unsigned)bench.copies * b.stride; }

// ---- timing ----

static int compare_floats(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

// Keeps the GPU busy until the calls are queued: a launch that the GPU waits for would be timed with it.
static void queue_ballast(void) {
    for (int i = 0; i < 2; i++) cuda_check(cudaMemsetAsync(bench.ballast, i, BENCH_BALLAST_BYTES, cuda_stream()));
}

static struct sample sample_read(int repeats) {
    struct sample s = {.mhz = nvml_mhz()};
    float times[BENCH_REPEATS];
    device_finish();
    for (int i = 0; i < repeats; i++) cuda_check(cudaEventElapsedTime(&times[i], bench.starts[i], bench.ends[i]));
    qsort(times, (size_t)repeats, sizeof *times, compare_floats);
    s.seconds = 1e-3 * (double)times[repeats / 2];
    return s;
}

// s = median of so many calls (at most BENCH_REPEATS). CALL is an expression that gets its buffers by at().
#define BENCH_TIMES(s, repeats, CALL)                                                                                  \
    do {                                                                                                               \
        for (int i_ = 0; i_ < BENCH_WARMUPS; i_++, bench.turn++) CALL;                                                 \
        device_finish();                                                                                               \
        queue_ballast();                                                                                               \
        for (int i_ = 0; i_ < (repeats); i_++, bench.turn++) {                                                         \
            cuda_check(cudaEventRecord(bench.starts[i_], cuda_stream()));                                              \
            CALL;                                                                                                      \
            cuda_check(cudaEventRecord(bench.ends[i_], cuda_stream()));                                                \
        }                                                                                                              \
        s = sample_read(repeats);                                                                                      \
    } while (0)

#endif
