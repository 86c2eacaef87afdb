#!/bin/sh
# Installs what building, running and testing need and what is not there yet: a C compiler, make, MPI, cJSON, PCRE2,
# cmocka.
#
#   sh scripts/setup.sh            install what is missing; exit 2 if that takes your hand
#   sh scripts/setup.sh --check    only report; exit 1 if something is missing
#   sh scripts/setup.sh --fuzz     clang as well, which `make test-full` builds its fuzz targets with
#
# A link test decides what is missing (probe.sh). Installing goes through apt-get, as root or by a sudo that does not
# ask; for other package managers the line to run is printed.
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
    apt-get:mpi) echo "mpich libmpich-dev" ;;
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

missing=
for need in $needs; do
    is_there "$need" || missing="$missing $need"
done
if [ -z "$missing" ]; then
    echo "setup: all is there:$(for need in $needs; do printf ' %s' "$(title_of "$need")"; done | sed 's/ \([^ ]*\)$/ and \1/')"
    exit 0
fi
for need in $needs; do
    case " $missing " in
    *" $need "*) report "$need" "missing" ;;
    *) report "$need" "found" ;;
    esac
done
"$check_only" && exit 1

for manager in apt-get dnf pacman brew none; do
    command -v "$manager" >/dev/null && break
done
packages=$(packages_missing "$manager")
case $manager in
dnf) die "run this, then try again:
    sudo dnf install $packages
MPICH is found after 'module load mpi' in a new shell, or with MPI_HOME=/usr/lib64/mpich" ;;
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

echo "setup: installing $packages"
# One bad source among several fails the update, but what we need may well come from the others.
apt_get update || {
    last_lines_of_apt
    echo "setup: apt-get update failed, its last lines are above; going on with the package lists there are" >&2
}
for need in $missing; do
    packages=$(packages_of apt-get "$need")
    # shellcheck disable=SC2086
    apt_get install -y --no-install-recommends $packages || {
        last_lines_of_apt
        die "apt-get could not install $packages, its last lines are above (on Ubuntu it is in 'universe')"
    }
    is_there "$need" || die "$packages installed, but the link test for $(title_of "$need") still fails;
    look at CC, MPI_HOME and PATH: CC is '$CC', mpicc is '$(command -v "${mpi_bin}mpicc")'"
    report "$need" "installed ($packages)"
done
