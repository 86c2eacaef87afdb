# shellcheck shell=sh
# Link tests of everything the build uses, sourced by setup.sh and detect.sh.
#
# A package's name or a file that is merely there proves nothing, so each probe builds a tiny program against the real
# header and library. A probe answers with its exit status and prints nothing; $probe_dir/program is what it built.
# CC, MPI_HOME, CUDA_HOME and NCCL_HOME choose among several installations.

CC=${CC:-cc}
mpi_bin=${MPI_HOME:+$MPI_HOME/bin/}
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

# The program prints "rank/size", so that a start of two ranks can be told from two starts of one.
probe_mpi() {
    command -v "${mpi_bin}mpirun" >/dev/null && probe_builds "${mpi_bin}mpicc" <<'END'
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    printf("%d/%d\n", rank, size);
    return MPI_Finalize();
}
END
}

# The program prints NCCL's version as one number. $1: home of the CUDA toolkit, whose header nccl.h includes.
probe_nccl() {
    probe_builds "$CC" ${NCCL_HOME:+-I"$NCCL_HOME/include" -L"$NCCL_HOME/lib"} -I"$1/include" -L"$1/lib64" -lnccl <<'END'
#include <nccl.h>
#include <stdio.h>
int main(void) {
    int version = 0;
    return ncclGetVersion(&version) != ncclSuccess || printf("%d\n", version) < 0;
}
END
}
