# shellcheck shell=sh
# Link tests of everything the build uses, sourced by setup.sh and detect.sh.
#
# A package's name or a file that is merely there proves nothing, so each probe builds a tiny program against the real
# header and library. A probe answers with its exit status and prints nothing; $probe_dir/program is what it built.
# CC, MPI_HOME, CUDA_HOME and NCCL_HOME choose among several installations.

CC=${CC:-cc}
probe_dir=$(mktemp -d) || exit 1
trap 'rm -rf "$probe_dir"' EXIT
trap 'exit 130' INT TERM

# Builds the C program on standard input with the compiler $1 (words allowed, as in CC="ccache gcc") and flags $2...
probe_builds() {
    compiler=$1
    shift
    # shellcheck disable=SC2086
    $compiler -x c - -o "$probe_dir/program" "$@" 2>/dev/null
}

probe_make() { make --version 2>/dev/null | grep -q 'GNU Make'; }

probe_compiler() {
    probe_builds "$CC" -std=c17 <<'END'
#include <stdio.h>
int main(void) { return puts("hello") < 0; }
END
}

# The program counts its threads.
probe_openmp() {
    probe_builds "$CC" -fopenmp <<'END' && [ "$("$probe_dir/program")" = 2 ]
#include <omp.h>
#include <stdio.h>
int main(void) {
    int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
    threads += 1;
    return printf("%d\n", threads) < 0;
}
END
}

# The program prints cJSON's version.
probe_cjson() {
    probe_builds "$CC" -lcjson <<'END'
#include <cjson/cJSON.h>
#include <stdio.h>
int main(void) { return puts(cJSON_Version()) < 0; }
END
}

probe_pcre2() {
    probe_builds "$CC" -lpcre2-8 <<'END'
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
int main(void) {
    char version[64] = "";
    pcre2_config(PCRE2_CONFIG_VERSION, version);
    return puts(version) < 0;
}
END
}

# Fuzz targets need clang's libFuzzer with its sanitizers.
probe_clang() {
    probe_builds "${FUZZ_CC:-clang}" -fsanitize=fuzzer,address,undefined <<'END'
#include <stddef.h>
#include <stdint.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return size && data[0] == 1 && size > 1000000; }
END
}

probe_cmocka() {
    probe_builds "$CC" -lcmocka <<'END'
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
static void nothing(void **state) { (void)state; }
int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
END
}

# Pairs of a compiler wrapper and a launcher, the preferred ones first. Who sets MPI_HOME wants that one or none.
mpi_candidates() {
    if [ "${MPI_HOME:-}" ]; then
        echo "$MPI_HOME/bin/mpicc $MPI_HOME/bin/mpirun"
        return
    fi
    echo "mpicc mpirun"
    echo "mpicc.mpich mpirun.mpich"
    echo "mpicc.openmpi mpirun.openmpi"
    for bin in /usr/lib64/mpich/bin /usr/lib64/openmpi/bin /opt/homebrew/bin /home/linuxbrew/.linuxbrew/bin; do
        echo "$bin/mpicc $bin/mpirun"
    done
}

# What of the words on standard input finds headers (cflags) or libraries (libs); a distribution's -O2 and the like are
# none of ours.
mpi_cflags_of() { tr ' ' '\n' | grep -e '^-I.' -e '^-pthread$' | paste -sd ' ' -; }
mpi_libs_of() {
    tr ' ' '\n' | grep -e '^-[Ll].' -e '^-Wl,-rpath' -e '^-Wl,/' -e '^-pthread$' | paste -sd ' ' -
}

# The launcher $1 with what it needs so that any number of ranks, each with several threads, may share the cores: Open
# MPI else refuses root and more ranks than cores, and ties each rank to one core.
mpi_launch_line() {
    case $("$1" --version </dev/null 2>/dev/null) in
    *"Open MPI"* | *OpenRTE*)
        echo "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" \
            "$1 --map-by slot:OVERSUBSCRIBE --bind-to none"
        ;;
    *) echo "$1" ;;
    esac
}

# Builds a program with $CC and the flags of $mpi_cc, and starts it as two ranks by $mpi_launcher. Two starts of one
# rank show in what they print, "rank/size". Sets the variables of probe_mpi, or $mpi_fault to what is wrong.
mpi_starts_two_ranks() {
    flags=$("$mpi_cc" -show </dev/null 2>/dev/null) || {
        mpi_fault="-show does not say how it compiles"
        return 1
    }
    mpi_cflags=$(echo "$flags" | mpi_cflags_of)
    mpi_libs=$(echo "$flags" | mpi_libs_of)
    mpirun=$(mpi_launch_line "$mpi_launcher")
    # shellcheck disable=SC2086
    probe_builds "$CC" $mpi_cflags $mpi_libs <<'END' || {
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int rank, size, length;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Get_library_version(version, &length);
    if (rank == 0) printf("library %s\n", version);
    printf("%d/%d\n", rank, size);
    return MPI_Finalize();
}
END
        mpi_fault="$CC builds no program with its flags"
        return 1
    }
    # shellcheck disable=SC2086
    timeout 30 $mpirun -n 2 "$probe_dir/program" </dev/null >"$probe_dir/mpirun" 2>&1
    ranks=$(grep -x '[0-9]*/[0-9]*' "$probe_dir/mpirun" | sort | paste -sd ' ' -)
    mpi_version=$(sed -n 's/^library \([^,]*\).*/\1/p' "$probe_dir/mpirun" | sed 's/ Version:[[:space:]]*/ /;q')
    case $ranks in
    "0/2 1/2") return 0 ;;
    "0/1 0/1") mpi_fault="mpirun -n 2 starts rank 0 of 1 twice" ;;
    "") mpi_fault="mpirun -n 2 starts no rank; it said: $(head -n 3 "$probe_dir/mpirun" | paste -sd ' ' -)" ;;
    *) mpi_fault="mpirun -n 2 starts the ranks '$ranks', wanted '0/2 1/2'" ;;
    esac
    return 1
}

# Chooses the first MPI that starts ranks: $mpi_cc, $mpi_launcher, $mpi_cflags, $mpi_libs, $mpirun (words),
# $mpi_version. $mpi_refused: a line for each one before it.
probe_mpi() {
    mpi_refused='' tried=''
    mpi_candidates >"$probe_dir/candidates"
    while read -r mpi_cc mpi_launcher; do
        mpi_cc=$(command -v "$mpi_cc") && mpi_launcher=$(command -v "$mpi_launcher") || continue
        pair="$(readlink -f "$mpi_cc") $(readlink -f "$mpi_launcher")"
        case "$tried" in *"<$pair>"*) continue ;; esac
        tried="$tried<$pair>"
        mpi_starts_two_ranks && return 0
        mpi_refused="$mpi_refused${mpi_refused:+
}$mpi_cc with $mpi_launcher: $mpi_fault"
    done <"$probe_dir/candidates"
    return 1
}

# The home of the CUDA toolkit: the first place that has bin/nvcc.
cuda_home() {
    in_path=$(command -v nvcc)
    for home in "${CUDA_HOME:-}" "${in_path%/bin/nvcc}" /usr/local/cuda; do
        [ "$home" ] && [ -x "$home/bin/nvcc" ] && echo "$home" && return
    done
    return 1
}

# $1: home of the CUDA toolkit.
probe_cublaslt() {
    probe_builds "$CC" -I"$1/include" -L"$1/lib64" -lcublasLt -lcudart <<'END'
#include <cublasLt.h>
int main(void) { return cublasLtGetVersion() == 0; }
END
}

# The GPUs that the driver shows, a line for each kind: "2 NVIDIA H200".
gpu_names() {
    gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | sed 's/^ *//') && [ "$gpus" ] &&
        echo "$gpus"
}

# The program prints the version of NCCL, at least 2.28, as one number. $1: home of the CUDA toolkit, whose header nccl.h includes.
probe_nccl() {
    probe_builds "$CC" ${NCCL_HOME:+-I"$NCCL_HOME/include" -L"$NCCL_HOME/lib"} -I"$1/include" -L"$1/lib64" -lnccl <<'END'
#include <nccl.h>
#include <stdio.h>
#if NCCL_VERSION_CODE < NCCL_VERSION(2, 28, 0)
#error "kernels can reach no symmetric memory"
#endif
int main(void) {
    int version = 0;
    return ncclGetVersion(&version) != ncclSuccess || printf("%d\n", version) < 0;
}
END
}
