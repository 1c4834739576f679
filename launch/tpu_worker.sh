#!/usr/bin/env bash
# Trains on one worker of a TPU: tpu_train.sh calls this there, on all workers alike.
#
#   bash launch/tpu_worker.sh start [any flag of python -m vadusa_jax.train]   starts training unless it already runs
#   bash launch/tpu_worker.sh follow                                           prints its log until it ends, and how
#
# Training that fails starts again from its last checkpoint, RETRIES times; an hour of training makes good a failure.
# Environment: CONFIG, BUCKET, DATA, WORKDIR, SETUP, RETRIES and PAUSE as for tpu_train.sh.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
RUN=out/tpu
mkdir -p "$RUN"

mount_bucket() {
    mkdir -p out/bucket
    ! mountpoint -q out/bucket || return 0
    if ! command -v gcsfuse >/dev/null; then
        local key=/usr/share/keyrings/cloud.google.asc site=https://packages.cloud.google.com/apt
        curl -fsSL "$site/doc/apt-key.gpg" | sudo tee "$key" >/dev/null
        echo "deb [signed-by=$key] $site gcsfuse-$(lsb_release -cs) main" | sudo tee /etc/apt/sources.list.d/gcsfuse.list
        sudo apt-get -qq update
        sudo apt-get -qq install gcsfuse
    fi
    # Nothing is remembered about the bucket's files: the workers must see what the others have just written.
    gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 "${BUCKET#gs://}" out/bucket
}

once() { # all that must be there, then training until it ends
    [[ -z ${SETUP:-} ]] || bash -c "$SETUP"
    [[ -z ${BUCKET:-} ]] || mount_bucket
    if [[ ! -d out/tokens ]]; then # records are read one by one in random order: from this machine's own disk
        rm -rf out/tokens.partial
        cp -r "$DATA" out/tokens.partial
        mv out/tokens.partial out/tokens
    fi
    if ! find_python >/dev/null 2>&1; then
        python3 -m pip install --user --quiet uv
        python3 -m uv python install --quiet 3.12
        PYTHON=$(python3 -m uv python find 3.12)
    fi
    need_environment tpu
    exec "$VENV/bin/python" -m vadusa_jax.train --config "$CONFIG" --config.data.dir out/tokens --workdir "$WORKDIR" \
        --resume "$@"
}

keep() { # trains until it ends well, or has failed too often
    local failures=0 status began
    exec 9>"$RUN/lock"
    flock -n 9 || exit
    while :; do
        status=0 began=$SECONDS
        bash launch/tpu_worker.sh once "$@" 9>&- || status=$? # a process of its own: its errors end it
        ((status)) || break
        ((SECONDS - began < 3600)) || failures=0
        ((++failures <= RETRIES)) || break
        echo "== training failed with status $status; start $failures of $RETRIES more"
        sleep "$PAUSE"
    done
    echo "$status" >"$RUN/status"
}

case ${1:-} in
    start)
        flock -n "$RUN/lock" true || { echo "training already runs"; exit; }
        rm -f "$RUN/status"
        setsid nohup bash launch/tpu_worker.sh keep "${@:2}" </dev/null >>"$RUN/log" 2>&1 &
        echo $! >"$RUN/pid"
        ;;
    follow)
        tail -n 100 -F "$RUN/log" --pid="$(<"$RUN/pid")" 2>/dev/null
        echo "== training ended: $(cat "$RUN/status" 2>/dev/null || echo killed)" # tpu_train.sh reads this line
        ;;
    once | keep) "$@" ;;
    *) echo "Unknown argument: ${1:-none}; see bash $0 --help" >&2; exit 2 ;;
esac
