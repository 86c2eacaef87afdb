// How many threads of OpenMP a rank has, and how they wait.
#include "kernels/threads.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Ranks that the launcher started on this host, 1 if there was none.
static long local_ranks(void) {
    static const char *const names[] = {"MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"}; // MPICH and its kin, Open MPI
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && atol(value) > 0) return atol(value);
    }
    // Slurm's srun: one number for each node of the step, "4(x2),3" is 4, 4 and 3.
    const char *tasks = getenv("SLURM_STEP_TASKS_PER_NODE"), *node = getenv("SLURM_NODEID");
    long nodes_before = tasks && node ? atol(node) : 0;
    while (tasks) {
        char *rest;
        long ranks = strtol(tasks, &rest, 10);
        long nodes = strncmp(rest, "(x", 2) == 0 ? atol(rest + 2) : 1;
        if (nodes_before < nodes) return ranks > 0 ? ranks : 1;
        nodes_before -= nodes;
        tasks = strchr(rest, ',');
        tasks += tasks != NULL;
    }
    return 1;
}

// Cores that the process (0: this one) may run on.
static long usable_cores(pid_t process) {
    cpu_set_t cores;
    return sched_getaffinity(process, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : sysconf(_SC_NPROCESSORS_ONLN);
}

// Sets OMP_NUM_THREADS to this rank's part of the host's cores; false if it stays as it is. The ranks share what their
// launcher, our parent, may use; one that tied us to fewer has shared them out already.
static bool share_cores(void) {
    long ranks = local_ranks();
    if (ranks == 1 || getenv("OMP_NUM_THREADS")) return false;
    long threads = usable_cores(getppid()) / ranks, mine = usable_cores(0);
    if (threads > mine) threads = mine;
    char text[24];
    snprintf(text, sizeof text, "%ld", threads > 1 ? threads : 1);
    return setenv("OMP_NUM_THREADS", text, 1) == 0;
}

// Threads that wait for the others at the end of a loop spin, by OpenMP's default, for as long as a time slice: 10 %
// faster than a short spin on an idle machine, but two to three times slower as soon as other programs want the cores.
// So they spin for some microseconds and then sleep.
static bool spin_briefly(void) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return false;
    return setenv("GOMP_SPINCOUNT", "5000", 1) == 0;
}

// OpenMP reads its settings when it is loaded, hence the second start.
void threads_start(char **argv) {
    bool changed = share_cores();
    changed |= spin_briefly();
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (!changed || length <= 0) return;
    path[length] = 0;
    execv(path, argv); // if it fails: go on as it is
}
