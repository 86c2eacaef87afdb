#!/bin/sh
# What set-up and `make detect` say about a machine: only what was built, linked and started counts as found. Prints TAP
# for tests/run.sh. The machines are made of wrappers around this one's compiler and launcher.
set -u

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
number=0
echo "1..6"

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

# A compiler that does not find the libraries named by the pattern $1, and looks for the others in $scratch too.
cat >"$scratch/cc" <<'END'
#!/bin/sh
for argument; do
    case $argument in $WITHOUT) exit 1 ;; esac
done
exec cc "$@" -L"$LIBRARIES"
END
chmod +x "$scratch/cc"
export LIBRARIES="$scratch"

detect_without() { WITHOUT=$1 CC="$scratch/cc" sh scripts/detect.sh; }
setup_without() { WITHOUT=$1 CC="$scratch/cc" sh scripts/setup.sh --check; }

missing_library_is_named() {
    detect_without -lpcre2-8 >"$scratch/report" || return 1
    cat "$scratch/report"
    grep -q '✗ PCRE2 .*libpcre2-dev' "$scratch/report" && grep -q '✓ cJSON' "$scratch/report"
}

setup_reports_what_is_missing() {
    setup_without -lcmocka >"$scratch/report" && return 1
    cat "$scratch/report"
    grep -q 'cmocka *missing' "$scratch/report" && grep -q 'PCRE2 *found' "$scratch/report"
}

# (NCCL "found" because a name like libvncclient matched: llm.c pulls 426 and 646)
similar_name_is_not_nccl() {
    echo 'int nothing;' | cc -x c -shared -o "$scratch/libvncclient.so" - || return 1
    detect_without -lnccl >"$scratch/report" || return 1
    cat "$scratch/report"
    grep -q '✗ NCCL' "$scratch/report"
}

# $1: what mpirun does with -n 2 PROGRAM.
mpi_that() {
    mkdir -p "$scratch/mpi/bin"
    printf '#!/bin/sh\nexec cc "$@"\n' >"$scratch/mpi/bin/mpicc"
    printf '#!/bin/sh\n%s\n' "$1" >"$scratch/mpi/bin/mpirun"
    chmod +x "$scratch/mpi/bin/mpicc" "$scratch/mpi/bin/mpirun"
    # mpi.h of a library that knows one rank only.
    cat >"$scratch/mpi.h" <<'END'
#define MPI_COMM_WORLD 0
static int MPI_Init(int *argc, char ***argv) { return !argc || !argv; }
static int MPI_Comm_rank(int comm, int *rank) { return *rank = comm; }
static int MPI_Comm_size(int comm, int *size) { *size = 1; return comm; }
static int MPI_Finalize(void) { return 0; }
END
    CPATH="$scratch" MPI_HOME="$scratch/mpi" WITHOUT=none CC="$scratch/cc" sh scripts/detect.sh >"$scratch/report"
    cat "$scratch/report"
}

# (every process is rank 0 of 1, as with the MPICH of Ubuntu 24.04: runner-images issue 13204)
ranks_that_are_all_the_first_are_no_mpi() {
    mpi_that '"$3"; "$3"'
    grep -q '✗ MPI .*rank 0 of 1 twice' "$scratch/report"
}

launcher_that_starts_nothing_is_no_mpi() {
    mpi_that 'echo no such host; exit 1'
    grep -q '✗ MPI .*no such host' "$scratch/report"
}

absent_mpi_is_said() {
    MPI_HOME="$scratch/nowhere" WITHOUT=none CC="$scratch/cc" sh scripts/detect.sh >"$scratch/report"
    cat "$scratch/report"
    grep -q '✗ MPI .*make setup' "$scratch/report"
}

check "missing library is named" missing_library_is_named
check "set-up reports what is missing" setup_reports_what_is_missing
check "a similar name is not NCCL" similar_name_is_not_nccl
check "ranks that are all the first are no MPI" ranks_that_are_all_the_first_are_no_mpi
check "a launcher that starts nothing is no MPI" launcher_that_starts_nothing_is_no_mpi
check "absent MPI is said" absent_mpi_is_said
