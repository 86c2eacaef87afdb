// The megakernel: dispatch, shared expert, routed experts and combine of one MoE layer in one run of persistent workers per
// pass. kernels/mok_plan.h says what they do; kernels/cpu runs it on threads.
//
// The ranks of an EP group reach each other's rows through symmetric memory (kernels/comm.h). One pass:
//
//   inputs written -> mok_barrier -> mok_plan_make (forward only) -> mok_run -> mok_barrier -> moe_sum_slots
//
// Within mok_run no rank waits for another. Every function works for one rank and knows the others by their addresses
// alone, so several ranks can live in one process.
#ifndef MOK_KERNELS_MOK_H
#define MOK_KERNELS_MOK_H

#include "kernels/mok_plan.h"
#include "kernels/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

// Whether this build has the megakernel.
bool mok_available(void);
// H, I and the shared expert's inner width must be multiples of this.
int mok_column_unit(void);
// The most ranks of an EP group. INT_MAX: any.
int mok_most_ranks(void);

// ---- ranks ----

// One rank's view of its EP group. base[r] is where the symmetric memory of rank r begins here; it begins with
// mok_header_bytes for this file's own use, zeroed before the first call.
struct mok_group {
    int rank, ranks;
    char *const *base;
    uint64_t epoch; // barriers passed; a GPU keeps it in device memory
    double timeout; // seconds a barrier waits for the slowest rank
    int tokens;     // of this rank, by mok_set_tokens
};

size_t mok_header_bytes(int ranks);

// The address of another rank's counterpart of something in this rank's symmetric memory.
MOK_INLINE void *mok_peer(const struct mok_group *g, int rank, const void *mine) {
    return g->base[rank] + ((const char *)mine - g->base[g->rank]);
}

// Says how many tokens this rank has in the coming forward pass. Before its first barrier.
void mok_set_tokens(struct mok_group *g, int tokens);

// Until every rank of the group is here; what they stored before is then seen by all. Coming to the first barrier of a pass
// also says that this rank has read its slots of the pass before: they may be written again. On a time-out ends the job
// with the ranks that are missing; what names the barrier in that line.
void mok_barrier(struct mok_group *g, const char *what);

// ---- plan ----

// Memory of a plan's arrays for its capacity, to be freed by mok_plan_free.
void mok_plan_alloc(struct mok_plan *p, const struct mok_shape *s);
void mok_plan_free(struct mok_plan *p);
size_t mok_plan_bytes(const struct mok_shape *s);

// A copy whose arrays are in host memory and which is complete: for tests and reports. Waits for the device. The copy
// has no tables of tasks; free its rows, which are one piece of memory with all else, with free.
void mok_plan_read(struct mok_plan *host, const struct mok_plan *p, const struct mok_shape *s);

// The plan of this rank from all ranks' choices. ids [tokens, K] (-1: not placed) and gates [tokens, K] lie at the same
// place in every rank's symmetric memory.
void mok_plan_make(struct mok_plan *p, const struct mok_shape *s, const struct mok_group *g, const int32_t *ids,
                   const accum *gates);

// ---- a pass ----

// Whether finished rows lie in mok_workspace.out before they are pushed. A GPU pushes them as they leave the
// multipliers.
bool mok_keeps_out(void);

// What all layers share. Row buffers are rings.
struct mok_workspace {
    real *hidden;           // [ring_rows, I]
    real *out;              // [ring_rows, H] what is pushed: y, or dx; NULL unless mok_keeps_out
    real *dy_rows;          // [ring_rows, H]
    real *d_gate_up;        // [ring_rows, 2I]
    accum *partials;        // [ceil(I / MOK_PARTIAL_COLUMNS), ring_rows] of the gates' gradients
    real *shared_hidden;    // [max_tokens, S]
    real *shared_d_gate_up; // [max_tokens, 2S]
    real *shared_out;       // [max_tokens, H] the shared expert's y, or dx: moe_sum_slots adds it
    int32_t *counters;      // [mok_counter_total]
};

// One layer in one pass. Weights and gradients are this rank's experts', one behind the other.
struct mok_layer {
    // symmetric memory, this rank's
    const real *x;  // [tokens, H]
    const real *dy; // [tokens, H] backward
    real *slots;    // [tokens * K, H] receives every route's y, or dx; slots of id -1 are not written
    accum *d_gates; // [tokens, K] backward; those of id -1 are not written
    // weights
    const real *w13, *w2;               // [2I, H], [I, H]
    const real *shared_w13, *shared_w2; // [2S, H], [S, H]
    accum *d_w13, *d_w2, *d_shared_w13, *d_shared_w2;
    bool first_use; // gradients are stored, by experts without rows too (zeros); else added
    // kept from forward to backward
    real *x_rows;         // [ring_rows, H]
    real *gate_up;        // [ring_rows, 2I]
    real *shared_gate_up; // [max_tokens, 2S]
};

// How a pass is run. No member changes a bit of the results.
struct mok_crew {
    int workers;         // threads that mok_crew_open starts; of a GPU thread blocks, at most its multiprocessors
    int comm_workers;    // of them, those that only move rows; 0: all move and multiply. Less than workers
    double timeout;      // seconds that a worker waits for others before the job is given up; of a GPU about 10
    struct trace *trace; // NULL, or with mok_trace_tracks tracks for them
    int first_expert;    // global number of this rank's first expert, for the trace
    void (*before_task)(void *argument, int worker, struct mok_task task); // for tests: delays and stalls; NULL
    void *argument;
    uint64_t delays;   // for tests on a GPU: seed of random pauses before tasks and moves; 0: none
    struct pool *pool; // of mok_crew_open
};

// Workers of a rank when nobody says: as many as compute elsewhere; of a GPU one on each multiprocessor.
int mok_default_workers(void);
// The most that there can be.
int mok_most_workers(void);

// Rows of a mover's ticket (mok_shape.move_rows), of so many columns: long enough to be worth the ticket, short enough to
// spread.
int mok_default_move_rows(int hidden);

// Starts the crew's threads, which wait for passes; ends them.
void mok_crew_open(struct mok_crew *c);
void mok_crew_close(struct mok_crew *c);

// Runs one pass. A worker whose wait lasts too long ends the job (exit 1) with a line that says who waited for what: "worker
// 3 in the backward pass waited 60 s in task d x (block 17, tile 1, local expert 2) for d hidden tiles of row block 17:
// found 3, wanted 4". If it waits for rows that nobody pulls, the line goes on with what the pull waits for. Of a GPU's
// workers: "thread 0 of block 17 waited over 8 seconds inside a kernel for pulled groups of row block 5: found 3, wanted
// 16".
//
// On a GPU everything from mok_set_tokens to mok_run is queued on the stream of operations and can be captured into a CUDA
// graph, to be replayed as long as no operation has taken more scratch memory since (device_reserve_scratch).
void mok_run(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
             const struct mok_layer *layer, const struct mok_workspace *w, const struct mok_crew *crew,
             enum mok_pass pass);

// ---- a trace of what workers do ----

// On CPUs a worker's track has what it does in every pass of the trace's layer, or of all. On a GPU the tracks of its blocks
// (kernels/mok_events.h) have the first forward and the first backward pass of one layer: blocks record them in device
// memory, from which they are taken when the step is over.

// The tracks that so many workers write, of which comm_workers only move.
int mok_trace_tracks(int workers, int comm_workers);
// Names the tracks of t where they have names of their own, and takes the memory for what is recorded: of a GPU about a
// hundred MiB, which no plan counts. One trace at a time, of one rank.
void mok_trace_open(struct trace *t, int workers, int comm_workers);
// Waits for the device and adds to t what was recorded there since it was opened or taken; before device_clear_marks.
void mok_trace_take(struct trace *t);
// Frees that memory.
void mok_trace_close(void);

#ifdef __cplusplus
}
#endif

#endif
