"""From a corpus folder to token records and back: bad inputs are counted, the folder is complete or absent."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from absl import app, flags
from absl.testing import flagsaver

from vadusa_jax import prepare
from vadusa_jax.data import dataset
from vadusa_jax.speech import Codec
from vadusa_jax.text import Vocabulary, phonemize

ENGLISH = Vocabulary.english()


@dataclasses.dataclass(frozen=True)
class LoudnessCodec:
    """A codec of the protocol without weights: the token of a frame is its loudness."""

    frame_rate: float = 50.0
    vocab_size: int = 64
    sample_rate: int = 16_000
    receptive_field: int = 0

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        frames = wave_P[: len(wave_P) // 320 * 320].reshape(-1, 320)
        return np.clip(np.abs(frames).max(axis=1) * self.vocab_size, 0, self.vocab_size - 1).astype(np.int32)

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        return np.repeat(tokens_T / self.vocab_size, 320).astype(np.float32)


CODEC: Codec = LoudnessCodec()


def put(root, name: str, text: str | None, wave: np.ndarray, rate: int = 16_000) -> None:
    path = root / "7" / "1" / f"{name}.wav"
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, rate, subtype="FLOAT")
    if text is not None:
        path.with_suffix(".normalized.txt").write_text(text)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Good utterances at two rates, and one of every kind that must be left out."""
    monkeypatch.setattr(prepare, "load_codec", lambda folder: CODEC)
    good = np.linspace(0, 0.9, 16_000, dtype=np.float32)
    train = tmp_path / "corpus" / "train"
    put(train, "good", "Good morning, Anna.", good)
    put(train, "other_rate", "The same at another rate.", good[::2], rate=8_000)
    put(train, "stereo", "Two channels.", np.stack([good, good], axis=1))
    put(train, "nan", "Not a number.", np.where(np.arange(16_000) == 5, np.nan, good))
    put(train, "no_samples", "Nothing at all.", good[:0])
    put(train, "broken", "Broken.", good)
    (train / "7" / "1" / "broken.wav").write_bytes(b"RIFF but not really")
    put(train, "no_text", None, good)
    put(train, "empty_text", "  ", good)
    put(train, "emoji", "🙂", good)
    put(train, "long", "Too long.", np.tile(good, 12))
    put(tmp_path / "corpus" / "dev", "good", "See you tomorrow.", good)
    return tmp_path / "corpus"


def test_every_input_is_kept_or_counted(corpus, tmp_path):
    report = prepare.make_tokens(corpus, "codec", tmp_path / "tokens", [], row_length=512)
    train = report["train"]
    assert (train["found"], train["kept"], train["resampled"]) == (10, 3, 1)
    assert {reason: set(ids) for reason, ids in train["skipped"].items()} == {
        "bad audio": {"nan", "no_samples", "broken"},
        "missing transcript": {"no_text"},
        "empty transcript": {"empty_text"},
        "unspeakable text": {"emoji"},
        "too long": {"long"},
    }
    assert "NaN" in train["skipped"]["bad audio"]["nan"] and "512" in train["skipped"]["too long"]["long"]
    assert json.loads((tmp_path / "tokens" / "report.json").read_text()) == report
    lines = prepare.table(report)
    assert "left out, bad audio: 3" in lines and "left out, too long: 1" in lines


def test_records_survive_the_disk(corpus, tmp_path):
    prepare.make_tokens(corpus, "codec", tmp_path / "tokens", [], row_length=512)
    splits, vocabulary, facts = dataset.open_dataset(tmp_path / "tokens")
    assert vocabulary == ENGLISH and facts == dataset.CodecFacts(64, 50.0, 16_000)
    assert {split: len(records) for split, records in splits.items()} == {"train": 3, "dev": 1}
    (record,) = splits["dev"]
    assert record["text"].decode() == "See you tomorrow."
    assert vocabulary.decode(record["phones"]) == phonemize("See you tomorrow.")
    wave, _ = soundfile.read(corpus / "dev/7/1/good.wav", dtype="float32")
    np.testing.assert_array_equal(record["speech"], CODEC.encode(wave))
    assert record["speech"].dtype == record["phones"].dtype == np.int32


def test_splits_can_be_named_and_joined(corpus, tmp_path):
    prepare.make_tokens(corpus, "codec", tmp_path / "tokens", ["all_of_it=train,dev"], row_length=512)
    splits, _, _ = dataset.open_dataset(tmp_path / "tokens")
    assert {split: len(records) for split, records in splits.items()} == {"all_of_it": 4}
    with pytest.raises(ValueError, match="train-clean-100"):
        prepare.split_folders(corpus, ["a-b=train"])
    with pytest.raises(FileNotFoundError, match="test"):
        prepare.split_folders(corpus, ["test=test"])


def test_a_failure_leaves_the_old_dataset_whole_and_nothing_else(corpus, tmp_path):
    out = tmp_path / "tokens"
    prepare.make_tokens(corpus, "codec", out, [], row_length=512)
    before = sorted(p.relative_to(out) for p in out.rglob("*"))

    def dies():
        yield dataset.TokenRecord("a", "s", "t", np.array([2], np.int32), np.array([1], np.int32))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        dataset.write_dataset(out, {"train": dies()}, ENGLISH, dataset.CodecFacts(64, 50.0, 16_000))
    assert sorted(p.relative_to(out) for p in out.rglob("*")) == before
    assert not out.with_name("tokens.aside").exists()


def test_a_split_without_one_good_utterance_is_an_error_that_says_why(corpus, tmp_path):
    for path in (corpus / "dev").rglob("*.wav"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"split 'dev': none of 1 utterances.*bad audio"):
        prepare.make_tokens(corpus, "codec", tmp_path / "tokens", [], row_length=512)
    assert not (tmp_path / "tokens").exists()


def test_no_tensorflow(corpus, tmp_path):
    prepare.make_tokens(corpus, "codec", tmp_path / "tokens", [], row_length=512)
    program = (
        "import sys; from vadusa_jax.data import batches; from vadusa_jax.config import DataConfig, ModelConfig;"
        f"data = DataConfig(dir={str(tmp_path / 'tokens')!r}, batch_rows=1, packing_bins=1);"
        "next(batches.train_batches(data, ModelConfig(speech_vocab=64)));"
        "assert 'tensorflow' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "tokens or bpe"), (["speak"], "tokens or bpe"), (["tokens"], "needs --corpus and --codec")],
)
def test_wrong_command_lines_are_explained(words, message):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["prepare", "--out=x"])
    with flagsaver.flagsaver(out="x"), pytest.raises(app.UsageError, match=message):
        prepare.main(["prepare", *words])
