"""Encoding by Apache Beam: several workers leave the records and the report that one machine would."""

import json

import numpy as np
import pytest
import soundfile
from toys import CODEC

from vadusa_jax import prepare
from vadusa_jax.data import dataset, records, shards
from vadusa_jax.data.splits import find_splits, hold_out
from vadusa_jax.speech import load_codec
from vadusa_jax.speech.codec import new_codec

pytest.importorskip("apache_beam")

WORKERS = ("--runner=DirectRunner", "--direct_running_mode=multi_processing", "--direct_num_workers=2")


@pytest.mark.slow
def test_several_workers_make_what_one_machine_makes(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "corpus" / "wavs").mkdir(parents=True)
    for i in range(20):
        soundfile.write(tmp_path / f"corpus/wavs/u{i}.wav", rng.uniform(-0.5, 0.5, 8000), 16_000)
    lines = [f"u{i}|Number {i}.|Number {i}.|s{i % 5}" for i in range(20)]
    (tmp_path / "corpus" / "metadata.csv").write_text("\n".join([*lines, "lost|Has no file.", lines[0]]))
    new_codec(CODEC, 0).save(tmp_path / "codec")
    splits = hold_out(find_splits(str(tmp_path / "corpus"), []), "speaker", 1)
    recipe = shards.Recipe(load_codec, str(tmp_path / "codec"), records.Limits())
    one = prepare.make_tokens(splits, recipe, tmp_path / "one", workers=0)
    several = prepare.make_tokens(splits, recipe, tmp_path / "several", beam_options=WORKERS)
    assert several == one == json.loads((tmp_path / "several" / "report.json").read_text())
    assert (one["train"]["kept"], one["dev"]["kept"]) == (16, 4)
    assert read(tmp_path / "several") == read(tmp_path / "one")
    assert not list(tmp_path.glob("several.*"))


def read(folder) -> dict[str, list]:
    """The records of each split, sorted: Beam gives them other places."""
    splits, _, _ = dataset.open_dataset(folder)
    return {
        split: sorted((r["id"], r["speaker"], r["text"], r["phones"].tolist(), r["speech"].tolist()) for r in found)
        for split, found in splits.items()
    }
