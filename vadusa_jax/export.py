"""Makes a voice of a training run: one folder with everything needed to speak.

python -m vadusa_jax.export --workdir out/train --codec out/codec --trees out/trees --out out/voice
"""

import shutil
from pathlib import Path

from absl import app, flags

from vadusa_jax.decode import transitions
from vadusa_jax.decode.trees import TREES
from vadusa_jax.model.folder import save_lm
from vadusa_jax.text import VOCABULARY
from vadusa_jax.training.checkpoint import load_trained
from vadusa_jax.voice import CODEC, DRAFT, Voice

_WORKDIR = flags.DEFINE_string("workdir", None, "Training run.", required=True)
_CODEC = flags.DEFINE_string("codec", None, "Codec folder.", required=True)
_TREES = flags.DEFINE_string("trees", None, "Folder that fit_tree wrote; the run by default.")
_DRAFT = flags.DEFINE_string("draft", None, "Training run of a small language model that drafts for this one.")
_CARD = flags.DEFINE_string("card", None, "Model card (Markdown) to put beside the weights.")
_OUT = flags.DEFINE_string("out", None, "Folder to write; replaced as a whole.", required=True)


def main(_) -> None:
    run, out = Path(_WORKDIR.value), Path(_OUT.value)
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    save_lm(aside, *load_trained(run))
    shutil.copyfile(run / VOCABULARY, aside / VOCABULARY)
    trees = Path(_TREES.value or run)
    shutil.copyfile(trees / TREES, aside / TREES)
    shutil.copytree(_CODEC.value, aside / CODEC)
    if (trees / transitions.FILE).exists():
        shutil.copyfile(trees / transitions.FILE, aside / transitions.FILE)
    if _DRAFT.value:
        save_lm(aside / DRAFT, *load_trained(Path(_DRAFT.value)))
    if _CARD.value:
        shutil.copyfile(_CARD.value, aside / "card.md")
    Voice.load(aside)  # what cannot be loaded is not put in place
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"Voice: {out}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    app.run(main)
