#!/bin/sh
# The megakernel's plan is shared with CUDA code: kernels/mok_plan.h must be C++ as well as C, and nvcc must take every
# function of it for the device. Prints TAP for tests/run.sh. COMPILE: the C compiler with its flags; nvcc is looked for.
set -u

. tests/tap.sh

# Calls the functions that reach all others.
cat >"$scratch/plan.cu" <<'END'
#include "kernels/mok_plan.h"
#ifdef __CUDACC__
#define KERNEL __global__
#else
#define KERNEL
#endif
extern "C" KERNEL void walk(const mok_shape *s, const mok_plan *p, int index, mok_task *task, mok_wait *waits, int *out) {
    mok_pass pass = index % 2 ? MOK_FORWARD : MOK_BACKWARD;
    *task = mok_task_at(s, p, pass, index);
    out[0] = mok_task_waits(s, p, pass, *task, waits);
    out[1] = mok_task_signals(*task, waits);
    mok_move move = mok_move_at(s, p, pass, index);
    out[2] = mok_pull_waits(s, p, pass, move.block, waits);
    out[3] = mok_push_wait(s, move.block).value + mok_pull_replays(s, pass, move.block);
    out[4] = mok_task_total(s, p, pass) + mok_move_total(s, p) + mok_walk_at(s, p, index) + mok_default_ring(s);
    out[5] = mok_default_minibatch(s->intermediate, 132) + (int)mok_counter_total(s) + (int)mok_ring_row(s, index);
}
END

# compiles COMMAND...: without a word.
compiles() { "$@" 2>&1 | tee "$scratch/words" && [ ! -s "$scratch/words" ]; }

nvcc=
for found in "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" "$(command -v nvcc)"; do
    [ -x "$found" ] && nvcc=$found
done
cxx=$(command -v g++ || command -v clang++)

echo "1..2"
if [ "$cxx" ]; then
    check "the plan is C++" compiles "$cxx" -x c++ -std=c++17 -Wall -Wextra -Wshadow -I. -fsyntax-only "$scratch/plan.cu"
else
    number=$((number + 1))
    echo "ok $number # SKIP the plan is C++ (no g++ or clang++ here)"
fi
if [ "$nvcc" ]; then
    check "nvcc takes the plan for sm_90a and sm_100a" compiles "$nvcc" -std=c++17 -I. -c "$scratch/plan.cu" -o "$scratch/plan.o" \
        -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_100a,code=sm_100a
else
    echo "ok 2 # SKIP nvcc takes the plan (no nvcc here)"
fi
