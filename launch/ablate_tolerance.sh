#!/usr/bin/env bash
# What does tolerance gain and cost? Tolerances beside plain decoding, then every rule in one figure.
#
#   bash launch/ablate_tolerance.sh [--dry-run] [any flag of python -m vadusa_jax.ablate]
#
#   --dry-run  prints the commands and runs none of them
#
# Runs here or, with EXTRAS=tpu,eval, on a TPU VM. It can be stopped and run again: finished cells are kept.
# Environment, besides PYTHON (3.11 or newer) and VADUSA_VENV (default .venv):
#   MODELS      voices, as name=folder[,name=folder...] (default: the voice of this repository)
#   DRAFT       folder of a draft language model, for the rule ssd (default: none, and ssd is left out)
#   TOLERANCES  (default "1 2 3 5 8")
#   NODES       tree sizes (default "12")
#   TEXTS, SENTENCES, SEEDS, BATCH  what is spoken (default heldout, 60, 1, 1)
#   OUT         (default out/ablate_tolerance); tables and pictures are in OUT/tolerance and OUT/rules
#   EXTRAS      what is installed (default eval)
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
DRY_RUN=
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
source launch/ablate.sh

TOLERANCES=${TOLERANCES:-1 2 3 5 8} OUT=${OUT:-out/ablate_tolerance}
numbers TOLERANCES "$TOLERANCES"
[[ $DRY_RUN ]] || need_environment "$EXTRAS"
# shellcheck disable=SC2086 # one mode for each number
modes=$(printf ',tolerance:%s' $TOLERANCES)
run ablate "${common[@]}" --modes "ar$modes" --out "$OUT/tolerance" "$@"
run ablate "${common[@]}" --out "$OUT/rules" "$@"
