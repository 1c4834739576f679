#!/usr/bin/env bash
# Trains on a Cloud TPU until training has ended, whatever is preempted in between.
#
#   ZONE=us-central1-a BUCKET=gs://mine bash launch/tpu_train.sh [--dry-run] [any flag of python -m vadusa_jax.train]
#
#   --dry-run  prints the commands and runs none of them
#
# Makes the TPU if there is none, sends the files that git tracks here to all workers, installs, starts training there
# and prints the log of worker 0, which also goes to out/TPU_NAME.log. A preempted TPU is replaced and training
# goes on from its last checkpoint. Training that fails starts again on the workers RETRIES times; then this script
# fails. It can be stopped and run again: it goes on with what it finds. The TPU stays: see tpu_delete.sh.
#
# Environment, besides that of tpu_create.sh:
#   CONFIG   what to train (default configs/libritts.py)
#   BUCKET   Cloud Storage bucket, mounted on every worker at out/bucket; must be set, unless SETUP mounts something
#            else. Make it with a hierarchical namespace: a checkpoint is renamed when it is complete
#   DATA     token records as the workers see them (default out/bucket/tokens); copied to every worker's own disk
#   WORKDIR  checkpoints and logs as the workers see them, shared by all (default out/bucket/TPU_NAME)
#   SETUP    command that every worker runs first, such as "sudo mount -o nolock 10.0.0.2:/share /mnt"
#   RETRIES  (default 3)
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[[ ${1:-} != --dry-run ]] || { DRY_RUN=1; shift; }
source launch/tpu.sh

CONFIG=${CONFIG:-configs/libritts.py} DATA=${DATA:-out/bucket/tokens} WORKDIR=${WORKDIR:-out/bucket/$TPU_NAME}
BUCKET=${BUCKET:-} SETUP=${SETUP:-} RETRIES=${RETRIES:-3} PATIENCE=20
[[ $BUCKET || $SETUP ]] || { echo "Say where data and checkpoints are: BUCKET or SETUP; see bash $0 --help" >&2; exit 2; }
[[ -f $CONFIG ]] || { echo "There is no config $CONFIG" >&2; exit 2; }
LOG=out/$TPU_NAME.log ARCHIVE=out/$TPU_NAME.tar.gz
settings=("CONFIG=$CONFIG" "BUCKET=$BUCKET" "DATA=$DATA" "WORKDIR=$WORKDIR" "SETUP=$SETUP" "RETRIES=$RETRIES")
printf -v worker '%q ' env "${settings[@]}" "PAUSE=$PAUSE" bash vadusa_jax/launch/tpu_worker.sh start "$@"

start() { # on all workers: the files of this repository, and training unless it already runs
    tpus tpu-vm scp "$ARCHIVE" "$TPU_NAME:vadusa_jax.tar.gz" --worker=all &&
        tpus tpu-vm ssh "$TPU_NAME" --worker=all --command="mkdir -p vadusa_jax &&
            tar -xzf vadusa_jax.tar.gz -C vadusa_jax && $worker"
}

follow() {
    tpus tpu-vm ssh "$TPU_NAME" --worker=0 --command="bash vadusa_jax/launch/tpu_worker.sh follow"
}

if [[ $DRY_RUN ]]; then
    bash launch/tpu_create.sh
    start
    follow
    exit
fi

mkdir -p out
touch "$LOG"
{ git ls-files -z; printf '%s\0' "$CONFIG"; } | sort -zu | tar -czf "$ARCHIVE" --null -T -
bash launch/tpu_create.sh
in_vain=0 # rounds in a row that reached no training: gcloud's own exit status does not tell why a connection ended
while ((in_vain < PATIENCE)); do
    lines=$(wc -l <"$LOG")
    ((++in_vain))
    if [[ $(state) == READY ]] && start; then
        { follow || true; } | tee -a "$LOG"
    fi
    end=$(tail -n +$((lines + 1)) "$LOG" | tail -n 1)
    [[ -z $end ]] || in_vain=0
    now=$(state)
    case ${end%$'\r'} in
        "== training ended: 0") exit ;;
        "== training ended: "*)
            if [[ $now == READY ]]; then
                { echo "Training failed on a TPU that is well; the end of $LOG:"; tail -n 40 "$LOG"; } >&2
                exit 1
            fi
            ;;
    esac
    if [[ $now != READY && $now != UNKNOWN ]]; then
        echo "== $TPU_NAME is $now"
        until bash launch/tpu_create.sh; do sleep "$PAUSE"; done # there may be no room for a while
        in_vain=0
    else
        sleep "$PAUSE"
    fi
done
echo "No training could be reached on $TPU_NAME in $PATIENCE rounds" >&2
exit 1
