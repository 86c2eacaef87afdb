// The plan of the megakernel: which token rows a rank gets, in which order, and which tasks its workers do, in which order,
// waiting for what. Plain C for both machines: the CPU's workers (kernels/cpu/mok_*.c) and CUDA kernels include it alike.
//
// A rank's rows. Every route (token, k) to one of its experts is a row. An expert's rows form a segment in the order of
// (global token number, k), the same for every number of ranks; a segment begins at a multiple of MOK_BLOCK_ROWS, and what
// is left of its last row block is padding (source -1, gate 0). Row blocks are the unit of tiles and counters.
//
//   minibatch   consecutive row blocks that make one phase of the task order; may cut an expert
//   ring        the row buffers hold ring_rows rows; row r lies at r mod ring_rows
//   macrobatch  the rows that are in the ring together: rows m * ring_rows and on. Normally there is one
//
// Two passes. Forward runs the macrobatches last to first, so that macrobatch 0 is still in the ring when backward begins;
// backward runs them first to last, and replays (pulls and multiplies again) those that are gone. Where layers share one
// ring (`replay`), that is all of them.
//
// Who does what. Multipliers take tasks in order from a ticket; movers take groups of rows in order from two tickets, one
// for pulling and one for pushing. Every task waits for counters that earlier tasks or movers raise; movers wait for
// counters that tasks raise, and a mover takes a ticket only when nothing is left to wait for. Nobody waits for another
// rank. Hence any one worker that does both can finish a pass alone.
//
// On a GPU rows are pushed by the tiles that make them, so that a block has been pushed when its output tiles are done. And
// movers are warps of their own there, beside those that multiply, and may hold a ticket that cannot be served yet: it
// waits only for rows of a macrobatch before, all of whose tasks and tickets come earlier.
#ifndef MOK_KERNELS_MOK_PLAN_H
#define MOK_KERNELS_MOK_PLAN_H

#include "kernels/types.h"

#ifdef __CUDACC__
#define MOK_INLINE static __host__ __device__ __forceinline__
#else
#define MOK_INLINE static inline
#endif

enum {
    MOK_BLOCK_ROWS = 128,       // rows of a tile; segments are padded to it
    MOK_GATE_UP_COLUMNS = 128,  // a gate/up tile has this many columns of gate and the same ones of up
    MOK_D_HIDDEN_COLUMNS = 256, // columns of I in a d hidden tile
    MOK_OUT_COLUMNS = 256,      // columns of H in a down or d x tile
    MOK_D_WEIGHT_ROWS = 128,    // a weight-gradient tile has this many rows of I (or 2I)
    MOK_D_WEIGHT_COLUMNS = 256, // and this many columns of H
    MOK_PARTIAL_COLUMNS = 128,  // columns of I in one partial sum of a gate's gradient
    MOK_GROUP_BLOCKS = 16,      // at most so many blocks of 128 rows take turns in backward (mok_grouped)
    MOK_MANY_TERMS = 1024,      // of a weight gradient's sums, from which on its tiles take turns by blocks, too
};

MOK_INLINE int mok_ceil(int n, int unit) { return (n + unit - 1) / unit; }
MOK_INLINE int mok_min(int a, int b) { return a < b ? a : b; }

// ---- sizes ----

// Sizes of a layer and its schedule, the same on all ranks of the EP group.
struct mok_shape {
    int ranks, experts, top_k;
    int hidden, intermediate;      // H, I of a routed expert
    int shared;                    // inner width of the shared expert; 0: none
    int max_tokens;                // of one rank
    int minibatch_rows, ring_rows; // multiples of MOK_BLOCK_ROWS; the ring is a multiple of the minibatch
    int lag;                       // tiles of the next phase that come before the second half of a phase
    int move_rows;                 // rows of one mover's ticket; divides MOK_BLOCK_ROWS; on a GPU at most 32
    bool replay;                   // nothing of forward is in the ring when backward begins
};

MOK_INLINE int mok_first_expert(const struct mok_shape *s, int rank) {
    return (int)((long long)rank * s->experts / s->ranks);
}
MOK_INLINE int mok_local_experts(const struct mok_shape *s, int rank) {
    return mok_first_expert(s, rank + 1) - mok_first_expert(s, rank);
}
// The most experts that one rank has.
MOK_INLINE int mok_most_experts(const struct mok_shape *s) { return mok_ceil(s->experts, s->ranks); }

// Rows that a rank's table has room for: every token of every rank may choose as many of its experts as it can, and every
// segment is padded. Nothing is ever dropped.
MOK_INLINE size_t mok_capacity_rows(const struct mok_shape *s) {
    size_t experts = (size_t)mok_most_experts(s), each = (size_t)mok_min(s->top_k, mok_most_experts(s));
    size_t rows = (size_t)s->ranks * (size_t)s->max_tokens * each + (MOK_BLOCK_ROWS - 1) * experts;
    return rows / MOK_BLOCK_ROWS * MOK_BLOCK_ROWS;
}
// The same in row blocks.
MOK_INLINE size_t mok_capacity_blocks(const struct mok_shape *s) { return mok_capacity_rows(s) / MOK_BLOCK_ROWS; }

// The rows of a minibatch when nobody says: at least four waves of gate/up tiles on so many multipliers, so that few of
// them run dry where the phase changes.
MOK_INLINE int mok_default_minibatch(int intermediate, int multipliers) {
    return mok_ceil(4 * multipliers, mok_ceil(intermediate, MOK_GATE_UP_COLUMNS)) * MOK_BLOCK_ROWS;
}
// The rows of a ring when nobody says: a quarter more than a balanced load, padding included; never more than the table.
MOK_INLINE int mok_default_ring(const struct mok_shape *s) {
    size_t minibatch = (size_t)s->minibatch_rows;
    size_t rows =
        (size_t)s->max_tokens * (size_t)s->top_k * 5 / 4 + (size_t)MOK_BLOCK_ROWS * (size_t)mok_most_experts(s);
    size_t capacity = mok_capacity_rows(s);
    if (rows > capacity) rows = capacity;
    rows = (rows + minibatch - 1) / minibatch * minibatch;
    return (int)(rows ? rows : minibatch);
}

MOK_INLINE int mok_gate_up_tiles(const struct mok_shape *s) { return mok_ceil(s->intermediate, MOK_GATE_UP_COLUMNS); }
MOK_INLINE int mok_d_hidden_tiles(const struct mok_shape *s) { return mok_ceil(s->intermediate, MOK_D_HIDDEN_COLUMNS); }
MOK_INLINE int mok_out_tiles(const struct mok_shape *s) { return mok_ceil(s->hidden, MOK_OUT_COLUMNS); }
MOK_INLINE int mok_groups(const struct mok_shape *s) { return MOK_BLOCK_ROWS / s->move_rows; }
// Tiles of the weight gradients of one expert with inner width I: W2 [I, H] and W13 [2I, H].
MOK_INLINE int mok_d_w2_tiles(const struct mok_shape *s, int I) {
    return mok_ceil(I, MOK_D_WEIGHT_ROWS) * mok_ceil(s->hidden, MOK_D_WEIGHT_COLUMNS);
}
MOK_INLINE int mok_d_w13_tiles(const struct mok_shape *s, int I) {
    return mok_ceil(2 * I, MOK_D_WEIGHT_ROWS) * mok_ceil(s->hidden, MOK_D_WEIGHT_COLUMNS);
}
// Those of both weights of a routed expert.
MOK_INLINE int mok_expert_d_weight_tiles(const struct mok_shape *s) {
    return mok_d_w2_tiles(s, s->intermediate) + mok_d_w13_tiles(s, s->intermediate);
}

// Where task `at` of some blocks of rows by `tiles` columns of tiles is, if they come column by column of the next
// MOK_GROUP_BLOCKS blocks: a wave of a GPU's tiles then reads about as many rows as columns.
struct mok_spot {
    int block, tile;
};
MOK_INLINE struct mok_spot mok_grouped(int blocks, int tiles, int at) {
    int group = at / (MOK_GROUP_BLOCKS * tiles) * MOK_GROUP_BLOCKS, here = mok_min(MOK_GROUP_BLOCKS, blocks - group);
    struct mok_spot spot = {group + (at - group * tiles) % here, (at - group * tiles) / here};
    return spot;
}

// First row and column of tile `tile` of a weight gradient of so many rows, whose numbers are sums of so many terms. With few
// terms, tiles come row by row: the fewer, the more of their time is writing, and what is written at once lies together.
struct mok_corner {
    int row, column;
};
MOK_INLINE struct mok_corner mok_d_weight_corner(const struct mok_shape *s, int rows, int terms, int tile) {
    int tiles = mok_ceil(s->hidden, MOK_D_WEIGHT_COLUMNS);
    struct mok_spot spot = {tile / tiles, tile % tiles};
    if (terms >= MOK_MANY_TERMS) spot = mok_grouped(mok_ceil(rows, MOK_D_WEIGHT_ROWS), tiles, tile);
    struct mok_corner corner = {spot.block * MOK_D_WEIGHT_ROWS, spot.tile * MOK_D_WEIGHT_COLUMNS};
    return corner;
}

// ---- the plan of one rank for one layer ----

// Where a row comes from and goes to. The same entry serves all four transfers.
struct mok_row {
    int32_t source; // rank that has the token; -1: padding
    int32_t slot;   // token * top_k + k there
    accum gate;
};

enum mok_pass { MOK_FORWARD, MOK_BACKWARD, MOK_PASSES };

struct mok_plan {
    int rank, experts;    // this rank, its experts
    int tokens;           // its own tokens: rows of the shared expert
    int blocks;           // row blocks, padding included
    int *expert_block;    // [experts + 1] first row block of each expert
    int *expert_rows;     // [experts] rows without padding
    int *block_expert;    // [blocks]
    int *walk;            // [blocks] the order in which movers and tiles take them, minibatch by minibatch
    struct mok_row *rows; // [blocks * MOK_BLOCK_ROWS]
    int *source_rows;     // [experts, ranks] rows before those of each source in a segment
    // GPU alone. There the arrays are in device memory, and what routes decide (blocks) is known in *device only.
    struct mok_plan *device;            // this plan, complete
    struct mok_task *tasks[MOK_PASSES]; // [task_total] of each pass, in order
    int task_total[MOK_PASSES];         // in *device
    // Of a row from another rank: the row of the same token that comes first in the walk, and can be copied in place of
    // being pulled. -1: this is that row, or one of this rank's own, or padding. With several macrobatches all are -1,
    // since rows of the next one could take the first row's place in the ring while it is copied.
    int *twin; // [blocks * MOK_BLOCK_ROWS]
};

MOK_INLINE int mok_ring_blocks(const struct mok_shape *s) { return s->ring_rows / MOK_BLOCK_ROWS; }
MOK_INLINE int mok_phase_blocks(const struct mok_shape *s) { return s->minibatch_rows / MOK_BLOCK_ROWS; }
// A rank without rows has one macrobatch of no blocks: its experts' gradients are stored there.
MOK_INLINE int mok_macrobatches(const struct mok_shape *s, const struct mok_plan *p) {
    return p->blocks ? mok_ceil(p->blocks, mok_ring_blocks(s)) : 1;
}
MOK_INLINE int mok_macrobatch_first(const struct mok_shape *s, int m) { return m * mok_ring_blocks(s); }
MOK_INLINE int mok_macrobatch_blocks(const struct mok_shape *s, const struct mok_plan *p, int m) {
    return mok_min(mok_ring_blocks(s), p->blocks - mok_macrobatch_first(s, m));
}
MOK_INLINE int mok_macrobatch_of(const struct mok_shape *s, int block) { return block / mok_ring_blocks(s); }
// First ring row of a block.
MOK_INLINE size_t mok_ring_row(const struct mok_shape *s, int block) {
    return (size_t)(block % mok_ring_blocks(s)) * MOK_BLOCK_ROWS;
}
// Rows of a block that are no padding.
MOK_INLINE int mok_block_rows(const struct mok_plan *p, int block) {
    int e = p->block_expert[block], before = (block - p->expert_block[e]) * MOK_BLOCK_ROWS;
    return mok_min(MOK_BLOCK_ROWS, p->expert_rows[e] - before);
}

// The blocks first .. end - 1 that an expert has in a macrobatch; none if first == end.
struct mok_stretch {
    int first, end;
};
MOK_INLINE struct mok_stretch mok_expert_stretch(const struct mok_shape *s, const struct mok_plan *p, int e, int m) {
    int first = mok_macrobatch_first(s, m), end = first + mok_macrobatch_blocks(s, p, m);
    if (first < p->expert_block[e]) first = p->expert_block[e];
    if (end > p->expert_block[e + 1]) end = p->expert_block[e + 1];
    struct mok_stretch stretch = {first, end > first ? end : first};
    return stretch;
}
// Their rows without padding.
MOK_INLINE int mok_stretch_rows(const struct mok_plan *p, int e, struct mok_stretch blocks) {
    if (blocks.first == blocks.end) return 0;
    int before = (blocks.first - p->expert_block[e]) * MOK_BLOCK_ROWS;
    return mok_min((blocks.end - blocks.first) * MOK_BLOCK_ROWS, p->expert_rows[e] - before);
}
// Macrobatches up to and with m in which an expert has rows.
MOK_INLINE int mok_expert_turns(const struct mok_shape *s, const struct mok_plan *p, int e, int m) {
    if (p->expert_block[e] == p->expert_block[e + 1]) return 0;
    int first = mok_macrobatch_of(s, p->expert_block[e]), last = mok_macrobatch_of(s, p->expert_block[e + 1] - 1);
    return m < first ? 0 : mok_min(m, last) - first + 1;
}
// The experts whose weight gradients macrobatch m takes part in: those with rows in it, and each expert without rows in
// exactly one macrobatch, since it may have zeros to store.
MOK_INLINE struct mok_stretch mok_macrobatch_experts(const struct mok_shape *s, const struct mok_plan *p, int m) {
    int first = mok_macrobatch_first(s, m), last = first + mok_macrobatch_blocks(s, p, m) - 1;
    struct mok_stretch experts = {0, p->experts};
    if (m > 0) {
        int before = p->block_expert[first - 1];
        experts.first = p->block_expert[first] == before ? before : before + 1;
    }
    if (m + 1 < mok_macrobatches(s, p)) experts.end = p->block_expert[last] + 1;
    return experts;
}

// The blocks that block `at` has both expert and minibatch in common with: a piece of the expert's segment. They are also
// places of the walk, which turns each piece in itself.
MOK_INLINE struct mok_stretch mok_piece(const struct mok_shape *s, const struct mok_plan *p, int at) {
    // Minibatches are counted from the start of a macrobatch, whose length is a multiple of theirs.
    int e = p->block_expert[at], phase = mok_phase_blocks(s), first = at / phase * phase, end = first + phase;
    if (first < p->expert_block[e]) first = p->expert_block[e];
    struct mok_stretch piece = {first, mok_min(end, p->expert_block[e + 1])};
    return piece;
}

// The walk. Segments are pulled and multiplied from the rows of the next rank on, so that not all ranks load the links of
// rank 0 first; where a minibatch cuts a segment, each piece turns on its own. Only the walk turns: rows stay where they
// are. Returns the block that comes at place `at` of the walk.
MOK_INLINE int mok_walk_at(const struct mok_shape *s, const struct mok_plan *p, int at) {
    int e = p->block_expert[at];
    struct mok_stretch piece = mok_piece(s, p, at);
    int next = p->source_rows[(size_t)e * (size_t)s->ranks + (size_t)((p->rank + 1) % s->ranks)];
    int start = p->expert_block[e] + next / MOK_BLOCK_ROWS;
    if (start < piece.first || start >= piece.end) start = piece.first;
    int moved = at - piece.first + start - piece.first, blocks = piece.end - piece.first;
    return piece.first + (moved >= blocks ? moved - blocks : moved);
}

// ---- counters ----

// Counters count up from 0 in every pass.
enum mok_counter_kind {
    MOK_READY,    // of a row block: groups pulled
    MOK_GATE_UP,  // gate/up tiles done: with hidden in forward, without in a replay
    MOK_D_HIDDEN, // d hidden tiles done
    MOK_OUT,      // down or d x tiles done
    MOK_PUSHED,   // groups pushed: the last thing that happens to a block in forward
    MOK_BLOCK_COUNTERS,
    MOK_EXPERT_D_HIDDEN = MOK_BLOCK_COUNTERS, // of an expert: d hidden tiles done
    MOK_EXPERT_D_WEIGHTS,                     // its weight-gradient tiles done
    MOK_SHARED_INNER,                         // of a block of own tokens: shared gate/up (d hidden) tiles done
    MOK_SHARED_ALL,                           // the same over all blocks
    MOK_TICKETS,                              // GPU: of enum mok_ticket
};

// Numbers that workers of a GPU count up together, each alone in a cache line.
enum mok_ticket {
    MOK_NEXT_TASK,
    MOK_NEXT_PULL,
    MOK_ARRIVED,  // workers that have begun
    MOK_GIVEN_UP, // workers that have lost a wait
    MOK_TICKET_KINDS
};

// Where a counter lies among all of them.
MOK_INLINE size_t mok_counter(const struct mok_shape *s, enum mok_counter_kind kind, int index) {
    size_t blocks = mok_capacity_blocks(s), experts = (size_t)mok_most_experts(s);
    size_t tokens = (size_t)mok_ceil(s->max_tokens, MOK_BLOCK_ROWS), at = (size_t)index;
    if (kind < MOK_BLOCK_COUNTERS) return (size_t)kind * blocks + at;
    at += MOK_BLOCK_COUNTERS * blocks;
    if (kind == MOK_EXPERT_D_HIDDEN) return at;
    if (kind == MOK_EXPERT_D_WEIGHTS) return at + experts;
    if (kind == MOK_SHARED_INNER) return at + 2 * experts;
    if (kind == MOK_SHARED_ALL) return at + 2 * experts + tokens;
    const size_t line = 128 / sizeof(int32_t);
    return ((MOK_BLOCK_COUNTERS * blocks + 2 * experts + tokens + 1) / line + 1 + (size_t)index) * line;
}
MOK_INLINE size_t mok_counter_total(const struct mok_shape *s) { return mok_counter(s, MOK_TICKETS, MOK_TICKET_KINDS); }

// Something to wait for: the counter has reached a value.
struct mok_wait {
    enum mok_counter_kind kind;
    int index, value;
};

enum { MOK_MOST_WAITS = 3 };

// ---- tasks ----

enum mok_task_kind {
    MOK_TASK_SHARED_GATE_UP,
    MOK_TASK_SHARED_DOWN,
    MOK_TASK_SHARED_D_HIDDEN,
    MOK_TASK_SHARED_D_X,
    MOK_TASK_SHARED_D_W2,
    MOK_TASK_SHARED_D_W13,
    MOK_TASK_GATE_UP, // forward: gate, up and hidden; in a replay gate and up
    MOK_TASK_DOWN,
    MOK_TASK_D_HIDDEN, // d hidden, then SwiGLU backward: d gate, d up, hidden, partial gate gradients
    MOK_TASK_D_X,
    MOK_TASK_D_W2,
    MOK_TASK_D_W13,
};

struct mok_task {
    int32_t kind;
    int32_t block;  // row block; of a shared expert's task, block of own tokens; of a weight gradient, macrobatch
    int32_t tile;   // column tile, or tile of the weight gradient
    int32_t expert; // number on this rank; -1: the shared one
};

// Two stages over the blocks of one macrobatch, `a` tasks of the first and `b` of the second per block. Phase by phase,
// with the second stage of a phase behind the first `lag` tasks of the next phase:
//   A(0)  A(1)[..lag) B(0) A(1)[lag..)  A(2)[..lag) B(1) A(2)[lag..) ...  B(last)
struct mok_place {
    int second;      // 0: first stage, 1: second
    int phase_first; // first block of its phase, counted from the macrobatch's
    int phase_blocks;
    int at; // task of this stage of this phase
};
MOK_INLINE struct mok_place mok_interleave(int index, int blocks, int phase, int a, int b, int lag) {
    int phases = mok_ceil(blocks, phase), first_blocks = mok_min(phase, blocks),
        last_blocks = blocks - (phases - 1) * phase;
    struct mok_place place = {0, 0, first_blocks, index};
    if (index < first_blocks * a) return place;
    index -= first_blocks * a;
    int p = 1 + index / (phase * (a + b)); // the phase whose A comes around here
    if (p > phases - 1) p = phases - 1;
    if (p > 0) {
        index -= (p - 1) * phase * (a + b);
        int own_blocks = p == phases - 1 ? last_blocks : phase, ahead = mok_min(lag, own_blocks * a);
        place.phase_first = p * phase;
        place.phase_blocks = own_blocks;
        if (index < ahead) {
            place.at = index;
            return place;
        }
        index -= ahead;
        if (index < phase * b) {
            place.second = 1;
            place.phase_first = (p - 1) * phase;
            place.phase_blocks = phase;
            place.at = index;
            return place;
        }
        index -= phase * b;
        if (index < own_blocks * a - ahead) {
            place.at = index + ahead;
            return place;
        }
        index -= own_blocks * a - ahead;
    }
    place.second = 1;
    place.phase_first = p * phase;
    place.phase_blocks = last_blocks;
    place.at = index;
    return place;
}

// Tasks of the shared expert, which come first: they hide the first pulls.
MOK_INLINE int mok_shared_tasks(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass) {
    int blocks = mok_ceil(p->tokens, MOK_BLOCK_ROWS);
    if (s->shared == 0) return 0;
    if (pass == MOK_FORWARD) return blocks * (mok_ceil(s->shared, MOK_GATE_UP_COLUMNS) + mok_out_tiles(s));
    return blocks * (mok_ceil(s->shared, MOK_D_HIDDEN_COLUMNS) + mok_out_tiles(s)) + mok_d_w2_tiles(s, s->shared) +
           mok_d_w13_tiles(s, s->shared);
}

// Whether backward replays a macrobatch: all but the one that forward left in the ring.
MOK_INLINE bool mok_is_replayed(const struct mok_shape *s, int m) { return m > 0 || s->replay; }

// First-stage tasks of one block.
MOK_INLINE int mok_first_stage(const struct mok_shape *s, enum mok_pass pass, int m) {
    if (pass == MOK_FORWARD) return mok_gate_up_tiles(s);
    return mok_d_hidden_tiles(s) + (mok_is_replayed(s, m) ? mok_gate_up_tiles(s) : 0);
}

MOK_INLINE int mok_macrobatch_tasks(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass, int m) {
    int tasks = mok_macrobatch_blocks(s, p, m) * (mok_first_stage(s, pass, m) + mok_out_tiles(s));
    if (pass == MOK_FORWARD) return tasks;
    struct mok_stretch experts = mok_macrobatch_experts(s, p, m);
    return tasks + (experts.end - experts.first) * mok_expert_d_weight_tiles(s);
}

// The macrobatch that comes at place i of a pass.
MOK_INLINE int mok_macrobatch_at(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass, int i) {
    return pass == MOK_FORWARD ? mok_macrobatches(s, p) - 1 - i : i;
}

MOK_INLINE int mok_task_total(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass) {
    int total = mok_shared_tasks(s, p, pass);
    for (int m = 0; m < mok_macrobatches(s, p); m++) total += mok_macrobatch_tasks(s, p, pass, m);
    return total;
}

MOK_INLINE struct mok_task mok_shared_task(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass,
                                           int index) {
    int blocks = mok_ceil(p->tokens, MOK_BLOCK_ROWS), out = mok_out_tiles(s);
    int inner = mok_ceil(s->shared, pass == MOK_FORWARD ? MOK_GATE_UP_COLUMNS : MOK_D_HIDDEN_COLUMNS);
    struct mok_task task = {pass == MOK_FORWARD ? MOK_TASK_SHARED_GATE_UP : MOK_TASK_SHARED_D_HIDDEN, 0, 0, -1};
    if (index < blocks * inner) {
        task.block = index / inner;
        task.tile = index % inner;
        return task;
    }
    index -= blocks * inner;
    if (index < blocks * out) {
        task.kind = pass == MOK_FORWARD ? MOK_TASK_SHARED_DOWN : MOK_TASK_SHARED_D_X;
        task.block = index / out;
        task.tile = index % out;
        return task;
    }
    index -= blocks * out;
    bool second = index >= mok_d_w2_tiles(s, s->shared);
    task.kind = second ? MOK_TASK_SHARED_D_W13 : MOK_TASK_SHARED_D_W2;
    task.tile = second ? index - mok_d_w2_tiles(s, s->shared) : index;
    return task;
}

// Task `index` of a macrobatch: its two stages in the order of the walk, then the weight gradients, expert by expert. They
// come last because they need no row of another rank: they hide the pushes.
MOK_INLINE struct mok_task mok_macrobatch_task(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass,
                                               int m, int index) {
    int blocks = mok_macrobatch_blocks(s, p, m), first = mok_macrobatch_first(s, m);
    int a = mok_first_stage(s, pass, m), out = mok_out_tiles(s);
    struct mok_task task = {0, m, 0, 0};
    if (index >= blocks * (a + out)) {
        int w2 = mok_d_w2_tiles(s, s->intermediate), both = mok_expert_d_weight_tiles(s);
        index -= blocks * (a + out);
        task.expert = mok_macrobatch_experts(s, p, m).first + index / both;
        task.tile = index % both;
        task.kind = task.tile < w2 ? MOK_TASK_D_W2 : MOK_TASK_D_W13;
        if (task.tile >= w2) task.tile -= w2;
        return task;
    }
    struct mok_place place = mok_interleave(index, blocks, mok_phase_blocks(s), a, out, s->lag);
    int tiles = out,
        replayed = pass == MOK_BACKWARD && mok_is_replayed(s, m) ? place.phase_blocks * mok_gate_up_tiles(s) : 0;
    if (place.second) {
        task.kind = pass == MOK_FORWARD ? MOK_TASK_DOWN : MOK_TASK_D_X;
    } else if (pass == MOK_FORWARD || place.at < replayed) {
        task.kind = MOK_TASK_GATE_UP;
        tiles = mok_gate_up_tiles(s);
    } else {
        task.kind = MOK_TASK_D_HIDDEN;
        tiles = mok_d_hidden_tiles(s);
        place.at -= replayed;
    }
    int phase_first = first + place.phase_first, at = phase_first + place.at / tiles; // of the walk
    task.tile = place.at % tiles;
    if (task.kind == MOK_TASK_D_X) {
        struct mok_stretch piece = mok_piece(s, p, at); // they share the expert's weights
        struct mok_spot spot =
            mok_grouped(piece.end - piece.first, tiles, place.at - (piece.first - phase_first) * tiles);
        at = piece.first + spot.block;
        task.tile = spot.tile;
    }
    task.block = p->walk[at];
    task.expert = p->block_expert[task.block];
    return task;
}

// Task `index` of a pass, 0 <= index < mok_task_total.
MOK_INLINE struct mok_task mok_task_at(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass,
                                       int index) {
    int shared = mok_shared_tasks(s, p, pass), i = 0;
    if (index < shared) return mok_shared_task(s, p, pass, index);
    index -= shared;
    for (;; i++) {
        int m = mok_macrobatch_at(s, p, pass, i), tasks = mok_macrobatch_tasks(s, p, pass, m);
        if (index < tasks) return mok_macrobatch_task(s, p, pass, m, index);
        index -= tasks;
    }
}

MOK_INLINE void mok_add_wait(struct mok_wait waits[MOK_MOST_WAITS], int *count, enum mok_counter_kind kind, int index,
                             int value) {
    struct mok_wait wait = {kind, index, value};
    if (value > 0) waits[(*count)++] = wait;
}

// What a task waits for; returns how many.
MOK_INLINE int mok_task_waits(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass,
                              struct mok_task task, struct mok_wait waits[MOK_MOST_WAITS]) {
    int count = 0, e = task.expert, m = task.block, token_blocks = mok_ceil(p->tokens, MOK_BLOCK_ROWS);
    int shared_inner = mok_ceil(s->shared, pass == MOK_FORWARD ? MOK_GATE_UP_COLUMNS : MOK_D_HIDDEN_COLUMNS);
    switch (task.kind) {
    case MOK_TASK_SHARED_DOWN:
    case MOK_TASK_SHARED_D_X:
        mok_add_wait(waits, &count, MOK_SHARED_INNER, task.block, shared_inner);
        break;
    case MOK_TASK_SHARED_D_W2:
    case MOK_TASK_SHARED_D_W13:
        mok_add_wait(waits, &count, MOK_SHARED_ALL, 0, token_blocks * shared_inner);
        break;
    case MOK_TASK_GATE_UP:
        mok_add_wait(waits, &count, MOK_READY, task.block, mok_groups(s));
        break;
    case MOK_TASK_DOWN:
        mok_add_wait(waits, &count, MOK_GATE_UP, task.block, mok_gate_up_tiles(s));
        break;
    case MOK_TASK_D_HIDDEN: {
        // An expert's rows of this macrobatch begin when its gradient has those of the one before: it goes on from there, and
        // the expert's counter of d hidden tiles must not run ahead of the weight gradients that wait for it.
        int before = mok_macrobatch_of(s, task.block) - 1;
        mok_add_wait(waits, &count, MOK_READY, task.block, mok_groups(s));
        if (mok_is_replayed(s, before + 1)) mok_add_wait(waits, &count, MOK_GATE_UP, task.block, mok_gate_up_tiles(s));
        mok_add_wait(waits, &count, MOK_EXPERT_D_WEIGHTS, e,
                     mok_expert_d_weight_tiles(s) * mok_expert_turns(s, p, e, before));
        break;
    }
    case MOK_TASK_D_X:
        mok_add_wait(waits, &count, MOK_D_HIDDEN, task.block, mok_d_hidden_tiles(s));
        break;
    case MOK_TASK_D_W2:
    case MOK_TASK_D_W13:
        mok_add_wait(waits, &count, MOK_EXPERT_D_HIDDEN, e,
                     (mok_expert_stretch(s, p, e, m).end - p->expert_block[e]) * mok_d_hidden_tiles(s));
        break;
    default:
        break;
    }
    return count;
}

// The counters that a finished task raises by one; returns how many.
MOK_INLINE int mok_task_signals(struct mok_task task, struct mok_wait signals[MOK_MOST_WAITS]) {
    int count = 0;
    switch (task.kind) {
    case MOK_TASK_SHARED_GATE_UP:
    case MOK_TASK_SHARED_D_HIDDEN:
        mok_add_wait(signals, &count, MOK_SHARED_INNER, task.block, 1);
        mok_add_wait(signals, &count, MOK_SHARED_ALL, 0, 1);
        break;
    case MOK_TASK_GATE_UP:
        mok_add_wait(signals, &count, MOK_GATE_UP, task.block, 1);
        break;
    case MOK_TASK_D_HIDDEN:
        mok_add_wait(signals, &count, MOK_D_HIDDEN, task.block, 1);
        mok_add_wait(signals, &count, MOK_EXPERT_D_HIDDEN, task.expert, 1);
        break;
    case MOK_TASK_DOWN:
    case MOK_TASK_D_X:
        mok_add_wait(signals, &count, MOK_OUT, task.block, 1);
        break;
    case MOK_TASK_D_W2:
    case MOK_TASK_D_W13:
        mok_add_wait(signals, &count, MOK_EXPERT_D_WEIGHTS, task.expert, 1);
        break;
    default:
        break;
    }
    return count;
}

// ---- movers ----

// One mover's ticket: rows first .. first + move_rows - 1 of a block.
struct mok_move {
    int block, first;
};

// Tickets of each of the two queues.
MOK_INLINE int mok_move_total(const struct mok_shape *s, const struct mok_plan *p) { return p->blocks * mok_groups(s); }

// Ticket `index` of either queue: macrobatch by macrobatch in the order of the pass, in the order of the walk.
MOK_INLINE struct mok_move mok_move_at(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass,
                                       int index) {
    int groups = mok_groups(s), at = index / groups, ring = mok_ring_blocks(s), m = 0;
    if (pass == MOK_FORWARD) {
        m = mok_macrobatches(s, p) - 1;
        int last = mok_macrobatch_blocks(s, p, m);
        if (at < last) {
            at += mok_macrobatch_first(s, m);
        } else {
            m -= 1 + (at - last) / ring;
            at = mok_macrobatch_first(s, m) + (at - last) % ring;
        }
    }
    struct mok_move move = {p->walk[at], index % groups * s->move_rows};
    return move;
}

// Whether a pull also brings the token's input again, besides the gradient of its output.
MOK_INLINE bool mok_pull_replays(const struct mok_shape *s, enum mok_pass pass, int block) {
    return pass == MOK_BACKWARD && mok_is_replayed(s, mok_macrobatch_of(s, block));
}

// The block that had this one's place in the ring before it in the same pass; -1: none.
MOK_INLINE int mok_block_before(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass, int block) {
    int ring = mok_ring_blocks(s), before = pass == MOK_FORWARD ? block + ring : block - ring;
    return before < p->blocks ? before : -1;
}

// What a pull waits for: that its place in the ring is free. Its rows' predecessors there have been pushed, which is the
// last that happens to them in forward; in backward the weight gradients of their expert have read them too.
MOK_INLINE int mok_pull_waits(const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass, int block,
                              struct mok_wait waits[MOK_MOST_WAITS]) {
    int count = 0, before = mok_block_before(s, p, pass, block);
    if (before < 0) return 0;
    mok_add_wait(waits, &count, MOK_PUSHED, before, mok_groups(s));
    if (pass == MOK_BACKWARD) {
        int e = p->block_expert[before], turns = mok_expert_turns(s, p, e, mok_macrobatch_of(s, before));
        mok_add_wait(waits, &count, MOK_EXPERT_D_WEIGHTS, e, mok_expert_d_weight_tiles(s) * turns);
    }
    return count;
}

// What a push waits for: all column tiles of its block.
MOK_INLINE struct mok_wait mok_push_wait(const struct mok_shape *s, int block) {
    struct mok_wait wait = {MOK_OUT, block, mok_out_tiles(s)};
    return wait;
}

#endif
