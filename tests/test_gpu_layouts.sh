#!/bin/sh
# Whole runs of the GPU build as several ranks, each on a GPU of its own: at every layout the curve of one rank and the same
# bytes again, runs that go on at other layouts, ranks that are killed or stop. Prints TAP for tests/run.sh; what needs more
# GPUs than there are is skipped. tests/gpu_runs.sh says which variables this reads.
set -u

. tests/gpu_runs.sh

# A build without GPUs is not asked for more ranks than show every kind of layout.
fits() { if [ "$gpus" = 0 ]; then [ "$1" = 2 ] || [ "$1" = 4 ]; else [ "$1" -le "$gpus" ]; fi; }

most=2 most_even=4
for n in 3 4 6 8; do
    fits "$n" || continue
    most=$n
    [ "$n" = 3 ] || most_even=$n
done

# ranks_check N "NAME" COMMAND...: where there is a GPU for each of N ranks.
ranks_check() {
    wanted=$1
    shift
    if fits "$wanted"; then check "$@"; else skip "$1" "found $gpus GPUs, wanted $wanted"; fi
}

# layer_check LAYER N "NAME" COMMAND...: as ranks_check; the layer "mok" needs the megakernel too.
layer_check() {
    layer=$1 wanted=$2
    shift 2
    if [ "$layer" = mok ] && fits "$wanted"; then mok_check "$@"; else ranks_check "$wanted" "$@"; fi
}

# gpus_check LAYER N "NAME" COMMAND...: as layer_check, and in no build without GPUs.
gpus_check() {
    if [ "$gpus" = 0 ]; then skip "$3" "found 0 GPUs, wanted $2"; else layer_check "$@"; fi
}

# ---- the curve of one rank ----

# one PRESET LAYER: the run one-PRESET-LAYER of one rank, made when it is first asked for.
# shellcheck disable=SC2086
one() {
    [ -d "$scratch/one-$1-$2" ] || train "$gpu" "one-$1-$2" --preset "$1" $short --moe "$2"
}

# have_the_curve_of_one N EP PRESET LAYER: of N ranks in groups of EP, the run PRESET-LAYER-N-EP
# shellcheck disable=SC2086
have_the_curve_of_one() {
    one "$3" "$4" && ranks "$1" "$3-$4-$1-$2" --preset "$3" $short --moe "$4" --ep "$2" &&
        close_losses "one-$3-$4" "$3-$4-$1-$2" "$noise"
}

# Pieces and levels change when things are done, not what.
# shellcheck disable=SC2086
two_ranks_have_the_same_bytes_in_pieces() {
    ranks 2 pieces $unit --ep 2 --alltoall-chunks 3 && same_losses unit-alltoall-2-2 pieces &&
        ranks 2 levels $unit --ep 2 --alltoall-chunks 2 --recompute moe &&
        same_bytes unit-alltoall-2-2 levels 00000020
}

# The loss of the same weights on held-out text, by the megakernel of two ranks and the other layer of one.
# shellcheck disable=SC2086
two_ranks_evaluate_alike() {
    weights="--evaluate --from $scratch/one-unit-alltoall"
    "$gpu" $weights --moe alltoall >"$scratch/evaluated" && $mpirun -n 2 "$gpu" $weights --moe mok >>"$scratch/evaluated" &&
        same_evaluations
}

# shellcheck disable=SC2086
both_layers_of_two_ranks_have_the_same_bytes() {
    ranks 2 long-own $long $own --ep 2 && ranks 2 long-alone $long $alone --ep 2 &&
        same_bytes long-own long-alone "00000$steps"
}

# Micro-batches of one sequence: 3 and 6 ranks have unequally many.
# shellcheck disable=SC2086
both_layers_have_the_same_bytes() {
    ranks "$1" "own-$1" --preset "$2" $short $own --ep "$1" --batch 1 &&
        ranks "$1" "alone-$1" --preset "$2" $short $alone --ep "$1" --batch 1 && same_bytes "own-$1" "alone-$1" 00000020
}

# shellcheck disable=SC2086
rings_have_the_same_bytes() {
    ranks "$1" "ring-$1" --preset "$2" $short --moe mok --ep "$1" --ring-rows 128 --recompute moe &&
        same_bytes "$2-mok-$1-$1" "ring-$1" 00000020
}

# shellcheck disable=SC2086
more_ranks_than_gpus_are_refused() {
    refused GPU $mpirun -n "$((gpus + 1))" "$gpu" --out "$scratch/many" $unit
}

# 12 experts where 3 and 6 ranks are to have equally many.
for n in 2 3 4 6 8; do
    case $n in 3 | 6) preset="unit-12" ;; *) preset=unit ;; esac
    for layer in alltoall mok; do
        layer_check "$layer" "$n" "$n ranks that share the experts have the curve of one ($layer)" \
            have_the_curve_of_one "$n" "$n" "$preset" "$layer"
    done
    if [ "$n" = 2 ]; then
        layer_check mok 2 "both layers of 2 ranks have the same bytes" both_layers_of_two_ranks_have_the_same_bytes
    else
        layer_check mok "$n" "both layers of $n ranks have the same bytes" both_layers_have_the_same_bytes "$n" "$preset"
    fi
    layer_check mok "$n" "rings of $n ranks have the same bytes" rings_have_the_same_bytes "$n" "$preset"
done
for layer in alltoall mok; do
    layer_check "$layer" 3 "3 ranks that share 8 experts have the curve of one ($layer)" \
        have_the_curve_of_one 3 3 unit "$layer"
done
ranks_check 2 "pieces and recompute levels of two ranks have the same bytes" two_ranks_have_the_same_bytes_in_pieces
layer_check mok 2 "two ranks evaluate with the megakernel as one does" two_ranks_evaluate_alike
if [ "$gpus" -ge 1 ]; then
    check "more ranks than GPUs are refused" more_ranks_than_gpus_are_refused
else
    skip "more ranks than GPUs are refused" "the build uses no GPU"
fi

# ---- several groups ----

# shellcheck disable=SC2086
groups_have_the_same_bytes_again() {
    have_the_curve_of_one "$1" "$2" unit "$3" && ranks "$1" "again-$3-$1-$2" $few --moe "$3" --ep "$2" &&
        same_bytes "unit-$3-$1-$2" "again-$3-$1-$2" 00000020
}

for layer in alltoall mok; do
    layer_check "$layer" 2 "2 ranks with all experts each have the curve of one ($layer)" \
        have_the_curve_of_one 2 1 unit "$layer"
    for shape in "4 2" "8 2" "8 4"; do
        n=${shape% *} ep=${shape#* }
        layer_check "$layer" "$n" "$n ranks in groups of $ep have the curve of one, and the same bytes again ($layer)" \
            groups_have_the_same_bytes_again "$n" "$ep" "$layer"
    done
done

# ---- other layouts go on ----

# goes_on RUN N EP: after step 10 of the run RUN, as N ranks in groups of EP
goes_on() {
    cut_run "$1" "$1-to-$2-$3" || return 1
    if [ "$2" = 1 ]; then
        train "$gpu" "$1-to-1-1" --resume --moe mok
    else
        ranks "$2" "$1-to-$2-$3" --resume --moe mok --ep "$3"
    fi && close_losses "$1" "$1-to-$2-$3" "$noise" 11
}

same_layout_goes_on_with_the_same_bytes() {
    goes_on unit-mok-2-2 2 2 && same_bytes unit-mok-2-2 unit-mok-2-2-to-2-2 00000020
}

layer_check mok 2 "two ranks resume with the same bytes" same_layout_goes_on_with_the_same_bytes
layer_check mok 2 "two ranks that share the experts go on with all experts each" goes_on unit-mok-2-2 2 1
layer_check mok 2 "two ranks with all experts each go on and share them" goes_on unit-mok-2-1 2 2
layer_check mok 2 "one rank goes on as two" goes_on one-unit-mok 2 2
layer_check mok 2 "two ranks go on as one" goes_on unit-mok-2-2 1 1
if [ "$most" -gt 2 ]; then
    layer_check mok "$most" "two ranks go on as $most" goes_on unit-mok-2-2 "$most" "$most"
else
    skip "two ranks go on as more" "found $gpus GPUs, wanted 3"
fi

# ---- lost ranks ----

# begin N EP LAYER FLAGS...: a run without end, which has got to step 5. $job is what started it, $victim one rank's
# process, $said what the run says.
# shellcheck disable=SC2086
begin() {
    endless=$scratch/endless-$1-$3 said=$scratch/endless-$1-$3.out
    ranks=$1
    layout="--ep $2 --moe $3"
    shift 3
    rm -rf "$endless"
    timeout 100 $mpirun -n "$ranks" "$gpu" --out "$endless" --preset unit $any $layout --steps 1000000 --warmup 1 \
        --save-every 0 "$@" >"$said" 2>&1 &
    job=$!
    until grep -q '"step":5,' "$endless/log.jsonl" 2>/dev/null; do
        kill -0 "$job" 2>/dev/null || { tail -n 5 "$said"; return 1; }
        sleep 0.2
    done
    victim=$(pgrep -f "$gpu --out $endless" | while read -r pid; do
        [ "$(tr '\0' '\n' <"/proc/$pid/cmdline" | head -n 1)" = "$gpu" ] && echo "$pid"
    done | tail -n 1)
    [ "$victim" ] || { echo "found no rank's process"; return 1; }
}

# end_within SECONDS: the exit code of the job, in $code.
end_within() {
    start=$(date +%s)
    wait "$job"
    code=$?
    seconds=$(($(date +%s) - start))
    echo "exit code $code after $seconds s"
    [ "$seconds" -le "$1" ]
}

# killed_rank_ends_the_job N EP LAYER: soon, and not with code 0.
killed_rank_ends_the_job() {
    begin "$1" "$2" "$3" || return 1
    kill -9 "$victim"
    end_within 10 && [ "$code" != 0 ] && [ "$code" != 124 ]
}

# Of two ranks the other one names it; or its group, where NCCL waits.
stopped_rank_is_named() {
    begin 2 2 "$1" --timeout 5 || return 1
    stopped=$(tr '\0' '\n' <"/proc/$victim/environ" | sed -nE 's/^(PMI|OMPI_COMM_WORLD|PMIX)_RANK=//p' | head -n 1)
    echo "rank $stopped is stopped"
    kill -STOP "$victim"
    end_within 20
    ended=$?
    kill -9 "$victim" 2>/dev/null # should it still be there
    grep 'mok: error' "$said"
    waits="mok: error: rank $((1 - stopped)): .* waited 5 s "
    [ "$ended" = 0 ] && [ "$code" = 1 ] &&
        grep -qE "$waits.*for (rank $stopped|the other ranks of a group of 2) " "$said"
}

# What gpu_symm says about symmetric memory and every collective on device memory.
collectives_work() {
    $mpirun -n "$1" "${gpu%/train}/tests/gpu_symm" >"$scratch/symm" 2>&1
    code=$?
    cat "$scratch/symm"
    [ "$code" = 0 ] && [ "$(grep -c '^ok: ' "$scratch/symm")" -ge 4 ]
}

for layer in alltoall mok; do
    gpus_check "$layer" 2 "a killed rank ends the job ($layer)" killed_rank_ends_the_job 2 2 "$layer"
    gpus_check "$layer" "$most_even" "a killed rank ends the job of several groups ($layer)" \
        killed_rank_ends_the_job "$most_even" 2 "$layer"
    gpus_check "$layer" 2 "a rank that stops is named ($layer)" stopped_rank_is_named "$layer"
done
gpus_check any 2 "symmetric memory and collectives of NCCL" collectives_work "$most"
echo "1..$number"
