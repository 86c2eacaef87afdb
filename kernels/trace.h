// What a worker did when, for --trace. Recording costs two readings of the clock and a store, and nothing when it is off.
//
// One recorder per rank. Every track (a worker thread, or the rank's own line of control) is written by one thread at a
// time; a track that is full drops what follows and counts it. Track 0 is the rank's own, "step", then come those of the
// workers (kernels/mok.h), and the last one is "device". The phases of "step" and the operations of "device" are spans
// between marks (kernels.h) until the device has come to them: a call may return long before its work is done. Workers add
// "pull", "push" (moving), "wait", and what they compute: "gate/up", "down", "d hidden", "d x", "d w2", "d w13"; for the
// shared expert "shared gate/up" and so on.
//
// On a track one thing happens at a time. A CPU's worker has one, "worker 3". A GPU's block does several things at once, and
// has tracks for what it multiplies or waits for, for what it pulls, and for what it pushes (kernels/mok_events.h); what
// they do is recorded on the GPU, of one layer, and added when the step is over (kernels/cuda/mok_record.h).
#ifndef MOK_KERNELS_TRACE_H
#define MOK_KERNELS_TRACE_H

#include "kernels/clock.h"
#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct trace_event {
    double begin, end; // clock_seconds
    const char *name;  // static text
    int block;         // model block (layer) it belongs to; -1: none
    int expert;        // global number; -1: none, or the shared expert
    int phase;         // minibatch of the pass, -1: none
    int first_row;     // first row it worked on (of the schedule), -1: none
    int bytes;         // moved between ranks, 0: none
};

struct trace_track {
    char name[32]; // "worker 3", "step"
    struct trace_event *events;
    size_t count, capacity, dropped;
};

// A phase of the step, or an operation.
struct trace_span {
    const char *name; // static text
    int block;        // -1: none
    int begin, end;   // marks
    bool operation;
};

struct trace {
    bool on;   // record
    int block; // of the events that follow, for code that does not know the model
    int layer; // the block whose workers record; -1: of any block, on a GPU of the first that has some
    struct trace_track *tracks;
    int track_count;
    struct trace_span *spans;
    size_t span_count, span_capacity;
};

enum {
    TRACE_TRACK_STEP = 0,   // the rank's own line of control
    TRACE_TRACK_WORKER = 1, // the first of the workers'; the others follow
};

// Where an event begins; 0, without a look at the clock, while nothing is recorded. t may be NULL.
static inline double trace_now(const struct trace *t) { return t && t->on ? clock_seconds() : 0; }

// Whether the workers of the present block record.
static inline bool trace_has_workers(const struct trace *t) {
    return t && t->on && (t->layer < 0 || t->layer == t->block);
}

static inline void trace_add(struct trace *t, int track, struct trace_event event) {
    struct trace_track *to = &t->tracks[track];
    if (to->count == to->capacity)
        to->dropped++;
    else
        to->events[to->count++] = event;
}

void trace_add_span(struct trace *t, struct trace_span span);

#ifdef __cplusplus
}
#endif

#endif
