// Threads that wait between passes, so that a pass need not start any.
#ifndef MOK_KERNELS_CPU_POOL_H
#define MOK_KERNELS_CPU_POOL_H

struct pool;

// A pool for `workers` workers: the thread that calls pool_run is worker 0, the others wait for it. For one caller at a
// time. Ends the program when a thread cannot be started.
struct pool *pool_open(int workers);
void pool_close(struct pool *p);

// Calls work(argument, 0 .. workers - 1), each on its own thread; returns when all have returned.
void pool_run(struct pool *p, void (*work)(void *argument, int worker), void *argument);

#endif
