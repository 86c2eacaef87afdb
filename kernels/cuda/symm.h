// What needs NCCL's device header, which is C++.
#ifndef MOK_KERNELS_CUDA_SYMM_H
#define MOK_KERNELS_CUDA_SYMM_H

#include <nccl.h>

#ifdef __cplusplus
extern "C" {
#endif

// Ranks that load and store in each other's memory: consecutive ones of the group, this one among them.
int symm_team_size(ncclComm_t comm);
// peers [n] (device) become the addresses here of the window's pieces, by rank of the team.
void symm_write_peers(void **peers, ncclWindow_t window, int n);

#ifdef __cplusplus
}
#endif

#endif
