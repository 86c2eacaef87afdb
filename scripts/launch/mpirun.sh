#!/usr/bin/env bash
# Ranks by mpirun, on this host or on those of a hostfile. From the root of the repository:
#
#   scripts/launch/mpirun.sh --preset moonlight-mini --out runs/mini        as many ranks as nvidia-smi sees GPUs
#   RANKS=16 EP=8 HOSTFILE=hosts scripts/launch/mpirun.sh --preset moonlight ...
#   DRY_RUN=1 RANKS=8 scripts/launch/mpirun.sh ...                          the plan of this layout; starts no ranks
#
# RANKS: of the job.   EP: ranks of an EP group, 0 (default): the program chooses.   HOSTFILE: as the MPI library has it.
# MPIRUN: the launcher of the MPI library that the program was built with, see build/mpi.mk.   PROGRAM: build/cuda/train
# Every host needs the program and the data under the same paths, and one file system for the run folder.
#
# Not tried on several hosts.
set -euo pipefail
. scripts/launch/common.bash

mpirun=${MPIRUN:-mpirun}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || gpus=0
ranks=${RANKS:-$gpus}
whole RANKS "$ranks"
[ "$ranks" -gt 0 ] || fail "found no GPUs here, wanted RANKS=N"
[ $# -gt 0 ] || set -- --preset moonlight-mini

read -r -a words <<<"$mpirun"
words+=(-n "$ranks")
[ -z "${HOSTFILE:-}" ] || words+=(-hostfile "$HOSTFILE")
# Open MPI ties a rank to one core, on which all of its threads would run.
if "${words[0]}" --version 2>/dev/null | grep -q "Open MPI" && [[ $mpirun != *bind-to* ]]; then
    words+=(--bind-to none)
fi
launch "$ranks" "${EP:-0}" "${words[@]}" -- "$@"
