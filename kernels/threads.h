// Threads of OpenMP: the CPU's operations, and what the host of a GPU computes.
#ifndef MOK_KERNELS_THREADS_H
#define MOK_KERNELS_THREADS_H

// The first call of the program, with main's argv: gives each rank of a host its part of the cores. May start the program
// again with another environment, since OpenMP reads its settings when it is loaded.
void threads_start(char **argv);

#endif
