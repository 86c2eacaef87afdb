// For tests under mpirun: rank 0 makes and removes the test's folder (tests/folder.h), and all ranks use it.
#ifndef MOK_TESTS_SHARED_FOLDER_H
#define MOK_TESTS_SHARED_FOLDER_H

#include "tests/folder.h"

#include "kernels/comm.h"

static inline int make_shared_root(void **state) {
    int made = comm_rank(comm_world()) == 0 ? make_root(state) : 0;
    comm_broadcast(comm_world(), root, sizeof root, 0);
    return made;
}

static inline int remove_shared_root(void **state) {
    comm_barrier(comm_world());
    return comm_rank(comm_world()) == 0 ? remove_root(state) : 0;
}

#endif
