// Where the pieces of symmetric memory are: known to kernels only.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" // NCCL's header has some
#include <nccl_device.h>
#pragma GCC diagnostic pop

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/symm.h"

int symm_team_size(ncclComm_t comm) { return ncclTeamLsa(comm).nRanks; }

static __global__ void write_peers(void **peers, ncclWindow_t window, int n) {
    for (int rank = (int)threadIdx.x; rank < n; rank += (int)blockDim.x)
        peers[rank] = ncclGetLsaPointer(window, 0, rank);
}

void symm_write_peers(void **peers, ncclWindow_t window, int n) {
    write_peers<<<1, 128, 0, cuda_stream()>>>(peers, window, n);
    cuda_check_launch();
}
