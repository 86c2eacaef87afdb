#!/bin/sh
# Runs cmocka programs one after the other: sh tests/run.sh PROGRAM... A word RANKS:PROGRAM starts so many ranks of it
# by $MPIRUN; the first of them prints the results, the others write to standard error only.
#
# One line per program, its lines "# table: ...", the output of those that fail, and `N passed, N failed` as the last
# line; exit 1 if any failed. A program that crashes, hangs, stops early or has no test counts as one failure more.
set -u

limit=${TEST_SECONDS:-600} # for one program
export CMOCKA_MESSAGE_OUTPUT=TAP
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT-5000}" # waiting threads spin briefly: see kernels/threads.c

if [ $# = 0 ]; then
    echo "tests/run.sh: found no program to run, wanted at least one: sh tests/run.sh PROGRAM..." >&2
    exit 2
fi

log=$(mktemp) || exit 1
trap 'rm -f "$log" "$log.errors"' EXIT
trap 'kill "$!" 2>/dev/null; exit 130' INT TERM

# Runs $1 until it ends or its time is up. What ranks say on standard error must not cut the first one's lines in two.
run_program() {
    case $1 in
    *:*)
        # One thread for each rank, as there may be more ranks than cores.
        # shellcheck disable=SC2086
        OMP_NUM_THREADS=${OMP_NUM_THREADS-1} exec timeout -k 10 "$limit" ${MPIRUN:-mpirun} -n "${1%%:*}" "${1#*:}" \
            </dev/null >"$log" 2>"$log.errors"
        ;;
    *) exec timeout -k 10 "$limit" "$1" </dev/null >"$log" 2>&1 ;;
    esac
}

# $1 as a person would say it.
title_of() {
    program=${1#*:}
    case $1 in
    1:*) echo "${program#build/} (1 rank)" ;;
    *:*) echo "${program#build/} (${1%%:*} ranks)" ;;
    *) echo "${program#build/}" ;;
    esac
}

# Prints "planned passed failed skipped" of the TAP output on standard input. A program may run several groups, each
# with its plan "1..N". cmocka before 2.0 marks a skipped test as "not ok 3 # SKIP name".
count_tap() {
    awk '
        /^1\.\.[0-9]+$/ { planned += substr($0, 4) }
        /^(not )?ok [0-9]+/ {
            if ($0 ~ /# SKIP/) skipped++
            else if ($1 == "ok") passed++
            else failed++
        }
        END { print planned + 0, passed + 0, failed + 0, skipped + 0 }'
}

# Says what is wrong with a program that ended with status $1 after $2 planned and $3 run tests, $4 of them failed.
# Prints nothing if its results can be trusted.
find_problem() {
    if [ "$1" = 124 ]; then
        echo "stopped after $limit s"
    elif [ "$1" -gt 128 ]; then
        echo "killed by signal $(($1 - 128))"
    elif [ "$3" = 0 ]; then
        echo "exit status $1 and no test ran"
    elif [ "$2" != "$3" ]; then
        echo "exit status $1 and results of $3 tests where $2 were announced"
    elif [ "$1" != 0 ] && [ "$4" = 0 ]; then
        echo "exit status $1 though no test failed"
    fi
}

all_passed=0 all_failed=0 all_skipped=0
for program; do
    start=$(date +%s)
    # In the background, since only `wait` lets a signal end this script at once.
    : >"$log.errors"
    run_program "$program" &
    wait "$!"
    status=$?
    seconds=$(($(date +%s) - start))

    # shellcheck disable=SC2046
    set -- $(count_tap <"$log")
    planned=$1 passed=$2 failed=$3 skipped=$4
    problem=$(find_problem "$status" "$planned" "$((passed + failed + skipped))" "$failed")
    [ "$problem" ] && failed=$((failed + 1))

    printf '%-28s %4d passed %4d failed' "$(title_of "$program")" "$passed" "$failed"
    [ "$skipped" -gt 0 ] && printf ' %4d skipped' "$skipped"
    printf ' %4d s\n' "$seconds"
    if [ "$failed" -gt 0 ]; then
        grep -av '^ok [0-9]' "$log" | cat - "$log.errors" | sed 's/^/    /'
        [ "$problem" ] && echo "    => $problem"
    else
        sed -n 's/^# table: /    /p' "$log"
    fi
    all_passed=$((all_passed + passed)) all_failed=$((all_failed + failed)) all_skipped=$((all_skipped + skipped))
done

line="$all_passed passed, $all_failed failed"
[ "$all_skipped" -gt 0 ] && line="$line, $all_skipped skipped"
echo "$line"
[ "$all_failed" = 0 ]
