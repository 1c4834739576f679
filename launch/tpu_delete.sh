#!/usr/bin/env bash
# Deletes a Cloud TPU, and its place in the queue. What training left in the bucket stays.
#
#   ZONE=us-central1-a bash launch/tpu_delete.sh [--dry-run]
#
# Environment: ZONE, PROJECT, TPU_NAME and QUEUED as for tpu_create.sh.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
(($# == 0)) || { echo "Unknown argument: $1; see bash $0 --help" >&2; exit 2; }
source launch/tpu.sh
delete
