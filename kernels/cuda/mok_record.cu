// Memory for what blocks record, and how it becomes events.
#include "kernels/cuda/mok_record.h"

#include <cstdlib>

#include "kernels/cuda/lost_wait.h"
#include "kernels/cuda/mok_parameters.h"

static struct {
    struct mok_blocks blocks;
    struct mok_log logs[MOK_PASSES]; // device memory; records NULL: no trace is open
    uint64_t *clocks;                // device [MOK_PASSES]
    // of the passes that have been recorded since events were taken
    bool recorded[MOK_PASSES];
    int marks[MOK_PASSES]; // to which the device came when its clock showed what is in clocks
    struct mok_shape shape;
    struct mok_events events;
} recorder;

static __global__ void clock_kernel(uint64_t *clock) { *clock = wait_nanoseconds(); }

int mok_trace_tracks(int workers, int comm_workers) { return mok_block_tracks({workers, comm_workers}); }

void mok_trace_open(struct trace *t, int workers, int comm_workers) {
    recorder = {};
    recorder.blocks = {workers, comm_workers};
    for (int i = 0; i < mok_block_tracks(recorder.blocks); i++)
        mok_name_block_track(t->tracks[TRACE_TRACK_WORKER + i].name, recorder.blocks, i);
    size_t lanes = (size_t)mok_lanes(recorder.blocks);
    for (struct mok_log &log : recorder.logs) {
        log.records = (struct mok_record *)device_alloc(lanes * MOK_RECORDS * sizeof *log.records);
        log.counts = (int32_t *)device_alloc(lanes * sizeof *log.counts);
    }
    recorder.clocks = (uint64_t *)device_alloc(sizeof *recorder.clocks * MOK_PASSES);
    mok_forward_prepare_recorded();
    mok_backward_prepare_recorded();
    clock_kernel<<<1, 1, 0, cuda_stream()>>>(recorder.clocks); // loads it, as those two are
    cuda_check_launch();
}

void mok_trace_close(void) {
    for (struct mok_log &log : recorder.logs) {
        device_free(log.records);
        device_free(log.counts);
    }
    device_free(recorder.clocks);
    recorder = {};
}

// ---- before a pass ----

// The forward pass that comes first says which layer it is, if the trace does not.
static bool is_wanted(const struct trace *t, enum mok_pass pass) {
    if (!recorder.clocks || !trace_has_workers(t) || recorder.recorded[pass]) return false;
    return pass == MOK_FORWARD || (recorder.recorded[MOK_FORWARD] && recorder.events.layer == t->block);
}

// The mark comes first: events are early by what a kernel takes to begin, but none lies outside of the megakernel's span.
struct mok_log mok_record_pass(const struct mok_shape *s, const struct mok_crew *crew, enum mok_pass pass) {
    if (!is_wanted(crew->trace, pass)) return {};
    if (crew->workers != recorder.blocks.all || crew->comm_workers != recorder.blocks.movers)
        fail_internal("trace", "found a pass of %d blocks, %d of them moving rows, wanted %d and %d as in its trace",
                      crew->workers, crew->comm_workers, recorder.blocks.all, recorder.blocks.movers);
    recorder.shape = *s;
    recorder.events = {&recorder.shape, crew->trace->block, crew->first_expert};
    recorder.recorded[pass] = true;
    struct mok_log log = recorder.logs[pass];
    size_t lanes = (size_t)mok_lanes(recorder.blocks);
    cuda_check(cudaMemsetAsync(log.counts, 0, lanes * sizeof *log.counts, cuda_stream()));
    recorder.marks[pass] = device_mark();
    clock_kernel<<<1, 1, 0, cuda_stream()>>>(recorder.clocks + pass);
    cuda_check_launch();
    return log;
}

// ---- after the step ----

static void *copy_out(const void *device, size_t bytes) {
    void *host = malloc(bytes);
    if (!host) fail_internal("trace", "found no host memory for %zu bytes of records", bytes);
    device_copy_out(host, device, bytes);
    return host;
}

static void take_pass(struct trace *t, enum mok_pass pass) {
    const struct mok_log *from = &recorder.logs[pass];
    size_t lanes = (size_t)mok_lanes(recorder.blocks);
    struct mok_log log;
    log.records = (struct mok_record *)copy_out(from->records, lanes * MOK_RECORDS * sizeof *log.records);
    log.counts = (int32_t *)copy_out(from->counts, lanes * sizeof *log.counts);
    struct mok_moment moment = {device_mark_seconds(recorder.marks[pass]), 0};
    device_copy_out(&moment.nanoseconds, recorder.clocks + pass, sizeof moment.nanoseconds);
    mok_add_events(t, &recorder.events, &log, recorder.blocks, moment);
    free(log.counts);
    free(log.records);
}

void mok_trace_take(struct trace *t) {
    for (int pass = 0; pass < MOK_PASSES; pass++) {
        if (recorder.recorded[pass]) take_pass(t, (enum mok_pass)pass);
        recorder.recorded[pass] = false;
    }
}
