#!/bin/sh
# What starting a program as several ranks brings: results of all of them as one line, no process that stays behind, and
# cores that are shared out. Prints TAP for tests/run.sh. `make test` sets COMPILE, LIBS and MPIRUN; MOK_TRAIN names
# another build than build/cpu/train.
set -u

. tests/tap.sh
train=${MOK_TRAIN:-build/cpu/train}
echo "1..8"

# A program of two tests that goes wrong in the way its environment says.
cat >"$scratch/ranks.c" <<'END'
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    const char *way = getenv("WAY");
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (rank == 0) printf("1..2\nok 1 - %d ranks\n", size), fflush(stdout);
    if (rank == 1 && strcmp(way, "dies") == 0) raise(SIGKILL);
    while (rank == 1 && strcmp(way, "hangs") == 0) pause();
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) puts("ok 2 - the end");
    if (rank == 1 && strcmp(way, "fails") == 0) fprintf(stderr, "rank 1 is not content\n");
    MPI_Finalize();
    return rank == 1 && strcmp(way, "fails") == 0;
}
END
# shellcheck disable=SC2086
$COMPILE "$scratch/ranks.c" -o "$scratch/ranks" $LIBS || echo "# the program does not build"

# Runs it as $2 ranks, rank 1 of them in the way $1.
run_ranks() {
    [ "$1" = hangs ] && seconds=2 || seconds=60
    WAY=$1 TEST_SECONDS=$seconds sh tests/run.sh "$2:$scratch/ranks" >"$scratch/report" 2>&1
    status=$?
    cat "$scratch/report"
    return "$status"
}

says() { grep -q -e "$1" "$scratch/report"; }

# No process of the program is left; the launcher may need a moment to end them.
none_left() {
    for wait in 0 0.2 1 3; do
        sleep "$wait"
        left=$(ls -l /proc/[0-9]*/exe 2>/dev/null | grep "$scratch/ranks")
        [ "$left" ] || return 0
    done
    echo "$left"
    return 1
}

ranks_count_once() { run_ranks well 3 && says "(3 ranks) *2 passed *0 failed" && says "^2 passed, 0 failed$"; }
one_rank_is_said() { run_ranks well 1 && says "(1 rank) *2 passed *0 failed"; }

other_ranks_may_fail() {
    run_ranks fails 3 && return 1
    says "rank 1 is not content" && says "=> exit status .* though no test failed" && says "^2 passed, 1 failed$"
}

# (a launch that went on without its dead rank: jobs that never end)
dead_rank_ends_the_others() {
    run_ranks dies 3 && return 1
    says " 1 failed$" && none_left # what the first printed before may be lost
}

hanging_rank_is_ended_with_the_others() {
    run_ranks hangs 3 && return 1
    says "=> stopped after 2 s" && none_left
}

interrupted_run_leaves_nothing() {
    WAY=hangs sh tests/run.sh "3:$scratch/ranks" >"$scratch/report" 2>&1 &
    sleep 1
    kill "$!"
    wait "$!"
    [ $? = 130 ] && none_left
}

# What a program starts with, and how many threads it then has.
cat >"$scratch/threads.c" <<'END'
#include <omp.h>
#include <stdio.h>
#include "kernels/kernels.h"
int main(int argc, char **argv) {
    (void)argc;
    device_start(argv);
    return printf("%d threads\n", omp_get_max_threads()) < 0;
}
END
# shellcheck disable=SC2086
$COMPILE "$scratch/threads.c" "${train%/*}/libmok.a" -o "$scratch/threads" $LIBS || echo "# the program does not build"

# $1: the threads that a program must have; the rest: its environment.
has_threads() {
    threads=$1
    shift
    env -u OMP_NUM_THREADS "$@" "$scratch/threads" | tee "$scratch/report"
    says "^$threads threads"
}

cores=$(nproc)
part_of() { [ "$cores" -lt "$1" ] && echo 1 || echo $((cores / $1)); }

# (every rank with a thread for each core: llm.c and many others)
ranks_share_the_cores() {
    env -u OMP_NUM_THREADS ${MPIRUN:-mpirun} -n 2 "$train" --device >"$scratch/report" 2>&1
    cat "$scratch/report"
    [ "$(grep -c " $(part_of 2) thread" "$scratch/report")" = 1 ] || return 1 # rank 0 speaks for all
    has_threads "$cores" NOTHING=1 &&
        has_threads "$(part_of 2)" OMPI_COMM_WORLD_LOCAL_SIZE=2 &&
        has_threads "$(part_of 2)" MPI_LOCALNRANKS=2 GOMP_SPINCOUNT=100 &&
        has_threads 1 MPI_LOCALNRANKS=$((cores + 1)) &&
        has_threads 3 MPI_LOCALNRANKS=2 OMP_NUM_THREADS=3
}

# Slurm counts a job's ranks node by node.
ranks_of_the_own_node_count() {
    has_threads "$cores" SLURM_STEP_TASKS_PER_NODE='1(x2),2' SLURM_NODEID=1 &&
        has_threads "$(part_of 2)" SLURM_STEP_TASKS_PER_NODE='1(x2),2' SLURM_NODEID=2 &&
        has_threads "$(part_of 2)" SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 &&
        has_threads "$cores" SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=5
}

check "ranks count once" ranks_count_once
check "one rank is said" one_rank_is_said
check "other ranks than the first may fail" other_ranks_may_fail
check "a dead rank ends the others" dead_rank_ends_the_others
check "a hanging rank is ended with the others" hanging_rank_is_ended_with_the_others
check "an interrupted run leaves nothing" interrupted_run_leaves_nothing
check "ranks share the cores" ranks_share_the_cores
check "ranks of the own node count" ranks_of_the_own_node_count
