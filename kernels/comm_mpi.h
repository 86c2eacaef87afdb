// What the files that implement comm.h share.
#ifndef MOK_KERNELS_COMM_MPI_H
#define MOK_KERNELS_COMM_MPI_H

#include <mpi.h>

#include "kernels/comm.h"

struct comm {
    MPI_Comm mpi; // MPI_COMM_NULL in a group of one
    int rank, size;
    int *ranks;   // [size] the members' ranks in the job; NULL in a group of one
    void *device; // the backend's own for collectives on device memory; NULL until it needs one
};

// Ends the job with place, the call's name and what MPI says, if an MPI call failed.
#define comm_check(call) comm_check_code(call, __func__, #call)
void comm_check_code(int code, const char *place, const char *call);

// The ranks of the job on this host.
struct comm *comm_host(void);

// For a backend: frees what c->device is. Called by every rank of the group when it is freed, and for the world by comm_stop.
void comm_device_free(struct comm *c);

void *comm_take_memory(size_t count, size_t size); // zeroed

// Messages under way: what is sent to and received from which rank of a group.
struct comm_messages {
    MPI_Request *requests; // [count]
    int *peers;            // [count]
    int count, capacity;
};
enum { TAG_COLLECTIVE = 1, TAG_MESSAGE = 2 };
void comm_post_send(struct comm_messages *m, const struct comm *c, const void *data, size_t bytes, int to, int tag);
void comm_post_receive(struct comm_messages *m, const struct comm *c, void *data, size_t bytes, int from, int tag);
// Waits for all of them and forgets them. call: for the line of a wait that is too long.
void comm_finish_messages(const struct comm *c, struct comm_messages *m, const char *call);

// How many values of this size from every rank fit the buffer for sums.
size_t comm_values_at_once(const struct comm *c, size_t size);

// Bytes of one message at most, and of the buffer that sums are made in; larger things go in several. Tests set them.
extern size_t comm_message_bytes, comm_sum_bytes;

#endif
