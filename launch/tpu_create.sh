#!/usr/bin/env bash
# Makes a Cloud TPU and waits until it is ready; one that was preempted is replaced.
#
#   ZONE=us-central1-a bash launch/tpu_create.sh [--dry-run]
#
#   --dry-run  prints the commands and runs none of them
#
# Environment:
#   ZONE              where; must be set
#   PROJECT           Google Cloud project (default: that of gcloud)
#   TPU_NAME          name of the TPU, and of its place in the queue (default vadusa)
#   ACCELERATOR_TYPE  which chips and how many (default v5litepod-16; v4-8, v5p-8, v6e-16 and so on)
#   VERSION           software of its machines (default: the one for ACCELERATOR_TYPE)
#   SPOT              1: cheap, may be preempted at any time (default); 0: on demand
#   QUEUED            1: waits in the queue for it (default); 0: gets it now or fails
#   CREATE_FLAGS      more flags of gcloud, such as "--network=mine --service-account=me@project"
#   PAUSE             seconds between two looks (default 30)
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
(($# == 0)) || { echo "Unknown argument: $1; see bash $0 --help" >&2; exit 2; }
source launch/tpu.sh

ACCELERATOR_TYPE=${ACCELERATOR_TYPE:-v5litepod-16}
case $ACCELERATOR_TYPE in
    v5litepod-*) VERSION=${VERSION:-v2-alpha-tpuv5-lite} ;;
    v5p-*) VERSION=${VERSION:-v2-alpha-tpuv5} ;;
    v6e-*) VERSION=${VERSION:-v2-alpha-tpuv6e} ;;
    *) VERSION=${VERSION:-tpu-ubuntu2204-base} ;;
esac

create() {
    local flags=(--accelerator-type="$ACCELERATOR_TYPE") more
    read -ra more <<<"${CREATE_FLAGS:-}"
    [[ ${SPOT:-1} != 1 ]] || flags+=(--spot)
    if [[ $QUEUED == 1 ]]; then
        tpus queued-resources create "$TPU_NAME" --node-id="$TPU_NAME" --runtime-version="$VERSION" \
            "${flags[@]}" "${more[@]}"
    else
        tpus tpu-vm create "$TPU_NAME" --version="$VERSION" "${flags[@]}" "${more[@]}"
    fi
}

[[ ! $DRY_RUN ]] || { create; exit; }
made=
while :; do
    state=$(state)
    case $state in
        READY) echo "$TPU_NAME is ready"; exit ;;
        NONE) create; made=1 ;;
        FAILED | SUSPENDED | PREEMPTED | TERMINATED | STOPPED)
            [[ ! $made ]] || { echo "$TPU_NAME could not be made: $state" >&2; exit 1; }
            echo "$TPU_NAME is $state and makes room for a new one"
            delete
            ;;
        UNKNOWN) exit 1 ;;
        *) echo "$TPU_NAME: $state"; sleep "$PAUSE" ;;
    esac
done
