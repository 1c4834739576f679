"""Utterances -> token records: what cannot be learned from is left out, named and counted, never stored."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from vadusa_jax.config import DataConfig
from vadusa_jax.data.corpora import Corpus, Utterance
from vadusa_jax.data.dataset import TokenRecord
from vadusa_jax.speech import BadAudio, Codec, check_wave
from vadusa_jax.speech.features import MEL_FLOOR
from vadusa_jax.text import UnspeakableText, Vocabulary, phonemize


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an utterance must keep to. Its characters are those of the text without spaces at the ends."""

    min_seconds: float = 0.3
    max_seconds: float = 40.0
    min_characters: float = 0.0  # a second; English is read at 10 to 20: far from it, text and sound do not belong
    max_characters: float = 40.0
    row_length: int = DataConfig.row_length  # positions


class LeftOut(Exception):
    """An utterance that is left out: the reason it is counted under, the detail, and its seconds where known."""

    def __init__(self, key: str, reason: str, detail: str, seconds: float = 0.0):
        super().__init__(key, reason, detail, seconds)
        self.key, self.reason, self.detail, self.seconds = key, reason, detail, seconds


@dataclasses.dataclass(frozen=True)
class Kept:
    """A record, with what the report wants to know of its sound."""

    record: TokenRecord
    seconds: float
    resampled: bool


Outcome = Kept | LeftOut


def distinct(corpora: Iterable[Corpus]) -> Iterator[tuple[str, Utterance | LeftOut]]:
    """The utterances of several corpora with names that no two share; a key seen before in its corpus is left out."""
    for i, corpus in enumerate(corpora):
        first: dict[str, str] = {}
        for n, utterance in enumerate(corpus):
            if utterance.key in first:
                detail = f"{utterance.audio}, after {first[utterance.key]}"
                yield f"{i}/{utterance.key}#{n}", LeftOut(utterance.key, "duplicate key", detail)
            else:
                first[utterance.key] = str(utterance.audio)
                yield f"{i}/{utterance.key}", utterance


def read_utterance(utterance: Utterance, sample_rate: int, limits: Limits) -> tuple[str, np.ndarray, float, bool]:
    """Text, mono `wave_P` at `sample_rate`, seconds and whether it was resampled; raises LeftOut."""
    seconds = 0.0

    def left_out(reason: str, detail: object) -> LeftOut:
        return LeftOut(utterance.key, reason, str(detail), seconds)

    try:
        wave, rate = utterance.audio.read()
        seconds = len(wave) / rate
        wave_P = check_wave(wave, rate, sample_rate, str(utterance.audio))
    except FileNotFoundError as error:
        raise left_out("missing audio", error) from error
    except BadAudio as error:
        raise left_out("bad audio", error) from error
    text = " ".join((utterance.text or "").split())
    if not text:
        reason = "missing transcript" if utterance.text is None else "empty transcript"
        raise left_out(reason, utterance.audio)
    if np.abs(wave_P).max() < MEL_FLOOR:
        raise left_out("silence", f"no sample of {utterance.audio} reaches {MEL_FLOOR}")
    for name, value, low, high in (
        ("seconds", seconds, limits.min_seconds, limits.max_seconds),
        ("characters per second", len(text) / seconds, limits.min_characters, limits.max_characters),
    ):
        if not low <= value <= high:
            raise left_out(f"too {'few' if value < low else 'many'} {name}", f"{value:.2f}, allowed {low} to {high}")
    return text, wave_P, seconds, rate != sample_rate


def outcome(utterance: Utterance | LeftOut, codec: Codec, vocabulary: Vocabulary, limits: Limits) -> Outcome:
    """The record of an utterance, or why there is none."""
    try:
        if isinstance(utterance, LeftOut):
            raise utterance
        text, wave_P, seconds, resampled = read_utterance(utterance, codec.sample_rate, limits)
        phones = _phones(utterance.key, text, vocabulary, seconds)
        try:
            speech = np.asarray(codec.encode(wave_P), np.int32)
        except BadAudio as error:
            raise LeftOut(utterance.key, "bad audio", str(error), seconds) from error
        positions = len(phones) + 1 + len(speech)
        if positions > limits.row_length:
            detail = f"{positions} positions, a row has {limits.row_length}"
            raise LeftOut(utterance.key, "too long for a row", detail, seconds)
    except LeftOut as left:
        return left
    phones_N = np.asarray(phones, np.int32)
    return Kept(TokenRecord(utterance.key, utterance.speaker, text, phones_N, speech), seconds, resampled)


def _phones(key: str, text: str, vocabulary: Vocabulary, seconds: float) -> list[int]:
    try:
        return vocabulary.encode(phonemize(text))
    except UnspeakableText as error:
        raise LeftOut(key, "unspeakable text", str(error), seconds) from error
    except ValueError as error:
        raise LeftOut(key, "phone without an id", str(error), seconds) from error


@dataclasses.dataclass
class Report:
    """What became of the utterances of a split. Reports of parts add up to that of the whole."""

    kept: int = 0
    resampled: int = 0
    seconds: float = 0.0
    phones: int = 0
    speakers: set[str] = dataclasses.field(default_factory=set)
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)  # speech token -> how often
    left_out: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)  # reason -> key -> detail
    left_out_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, name: str, found: Outcome) -> "Report":
        """Takes in what became of the utterance that `distinct` gave `name`."""
        if isinstance(found, LeftOut):
            names = self.left_out.setdefault(found.reason, {})
            names[name if found.key in names else found.key] = found.detail
            self.left_out_seconds[found.reason] = self.left_out_seconds.get(found.reason, 0.0) + found.seconds
            return self
        self.kept += 1
        self.resampled += found.resampled
        self.seconds += found.seconds
        self.phones += len(found.record.phones)
        self.speakers.add(found.record.speaker)
        for token, count in zip(*np.unique(found.record.speech, return_counts=True), strict=True):
            self.tokens[int(token)] = self.tokens.get(int(token), 0) + int(count)
        return self

    def merge(self, other: "Report") -> "Report":
        """Takes in the report of another part."""
        for name in ("kept", "resampled", "seconds", "phones"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.speakers |= other.speakers
        for mine, more in ((self.tokens, other.tokens), (self.left_out_seconds, other.left_out_seconds)):
            for key, value in more.items():
                mine[key] = mine.get(key, 0) + value
        for reason, names in other.left_out.items():
            self.left_out.setdefault(reason, {}).update(names)
        return self

    def asdict(self) -> dict[str, Any]:
        """JSON-ready and in one order, however it came about; sums of seconds are rounded to a millisecond."""
        share = np.array(list(self.tokens.values()), np.float64)
        share /= max(share.sum(), 1)
        left_out = {
            reason: {"count": len(names), "seconds": round(self.left_out_seconds[reason], 3), "names": names}
            for reason, names in sorted(self.left_out.items())
        }
        return {
            "found": self.kept + sum(map(len, self.left_out.values())),
            **{name: getattr(self, name) for name in ("kept", "resampled", "phones")},
            "seconds": round(self.seconds, 3),
            "speakers": sorted(self.speakers),
            "speech_tokens": sum(self.tokens.values()),
            "tokens_used": len(self.tokens),
            "token_perplexity": round(math.exp(-float(np.sum(share * np.log(share)))), 2) if len(share) else 0.0,
            "token_histogram": {str(token): self.tokens[token] for token in sorted(self.tokens)},
            "left_out": left_out,
        }


def table(report: dict[str, dict]) -> str:
    """The reports of all splits as text: a line for each, one for every reason to leave out, and shared speakers."""
    columns = ("split", "found", "kept", "resampled", "hours", "speakers", "phones", "tokens", "used", "perplexity")
    lines = ["".join(f"{name:>11}" for name in columns)]
    for split, r in report.items():
        counts = (r["found"], r["kept"], r["resampled"], f"{r['seconds'] / 3600:.2f}", len(r["speakers"]), r["phones"])
        tokens = (r["speech_tokens"], r["tokens_used"], r["token_perplexity"])
        lines.append("".join(f"{value:>11}" for value in (split, *counts, *tokens)))
        for reason, left in r["left_out"].items():
            some = ", ".join(sorted(left["names"])[:3]) + (", ..." if left["count"] > 3 else "")
            lines.append(f"    left out, {reason}: {left['count']} ({left['seconds'] / 3600:.3f} hours): {some}")
    for (one, a), (other, b) in itertools.combinations(report.items(), 2):
        if both := sorted({*a["speakers"]} & {*b["speakers"]}):
            some = ", ".join(both[:3]) + (", ..." if len(both) > 3 else "")
            lines.append(f"speakers of both {one} and {other}: {len(both)} ({some})")
    return "\n".join(lines)
