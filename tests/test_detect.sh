#!/bin/sh
# What set-up and `make detect` say about a machine: only what was built, linked and started counts as found. Prints TAP
# for tests/run.sh. The machines are made of wrappers around this one's compiler and launcher.
set -u
unset MPI_HOME MAKEFLAGS # of who runs the tests

. tests/tap.sh
echo "1..11"

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

# An MPI in the folder $1 whose mpirun does $2. Its mpi.h is of a library that knows one rank only.
make_mpi() {
    mpi=$scratch/$1
    mkdir -p "$mpi/bin" "$mpi/include"
    printf '#!/bin/sh\necho gcc -O2 -flto=auto -I%s -L%s\n' "$mpi/include" "$mpi/lib" >"$mpi/bin/mpicc"
    printf '#!/bin/sh\n%s\n' "$2" >"$mpi/bin/mpirun"
    chmod +x "$mpi/bin/mpicc" "$mpi/bin/mpirun"
    cat >"$mpi/include/mpi.h" <<'END'
#include <string.h>
#define MPI_COMM_WORLD 0
#define MPI_MAX_LIBRARY_VERSION_STRING 64
static int MPI_Init(int *argc, char ***argv) { return !argc || !argv; }
static int MPI_Comm_rank(int comm, int *rank) { return *rank = comm; }
static int MPI_Comm_size(int comm, int *size) { *size = 1; return comm; }
static int MPI_Get_library_version(char *text, int *length) { return *length = (int)strlen(strcpy(text, "Toy 1")); }
static int MPI_Finalize(void) { return 0; }
END
}
# (every process is rank 0 of 1, as with the MPICH of Ubuntu 24.04: runner-images issue 13204)
make_mpi twice_first '[ "$1" = -n ] && "$3" && "$3"'
make_mpi good '[ "$1" = --version ] || { echo library Made-up MPI 7.8, of today; printf "1/2\n0/2\n"; }'
make_mpi silent 'echo no such host; exit 1'
make_mpi open '[ "$1" = --version ] && echo "mpirun (Open MPI) 9.9" || printf "0/2\n1/2\n"'

# A folder with the commands that the scripts use but no MPI, and what stands in for a PATH without one.
mkdir "$scratch/plain"
for command in as awk cat cc cmp cut date dirname echo env find grep head id ld make mkdir mktemp mv paste printf \
    readlink rm sed sh sort tail timeout tr uniq; do
    path=$(command -v "$command") && ln -s "$path" "$scratch/plain/$command"
done

# The scripts, with a folder of ours in the place of /usr/lib64, where Fedora has its MPIs.
mkdir "$scratch/scripts"
for script in scripts/*.sh; do sed "s,/usr/lib64/,$scratch/lib64/,g" "$script" >"$scratch/$script"; done

# Runs scripts/$2... where PATH finds the MPIs of the folders in $1 and no other.
with_mpis() {
    path="$scratch/plain"
    for folder in $1; do path="$scratch/$folder/bin:$path"; done
    shift
    script=$1
    shift
    PATH=$path CC=cc sh "$scratch/scripts/$script" "$@" >"$scratch/report" 2>&1
    status=$?
    cat "$scratch/report"
    return "$status"
}

says() { grep -q -e "$1" "$scratch/report"; }

ranks_that_are_all_the_first_are_no_mpi() {
    with_mpis twice_first mpi.sh && return 1
    says 'found none that starts two ranks' && says 'refused: .*/twice_first/bin/mpicc .*rank 0 of 1 twice' || return 1
    with_mpis twice_first detect.sh
    says '✗ MPI .*make setup' && says 'refused: .*rank 0 of 1 twice' || return 1
    with_mpis twice_first setup.sh --check && return 1
    says 'MPI *missing' && says 'refused: .*rank 0 of 1 twice'
}

# Debian gives two that are installed together names of their own, Fedora folders.
next_candidate_is_taken() {
    make_mpi second 'printf "0/2\n1/2\n"'
    mv "$scratch/second/bin/mpicc" "$scratch/second/bin/mpicc.openmpi"
    mv "$scratch/second/bin/mpirun" "$scratch/second/bin/mpirun.openmpi"
    with_mpis "twice_first second" mpi.sh && says "^MPIRUN = $scratch/second/bin/mpirun.openmpi\$" || return 1
    with_mpis "twice_first second" detect.sh
    says '✓ MPI .*/second/bin/mpicc.openmpi.*ranks 0 and 1 of 2' && says 'refused: .*/twice_first/' || return 1
    make_mpi lib64/openmpi 'printf "0/2\n1/2\n"'
    with_mpis twice_first mpi.sh && says '^MPIRUN = .*/lib64/openmpi/bin/mpirun$'
    status=$?
    rm -r "$scratch/lib64"
    return "$status"
}

choice_says_version_and_flags() {
    with_mpis good mpi.sh && says '^# Made-up MPI 7.8$' || return 1
    says "^MPI_CFLAGS = -I$scratch/good/include\$" && says "^MPI_LIBS = -L$scratch/good/lib\$"
}

# Or root may not start it, more ranks than cores are refused, and all threads of a rank share one core.
open_mpi_is_told_to_share_the_cores() {
    with_mpis open mpi.sh && says '^MPIRUN = env OMPI_ALLOW.*=1 .*/open/bin/mpirun .*OVERSUBSCRIBE .*--bind-to none$'
}

launcher_that_starts_nothing_is_no_mpi() {
    with_mpis silent detect.sh
    says '✗ MPI' && says 'refused: .*no such host'
}

absent_mpi_is_said() {
    with_mpis "" detect.sh
    says '✗ MPI .*make setup' || return 1
    with_mpis "" mpi.sh && return 1
    says 'found none .*make setup'
}

mpi_home_is_taken_before_others_or_nothing() {
    MPI_HOME="$scratch/open" with_mpis good mpi.sh && says "^MPIRUN = .*/open/bin/mpirun" || return 1
    MPI_HOME="$scratch/nowhere" with_mpis good mpi.sh && return 1
    says 'found none' || return 1
    MPI_HOME="$scratch/nowhere" with_mpis good setup.sh && return 1
    says "found MPI_HOME=$scratch/nowhere, wanted an MPI there"
}

# An MPI_HOME that is set, changed or unset and an MPI that has gone make the choice anew; anything else leaves it.
makefile_follows_the_choice() {
    mkdir "$scratch/tree"
    cp -r Makefile "$scratch/scripts" "$scratch/tree"
    # $1: what the choice, or make, must say; $2: MPI_HOME
    choice_is() {
        (cd "$scratch/tree" && PATH="$scratch/good/bin:$scratch/plain" MPI_HOME=$2 make CC=cc build/mpi.mk) \
            >"$scratch/report" 2>&1 && cat "$scratch/tree/build/mpi.mk" >>"$scratch/report"
        cat "$scratch/report"
        says "$1"
    }
    choice_is "MPIRUN = .*/good/bin/mpirun" "" || return 1
    ls -l --time-style=+%s.%N "$scratch/tree/build/mpi.mk" >"$scratch/before"
    choice_is "MPIRUN = .*/good/bin/mpirun" "" || return 1
    ls -l --time-style=+%s.%N "$scratch/tree/build/mpi.mk" | cmp - "$scratch/before" || return 1
    choice_is "MPIRUN = .*/open/bin/mpirun" "$scratch/open" || return 1
    choice_is "refused: .*no such host" "$scratch/silent" || return 1
    choice_is "MPIRUN = .*/good/bin/mpirun" "" || return 1
    cp -r "$scratch/good" "$scratch/gone"
    choice_is "MPIRUN = .*/gone/bin/mpirun" "$scratch/gone" || return 1
    rm -r "$scratch/gone"
    choice_is "found none that starts two ranks" "$scratch/gone"
}

check "missing library is named" missing_library_is_named
check "set-up reports what is missing" setup_reports_what_is_missing
check "a similar name is not NCCL" similar_name_is_not_nccl
check "ranks that are all the first are no MPI" ranks_that_are_all_the_first_are_no_mpi
check "the next candidate is taken" next_candidate_is_taken
check "the choice says its version and only the flags that matter" choice_says_version_and_flags
check "Open MPI is told to share the cores" open_mpi_is_told_to_share_the_cores
check "a launcher that starts nothing is no MPI" launcher_that_starts_nothing_is_no_mpi
check "absent MPI is said" absent_mpi_is_said
check "MPI_HOME is taken before others, or nothing" mpi_home_is_taken_before_others_or_nothing
check "the Makefile follows the choice" makefile_follows_the_choice
