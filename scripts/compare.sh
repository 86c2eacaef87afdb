#!/bin/sh
# Trains one model several times, from the same seed, on the same data, with another MoE layer each time, and compares:
# tokens per second, where a step's time goes, losses. Blocks of the arms take turns, A/B/C/C/B/A, so that what drifts (heat,
# other users) meets all arms alike.
#
#   scripts/compare.sh --preset moonlight-mini --data 'data/linux_train_*.bin'
#   RANKS=4 STEPS=20 OUT=runs/four scripts/compare.sh --preset tiny
#
# The arguments are flags of the trainer, the same for all arms. In the environment:
#
#   RANKS    of every run; default: as many as nvidia-smi sees GPUs, without any 2
#   STEPS    that are timed in a block (50), after WARM (10) that are not; one more is traced. An arm has two blocks
#   ARMS     lines NAME=FLAGS, the first one what the others are compared with; default: the megakernel, the all-to-all
#            layer as it is by default (serial, on GPUs with cuBLASLt), and the best that make bench has found of it (own
#            products, and with several ranks four pieces that travel while others are computed)
#   OUT      folder for all runs and what comes of them (runs/compare); one that exists is refused
#   PROGRAM  ./train, which `make train` builds   MPIRUN: the launcher of its MPI library
#
# OUT then has compare.md, compare.json, compare.png (scripts/compare.py, which can draw them again), and for each block
# its run folder, its output, a trace of one step, and twice a second the GPUs' clocks, power and memory.
set -eu

fail() {
    echo "compare.sh: error: $*" >&2
    exit 2
}

# whole NAME VALUE: a number from 1 on
whole() {
    case $2 in
    '' | *[!0-9]* | 0*) fail "$1: found '$2', wanted a number from 1 on" ;;
    esac
}

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || gpus=0
ranks=${RANKS:-$gpus}
[ "$ranks" != 0 ] || ranks=2
steps=${STEPS:-50} warm=${WARM:-10} out=${OUT:-runs/compare} program=${PROGRAM:-./train} mpirun=${MPIRUN:-mpirun}
pieces=
[ "$ranks" = 1 ] || pieces=' --alltoall-chunks 4'
three="mok=--moe mok
alltoall=--moe alltoall
alltoall, best=--moe alltoall --expert-gemm own$pieces"
arms=${ARMS:-$three}
here=$(dirname "$0")

whole RANKS "$ranks"
whole STEPS "$steps"
whole WARM "$warm"
[ -x "$program" ] || fail "found no program $program, wanted it; run make train first, or name another one by PROGRAM"
[ ! -e "$out" ] || fail "found $out, wanted a folder that is new; remove it or name another one by OUT"
command -v python3 >/dev/null || fail "found no python3, wanted it to compare what was measured"
count=$(printf '%s\n' "$arms" | grep -c .) || fail "ARMS: found none, wanted lines NAME=FLAGS"
printf '%s\n' "$arms" | grep . | grep -qv '^[^=][^=]*=' && fail "ARMS: found a line without NAME=, wanted NAME=FLAGS"

sampler=
stop_sampler() {
    [ -z "$sampler" ] || kill "$sampler" 2>/dev/null || :
    sampler=
}
trap stop_sampler EXIT
trap 'exit 130' INT TERM

# run_block NUMBER NAME FLAGS...: one run, in $out/block-NUMBER.
run_block() {
    block=$out/block-$1 name=$2
    shift 2
    mkdir "$block"
    printf '%s\n' "$name" >"$block/arm"
    printf '%s\n' "$*" >"$block/flags"
    if [ "$gpus" -gt 0 ]; then
        nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw,memory.used --format=csv,noheader,nounits \
            -lms 500 >"$block/gpus.csv" 2>/dev/null &
        sampler=$!
    fi
    last=$((warm + steps + 1))
    # shellcheck disable=SC2086
    $mpirun -n "$ranks" "$program" "$@" --steps "$last" --warmup "$warm" --trace "$block/trace.json" \
        --trace-step "$last" --eval-every 0 --save-every 0 --sample-tokens 0 --log-moe-every 0 --out "$block/run" \
        >"$block/said" 2>&1 || {
        grep 'error: ' "$block/said" >&2 || tail -n 5 "$block/said" >&2
        fail "$name: the run in $block failed as said above; its output is $block/said"
    }
    stop_sampler
    grep '^step ' "$block/said" | tail -n 1 | tr '|' '\n' | grep -E ' loss | ms $| tok/s | mfu ' | paste -s -d '|'
}

busy=$(nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits 2>/dev/null |
    awk -F, '$2 > 256 { printf "%s%s MiB on GPU %s", n++ ? "," : "", $2, $1 }') || busy=
[ -z "$busy" ] || echo "compare.sh: warning: other programs hold$busy: they may disturb what is measured" >&2

mkdir -p "$out"
printf '%s\n' "$warm" >"$out/warm"
printf '%s\n' "$*" >"$out/flags"
number=0
for turn in forth back; do
    for place in $(seq "$count"); do
        [ "$turn" = forth ] || place=$((count + 1 - place))
        line=$(printf '%s\n' "$arms" | grep . | sed -n "${place}p")
        number=$((number + 1))
        printf 'block %d of %d, %s: ' "$number" "$((2 * count))" "${line%%=*}"
        # shellcheck disable=SC2086
        run_block "$number" "${line%%=*}" "$@" ${line#*=}
    done
done
python3 "$here/compare.py" "$out"
