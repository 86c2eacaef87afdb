#!/usr/bin/env bash
#SBATCH --job-name=mok-rack
#SBATCH --nodes=18
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --signal=USR1@300
#
# One NVL72 rack: 18 nodes of 4 GPUs, all of them within reach of each other by NVLink. One EP group of 72 ranks, or with
# EP=36, 24, 18, ... data-parallel groups of as many. From the root of the repository:
#
#   sbatch --segment=18 scripts/launch/slurm-rack.sh --preset qwen3-moe-mini --out runs/rack ...
#   EP=36 sbatch --segment=18 scripts/launch/slurm-rack.sh ...
#   DRY_RUN=1 scripts/launch/slurm-rack.sh --preset dsv3          the plan of this layout; starts no ranks, needs no Slurm
#
# --segment is for clusters with Slurm's topology/block: all nodes in one rack. A model needs at least EP experts. The plan
# says how much memory a rank takes: look before you start.
# With fewer nodes (sbatch --nodes=16) the EP group is what they have.
# EP, MPI_TYPE, PROGRAM and SIGUSR1: as in slurm-node.sh
#
# Not run on a rack: the plan and this command line are all that was run.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
. scripts/launch/common.bash

per_node=4
nodes=${SLURM_JOB_NUM_NODES:-18}
[ "$nodes" -le 18 ] || fail "found $nodes nodes, wanted at most the 18 of a rack; several racks are for slurm-racks.sh"
ranks=$((nodes * per_node))
[ $# -gt 0 ] || set -- --preset qwen3-moe-mini
srun_words "$per_node"
launch "$ranks" "${EP:-$ranks}" "${words[@]}" -- "$@"
