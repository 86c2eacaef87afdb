#!/bin/sh
# The MoE layer and the model in the GPU build against the CPU build, as tests/test_gpu_operations.sh does for operations
# (tests/gpu_model.c). Prints TAP for tests/run.sh.
GPU_PROGRAM=gpu_model exec sh tests/test_gpu_operations.sh
