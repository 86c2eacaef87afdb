#!/bin/sh
# A small part of the GPU's tests under compute-sanitizer: reads and writes outside of memory (memcheck), threads of a block
# that do not wait for each other (racecheck), memory read before it was written (initcheck). Prints TAP for tests/run.sh.
set -u

. tests/tap.sh
gpu=${MOK_GPU:-build/cuda} cpu=${MOK_CPU:-build/cpu}
sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer
[ -x "$sanitizer" ] || sanitizer=compute-sanitizer
echo "1..9"

"$cpu/tests/gpu_operations" --record "$scratch/record" --tiny >/dev/null || echo "# the CPU build records nothing"
"$cpu/tests/gpu_mok" --record "$scratch/mok" --tiny >/dev/null || echo "# the CPU build records nothing"

# racecheck takes what cp.async.bulk copies for writes of the thread that asked for them, and does not see that readers wait
# for their barrier. One kernel has such copies: the keys' pass of attention on Hopper, which it therefore leaves out.
# Nor does it see at times that a warp has read a task before its first lane says so: among operations the grouped products
# are clean, but not always where layers take many of them.
keys_of_attention='kns=keys_kernelI10head_sizes' grouped_products='kns=grouped_'

# clean TOOL COMMAND...: no error, neither of the tool nor of the program. not_understood: kernels that racecheck leaves out
clean() {
    tool=$1
    shift
    [ "$tool" = racecheck ] && set -- --kernel-name-exclude "$not_understood" "$@"
    "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20 "$@" >"$scratch/report" 2>&1
    code=$?
    grep -v '^ok ' "$scratch/report" | tail -n 60
    echo "exit code $code"
    [ "$code" = 0 ] && grep -Eq 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards' "$scratch/report"
}

not_understood=$keys_of_attention
for tool in memcheck racecheck initcheck; do
    # Every operation, each of its cases twice; poison is written to all memory first, but for what the operation takes itself.
    check "$tool: operations" clean "$tool" "$gpu/tests/gpu_operations" --compare "$scratch/record" --tiny
    check "$tool: two steps" clean "$tool" "$gpu/train" --preset unit --data stories --moe alltoall --steps 2 --warmup 1 \
        --eval-every 0 --sample-tokens 0 --save-every 2 --out "$scratch/$tool"
done
check "memcheck: two steps with the megakernel" clean memcheck "$gpu/train" --preset unit --data stories --moe mok \
    --steps 2 --warmup 1 --eval-every 0 --sample-tokens 0 --save-every 2 --out "$scratch/megakernel"
not_understood=$grouped_products
# Few layers on one rank to three, over poison. Not initcheck: what is poisoned counts as written.
for tool in memcheck racecheck; do
    check "$tool: megakernel" clean "$tool" "$gpu/tests/gpu_mok" --compare "$scratch/mok" --tiny
done
