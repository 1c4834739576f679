"""Utterances -> token records: what is wrong with an input is counted and named, never stored."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import soundfile

from vadusa_jax.data.corpora import Utterance, read_libritts
from vadusa_jax.data.dataset import TokenRecord
from vadusa_jax.speech import BadAudio, Codec, read_audio
from vadusa_jax.text import UnspeakableText, Vocabulary, phonemize


class Skip(Exception):
    """An utterance that is left out; the first argument is the reason it is counted under, the second the detail."""


@dataclasses.dataclass
class SplitReport:
    """What became of the utterances of one split; filled while its records are drawn."""

    found: int = 0
    kept: int = 0
    resampled: int = 0
    seconds: float = 0.0
    phones: int = 0
    speech_tokens: int = 0
    skipped: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)  # reason -> id -> detail

    def skip(self, reason: str, id: str, detail: str) -> None:
        self.skipped.setdefault(reason, {})[id] = detail

    def asdict(self) -> dict[str, Any]:
        """JSON-ready, with the count of each reason."""
        counts = {reason: len(ids) for reason, ids in self.skipped.items()}
        return dataclasses.asdict(self) | {"skipped_counts": counts}


def to_record(utterance: Utterance, codec: Codec, vocabulary: Vocabulary, row_length: int) -> TokenRecord:
    """One utterance as phones and speech tokens; raises Skip if it cannot be learned from."""
    try:
        phones = vocabulary.encode(phonemize(utterance.text))
    except UnspeakableText as error:
        raise Skip("unspeakable text", str(error)) from error
    except ValueError as error:
        raise Skip("phone without an id", str(error)) from error
    try:
        speech = codec.encode(read_audio(utterance.audio_path, codec.sample_rate))
    except BadAudio as error:
        raise Skip("bad audio", str(error)) from error
    positions = len(phones) + 1 + len(speech)
    if positions > row_length:
        raise Skip("too long", f"{positions} positions, a row has {row_length}")
    return TokenRecord(utterance.id, utterance.speaker, utterance.text, phones, speech)


def split_records(
    roots: list[Path], codec: Codec, vocabulary: Vocabulary, row_length: int, report: SplitReport
) -> Iterator[TokenRecord]:
    """The records of all good utterances under `roots`, sorted by id within a root; `report` is filled on the way."""
    for root in roots:
        utterances, unread = read_libritts(root)
        report.found += len(utterances) + sum(map(len, unread.values()))
        for reason, ids in unread.items():
            for id in ids:
                report.skip(reason, id, str(root))
        for utterance in utterances:
            try:
                record = to_record(utterance, codec, vocabulary, row_length)
            except Skip as skip:
                report.skip(skip.args[0], utterance.id, skip.args[1])
                continue
            info = soundfile.info(utterance.audio_path)
            report.kept += 1
            report.resampled += info.samplerate != codec.sample_rate
            report.seconds += info.duration
            report.phones += len(record.phones)
            report.speech_tokens += len(record.speech)
            yield record
