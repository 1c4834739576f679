"""Makes a LLaMA-shaped PyTorch checkpoint a backbone that training can start from: draft heads for somebody's model.

    python -m vadusa_jax.convert --llama FOLDER --speech 0:1000 --eos 1000 --text 1001:1129 --out out/backbone
    python -m vadusa_jax.train --config configs/demo.py --config.train.mode=frozen --init out/backbone ... \\
        --workdir out/heads

The flags say which rows of its vocabulary are what: numbers and ranges START:STOP, in the order of our ids. Text rows
are those of `<pad>`, `<sep>` and the symbols of the token records' vocabulary.json; what it was trained to read must be
`[text] <sep> [speech] EOS`, in one vocabulary. Printed are the settings that `train` needs. The weights are float32.
"""

import dataclasses
import shlex
from pathlib import Path

import numpy as np
from absl import app, flags

from vadusa_jax.config import Config, HeadsConfig
from vadusa_jax.hub import fetch
from vadusa_jax.model.folder import save_lm
from vadusa_jax.model.llama import FILES, Rows, load_llama

_LLAMA = flags.DEFINE_string("llama", None, "Folder that `save_pretrained` wrote, or a name on the Hub.", required=True)
_SPEECH = flags.DEFINE_list("speech", None, "Rows of the speech tokens.", required=True)
_EOS = flags.DEFINE_integer("eos", None, "Row of EOS, the end of speech.", required=True)
_TEXT = flags.DEFINE_list("text", None, "Rows of the text symbols.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write, for `train --init`.", required=True)


def parse_rows(parts: list[str]) -> tuple[int, ...]:
    """`["7", "10:13"]` as (7, 10, 11, 12)."""
    rows = []
    for part in parts:
        start, colon, stop = part.partition(":")
        rows += range(int(start), int(stop) if colon else int(start) + 1)
    return tuple(rows)


def main(_) -> None:
    rows = Rows(parse_rows(_SPEECH.value), _EOS.value, parse_rows(_TEXT.value))
    model, lm = load_llama(fetch(_LLAMA.value, files=FILES), rows)
    save_lm(Path(_OUT.value), Config(model, HeadsConfig(count=0)), lm, np.float32)
    print(f"Backbone: {_OUT.value}. To train on it:\n--init {shlex.quote(_OUT.value)}")
    print(*(f"--config.model.{name}={value}" for name, value in dataclasses.asdict(model).items()), sep="\n")


if __name__ == "__main__":
    app.run(main)
