#!/usr/bin/env bash
# How many draft heads, and at which tolerance? The first k heads of one model, or one model trained for every k.
#
#   bash launch/ablate_heads.sh [--dry-run] [any flag of python -m vadusa_jax.ablate]
#
#   --dry-run  prints the commands and runs none of them
#
# Runs here or, with EXTRAS=tpu,eval, on a TPU VM. It can be stopped and run again: finished cells are kept, and
# training goes on from its last checkpoint.
# Environment, besides PYTHON (3.11 or newer) and VADUSA_VENV (default .venv):
#   HEADS       (default "1 2 3 4 5 6")
#   TOLERANCES  (default "1 2 3 5")
#   MODELS      voices, as name=folder[,name=folder...] (default: the voice of this repository)
#   NODES       tree sizes (default "12")
#   TEXTS, SENTENCES, SEEDS, BATCH  what is spoken (default heldout, 60, 1, 1)
#   OUT         (default out/ablate_heads)
#   EXTRAS      what is installed (default eval)
#   TRAIN       1: first trains a model for every k and makes voices of them, OUT/heads_k/voice, instead of MODELS
#   CONFIG      what is trained (default configs/ablate_heads.py; configs/demo.py for the size of the demo voice)
#   DATA, CODEC token records and codec of the training; must be set with TRAIN=1
#   TRAIN_FLAGS more flags of python -m vadusa_jax.train, such as "--minutes 60"
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
DRY_RUN=
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
source launch/ablate.sh

HEADS=${HEADS:-1 2 3 4 5 6} TOLERANCES=${TOLERANCES:-1 2 3 5} OUT=${OUT:-out/ablate_heads} TRAIN=${TRAIN:-0}
numbers HEADS "$HEADS"
numbers TOLERANCES "$TOLERANCES"
[[ $TRAIN != 1 || (${DATA:-} && ${CODEC:-}) ]] || { echo "TRAIN=1 needs DATA and CODEC; see bash $0 --help" >&2; exit 2; }
[[ $DRY_RUN ]] || need_environment "$EXTRAS"
# shellcheck disable=SC2086 # one mode for each number
modes=$(printf ',tolerance:%s' $TOLERANCES)

if [[ $TRAIN == 1 ]]; then
    CONFIG=${CONFIG:-configs/ablate_heads.py}
    for k in $HEADS; do
        voice "heads_$k" "$OUT/heads_$k" "$DATA" "$CODEC" "exact$modes" --config.heads.count "$k"
    done
    run ablate "${common[@]}" --models "${voices#,}" --modes "ar$modes" --out "$OUT" "$@"
else
    run ablate "${common[@]}" --heads "${HEADS// /,}" --modes "ar$modes" --out "$OUT" "$@"
fi
