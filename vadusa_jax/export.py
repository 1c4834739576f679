"""Makes a voice of a training run: one folder with everything needed to speak.

    python -m vadusa_jax.export --workdir out/train --codec out/codec --trees out/trees --out out/voice
    python -m vadusa_jax.export --voice out/voice --push_to_hub OWNER/NAME --private

`--push_to_hub` puts the finished folder, or any other voice's, on the Hugging Face Hub (extra [hub]).
"""

import json
import shutil
from pathlib import Path

from absl import app, flags

from vadusa_jax.decode import transitions
from vadusa_jax.decode.trees import TREES, Trees
from vadusa_jax.evaluation.report import write_json
from vadusa_jax.hub import push
from vadusa_jax.model.folder import TRAINED, save_lm
from vadusa_jax.model.nar import load_nar, save_nar
from vadusa_jax.text import VOCABULARY
from vadusa_jax.training.checkpoint import load_trained
from vadusa_jax.voice import CODEC, DRAFT, NAR, Voice

_WORKDIR = flags.DEFINE_string("workdir", None, "Training run.")
_CODEC = flags.DEFINE_string("codec", None, "Codec folder.")
_TREES = flags.DEFINE_string("trees", None, "Folder that fit_tree wrote; the run by default.")
_DRAFT = flags.DEFINE_string("draft", None, "Training run of a small language model that drafts for this one.")
_NAR = flags.DEFINE_string("nar", None, "Folder of the stage that fills in the codec's other codebooks.")
_CARD = flags.DEFINE_string("card", None, "Model card (Markdown) to put beside the weights.")
_OUT = flags.DEFINE_string("out", None, "Folder to write; replaced as a whole.")
_VOICE = flags.DEFINE_string("voice", None, "Voice folder to push as it is, instead of making one.")
_PUSH = flags.DEFINE_string("push_to_hub", None, "OWNER/NAME of the repository that is made or replaced.")
_PRIVATE = flags.DEFINE_bool("private", None, "Whether only its owner sees a repository that is made now.")


def export(run: Path, out: Path) -> None:
    """Puts everything together beside `out`, and in its place when it can be loaded."""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    config, lm = load_trained(run)
    save_lm(aside, config, lm)
    shutil.copyfile(run / VOCABULARY, aside / VOCABULARY)
    if told := last_measured(run):
        write_json(aside / TRAINED, told)
    trees = Path(_TREES.value or run)
    if config.heads.count or (trees / TREES).exists():
        shutil.copyfile(trees / TREES, aside / TREES)
    else:
        Trees({}).save(aside / TREES)  # a backbone alone says one token a step
    shutil.copytree(_CODEC.value, aside / CODEC)
    if (trees / transitions.FILE).exists():
        shutil.copyfile(trees / transitions.FILE, aside / transitions.FILE)
    if _DRAFT.value:
        save_lm(aside / DRAFT, *load_trained(Path(_DRAFT.value)))
    if _NAR.value:
        save_nar(aside / NAR, load_nar(Path(_NAR.value)))
    if _CARD.value:
        shutil.copyfile(_CARD.value, aside / "card.md")
    Voice.load(aside)  # what cannot be loaded is not put in place
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"Voice: {out}, {size / 1e6:.1f} MB")


def last_measured(run: Path) -> dict | None:
    """The last figures on the dev set that a run's `metrics.jsonl` has."""
    path = run / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return next((row for row in reversed(list(rows)) if "dev/lm/loss" in row), None)


def main(_) -> None:
    if _VOICE.value and _PUSH.value:
        out = Path(_VOICE.value)
        Voice.load(out)  # what is no voice is not pushed
    elif _WORKDIR.value and _CODEC.value and _OUT.value and not _VOICE.value:
        out = Path(_OUT.value)
        export(Path(_WORKDIR.value), out)
    else:
        raise app.UsageError("a voice is made of --workdir and --codec as --out; --voice goes with --push_to_hub")
    if _PUSH.value:
        print(f"Pushed: {push(out, _PUSH.value, _PRIVATE.value)}")


if __name__ == "__main__":
    app.run(main)
