#!/bin/sh
# scripts/compare.sh and compare.py: blocks by turns on CPU ranks, what comes of them, and what they refuse. Prints TAP for
# tests/run.sh. MPIRUN starts ranks; MOK_TRAIN names another build than build/cpu/train.
set -u

. tests/tap.sh
export PROGRAM="${MOK_TRAIN:-build/cpu/train}" OMP_NUM_THREADS=1 RANKS=2 STEPS=3 WARM=2
echo "1..10"
command -v python3 >/dev/null || {
    for i in 1 2 3 4 5 6 7 8 9 10; do echo "ok $i - comparing # SKIP found no python3"; done
    exit 0
}
few="--preset unit --data stories --batch 2"

# field EXPRESSION: of compare.json, as Python has it in `r`
field() { python3 -c "import json; r = json.load(open('$scratch/run/compare.json')); print($1)"; }

# is EXPRESSION VALUE
is() {
    found=$(field "$1") || return 1
    [ "$found" = "$2" ] && return
    echo "$1: found $found, wanted $2"
    return 1
}

# shellcheck disable=SC2086
blocks_take_turns() {
    OUT=$scratch/run ARMS='mok=--moe mok
other=--moe alltoall --alltoall-chunks 2
seed=--moe alltoall --seed 7' sh scripts/compare.sh $few >"$scratch/out" || return 1
    cat "$scratch/out"
    turns=$(for i in 1 2 3 4 5 6; do cat "$scratch/run/block-$i/arm"; done | tr '\n' ' ')
    [ "$turns" = "mok other seed seed other mok " ] && [ -s "$scratch/run/compare.md" ] &&
        grep -q '^| other | [0-9]* | [0-9.]* |' "$scratch/run/compare.md" &&
        grep -q 'CPU ranks: they show that the comparison works' "$scratch/out"
}

# Six of them: three of each block, behind the warm-up, and not the traced one. 2 ranks x 2 sequences x 32 tokens.
steps_are_counted() {
    is '[a["steps"] for a in r["arms"]]' '[6, 6, 6]' && is 'len(r["arms"][0]["losses"])' 6 &&
        is 'round(r["arms"][0]["tokens_per_second"] * r["arms"][0]["ms_median"] / 1000)' 128 &&
        is 'sorted(r["arms"][0]["ms"])[3] == r["arms"][0]["ms_median"]' True
}

# Median and share by another way, from one block's files.
numbers_are_those_of_the_logs() {
    logged=$(sed -n 's/.*"step":[345],.*"seconds":\([0-9.e-]*\),.*/\1/p' "$scratch/run/block-1/run/log.jsonl" | sort -g |
        sed -n 2p)
    is "abs(r['arms'][0]['ms_median_of_blocks'][0] - 1000 * $logged) < 1e-6" True
}

both_layers_have_the_same_losses() {
    is 'r["arms"][1]["loss_off_first"]' 0.0 && is 'all(a["same_losses_in_all_blocks"] for a in r["arms"])' True &&
        grep -q 'mok against other: .* Losses are the same in 6 steps' "$scratch/run/compare.md"
}

other_losses_are_said() {
    is 'r["arms"][2]["loss_off_first"] > 1e-3' True &&
        grep -q 'mok against seed: .* Losses are at most [0-9.e-]* apart' "$scratch/run/compare.md"
}

# Parts are of one step: none is negative, and the layer that exchanges rows stands for it. A step on busy cores may be
# five times as long as the median one; seconds taken for milliseconds would be a thousand times.
parts_add_up() {
    is 'min(min(a["ms_of_parts"].values()) >= 0 for a in r["arms"])' True &&
        is 'all(0 < a["moe_share"] < 1 for a in r["arms"])' True &&
        is 'r["arms"][1]["ms_of_parts"]["communication in MoE"] > 0' True &&
        is 'all(0.2 < sum(a["ms_of_parts"].values()) / a["ms_median"] < 5 for a in r["arms"])' True
}

# arms_of RANKS: the flags of the first three blocks, one behind the other.
# shellcheck disable=SC2086
arms_of() {
    OUT=$scratch/arms-$1 RANKS=$1 STEPS=1 WARM=1 sh scripts/compare.sh $few >"$scratch/out" || return 1
    for i in 1 2 3; do sed 's/.*--batch 2 //' "$scratch/arms-$1/block-$i/flags"; done | tr '\n' ','
}

# Without ARMS. One rank exchanges nothing that could be cut into pieces.
arms_fit_the_ranks() {
    three="--moe mok,--moe alltoall,--moe alltoall --expert-gemm own"
    [ "$(arms_of 1)" = "$three," ] && [ "$(arms_of 2)" = "$three --alltoall-chunks 4," ]
}

# refused PATTERN COMMAND...: exit code 2 and a line that says why.
refused() {
    pattern=$1
    shift
    "$@" >"$scratch/refused" 2>&1
    code=$?
    cat "$scratch/refused"
    echo "exit code $code"
    [ "$code" = 2 ] && grep -q "error: .*$pattern" "$scratch/refused"
}

# shellcheck disable=SC2086
bad_input_is_refused() {
    OUT=$scratch/run refused 'wanted a folder that is new' sh scripts/compare.sh $few &&
        OUT=$scratch/a PROGRAM=./none refused 'found no program ./none' sh scripts/compare.sh $few &&
        OUT=$scratch/a STEPS=0 refused "STEPS: found '0'" sh scripts/compare.sh $few &&
        OUT=$scratch/a RANKS=two refused "RANKS: found 'two'" sh scripts/compare.sh $few &&
        OUT=$scratch/a ARMS='mok' refused 'ARMS: found a line without NAME=' sh scripts/compare.sh $few &&
        [ ! -e "$scratch/a" ]
}

# What the trainer says is passed on, and which run it was.
# shellcheck disable=SC2086
run_that_fails_is_named() {
    OUT=$scratch/b ARMS='good=--moe mok
bad=--moe alltoall --top-k 99' refused 'bad: the run in .*/block-2 failed' sh scripts/compare.sh $few &&
        grep -q 'mok: error: .*--top-k' "$scratch/refused"
}

damaged_measurements_are_refused() {
    cp -r "$scratch/run" "$scratch/damaged"
    echo '{"traceEvents":[' >"$scratch/damaged/block-2/trace.json"
    refused 'block-2/trace.json: found no trace' python3 scripts/compare.py "$scratch/damaged" || return 1
    rm "$scratch/damaged/block-1/arm"
    refused 'block-1/arm: cannot be read' python3 scripts/compare.py "$scratch/damaged" || return 1
    echo '{"step":' >>"$scratch/damaged/block-1/run/log.jsonl"
    refused 'block-1/run/log.jsonl: found a line that is no JSON' python3 scripts/compare.py "$scratch/damaged"
}

check "blocks of the arms take turns" blocks_take_turns
check "steps are those behind the warm-up" steps_are_counted
check "numbers are those of the logs" numbers_are_those_of_the_logs
check "both layers have the same losses" both_layers_have_the_same_losses
check "other losses are said" other_losses_are_said
check "parts of a step add up" parts_add_up
check "arms fit the number of ranks" arms_fit_the_ranks
check "bad input is refused" bad_input_is_refused
check "a run that fails is named" run_that_fails_is_named
check "damaged measurements are refused" damaged_measurements_are_refused
