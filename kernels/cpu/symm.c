// Symmetric memory: memory that the processes of one host map together plays NVLink.
//
// A piece is a file that has no name (memfd), and that the others open through /proc/PID/fd: it is gone with the last
// process that maps it, however that one ends, and /dev/shm, which containers keep small, is not needed. A shared window of
// MPI lies in a named file for a moment, and one in thirty killed jobs left it there, as large as all pieces together.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/comm_mpi.h"
#include "kernels/fail.h"
#include "kernels/kernels.h"

struct mapping {
    struct comm *comm;
    size_t bytes; // of one piece, whole pages
};

// How a rank's piece is found by the others.
struct name {
    int64_t process, descriptor;
};

static void check_same_host(struct comm *c) {
    struct comm *near = comm_split_host(c);
    if (comm_size(near) < comm_size(c)) {
        if (comm_rank(c) > 0) comm_barrier(c); // the first one says it for all, which ends the job
        fail_user(
            "--ep",
            "found a group of %d ranks of which %d are on this host, wanted all of them, since --moe mok works in "
            "shared memory; use --moe alltoall, or a smaller --ep",
            comm_size(c), comm_size(near));
    }
    comm_free(near);
}

static _Noreturn void fail_for_room(double found, double wanted, const char *reason) {
    const double gib = (double)(1 << 30);
    fail_user(
        "shared memory",
        "found %.2f GiB free, wanted %.2f GiB for the %d ranks of this host%s; lower --batch or --seq, start fewer "
        "ranks, or use --moe alltoall",
        found / gib, wanted / gib, comm_size(comm_host()), reason);
}

// What the kernel can give without ending a process for it.
static double available_bytes(void) {
    double kib = -1, swap = 0;
    char line[256];
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) return -1;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "MemAvailable: %lf", &kib);
        sscanf(line, "SwapFree: %lf", &swap);
    }
    fclose(file);
    return kib < 0 ? -1 : (kib + swap) * 1024;
}

// All ranks of the host are here before one of them takes anything; the first one asks for all.
static void check_room(size_t bytes) {
    double found = available_bytes(), wanted = (double)bytes;
    comm_sum_double(comm_host(), &wanted, 1);
    if (comm_rank(comm_host()) == 0 && found >= 0 && found < wanted) fail_for_room(found, wanted, "");
    comm_barrier(comm_host());
}

// One of `pieces`. The machine has the room (check_room); a limit of this process may be lower.
static void *map(int descriptor, size_t bytes, int pieces) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED)
        fail_user("shared memory",
                  "found no room for %zu bytes of addresses (%s), wanted %d pieces of that size; raise the limit of a "
                  "process (ulimit -v), lower --batch or --seq, or use --moe alltoall",
                  bytes, strerror(errno), pieces);
    return memory;
}

// All pages are taken now, zeroed: one that is missing later would end the process without a word.
static int create_piece(size_t bytes) {
    int error, descriptor = memfd_create("mok", MFD_CLOEXEC);
    if (descriptor < 0) fail_internal("shared memory", "cannot create it: %s", strerror(errno));
    do error = posix_fallocate(descriptor, 0, (off_t)bytes);
    while (error == EINTR);
    if (error) {
        char reason[128];
        snprintf(reason, sizeof reason, " (%s)", strerror(error));
        fail_for_room(available_bytes(), (double)bytes * comm_size(comm_host()), reason);
    }
    return descriptor;
}

static void *map_piece_of(struct name owner, int rank, size_t bytes, int pieces) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)owner.process, (long long)owner.descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0)
        fail_user("shared memory",
                  "cannot open %s, the memory of rank %d: %s; wanted all ranks of a host in one container and of one "
                  "user: start them so, or use --moe alltoall",
                  path, rank, strerror(errno));
    void *memory = map(descriptor, bytes, pieces);
    close(descriptor);
    return memory;
}

static size_t whole_pages(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGE_SIZE), most = (size_t)PTRDIFF_MAX - page;
    if (bytes > most) fail_for_room(available_bytes(), (double)bytes * comm_size(comm_host()), "");
    return (bytes + page) / page * page; // never zero
}

void symm_alloc(struct symm *s, struct comm *c, size_t bytes) {
    int n = comm_size(c);
    *s = (struct symm){.bytes = bytes, .peers = calloc((size_t)n, sizeof *s->peers)};
    if (!s->peers) fail_internal("memory", "found no room for %d addresses", n);
    if (n == 1) {
        s->mine = s->peers[0] = device_alloc(bytes);
        return;
    }
    struct mapping *m = calloc(1, sizeof *m);
    struct name *names = calloc((size_t)n, sizeof *names);
    if (!m || !names) fail_internal("memory", "found no room for %d addresses", n);
    *m = (struct mapping){.comm = c, .bytes = whole_pages(bytes)};
    check_same_host(c);
    check_room(m->bytes);
    int descriptor = create_piece(m->bytes);
    struct name name = {.process = getpid(), .descriptor = descriptor};
    comm_gather_all(c, names, &name, sizeof name);
    for (int r = 0; r < n; r++)
        s->peers[r] = r == c->rank ? map(descriptor, m->bytes, n) : map_piece_of(names[r], c->ranks[r], m->bytes, n);
    s->mine = s->peers[c->rank];
    s->handle = m;
    comm_barrier(c); // all have opened this rank's
    close(descriptor);
    free(names);
}

void symm_free(struct symm *s) {
    struct mapping *m = s->handle;
    if (m) {
        comm_barrier(m->comm); // nobody uses this rank's any more
        for (int r = 0; r < m->comm->size; r++) munmap(s->peers[r], m->bytes);
        free(m);
    } else {
        device_free(s->mine);
    }
    free(s->peers);
    *s = (struct symm){0};
}
