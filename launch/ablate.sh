# Sourced by ablate_heads.sh and ablate_tolerance.sh: the settings that they share, as flags of vadusa_jax.ablate.
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

numbers NODES "$NODES"
common=(--texts "${TEXTS:-heldout}" --limit "${SENTENCES:-60}" --seeds "${SEEDS:-1}" --batch "${BATCH:-1}")
common+=(--nodes "${NODES// /,}" ${MODELS:+--models "$MODELS"} ${DRAFT:+--draft "$DRAFT"})
