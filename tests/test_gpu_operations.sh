#!/bin/sh
# Every operation in the GPU build against the CPU build: records with one and compares with the other
# (tests/gpu_operations.c). Prints TAP for tests/run.sh. GPU_PROGRAM names another such program; words of $GPU_FLAGS go to
# both: --small, --only NAME.
set -u

program=${GPU_PROGRAM:-gpu_operations}
cpu=${MOK_CPU:-build/cpu}/tests/$program gpu=${MOK_GPU:-build/cuda}/tests/$program
record=$(mktemp "${TMPDIR:-/tmp}/mok-record.XXXXXX") || exit 1
trap 'rm -f "$record"' EXIT

# shellcheck disable=SC2086
"$cpu" --record "$record" ${GPU_FLAGS-} >"$record.said" 2>&1 || cat "$record.said"
rm -f "$record.said"
# shellcheck disable=SC2086
"$gpu" --compare "$record" ${GPU_FLAGS-}
