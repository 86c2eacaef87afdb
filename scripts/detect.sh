#!/bin/sh
# Prints what this machine has for building and running, each line by a test (probe.sh). CC, MARCH, MPI_HOME, CUDA_HOME
# and NCCL_HOME choose among several installations.
set -u
cd "$(dirname "$0")" || exit 1
. ./probe.sh

found() { printf '  \342\234\223 %-12s %s\n' "$1" "$2"; }
absent() { printf '  \342\234\227 %-12s %s\n' "$1" "$2"; }

# The widest vector unit that the compiler turns on for this machine.
vector_unit() {
    # shellcheck disable=SC2086
    macros=$($CC -march="${MARCH:-native}" -dM -E -x c /dev/null 2>/dev/null) || return 1
    case $macros in
    *__AVX512F__*) echo "AVX-512, 16 floats" ;;
    *__AVX2__*__FMA__* | *__FMA__*__AVX2__*) echo "AVX2 with FMA, 8 floats" ;;
    *__AVX__*) echo "AVX, 8 floats, no FMA" ;;
    *__SSE2__*) echo "SSE2, 4 floats, no FMA" ;;
    *__ARM_FEATURE_SVE*) echo "SVE" ;;
    *__ARM_NEON*) echo "NEON, 4 floats" ;;
    *) echo "none known" ;;
    esac
}

echo "needed:"
if probe_compiler; then
    # shellcheck disable=SC2086
    found "C compiler" "$($CC --version | head -n 1)"
else
    absent "C compiler" "$CC builds no C17 program; 'make setup' installs gcc, CC=... chooses another"
fi
if probe_openmp; then
    found "OpenMP" "a program on 2 threads ran"
else
    absent "OpenMP" "$CC -fopenmp builds no program that runs on 2 threads; gcc has it, clang needs libomp-dev"
fi
if unit=$(vector_unit); then
    found "vector unit" "$unit (-march=${MARCH:-native})"
else
    absent "vector unit" "$CC does not take -march=${MARCH:-native}"
fi
if probe_cjson; then
    found "cJSON" "$("$probe_dir/program")"
else
    absent "cJSON" "no program links with -lcjson; 'make setup' installs libcjson-dev"
fi
if probe_pcre2; then
    found "PCRE2" "$("$probe_dir/program")"
else
    absent "PCRE2" "no program links with -lpcre2-8; 'make setup' installs libpcre2-dev"
fi
if probe_cmocka; then
    found "cmocka" "a program links with -lcmocka"
else
    absent "cmocka" "no program links with -lcmocka; 'make setup' installs libcmocka-dev"
fi
if probe_mpi; then
    found "MPI" "$mpi_version ($mpi_cc); mpirun -n 2 starts ranks 0 and 1 of 2"
elif [ "${MPI_HOME:-}" ]; then
    absent "MPI" "MPI_HOME=$MPI_HOME starts no two ranks; unset it or name another installation"
else
    absent "MPI" "no mpicc and mpirun that start two ranks; 'make setup' installs one, MPI_HOME=... names another"
fi
[ -z "$mpi_refused" ] || echo "$mpi_refused" | sed 's/^/                 refused: /'

echo "for the fuzz targets of make test-full:"
if probe_clang; then
    found "clang" "$("${FUZZ_CC:-clang}" --version | head -n 1)"
else
    absent "clang" "no ${FUZZ_CC:-clang} that links with -fsanitize=fuzzer; 'make test-full' installs it"
fi

echo "for the GPU:"
if home=$(cuda_home); then
    found "CUDA" "$home/bin/nvcc, $("$home/bin/nvcc" --version | sed -n 's/.*\(release [0-9.]*\).*/\1/p')"
else
    absent "CUDA" "no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
fi
if probe_cublaslt "${home:-/usr/local/cuda}"; then
    found "cuBLASLt" "a program links with -lcublasLt"
else
    absent "cuBLASLt" "no program links with -lcublasLt of the CUDA toolkit"
fi
if probe_nccl "${home:-/usr/local/cuda}" && version=$("$probe_dir/program" 2>/dev/null); then
    found "NCCL" "$((version / 10000)).$((version / 100 % 100)).$((version % 100))"
else
    absent "NCCL" "no program links with -lnccl, 2.28 or later, and starts; NCCL_HOME=... says where it is"
fi
if gpus=$(gpu_names); then
    found "GPU" "$(echo "$gpus" | paste -sd , -)"
else
    absent "GPU" "nvidia-smi names none"
fi
