#!/bin/sh
# Tells in one sentence what a machine lacks for building Hotbed. Usage: check_machine.sh PYTHON
set -eu
python=$1

fail() {
  echo "hotbed: $1" >&2
  exit 1
}

command -v "$python" >/dev/null 2>&1 ||
  fail "'$python' was not found; install Python 3.10 to 3.13, or name one: make PYTHON=python3.12"

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
  fail "'$python' does not run; name a Python 3.10 to 3.13: make PYTHON=python3.12"
case $version in
  3.10 | 3.11 | 3.12 | 3.13) ;;
  *) fail "'$python' is Python $version, but Hotbed needs 3.10 to 3.13; name one: make PYTHON=python3.12" ;;
esac

"$python" -c 'import venv, ensurepip' 2>/dev/null ||
  fail "'$python' cannot make virtual environments; install python$version-venv (Debian, Ubuntu)"

"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  fail "the headers of Python $version are missing; install python$version-dev (Debian, Ubuntu) or python$version-devel (Fedora)"

# The order in which CMake looks for a compiler when CXX is not set.
compiler=${CXX:-}
if [ -z "$compiler" ]; then
  for name in c++ g++ clang++; do
    if command -v "$name" >/dev/null 2>&1; then
      compiler=$name
      break
    fi
  done
fi

works() {
  [ -n "$compiler" ] || return 1
  scratch=$(mktemp -d)
  cat >"$scratch/probe.cpp" <<'EOF'
#include <bit>
#include <omp.h>
template <class T> requires(sizeof(T) == 4) unsigned bits(T x) { return std::bit_cast<unsigned>(x); }
int main() { return bits(0.0f) + (omp_get_max_threads() < 1); }
EOF
  status=0
  # CXX may carry flags, hence the unquoted expansion.
  $compiler -std=c++20 -fopenmp "$scratch/probe.cpp" -o "$scratch/probe" >/dev/null 2>&1 || status=1
  rm -rf "$scratch"
  return $status
}

works ||
  fail "no C++20 compiler with OpenMP was found; install g++ 11 or newer (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or name one: make CXX=g++-12"
