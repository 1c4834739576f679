#!/usr/bin/env bash
# Do draft heads help or harm the backbone? Models without heads, trained together with them at several loss weights, and
# with heads on the finished backbone, all with the same data, steps and seeds; then measured beside each other.
#
#   bash launch/ablate_training.sh [--dry-run] [any flag of python -m vadusa_jax.ablate]
#
#   --dry-run  prints the commands and runs none of them
#
# Runs here or, with EXTRAS=tpu,eval, on a TPU VM. It can be stopped and run again: finished voices and cells are kept, and
# training goes on from its last checkpoint. `models.csv` and the page have the answer: dev losses, and WER over no heads.
# Environment, besides PYTHON (3.11 or newer) and VADUSA_VENV (default .venv):
#   DATA, CODEC token records and codec; must be set
#   RUNS        seeds of training (default "0 1")
#   WEIGHTS     loss weights of the heads in joint training (default "0.05 0.2 0.8")
#   CONFIG      what is trained (default configs/demo.py)
#   TRAIN_FLAGS more flags of python -m vadusa_jax.train, such as "--config.train.steps=800"
#   NODES       tree sizes (default "12")
#   TEXTS, SENTENCES, SEEDS, BATCH  what is spoken (default heldout, 60, 1, 1)
#   OUT         (default out/ablate_training)
#   EXTRAS      what is installed (default eval)
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
DRY_RUN=
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
source launch/ablate.sh

RUNS=${RUNS:-0 1} WEIGHTS=${WEIGHTS:-0.05 0.2 0.8} OUT=${OUT:-out/ablate_training}
CONFIG=${CONFIG:-configs/demo.py}
[[ ${DATA:-} && ${CODEC:-} ]] || { echo "DATA and CODEC must be set; see bash $0 --help" >&2; exit 2; }
[[ $DRY_RUN ]] || need_environment "$EXTRAS"

run_voice() { # run_voice NAME RUN RULES FLAGS...: one run, with its own seed
    voice "$1@$2" "$OUT/$1@$2" "$DATA" "$CODEC" "$3" --config.train.seed "$2" --config.data.seed "$2" "${@:4}"
}

RULES=exact,tolerance:3
for seed in $RUNS; do
    run_voice none "$seed" "" --config.heads.count 0
    for weight in $WEIGHTS; do
        run_voice "joint-$weight" "$seed" "$RULES" --config.heads.loss_weight "$weight"
    done
    run_voice frozen "$seed" "$RULES" --config.train.mode frozen --init "$OUT/none@$seed"
done
run ablate "${common[@]}" --models "${voices#,}" --modes ar,exact,tolerance:3 --out "$OUT" "$@"
