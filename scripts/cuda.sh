#!/bin/sh
# Prints build/cuda.mk, which the Makefile includes: whether the GPU build can be made here, and how many GPUs there are
# that ./train is then built for. CC, CUDA_HOME and NCCL_HOME choose among several installations.
set -u
cd "$(dirname "$0")" || exit 1
. ./probe.sh

# What is named and not there is not taken in silence: the compiler would pass over it, and find another one.
warn() { echo "cuda.sh: warning: found no $1, wanted it; another installation is looked for" >&2; }
[ -z "${CUDA_HOME:-}" ] || [ -x "$CUDA_HOME/bin/nvcc" ] || warn "$CUDA_HOME/bin/nvcc (CUDA_HOME)"
[ -z "${NCCL_HOME:-}" ] || [ -f "$NCCL_HOME/include/nccl.h" ] || warn "$NCCL_HOME/include/nccl.h (NCCL_HOME)"

builds='' gpus=''
home=$(cuda_home) && probe_cublaslt "$home" && probe_nccl "$home" && builds=yes
[ "$builds" ] && gpus=$(gpu_names | awk '{ n += $1 } END { if (n) print n }')
cat <<END
CUDA_PLACE = ${home:-/usr/local/cuda}
CUDA_BUILDS = $builds
CUDA_GPUS = $gpus
END
