#!/bin/sh
# Runs the fuzz targets that `make fuzz` built, each for FUZZ_SECONDS (10): first every input of tests/fuzz/corpus/NAME,
# among them those that once found a bug (found_...), then mutations of them in an order that is always the same. Prints
# TAP for tests/run.sh. FUZZ names some of the targets; FUZZ_CORPUS is a folder, given as a full path, where the inputs
# that reached something new are kept from run to run. build/fuzz/NAME.log has what a target said, and inputs that failed
# lie beside it.
set -u

seconds=${FUZZ_SECONDS:-10}
build=build/fuzz
unset ASAN_OPTIONS UBSAN_OPTIONS # those of other sanitized tests turn the search for leaks off

parent=/tmp
[ -d /dev/shm ] && [ -w /dev/shm ] && parent=/dev/shm
TMPDIR=$(mktemp -d "$parent/fuzz_XXXXXX") || exit 1
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
trap 'kill "$!" 2>/dev/null; exit 130' INT TERM

# The figures of libFuzzer's log $1: executions, edges of the program that were reached, inputs that reached others.
figures() {
    sed -n 's/^stat::number_of_executed_units: *//p' "$1" | tail -n 1 | tr '\n' ' '
    sed -n 's/^#.* cov: \([0-9]*\) .* corp: \([0-9]*\).*/\1 \2/p' "$1" | tail -n 1
}

set -- tests/fuzz/fuzz_*.c
targets=${FUZZ:-$(printf '%s\n' "$@" | sed 's,.*/fuzz_\(.*\)\.c,\1,')}
# shellcheck disable=SC2086
set -- $targets
echo "1..$#"
number=0 failed=0
for name; do
    number=$((number + 1))
    program=$build/fuzz_$name seeds=tests/fuzz/corpus/$name dictionary=tests/fuzz/$name.dict log=$build/$name.log
    if [ ! -x "$program" ] || [ ! -d "$seeds" ]; then
        echo "not ok $number - fuzz_$name"
        echo "# found no $program or no $seeds, wanted both: make fuzz, and at least one seed"
        failed=1
        continue
    fi
    found=${FUZZ_CORPUS:-$TMPDIR}/$name
    mkdir -p "$found"
    rm -f "$build/$name"-crash-* "$build/$name"-leak-* "$build/$name"-timeout-* "$build/$name"-oom-* \
        "$build/$name"-slow-unit-*
    set --
    [ -f "$dictionary" ] && set -- "-dict=$dictionary"
    # In the background, since only `wait` lets a signal end this script at once.
    "$program" -seed=1 -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=16384 \
        -print_final_stats=1 -artifact_prefix="$build/$name-" "$@" "$found" "$seeds" </dev/null >/dev/null 2>"$log" &
    if wait "$!"; then
        # shellcheck disable=SC2046
        set -- $(figures "$log")
        echo "ok $number - fuzz_$name: $1 executions, $2 edges, $3 inputs kept"
    else
        failed=1
        echo "not ok $number - fuzz_$name"
        grep -av '^#[0-9]' "$log" | tail -n 40 | sed 's/^/# /'
        artefact=$(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)
        echo "# again: $program ${artefact:-$seeds/*}"
    fi
done
exit "$failed"
