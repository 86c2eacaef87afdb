#!/bin/sh
# Whole runs of the GPU build on one GPU: the same curve as the CPU's, the same bytes again, checkpoints that both builds
# read, memory as planned, both MoE layers. Prints TAP for tests/run.sh; tests/gpu_runs.sh says which variables it reads.
set -u

. tests/gpu_runs.sh
small="$any --moe alltoall"

# ---- one GPU ----

# shellcheck disable=SC2086
curve_is_that_of_the_cpu() {
    train "$cpu" cpu $unit && train "$gpu" gpu $unit && close_losses cpu gpu "$noise"
}

# shellcheck disable=SC2086
curve_of_the_tiny_preset_is_that_of_the_cpu() {
    tiny="--preset tiny $small --steps 20 --warmup 5 --save-every 0"
    train "$cpu" tiny-cpu $tiny && train "$gpu" tiny-gpu $tiny && close_losses tiny-cpu tiny-gpu "$noise"
}

# A seed of its own is another run: the comparison sees it.
# shellcheck disable=SC2086
other_seed_is_another_curve() {
    train "$gpu" other $unit --seed 7 || return 1
    ! close_losses gpu other "$noise"
}

# shellcheck disable=SC2086
second_run_has_the_same_bytes() {
    train "$gpu" again $unit && same_losses gpu again &&
        diff -r "$scratch/gpu/step-00000010" "$scratch/again/step-00000010" &&
        diff -r "$scratch/gpu/step-00000020" "$scratch/again/step-00000020"
}

# shellcheck disable=SC2086
recompute_has_the_same_bytes() {
    for level in moe block; do
        train "$gpu" "recompute-$level" $unit --recompute "$level" && same_losses gpu "recompute-$level" &&
            diff -r "$scratch/gpu/step-00000020" "$scratch/recompute-$level/step-00000020" || return 1
    done
}

resumed_run_has_the_same_bytes() {
    cut_run gpu resumed && train "$gpu" resumed --resume --moe alltoall && same_losses gpu resumed &&
        diff -r "$scratch/gpu/step-00000020" "$scratch/resumed/step-00000020"
}

gpu_goes_on_from_the_cpu() {
    cut_run cpu cpu-gpu && train "$gpu" cpu-gpu --resume --moe alltoall && close_losses cpu cpu-gpu "$noise" 11
}

cpu_goes_on_from_the_gpu() {
    cut_run gpu gpu-cpu && train "$cpu" gpu-cpu --resume --moe alltoall && close_losses gpu gpu-cpu "$noise" 11
}

# Loss of the GPU's weights on held-out text, by both builds.
both_evaluate_alike() {
    for build in "$cpu" "$gpu"; do
        "$build" --evaluate --from "$scratch/gpu" --moe alltoall || return 1
    done >"$scratch/evaluated"
    same_evaluations
}

generates_the_same_text_again() {
    for i in 1 2; do
        "$gpu" --generate 50 --from "$scratch/gpu" --seed 3 >"$scratch/text.$i" || return 1
    done
    [ -s "$scratch/text.1" ] && cmp "$scratch/text.1" "$scratch/text.2"
}

# Room for everything is taken at the start; what the program then says it has used is what the plan said.
# shellcheck disable=SC2086
memory_is_as_planned() {
    train "$gpu" "memory-$1" --preset small $any --moe "$1" --steps 3 --warmup 1 --save-every 0 --tokens-per-step 8192 ||
        return 1
    line=$(grep '^memory: planned ' "$scratch/memory-$1.out") || { echo "no line \"memory: planned ...\""; return 1; }
    echo "$line"
    percent=${line##*(}
    echo "${percent%% *}" | awk '{ exit !($1 >= 98 && $1 <= 102) }'
}

# lost_wait WHAT SECONDS PATTERN: what gpu_lost_wait WHAT says about a wait inside a kernel that never ends, and no
# earlier than after so many seconds.
lost_wait() {
    start=$(date +%s)
    # shellcheck disable=SC2086
    timeout -s KILL 60 "${gpu%/train}/tests/gpu_lost_wait" $1 >"$scratch/lost" 2>&1
    code=$?
    seconds=$(($(date +%s) - start))
    cat "$scratch/lost"
    echo "exit code $code after $seconds s"
    [ "$code" = 1 ] && [ "$seconds" -ge "$2" ] && [ "$seconds" -lt 30 ] && [ "$(grep -c 'mok: error' "$scratch/lost")" = 1 ] &&
        grep -q '^ok: a wait that ends' "$scratch/lost" && ! grep -q 'failed' "$scratch/lost" && grep -q "$3" "$scratch/lost"
}
lost_wait_ends_the_job() {
    lost_wait "" 6 'thread 33 of block 2 waited over 8 seconds inside a kernel for the rows that pass by'
}
lost_counter_ends_the_job() {
    lost_wait counter 6 'of block 2 waited over 8 seconds inside a kernel for pulled groups of row block 5: found 3, wanted 16;' &&
        grep -q '^ok: a counter that has got to 3$' "$scratch/lost"
}
missing_rank_at_a_barrier_ends_the_job() {
    where='at a barrier, before the forward pass of layer 3, for rank 0 of the group (found it at barrier 6, wanted 7); '
    lost_wait barrier 2 "rank 1 of its EP group waited 2 s $where" &&
        grep -q '^ok: a barrier to which both came' "$scratch/lost"
}
lost_rows_of_attention_end_the_job() {
    # Who waits for those rows, or for who waits for them: the last to give up leaves its record.
    lost_wait attention 6 'waited over 8 seconds inside a kernel for .* attention'
}

# shellcheck disable=SC2086
no_visible_gpu_is_refused() { refused GPU env CUDA_VISIBLE_DEVICES= "$gpu" --out "$scratch/none" $unit; }

check "the curve is that of the CPU" curve_is_that_of_the_cpu
check "the curve of the tiny preset is that of the CPU" curve_of_the_tiny_preset_is_that_of_the_cpu
check "another seed is another curve" other_seed_is_another_curve
check "a second run has the same bytes" second_run_has_the_same_bytes
check "recompute levels have the same bytes" recompute_has_the_same_bytes
check "a resumed run has the same bytes" resumed_run_has_the_same_bytes
check "the GPU goes on from the CPU's checkpoint" gpu_goes_on_from_the_cpu
check "the CPU goes on from the GPU's checkpoint" cpu_goes_on_from_the_gpu
check "both evaluate the same weights alike" both_evaluate_alike
check "text is generated again alike" generates_the_same_text_again
if [ "$gpus" -ge 1 ]; then
    check "memory is used as planned" memory_is_as_planned alltoall
    check "no visible GPU is refused" no_visible_gpu_is_refused
    check "a lost wait inside a kernel ends the job" lost_wait_ends_the_job
    check "a lost wait for a counter ends the job" lost_counter_ends_the_job
    check "a rank that misses a barrier inside a kernel ends the job" missing_rank_at_a_barrier_ends_the_job
    if [ "$hopper" = yes ]; then
        check "rows that attention never gets end the job" lost_rows_of_attention_end_the_job
    else
        skip "rows that attention never gets end the job" "attention waits for rows on sm_90 alone"
    fi
else
    skip "memory is used as planned" "the build uses no GPU"
    skip "no visible GPU is refused" "the build uses no GPU"
    skip "a lost wait inside a kernel ends the job" "the build uses no GPU"
    skip "a lost wait for a counter ends the job" "the build uses no GPU"
    skip "a rank that misses a barrier inside a kernel ends the job" "the build uses no GPU"
    skip "rows that attention never gets end the job" "the build uses no GPU"
fi

# ---- the megakernel and its products ----

# Weights of the CPU, so that they are the same ones wherever this runs, and a prompt that they go on from without
# doubt: of the first 12 tokens every one is ahead of all others by more than 1, a hundred times what rounding moves.
taught="--preset unit $small --steps 400 --warmup 10 --lr 1e-2 --save-every 400 --tokens-per-step 256"
goes_on() { "$@" --generate 12 --temperature 0 --prompt "Once upon a time" --from "$scratch/taught"; }

# shellcheck disable=SC2086
both_layers_generate_the_same_text() {
    train "$cpu" taught $taught && goes_on "$cpu" --moe alltoall >"$scratch/text.cpu" || return 1
    for layer in mok alltoall; do
        goes_on "$gpu" --moe "$layer" >"$scratch/text.$layer" && diff "$scratch/text.cpu" "$scratch/text.$layer" || return 1
    done
    goes_on "$gpu" --moe mok --ring-rows 128 >"$scratch/text.ring" && diff "$scratch/text.mok" "$scratch/text.ring"
}

# The loss of those weights on held-out text by both.
both_layers_evaluate_alike() {
    for layer in alltoall mok; do
        "$gpu" --evaluate --from "$scratch/taught" --moe "$layer" || return 1
    done >"$scratch/evaluated"
    same_evaluations
}

# shellcheck disable=SC2086
own_products_have_the_curve_of_the_library() {
    train "$gpu" own $unit --expert-gemm own && close_losses gpu own "$noise"
}

# --plan looks at sizes as a run does.
sizes_that_it_cannot_have_are_refused() {
    refused '--expert-intermediate: found 20, wanted a multiple of 8 .*16 or 24' \
        "$gpu" --plan --preset unit --moe mok --expert-intermediate 20 &&
        refused '--hidden: found 12, wanted a multiple of 8 with --expert-gemm own' \
            "$gpu" --plan --preset unit --moe alltoall --expert-gemm own --hidden 12 &&
        refused '--workers: found 100000, wanted at most [0-9]* (of a GPU, its multiprocessors)' \
            "$gpu" --plan --preset unit --moe mok --workers 100000
}

mok_check "both layers generate the same text" both_layers_generate_the_same_text
mok_check "both layers evaluate alike" both_layers_evaluate_alike
mok_check "own products have the curve of the library's" own_products_have_the_curve_of_the_library
mok_check "sizes that the megakernel cannot have are refused" sizes_that_it_cannot_have_are_refused

# ---- training with the megakernel ----

if [ "$gpus" = 0 ]; then movers="--workers 3 --comm-workers 2"; else movers="--comm-workers 8"; fi

# shellcheck disable=SC2086
megakernel_has_the_curve_of_the_others() {
    train "$gpu" mok $with_mok && close_losses cpu mok "$noise" && close_losses gpu mok "$noise"
}

# shellcheck disable=SC2086
megakernel_has_the_curve_of_the_tiny_preset() {
    train "$gpu" tiny-mok --preset tiny $any --moe mok --steps 20 --warmup 5 --save-every 20 &&
        close_losses tiny-cpu tiny-mok "$noise"
}

# In 300 steps roundings get as far as 4e-2 in the loss of 256 tokens (measured as for the noise, with three seeds), another
# seed as far as 3e-1.
far=8e-2
# shellcheck disable=SC2086
curves_of_both_layers_stay_together() {
    train "$gpu" long $long --moe alltoall && train "$gpu" long-mok $long --moe mok &&
        close_losses long long-mok "$noise" && close_losses long long-mok "$far" 1 "$steps"
}

# A step is one micro-batch.
# shellcheck disable=SC2086
both_layers_have_the_same_bytes() {
    train "$gpu" long-own $long $own --batch 8 && train "$gpu" long-alone $long $alone --batch 8 &&
        same_bytes long-own long-alone "00000$steps"
}

# The same in eight micro-batches: the sums of one are where the next goes on.
# shellcheck disable=SC2086
both_layers_add_gradients_alike() {
    train "$gpu" one-own $few $own --batch 1 && train "$gpu" one-mok $few $alone --batch 1 &&
        same_bytes one-own one-mok 00000020
}

# same_bytes_with FLAGS...: as the run "mok".
# shellcheck disable=SC2086
same_bytes_with() {
    rm -rf "$scratch/same"
    echo "with $*"
    train "$gpu" same $with_mok "$@" && same_bytes mok same 00000020
}

megakernel_has_the_same_bytes_again() { same_bytes_with --seed 1337; }

megakernel_recomputes_the_same_bytes() {
    same_bytes_with --recompute moe && same_bytes_with --recompute block
}

# Of eight experts each one has some rows in a micro-batch: eight macrobatches, of which seven are replayed.
# shellcheck disable=SC2086
rings_have_the_same_bytes() {
    same_bytes_with --ring-rows 128 && same_bytes_with --ring-rows 256 --minibatch-rows 128 --recompute moe &&
        same_bytes_with --ring-rows 128 --recompute block
}

# Some 256 rows of an expert, which macrobatches cut.
# shellcheck disable=SC2086
rings_that_cut_experts_have_the_same_bytes() {
    train "$gpu" tiny-ring --preset tiny $any --moe mok --steps 20 --warmup 5 --save-every 20 --ring-rows 384 \
        --minibatch-rows 128 && same_bytes tiny-mok tiny-ring 00000020
}

# shellcheck disable=SC2086
movers_have_the_same_bytes() { same_bytes_with $movers && same_bytes_with --workers 1; }

megakernel_resumes_with_the_same_bytes() {
    cut_run mok mok-resumed && train "$gpu" mok-resumed --resume --moe mok && same_bytes mok mok-resumed 00000020
}

megakernel_and_cpu_go_on_from_each_other() {
    cut_run cpu cpu-mok && train "$gpu" cpu-mok --resume --moe mok && close_losses cpu cpu-mok "$noise" 11 &&
        cut_run mok mok-cpu && train "$cpu" mok-cpu --resume --moe mok && close_losses mok mok-cpu "$noise" 11
}

# Three layers, two micro-batches, a pass forward and one backward.
# shellcheck disable=SC2086
megakernel_is_traced() {
    train "$gpu" traced $with_mok --trace "$scratch/trace.json" || return 1
    said=
    for what in plan megakernel barrier mok_run "moe backward"; do
        said="$said$(grep -c "\"name\":\"$what\"" "$scratch/trace.json") $what, "
    done
    echo "$said"
    grep '^  mok_' "$scratch/traced.out"
    [ "$said" = "6 plan, 12 megakernel, 24 barrier, 12 mok_run, 6 moe backward, " ] &&
        grep -q '^  mok_run  *12 ' "$scratch/traced.out"
}

# timeline NAME FLAGS...: of layer 2, in the second of two steps of a micro-batch each; recording changes nothing.
# shellcheck disable=SC2086
timeline() {
    plain=$1
    shift
    set -- --preset tiny $any --moe mok --steps 2 --warmup 1 --save-every 0 "$@"
    train "$gpu" "$plain" "$@" &&
        train "$gpu" "$plain-traced" "$@" --trace "$scratch/$plain.json" --trace-layer 2 &&
        same_losses "$plain" "$plain-traced" && python3 tests/timeline.py "$scratch/$plain.json" 2
}
workers_are_traced() { timeline timeline; }
movers_are_traced() { timeline movers --workers 6 --comm-workers 2; }

mok_check "the megakernel has the curve of the CPU and of the other layer" megakernel_has_the_curve_of_the_others
mok_check "and of the tiny preset" megakernel_has_the_curve_of_the_tiny_preset
mok_check "the curves of both layers stay together" curves_of_both_layers_stay_together
mok_check "both layers have the same bytes with the same products" both_layers_have_the_same_bytes
mok_check "both layers add the gradients of micro-batches alike" both_layers_add_gradients_alike
mok_check "the megakernel has the same bytes again" megakernel_has_the_same_bytes_again
mok_check "its recompute levels have the same bytes" megakernel_recomputes_the_same_bytes
mok_check "its rings have the same bytes" rings_have_the_same_bytes
mok_check "rings that cut experts have the same bytes" rings_that_cut_experts_have_the_same_bytes
mok_check "its movers have the same bytes" movers_have_the_same_bytes
mok_check "it resumes with the same bytes" megakernel_resumes_with_the_same_bytes
mok_check "it and the CPU go on from each other's checkpoints" megakernel_and_cpu_go_on_from_each_other
mok_check "its passes are traced" megakernel_is_traced
if command -v python3 >/dev/null; then
    mok_check "what its workers do in a layer is traced" workers_are_traced
    mok_check "and what those that only move do" movers_are_traced
else
    skip "what its workers do in a layer is traced" "found no python3"
    skip "and what those that only move do" "found no python3"
fi
if [ "$gpus" -ge 1 ]; then
    mok_check "it uses memory as planned" memory_is_as_planned mok
else
    skip "it uses memory as planned" "the build uses no GPU"
fi
echo "1..$number"
