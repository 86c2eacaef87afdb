#!/bin/sh
# That the tests of the GPU can fail, shown without one: the double build takes its place, or the CPU build with BF16
# results (tests/rounding.c). Prints TAP for tests/run.sh.
# `make test` sets DOUBLE; MOK_TRAIN names another build than build/cpu/train.
set -u

. tests/tap.sh
train=${MOK_TRAIN:-build/cpu/train}
cpu=${train%/*}/tests rounded=${train%/*}/rounded/tests double=${DOUBLE:-build/double}/tests
mpirun=${MPIRUN:-mpirun}
echo "1..11"

record() { "$cpu/gpu_operations" --record "$scratch/$1" --small $2; }
compare() { "$double/gpu_operations" --compare "$scratch/$1" --small $2; }

builds_agree() { record right "" && compare right ""; }

# What the GPU's one rounding to BF16 brings stays within its limits.
rounding_is_within_the_limits() { compare right --round; }

# One element of every output is wrong: every output is reported.
every_wrong_output_is_found() {
    record wrong --perturb >"$scratch/recorded" || return 1
    compare wrong "" >"$scratch/compared" && return 1
    wrong=$(sed -n 's/^# perturbed \([0-9]*\) outputs/\1/p' "$scratch/recorded")
    found=$(sed -n 's/^not ok .* \([0-9]*\) failures$/\1/p' "$scratch/compared" | awk '{ sum += $1 } END { print sum }')
    echo "$found of $wrong wrong outputs were found"
    [ "$wrong" -gt 1000 ] && [ "$found" = "$wrong" ] && grep -q '^not ok .* attention_backward' "$scratch/compared"
}

missing_output_is_found() {
    "$cpu/gpu_operations" --record "$scratch/part" --small --only matmul >/dev/null || return 1
    compare part "" >"$scratch/compared" && return 1
    grep -q '^# swiglu_forward .* is not in ' "$scratch/compared" && grep -q '^ok .* matmul_tn' "$scratch/compared"
}

compare_models() { "$rounded/gpu_model" --compare "$scratch/models" --tiny; }

models_agree() { "$cpu/gpu_model" --record "$scratch/models" --tiny && compare_models; }

# One term of the model left out: the gradients say so, each time.
every_mistake_is_found() {
    for mistake in router balance residual shared rotation target gate norm; do
        export MOK_MISTAKE=$mistake
        compare_models >"$scratch/compared" && echo "$mistake was not found" && return 1
        grep -q '^not ok .* model gradient' "$scratch/compared" || return 1
    done
    unset MOK_MISTAKE
}

# (a fault of the GPU ends the program: what was compared before must not be lost)
program_that_ends_says_what_it_found() {
    MOK_MISTAKE=end compare_models >"$scratch/compared" && return 1
    cat "$scratch/compared"
    grep -q '^ok .* moe layer' "$scratch/compared" && grep -q '^not ok .* model gradient' "$scratch/compared" &&
        grep -q 'ended in this case' "$scratch/compared"
}

compare_mok() { "$1/gpu_mok" --compare "$scratch/$2" $3; }

megakernels_agree() {
    "$cpu/gpu_mok" --record "$scratch/mok" --small && compare_mok "$double" mok --tiny && compare_mok "$rounded" mok --small
}

every_wrong_output_of_the_megakernel_is_found() {
    "$cpu/gpu_mok" --record "$scratch/wrong" --tiny --perturb >"$scratch/recorded" || return 1
    compare_mok "$cpu" wrong --tiny >"$scratch/compared" && return 1
    wrong=$(sed -n 's/^# perturbed \([0-9]*\) outputs/\1/p' "$scratch/recorded")
    found=$(sed -n 's/^not ok .* \([0-9]*\) failures$/\1/p' "$scratch/compared")
    echo "$found of $wrong wrong outputs were found"
    [ "$wrong" -gt 50 ] && [ "$found" = "$wrong" ]
}

# mok_mistake NAME WORDS WHERE: found, and said to be there.
mok_mistake() {
    MOK_MISTAKE=$1 compare_mok "$rounded" mok "$2" >"$scratch/compared" && echo "$1 was not found" && return 1
    grep "$3" "$scratch/compared" | head -n 1
    grep -q "$3" "$scratch/compared" || { echo "$1: nothing reads $3" && return 1; }
}

every_mistake_in_the_megakernel_is_found() {
    mok_mistake rows --tiny '^# layer .*: y: norm' && mok_mistake weight --tiny '^# layer .*: hidden: norm' &&
        mok_mistake place "--only rings" '^# rings .*: y: EP .*other bits' &&
        mok_mistake behind --tiny '^# layer .*: memory behind array' &&
        mok_mistake walk --tiny '^# layer .*: plan of 1, rank 0: integer' &&
        mok_mistake weighted --tiny '^# layer .*: d gates: norm' &&
        mok_mistake stored --tiny '^# layer .*: d w13: .* added.*other bits' &&
        mok_mistake replay --tiny '^# layer .*: dx: EP 1.*replay: found other bits' &&
        mok_mistake short --tiny '^# layer .*: d w2 from kept rows: norm'
}

# rank_mistake NAME PROGRAM WHERE: two ranks end, and one says that it is there.
rank_mistake() {
    # shellcheck disable=SC2086
    MOK_MISTAKE=$1 OMP_NUM_THREADS=1 timeout 60 $mpirun -n 2 "$rounded/$2" >"$scratch/compared" 2>&1 &&
        echo "$1 was not found" && return 1
    grep "$3" "$scratch/compared" | head -n 1
    grep -q "$3" "$scratch/compared" || { echo "$1: nothing reads $3" && return 1; }
}

mistakes_of_one_rank_are_found() {
    rank_mistake moved gpu_ranks 'rank [01] of 2: .* mok, first micro-batch: .* of block 0: found other bits' &&
        rank_mistake replica gpu_ranks_training "rank 1 of 2: .* EP 1, .*: experts' weights: found other bits" &&
        rank_mistake bias gpu_ranks_training 'rank 1 of 2: .*: router biases: found other bits'
}

check "builds agree" builds_agree
check "rounding is within the limits" rounding_is_within_the_limits
check "every wrong output is found" every_wrong_output_is_found
check "a missing output is found" missing_output_is_found
check "models agree" models_agree
check "every mistake in a model is found" every_mistake_is_found
check "a program that ends says what it found" program_that_ends_says_what_it_found
check "megakernels agree" megakernels_agree
check "every wrong output of the megakernel is found" every_wrong_output_of_the_megakernel_is_found
check "every mistake in the megakernel is found" every_mistake_in_the_megakernel_is_found
check "mistakes of one rank are found" mistakes_of_one_rank_are_found
