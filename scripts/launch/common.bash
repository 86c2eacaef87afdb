# shellcheck shell=bash
# For the scripts beside this one: how they check, plan and start.

program=${PROGRAM:-build/cuda/train}

fail() {
    echo "${0##*/}: error: $*" >&2
    exit 2
}

# whole NAME VALUE: what the environment says must be one.
whole() {
    [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || fail "found $1=$2, wanted a whole number"
}

# launch RANKS EP START... -- FLAG...: START and then the program with these flags, or with DRY_RUN=1 the plan of this
# layout by one process, which starts no ranks.
launch() {
    local ranks=$1 ep=$2 start=()
    shift 2
    while [ "$1" != -- ]; do
        start+=("$1")
        shift
    done
    shift
    if [ ! -f "$program" ] || [ ! -x "$program" ]; then
        fail "found no program $program, wanted one; build it, or name another by PROGRAM=..."
    fi
    whole EP "$ep"
    if [ "$ep" -gt 0 ] && [ $((ranks % ep)) -ne 0 ]; then
        fail "found $ranks ranks with EP=$ep, wanted an EP that divides them"
    fi
    if [ "${DRY_RUN:-0}" != 0 ]; then
        echo "would run:$(printf ' %q' "${start[@]}" "$program" --ep "$ep" "$@")"
        exec "$program" --plan --ranks "$ranks" --ep "$ep" "$@"
    fi
    command -v "${start[0]}" >/dev/null || fail "found no ${start[0]}, wanted it in PATH; DRY_RUN=1 only plans"
    exec "${start[@]}" "$program" --ep "$ep" "$@"
}

# words = one task for each GPU, all GPUs of a node visible to all its tasks: which one is whose, the program finds out by
# MPI_Comm_split_type, and ranks must see each other's GPUs to reach their memory. Consecutive ranks fill a node. A rank
# that dies takes the others along.
srun_words() {
    local per_node=$1
    # shellcheck disable=SC2034
    words=(srun "--mpi=${MPI_TYPE:-pmix}" "--ntasks-per-node=$per_node" "--gpus-per-node=$per_node" --gpu-bind=none
        --distribution=block:block --kill-on-bad-exit=1)
}
