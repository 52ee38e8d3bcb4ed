#!/bin/sh
# Look for what the build needs: Python >= 3.11 with venv and headers, a C compiler, a C++20 compiler.
# Prints the path of the Python to use on stdout; on stderr what is missing and the one command that installs it.
# The Python may be named: PYTHON=python3.12 .ci/check_machine.sh
set -u

packages=""     # Debian's names of what is missing
problems=""
say() { problems="$problems
  - $1"; packages="$packages $2"; }

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }
has_headers() {
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        >/dev/null 2>&1
}

# The first complete Python wins; failing that the first that is new enough, to say what it lacks.
python="" incomplete=""
for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    command -v "$name" >/dev/null 2>&1 && usable "$name" || continue
    incomplete=${incomplete:-$name}
    if has_venv "$name" && has_headers "$name"; then python=$name; break; fi
done
if [ -z "$python" ]; then
    if [ -z "$incomplete" ]; then
        say "no Python >= 3.11 (looked for ${PYTHON:-python3, python3.11 to python3.14})" \
            "python3 python3-venv python3-dev"
    else
        name=$(basename "$incomplete")
        has_venv "$incomplete" || say "$incomplete has no venv module" "$name-venv"
        has_headers "$incomplete" || say "$incomplete has no headers (Python.h)" "$name-dev"
    fi
fi

echo 'int main(void) { return 0; }' | ${CC:-cc} -x c - -o /dev/null 2>/dev/null ||
    say "no C compiler (${CC:-cc})" "gcc libc6-dev"
printf '%s\n' '#include <span>' '#if !defined(__clang__) && __GNUC__ < 12' '#error "too old"' '#endif' |
    ${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    say "no C++20 compiler: g++ >= 12 or clang++ (${CXX:-c++})" "g++"

if [ -n "$problems" ]; then
    echo "kvpool cannot be built on this machine yet:$problems" >&2
    sudo=""; [ "$(id -u)" = 0 ] || sudo="sudo "
    if [ "$(uname)" = Darwin ]; then
        command=""
        case "$packages" in *gcc*|*g++*) command="xcode-select --install" ;; esac
        case "$packages" in *python*) command="${command:+$command; }brew install python@3.13" ;; esac
        echo "Install it with:  $command" >&2
    elif command -v apt-get >/dev/null 2>&1; then
        echo "Install it with:  ${sudo}apt-get update && ${sudo}apt-get install -y$packages" >&2
    else
        echo "Install it with your package manager (Debian's names:$packages)" >&2
    fi
    exit 1
fi
command -v "$python"
