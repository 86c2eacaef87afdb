# shellcheck shell=sh disable=SC2034
# For tests of whole runs of the GPU build, tests/test_gpu*.sh: the two builds, runs into folders of their own, and
# comparisons of their curves and bytes.
#
# MOK_CPU, MOK_GPU: where they are. MOK_GPUS: how many GPUs there are, 0 for a build that needs none (tests of these tests).
# MPIRUN starts ranks.

. tests/tap.sh
cpu=${MOK_CPU:-build/cpu}/train gpu=${MOK_GPU:-build/cuda}/train
gpus=${MOK_GPUS-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')}
mpirun=${MPIRUN:-mpirun}
[ "$gpus" = 0 ] && export OMP_NUM_THREADS=1
# The megakernel, and attention by wgmma, run on sm_90 alone.
if [ "$gpus" = 0 ] || "$gpu" --device 2>/dev/null | grep -q ', sm_90, '; then hopper=yes; else hopper=no; fi

# ---- what is checked ----

# skip NAME REASON
skip() {
    number=$((number + 1))
    echo "ok $number - $1 # SKIP $2"
}

# refused PATTERN COMMAND...: exit code 2 and one line that names what is wrong.
refused() {
    pattern=$1
    shift
    "$@" >"$scratch/refused" 2>&1
    code=$?
    grep 'mok: error' "$scratch/refused"
    echo "exit code $code"
    [ "$code" = 2 ] && grep 'mok: error' "$scratch/refused" | grep -q -e "$pattern"
}

# mok_check "NAME" COMMAND...: checks, or skips, what needs the megakernel.
mok_check() {
    if [ "$hopper" = yes ]; then check "$@"; else skip "$1" "the megakernel runs on sm_90 alone"; fi
}

# ---- flags ----

any="--data stories --eval-every 0 --sample-tokens 0 --keep 0"
# Steps of two micro-batches, of any of the unit presets.
short="$any --steps 20 --warmup 5 --save-every 10 --tokens-per-step 256"
few="--preset unit $short"
unit="$few --moe alltoall"
with_mok="$few --moe mok"

# A rounding to BF16 moves the loss of one token by up to a hundredth, with either sign; the means over 256 tokens and more
# part slowly, as the weights do. Measured with rounded results on the CPU (tests/rounding.c): 2.3e-3 at worst in the
# first 20 steps. Another seed is off by 4e-2.
noise=6e-3

if [ "$gpus" = 0 ]; then steps=100; else steps=300; fi
long="--preset unit $any --steps $steps --warmup 30 --lr 1e-3 --save-every $steps --tokens-per-step 256"

# The all-to-all layer with our own products adds the same numbers in the same order as the megakernel. It leaves a shared
# expert to the library: here is none.
own="--shared-experts 0 --moe alltoall --expert-gemm own"
alone="--shared-experts 0 --moe mok"

# ---- runs ----

# train BUILD NAME FLAGS...: into $scratch/NAME
train() {
    build=$1 run=$2
    shift 2
    "$build" --out "$scratch/$run" "$@" >"$scratch/$run.out" 2>&1 || {
        tail -n 5 "$scratch/$run.out"
        return 1
    }
}

# ranks N NAME FLAGS...: the GPU build as N ranks
ranks() {
    ranks=$1 run=$2
    shift 2
    # shellcheck disable=SC2086
    $mpirun -n "$ranks" "$gpu" --out "$scratch/$run" "$@" >"$scratch/$run.out" 2>&1 || {
        tail -n 5 "$scratch/$run.out"
        return 1
    }
}

# "step loss norm" of every step of the run NAME, in the log's digits.
losses() {
    sed -n 's/.*"step":\([0-9]*\),"loss":\([-0-9.e+]*\),.*"grad_norm":\([-0-9.e+]*\),.*/\1 \2 \3/p' "$scratch/$1/log.jsonl"
}

# same_losses A B: line by line, with the gradients' norms.
same_losses() {
    losses "$1" >"$scratch/a.losses"
    losses "$2" >"$scratch/b.losses"
    [ -s "$scratch/a.losses" ] && cmp -s "$scratch/a.losses" "$scratch/b.losses" && return
    echo "$1 and $2: step, loss and norm"
    diff "$scratch/a.losses" "$scratch/b.losses" | head -n 8
    return 1
}

# close_losses A B LIMIT [FIRST [LAST]]: every loss of B within LIMIT of A's, relative, in steps FIRST to LAST, of which both
# have all; 1 to 20 if nobody says.
close_losses() {
    losses "$1" >"$scratch/a.losses"
    losses "$2" >"$scratch/b.losses"
    awk -v limit="$3" -v first="${4:-1}" -v last="${5:-20}" '
        NR == FNR { wanted[$1] = $2; next }
        $1 >= first && $1 <= last {
            error = ($2 - wanted[$1]) / wanted[$1]
            if (error < 0) error = -error
            if (!(error <= worst)) worst = error
            if (!(error <= limit)) print "step " $1 ": found " $2 ", wanted " wanted[$1]
            count++
        }
        END {
            print "worst " worst " of " limit " in " count " steps"
            exit !(count == last - first + 1 && worst <= limit)
        }' "$scratch/a.losses" "$scratch/b.losses" >"$scratch/losses.said"
    good=$?
    cat "$scratch/losses.said"
    return "$good"
}

# The run A as it was after step 10, as run B.
cut_run() {
    cp -r "$scratch/$1" "$scratch/$2" && rm -rf "$scratch/$2/step-00000020"
}

# same_bytes A B STEP: the curves and the checkpoints.
same_bytes() { same_losses "$1" "$2" && diff -r "$scratch/$1/step-$3" "$scratch/$2/step-$3"; }

# same_evaluations: the two losses in $scratch/evaluated.
same_evaluations() {
    sed -n 's/.*| loss \([0-9.]*\) over.*/\1/p' "$scratch/evaluated" | awk -v limit="$noise" '
        { print "loss " $1; loss[NR] = $1 }
        END { d = (loss[2] - loss[1]) / loss[1]; exit !(NR == 2 && d <= limit && -d <= limit) }'
}
