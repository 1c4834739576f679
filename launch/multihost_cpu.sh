#!/usr/bin/env bash
# Trains in several processes on this machine, as the workers of a pod do, each with virtual CPU devices.
#
#   bash launch/multihost_cpu.sh [--processes N] [--devices M] [--dry-run] FLAGS...
#
#   --processes N  how many processes (default 2)
#   --devices M    devices of each (default 4)
#   --dry-run      prints the commands and runs none of them
#   FLAGS          those of python -m vadusa_jax.train; --config and --workdir must be among them
#
# SIGTERM and Ctrl-C go on to all processes: they save and end, with exit code 143. If a process fails, the others are
# stopped and its exit code is that of this script.
# Environment: PYTHON (3.11 or newer), VADUSA_VENV (default .venv); PROCESSES and DEVICES stand for the flags; PORT
# where process 0 listens (default: chosen at random); GRACE seconds (default 10) to end for those that are left.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

PROCESSES=${PROCESSES:-2} DEVICES=${DEVICES:-4} PORT=${PORT:-$((20000 + RANDOM % 10000))} DRY_RUN='' GRACE=${GRACE:-10}
while (($#)); do
    case $1 in
        --processes | --devices)
            (($# > 1)) || { echo "$1 needs a value; see bash $0 --help" >&2; exit 2; }
            declare "$(tr '[:lower:]' '[:upper:]' <<<"${1#--}")=$2"
            shift 2
            ;;
        --dry-run) DRY_RUN=1; shift ;;
        *) break ;;
    esac
done
for name in PROCESSES DEVICES; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || { echo "$name must be a whole number above 0, got: ${!name}" >&2; exit 2; }
done

command_of() { # the command of process $1, as words in `words`
    words=(env JAX_PLATFORMS=cpu "XLA_FLAGS=${XLA_FLAGS:-} --xla_force_host_platform_device_count=$DEVICES"
        "JAX_COORDINATOR_ADDRESS=127.0.0.1:$PORT" "JAX_NUM_PROCESSES=$PROCESSES" "JAX_PROCESS_ID=$1"
        "$VENV/bin/python" -m vadusa_jax.train)
}

if [[ $DRY_RUN ]]; then
    for ((i = 0; i < PROCESSES; i++)); do
        command_of "$i"
        printf '%q ' "${words[@]}" "$@"; printf '\n'
    done
    exit
fi

need_environment demo
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
for ((i = 0; i < PROCESSES; i++)); do
    command_of "$i"
    "${words[@]}" "$@" &
    pids+=($!)
done

status=0
while [[ $(jobs -rp) ]] && ((!status)); do
    wait -n || status=$?
    if ((status > 128)) && [[ $(jobs -rp | wc -l) -eq $PROCESSES ]]; then
        status=0 # a signal ended the waiting, not a process
    fi
done
for pid in "${pids[@]}"; do # all that have ended, in case one failed while another was waited for
    [[ $(jobs -rp) == *$pid* ]] || wait "$pid" || ((status)) || status=$?
done
for ((i = 0; i < 10 * GRACE; i++)); do # the others of a run that ends together
    [[ $(jobs -rp) ]] || exit "$status"
    sleep 0.1
done
for pid in $(jobs -rp); do kill -KILL "$pid"; done
wait
exit "$status"
