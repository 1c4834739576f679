# Sourced by the scripts beside it: answers --help, finds a Python, makes the virtual environment and keeps it up to
# date with setup.py. VADUSA_VENV (default .venv) says where it lives, PYTHON which interpreter to build it from.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VADUSA_VENV:-.venv}
# XLA takes its working memory anew at every step: huge pages save a fifth of a training step on Linux.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then # the comment at the top of the calling script is its usage text
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "launch/$(basename "$0")"
    exit
fi

find_python() { # a version manager's shim can exist and still not run: ask each candidate for its version
    local candidates=${PYTHON:-python3.12 python3.11 python3} candidate
    for candidate in $candidates; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python of version 3.11 or newer runs here (tried: $candidates)." \
        "Install one, or name it: PYTHON=/path/to/python3.12 bash $0" >&2
    return 1
}

need_environment() { # need_environment EXTRAS: installs only if setup.py or the extras changed since the last time
    local extras=$1 stamp="$VENV/.installed-$1" key python
    if ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        python=$(find_python)
        echo "Making $VENV with $("$python" --version)"
        "$python" -m venv --clear "$VENV"
    fi
    key=$(sha256sum setup.py)
    if [[ ! -f $stamp || $(<"$stamp") != "$key" ]]; then
        echo "Installing vadusa_jax[$extras] into $VENV"
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
        echo "$key" >"$stamp"
    fi
}
