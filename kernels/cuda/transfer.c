// Copies between host and device memory, and conversions on the way.
//
// Everything passes through pinned slots in pieces: one piece is on its way while the host fills or empties another. A
// copy to the device returns as soon as its last piece is in a slot, without waiting for the operations before it.
#include <string.h>

#include "kernels/bf16.h"
#include "kernels/cuda/comm_nccl.h"
#include "kernels/cuda/cuda.h"

enum { SLOTS = 16, SLOT_BYTES = 1 << 20 };

struct slot {
    void *memory;
    cudaEvent_t done; // the last copy that used it
};

static struct slot slots[SLOTS];
static int next_slot;

static struct slot make_slot(size_t bytes) {
    struct slot s = {0};
    cuda_check(cudaMallocHost(&s.memory, bytes));
    cuda_check(cudaEventCreateWithFlags(&s.done, cudaEventDisableTiming));
    return s;
}

// The slots in turn. Its last copy is done.
static struct slot *take_slot(void) {
    struct slot *s = &slots[next_slot++ % SLOTS];
    next_slot %= SLOTS;
    if (!s->memory) *s = make_slot(SLOT_BYTES);
    comm_nccl_wait(s->done, __func__);
    return s;
}

// ---- formats ----

// How elements look in host and in device memory. pack makes the device's of the host's, unpack the other way round.
struct format {
    size_t host_size, device_size;
    void (*pack)(void *device, const void *host, size_t n);
    void (*unpack)(void *host, const void *device, size_t n);
};

static void copy_bytes(void *to, const void *from, size_t n) { memcpy(to, from, n); }

// Those of all weights are converted when a run begins, by all of the rank's threads; a few numbers are not worth waking
// them.
enum { ALONE = 1 << 14 };

static void copy_accums(void *to, const void *from, size_t n) {
    const float *in = from;
    accum *out = to;
#pragma omp parallel for simd if (n > ALONE)
    for (size_t i = 0; i < n; i++) out[i] = in[i];
}

static void round_floats(void *device, const void *host, size_t n) {
    const float *from = host;
    uint16_t *to = device;
#pragma omp parallel for simd if (n > ALONE)
    for (size_t i = 0; i < n; i++) to[i] = bf16_from_float(from[i]);
}

static void widen_reals(void *host, const void *device, size_t n) {
    const uint16_t *from = device;
    float *to = host;
#pragma omp parallel for simd if (n > ALONE)
    for (size_t i = 0; i < n; i++) to[i] = bf16_to_float(from[i]);
}

static const struct format bytes_format = {1, 1, copy_bytes, copy_bytes};
static const struct format accum_format = {sizeof(float), sizeof(accum), copy_accums, copy_accums};
static const struct format real_format = {sizeof(float), sizeof(real), round_floats, widen_reals};

// ---- in and out ----

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static void transfer_in(void *device, const void *host, size_t n, const struct format *f) {
    const size_t most = SLOT_BYTES / f->device_size;
    for (size_t first = 0, count; first < n; first += count) {
        count = smaller(most, n - first);
        struct slot *s = take_slot();
        f->pack(s->memory, (const char *)host + first * f->host_size, count);
        cuda_check(cudaMemcpyAsync((char *)device + first * f->device_size, s->memory, count * f->device_size,
                                   cudaMemcpyHostToDevice, cuda_stream()));
        cuda_check(cudaEventRecord(s->done, cuda_stream()));
    }
}

// As many pieces as there are slots are on their way; the oldest is emptied first.
static void transfer_out(void *host, const void *device, size_t n, const struct format *f) {
    const size_t most = SLOT_BYTES / f->device_size, pieces = (n + most - 1) / most;
    struct slot *way[SLOTS];
    for (size_t piece = 0; piece < pieces + SLOTS; piece++) {
        if (piece >= SLOTS && piece - SLOTS < pieces) {
            size_t first = (piece - SLOTS) * most;
            struct slot *s = way[piece % SLOTS];
            comm_nccl_wait(s->done, __func__);
            f->unpack((char *)host + first * f->host_size, s->memory, smaller(most, n - first));
        }
        if (piece < pieces) {
            size_t first = piece * most;
            struct slot *s = way[piece % SLOTS] = take_slot();
            cuda_check(cudaMemcpyAsync(s->memory, (const char *)device + first * f->device_size,
                                       smaller(most, n - first) * f->device_size, cudaMemcpyDeviceToHost,
                                       cuda_stream()));
            cuda_check(cudaEventRecord(s->done, cuda_stream()));
        }
    }
}

void device_copy_in(void *device, const void *host, size_t bytes) {
    OPERATION();
    transfer_in(device, host, bytes, &bytes_format);
}

void device_copy_out(void *host, const void *device, size_t bytes) {
    OPERATION();
    transfer_out(host, device, bytes, &bytes_format);
}

void device_real_from_float(real *device, const float *host, size_t n) {
    OPERATION();
    transfer_in(device, host, n, &real_format);
}

void device_real_to_float(float *host, const real *device, size_t n) {
    OPERATION();
    transfer_out(host, device, n, &real_format);
}

void device_accum_from_float(accum *device, const float *host, size_t n) {
    OPERATION();
    transfer_in(device, host, n, &accum_format);
}

void device_accum_to_float(float *host, const accum *device, size_t n) {
    OPERATION();
    transfer_out(host, device, n, &accum_format);
}

// ---- a copy out in two halves ----

static struct slot reading;

void device_read_begin(const void *device, size_t bytes) {
    OPERATION();
    if (!reading.memory) reading = make_slot(DEVICE_READ_BYTES);
    if (bytes) cuda_check(cudaMemcpyAsync(reading.memory, device, bytes, cudaMemcpyDeviceToHost, cuda_stream()));
    cuda_check(cudaEventRecord(reading.done, cuda_stream()));
}

void device_read_finish(void *host, size_t bytes) {
    OPERATION();
    comm_nccl_wait(reading.done, __func__);
    if (bytes) memcpy(host, reading.memory, bytes);
}
