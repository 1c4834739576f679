"""Readers of corpora and their splits: layouts as published, a fixed order, and nothing without a name."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tensorflow_datasets as tfds
from hypothesis import given
from hypothesis import strategies as st

from vadusa_jax.data.corpora import Libriheavy, LibriTTS, LJSpeech, Tfds, Utterance
from vadusa_jax.data.splits import find_splits, hold_out

RAMP = np.linspace(0, 0.9, 16_000, dtype=np.float32)


def sound(path: Path, wave: np.ndarray = RAMP) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, 16_000)
    return path


def listed(corpus) -> list[tuple]:
    return [(u.key, u.speaker, u.text) for u in corpus]


def test_libritts_pairs_audio_and_text(tmp_path):
    chapter = tmp_path / "84" / "121123"
    for name in ("b.wav", "c.flac", "d.mp3", "e.wav", "e.flac"):
        sound(chapter / name)
    for name in ("a.normalized.txt", "b.normalized.txt", "b.original.txt", "c.original.txt", "e.normalized.txt"):
        (chapter / name).write_text(name)
    corpus = LibriTTS(tmp_path)
    assert listed(corpus) == listed(corpus) == [
        ("a", "84", "a.normalized.txt"),  # its audio is missing
        ("b", "84", "b.normalized.txt"),
        ("c", "84", "c.original.txt"),
        ("d", "84", None),
        ("e", "84", "e.normalized.txt"),
        ("e", "84", "e.normalized.txt"),  # two files with one key
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"a\.wav"):
        next(iter(corpus)).audio.read()


def cut(key: str, start: float, seconds: float, **supervision) -> dict:
    """A line of a manifest as Libriheavy publishes it, without the fields that nobody reads here."""
    source = {"type": "file", "channels": [0], "source": "download/librilight/small/100/sea/01.flac"}
    recording = {"id": "small/100/sea/01", "sources": [source], "sampling_rate": 16_000}
    said = {"id": key, "start": 0, "duration": seconds, "language": "English", "speaker": "100", **supervision}
    return {
        "id": key,
        "start": start,
        "duration": seconds,
        "channel": 0,
        "supervisions": [said],
        "recording": recording,
    }


def manifest(path: Path, *cuts: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in cuts)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["cuts_small.jsonl", "cuts_small.jsonl.gz"])
def test_libriheavy_cuts_stretches_and_keeps_case_and_punctuation(tmp_path, name):
    sound(tmp_path / "download/librilight/small/100/sea/01.flac")
    cased = {"texts": ["The sea, Trot!", "THE SEA TROT"]}
    manifest(tmp_path / name, cut("x_0", 0.25, 0.5, custom=cased), cut("x_1", 0.75, 0.125, text="Reduced."))
    corpora = find_splits(str(tmp_path), [f"train={name}"])["train"]
    first, second = corpora[0]
    assert (first.key, first.speaker, first.text) == ("x_0", "100", "The sea, Trot!")
    assert (second.key, second.text) == ("x_1", "Reduced.")
    wave, rate = first.audio.read()
    assert rate == 16_000
    np.testing.assert_allclose(wave, RAMP[4000:12_000], atol=1e-4)
    assert find_splits(str(tmp_path), []) == {"cuts_small": corpora}
    elsewhere = find_splits(str(tmp_path), [f"train={name}"], audio=str(tmp_path / "light"))["train"][0]
    assert next(iter(elsewhere)).audio.path == tmp_path / "light/small/100/sea/01.flac"


def test_an_empty_manifest_has_no_cuts_and_a_broken_one_is_named_with_its_line(tmp_path):
    empty = manifest(tmp_path / "empty.jsonl")
    assert list(Libriheavy(empty, tmp_path)) == []
    broken = manifest(tmp_path / "broken.jsonl", cut("x", 0, 1), {"id": "no cut"})
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2"):
        list(Libriheavy(broken, tmp_path))
    whole = manifest(tmp_path / "whole.jsonl.gz", *(cut(f"x{i}", i, 1) for i in range(99))).read_bytes()
    (tmp_path / "half.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"half\.jsonl\.gz, line"):
        list(Libriheavy(tmp_path / "half.jsonl.gz", tmp_path))


def test_ljspeech_reads_metadata_and_files_without_a_line(tmp_path):
    root = tmp_path / "LJ"
    for name in ("a.wav", "sub/b.flac", "stray.wav"):
        sound(root / "wavs" / name)
    (root / "metadata.csv").write_text('a|Dr. "A"|Doctor A|anna\nsub/b|Only this.\nlost|Has no file.\n')
    assert listed(find_splits(str(root), [])["train"][0]) == [
        ("a", "anna", "Doctor A"),
        ("sub/b", "LJ", "Only this."),
        ("lost", "LJ", "Has no file."),
        ("stray", "LJ", None),
    ]
    (root / "metadata.csv").write_text("a|one\njust words\n")
    with pytest.raises(ValueError, match="line 2, has 1 columns"):
        list(LJSpeech(root))


class Spoken(tfds.core.GeneratorBasedBuilder):
    """A tfds corpus with the features of `libritts`, its sound as samples: the feature Audio asks for TensorFlow."""

    VERSION = tfds.core.Version("1.0.0")
    name = "spoken"

    def _info(self):
        texts = dict.fromkeys(("id", "text_original", "text_normalized", "chapter_id"), tfds.features.Text())
        features = {**texts, "speaker_id": np.int64, "speech": tfds.features.Tensor(shape=(None,), dtype=np.int64)}
        metadata = tfds.core.MetadataDict(sample_rate=16_000)
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features), metadata=metadata)

    def _split_generators(self, dl_manager):
        return {"train_clean100": self._generate_examples(3), "dev_clean": self._generate_examples(1)}

    def _generate_examples(self, count):
        for i in range(count):
            texts = {"text_original": "1", "text_normalized": f"Text {i}.", "chapter_id": "c"}
            yield i, {"id": f"u{i}", "speaker_id": 10 + i, "speech": (32768 * RAMP).astype(np.int64), **texts}


def test_tfds_corpora(tmp_path):
    builder = Spoken(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    folder = str(builder.data_path)
    named = ["train=train_clean100", "dev=dev_clean"]
    assert find_splits(folder, named) == {
        "train": (Tfds(folder, "train_clean100"),),
        "dev": (Tfds(folder, "dev_clean"),),
    }
    utterances = list(Tfds(folder, "train_clean100"))
    assert sorted(listed(utterances)) == [(f"u{i}", str(10 + i), f"Text {i}.") for i in range(3)]
    wave, rate = utterances[0].audio.read()
    assert rate == 16_000 and wave.dtype == np.float32
    np.testing.assert_allclose(wave, RAMP, atol=1e-4)
    with pytest.raises(FileNotFoundError, match=r"test.*train_clean100"):
        find_splits(folder, ["test=test_clean"])


def test_splits_are_found_named_and_joined(tmp_path):
    for part in ("train-clean-100", "train-clean-360", "train-other-500", "dev"):
        sound(tmp_path / part / "1" / "2" / "u.wav")
    (tmp_path / "empty").mkdir()
    root = str(tmp_path)
    train, dev = (
        tuple(LibriTTS(tmp_path / p) for p in parts) for parts in (("train-clean-100", "train-other-500"), ("dev",))
    )
    given = ["train=train-clean-100,train-other-500", "dev=dev"]
    assert find_splits(root, given) == {"train": train, "dev": dev}
    assert find_splits(str(tmp_path / "dev"), []) == {"train": dev}
    with pytest.raises(ValueError, match="train-clean-100"):
        find_splits(root, [])  # no name of a split
    with pytest.raises(FileNotFoundError, match=r"test.*it has \['dev'\]"):
        find_splits(root, ["test=test", "dev=dev"])
    with pytest.raises(FileNotFoundError, match="empty is no corpus"):
        find_splits(str(tmp_path / "empty"), [])
    with pytest.raises(FileNotFoundError, match="no corpus folder"):
        find_splits(str(tmp_path / "nowhere"), [])


def people(speakers: int, each: int) -> list[Utterance]:
    return [Utterance(f"{s}-{i}", f"s{s}", "Text.", None) for s in range(speakers) for i in range(each)]


@given(speakers=st.integers(2, 40), each=st.integers(1, 3), amount=st.sampled_from([1, 0.1, 0.5]))
def test_held_out_speakers_are_heard_in_one_split_only(speakers, each, amount):
    corpus = people(speakers, each)
    splits = hold_out({"train": (corpus[: len(corpus) // 2], corpus[len(corpus) // 2 :])}, "speaker", amount)
    train, dev = ([u for part in splits[name] for u in part] for name in ("train", "dev"))
    assert not {u.speaker for u in train} & {u.speaker for u in dev}
    assert sorted(u.key for u in train + dev) == sorted(u.key for u in corpus)
    assert len({u.speaker for u in dev}) == (1 if amount == 1 else max(1, round(amount * speakers)))


def test_what_cannot_be_held_out():
    with pytest.raises(ValueError, match=r"1 of 1 speakers.*hold out utterances instead"):
        hold_out({"train": (people(1, 5),)}, "speaker", 1)
    with pytest.raises(ValueError, match="where there is no `dev`"):
        hold_out({"train": (people(3, 1),), "dev": (people(1, 1),)}, "speaker", 1)
    splits = hold_out({"train": (people(1, 5),)}, "key", 0.2)
    assert [len(list(splits[name][0])) for name in ("train", "dev")] == [4, 1]
