#!/usr/bin/env bash
# Which speech tokens suit draft heads? One model for the tokens of every codec, and one for the first codec's in acoustic
# BPE units, all with the same corpus, steps and seed; then measured beside each other.
#
#   bash launch/ablate_tokens.sh [--dry-run] [any flag of python -m vadusa_jax.ablate]
#
#   --dry-run  prints the commands and runs none of them
#
# Runs here or, with EXTRAS=tpu,eval, on a TPU VM. It can be stopped and run again: finished datasets, voices and cells are
# kept, and training goes on from its last checkpoint. Token types differ in how much sound a token is: compare passes a
# second of speech rather than tokens per step.
# Environment, besides PYTHON (3.11 or newer) and VADUSA_VENV (default .venv):
#   CORPUS      folder of a corpus with train and dev, as for `prepare tokens`; must be set
#   CODECS      codecs with their names, "name=folder name=folder ..."; must be set
#   UNITS       vocabulary of the units (default 4096; 0: none)
#   CONFIG      what is trained (default configs/demo.py)
#   TRAIN_FLAGS more flags of python -m vadusa_jax.train, such as "--config.train.steps=800"
#   NODES       tree sizes (default "12")
#   TEXTS, SENTENCES, SEEDS, BATCH  what is spoken (default heldout, 60, 1, 1)
#   OUT         (default out/ablate_tokens)
#   EXTRAS      what is installed (default eval)
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
DRY_RUN=
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
source launch/ablate.sh

UNITS=${UNITS:-4096} OUT=${OUT:-out/ablate_tokens} CONFIG=${CONFIG:-configs/demo.py}
[[ ${CORPUS:-} && ${CODECS:-} ]] || { echo "CORPUS and CODECS must be set; see bash $0 --help" >&2; exit 2; }
[[ $UNITS =~ ^[0-9]+$ ]] || { echo "UNITS must be a whole number, got: $UNITS" >&2; exit 2; }
[[ $DRY_RUN ]] || need_environment "$EXTRAS"

vocab() { # vocab DATASET: how many speech tokens it has; "?" in a dry run before there is one
    sed -n 's/.*"speech_vocab": *\([0-9]*\).*/\1/p' "$1/codec.json" 2>/dev/null || echo '?'
}

type_voice() { # type_voice NAME DATASET CODEC
    voice "$1" "$OUT/$1" "$2" "$3" exact,tolerance:3 --config.model.speech_vocab "$(vocab "$2")"
}

for pair in $CODECS; do
    name=${pair%%=*} codec=${pair#*=}
    [[ -d $OUT/tokens_$name ]] || run prepare tokens --corpus "$CORPUS" --codec "$codec" --out "$OUT/tokens_$name"
    type_voice "$name" "$OUT/tokens_$name" "$codec"
done
if ((UNITS)); then
    name=${CODECS%%=*} codec=${CODECS%% *} units=$OUT/tokens_units
    [[ -d $units ]] || run prepare bpe --tokens "$OUT/tokens_$name" --codec "${codec#*=}" --vocab "$UNITS" --out "$units"
    type_voice "$name-units" "$units" "$units/codec"
fi
run ablate "${common[@]}" --models "${voices#,}" --modes ar,exact,tolerance:3 --out "$OUT" "$@"
