// Ranks, and what they do together: the job, groups and host memory by MPI (kernels/comm.c), device memory by MPI
// (kernels/cpu) or NCCL (kernels/cuda).
//
//   - A group of one rank is NULL or of size 1: every function then works without MPI, even before comm_start.
//   - Collective: every rank of the group calls it, in the same order, with sizes that fit each other; sizes of zero are
//     allowed and do not excuse a rank.
//   - Sums take the ranks in ascending order: the same bits on every run of one layout, whatever the MPI library. NCCL has
//     an order of its own, the same on every run of one layout and machine.
//   - Every wait for other ranks is bounded (comm_set_timeout). One that lasts longer ends the job, exit code 1, with a
//     line that says which rank waited in which call for how long.
//   - For one thread of a process.
#ifndef MOK_KERNELS_COMM_H
#define MOK_KERNELS_COMM_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct comm;

// ---- the job ----

// MPI_Init, right after device_start. From then on the lines of kernels/fail.h name the rank (when there are several)
// and end the whole job by MPI_Abort. Ends the program (exit 2) when the launcher's environment speaks of several ranks
// where MPI sees one: mpirun and the MPI library do not belong together.
void comm_start(int *argc, char ***argv);
// MPI_Finalize, the last call of a program that ends well.
void comm_stop(void);
// Seconds that a rank waits for others, 300 until it is set.
void comm_set_timeout(double seconds);
double comm_timeout(void);

// ---- groups ----

struct comm *comm_world(void);
// Ranks of the same color form a new group, ordered by key. Collective over parent.
struct comm *comm_split(struct comm *parent, int color, int key);
// Those of parent on the same host (that can share memory).
struct comm *comm_split_host(struct comm *parent);
void comm_free(struct comm *c);
int comm_rank(const struct comm *c);
int comm_size(const struct comm *c);

// ---- host memory ----

void comm_barrier(struct comm *c);
void comm_broadcast(struct comm *c, void *host, size_t bytes, int root);
// all [size * bytes] receives every rank's mine [bytes].
void comm_gather_all(struct comm *c, void *all, const void *mine, size_t bytes);
// values [n] become their sums over the ranks, on every rank.
void comm_sum_int64(struct comm *c, int64_t *values, size_t n);
void comm_sum_double(struct comm *c, double *values, size_t n);
void comm_send(struct comm *c, const void *host, size_t bytes, int to);
void comm_receive(struct comm *c, void *host, size_t bytes, int from);

// ---- device memory ----

// values [offsets[size]], on every rank a full array. Rank r gets the sums of its own piece, elements offsets[r] ..
// offsets[r+1] - 1; the rest of the array is left as the operation likes.   offsets (host) [size + 1], the same everywhere
void comm_reduce_scatter(struct comm *c, accum *values, const size_t *offsets);
// Every rank has its own piece of values; afterwards all pieces are everywhere.
void comm_all_gather(struct comm *c, real *values, const size_t *offsets);
// The same in two halves, so that computing goes on in between: begin returns at once, and until comm_exchange_finish
// returns values may not be touched.
struct comm_exchange;
struct comm_exchange *comm_all_gather_begin(struct comm *c, real *values, const size_t *offsets);
// all [size * bytes] receives every rank's mine [bytes].
void comm_gather_device(struct comm *c, void *all, const void *mine, size_t bytes);
// Rows between all pairs (all-to-all-v). Rank r is sent rows from[from_offsets[r] .. from_offsets[r+1]) of row_bytes each
// and its own rows arrive at to_offsets[sender]. Offsets (host) [size + 1] count rows. What is called next finds them there.
void comm_exchange_rows(struct comm *c, void *to, const size_t *to_offsets, const void *from,
                        const size_t *from_offsets, size_t row_bytes);
// The same in two halves, so that computing goes on in between: begin returns at once, and until finish returns neither
// buffer nor offsets may be touched. Several may be under way; they finish in any order.
struct comm_exchange *comm_exchange_begin(struct comm *c, void *to, const size_t *to_offsets, const void *from,
                                          const size_t *from_offsets, size_t row_bytes);
void comm_exchange_finish(struct comm_exchange *e);
// true: exchanges that begin from here on, until it is called with false, wait for what was called before, and no longer for
// what is called in between: that runs beside them and must touch none of their rows.
void comm_hold_start(bool hold);

// ---- symmetric memory: every rank's piece can be read and written by every other ----

struct symm {
    void *mine;
    void **peers; // [size] address of every rank's piece here, peers[rank] = mine
    size_t bytes; // of one piece, the same everywhere
    void *handle; // the implementation's
};

// Collective over c, and all groups of a host do it together: they are all of one rank, or none is. Zeroed, aligned to 256
// bytes. Ends the job (exit 2) when the ranks of c do not share memory, naming the two ways out (--moe alltoall, a smaller
// --ep), or when the host has no room for the pieces of all its ranks. Nothing of it stays behind, however a process ends.
void symm_alloc(struct symm *s, struct comm *c, size_t bytes);
void symm_free(struct symm *s);

#ifdef __cplusplus
}
#endif

#endif
