// What the megakernel's workers did, as events of a trace (kernels/trace.h): the names of tasks, and what a GPU's blocks
// have recorded. Plain C for both machines.
#ifndef MOK_KERNELS_MOK_EVENTS_H
#define MOK_KERNELS_MOK_EVENTS_H

#include "kernels/mok_plan.h"
#include "kernels/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

// What the events of a pass have in common.
struct mok_events {
    const struct mok_shape *shape;
    int layer;        // model block
    int first_expert; // global number of this rank's first one
};

// "gate/up", "shared d w13"; of kind -1 "none".
const char *mok_task_name(struct mok_task task);
// Whether a task is a routed expert's weight gradient, and its `block` a macrobatch.
bool mok_is_d_weights(struct mok_task task);

// An event of a task, or of kind -1 of the rows of its block from first_row on; without its times.
struct trace_event mok_event_of(const struct mok_events *e, const char *name, struct mok_task task, int first_row,
                                int bytes);

// ---- what a GPU's blocks record in a pass ----

enum {
    MOK_RECORDS = 2048,   // in a lane
    MOK_MOVER_WARPS = 12, // of a block that pulls before it multiplies
    MOK_MULTIPLIER_HALVES = 2
};

// Something that took its time.
struct mok_record {
    uint64_t begin, end;  // nanoseconds of the GPU's clock
    struct mok_task task; // of a pull: kind -1, the row block, the first row in it, the expert
    int32_t bytes;        // moved between ranks
    int32_t unused;
};

// Who records, each into a lane of his own.
enum mok_recorder {
    MOK_LOADER,     // waits for a task's factors
    MOK_MULTIPLIER, // tasks
    MOK_STORER,     // pushes of one half of a tile's rows, then those of the other
    MOK_PULLER = MOK_STORER + MOK_MULTIPLIER_HALVES
};

// Of a kind of recorders, the number-th of them: the block; of the second half's storer, `blocks` and the block; of pullers,
// the block, or where whole blocks pull, MOK_MOVER_WARPS times the mover and the warp.
MOK_INLINE int mok_lane(enum mok_recorder kind, int blocks, int number) { return (int)kind * blocks + number; }

struct mok_log {
    struct mok_record *records; // [lanes, MOK_RECORDS], NULL: nothing is recorded
    int32_t *counts;            // [lanes] things that happened, those for which there was no room too
};

// How many blocks there are, and how many of them pull before they multiply; 0: each one has a warp for that.
struct mok_blocks {
    int all, movers;
};
static inline int mok_pullers(struct mok_blocks b) { return b.movers ? MOK_MOVER_WARPS * b.movers : b.all; }
static inline int mok_lanes(struct mok_blocks b) { return MOK_PULLER * b.all + mok_pullers(b); }

// A moment by the host's clock and by the GPU's.
struct mok_moment {
    double seconds;
    uint64_t nanoseconds;
};

// The tracks behind TRACE_TRACK_WORKER: "block 17", which computes and waits; "block 17 pull", or "mover 0 pull 11" of the
// 12th warp of a block that pulls before it multiplies; "block 17 push".
int mok_block_tracks(struct mok_blocks b);
void mok_name_block_track(char name[32], struct mok_blocks b, int track);

// Makes events of a pass's log, which is in host memory. A block waits from where it has no task left, not from where its
// loader, which is ahead, begins to; and pushes a tile from when its first half's rows go to when the second half's are gone.
void mok_add_events(struct trace *t, const struct mok_events *e, const struct mok_log *log, struct mok_blocks b,
                    struct mok_moment moment);

#ifdef __cplusplus
}
#endif

#endif
