#!/usr/bin/env bash
#SBATCH --job-name=mok
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=USR1@300
#
# One node of 8 GPUs, one EP group. From the root of the repository:
#
#   sbatch scripts/launch/slurm-node.sh --preset moonlight --out runs/moonlight ...
#   DRY_RUN=1 scripts/launch/slurm-node.sh --preset moonlight     the plan of this layout; starts no ranks, needs no Slurm
#
# Before the time is up, the program gets SIGUSR1: it finishes its step, saves, and ends. Go on by --resume --out ...
# EP: ranks of an EP group (default 8).   MPI_TYPE: what srun --list=mpi names (default pmix; for MPICH pmi2).
# PROGRAM: build/cuda/train
#
# Not tried under Slurm: the plan and this command line are all that was run.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. scripts/launch/common.bash

per_node=8
nodes=${SLURM_JOB_NUM_NODES:-1}
[ "$nodes" -eq 1 ] || fail "found $nodes nodes, wanted 1; several are for slurm-rack.sh"
[ $# -gt 0 ] || set -- --preset moonlight
srun_words "$per_node"
launch "$per_node" "${EP:-$per_node}" "${words[@]}" -- "$@"
