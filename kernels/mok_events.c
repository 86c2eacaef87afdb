#include "kernels/mok_events.h"

#include <stdio.h>
#include <string.h>

// ---- events ----

const char *mok_task_name(struct mok_task task) {
    static const char *const names[] = {
        [MOK_TASK_SHARED_GATE_UP] = "shared gate/up",
        [MOK_TASK_SHARED_DOWN] = "shared down",
        [MOK_TASK_SHARED_D_HIDDEN] = "shared d hidden",
        [MOK_TASK_SHARED_D_X] = "shared d x",
        [MOK_TASK_SHARED_D_W2] = "shared d w2",
        [MOK_TASK_SHARED_D_W13] = "shared d w13",
        [MOK_TASK_GATE_UP] = "gate/up",
        [MOK_TASK_DOWN] = "down",
        [MOK_TASK_D_HIDDEN] = "d hidden",
        [MOK_TASK_D_X] = "d x",
        [MOK_TASK_D_W2] = "d w2",
        [MOK_TASK_D_W13] = "d w13",
    };
    return task.kind < 0 ? "none" : names[task.kind];
}

bool mok_is_d_weights(struct mok_task task) { return task.kind == MOK_TASK_D_W2 || task.kind == MOK_TASK_D_W13; }

struct trace_event mok_event_of(const struct mok_events *e, const char *name, struct mok_task task, int first_row,
                                int bytes) {
    bool rows = task.expert >= 0 && !mok_is_d_weights(task);
    return (struct trace_event){.name = name,
                                .block = e->layer,
                                .expert = task.expert < 0 ? -1 : e->first_expert + task.expert,
                                .phase = rows ? task.block / mok_phase_blocks(e->shape) : -1,
                                .first_row = rows ? task.block * MOK_BLOCK_ROWS + first_row : -1,
                                .bytes = bytes};
}

// ---- tracks of a GPU's blocks: those that compute, that pull, that push ----

int mok_block_tracks(struct mok_blocks b) { return 2 * b.all + mok_pullers(b); }

static int pull_track(struct mok_blocks b, int puller) { return b.all + puller; }
static int push_track(struct mok_blocks b, int block) { return b.all + mok_pullers(b) + block; }

void mok_name_block_track(char name[32], struct mok_blocks b, int track) {
    const size_t size = 32;
    int puller = track - pull_track(b, 0), pusher = track - push_track(b, 0);
    if (puller < 0)
        snprintf(name, size, "block %d", track);
    else if (pusher >= 0)
        snprintf(name, size, "block %d push", pusher);
    else if (b.movers)
        snprintf(name, size, "mover %d pull %d", puller / MOK_MOVER_WARPS, puller % MOK_MOVER_WARPS);
    else
        snprintf(name, size, "block %d pull", puller);
}

// ---- what they recorded ----

// A lane, as far as there was room for it.
struct lane {
    const struct mok_record *records;
    int count;
};

// From a log to a trace.
struct reading {
    struct trace *to;
    const struct mok_events *e;
    const struct mok_log *log;
    struct mok_blocks blocks;
    struct mok_moment moment;
};

// What did not fit is counted by the track.
static struct lane take_lane(const struct reading *r, enum mok_recorder kind, int number, int track) {
    int lane = mok_lane(kind, r->blocks.all, number), all = r->log->counts[lane];
    int count = all < MOK_RECORDS ? all : MOK_RECORDS;
    r->to->tracks[TRACE_TRACK_WORKER + track].dropped += (size_t)(all - count);
    return (struct lane){r->log->records + (size_t)lane * MOK_RECORDS, count};
}

static double seconds_of(const struct reading *r, uint64_t nanoseconds) {
    return r->moment.seconds + 1e-9 * (double)(int64_t)(nanoseconds - r->moment.nanoseconds);
}

static void add(const struct reading *r, int track, struct trace_event event, uint64_t begin, uint64_t end) {
    event.begin = seconds_of(r, begin);
    event.end = seconds_of(r, end);
    trace_add(r->to, TRACE_TRACK_WORKER + track, event);
}

static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

static bool is_same_task(struct mok_task a, struct mok_task b) { return memcmp(&a, &b, sizeof a) == 0; }

// A wait is of the next task, or of one behind it.
static void add_tasks(const struct reading *r, int block) {
    struct lane waits = take_lane(r, MOK_LOADER, block, block), tasks = take_lane(r, MOK_MULTIPLIER, block, block);
    const struct mok_record *wait = waits.records, *last = wait + waits.count;
    uint64_t idle = 0;
    for (int i = 0; i < tasks.count; i++) {
        const struct mok_record *task = &tasks.records[i];
        if (wait < last && is_same_task(wait->task, task->task)) {
            uint64_t begin = later(wait->begin, idle), end = earlier(wait->end, task->begin);
            if (begin < end) add(r, block, mok_event_of(r->e, "wait", task->task, 0, 0), begin, end);
            wait++;
        }
        add(r, block, mok_event_of(r->e, mok_task_name(task->task), task->task, 0, 0), task->begin, task->end);
        idle = task->end;
    }
}

static void add_pulls(const struct reading *r, int puller) {
    int track = pull_track(r->blocks, puller);
    struct lane pulls = take_lane(r, MOK_PULLER, puller, track);
    for (int i = 0; i < pulls.count; i++) {
        const struct mok_record *p = &pulls.records[i];
        struct mok_task rows = {-1, p->task.block, 0, p->task.expert};
        add(r, track, mok_event_of(r->e, "pull", rows, p->task.tile, p->bytes), p->begin, p->end);
    }
}

// The second half has pushed the same tiles, but for those where all its rows are padding. Where one is at the next tile
// already, this one's end counts.
static void add_pushes(const struct reading *r, int block) {
    int track = push_track(r->blocks, block);
    struct lane upper = take_lane(r, MOK_STORER, block, track);
    struct lane lower = take_lane(r, MOK_STORER, r->blocks.all + block, track);
    const struct mok_record *l = lower.records, *last = l + lower.count;
    uint64_t done = 0;
    for (int i = 0; i < upper.count; i++) {
        struct mok_record both = upper.records[i];
        if (l < last && is_same_task(l->task, both.task)) {
            both.begin = earlier(both.begin, l->begin);
            both.end = later(both.end, l->end);
            both.bytes += l->bytes;
            l++;
        }
        uint64_t begin = later(both.begin, done), end = later(both.end, begin);
        add(r, track, mok_event_of(r->e, "push", both.task, 0, both.bytes), begin, end);
        done = end;
    }
}

void mok_add_events(struct trace *t, const struct mok_events *e, const struct mok_log *log, struct mok_blocks b,
                    struct mok_moment moment) {
    struct reading r = {t, e, log, b, moment};
    for (int block = 0; block < b.all; block++) add_tasks(&r, block);
    for (int puller = 0; puller < mok_pullers(b); puller++) add_pulls(&r, puller);
    for (int block = 0; block < b.all; block++) add_pushes(&r, block);
}
