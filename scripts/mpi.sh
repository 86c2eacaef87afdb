#!/bin/sh
# Prints build/mpi.mk, which the Makefile includes: how to build with the MPI that probe_mpi chose, and how to start
# ranks. Its last line has it made anew when that MPI is gone. Exit 2 if there is none.
set -u
cd "$(dirname "$0")" || exit 1
. ./probe.sh

probe_mpi || {
    echo "MPI: found none that starts two ranks, wanted one: run 'make setup', or name it with MPI_HOME=..." >&2
    [ -z "$mpi_refused" ] || echo "$mpi_refused" | sed 's/^/    refused: /' >&2
    exit 2
}
cat <<END
# $mpi_version
MPI_CFLAGS = $mpi_cflags
MPI_LIBS = $mpi_libs
MPIRUN = $mpirun
build/mpi.mk: \$(if \$(and \$(wildcard $mpi_cc),\$(wildcard $mpi_launcher)),,force)
END
