#!/bin/sh
# Installs what building, running and testing need and what is not there yet: a C compiler, make, MPI, cJSON, PCRE2,
# cmocka.
#
#   sh scripts/setup.sh            install what is missing; exit 2 if that takes your hand
#   sh scripts/setup.sh --check    only report; exit 1 if something is missing
#   sh scripts/setup.sh --fuzz     clang as well, which `make test-full` builds its fuzz targets with
#
# A link test decides what is missing (probe.sh); an MPI must start two ranks as well. Installing goes through apt-get,
# as root or by a sudo that does not ask; for other package managers the line to run is printed.
set -u

die() {
    printf 'setup: %s\n' "$1" >&2
    exit 2
}

check_only=false
needs="compiler make mpi cjson pcre2 cmocka"
case "$#:${1-}" in
0:) ;;
1:--check) check_only=true ;;
1:--fuzz) needs="$needs clang" ;;
*) die "found the arguments '$*', wanted none, --check or --fuzz" ;;
esac

cd "$(dirname "$0")" || exit 1
. ./probe.sh

title_of() {
    case $1 in
    compiler) echo "C compiler" ;;
    mpi) echo "MPI" ;;
    cjson) echo "cJSON" ;;
    pcre2) echo "PCRE2" ;;
    *) echo "$1" ;;
    esac
}

# The build asks for C17 and OpenMP both; a compiler without one of them is not the one we need.
is_there() {
    case $1 in
    compiler) probe_compiler && probe_openmp ;;
    *) "probe_$1" ;;
    esac
}

# The packages of package manager $1 that give $2.
packages_of() {
    case $1:$2 in
    apt-get:compiler) echo "gcc libc6-dev" ;; # libc6-dev: only recommended by gcc, and recommendations are left out
    apt-get:mpi)
        case ${mpi_refused-} in
        *"rank 0 of 1"*) echo "openmpi-bin libopenmpi-dev" ;; # the MPICH of Ubuntu 24.04 starts only such ranks
        *) echo "mpich libmpich-dev" ;;
        esac
        ;;
    apt-get:cjson) echo "libcjson-dev" ;;
    apt-get:pcre2) echo "libpcre2-dev" ;;
    apt-get:cmocka) echo "libcmocka-dev" ;;
    apt-get:clang) echo "clang libclang-rt-dev" ;;
    dnf:mpi) echo "mpich mpich-devel" ;;
    dnf:cjson) echo "cjson-devel" ;;
    dnf:pcre2) echo "pcre2-devel" ;;
    dnf:cmocka) echo "libcmocka-devel" ;;
    dnf:clang) echo "clang compiler-rt" ;;
    pacman:clang) echo "clang compiler-rt" ;;
    brew:clang) echo "llvm" ;;
    pacman:mpi) echo "openmpi" ;;
    *:compiler) echo "gcc" ;;
    *:mpi) echo "mpich" ;;
    *) echo "$2" ;;
    esac
}

# The packages of package manager $1 for all that is missing.
packages_missing() {
    for need in $missing; do
        packages_of "$1" "$need"
    done | paste -sd ' ' -
}

report() { printf 'setup: %-11s %s\n' "$(title_of "$1")" "$2"; }
report_refused_mpi() { [ -z "$mpi_refused" ] || echo "$mpi_refused" | sed 's/^/setup: refused: /'; }
report_mpi() {
    report_refused_mpi
    report mpi "$mpi_version ($mpi_cc); mpirun -n 2 starts ranks 0 and 1 of 2"
}

missing=
for need in $needs; do
    is_there "$need" || missing="$missing $need"
done
if [ -z "$missing" ]; then
    echo "setup: all is there:$(for need in $needs; do printf ' %s' "$(title_of "$need")"; done | sed 's/ \([^ ]*\)$/ and \1/')"
    report_mpi
    exit 0
fi
for need in $needs; do
    case " $missing " in
    *" $need "*) report "$need" "missing" ;;
    *) report "$need" "found" ;;
    esac
done
report_refused_mpi
"$check_only" && exit 1
case "${MPI_HOME:+set}$missing " in
*" compiler "*) ;; # without one there is no telling
set*" mpi "*) die "found MPI_HOME=$MPI_HOME, wanted an MPI there that starts two ranks; unset it or name another
    ${mpi_refused:-$MPI_HOME/bin has no mpicc and mpirun}" ;;
esac

for manager in apt-get dnf pacman brew none; do
    command -v "$manager" >/dev/null && break
done
packages=$(packages_missing "$manager")
case $manager in
dnf) die "run this, then try again:
    sudo dnf install $packages" ;;
pacman) die "run this, then try again:
    sudo pacman -S --needed $packages" ;;
brew) die "run this, then try again (with CC=gcc-15 or the like, since Apple's compiler has no OpenMP):
    brew install $packages" ;;
none) die "found no apt-get, dnf, pacman or brew; install these by hand, then try again: $packages" ;;
esac

if [ "$(id -u)" = 0 ]; then
    as_root=
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
elif command -v sudo >/dev/null; then
    die "sudo would ask for a password here; run this, then try again:
    sudo apt-get update && sudo apt-get install -y --no-install-recommends $packages"
else
    die "installing takes root, and there is no sudo; run this as root, then try again:
    apt-get update && apt-get install -y --no-install-recommends $packages"
fi

# Runs apt-get without questions; its output goes to a file. A fresh cloud machine may hold apt's lock for a while.
apt_get() {
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get -o DPkg::Lock::Timeout=300 "$@" </dev/null >"$probe_dir/apt" 2>&1
}

last_lines_of_apt() { tail -n 8 "$probe_dir/apt" | sed 's/^/    /' >&2; }

# One bad source among several fails the update, but what we need may well come from the others.
apt_get update || {
    last_lines_of_apt
    echo "setup: apt-get update failed, its last lines are above; going on with the package lists there are" >&2
}

# Leaves what it installed for $1 in $packages.
install() {
    packages=$(packages_of apt-get "$1")
    report "$1" "installing $packages"
    # shellcheck disable=SC2086
    apt_get install -y --no-install-recommends $packages || {
        last_lines_of_apt
        die "apt-get could not install $packages, its last lines are above (on Ubuntu it is in 'universe')"
    }
}

for need in $missing; do
    is_there "$need" && continue # all it lacked was one of those before
    install "$need"
    if [ "$need" = mpi ] && ! is_there mpi; then
        report_refused_mpi
        install mpi # another one now
    fi
    is_there "$need" || die "$packages installed, but the test for $(title_of "$need") still fails;
    look at CC, MPI_HOME and PATH; CC is '$CC', MPI_HOME is '${MPI_HOME-}'"
    report "$need" "found now"
done
report_mpi
