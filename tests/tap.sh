# shellcheck shell=sh
# For tests in shell, which print TAP for tests/run.sh: a folder that goes away with the test, and check.

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
number=0

# check NAME COMMAND...: the command must succeed.
check() {
    number=$((number + 1))
    name=$1
    shift
    if "$@" >"$scratch/said" 2>&1; then
        echo "ok $number - $name"
    else
        echo "not ok $number - $name"
        sed 's/^/# /' "$scratch/said"
    fi
}
