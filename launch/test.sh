#!/usr/bin/env bash
# Checks the style with ruff and runs all tests.
#
#   bash launch/test.sh [any argument of pytest, such as -m "not slow" or tests/test_tree.py]
#
# The first run makes .venv and installs into it; a changed setup.py installs again.
# Environment: PYTHON (3.11 or newer), VADUSA_VENV (default .venv).
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_environment dev
"$VENV/bin/ruff" check .
exec "$VENV/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile "$@" # a file has one process: one compilation
