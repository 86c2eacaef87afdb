#!/usr/bin/env bash
#SBATCH --job-name=mok-racks
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --signal=USR1@300
#
# Several NVL72 racks: experts are shared within a rack (NVLink), racks are data-parallel (the network carries gradients
# and weights alone). From the root of the repository:
#
#   sbatch --nodes=36 --segment=18 scripts/launch/slurm-racks.sh --preset qwen3-moe-mini --out runs/racks ...
#   EP=36 sbatch --nodes=72 --segment=18 scripts/launch/slurm-racks.sh ...
#   DRY_RUN=1 RACKS=4 scripts/launch/slurm-racks.sh ...          the plan of this layout; starts no ranks, needs no Slurm
#
# --segment, of Slurm's topology/block, gives whole racks, and consecutive ranks fill one after the other, so that no EP
# group lies in two. RACKS (default 2) is for the plan; a job has as many as its nodes make.
# EP (default 72), MPI_TYPE, PROGRAM and SIGUSR1: as in slurm-rack.sh
#
# Not run on racks: the plan and this command line are all that was run.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. scripts/launch/common.bash

per_node=4 rack=18
whole RACKS "${RACKS:-2}"
nodes=${SLURM_JOB_NUM_NODES:-$((${RACKS:-2} * rack))}
ep=${EP:-72}
whole EP "$ep"
[ $((nodes % rack)) -eq 0 ] || fail "found $nodes nodes, wanted whole racks of $rack"
if [ "$ep" -eq 0 ] || [ $((rack * per_node % ep)) -ne 0 ]; then
    fail "found EP=$ep, wanted one that divides the $((rack * per_node)) GPUs of a rack"
fi
[ $# -gt 0 ] || set -- --preset qwen3-moe-mini
srun_words "$per_node"
launch "$((nodes * per_node))" "$ep" "${words[@]}" -- "$@"
