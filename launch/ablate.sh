# Sourced by the ablate_*.sh beside it: the settings that they share, as flags of vadusa_jax.ablate, and how a voice is made.
# shellcheck shell=bash
EXTRAS=${EXTRAS:-eval} NODES=${NODES:-12}

numbers() { # numbers NAME "VALUES": ends the script unless all of them are whole numbers above 0
    [[ $2 =~ ^[1-9][0-9]*(\ [1-9][0-9]*)*$ ]] || { echo "$1 must be numbers with spaces between, got: $2" >&2; exit 2; }
}

run() { # run MODULE FLAGS...: python -m vadusa_jax.MODULE; only printed in a dry run
    local command=("$VENV/bin/python" -m "vadusa_jax.$1" "${@:2}")
    if [[ ${DRY_RUN:-} ]]; then
        echo "${command[*]}"
    else
        "${command[@]}"
    fi
}

voice() { # voice NAME FOLDER DATASET CODEC RULES FLAGS...: trains a model and makes a voice of it; no RULES: without trees
    local name=$1 folder=$2 data=$3 codec=$4 rules=$5
    voices+=",$name=$folder/voice"
    [[ ! -d $folder/voice ]] || return 0
    run train --config "$CONFIG" --config.data.dir "$data" --workdir "$folder" --resume "${more[@]}" "${@:6}"
    [[ ! $rules ]] || run fit_tree --model "$folder" --tokens "$data" --batch "${BATCH:-1}" --rules "$rules"
    run export --workdir "$folder" --codec "$codec" --out "$folder/voice"
}

voices='' more=()
[[ ! ${TRAIN_FLAGS:-} ]] || read -ra more <<<"$TRAIN_FLAGS"
numbers NODES "$NODES"
common=(--texts "${TEXTS:-heldout}" --limit "${SENTENCES:-60}" --seeds "${SEEDS:-1}" --batch "${BATCH:-1}")
common+=(--nodes "${NODES// /,}" ${MODELS:+--models "$MODELS"} ${DRAFT:+--draft "$DRAFT"})
