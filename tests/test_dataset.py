"""From corpora to token records: bad inputs are named, the folder is complete or absent, and a kill changes no byte."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from absl import app, flags
from absl.testing import flagsaver
from toys import CODEC as TOY_CODEC

from vadusa_jax import prepare
from vadusa_jax.data import dataset, records, shards
from vadusa_jax.data.splits import find_splits
from vadusa_jax.speech import Codec
from vadusa_jax.speech.codec import new_codec
from vadusa_jax.text import Vocabulary, phonemize

ENGLISH = Vocabulary.english()
GOOD = np.linspace(0, 0.9, 16_000, dtype=np.float32)


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
RECIPE = shards.Recipe(lambda folder: CODEC, "codec", records.Limits(0.3, 10.0, 2.0, 30.0, row_length=512))


def make(corpus: Path, out: Path, *given: str) -> dict:
    return prepare.make_tokens(find_splits(str(corpus), list(given)), RECIPE, out, workers=0)


def put(split: Path, name: str, text: str | None, wave: np.ndarray = GOOD, rate: int = 16_000) -> Path:
    path = split / "7" / "1" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wave, rate, subtype="FLOAT" if path.suffix == ".wav" else None)
    if text is not None:
        path.with_suffix(".normalized.txt").write_text(text)
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Good utterances of several kinds, and one of every kind that must be left out."""
    train = tmp_path / "corpus" / "train"
    put(train, "good.wav", "Good morning, Anna.")
    put(train, "other_rate.wav", "The same at another rate.", GOOD[::2], rate=8_000)
    put(train, "stereo.wav", "Two channels.", np.stack([GOOD, GOOD], axis=1))
    put(train, "flac.flac", "Not a WAV.")
    put(train, "mp3.mp3", "Not a WAV either.")
    put(train, "punctuation.wav", "What?!?! -- Oh... (yes)!!")
    put(train, "good.flac", None, 0.5 * GOOD)  # the key of another file
    put(train, "nan.wav", "Not a number.", np.where(np.arange(16_000) == 5, np.nan, GOOD))
    put(train, "no_samples.wav", "Nothing at all.", GOOD[:0])
    put(train, "broken.wav", "Broken.").write_bytes(b"RIFF but not really")
    truncated = put(train, "truncated.wav", "Truncated.")
    truncated.write_bytes(truncated.read_bytes()[:20_000])
    put(train, "no_text.wav", None)
    put(train, "empty_text.wav", "  ")
    put(train, "emoji.wav", "🙂🙂")
    put(train, "silence.wav", "Not a sound.", 0 * GOOD)
    put(train, "short.wav", "Hm.", GOOD[:3200])
    put(train, "long.wav", 20 * "Longer than all. ", np.tile(GOOD, 12))
    put(train, "row.wav", 5 * "Too long for a row. ", np.tile(GOOD, 10)[:159_000])
    put(train, "slow.wav", "Slow.", np.tile(GOOD, 5))
    put(train, "fast.wav", 4 * "This was said too fast. ")
    put(train, "lost.wav", "It is not there.").unlink()
    put(tmp_path / "corpus" / "dev", "good.wav", "See you tomorrow.")
    return tmp_path / "corpus"


def test_every_input_is_kept_or_named(corpus, tmp_path):
    report = make(corpus, tmp_path / "tokens")
    train = report["train"]
    assert {reason: set(left["names"]) for reason, left in train["left_out"].items()} == {
        "bad audio": {"nan", "no_samples", "broken", "truncated"},
        "duplicate key": {"good"},
        "empty transcript": {"empty_text"},
        "missing audio": {"lost"},
        "missing transcript": {"no_text"},
        "silence": {"silence"},
        "too few characters per second": {"slow"},
        "too few seconds": {"short"},
        "too long for a row": {"row"},
        "too many characters per second": {"fast"},
        "too many seconds": {"long"},
        "unspeakable text": {"emoji"},
    }
    assert (train["found"], train["kept"], train["resampled"], train["speakers"]) == (21, 6, 1, ["7"])
    details = {name: detail for left in train["left_out"].values() for name, detail in left["names"].items()}
    assert "NaN" in details["nan"] and "truncated" in details["truncated"] and "lost.wav" in details["lost"]
    assert details["long"] == "12.00, allowed 0.3 to 10.0" and "a row has 512" in details["row"]
    assert train["left_out"]["too many seconds"]["seconds"] == 12.0
    assert train["seconds"] == pytest.approx(6.0, abs=0.2)
    assert sum(train["token_histogram"].values()) == train["speech_tokens"] == pytest.approx(300, abs=10)
    assert json.loads((tmp_path / "tokens" / "report.json").read_text()) == report
    lines = records.table(report)
    assert "left out, bad audio: 4 (0.000 hours): broken, nan, no_samples, ..." in lines
    assert "left out, too many seconds: 1 (0.003 hours): long" in lines
    assert "speakers of both dev and train: 1 (7)" in lines


def test_reports_of_parts_add_up_in_any_order(corpus):
    encoder = RECIPE.encoder()
    corpora = [corpora for part in find_splits(str(corpus), []).values() for corpora in part]
    found = [(name, encoder(utterance)) for name, utterance in records.distinct(corpora)]
    whole = records.Report()
    for pair in found:
        whole.add(*pair)
    parts = [records.Report().add(*pair) for pair in reversed(found)]
    while len(parts) > 1:
        parts.append(parts.pop(0).merge(parts.pop(0)))
    assert parts[0].asdict() == whole.asdict()


def test_records_survive_the_disk(corpus, tmp_path):
    make(corpus, tmp_path / "tokens")
    splits, vocabulary, facts = dataset.open_dataset(tmp_path / "tokens")
    assert vocabulary == ENGLISH and facts == dataset.CodecFacts(64, 50.0, 16_000)
    assert {split: len(found) for split, found in splits.items()} == {"train": 6, "dev": 1}
    (record,) = splits["dev"]
    assert record["text"].decode() == "See you tomorrow."
    assert vocabulary.decode(record["phones"]) == phonemize("See you tomorrow.")
    wave, _ = soundfile.read(corpus / "dev/7/1/good.wav", dtype="float32")
    np.testing.assert_array_equal(record["speech"], CODEC.encode(wave))
    assert record["speech"].dtype == record["phones"].dtype == np.int32


def test_corpora_joined_in_one_split_may_share_keys(corpus, tmp_path):
    report = make(corpus, tmp_path / "tokens", "all_of_it=dev,dev")
    splits, _, _ = dataset.open_dataset(tmp_path / "tokens")
    assert {split: len(found) for split, found in splits.items()} == {"all_of_it": 2}
    assert report["all_of_it"]["left_out"] == {}


def test_a_failure_leaves_the_old_dataset_whole_and_nothing_else(corpus, tmp_path):
    out = tmp_path / "tokens"
    make(corpus, out)
    before = contents(out)

    def dies():
        yield dataset.TokenRecord("a", "s", "t", np.array([2], np.int32), np.array([1], np.int32))
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        dataset.write_dataset(out, {"train": dies()}, ENGLISH, dataset.CodecFacts(64, 50.0, 16_000))
    assert contents(out) == before
    assert not out.with_name("tokens.aside").exists()


def test_a_split_without_one_good_utterance_is_an_error_that_says_why(corpus, tmp_path):
    for path in (corpus / "dev").rglob("*.wav"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"split 'dev': none of 1 utterances.*bad audio"):
        make(corpus, tmp_path / "tokens")
    (corpus / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"split 'dev': none of 0 utterances"):
        make(corpus, tmp_path / "tokens", "dev=empty.jsonl")
    assert not (tmp_path / "tokens").exists()


def test_shards_are_made_once_and_again_when_an_input_changes(corpus, tmp_path):
    def encode(recipe: shards.Recipe = RECIPE) -> tuple[list[Path], bool]:
        paths, speed = shards.encode(find_splits(str(corpus), []), recipe, tmp_path / "shards", workers=0)
        return [path for part in paths.values() for path in part], speed > 0

    first, made = encode()
    assert made and encode() == (first, False)
    put(corpus / "dev", "good.wav", "See you tomorrow.", GOOD[::-1])
    changed, made = encode()
    assert made and changed[0] != first[0] and changed[1] == first[1]  # dev alone is encoded again
    assert encode(dataclasses.replace(RECIPE, codec_hash="other"))[1]
    assert encode(dataclasses.replace(RECIPE, limits=records.Limits()))[1]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_a_killed_run_that_goes_on_leaves_the_same_bytes(tmp_path):
    codec, rng = tmp_path / "codec", np.random.default_rng(0)
    new_codec(TOY_CODEC, 0).save(codec)
    for i in range(3 * shards.SIZE):
        put(tmp_path / "corpus", f"u{i:03d}.wav", f"Number {i}.", rng.uniform(-0.5, 0.5, 8000 + i))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | cache

    def start(out: Path, workers: int) -> subprocess.Popen:
        flags = {"corpus": tmp_path / "corpus", "dev_utterances": 0.1, "codec": codec, "out": out, "workers": workers}
        command = [sys.executable, "-m", "vadusa_jax.prepare", "tokens", *(f"--{k}={v}" for k, v in flags.items())]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    whole, out, aside = tmp_path / "whole", tmp_path / "tokens", tmp_path / "tokens.shards"
    done = start(whole, workers=2)
    log, _ = done.communicate()
    assert done.returncode == 0 and "hours of audio per hour, 2 processes" in log, log
    killed = start(out, workers=1)
    while killed.poll() is None and not list(aside.glob("*.jsonl")):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()  # ends when its workers have closed the pipe: they end with it
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists() and 0 < len(list(aside.glob("*.jsonl"))) < 4
    (tmp_path / "tokens.aside").mkdir()  # what a kill while the dataset is written leaves
    (tmp_path / "tokens.aside" / "half").touch()
    done = start(out, workers=1)
    log, _ = done.communicate()
    assert done.returncode == 0, log
    assert contents(out) == contents(whole)
    assert not list(tmp_path.glob("tokens.*"))


def test_no_tensorflow(corpus, tmp_path):
    make(corpus, tmp_path / "tokens")
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
