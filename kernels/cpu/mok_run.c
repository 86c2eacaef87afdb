// The persistent workers of one pass: threads that take tickets, wait for counters, and raise them.
#include <limits.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

#include "kernels/backoff.h"
#include "kernels/clock.h"
#include "kernels/cpu/mok_tasks.h"
#include "kernels/cpu/pool.h"
#include "kernels/fail.h"
#include "kernels/mok_events.h"
#include "kernels/operation.h"

// A word that many workers write, alone in its cache line.
struct word {
    int value;
    char unused[64 - sizeof(int)];
};

struct run {
    struct mok_job job;
    const struct mok_crew *crew;
    struct trace *trace; // NULL: nothing is recorded
    int32_t *counters;
    int tasks, moves;      // tickets that there are
    struct word next_task; // the next ticket of each queue
    struct word next_pull, next_push;
    struct word arrived;  // workers that have begun
    struct word given_up; // 1 once a worker has
};

struct worker {
    struct run *run;
    int number;
    bool mixed; // moves and multiplies
};

// ---- counters ----

static int32_t value_of(const struct run *r, struct mok_wait wait) {
    return __atomic_load_n(r->counters + mok_counter(r->job.s, wait.kind, wait.index), __ATOMIC_ACQUIRE);
}

static bool is_reached(const struct run *r, struct mok_wait wait) { return value_of(r, wait) >= wait.value; }

static bool are_reached(const struct run *r, const struct mok_wait *waits, int count) {
    for (int i = 0; i < count; i++)
        if (!is_reached(r, waits[i])) return false;
    return true;
}

static void count_up(const struct run *r, enum mok_counter_kind kind, int index) {
    __atomic_fetch_add(r->counters + mok_counter(r->job.s, kind, index), 1, __ATOMIC_RELEASE);
}

// ---- the trace ----

// One event from `begin` to now.
static void record(const struct worker *w, const char *name, double begin, struct mok_task task, int first_row,
                   size_t bytes) {
    const struct run *r = w->run;
    if (!r->trace) return;
    struct mok_events events = {r->job.s, r->trace->block, r->crew->first_expert};
    struct trace_event event = mok_event_of(&events, name, task, first_row, (int)bytes);
    event.begin = begin;
    event.end = clock_seconds();
    trace_add(r->trace, TRACE_TRACK_WORKER + w->number, event);
}

static void record_move(const struct worker *w, const char *name, double begin, struct mok_move move, size_t bytes) {
    struct mok_task as_task = {-1, move.block, 0, w->run->job.p->block_expert[move.block]};
    record(w, name, begin, as_task, move.first, bytes);
}

// ---- bounded waits ----

static const char *counter_text(char *text, size_t size, struct mok_wait wait) {
    static const char *const names[] = {
        [MOK_READY] = "pulled groups of row block",
        [MOK_GATE_UP] = "gate/up tiles of row block",
        [MOK_D_HIDDEN] = "d hidden tiles of row block",
        [MOK_OUT] = "output tiles of row block",
        [MOK_PUSHED] = "pushed groups of row block",
        [MOK_EXPERT_D_HIDDEN] = "d hidden tiles of local expert",
        [MOK_EXPERT_D_WEIGHTS] = "weight-gradient tiles of local expert",
        [MOK_SHARED_INNER] = "shared inner tiles of token block",
        [MOK_SHARED_ALL] = "shared inner tiles, counter",
    };
    snprintf(text, size, "%s %d", names[wait.kind], wait.index);
    return text;
}

// Of a row block that nobody pulls: what the next pull waits for. Nothing if that is not so.
static void describe_pull(const struct run *r, struct mok_wait wait, char *text, size_t size) {
    struct mok_wait waits[MOK_MOST_WAITS];
    char counter[64];
    int index = __atomic_load_n(&r->next_pull.value, __ATOMIC_RELAXED);
    if (wait.kind != MOK_READY || index >= r->moves) return;
    struct mok_move move = mok_move_at(r->job.s, r->job.p, r->job.pass, index);
    int count = mok_pull_waits(r->job.s, r->job.p, r->job.pass, move.block, waits);
    for (int i = 0; i < count; i++)
        if (!is_reached(r, waits[i]))
            snprintf(text, size, ", and the pull of row block %d for %s: found %d, wanted %d", move.block,
                     counter_text(counter, sizeof counter, waits[i]), value_of(r, waits[i]), waits[i].value);
}

// The first worker to run out of patience ends the job: the one that it waits for may never return.
static void give_up(const struct worker *w, struct mok_task task, struct mok_wait wait, double seconds) {
    struct run *r = w->run;
    char counter[64], place[96], pull[160] = "";
    if (__atomic_exchange_n(&r->given_up.value, 1, __ATOMIC_RELAXED)) return;
    if (task.kind < 0)
        snprintf(place, sizeof place, "the push of row block %d", task.block);
    else
        snprintf(place, sizeof place, "task %s (%s %d, tile %d, local expert %d)", mok_task_name(task),
                 mok_is_d_weights(task) ? "macrobatch" : "block", task.block, task.tile, task.expert);
    describe_pull(r, wait, pull, sizeof pull);
    fail_internal(
        "megakernel",
        "worker %d in the %s pass waited %.0f s in %s for %s: found %d, wanted %d%s; a worker has stopped, or the "
        "machine is very slow: set MOK_WAIT_SECONDS higher",
        w->number, r->job.pass == MOK_FORWARD ? "forward" : "backward", seconds, place,
        counter_text(counter, sizeof counter, wait), value_of(r, wait), wait.value, pull);
}

// ---- moving ----

// Takes ticket `index` of a queue unless somebody else was faster.
static bool take(struct word *next, int index) {
    return __atomic_compare_exchange_n(&next->value, &index, index + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static int peek(const struct word *next) { return __atomic_load_n(&next->value, __ATOMIC_RELAXED); }

// The next ticket, if there is one and nothing is left to wait for: a mover never holds a ticket that it cannot serve.
static bool try_pull(struct worker *w) {
    struct run *r = w->run;
    int index = peek(&r->next_pull);
    if (index >= r->moves) return false;
    struct mok_move move = mok_move_at(r->job.s, r->job.p, r->job.pass, index);
    struct mok_wait waits[MOK_MOST_WAITS];
    int count = mok_pull_waits(r->job.s, r->job.p, r->job.pass, move.block, waits);
    if (!are_reached(r, waits, count) || !take(&r->next_pull, index)) return false;
    double begin = trace_now(r->trace);
    size_t bytes = mok_do_pull(&r->job, move);
    count_up(r, MOK_READY, move.block);
    record_move(w, "pull", begin, move, bytes);
    return true;
}

static bool try_push(struct worker *w) {
    struct run *r = w->run;
    int index = peek(&r->next_push);
    if (index >= r->moves) return false;
    struct mok_move move = mok_move_at(r->job.s, r->job.p, r->job.pass, index);
    if (!is_reached(r, mok_push_wait(r->job.s, move.block)) || !take(&r->next_push, index)) return false;
    double begin = trace_now(r->trace);
    size_t bytes = mok_do_push(&r->job, move);
    count_up(r, MOK_PUSHED, move.block);
    record_move(w, "push", begin, move, bytes);
    return true;
}

// Until both queues are empty; what is left is then in the hands of others. As long as tasks are taken, nobody has
// stopped: many of them may come before the first row that can be pushed.
static void move_all(struct worker *w) {
    struct run *r = w->run;
    struct backoff wait = {0};
    int taken = 0; // tasks, at the last look
    while (peek(&r->next_push) < r->moves) {
        // Both are tried: neither queue is held up by the other.
        bool pulled = try_pull(w), pushed = try_push(w);
        if (pulled || pushed) {
            wait = (struct backoff){0};
            continue;
        }
        if (peek(&r->next_task) != taken) wait.waited = (struct waited){0};
        taken = peek(&r->next_task);
        double seconds = backoff_pause(&wait);
        if (seconds <= r->crew->timeout) continue;
        int index = peek(&r->next_push);
        if (index >= r->moves) return;
        struct mok_move move = mok_move_at(r->job.s, r->job.p, r->job.pass, index);
        give_up(w, (struct mok_task){-1, move.block, 0, 0}, mok_push_wait(r->job.s, move.block), seconds);
    }
}

// ---- multiplying ----

static void wait_for(struct worker *w, struct mok_task task, struct mok_wait wait) {
    struct run *r = w->run;
    if (is_reached(r, wait)) return;
    struct backoff pause = {0};
    double begin = trace_now(r->trace);
    while (!is_reached(r, wait)) {
        if (w->mixed && (try_pull(w) || try_push(w))) {
            pause = (struct backoff){0};
            begin = trace_now(r->trace);
            continue;
        }
        double seconds = backoff_pause(&pause);
        if (seconds > r->crew->timeout) give_up(w, task, wait, seconds);
    }
    record(w, "wait", begin, task, 0, 0);
}

static void multiply_all(struct worker *w) {
    struct run *r = w->run;
    const struct mok_job *j = &r->job;
    for (;;) {
        int index = __atomic_fetch_add(&r->next_task.value, 1, __ATOMIC_RELAXED);
        if (index >= r->tasks) return;
        struct mok_task task = mok_task_at(j->s, j->p, j->pass, index);
        struct mok_wait waits[MOK_MOST_WAITS], signals[MOK_MOST_WAITS];
        int count = mok_task_waits(j->s, j->p, j->pass, task, waits);
        for (int i = 0; i < count; i++) wait_for(w, task, waits[i]);
        if (r->crew->before_task) r->crew->before_task(r->crew->argument, w->number, task);
        double begin = trace_now(r->trace);
        mok_do_task(j, task);
        count = mok_task_signals(task, signals);
        for (int i = 0; i < count; i++) count_up(r, signals[i].kind, signals[i].index);
        record(w, mok_task_name(task), begin, task, 0, 0);
        // Between two tasks as many rows as a block has, so that pulls stay ahead of the tasks that wait for them.
        for (int i = 0; w->mixed && i < mok_groups(j->s); i++) {
            bool pulled = try_pull(w), pushed = try_push(w);
            if (!pulled && !pushed) break;
        }
    }
}

// Roles go by order of arrival, not by number: whoever runs first moves.
static void work(void *argument, int number) {
    struct run *r = argument;
    int arrival = __atomic_fetch_add(&r->arrived.value, 1, __ATOMIC_RELAXED), movers = r->crew->comm_workers;
    struct worker w = {r, number, movers == 0};
    if (arrival < movers) move_all(&w);
    multiply_all(&w);
    if (w.mixed) move_all(&w);
}

int mok_default_workers(void) { return omp_get_max_threads(); }

// More than any machine has cores: a minibatch for so many still has an int's rows.
int mok_most_workers(void) { return 1 << 16; }

int mok_trace_tracks(int workers, int comm_workers) {
    (void)comm_workers;
    return workers;
}

// Workers record as they go, into tracks that have their names.
void mok_trace_open(struct trace *t, int workers, int comm_workers) { (void)t, (void)workers, (void)comm_workers; }

void mok_trace_take(struct trace *t) { (void)t; }

void mok_trace_close(void) {}

int mok_default_move_rows(int hidden) {
    (void)hidden;
    return 32;
}

void mok_crew_open(struct mok_crew *c) {
    if (c->workers < 1 || c->comm_workers >= c->workers)
        fail_internal("megakernel", "found %d workers, %d of them only moving rows; wanted one more than those",
                      c->workers, c->comm_workers);
    c->pool = pool_open(c->workers);
}

void mok_crew_close(struct mok_crew *c) { pool_close(c->pool); }

bool mok_available(void) { return true; }

int mok_column_unit(void) { return 1; }

int mok_most_ranks(void) { return INT_MAX; }

bool mok_keeps_out(void) { return true; }

void mok_run(const struct mok_shape *s, const struct mok_plan *p, const struct mok_group *g,
             const struct mok_layer *layer, const struct mok_workspace *w, const struct mok_crew *crew,
             enum mok_pass pass) {
    OPERATION();
    struct run run = {.job = {s, p, g, layer, w, pass},
                      .crew = crew,
                      .trace = trace_has_workers(crew->trace) ? crew->trace : NULL,
                      .counters = w->counters,
                      .tasks = mok_task_total(s, p, pass),
                      .moves = mok_move_total(s, p)};
    memset(w->counters, 0, sizeof *w->counters * mok_counter_total(s));
    pool_run(crew->pool, work, &run);
}
