#!/bin/sh
# Proves that tests/test_gradients can fail: each deliberate mistake in a backward pass, built into a copy of one file,
# must make it fail. Prints TAP for tests/run.sh. `make test` sets COMPILE, LIBS and DOUBLE (its build folder).
set -u

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
number=0
echo "1..6"

# mistake NAME FILE BEFORE AFTER [SOURCE]: replaces the one place in FILE that reads BEFORE. SOURCE includes FILE, if that is
# a header.
mistake() {
    number=$((number + 1))
    name=$1 file=$2
    source=${5-$scratch/$file}
    rm -rf "$scratch/kernels" "$scratch/model"
    mkdir -p "$scratch/$(dirname "$file")"
    if BEFORE=$3 AFTER=$4 awk '
        { at = index($0, ENVIRON["BEFORE"]) }
        at { places++; $0 = substr($0, 1, at - 1) ENVIRON["AFTER"] substr($0, at + length(ENVIRON["BEFORE"])) }
        { print }
        END { exit places != 1 }' "$file" >"$scratch/$file"; then :; else
        echo "not ok $number - $name"
        echo "# found not exactly one place in $file that reads: $3"
        return
    fi
    # The object stands before the library, so its functions are the ones that count.
    if $COMPILE -iquote "$scratch" -c "$source" -o "$scratch/wrong.o" &&
        $COMPILE "$DOUBLE/tests/test_gradients.o" "$scratch/wrong.o" "$DOUBLE/libmok.a" -o "$scratch/test" $LIBS; then :; else
        echo "not ok $number - $name"
        echo "# the mistake does not build"
        return
    fi
    output=$("$scratch/test" 2>&1) && caught=false || caught=true
    tensors=$(printf '%s\n' "$output" | sed -n 's/.*\(of [0-9]* tensors have a wrong gradient\).*/\1/p' | head -1)
    if $caught && [ "$tensors" ]; then
        echo "ok $number - $name"
        printf '%s\n' "$output" | sed -n "s/.*[^0-9]\([0-9]* of [0-9]* tensors have a wrong gradient\).*/# \1/p" | head -1
    else
        echo "not ok $number - $name"
        echo "# test_gradients passed with this mistake in $file, or stopped for another reason"
    fi
}

mistake gate_mean_term_dropped kernels/cpu/router.c '(d_gates[k] - mean)' '(d_gates[k] - 0 * mean)'
mistake balance_normalisation_dropped kernels/cpu/router.c '(f[e] - f_mean)' '(f[e] - 0 * f_mean)'
mistake sigmoid_derivative_dropped kernels/cpu/router.c 'ds * s[e] * (1 - s[e])' 'ds'
mistake silu_derivative_wrong kernels/cpu/swiglu.h '(1 + g[i] * (1 - sigma))' '1' kernels/cpu/swiglu.c
mistake softmax_row_term_dropped kernels/cpu/attention.c '(dsi[j] - D)' '(dsi[j] - 0 * D)'
mistake rope_key_gradient_not_rotated_back model/mla.c 'rotate_key(m, s->d_kv_a, N, T, true);' ';'
