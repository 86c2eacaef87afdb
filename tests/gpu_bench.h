// What the programs that time the GPU share: buffers of random data in so many copies that no call finds its input in
// the L2 cache, and the median time of a call by events.
#ifndef MOK_TESTS_GPU_BENCH_H
#define MOK_TESTS_GPU_BENCH_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/random.h"
#include "tests/gpu_clock.h"

enum { BENCH_REPEATS = 20, BENCH_WARMUPS = 3, BENCH_BUFFERS = 32 };
#define BENCH_POOL_BYTES    ((size_t)64 << 20)
#define BENCH_POOL_STEP     ((size_t)997 << 8)  // from where one buffer's data begin to where the next one's do
#define BENCH_ROTATED_BYTES ((size_t)256 << 20) // several L2 caches
#define BENCH_BALLAST_BYTES ((size_t)1 << 30)

// Random from -1 to 1; random with a normal distribution; zeros.
enum bench_data { BENCH_REALS, BENCH_ACCUMS, BENCH_NORMALS, BENCH_EMPTY };

struct buffer {
    char *memory;
    size_t stride; // bytes from one copy to the next
};

struct sample {
    double seconds; // 0: nothing ran
    unsigned mhz;   // of the multiprocessors; 0: not known
    bool waited;    // the GPU has waited for the host between calls: they could be faster
};

static struct {
    void *pools[BENCH_EMPTY], *ballast;
    cudaEvent_t starts[BENCH_REPEATS], ends[BENCH_REPEATS];
    void *taken[BENCH_BUFFERS];
    int count, copies;
    unsigned turn; // of the calls, chooses the copy
} bench;

// ---- buffers ----

static double bench_uniform(uint64_t *state) { return random_uniform(random_next(state)); }

static float bench_value(enum bench_data data, uint64_t *state) {
    double u = bench_uniform(state);
    if (data != BENCH_NORMALS) return (float)(2 * u - 1);
    return (float)(sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * bench_uniform(state)));
}

// A pool holds a random block of a length that is no round number, again and again, so that rows differ.
static void *pool_make(enum bench_data data) {
    enum { BLOCK = 1000003 };
    static float values[BLOCK];
    size_t element = data == BENCH_ACCUMS ? sizeof(accum) : sizeof(real), bytes = BLOCK * element;
    uint64_t state = 1;
    for (int i = 0; i < BLOCK; i++) values[i] = bench_value(data, &state);
    char *pool = device_alloc(BENCH_POOL_BYTES);
    if (data == BENCH_ACCUMS)
        device_accum_from_float((accum *)pool, values, BLOCK);
    else
        device_real_from_float((real *)pool, values, BLOCK);
    for (; bytes < BENCH_POOL_BYTES; bytes *= 2) {
        size_t rest = BENCH_POOL_BYTES - bytes;
        cuda_check(
            cudaMemcpyAsync(pool + bytes, pool, rest < bytes ? rest : bytes, cudaMemcpyDeviceToDevice, cuda_stream()));
    }
    return pool;
}

static void bench_open(void) {
    nvml_open();
    for (enum bench_data data = 0; data < BENCH_EMPTY; data++) bench.pools[data] = pool_make(data);
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
    size_t first = (size_t)bench.count * BENCH_POOL_STEP, most = BENCH_POOL_BYTES - first;
    if (bench.count == BENCH_BUFFERS) fail_internal("bench", "found more than %d buffers", BENCH_BUFFERS);
    b.memory = bench.taken[bench.count++] = device_alloc(all);
    for (size_t done = 0; data != BENCH_EMPTY && done < all; done += most) {
        const char *from = (const char *)bench.pools[data] + first;
        size_t rest = all - done < most ? all - done : most;
        cuda_check(cudaMemcpyAsync(b.memory + done, from, rest, cudaMemcpyDeviceToDevice, cuda_stream()));
    }
    return b;
}

static struct buffer buffer_reals(size_t n) { return buffer_take(n * sizeof(real), BENCH_REALS); }
static inline struct buffer buffer_normals(size_t n) { return buffer_take(n * sizeof(real), BENCH_NORMALS); }
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

static bool event_has_ended(cudaEvent_t event) {
    cudaError_t code = cudaEventQuery(event);
    if (code == cudaErrorNotReady) {
        (void)cudaGetLastError(); // "not yet" would be found there by the next check of a launch
        return false;
    }
    cuda_check(code);
    return true;
}

// Comes right behind the last call: where nearly all of them have ended by then, the GPU has waited for the host. The
// clock is that in their midst, not that of the ballast before them.
static struct sample sample_read(int repeats) {
    struct sample s = {.waited = event_has_ended(bench.ends[repeats > 1 ? repeats - 2 : 0])};
    cuda_check(cudaEventSynchronize(bench.ends[repeats / 2]));
    s.mhz = nvml_mhz();
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
