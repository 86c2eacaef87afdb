#!/bin/sh
# The MoE layer and training by ranks that have a GPU each, against one process and against each other, for every number of
# ranks that there are GPUs for (tests/gpu_ranks.c, tests/gpu_ranks_training.c). Prints TAP for tests/run.sh.
#
# MOK_GPU: the build. MOK_GPUS: how many GPUs there are; 0: the CPU build, MOK_CPU, takes its place with few ranks. MPIRUN
# starts ranks.
set -u

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
build=${MOK_GPU:-build/cuda}
gpus=${MOK_GPUS-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')}
code=0 numbers=

for number in 2 3 4 6 8; do
    [ "$number" -le "$gpus" ] && numbers="$numbers $number"
done
if [ "${MOK_GPUS-}" = 0 ]; then
    build=${MOK_CPU:-build/cpu} numbers="2 3"
    export OMP_NUM_THREADS=1
elif [ -z "$numbers" ]; then
    echo "1..1"
    echo "ok 1 - ranks with a GPU each # SKIP found $gpus GPUs, wanted two"
    exit 0
fi

# run RANKS PROGRAM: its results, and if it fails what its ranks say.
run() {
    echo "# $1 ranks of $2"
    # shellcheck disable=SC2086
    timeout -k 10 300 ${MPIRUN:-mpirun} -n "$1" "$build/tests/$2" >"$scratch/results" 2>"$scratch/said" </dev/null
    status=$?
    cat "$scratch/results"
    [ "$status" = 0 ] && return
    echo "# $1 ranks of $2 ended with exit code $status"
    sed 's/^/# /' "$scratch/said"
    code=1
}

for number in $numbers; do
    run "$number" gpu_ranks
    run "$number" gpu_ranks_training
done
exit "$code"
