"""Corpora as they are published: each is a value that gives its utterances, in a fixed order, whenever it is iterated.

A corpus opens no audio and judges nothing. What is listed without a file, or lies there without a transcript, is an
utterance as well: `records` says what becomes of it, so that nothing is dropped without a name.
"""

import collections
import csv
import dataclasses
import functools
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import tensorflow_datasets as tfds

from vadusa_jax.speech import read_samples

AUDIO = (".wav", ".flac", ".mp3", ".ogg")
_TRANSCRIPTS = (".normalized.txt", ".original.txt")  # the first that is there
_LIBRILIGHT = "download/librilight/"  # how the published manifests call the folder of the audio


class Audio(Protocol):
    """Where the sound of an utterance is."""

    def read(self) -> tuple[np.ndarray, int]:
        """Float32 samples [P] or [P, channels] and their rate; raises FileNotFoundError or BadAudio."""

    def stamp(self) -> str:
        """A text that changes when the sound may have changed."""


@dataclasses.dataclass(frozen=True)
class AudioFile:
    """`seconds` of a file from `start` seconds on; the whole file by default."""

    path: Path
    start: float = 0.0
    seconds: float | None = None

    def read(self) -> tuple[np.ndarray, int]:
        if not self.path.is_file():
            raise FileNotFoundError(f"no file {self.path}")
        return read_samples(self.path, self.start, self.seconds)

    def stamp(self) -> str:
        found = self.path.stat() if self.path.is_file() else None
        return f"{self}, {found.st_size} bytes of {found.st_mtime_ns}" if found else f"{self}, missing"


@dataclasses.dataclass(frozen=True)
class TfdsAudio:
    """The sound of one record of a tfds dataset."""

    folder: str
    split: str
    index: int

    def read(self) -> tuple[np.ndarray, int]:
        source, rate = _tfds_source(self.folder, self.split)
        wave = source[self.index]["speech"]
        scale = -np.iinfo(np.int16).min if np.issubdtype(wave.dtype, np.integer) else 1  # int64 too holds 16 bits
        return (wave / scale).astype(np.float32), rate

    def stamp(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True)
class Utterance:
    """One spoken sentence of a corpus; `text` is None where there is no transcript."""

    key: str
    speaker: str
    text: str | None
    audio: Audio


Corpus = Iterable[Utterance]


@dataclasses.dataclass(frozen=True)
class LibriTTS:
    """`<root>/<speaker>/<chapter>/<key>.wav` with `.normalized.txt` (or `.original.txt`) beside it, sorted by path.

    FLAC, MP3 and Ogg stand for WAV as well. Source: https://www.openslr.org/60.
    """

    root: Path

    def __iter__(self) -> Iterator[Utterance]:
        found = collections.defaultdict(list)
        for path in sorted(self.root.glob("*/*/*")):
            if suffix := next((s for s in (*AUDIO, *_TRANSCRIPTS) if path.name.lower().endswith(s)), None):
                found[path.parent, path.name[: -len(suffix)]].append((suffix, path))
        for folder, key in sorted(found):
            paths = found[folder, key]
            texts = [path for wanted in _TRANSCRIPTS for suffix, path in paths if suffix == wanted]
            text = texts[0].read_text(encoding="utf-8", errors="replace") if texts else None
            for path in [path for suffix, path in paths if suffix in AUDIO] or [folder / f"{key}.wav"]:
                yield Utterance(key, folder.parent.name, text, AudioFile(path))


@dataclasses.dataclass(frozen=True)
class Libriheavy:
    """A manifest of cuts, JSON lines (`.jsonl` or `.jsonl.gz`), in its own order: stretches of LibriLight's files.

    The text is `supervisions[0].custom.texts[0]`, that with casing and punctuation, or in the reduced manifests
    `supervisions[0].text`. Audio files are looked for below `audio`, the folder that the published manifests call
    download/librilight. A line that is no cut is a ValueError which names it.

    Source: https://github.com/k2-fsa/libriheavy.
    """

    manifest: Path
    audio: Path

    def __iter__(self) -> Iterator[Utterance]:
        read = 0
        opened = gzip.open if self.manifest.suffix == ".gz" else open
        try:
            with opened(self.manifest, "rt", encoding="utf-8") as lines:
                for line in lines:
                    if line.strip():
                        yield self._utterance(json.loads(line))
                    read += 1
        except (ValueError, LookupError, TypeError, AttributeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{self.manifest}, line {read + 1}: no cut of Libriheavy: {error!r}") from error

    def _utterance(self, cut: dict[str, Any]) -> Utterance:
        said = (cut["supervisions"] or [{}])[0]
        texts = said.get("custom", {}).get("texts") or [said.get("text")]
        path = self.audio / cut["recording"]["sources"][0]["source"].removeprefix(_LIBRILIGHT)
        audio = AudioFile(path, float(cut["start"]), float(cut["duration"]))
        return Utterance(cut["id"], str(said.get("speaker", "unknown")), texts[0], audio)


@dataclasses.dataclass(frozen=True)
class LJSpeech:
    """`<root>/metadata.csv`, lines of `key|text|normalised text|speaker`, and `<root>/wavs/<key>.wav`.

    The last two columns may be missing: the text is then taken as it is, and the speaker is named as the folder. Files
    without a line come last. Source: https://keithito.com/LJ-Speech-Dataset.
    """

    root: Path

    def __iter__(self) -> Iterator[Utterance]:
        wavs, listed = self.root / "wavs", set()
        files = {p.relative_to(wavs).with_suffix(""): p for p in _audio_files(wavs)}
        with (self.root / "metadata.csv").open(encoding="utf-8-sig", newline="") as lines:
            for number, row in enumerate(csv.reader(lines, delimiter="|", quoting=csv.QUOTE_NONE), 1):
                if not row:
                    continue
                if not 2 <= len(row) <= 4:
                    raise ValueError(
                        f"{self.root}/metadata.csv, line {number}, has {len(row)} columns, not 2 to 4: {row}"
                    )
                key, text, *more = row
                listed.add(Path(key))
                speaker = more[1] if len(more) > 1 else self.root.resolve().name
                path = files.get(Path(key), wavs / f"{key}.wav")
                yield Utterance(key, speaker, (more[0] if more else "") or text, AudioFile(path))
        for path in _audio_files(wavs):
            key = path.relative_to(wavs).with_suffix("")
            if key not in listed or path != files[key]:
                yield Utterance(str(key), self.root.resolve().name, None, AudioFile(path))


@dataclasses.dataclass(frozen=True)
class Tfds:
    """A split of a prepared tfds dataset with features as `libritts` and `ljspeech` have them, in its own order.

    It needs `id`, `speech` and `text_normalized` or `text`, and may have `speaker_id`. The feature `Audio` asks for
    TensorFlow, the extra `[tfds-audio]`; a Tensor of samples does not. To list it is to read it through once.
    """

    folder: str
    split: str

    def __iter__(self) -> Iterator[Utterance]:
        source, _ = _tfds_source(self.folder, self.split)
        for i, record in enumerate(source):
            text = record["text_normalized"] if "text_normalized" in record else record["text"]
            speaker = str(record["speaker_id"]) if "speaker_id" in record else source.dataset_info.name
            audio = TfdsAudio(self.folder, self.split, i)
            yield Utterance(record["id"].decode(), speaker, text.decode(), audio)


@dataclasses.dataclass(frozen=True)
class Share:
    """The utterances of a corpus whose speaker (or key) is among `names`, or all others."""

    corpus: Corpus
    by: Literal["speaker", "key"]
    names: frozenset[str]
    others: bool = False

    def __iter__(self) -> Iterator[Utterance]:
        return (u for u in self.corpus if (getattr(u, self.by) in self.names) != self.others)

    def __repr__(self) -> str:
        return f"Share({self.corpus}, {self.by}, {sorted(self.names)}, {self.others})"  # a set has no order of its own


def _audio_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in AUDIO)


@functools.lru_cache(maxsize=4)
def _tfds_source(folder: str, split: str) -> tuple[Any, int]:
    """Records of a tfds dataset, and the sample rate of their `speech`."""
    builder = tfds.builder_from_directory(folder)
    info = builder.info
    rate = getattr(info.features["speech"], "sample_rate", None) or (info.metadata or {}).get("sample_rate")
    if not rate:
        raise ValueError(f"{folder}: neither the feature `speech` nor the metadata gives a sample rate")
    return builder.as_data_source(split), int(rate)
