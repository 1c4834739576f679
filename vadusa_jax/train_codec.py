"""Trains the embedded codec on a corpus in LibriTTS layout: tokens first, then the vocoder.

    python -m vadusa_jax.train_codec --corpus out/corpus/train --out out/codec --minutes_codec 12 --minutes_vocoder 20

After the first stage the folder holds a codec that encodes; after the second it decodes as well. A stage whose result
is there is skipped, so an interrupted run goes on where it can. `training.json` in the folder tells what was done.
"""

import collections
import dataclasses
import json
import os
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from vadusa_jax.data.corpora import Utterance
from vadusa_jax.data.records import LeftOut, Limits, read_utterance
from vadusa_jax.data.splits import open_corpus
from vadusa_jax.speech import FsqCodec, load_codec
from vadusa_jax.speech.fsq import CodecConfig
from vadusa_jax.speech.training import CodecTraining, Recording, train_tokens, train_vocoder
from vadusa_jax.text import UnspeakableText, Vocabulary, phonemize

DEFAULTS = CodecTraining()
CORPUS = flags.DEFINE_string(
    "corpus", None, "Folder <speaker>/<chapter>/<utterance>.wav, or the one that holds it as train.", required=True
)
OUT = flags.DEFINE_string("out", "out/codec", "Codec folder to write.")
MINUTES_CODEC = flags.DEFINE_float("minutes_codec", DEFAULTS.minutes_codec, "Training of the tokens.", 0.0)
MINUTES_VOCODER = flags.DEFINE_float("minutes_vocoder", DEFAULTS.minutes_vocoder, "Training of the vocoder.", 0.0)
SEED = flags.DEFINE_integer("seed", DEFAULTS.seed, "Seed of the parameters and of the order of the data.")
HOURS = flags.DEFINE_float("hours", None, "Use at most this much of the corpus, spread evenly.", 0.0)
AGAIN = flags.DEFINE_bool("again", False, "Train a finished vocoder for some minutes more.")


def main(argv: list[str]) -> None:
    del argv
    out, config = Path(OUT.value), CodecConfig()
    training = dataclasses.replace(
        DEFAULTS, minutes_codec=MINUTES_CODEC.value, minutes_vocoder=MINUTES_VOCODER.value, seed=SEED.value
    )
    codec = load_codec(out) if (out / "codec.json").exists() else None
    if codec and codec.vocoder and not AGAIN.value:
        print(f"{out} is complete; --again trains its vocoder further")
        return
    vocabulary = Vocabulary.english()
    recordings = read_recordings(CORPUS.value, vocabulary, config.sample_rate, HOURS.value)
    if codec is None:
        codec, figures = train_tokens(recordings, len(vocabulary), config, training)
        save(codec, out, "tokens", figures)
    codec, figures = train_vocoder(codec, recordings, training)
    save(codec, out, "vocoder", figures)


def read_recordings(root: str, vocabulary: Vocabulary, sample_rate: int, hours: float | None) -> list[Recording]:
    """Waves and phones of a corpus; what cannot be used is counted by reason and left out."""
    train = Path(root) / "train"
    corpus = open_corpus(train if train.is_dir() else Path(root))
    if corpus is None:
        raise FileNotFoundError(f"{root} is no corpus; it should hold <speaker>/<chapter>/<utterance>.wav")
    reasons, recordings, seconds = collections.Counter(), [], 0.0
    for utterance in tqdm(_spread(list(corpus)), "read", disable=None):
        try:
            text, wave_P, duration, _ = read_utterance(utterance, sample_rate, Limits())
            recordings.append(Recording(wave_P, vocabulary.encode(phonemize(text))))
        except (LeftOut, UnspeakableText) as error:
            reasons[error.reason if isinstance(error, LeftOut) else "unspeakable text"] += 1
            continue
        seconds += duration
        if hours and seconds >= 3600 * hours:
            break
    print(f"{len(recordings)} recordings, {seconds / 3600:.2f} h; skipped: {dict(reasons) or 'none'}")
    if not recordings:
        raise app.UsageError(f"{root} holds no usable recording")
    return recordings


def save(codec: FsqCodec, out: Path, stage: str, figures: dict[str, float]) -> None:
    """Replaces the codec folder, and tells what was trained."""
    report = out / "training.json"
    told = json.loads(report.read_text()) if report.exists() else {}
    codec.save(out)
    fresh = out / ".training.json"
    fresh.write_text(
        json.dumps(told | {stage: {"corpus": Path(CORPUS.value).resolve().name} | figures}, indent=2) + "\n"
    )
    os.replace(fresh, report)
    print(f"{out}: {stage} trained, {', '.join(f'{key} {value:.3f}' for key, value in figures.items())}")


def _spread(utterances: list[Utterance]) -> list[Utterance]:
    """Every chapter early: a stride through the sorted list, so that any first part is a sample of all."""
    stride = 97
    return [utterance for start in range(stride) for utterance in utterances[start::stride]]


if __name__ == "__main__":
    app.run(main)
