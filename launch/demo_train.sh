#!/usr/bin/env bash
# Makes a demo voice, from nothing or from one: corpus, codec, tokens, model, draft trees; then measures it.
#
#   bash launch/demo_train.sh [--minutes N] [--hours H] [--hours_each H] [--init VOICE] [--out DIR] [--dry-run]
#
#   --minutes N  bounds all training together (default 120): a fifth for the codec, a fifth for its vocoder, the rest
#                for backbone and heads
#   --hours H    hours of speech to make (default 16; a model of this size overfits on 5); where flite and espeak-ng are
#                installed (apt-get install flite espeak-ng), each of their voices is another speaker
#   --hours_each H  hours of each of those (default 1.5)
#   --init VOICE start from this voice of the speaker joe, such as vadusa_jax/assets/demo: its codec learns the other
#                speakers and keeps the tokens of joe, so that its model need not begin anew
#   --out DIR    where everything goes (default out/demo_train); the finished voice is DIR/voice
#   --dry-run    prints the commands and runs none of them
#
# A stage is skipped while its output is there and neither its command nor its inputs have changed since it finished.
# An interrupted stage starts again, and training goes on from its last checkpoint.
# Environment: PYTHON (3.11 or newer), VADUSA_VENV (default .venv); MINUTES, HOURS, HOURS_EACH, INIT
# and OUT stand for the flags.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

MINUTES=${MINUTES:-120} HOURS=${HOURS:-16} HOURS_EACH=${HOURS_EACH:-1.5} INIT=${INIT:-} OUT=${OUT:-out/demo_train} DRY_RUN=
while (($#)); do
    case $1 in
        --minutes | --hours | --hours_each | --init | --out)
            (($# > 1)) || { echo "$1 needs a value; see bash $0 --help" >&2; exit 2; }
            declare "$(tr '[:lower:]' '[:upper:]' <<<"${1#--}")=$2"
            shift 2
            ;;
        --dry-run) DRY_RUN=1; shift ;;
        *) echo "Unknown argument: $1; see bash $0 --help" >&2; exit 2 ;;
    esac
done
[[ $MINUTES =~ ^[1-9][0-9]*$ ]] || { echo "--minutes must be a whole number above 0, got: $MINUTES" >&2; exit 2; }

stage() { # stage NAME "INPUTS" MODULE FLAGS...: python -m vadusa_jax.MODULE makes $OUT/NAME from other stages or files
    local name=$1 inputs=$2 module=$3 stamps="$OUT/.stamps" input key
    shift 3
    local command=("$VENV/bin/python" -m "vadusa_jax.$module" "$@")
    if [[ $DRY_RUN ]]; then
        printf '%s:' "$name"; printf ' %q' "${command[@]}"; printf '\n'
        return
    fi
    key=$({ echo "$@"; for input in $inputs; do cat "$stamps/$input" 2>/dev/null || cat "$input"; done; } | sha256sum)
    if [[ -e $OUT/$name && -e $stamps/$name && $(head -n 1 "$stamps/$name") == "$key" ]]; then
        echo "== $name: up to date"
        return
    fi
    echo "== $name"
    mkdir -p "$stamps"
    rm -f "$stamps/$name"
    if [[ ! -e $stamps/$name.begun || $(<"$stamps/$name.begun") != "$key" ]]; then
        rm -rf "${OUT:?}/$name" # made from other inputs: nothing to go on from
    fi
    echo "$key" >"$stamps/$name.begun"
    "${command[@]}"
    [[ -e $OUT/$name ]] || { echo "Stage $name ended well but left no $OUT/$name" >&2; exit 1; }
    { echo "$key"; date +%s.%N; } >"$stamps/$name.partial" # the date: made again is changed, for the stages after it
    mv "$stamps/$name.partial" "$stamps/$name"
}

[[ $DRY_RUN ]] || need_environment demo,eval
CODEC_MINUTES=$(((MINUTES + 4) / 5))
MODEL_MINUTES=$((MINUTES > 2 * CODEC_MINUTES ? MINUTES - 2 * CODEC_MINUTES : 1))

stage corpus "" prepare corpus --hours "$HOURS" --hours_each "$HOURS_EACH" --speakers all --out "$OUT/corpus"
stage codec "corpus" train_codec --corpus "$OUT/corpus" --out "$OUT/codec" \
    --minutes_codec "$CODEC_MINUTES" --minutes_vocoder "$CODEC_MINUTES" ${INIT:+--init "$INIT/codec" --keep joe}
stage tokens "corpus codec" prepare tokens --corpus "$OUT/corpus" --codec "$OUT/codec" --out "$OUT/tokens"
stage train "tokens configs/demo.py" train --config configs/demo.py --config.data.dir "$OUT/tokens" \
    --workdir "$OUT/train" --minutes "$MODEL_MINUTES" --resume ${INIT:+--init "$INIT"}
stage trees "train tokens" fit_tree --model "$OUT/train" --tokens "$OUT/tokens" --out "$OUT/trees"
stage voice "train trees codec" export --workdir "$OUT/train" --codec "$OUT/codec" --trees "$OUT/trees" \
    --out "$OUT/voice"
stage evaluate "voice" evaluate --model "$OUT/voice" --texts heldout --seeds 1 --out "$OUT/evaluate"
