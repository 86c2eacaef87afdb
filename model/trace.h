// --trace FILE: what every worker of every rank did in one optimizer step, for chrome://tracing, ui.perfetto.dev and
// scripts/plot_trace.py.
//
// One step is recorded: if nobody asks for another one, the third that a run takes, when threads, buffers and caches are
// warm, or the last of a run with fewer. In train.c:
//
//     struct run_trace trace;
//     trace_open_run(&trace, world, o->trace, workers, o->trace_step, t.step, o->steps);
//     mok_trace_open(&trace.trace, ...); // if the MoE layers' workers record; then hand &trace.trace to who does
//     ... trace_begin_step(&trace, t->step + 1); trainer_step(t); trace_end_step(&trace); ...
//     trace_close_run(&trace);
//
// and around a phase of the step, in code of the rank's own thread:
//
//     int begin = trace_mark(trace);
//     ...
//     trace_add_phase(trace, "moe forward", block, begin);
//
// The track "step" has these phases, the track "device" every operation (kernels/operation.h); both are times of the
// device, not of the calls. When the step is over, a table says where its time went (model/breakdown.h).
//
// What the workers of the MoE layers do is on tracks of their own (kernels/trace.h, kernels/mok.h): on CPUs in all layers or
// in the one of --trace-layer, on a GPU in one layer of the first micro-batch.
//
// plot_trace.py finds the passes of a layer by the phases "moe forward" and "moe backward".
//
// The file: one complete event ("ph": "X") a line. pid is the rank, tid the track; ts and dur are microseconds from the
// first event on; cat is move ("pull", "push"), wait ("wait"), step (the track "step"), operation (the track "device") or
// compute; args has layer, expert, phase, row and bytes where they are known. A track that was too short for its events has
// "dropped" beside its name.
#ifndef MOK_MODEL_TRACE_H
#define MOK_MODEL_TRACE_H

#include "kernels/comm.h"
#include "kernels/kernels.h"
#include "kernels/trace.h"

enum {
    TRACE_STEP = 3,                  // of the run, from 1
    TRACE_EVENTS_PER_TRACK = 1 << 17 // of a run: 6 MiB, of which memory is taken as far as it is used
};

// ---- a recorder ----

// Tracks "step", "worker 0", ..., "device" of this many events each. Recording is off.
void trace_open(struct trace *t, int workers, size_t events_per_track);
void trace_close(struct trace *t);

// The last track.
static inline int trace_device_track(const struct trace *t) { return t->track_count - 1; }

// Waits for the device and makes events of all spans, and of what workers have recorded there.
void trace_take_spans(struct trace *t);

// Collective. Writes what the ranks recorded to one file, by rank 0, and returns the number of events in it. The file
// appears whole, in place of an older one, or not at all; the program ends (exit 1) when it cannot be written. Warns of
// tracks that dropped events. Hosts with clocks of their own are aligned by the end of a barrier.
int64_t trace_write(const struct trace *t, struct comm *world, const char *path);

// Ends the program (exit 2) when no file can be made there, or something that is no file has the name.
void trace_check_path(const char *path);

// ---- phases of a step. t may be NULL ----

// Where a phase begins.
static inline int trace_mark(const struct trace *t) { return t && t->on ? device_mark() : -1; }

// From begin to what is called next. name: static text; block: -1 where there is none
static inline void trace_add_phase(struct trace *t, const char *name, int block, int begin) {
    if (t && t->on) trace_add_span(t, (struct trace_span){name, block, begin, device_mark(), false});
}

// Which block the operations that follow belong to; -1: none.
static inline void trace_set_block(struct trace *t, int block) {
    if (t) t->block = block;
}

// ---- the trace of a run ----

struct run_trace {
    struct trace trace; // for those who record
    struct comm *world;
    const char *path; // "": there is no trace, and nothing is done
    int64_t step;     // that is recorded
    int begin;        // its mark
    bool written;
};

// path must outlive the run; it is checked here (exit 2), and so is step. workers: tracks that they have; step: to be
// recorded, 0: as said above; done: steps that were taken before; steps: the last one
void trace_open_run(struct run_trace *r, struct comm *world, const char *path, int workers, int64_t step, int64_t done,
                    int64_t steps);
// Around every step, on every rank. step: the one that begins, 1 for the first. The end of the recorded one is collective:
// it writes the file, says so, and prints rank 0's table.
void trace_begin_step(struct run_trace *r, int64_t step);
void trace_end_step(struct run_trace *r);
// Says so when the run ended before its step.
void trace_close_run(struct run_trace *r);

#endif
