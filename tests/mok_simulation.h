// A pass of the megakernel without its arithmetic: workers as state machines over the plan's own functions, and buffers
// whose cells hold what is in them instead of numbers.
//
// A cell is a part of a buffer that is written at once: of a row buffer, a tile's columns (or a mover's rows) of one row
// block of the ring. Its value is 0 for nothing, block + 1 for the complete content of that block, SIM_BUSY while somebody
// writes; of a weight gradient, the number of macrobatches added. A job (a task, a pull, a push) has a list of accesses,
// taken from kernels/cpu/mok_tasks.c. It begins and ends in two steps of its worker; at both, what it reads must be
// complete and of its own block, and what it writes must be what its place held before in the order of the rows. So every
// overwriting too early, reading too early, or adding out of order is seen at the step at which it happens.
#ifndef MOK_TESTS_MOK_SIMULATION_H
#define MOK_TESTS_MOK_SIMULATION_H

#include "tests/test.h"

#include "kernels/mok_plan.h"
#include "kernels/random.h"

enum { SIM_MOST_WORKERS = 5, SIM_BUSY = -1, SIM_PULL = 100, SIM_PUSH = 101, SIM_ALL = 1000 };

enum sim_buffer {
    SIM_X, // row buffers: cells [ring blocks][parts]
    SIM_DY,
    SIM_GATE_UP,
    SIM_HIDDEN,
    SIM_OUT,
    SIM_D_GATE_UP,
    SIM_PARTIALS,
    SIM_RINGS,
    SIM_SLOTS = SIM_RINGS, // [blocks][groups]
    SIM_D_W2,              // [experts][tiles]
    SIM_D_W13,
    SIM_SHARED_INNER, // [blocks of own tokens][tiles]
    SIM_SHARED_OUT,
    SIM_SHARED_D_W2, // [1][tiles]
    SIM_SHARED_D_W13,
    SIM_BUFFERS
};

static const char *const sim_buffer_names[] = {
    "x_rows", "dy_rows", "gate_up", "hidden",       "out",        "d_gate_up",   "partials",
    "slots",  "d_w2",    "d_w13",   "shared inner", "shared out", "shared d_w2", "shared d_w13",
};

struct sim_access {
    int cell;
    bool writes;
    int16_t from, to; // read: the value wanted; write: the value before and after
};

struct sim_job {
    int kind; // of a task, or SIM_PULL, SIM_PUSH
    int block, part, expert;
    int access_first, access_end;
    int waits, signals;
    struct {
        int counter, value;
    } wait[MOK_MOST_WAITS];
    int signal[MOK_MOST_WAITS];
};

// A wait of jobs of one kind that a test makes weaker to see that somebody notices; kind -1: none.
struct sim_change {
    int kind;
    enum mok_counter_kind counter;
    int less; // taken from values that are larger, or SIM_ALL: no wait at all
};

static const struct sim_change sim_no_change = {-1, MOK_READY, 0};

// Jobs: tasks, then pulls, then pushes, each in the order of their tickets.
struct sim {
    const struct mok_shape *s;
    const struct mok_plan *p;
    enum mok_pass pass;
    struct sim_change change;
    int changed; // waits that are weaker by it
    int tasks, moves, counters, cells;
    int first[SIM_BUFFERS + 1], parts[SIM_BUFFERS];
    struct sim_job *jobs;
    struct sim_access *accesses;
    int access_count, access_room;
    int16_t *before, *after; // [cells] at the begin and the end of the pass
    char error[256];
};

// ---- building ----

static inline int sim_cell(const struct sim *m, enum sim_buffer buffer, int place, int part) {
    assert_true(part < m->parts[buffer]);
    int cell = m->first[buffer] + place * m->parts[buffer] + part;
    assert_in_range(cell, m->first[buffer], m->first[buffer + 1] - 1);
    return cell;
}

static inline void sim_access(struct sim *m, int cell, bool writes, int from, int to) {
    if (m->access_count == m->access_room) {
        m->access_room = 2 * m->access_room + 256;
        m->accesses = realloc(m->accesses, (size_t)m->access_room * sizeof *m->accesses);
        if (!m->accesses) abort();
    }
    m->accesses[m->access_count++] = (struct sim_access){cell, writes, (int16_t)from, (int16_t)to};
}

// All parts of a block's place in the ring; or one part.
static inline void sim_read_part(struct sim *m, enum sim_buffer buffer, int block, int part) {
    sim_access(m, sim_cell(m, buffer, block % mok_ring_blocks(m->s), part), false, block + 1, 0);
}
static inline void sim_read(struct sim *m, enum sim_buffer buffer, int block) {
    for (int part = 0; part < m->parts[buffer]; part++) sim_read_part(m, buffer, block, part);
}

// The place in the ring held the block one ring away, if there is one: behind it in forward, before it in backward.
static inline void sim_write(struct sim *m, enum sim_buffer buffer, int block, int part) {
    int ring = mok_ring_blocks(m->s), before = m->pass == MOK_FORWARD ? block + ring : block - ring;
    if (before < 0 || before >= m->p->blocks) before = -1;
    sim_access(m, sim_cell(m, buffer, block % ring, part), true, before + 1, block + 1);
}

static inline void sim_task_accesses(struct sim *m, struct mok_task t) {
    const struct mok_shape *s = m->s;
    const struct mok_plan *p = m->p;
    bool forward = m->pass == MOK_FORWARD;
    int b = t.block, tile = t.tile, token_blocks = mok_ceil(p->tokens, MOK_BLOCK_ROWS);
    switch (t.kind) {
    case MOK_TASK_SHARED_GATE_UP:
    case MOK_TASK_SHARED_D_HIDDEN:
        sim_access(m, sim_cell(m, SIM_SHARED_INNER, b, tile), true, 0, 1);
        break;
    case MOK_TASK_SHARED_DOWN:
    case MOK_TASK_SHARED_D_X:
        for (int i = 0; i < m->parts[SIM_SHARED_INNER]; i++)
            sim_access(m, sim_cell(m, SIM_SHARED_INNER, b, i), false, 1, 0);
        sim_access(m, sim_cell(m, SIM_SHARED_OUT, b, tile), true, 0, 1);
        break;
    case MOK_TASK_SHARED_D_W2:
    case MOK_TASK_SHARED_D_W13:
        for (int i = 0; i < token_blocks * m->parts[SIM_SHARED_INNER]; i++)
            sim_access(m, m->first[SIM_SHARED_INNER] + i, false, 1, 0);
        sim_access(m, sim_cell(m, t.kind == MOK_TASK_SHARED_D_W2 ? SIM_SHARED_D_W2 : SIM_SHARED_D_W13, 0, tile), true,
                   0, 1);
        break;
    case MOK_TASK_GATE_UP:
        sim_read(m, SIM_X, b);
        sim_write(m, SIM_GATE_UP, b, tile);
        if (forward) sim_write(m, SIM_HIDDEN, b, tile);
        break;
    case MOK_TASK_DOWN:
        sim_read(m, SIM_HIDDEN, b);
        sim_write(m, SIM_OUT, b, tile);
        break;
    case MOK_TASK_D_HIDDEN: {
        int each = MOK_D_HIDDEN_COLUMNS / MOK_GATE_UP_COLUMNS;
        sim_read(m, SIM_DY, b);
        for (int i = tile * each; i < mok_min((tile + 1) * each, m->parts[SIM_GATE_UP]); i++)
            sim_read_part(m, SIM_GATE_UP, b, i);
        sim_write(m, SIM_HIDDEN, b, tile);
        sim_write(m, SIM_D_GATE_UP, b, tile);
        sim_write(m, SIM_PARTIALS, b, tile);
        break;
    }
    case MOK_TASK_D_X:
        sim_read(m, SIM_D_GATE_UP, b);
        sim_write(m, SIM_OUT, b, tile);
        break;
    default: {
        bool w2 = t.kind == MOK_TASK_D_W2;
        int ring = mok_ring_blocks(s), first = p->expert_block[t.expert], end = p->expert_block[t.expert + 1];
        int turn = first == end ? 0 : b - first / ring; // macrobatches of the expert before this one
        int terms = mok_stretch_rows(p, t.expert, mok_expert_stretch(s, p, t.expert, b));
        for (int block = first; block < end; block++) {
            if (block / ring != b) continue;
            if (w2)
                sim_read_part(m, SIM_HIDDEN, block,
                              mok_d_weight_corner(s, s->intermediate, terms, tile).row / MOK_D_HIDDEN_COLUMNS);
            else
                sim_read(m, SIM_D_GATE_UP, block);
            sim_read(m, w2 ? SIM_DY : SIM_X, block);
        }
        sim_access(m, sim_cell(m, w2 ? SIM_D_W2 : SIM_D_W13, t.expert, tile), true, turn, turn + 1);
    }
    }
}

static inline void sim_move_accesses(struct sim *m, int kind, int block, int group) {
    if (kind == SIM_PULL) {
        if (m->pass == MOK_FORWARD || mok_pull_replays(m->s, m->pass, block)) sim_write(m, SIM_X, block, group);
        if (m->pass == MOK_BACKWARD) sim_write(m, SIM_DY, block, group);
        return;
    }
    sim_read(m, SIM_OUT, block);
    if (m->pass == MOK_BACKWARD) sim_read(m, SIM_PARTIALS, block);
    sim_access(m, sim_cell(m, SIM_SLOTS, block, group), true, 0, 1);
}

static inline void sim_set_waits(struct sim *m, struct sim_job *job, const struct mok_wait *waits, int count) {
    for (int i = 0; i < count; i++) {
        int value = waits[i].value, less = m->change.less;
        if (m->change.kind == job->kind && m->change.counter == waits[i].kind && (value > less || less == SIM_ALL)) {
            value -= less;
            m->changed++;
        }
        job->wait[job->waits].counter = (int)mok_counter(m->s, waits[i].kind, waits[i].index);
        job->wait[job->waits].value = value;
        job->waits++;
    }
}

static inline void sim_add_task(struct sim *m, int index) {
    struct mok_task t = mok_task_at(m->s, m->p, m->pass, index);
    struct sim_job *job = &m->jobs[index];
    struct mok_wait waits[MOK_MOST_WAITS];
    *job = (struct sim_job){.kind = t.kind, .block = t.block, .part = t.tile, .expert = t.expert};
    job->access_first = m->access_count;
    sim_task_accesses(m, t);
    job->access_end = m->access_count;
    sim_set_waits(m, job, waits, mok_task_waits(m->s, m->p, m->pass, t, waits));
    job->signals = mok_task_signals(t, waits);
    for (int i = 0; i < job->signals; i++) job->signal[i] = (int)mok_counter(m->s, waits[i].kind, waits[i].index);
}

static inline void sim_add_move(struct sim *m, int kind, int index) {
    struct mok_move move = mok_move_at(m->s, m->p, m->pass, index);
    struct sim_job *job = &m->jobs[m->tasks + (kind == SIM_PUSH ? m->moves : 0) + index];
    struct mok_wait waits[MOK_MOST_WAITS];
    int count = 1, group = move.first / m->s->move_rows;
    *job = (struct sim_job){.kind = kind, .block = move.block, .part = group, .expert = -1, .signals = 1};
    job->access_first = m->access_count;
    sim_move_accesses(m, kind, move.block, group);
    job->access_end = m->access_count;
    if (kind == SIM_PULL)
        count = mok_pull_waits(m->s, m->p, m->pass, move.block, waits);
    else
        waits[0] = mok_push_wait(m->s, move.block);
    sim_set_waits(m, job, waits, count);
    job->signal[0] = (int)mok_counter(m->s, kind == SIM_PULL ? MOK_READY : MOK_PUSHED, move.block);
}

static inline void sim_lay_out(struct sim *m) {
    const struct mok_shape *s = m->s;
    bool forward = m->pass == MOK_FORWARD;
    int groups = mok_groups(s), gate_up = mok_gate_up_tiles(s), d_hidden = mok_d_hidden_tiles(s);
    int out = mok_out_tiles(s), tokens = mok_ceil(m->p->tokens, MOK_BLOCK_ROWS), ring = mok_ring_blocks(s);
    int shared_inner = mok_ceil(s->shared, forward ? MOK_GATE_UP_COLUMNS : MOK_D_HIDDEN_COLUMNS);
    const struct {
        int places, parts;
    } sizes[SIM_BUFFERS] = {
        [SIM_X] = {ring, groups},
        [SIM_DY] = {ring, forward ? 0 : groups},
        [SIM_GATE_UP] = {ring, gate_up},
        [SIM_HIDDEN] = {ring, forward ? gate_up : d_hidden},
        [SIM_OUT] = {ring, out},
        [SIM_D_GATE_UP] = {ring, forward ? 0 : d_hidden},
        [SIM_PARTIALS] = {ring, forward ? 0 : d_hidden},
        [SIM_SLOTS] = {m->p->blocks, groups},
        [SIM_D_W2] = {m->p->experts, forward ? 0 : mok_d_w2_tiles(s, s->intermediate)},
        [SIM_D_W13] = {m->p->experts, forward ? 0 : mok_d_w13_tiles(s, s->intermediate)},
        [SIM_SHARED_INNER] = {tokens, shared_inner},
        [SIM_SHARED_OUT] = {tokens, s->shared ? out : 0},
        [SIM_SHARED_D_W2] = {1, forward ? 0 : mok_d_w2_tiles(s, s->shared)},
        [SIM_SHARED_D_W13] = {1, forward ? 0 : mok_d_w13_tiles(s, s->shared)},
    };
    for (int i = 0; i < SIM_BUFFERS; i++) {
        m->parts[i] = sizes[i].parts;
        m->first[i + 1] = m->first[i] + sizes[i].places * sizes[i].parts;
    }
    m->cells = m->first[SIM_BUFFERS];
}

// What forward leaves for backward, and what both have at the end.
static inline void sim_set_edges(struct sim *m) {
    int ring = mok_ring_blocks(m->s), blocks = m->p->blocks;
    for (int buffer = 0; buffer < SIM_RINGS; buffer++)
        for (int place = 0; place < mok_min(ring, blocks); place++)
            for (int part = 0; part < m->parts[buffer]; part++) {
                int cell = sim_cell(m, (enum sim_buffer)buffer, place, part);
                int last = m->pass == MOK_FORWARD ? place : place + (blocks - 1 - place) / ring * ring;
                bool kept = m->pass == MOK_BACKWARD && !m->s->replay && (buffer == SIM_X || buffer == SIM_GATE_UP);
                m->before[cell] = (int16_t)(kept ? place + 1 : 0);
                m->after[cell] = (int16_t)(last + 1);
            }
    for (int cell = m->first[SIM_SLOTS]; cell < m->cells; cell++) m->after[cell] = 1;
    for (int e = 0; e < m->p->experts; e++) {
        int first = m->p->expert_block[e], end = m->p->expert_block[e + 1];
        int turns = first == end ? 1 : (end - 1) / ring - first / ring + 1;
        for (int i = 0; i < m->parts[SIM_D_W2]; i++) m->after[sim_cell(m, SIM_D_W2, e, i)] = (int16_t)turns;
        for (int i = 0; i < m->parts[SIM_D_W13]; i++) m->after[sim_cell(m, SIM_D_W13, e, i)] = (int16_t)turns;
    }
}

static inline void sim_open(struct sim *m, const struct mok_shape *s, const struct mok_plan *p, enum mok_pass pass,
                            struct sim_change change) {
    *m = (struct sim){.s = s, .p = p, .pass = pass, .change = change};
    m->tasks = mok_task_total(s, p, pass);
    m->moves = mok_move_total(s, p);
    m->counters = (int)mok_counter_total(s);
    sim_lay_out(m);
    m->jobs = calloc((size_t)(m->tasks + 2 * m->moves) + 1, sizeof *m->jobs);
    m->before = calloc((size_t)m->cells + 1, sizeof *m->before);
    m->after = calloc((size_t)m->cells + 1, sizeof *m->after);
    if (!m->jobs || !m->before || !m->after) abort();
    sim_set_edges(m);
    for (int i = 0; i < m->tasks; i++) sim_add_task(m, i);
    for (int i = 0; i < m->moves; i++) sim_add_move(m, SIM_PULL, i);
    for (int i = 0; i < m->moves; i++) sim_add_move(m, SIM_PUSH, i);
}

static inline void sim_close(struct sim *m) {
    free(m->jobs);
    free(m->accesses);
    free(m->before);
    free(m->after);
}

// ---- states ----

enum sim_role {
    SIM_MIXED,      // takes tasks, and moves when it waits
    SIM_MULTIPLIER, // takes tasks
    SIM_MOVER,      // moves until all pushes are taken, then multiplies
    SIM_LAST_MOVER, // mixed, no task left: moves until all pushes are taken
    SIM_DONE,
};

struct sim_worker {
    int16_t role, held, running; // held: the task of its ticket; running: the job begun. -1: none
};

// No padding: states are compared and hashed as bytes.
struct sim_state {
    int16_t next_task, next_pull, next_push, workers;
    struct sim_worker worker[SIM_MOST_WORKERS];
    int16_t values[]; // counters, then cells
};

static inline size_t sim_state_bytes(const struct sim *m) {
    size_t bytes = sizeof(struct sim_state) + (size_t)(m->counters + m->cells) * sizeof(int16_t);
    return (bytes + 7) / 8 * 8;
}

static inline void sim_start(const struct sim *m, struct sim_state *st, int workers, int movers) {
    memset(st, 0, sim_state_bytes(m));
    st->workers = (int16_t)workers;
    for (int i = 0; i < workers; i++) {
        enum sim_role role = i < movers ? SIM_MOVER : movers ? SIM_MULTIPLIER : SIM_MIXED;
        st->worker[i] = (struct sim_worker){(int16_t)role, -1, -1};
    }
    memcpy(st->values + m->counters, m->before, (size_t)m->cells * sizeof(int16_t));
}

static inline const char *sim_fail(struct sim *m, const struct sim_job *job, const char *when, int cell, int found,
                                   int wanted) {
    int buffer = 0;
    while (cell >= m->first[buffer + 1]) buffer++;
    snprintf(m->error, sizeof m->error,
             "%s of job kind %d (block %d, part %d, expert %d) in pass %d: cell %d of %s holds %d, wanted %d", when,
             job->kind, job->block, job->part, job->expert, m->pass, cell - m->first[buffer], sim_buffer_names[buffer],
             found, wanted);
    return m->error;
}

static inline const char *sim_begin_job(struct sim *m, struct sim_state *st, const struct sim_job *job) {
    int16_t *cells = st->values + m->counters;
    for (int i = job->access_first; i < job->access_end; i++) {
        const struct sim_access *a = &m->accesses[i];
        if (cells[a->cell] != a->from) return sim_fail(m, job, "begin", a->cell, cells[a->cell], a->from);
        if (a->writes) cells[a->cell] = SIM_BUSY;
    }
    return NULL;
}

static inline const char *sim_end_job(struct sim *m, struct sim_state *st, const struct sim_job *job) {
    int16_t *cells = st->values + m->counters;
    for (int i = job->access_first; i < job->access_end; i++) {
        const struct sim_access *a = &m->accesses[i];
        int wanted = a->writes ? SIM_BUSY : a->from;
        if (cells[a->cell] != wanted) return sim_fail(m, job, "end", a->cell, cells[a->cell], wanted);
        if (a->writes) cells[a->cell] = a->to;
    }
    for (int i = 0; i < job->signals; i++) st->values[job->signal[i]]++;
    return NULL;
}

static inline bool sim_is_reached(const struct sim *m, const struct sim_state *st, int job) {
    const struct sim_job *j = &m->jobs[job];
    for (int i = 0; i < j->waits; i++)
        if (st->values[j->wait[i].counter] < j->wait[i].value) return false;
    return true;
}

// ---- steps ----

enum sim_action { SIM_TAKE, SIM_BEGIN, SIM_BEGIN_PULL, SIM_BEGIN_PUSH, SIM_LEAVE, SIM_END, SIM_MOST_OPTIONS = 3 };

// What a worker can do next; returns how many. None: it waits, or is done. A mixed worker between two tasks may move or not
// (kernels/cpu/mok_run.c tries to, and loses the ticket to somebody who is faster).
static inline int sim_options(const struct sim *m, const struct sim_state *st, int worker,
                              enum sim_action options[SIM_MOST_OPTIONS]) {
    const struct sim_worker *w = &st->worker[worker];
    int count = 0;
    if (w->running >= 0) {
        options[count++] = SIM_END;
        return count;
    }
    if (w->role == SIM_DONE) return 0;
    if (w->held >= 0 && sim_is_reached(m, st, w->held)) {
        options[count++] = SIM_BEGIN;
        return count;
    }
    bool moves_only = w->role == SIM_MOVER || w->role == SIM_LAST_MOVER;
    if (moves_only && st->next_push == m->moves) {
        options[count++] = SIM_LEAVE;
        return count;
    }
    if (!moves_only && w->held < 0) options[count++] = SIM_TAKE;
    if (w->role == SIM_MULTIPLIER) return count;
    if (st->next_pull < m->moves && sim_is_reached(m, st, m->tasks + st->next_pull)) options[count++] = SIM_BEGIN_PULL;
    if (st->next_push < m->moves && sim_is_reached(m, st, m->tasks + m->moves + st->next_push))
        options[count++] = SIM_BEGIN_PUSH;
    return count;
}

// Does it. Returns NULL, or what is wrong.
static inline const char *sim_step(struct sim *m, struct sim_state *st, int worker, enum sim_action action) {
    struct sim_worker *w = &st->worker[worker];
    switch (action) {
    case SIM_TAKE:
        if (st->next_task < m->tasks)
            w->held = st->next_task++;
        else
            w->role = w->role == SIM_MIXED ? SIM_LAST_MOVER : SIM_DONE;
        return NULL;
    case SIM_LEAVE:
        w->role = w->role == SIM_MOVER ? SIM_MULTIPLIER : SIM_DONE;
        return NULL;
    case SIM_BEGIN:
        w->running = w->held;
        break;
    case SIM_BEGIN_PULL:
        w->running = (int16_t)(m->tasks + st->next_pull++);
        break;
    case SIM_BEGIN_PUSH:
        w->running = (int16_t)(m->tasks + m->moves + st->next_push++);
        break;
    default: {
        int job = w->running;
        if (job == w->held) w->held = -1;
        w->running = -1;
        return sim_end_job(m, st, &m->jobs[job]);
    }
    }
    return sim_begin_job(m, st, &m->jobs[w->running]);
}

// Nobody can go on: this must be the end, with everything done.
static inline const char *sim_check_end(struct sim *m, const struct sim_state *st) {
    for (int i = 0; i < st->workers; i++)
        if (st->worker[i].role != SIM_DONE) {
            const struct sim_worker *w = &st->worker[i];
            snprintf(m->error, sizeof m->error, "deadlock in pass %d: worker of role %d waits with task %d (kind %d)",
                     m->pass, w->role, w->held, w->held >= 0 ? m->jobs[w->held].kind : -1);
            return m->error;
        }
    const int16_t *cells = st->values + m->counters;
    static const struct sim_job end = {.kind = -1};
    for (int cell = 0; cell < m->cells; cell++)
        if (cells[cell] != m->after[cell]) return sim_fail(m, &end, "end of pass", cell, cells[cell], m->after[cell]);
    return NULL;
}

// ---- runs ----

static inline struct sim_state *sim_alloc_states(const struct sim *m, size_t count) {
    struct sim_state *states = malloc(sim_state_bytes(m) * count);
    if (!states) abort();
    return states;
}

// One run in random order. Each worker has a speed of its own, some very low, and they change now and then.
static inline const char *sim_run(struct sim *m, int workers, int movers, uint64_t *seed) {
    struct sim_state *st = sim_alloc_states(m, 1);
    const char *error = NULL;
    int weights[SIM_MOST_WORKERS] = {0};
    sim_start(m, st, workers, movers);
    for (;;) {
        if (!random_below(seed, 32) || !weights[0])
            for (int i = 0; i < workers; i++) weights[i] = 1 << 3 * random_below(seed, 4);
        int all = 0, counts[SIM_MOST_WORKERS];
        enum sim_action options[SIM_MOST_WORKERS][SIM_MOST_OPTIONS];
        for (int i = 0; i < workers; i++) {
            counts[i] = sim_options(m, st, i, options[i]);
            if (counts[i]) all += weights[i];
        }
        if (all == 0) break;
        int at = (int)random_below(seed, (uint64_t)all), i = 0;
        for (;; i++) {
            if (!counts[i]) continue;
            if (at < weights[i]) break;
            at -= weights[i];
        }
        error = sim_step(m, st, i, options[i][random_below(seed, (uint64_t)counts[i])]);
        if (error) break;
    }
    if (!error) error = sim_check_end(m, st);
    free(st);
    return error;
}

// One run in a fixed order: of the workers the first that can do anything (last_first: the last) does its first option, so
// a mixed worker moves only when it waits.
static inline const char *sim_run_fixed(struct sim *m, int workers, int movers, bool last_first) {
    struct sim_state *st = sim_alloc_states(m, 1);
    const char *error = NULL;
    sim_start(m, st, workers, movers);
    for (int i = 0; i < workers && !error; i++) {
        int worker = last_first ? workers - 1 - i : i;
        enum sim_action options[SIM_MOST_OPTIONS];
        if (!sim_options(m, st, worker, options)) continue;
        error = sim_step(m, st, worker, options[0]);
        i = -1;
    }
    if (!error) error = sim_check_end(m, st);
    free(st);
    return error;
}

// ---- all runs ----

// Hashes of states that were visited: 64 bits of each, so that two of some million states fall together with a chance
// below one in a million.
struct sim_visited {
    uint64_t *hashes; // 0: free
    size_t room, count;
};

static inline bool sim_visit(struct sim_visited *v, uint64_t hash) {
    if (2 * v->count >= v->room) {
        struct sim_visited larger = {calloc(4 * v->room + 1024, sizeof *v->hashes), 4 * v->room + 1024, 0};
        if (!larger.hashes) abort();
        for (size_t i = 0; i < v->room; i++)
            if (v->hashes[i]) sim_visit(&larger, v->hashes[i]);
        free(v->hashes);
        *v = larger;
    }
    size_t at = hash % v->room;
    while (v->hashes[at] && v->hashes[at] != hash) at = (at + 1) % v->room;
    if (v->hashes[at]) return false;
    v->hashes[at] = hash;
    v->count++;
    return true;
}

static inline uint64_t sim_hash(const struct sim *m, const struct sim_state *st) {
    uint64_t hash = 1, word;
    for (size_t at = 0; at < sim_state_bytes(m); at += sizeof word) {
        memcpy(&word, (const char *)st + at, sizeof word);
        hash = random_mix(hash ^ word) + hash;
    }
    return hash | 1;
}

// Workers of a kind are alike: their order in a state means nothing.
static inline void sim_sort_workers(struct sim_state *st) {
    for (int i = 1; i < st->workers; i++)
        for (int j = i; j > 0 && memcmp(&st->worker[j], &st->worker[j - 1], sizeof *st->worker) < 0; j--) {
            struct sim_worker swapped = st->worker[j];
            st->worker[j] = st->worker[j - 1];
            st->worker[j - 1] = swapped;
        }
}

// Where the search stands in one state: the next worker and the next of its options.
struct sim_branch {
    int worker, option;
};

// Every order of all steps, depth first. Steps only go forward (there is no way back to an earlier state), so if every
// state that cannot go on is the end, then the end is reached from every state. Returns NULL, or what is wrong; adds the
// states seen to *states.
static inline const char *sim_search(struct sim *m, int workers, int movers, size_t *states) {
    size_t bytes = sim_state_bytes(m), most = (size_t)(3 * m->tasks + 4 * m->moves + 4 * workers + 2);
    struct sim_state *stack = sim_alloc_states(m, most);
    struct sim_branch *branch = malloc(most * sizeof *branch);
    struct sim_visited visited = {0};
    const char *error = NULL;
    size_t depth = 0;
    if (!branch) abort();
    sim_start(m, stack, workers, movers);
    sim_visit(&visited, sim_hash(m, stack));
    branch[0] = (struct sim_branch){0, 0};
    bool fresh = true; // no step was found from this state so far
    while (!error) {
        struct sim_state *st = (struct sim_state *)((char *)stack + depth * bytes);
        struct sim_state *next = (struct sim_state *)((char *)st + bytes);
        struct sim_branch *b = &branch[depth];
        enum sim_action options[SIM_MOST_OPTIONS];
        while (b->worker < workers && b->option >= sim_options(m, st, b->worker, options))
            *b = (struct sim_branch){b->worker + 1, 0};
        if (b->worker == workers) {
            if (fresh) error = sim_check_end(m, st);
            fresh = false;
            if (depth-- == 0) break;
            continue;
        }
        fresh = false;
        assert_true(depth + 1 < most);
        memcpy(next, st, bytes);
        error = sim_step(m, next, b->worker, options[b->option++]);
        sim_sort_workers(next);
        if (error || !sim_visit(&visited, sim_hash(m, next))) continue;
        branch[++depth] = (struct sim_branch){0, 0};
        fresh = true;
    }
    *states += visited.count;
    free(visited.hashes);
    free(branch);
    free(stack);
    return error;
}

#endif
