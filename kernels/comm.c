// Ranks with MPI: the job, groups, and what they do together in host memory.
//
// Everything is made of messages between pairs, so that a wait that takes too long can say for which ranks it
// waited, sums are made in the order of the ranks, and no count is limited to 32 bits. Messages of one pair arrive in the
// order they were posted in, and all ranks make the same calls in the same order: one tag does for all collectives.
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "kernels/backoff.h"
#include "kernels/comm_mpi.h"
#include "kernels/fail.h"
#include "kernels/operation.h"

size_t comm_message_bytes = (size_t)1 << 30; // MPI counts in int
size_t comm_sum_bytes = (size_t)16 << 20;

static double timeout = 300;
static struct comm world = {.mpi = MPI_COMM_NULL, .size = 1};
static struct comm *host;
static pid_t started; // the process that called comm_start; 0 before and after

void *comm_take_memory(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory)
        fail_internal("memory", "found no room for %zu values of %zu bytes to talk to other ranks", count, size);
    return memory;
}

void comm_check_code(int code, const char *place, const char *call) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = snprintf(text, sizeof text, "error %d", code);
    fail_internal(place, "%.*s failed: %.*s", (int)strcspn(call, "("), call, length, text);
}

// ---- waiting ----

static MPI_Request *add_message(struct comm_messages *m, int peer) {
    if (m->count == m->capacity) {
        m->capacity = 2 * m->capacity + 16;
        m->requests = realloc(m->requests, (size_t)m->capacity * sizeof *m->requests);
        m->peers = realloc(m->peers, (size_t)m->capacity * sizeof *m->peers);
        if (!m->requests || !m->peers) fail_internal("memory", "found no room for %d messages", m->capacity);
    }
    m->peers[m->count] = peer;
    return &m->requests[m->count++];
}

void comm_post_send(struct comm_messages *m, const struct comm *c, const void *data, size_t bytes, int to, int tag) {
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < comm_message_bytes ? bytes - done : comm_message_bytes;
        MPI_Request *request = add_message(m, to);
        comm_check(MPI_Isend((const char *)data + done, (int)part, MPI_BYTE, to, tag, c->mpi, request));
    }
}

void comm_post_receive(struct comm_messages *m, const struct comm *c, void *data, size_t bytes, int from, int tag) {
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < comm_message_bytes ? bytes - done : comm_message_bytes;
        MPI_Request *request = add_message(m, from);
        comm_check(MPI_Irecv((char *)data + done, (int)part, MPI_BYTE, from, tag, c->mpi, request));
    }
}

static void sleep_seconds(double seconds) { // less than one
    struct timespec nap = {.tv_nsec = (long)(seconds * 1e9)};
    nanosleep(&nap, NULL);
}

// There may be more ranks than cores, and the one waited for wants this core: four ranks on two cores met six times as
// often with 20 us of yielding as with 1 ms.
static void pause_between_looks(double waited) {
    if (waited < 20e-6) {
        sched_yield();
    } else {
        sleep_seconds(waited < 0.1 ? 20e-6 : 100e-6);
    }
}

// "rank 2" or "ranks 2, 5": those of the group that missing [size] marks.
static void name_ranks(char *text, size_t size, const struct comm *c, const bool *missing) {
    int count = 0;
    for (int r = 0; r < c->size; r++) count += missing[r];
    size_t used = (size_t)snprintf(text, size, "rank%s", count == 1 ? "" : "s");
    const char *separator = " ";
    for (int r = 0; r < c->size && used + 32 < size; r++) {
        if (!missing[r]) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%d", separator, c->ranks[r]);
        separator = ", ";
    }
}

static bool is_done(MPI_Request *request, const char *call) {
    int done;
    comm_check_code(MPI_Test(request, &done, MPI_STATUS_IGNORE), call, "MPI_Test");
    return done;
}

static _Noreturn void stop_waiting_for_messages(const struct comm *c, struct comm_messages *m, const char *call) {
    char whom[1024];
    bool *missing = comm_take_memory((size_t)c->size, sizeof *missing);
    for (int i = 0; i < m->count; i++)
        if (!is_done(&m->requests[i], call)) missing[m->peers[i]] = true;
    name_ranks(whom, sizeof whom, c, missing);
    fail_internal(
        call,
        "waited %g s for %s in a group of %d; a rank has stopped, makes other calls or is very slow: if it is "
        "only slow, raise --timeout",
        timeout, whom, c->size);
}

void comm_finish_messages(const struct comm *c, struct comm_messages *m, const char *call) {
    struct waited waited = {0};
    for (int i = 0; i < m->count; i++) {
        while (!is_done(&m->requests[i], call)) {
            double seconds = waited_seconds(&waited);
            if (seconds > timeout) stop_waiting_for_messages(c, m, call);
            pause_between_looks(seconds);
        }
    }
    free(m->requests);
    free(m->peers);
    *m = (struct comm_messages){0};
}

// ---- the job ----

// Launchers say in the environment how many they started. Where MPI sees one rank, there are as many jobs of one rank,
// which would all write the same files.
static void check_launcher(int ranks) {
    // Of Slurm's variables, the one that only srun sets: a script that sbatch runs is one process.
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; ranks == 1 && i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && atol(value) > 1)
            fail_user("launcher",
                      "found %s=%s and MPI sees 1 rank, wanted %s ranks; start it with the mpirun of the MPI library "
                      "that it was built with, see make detect",
                      names[i], value, value);
    }
}

// Ends all ranks. The launcher forgets what it has not read of their output by then, so our line gets the time that this
// takes. A child of this process that ends is no rank.
static void abort_job(int code) {
    int unread;
    if (getpid() != started) return;
    for (int i = 0; i < 1000 && ioctl(STDERR_FILENO, FIONREAD, &unread) == 0 && unread > 0; i++) sleep_seconds(0.001);
    sleep_seconds(0.1);
    started = 0; // MPI_Abort may call exit
    MPI_Abort(MPI_COMM_WORLD, code);
}

// exit() in one rank, without comm_stop, must not leave the others waiting.
static void end_with_all(int code, void *nothing) {
    (void)nothing;
    if (getpid() != started || world.size == 1) return;
    fflush(stdout);
    if (code == 0) fail_internal("exit", "this rank ended before the job did");
    abort_job(code);
}

static void set_up_group(struct comm *c, MPI_Comm mpi) {
    MPI_Group all, mine;
    comm_check(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN));
    comm_check(MPI_Comm_rank(mpi, &c->rank));
    comm_check(MPI_Comm_size(mpi, &c->size));
    c->mpi = mpi;
    c->ranks = comm_take_memory((size_t)c->size, sizeof *c->ranks);
    int *numbers = comm_take_memory((size_t)c->size, sizeof *numbers);
    for (int r = 0; r < c->size; r++) numbers[r] = r;
    comm_check(MPI_Comm_group(MPI_COMM_WORLD, &all));
    comm_check(MPI_Comm_group(mpi, &mine));
    comm_check(MPI_Group_translate_ranks(mine, c->size, numbers, all, c->ranks));
    comm_check(MPI_Group_free(&mine));
    comm_check(MPI_Group_free(&all));
    free(numbers);
}

void comm_start(int *argc, char ***argv) {
    int level, ranks;
    comm_check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level));
    comm_check(MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN));
    comm_check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    comm_check(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    check_launcher(ranks);
    started = getpid();
    if (ranks == 1) return;
    set_up_group(&world, MPI_COMM_WORLD);
    fail_set_rank(world.rank, abort_job);
    if (on_exit(end_with_all, NULL) != 0) fail_internal("on_exit", "found no room to register the end of the program");
    if (level < MPI_THREAD_FUNNELED)
        fail_user("launcher",
                  "found an MPI library without threads (level %d), wanted MPI_THREAD_FUNNELED (%d); use "
                  "another build of it",
                  level, MPI_THREAD_FUNNELED);
    host = comm_split_host(&world);
}

// The barrier is bounded, MPI_Finalize is not.
void comm_stop(void) {
    if (!started) return;
    comm_barrier(&world);
    comm_device_free(&world);
    comm_free(host);
    host = NULL;
    fail_set_rank(0, NULL);
    started = 0;
    comm_check(MPI_Finalize());
    free(world.ranks);
    world = (struct comm){.mpi = MPI_COMM_NULL, .size = 1};
}

void comm_set_timeout(double seconds) { timeout = seconds; }
double comm_timeout(void) { return timeout; }

// ---- groups ----

struct comm *comm_world(void) {
    return &world;
}
struct comm *comm_host(void) {
    return host;
}
int comm_rank(const struct comm *c) { return c ? c->rank : 0; }
int comm_size(const struct comm *c) { return c ? c->size : 1; }

static struct comm *open_group(MPI_Comm mpi) {
    struct comm *c = comm_take_memory(1, sizeof *c);
    *c = (struct comm){.mpi = MPI_COMM_NULL, .size = 1};
    int size = 1;
    if (mpi != MPI_COMM_NULL) comm_check(MPI_Comm_size(mpi, &size));
    if (size > 1)
        set_up_group(c, mpi);
    else if (mpi != MPI_COMM_NULL)
        comm_check(MPI_Comm_free(&mpi));
    return c;
}

// MPI's own waits have no bound, hence the barrier in front of them.
struct comm *comm_split(struct comm *parent, int color, int key) {
    MPI_Comm mpi = MPI_COMM_NULL;
    if (comm_size(parent) > 1) {
        comm_barrier(parent);
        comm_check(MPI_Comm_split(parent->mpi, color, key, &mpi));
    }
    return open_group(mpi);
}

struct comm *comm_split_host(struct comm *parent) {
    MPI_Comm mpi = MPI_COMM_NULL;
    if (comm_size(parent) > 1) {
        comm_barrier(parent);
        comm_check(MPI_Comm_split_type(parent->mpi, MPI_COMM_TYPE_SHARED, parent->rank, MPI_INFO_NULL, &mpi));
    }
    return open_group(mpi);
}

void comm_free(struct comm *c) {
    if (!c || c == &world) return;
    if (c->size > 1) {
        comm_barrier(c);
        comm_device_free(c);
        comm_check(MPI_Comm_free(&c->mpi));
    }
    free(c->ranks);
    free(c);
}

// ---- host memory ----

// One byte from everyone to everyone: who has not come is known.
void comm_barrier(struct comm *c) {
    OPERATION();
    static const char here = 1;
    struct comm_messages m = {0};
    int n = comm_size(c);
    if (n == 1) return;
    char *heard = comm_take_memory((size_t)n, 1);
    for (int r = 0; r < n; r++)
        if (r != c->rank) comm_post_receive(&m, c, &heard[r], 1, r, TAG_COLLECTIVE);
    for (int r = 0; r < n; r++)
        if (r != c->rank) comm_post_send(&m, c, &here, 1, r, TAG_COLLECTIVE);
    comm_finish_messages(c, &m, __func__);
    free(heard);
}

void comm_broadcast(struct comm *c, void *host_memory, size_t bytes, int root) {
    OPERATION();
    struct comm_messages m = {0};
    if (comm_size(c) == 1) return;
    if (c->rank != root) {
        comm_post_receive(&m, c, host_memory, bytes, root, TAG_COLLECTIVE);
    } else {
        for (int r = 0; r < c->size; r++)
            if (r != root) comm_post_send(&m, c, host_memory, bytes, r, TAG_COLLECTIVE);
    }
    comm_finish_messages(c, &m, __func__);
}

static void gather_all(struct comm *c, void *all, const void *mine, size_t bytes, const char *call) {
    struct comm_messages m = {0};
    char *places = all;
    int n = comm_size(c), me = comm_rank(c);
    for (int r = 0; r < n; r++)
        if (r != me) comm_post_receive(&m, c, places + (size_t)r * bytes, bytes, r, TAG_COLLECTIVE);
    for (int r = 0; r < n; r++)
        if (r != me) comm_post_send(&m, c, mine, bytes, r, TAG_COLLECTIVE);
    if (bytes) memmove(places + (size_t)me * bytes, mine, bytes);
    comm_finish_messages(c, &m, call);
}

void comm_gather_all(struct comm *c, void *all, const void *mine, size_t bytes) {
    OPERATION();
    gather_all(c, all, mine, bytes, __func__);
}

size_t comm_values_at_once(const struct comm *c, size_t size) {
    size_t count = comm_sum_bytes / size / (size_t)c->size;
    return count ? count : 1;
}

static void add_int64(void *sum, const void *value) { *(int64_t *)sum += *(const int64_t *)value; }
static void add_double(void *sum, const void *value) { *(double *)sum += *(const double *)value; }

// values [n] of `size` bytes each become their sums, added in the order of the ranks.
static void sum_values(struct comm *c, void *values, size_t n, size_t size, void (*add)(void *sum, const void *value),
                       const char *call) {
    if (comm_size(c) == 1) return;
    size_t chunk = comm_values_at_once(c, size);
    if (chunk > n) chunk = n;
    char *all = comm_take_memory((size_t)c->size * chunk, size);
    for (size_t done = 0, part; done < n; done += part) {
        char *sums = (char *)values + done * size;
        part = n - done < chunk ? n - done : chunk;
        gather_all(c, all, sums, part * size, call);
        memcpy(sums, all, part * size);
        for (size_t i = 0; i < part; i++)
            for (int r = 1; r < c->size; r++) add(sums + i * size, all + ((size_t)r * part + i) * size);
    }
    free(all);
}

void comm_sum_int64(struct comm *c, int64_t *values, size_t n) {
    OPERATION();
    sum_values(c, values, n, sizeof *values, add_int64, __func__);
}

void comm_sum_double(struct comm *c, double *values, size_t n) {
    OPERATION();
    sum_values(c, values, n, sizeof *values, add_double, __func__);
}

void comm_send(struct comm *c, const void *host_memory, size_t bytes, int to) {
    struct comm_messages m = {0};
    comm_post_send(&m, c, host_memory, bytes, to, TAG_MESSAGE);
    comm_finish_messages(c, &m, __func__);
}

void comm_receive(struct comm *c, void *host_memory, size_t bytes, int from) {
    struct comm_messages m = {0};
    comm_post_receive(&m, c, host_memory, bytes, from, TAG_MESSAGE);
    comm_finish_messages(c, &m, __func__);
}
