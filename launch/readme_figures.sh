#!/usr/bin/env bash
# Makes every figure and table of the README again, by the commands that the README names.
#
#   bash launch/readme_figures.sh [--dry-run] [NAME...]
#
#   NAME       only these; all by default (an hour or two on two CPU cores)
#   --dry-run  prints names and commands and runs none of them
#
# Pictures go to vadusa_jax/assets, tables to vadusa_jax/assets/figures/NAME.csv and from there into the README (by
# readme_tables.py), what a command prints to out/readme/NAME.txt, all else below out/readme.
# `rules` needs a draft model in out/draft, `step` the tokens of launch/demo_train.sh, `corpus` the
# recordings of launch/asterisk.sh: the README tells how each is made, and what is not there is left out and named.
# Environment: PYTHON (3.11 or newer), VADUSA_VENV (default .venv).
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

OUT=out/readme FIGURES=vadusa_jax/assets/figures DRY_RUN='' ONLY='' KNOWN=''
for argument in "$@"; do
    case $argument in
        --dry-run) DRY_RUN=1 ;;
        -*) echo "Unknown argument: $argument; see bash $0 --help" >&2; exit 2 ;;
        *) ONLY+=" $argument " ;;
    esac
done

make() { # make NAME "NEEDED" MODULE FLAGS...: python -m vadusa_jax.MODULE makes NAME, if NEEDED is there
    local name=$1 needed=$2 module=$3 command word
    shift 3
    KNOWN+=" $name "
    [[ ! $ONLY || $ONLY == *" $name "* ]] || return 0
    command="python -m vadusa_jax.$module"
    for word in "$@"; do
        [[ $word == *' '* ]] && word="\"$word\""
        command+=" $word"
    done
    if [[ $DRY_RUN ]]; then
        echo "$name: $command"
    elif [[ $needed && ! -e $needed ]]; then
        echo "== $name: left out, there is no $needed"
    else
        echo "== $name: $command"
        "$VENV/bin/python" -m "vadusa_jax.$module" "$@" | tee "$OUT/$name.txt"
        keep "$name"
    fi
}

keep() { # keep NAME: its table and pictures, as they are in the repository, if the README has such a table
    local name=$1 table picture
    grep -q "<!-- $name.csv -->" README.md || return 0
    for table in "$OUT/$name.csv" "$OUT/$name"/{"$name",models,ablation,metrics}.csv; do
        [[ ! -e $table ]] || { cp "$table" "$FIGURES/$name.csv"; break; }
    done
    for picture in "$OUT/$name"/{heads,tradeoff}.png; do
        [[ ! -e $picture ]] || { cp "$picture" "$FIGURES/$name.png"; break; }
    done
}

if [[ ! $DRY_RUN ]]; then
    need_environment demo,eval,aot
    mkdir -p "$OUT"
fi
SIZES=exact:nodes=8,exact:nodes=16,exact:nodes=64
LARGE=tolerance:3:nodes=64
GRID=tolerance:1,tolerance:2,tolerance:3,tolerance:5

make how "" demo --say "We measured the distance again this morning." --modes exact --figure vadusa_jax/assets/how.png
make heldout "" evaluate --texts heldout --seeds 3 --modes "ar,$SIZES,$LARGE" --opinions= --out "$OUT/heldout"
make everyday "" evaluate --texts everyday --seeds 3 --modes "ar,exact:nodes=64,$LARGE" --opinions= \
    --out "$OUT/everyday"
make heads "" ablate --limit 60 --heads 1,2,3,4,5,6 --modes "$GRID" --opinions= --out "$OUT/heads"
make rules out/draft ablate --limit 40 --draft out/draft --opinions= --out "$OUT/rules"
make speed "" bench --batch 1,8 --queue --stream --csv "$OUT/speed.csv" --json "$OUT/speed.json"
make decode "" aot decode --topology v5e:2x2 --shape 150m --csv "$OUT/decode.csv"
make pods "" aot train --topology v5e:4x4,v5e:8x8 --config configs/libritts.py --rows 8 \
    --csv "$OUT/pods.csv"
make pods_16 "" aot train --topology v5e:8x8 --config configs/libritts.py --rows 16 --csv "$OUT/pods_16.csv"
make step out/demo_train/tokens train --config configs/demo.py --measure 10
make step_adamw out/demo_train/tokens train --config configs/demo.py --measure 10 --config.train.optimizer=adamw
make corpus out/asterisk prepare tokens --corpus out/asterisk --dev_utterances 0.1 --codec vadusa_jax/assets/demo/codec \
    --out "$OUT/tokens"

if [[ ! $DRY_RUN ]]; then
    keep training # of launch/ablate_training.sh and ablate_tokens.sh, which take an hour and are not run from here
    keep types
    "$VENV/bin/python" launch/readme_tables.py
fi

for name in $ONLY; do
    [[ $KNOWN == *" $name "* ]] || { echo "No figure is called $name; there are:${KNOWN//  / }" >&2; exit 2; }
done
