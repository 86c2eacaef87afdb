#include "model/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "kernels/fail.h"
#include "kernels/mok.h"
#include "kernels/operation.h"
#include "model/breakdown.h"

// ---- a recorder ----

// Workers count their events at the same time: no two counts share a cache line.
enum { CACHE_LINE = 64 };
_Static_assert(sizeof(struct trace_track) % CACHE_LINE == 0, "tracks fill cache lines");

void trace_open(struct trace *t, int workers, size_t events_per_track) {
    *t = (struct trace){.block = -1, .layer = -1, .track_count = TRACE_TRACK_WORKER + workers + 1};
    size_t bytes = (size_t)t->track_count * sizeof *t->tracks;
    t->tracks = aligned_alloc(CACHE_LINE, bytes);
    if (!t->tracks) fail_internal("trace", "found no memory for %d tracks", t->track_count);
    memset(t->tracks, 0, bytes);
    for (int i = 0; i < t->track_count; i++) {
        struct trace_track *track = &t->tracks[i];
        if (i == TRACE_TRACK_STEP)
            strcpy(track->name, "step");
        else if (i == trace_device_track(t))
            strcpy(track->name, "device");
        else
            snprintf(track->name, sizeof track->name, "worker %d", i - TRACE_TRACK_WORKER);
        track->capacity = events_per_track;
        track->events = calloc(events_per_track, sizeof *track->events);
        if (events_per_track && !track->events)
            fail_internal("trace", "found no memory for %zu events of %s", events_per_track, track->name);
    }
}

void trace_close(struct trace *t) {
    for (int i = 0; i < t->track_count; i++) free(t->tracks[i].events);
    free(t->tracks);
    free(t->spans);
    *t = (struct trace){0};
}

void trace_take_spans(struct trace *t) {
    for (size_t i = 0; i < t->span_count; i++) {
        const struct trace_span *s = &t->spans[i];
        struct trace_event event = {.begin = device_mark_seconds(s->begin),
                                    .end = device_mark_seconds(s->end),
                                    .name = s->name,
                                    .block = s->block,
                                    .expert = -1,
                                    .phase = -1,
                                    .first_row = -1};
        trace_add(t, s->operation ? trace_device_track(t) : TRACE_TRACK_STEP, event);
    }
    t->span_count = 0;
    mok_trace_take(t);
}

// ---- the clocks of the ranks ----

// What the ranks tell each other before they write.
struct rank_record {
    double stamp;   // clock at the end of a barrier
    double first;   // begin of the first event, INFINITY: there is none
    int64_t events; // all tracks
    int64_t leader; // first rank of this host, all of which have one clock
};

static struct rank_record record_of(const struct trace *t, struct comm *world) {
    struct rank_record mine = {.first = INFINITY, .leader = comm_rank(world)};
    struct comm *host = comm_split_host(world);
    comm_broadcast(host, &mine.leader, sizeof mine.leader, 0);
    comm_free(host);
    for (int i = 0; i < t->track_count; i++) {
        const struct trace_track *track = &t->tracks[i];
        for (size_t e = 0; e < track->count; e++) mine.first = fmin(mine.first, track->events[e].begin);
        mine.events += (int64_t)track->count;
    }
    comm_barrier(world); // brings the ranks here from whatever they did
    comm_barrier(world); // and lets them go at nearly the same time
    mine.stamp = clock_seconds();
    return mine;
}

// How far the clock of a rank is ahead of rank 0's.
static double clock_ahead(const struct rank_record *ranks, int rank) {
    return ranks[ranks[rank].leader].stamp - ranks[ranks[0].leader].stamp;
}

// What the clock of this rank showed at the first event of all; tells the number of events too.
static double find_origin(const struct trace *t, struct comm *world, int64_t *events) {
    struct rank_record mine = record_of(t, world), *all = calloc((size_t)comm_size(world), sizeof *all);
    if (!all) fail_internal("trace", "found no memory for the clocks of %d ranks", comm_size(world));
    comm_gather_all(world, all, &mine, sizeof mine);
    double first = INFINITY; // by the clock of rank 0
    *events = 0;
    for (int r = 0; r < comm_size(world); r++) {
        first = fmin(first, all[r].first - clock_ahead(all, r));
        *events += all[r].events;
    }
    first += clock_ahead(all, comm_rank(world));
    free(all);
    return first;
}

// ---- text on its way to the file, a piece at a time ----

struct writer {
    struct comm *world;
    const char *path;
    char temporary[FILE_PATH];
    FILE *file; // of rank 0
    size_t used;
    char text[1 << 16];
};

static bool name_temporary(char temporary[FILE_PATH], const char *path) {
    return snprintf(temporary, FILE_PATH, "%s.tmp", path) < FILE_PATH;
}

static _Noreturn void fail_write(struct writer *w, int why) {
    if (w->file) {
        fclose(w->file);
        unlink(w->temporary);
    }
    fail_internal(w->path, "cannot write the trace: %s: %s; free some space there or name another place", w->temporary,
                  strerror(why));
}

static void write_piece(struct writer *w, const char *text, size_t bytes) {
    if (fwrite(text, 1, bytes, w->file) != bytes) fail_write(w, errno);
}

static void flush(struct writer *w) {
    if (!w->used) return;
    if (comm_rank(w->world) == 0) {
        write_piece(w, w->text, w->used);
    } else {
        comm_send(w->world, &w->used, sizeof w->used, 0);
        comm_send(w->world, w->text, w->used, 0);
    }
    w->used = 0;
}

// A rank other than 0 has no more text: a piece of no bytes.
static void finish_sending(struct writer *w) {
    flush(w);
    comm_send(w->world, &w->used, sizeof w->used, 0);
}

static void receive_pieces(struct writer *w, int from) {
    for (;;) {
        size_t bytes;
        comm_receive(w->world, &bytes, sizeof bytes, from);
        if (!bytes) return;
        comm_receive(w->world, w->text, bytes, from);
        write_piece(w, w->text, bytes);
    }
}

// At most 512 bytes at a time.
static void put(struct writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(struct writer *w, const char *format, ...) {
    if (sizeof w->text - w->used < 512) flush(w);
    va_list args;
    va_start(args, format);
    w->used += (size_t)vsnprintf(w->text + w->used, sizeof w->text - w->used, format, args);
    va_end(args);
}

static void put_char(struct writer *w, char c) {
    if (w->used == sizeof w->text) flush(w);
    w->text[w->used++] = c;
}

static void put_string(struct writer *w, const char *text) {
    put_char(w, '"');
    for (; *text; text++) {
        if ((unsigned char)*text < 32) {
            put(w, "\\u%04x", *text);
        } else {
            if (*text == '"' || *text == '\\') put_char(w, '\\');
            put_char(w, *text);
        }
    }
    put_char(w, '"');
}

// ---- events ----

static const char *category_of(const struct trace *t, int track, const char *name) {
    if (track == TRACE_TRACK_STEP) return "step";
    if (track == trace_device_track(t)) return "operation";
    if (strcmp(name, "pull") == 0 || strcmp(name, "push") == 0) return "move";
    return strcmp(name, "wait") == 0 ? "wait" : "compute";
}

// ,"args":{"layer":3,"bytes":4096}
static void put_arguments(struct writer *w, const struct trace_event *e) {
    const struct {
        const char *name;
        int value, none;
    } arguments[] = {{"layer", e->block, -1},
                     {"expert", e->expert, -1},
                     {"phase", e->phase, -1},
                     {"row", e->first_row, -1},
                     {"bytes", e->bytes, 0}};
    const char *before = ",\"args\":{", *end = "";
    for (size_t i = 0; i < sizeof arguments / sizeof *arguments; i++) {
        if (arguments[i].value == arguments[i].none) continue;
        put(w, "%s\"%s\":%d", before, arguments[i].name, arguments[i].value);
        before = ",", end = "}";
    }
    put(w, "%s", end);
}

// In whole nanoseconds, begin and end rounded alike: what follows on something does not overlap with it, which viewers
// would take for a call inside it.
static void put_event(struct writer *w, const struct trace *t, int track, const struct trace_event *e, double origin) {
    int64_t begin = llround(1e9 * (e->begin - origin)), duration = llround(1e9 * (e->end - origin)) - begin;
    put(w, ",\n{\"name\":");
    put_string(w, e->name);
    put(w, ",\"cat\":\"%s\",\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,\"tid\":%d",
        category_of(t, track, e->name), 1e-3 * (double)begin, 1e-3 * (double)duration, comm_rank(w->world), track);
    put_arguments(w, e);
    put(w, "}");
}

// Names and order of the rank and of its tracks. The first line of the file has nothing to be separated from.
static void put_names(struct writer *w, const struct trace *t) {
    int rank = comm_rank(w->world);
    put(w, "%s\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"rank %d\"}}",
        rank ? "," : "", rank, rank);
    put(w, ",\n{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"sort_index\":%d}}", rank,
        rank);
    for (int i = 0; i < t->track_count; i++) {
        put(w, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":", rank, i);
        put_string(w, t->tracks[i].name);
        if (t->tracks[i].dropped) put(w, ",\"dropped\":%zu", t->tracks[i].dropped);
        int place = i == 0 ? 0 : i == trace_device_track(t) ? 1 : i + 1; // "step", "device", then the workers
        put(w, "}},\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
            rank, i, place);
    }
}

static void put_rank(struct writer *w, const struct trace *t, double origin) {
    put_names(w, t);
    for (int i = 0; i < t->track_count; i++)
        for (size_t e = 0; e < t->tracks[i].count; e++) put_event(w, t, i, &t->tracks[i].events[e], origin);
}

static void write_file(struct writer *w, const struct trace *t, double origin) {
    char error[FILE_ERROR];
    w->file = fopen(w->temporary, "wb");
    if (!w->file) fail_write(w, errno);
    put(w, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
    put_rank(w, t, origin);
    flush(w);
    for (int r = 1; r < comm_size(w->world); r++) receive_pieces(w, r);
    put(w, "\n]}\n");
    flush(w);
    if (!file_publish(w->file, w->temporary, w->path, error, sizeof error))
        fail_internal(w->path, "cannot write the trace: %s; free some space there or name another place", error);
}

static void warn_of_dropped(const struct trace *t) {
    for (int i = 0; i < t->track_count; i++) {
        const struct trace_track *track = &t->tracks[i];
        if (track->dropped)
            fail_warn("trace", "%zu events of %s did not fit, the last of the step; train on fewer tokens per step",
                      track->dropped, track->name);
    }
}

int64_t trace_write(const struct trace *t, struct comm *world, const char *path) {
    int64_t events;
    double origin = find_origin(t, world, &events);
    struct writer *w = calloc(1, sizeof *w);
    if (!w) fail_internal(path, "found no memory for the text of a trace");
    w->world = world;
    w->path = path;
    name_temporary(w->temporary, path);
    if (comm_rank(world) == 0) {
        write_file(w, t, origin);
    } else {
        put_rank(w, t, origin);
        finish_sending(w);
    }
    free(w);
    warn_of_dropped(t);
    return events;
}

void trace_check_path(const char *path) {
    char temporary[FILE_PATH], error[FILE_ERROR];
    uint64_t bytes;
    if (!name_temporary(temporary, path))
        fail_user("--trace", "found a path of %zu bytes, wanted less than %d; use a shorter one", strlen(path),
                  FILE_PATH - 4);
    if (access(path, F_OK) == 0 && !file_size(path, &bytes, error, sizeof error))
        fail_user("--trace", "%s; name a file that is new, or a trace to replace", error);
    FILE *file = fopen(temporary, "wb");
    if (!file)
        fail_user("--trace", "cannot create %s: %s; name a file in a folder that exists and can be written", temporary,
                  strerror(errno));
    fclose(file);
    unlink(temporary);
}

// ---- the trace of a run ----

static void check_step(int64_t step, int64_t done, int64_t steps) {
    if (step > done && step <= steps) return;
    fail_user("--trace-step", "found %" PRId64 ", wanted a step that this run takes: from %" PRId64 " to %" PRId64,
              step, done + 1, steps);
}

void trace_open_run(struct run_trace *r, struct comm *world, const char *path, int workers, int64_t step, int64_t done,
                    int64_t steps) {
    *r = (struct run_trace){.world = world, .path = path};
    if (!*path) return;
    if (comm_rank(world) == 0) trace_check_path(path);
    if (comm_rank(world) == 0 && step) check_step(step, done, steps);
    trace_open(&r->trace, workers, TRACE_EVENTS_PER_TRACK);
    r->step = step ? step : done + TRACE_STEP < steps ? done + TRACE_STEP : steps;
}

void trace_begin_step(struct run_trace *r, int64_t step) {
    if (!*r->path || step != r->step) return;
    r->trace.on = true;
    operation_trace = &r->trace;
    r->begin = trace_mark(&r->trace);
}

void trace_end_step(struct run_trace *r) {
    if (!r->trace.on) return;
    int end = trace_mark(&r->trace);
    operation_trace = NULL;
    r->trace.on = false;
    trace_take_spans(&r->trace);
    double seconds = device_mark_seconds(end) - device_mark_seconds(r->begin);
    device_clear_marks();
    int64_t events = trace_write(&r->trace, r->world, r->path);
    r->written = true;
    if (comm_rank(r->world) != 0) return;
    printf("trace of step %" PRId64 ": %s, %" PRId64 " events; draw it with scripts/plot_trace.py\n", r->step, r->path,
           events);
    breakdown_print(stdout, &r->trace.tracks[trace_device_track(&r->trace)], r->step, seconds);
    fflush(stdout);
}

void trace_close_run(struct run_trace *r) {
    if (*r->path && !r->written && comm_rank(r->world) == 0)
        printf("trace: %s was not written, the run ended before step %" PRId64 "\n", r->path, r->step);
    trace_close(&r->trace);
}
