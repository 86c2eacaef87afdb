#!/bin/sh
# The megakernel's passes in the GPU build: against the CPU build and against itself, as
# tests/test_gpu_operations.sh does for operations; small layers against FP64; a soak; replayed from a CUDA graph. Prints
# TAP for tests/run.sh.
gpu=${MOK_GPU:-build/cuda}/tests code=0

GPU_PROGRAM=gpu_mok sh tests/test_gpu_operations.sh || code=1
MOK_CPU=${DOUBLE:-build/double} GPU_PROGRAM=gpu_mok GPU_FLAGS=--tiny sh tests/test_gpu_operations.sh || code=1
timeout -k 10 300 "$gpu/gpu_mok" --soak || code=1
timeout -k 10 300 "$gpu/gpu_mok_graph" || code=1
exit $code
