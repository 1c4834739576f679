"""Trains backbone and draft heads on token records.

    python -m vadusa_jax.train --config configs/demo.py --workdir out/train [--resume] [--minutes 60]
    python -m vadusa_jax.train --config configs/demo.py --workdir out/train --config.train.steps=1000
    python -m vadusa_jax.train --config configs/demo.py --measure 10

Leaves checkpoints, config.json, vocabulary.json, metrics.jsonl and TensorBoard events in the work folder. Several
processes train together as `training/hosts.py` says. Exit codes: 0 trained to the last step, 143 saved and ended on
SIGTERM, 1 anything else.
"""

import dataclasses
import shutil
import sys
import time
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from vadusa_jax.config import CONFIG, Config, from_config_dict, load_config
from vadusa_jax.data.batches import dev_batches, read_texts, train_batches
from vadusa_jax.model.sharding import make_mesh
from vadusa_jax.speech import load_codec
from vadusa_jax.text import VOCABULARY, Vocabulary
from vadusa_jax.training import hosts
from vadusa_jax.training.checkpoint import first_parameters
from vadusa_jax.training.loop import train
from vadusa_jax.training.speed import measure
from vadusa_jax.training.stopping import PREEMPTED, Preempted
from vadusa_jax.voice import sample_writer

_CONFIG = config_flags.DEFINE_config_file("config", None, "Config file; single values by --config.room.name=value.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for checkpoints and logs; needed unless --measure.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on from the newest checkpoint in the work folder, if there is one.")
_INIT = flags.DEFINE_string("init", None, "Training run or voice folder whose model to start from; random by default.")
_MINUTES = flags.DEFINE_float("minutes", None, "Choose train.steps so that training takes about this long here.")
_CODEC = flags.DEFINE_string("codec", None, "Codec folder: every evaluation speaks a few dev sentences with it.")
_MEASURE = flags.DEFINE_integer("measure", 0, "Only time so many steps here, beside the peak of these devices.")
_PROFILE = flags.DEFINE_integer("profile", 0, "Trace so many steps into the work folder's profile/.")
SENTENCES = 4  # of the dev set are spoken at every evaluation


def fit_to_minutes(config: Config, minutes: float, own: range) -> Config:
    """`config` with as many steps as fit into `minutes` at the speed measured now on these devices."""
    step_s = measure(config, train_batches(config.data, config.model, own)).seconds
    steps = hosts.total(max(int(60 * minutes / step_s), 1)) // jax.process_count()  # the same for all
    print(f"a step takes {step_s:.2f} s here: {steps} steps in {minutes:g} minutes")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def run() -> None:
    """Trains as the flags say."""
    config = from_config_dict(_CONFIG.value)
    own = hosts.own_rows(make_mesh(config.mesh), config.data.batch_rows)
    if _MEASURE.value:
        speed = measure(config, train_batches(config.data, config.model, own), _MEASURE.value)
        if hosts.is_first():
            print(speed)
        return
    if not _WORKDIR.value:
        raise app.UsageError("say where checkpoints and logs go: --workdir")
    folder = Path(_WORKDIR.value)
    if _MINUTES.value:
        begun = _RESUME.value and (folder / CONFIG).exists()
        # A resumed run keeps its number of steps: the learning rate depends on it.
        config = load_config(folder) if begun else fit_to_minutes(config, _MINUTES.value, own)
    if hosts.is_first():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(config.data.dir) / VOCABULARY, folder / VOCABULARY)
    began = time.monotonic()
    batches = train_batches(config.data, config.model, own)
    init = first_parameters(Path(_INIT.value), config) if _INIT.value else None
    listen = None
    if _CODEC.value:
        texts, codec = read_texts(config.data.dir, config.model, "dev")[:SENTENCES], load_codec(Path(_CODEC.value))
        vocabulary = Vocabulary.load(Path(config.data.dir) / VOCABULARY)
        listen = sample_writer(config, texts, vocabulary, codec, folder / "samples")
    train(
        config,
        folder,
        batches,
        lambda: dev_batches(config.data, config.model, own=own),
        resume=_RESUME.value,
        init=init,
        listen=listen,
        profile=_PROFILE.value,
    )
    for name, reason in batches.corrupt.items():
        print(f"left out as corrupt: {name}: {reason}")
    if hosts.is_first():
        print(f"trained to step {config.train.steps} in {(time.monotonic() - began) / 60:.1f} minutes: {folder}")


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    with hosts.joined():
        try:
            run()
        except Preempted as end:
            print(end)
            sys.exit(PREEMPTED)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
