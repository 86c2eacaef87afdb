// What comm.c and symm.c share.
#ifndef MOK_KERNELS_CPU_COMM_MPI_H
#define MOK_KERNELS_CPU_COMM_MPI_H

#include <mpi.h>

#include "kernels/comm.h"

struct comm {
    MPI_Comm mpi; // MPI_COMM_NULL in a group of one
    int rank, size;
    int *ranks; // [size] the members' ranks in the job; NULL in a group of one
};

// Ends the job with place, the call's name and what MPI says, if an MPI call failed.
#define comm_check(call) comm_check_code(call, __func__, #call)
void comm_check_code(int code, const char *place, const char *call);

// The ranks of the job on this host.
struct comm *comm_host(void);

// Bytes of one message at most, and of the buffer that sums are made in; larger things go in several. Tests set them.
extern size_t comm_message_bytes, comm_sum_bytes;

#endif
