"""The sentences of a measurement, and the audio of the two test sets that ship with the package.

The audio is made once and kept: the demo voice differs from draw to draw, by several points of word error rate.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import soundfile

from vadusa_jax.data.corpora import LibriTTS

ROOT = Path(__file__).parent.parent / "assets" / "testsets"
NAMES = ("heldout", "everyday")


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A text to speak, and the reference wave (mono float32) where there is one."""

    id: str
    text: str
    wave_P: np.ndarray | None = None
    sample_rate: int = 16_000


def read_sentences(texts: str) -> tuple[list[Sentence], int]:
    """The sentences of a test set or of a text file (one a line), and how many blank lines the file had."""
    if texts in NAMES:
        return load_testset(texts), 0
    if not Path(texts).is_file():
        raise FileNotFoundError(f"{texts!r} is neither a test set ({', '.join(NAMES)}) nor a text file")
    lines = [line.strip() for line in Path(texts).read_text(encoding="utf-8").splitlines()]
    sentences = [Sentence(f"line{number:04d}", line) for number, line in enumerate(lines, 1) if line]
    return sentences, len(lines) - len(sentences)


def load_testset(name: str, root: Path = ROOT) -> list[Sentence]:
    """A test set with its audio, in the order of its ids."""
    folder = root / name
    if not (folder / "texts.json").is_file():
        raise FileNotFoundError(f"no test set in {folder}: make it with save_testset from a corpus split")
    sentences = []
    for entry in json.loads((folder / "texts.json").read_text(encoding="utf-8")):
        wave_P, sample_rate = soundfile.read(folder / f"{entry['id']}.flac", dtype="float32")
        sentences.append(Sentence(entry["id"], entry["text"], wave_P, sample_rate))
    return sentences


def save_testset(corpus_split: Path, out: Path) -> int:
    """Packs a corpus split in LibriTTS layout as lossless FLAC beside its texts; returns the number of sentences.

    `out` appears whole or not at all; a split with an unreadable utterance is an error, as the set must be the same
    for everyone.
    """
    utterances = list(LibriTTS(corpus_split))
    if bad := [u.key for u in utterances if not (u.text or "").strip()] or not utterances:
        raise ValueError(f"{corpus_split} is no complete test set: {len(utterances)} utterances, without text: {bad}")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for utterance in utterances:
        wave_P, sample_rate = soundfile.read(utterance.audio.path, dtype="int16")
        soundfile.write(partial / f"{utterance.key}.flac", wave_P, sample_rate, subtype="PCM_16", compression_level=1.0)
    texts = [{"id": u.key, "text": " ".join(u.text.split())} for u in utterances]
    (partial / "texts.json").write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)
    return len(utterances)


def as_corpus(name: str, out: Path, root: Path = ROOT, limit: int | None = None) -> int:
    """Lays out a test set (its first `limit` sentences) as `prepare tokens` reads it: `metadata.csv` and `wavs/`.

    To try training on what ships with the package. Who has trained on a test set cannot be measured with it.
    Returns the number of sentences.
    """
    (out / "wavs").mkdir(parents=True, exist_ok=True)
    entries = json.loads((root / name / "texts.json").read_text(encoding="utf-8"))[:limit]
    if bad := [entry["id"] for entry in entries if "|" in entry["text"]]:
        raise ValueError(f"{name}: metadata.csv is parted by |, which the texts of {bad} hold")
    for entry in entries:
        shutil.copyfile(root / name / f"{entry['id']}.flac", out / "wavs" / f"{entry['id']}.flac")
    lines = (f"{entry['id']}|{entry['text']}\n" for entry in entries)
    (out / "metadata.csv").write_text("".join(lines), encoding="utf-8")
    return len(entries)
