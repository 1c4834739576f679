#!/usr/bin/env bash
# Speaks with the demo model of this repository: plain decoding beside speculative decoding.
#
#   bash launch/demo.sh [--say "any text"] [--out out/demo] [any flag of python -m vadusa_jax.demo]
#
# The first run makes .venv and installs into it. Results: WAVs, spectrograms.png and results.json under --out.
# Environment: PYTHON (3.11 or newer), VADUSA_VENV (default .venv).
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
need_environment eval
exec "$VENV/bin/python" -m vadusa_jax.demo "$@"
