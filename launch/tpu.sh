# Sourced by tpu_create.sh, tpu_train.sh and tpu_delete.sh: the settings of a TPU and the calls of gcloud they share.
# shellcheck shell=bash
TPU_NAME=${TPU_NAME:-vadusa} PROJECT=${PROJECT:-} QUEUED=${QUEUED:-1} PAUSE=${PAUSE:-30} DRY_RUN=${DRY_RUN:-}
ZONE=${ZONE:?"must be set, as in ZONE=us-central1-a bash $0; see bash $0 --help"}
export DRY_RUN

tpus() { # tpus GROUP VERB ARGUMENTS...: gcloud in the project and zone; only printed in a dry run
    local command=(gcloud compute tpus "$@" --zone="$ZONE" ${PROJECT:+--project="$PROJECT"} --quiet)
    if [[ $DRY_RUN ]]; then
        printf '%q ' "${command[@]}"; printf '\n'
    else
        "${command[@]}"
    fi
}

state() { # of the TPU, or of its place in the queue while there is no TPU; NONE, or UNKNOWN if Google does not tell
    local answer
    if answer=$(tpus tpu-vm describe "$TPU_NAME" --format='value(state)' 2>&1); then
        echo "${answer##*$'\n'}"
    elif [[ $answer == *NOT_FOUND* && $QUEUED == 1 ]] &&
        answer=$(tpus queued-resources describe "$TPU_NAME" --format='value(state.state)' 2>&1); then
        answer=${answer##*$'\n'}
        [[ $answer != ACTIVE ]] && echo "$answer" || echo SUSPENDING # active without a TPU: on its way out
    elif [[ $answer == *NOT_FOUND* ]]; then
        echo NONE
    else
        echo "$answer" >&2
        echo UNKNOWN
    fi
}

delete() {
    if [[ $QUEUED == 1 ]]; then
        tpus queued-resources delete "$TPU_NAME" --force
    else
        tpus tpu-vm delete "$TPU_NAME"
    fi
}
