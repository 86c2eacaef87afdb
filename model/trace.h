// --trace FILE: what every worker of every rank did in one optimizer step, for chrome://tracing, ui.perfetto.dev and
// scripts/plot_trace.py.
//
// One step is recorded: the third that a run takes, when threads, buffers and caches are warm, or the last of a run with
// fewer. In train.c:
//
//     struct run_trace trace;
//     trace_open_run(&trace, world, o->trace, workers, t.step, o->steps);   // then hand &trace.trace to who records
//     ... trace_begin_step(&trace, t->step + 1); trainer_step(t); trace_end_step(&trace); ...
//     trace_close_run(&trace);
//
// and around a phase of the step, in code of the rank's own thread:
//
//     double begin = trace_now(trace);
//     ...
//     trace_add_phase(trace, "moe forward", block, begin);
//
// plot_trace.py finds the passes of a layer by the phases "moe forward" and "moe backward".
//
// The file: one complete event ("ph": "X") a line. pid is the rank, tid the track; ts and dur are microseconds from the
// first event on; cat is move ("pull", "push"), wait ("wait"), step (the track "step") or compute; args has layer, expert,
// phase, row and bytes where they are known. A track that was too short for its events has "dropped" beside its name.
#ifndef MOK_MODEL_TRACE_H
#define MOK_MODEL_TRACE_H

#include "kernels/comm.h"
#include "kernels/trace.h"

enum {
    TRACE_STEP = 3,                  // of the run, from 1
    TRACE_EVENTS_PER_TRACK = 1 << 17 // of a run: 6 MiB, of which memory is taken as far as it is used
};

// ---- a recorder ----

// Tracks "step", "worker 0", ... of this many events each. Recording is off.
void trace_open(struct trace *t, int workers, size_t events_per_track);
void trace_close(struct trace *t);

// Collective. Writes what the ranks recorded to one file, by rank 0, and returns the number of events in it. The file
// appears whole, in place of an older one, or not at all; the program ends (exit 1) when it cannot be written. Warns of
// tracks that dropped events. Hosts with clocks of their own are aligned by the end of a barrier.
int64_t trace_write(const struct trace *t, struct comm *world, const char *path);

// Ends the program (exit 2) when no file can be made there, or something that is no file has the name.
void trace_check_path(const char *path);

// ---- phases of a step. t may be NULL ----

// From begin until now. name: static text; block: -1 where there is none
static inline void trace_add_phase(struct trace *t, const char *name, int block, double begin) {
    if (t && t->on)
        trace_add(
            t, TRACE_TRACK_STEP,
            (struct trace_event){begin, clock_seconds(), name, block, .expert = -1, .phase = -1, .first_row = -1});
}

// ---- the trace of a run ----

struct run_trace {
    struct trace trace; // for those who record
    struct comm *world;
    const char *path; // "": there is no trace, and nothing is done
    int64_t step;     // that is recorded
    bool written;
};

// path must outlive the run; it is checked here (exit 2). done: steps that were taken before; steps: the last one
void trace_open_run(struct run_trace *r, struct comm *world, const char *path, int workers, int64_t done,
                    int64_t steps);
// Around every step, on every rank. step: the one that begins, 1 for the first. The end of the recorded one is collective:
// it writes the file and says so.
void trace_begin_step(struct run_trace *r, int64_t step);
void trace_end_step(struct run_trace *r);
// Says so when the run ended before its step.
void trace_close_run(struct run_trace *r);

#endif
