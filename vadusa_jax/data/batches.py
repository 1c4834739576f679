"""Token records -> packed rows: shuffled, shared out between processes, repeated, resumable at any step.

A sequence is `[phones] SEP [speech] EOS`; a row holds several of them one after another. With a speech prompt, another
record of the same speaker, it is `[phones of the prompt] space [phones] SEP [speech of the prompt] [speech] EOS`, and
all its speech is learned, as in VALL-E (arXiv 2301.02111, section 4.3). Every row array is [B, T]: `tokens` and
`targets` (the next token), `mask` (1 where the target is a speech token or EOS), `segments` (1, 2, ... in a row, 0 for
padding) and `positions` (from 0 in every segment). EOS is only ever a target, never an input.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np
from absl import logging

from vadusa_jax.config import DataConfig, ModelConfig
from vadusa_jax.data.dataset import CodecFacts, open_dataset, record_lengths, record_speakers
from vadusa_jax.data.packing import first_fit, pair_up
from vadusa_jax.text import PAD, SEP, SPACE, Vocabulary

Batch = dict[str, np.ndarray]
_FOREVER = 2**62  # steps; grain counts in 64 bits


class CorruptData(ValueError):
    """So many records are corrupt that the rest is another dataset."""


def prompted(
    prompt: Mapping[str, np.ndarray], record: Mapping[str, np.ndarray], space: int
) -> Mapping[str, np.ndarray]:
    """One record that says both, one after the other; `space` is the text symbol between them."""
    phones = np.concatenate([prompt["phones"], [space], record["phones"]])
    return {"phones": phones, "speech": np.concatenate([prompt["speech"], record["speech"]])}


def sequence(record: Mapping[str, np.ndarray], model: ModelConfig) -> Batch:
    """One record as unpacked `tokens`, `targets` and `mask` [T]; ValueError if a token is none of the model's."""
    for name, vocab in (("phones", model.text_vocab), ("speech", model.speech_vocab)):
        ids = np.asarray(record[name])
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
            raise ValueError(f"{name} holds {ids.min()} to {ids.max()}, the model knows 0 to {vocab - 1}")
    text_offset = model.eos + 1
    whole = np.concatenate([record["phones"] + text_offset, [SEP + text_offset], record["speech"], [model.eos]])
    whole = whole.astype(np.int32)
    return {
        "tokens": whole[:-1],
        "targets": whole[1:],
        "mask": (np.arange(len(whole) - 1) >= len(record["phones"])).astype(np.int32),
    }


class Rows:
    """The packed rows of one split, each made when it is asked for.

    A record that cannot be used is left out of its row: `corrupt` says which and why, and nothing else moves.
    """

    def __init__(self, data: DataConfig, model: ModelConfig, split: str, shuffle: bool):
        splits, vocabulary, facts = open_dataset(data.dir)
        _check(vocabulary, facts, model, data.dir)
        if split not in splits:
            raise ValueError(f"{data.dir} has no split {split!r}; it has {sorted(splits)}")
        self._source, self._data, self._model, self._split = splits[split], data, model, split
        self.corrupt: dict[str, str] = {}
        length_N = record_lengths(data.dir, split, self._source)
        if length_N.max(initial=0) > data.row_length:
            i = int(np.argmax(length_N))
            raise ValueError(
                f"record {self.name(i)} takes {length_N[i]} positions and a row has {data.row_length}: "
                "raise data.row_length, or prepare the tokens again with a smaller --row_length"
            )
        self._length_N, self._space = length_N, vocabulary.encode(SPACE)[0]
        self._before_N = np.full(len(length_N), -1)
        if shuffle and data.prompt_share:
            speaker_N = record_speakers(data.dir, split, self._source)
            self._before_N = pair_up(
                length_N, speaker_N, data.prompt_share, data.row_length, data.seed, data.usual_alone
            )
            length_N = length_N + np.where(self._before_N >= 0, length_N[self._before_N], 0)
        order = np.flatnonzero(length_N)
        for i in np.flatnonzero(length_N == 0):
            self._sequence(int(i))  # says why
        if shuffle:
            order = np.random.default_rng(data.seed).permutation(order)
        self.plan = first_fit(length_N, order, data.row_length, data.packing_bins)

    @property
    def fingerprint(self) -> int:
        """A number that tells other records from these."""
        return zlib.crc32(self._length_N.tobytes())

    def name(self, i: int) -> str:
        """What record `i` is called: its id, if that can still be read."""
        try:
            return self._source[i]["id"].decode()
        except Exception:  # neither array_record nor tfds has an error type of its own
            return f"number {i} of {self._split}"

    def batch(self, rows: list[np.ndarray]) -> Batch:
        """The given rows of the plan as arrays [B, T]; an empty row is padding."""
        pad, shape = PAD + self._model.eos + 1, (len(rows), self._data.row_length)
        batch = {f"{name}_BT": np.zeros(shape, np.int32) for name in ("mask", "segments", "positions")}
        batch |= {f"{name}_BT": np.full(shape, pad, np.int32) for name in ("tokens", "targets")}
        for b, records in enumerate(rows):
            start, segment = 0, 0
            for i in records.tolist():
                if (found := self._sequence(i)) is None:
                    continue
                segment += 1
                here = (b, slice(start, start + len(found["tokens"])))
                for name, x in found.items():
                    batch[f"{name}_BT"][here] = x
                batch["segments_BT"][here] = segment
                batch["positions_BT"][here] = np.arange(len(found["tokens"]))
                start = here[1].stop
        return batch

    def records(self, i: int) -> list[int]:
        """The records that sequence `i` is made of: the speech prompt, if it has one, and record `i`."""
        return [*([int(self._before_N[i])] if self._before_N[i] >= 0 else []), i]

    def _sequence(self, i: int) -> Batch | None:
        read = []
        for number in self.records(i):
            try:
                record = self._source[number]
                length = len(sequence(record, self._model)["tokens"])
                if length != self._length_N[number]:
                    raise ValueError(f"it takes {length} positions, {self._length_N[number]} when it was written")
            except Exception as error:  # see `name`
                self._leave_out(self.name(number), f"{type(error).__name__}: {error}")
                if number == i:  # what lacks only its speech prompt is learned without it
                    return None
            else:
                read.append(record)
        return sequence(prompted(*read, self._space) if len(read) > 1 else read[0], self._model)

    def _leave_out(self, name: str, reason: str) -> None:
        if name in self.corrupt:
            return
        self.corrupt[name] = reason
        logging.warning("record %s is left out: %s", name, reason)
        if len(self.corrupt) > max(1, self._data.corrupt_share * len(self._source)):
            raise CorruptData(
                f"{len(self.corrupt)} of {len(self._source)} records in {self._data.dir} ({self._split}) are corrupt, "
                f"more than data.corrupt_share allows; the last is {name}: {reason}"
            )


class TrainBatches(Iterator[Batch]):
    """Endless batches of a process's own rows; every epoch has the rows in another order.

    The rows of a step depend on `data` alone, so `state` is little more than the step's number and means the same to
    any number of processes.
    """

    def __init__(self, rows: Rows, data: DataConfig, own: range):
        self._rows, self._batch_rows = rows, data.batch_rows
        self._order = grain.MapDataset.source(rows.plan).shuffle(seed=data.seed).repeat()
        steps = grain.MapDataset.range(_FOREVER).map(lambda i: rows.batch(self._plan(i, own)))
        # Reading ahead in one thread only: it shares the interpreter with the training loop.
        self._steps = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)))

    def __next__(self) -> Batch:
        return next(self._steps)

    def get_state(self) -> dict[str, Any]:
        """Where the stream stands, ready for JSON."""
        return self._steps.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind the batch after which `get_state` gave `state`."""
        if "next_index" not in state:
            raise ValueError(f"this is no position in a stream of batches: {state}")
        self._steps.set_state(state)

    def names(self, step: int) -> list[str]:
        """The records in the batch of training step 1, 2, ..., those of all processes."""
        rows = self._plan(step - 1, range(self._batch_rows))
        return [self._rows.name(n) for row in rows for i in row.tolist() for n in self._rows.records(i)]

    @property
    def fingerprint(self) -> int:
        """The same number wherever the same records are read."""
        return self._rows.fingerprint

    @property
    def corrupt(self) -> dict[str, str]:
        """Records that this process has left out so far, and why."""
        return self._rows.corrupt

    def _plan(self, i: int, own: range) -> list[np.ndarray]:
        return [self._order[i * self._batch_rows + b] for b in own]


def train_batches(data: DataConfig, model: ModelConfig, own: range | None = None) -> TrainBatches:
    """The training stream: rows `own` of every batch of `data.batch_rows`, all of them by default."""
    rows = Rows(data, model, "train", shuffle=True)
    if not rows.plan:
        raise ValueError(f"{data.dir} has no training records")
    return TrainBatches(rows, data, range(data.batch_rows) if own is None else own)


def dev_batches(data: DataConfig, model: ModelConfig, split: str = "dev", own: range | None = None) -> Iterator[Batch]:
    """One pass over a split in its own order: rows `own` of every batch; the last is filled up with padding."""
    rows = Rows(data, model, split, shuffle=False)
    own, empty = range(data.batch_rows) if own is None else own, np.zeros(0, np.int32)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(rows.plan), data.batch_rows):
            batch = [rows.plan[start + b] if start + b < len(rows.plan) else empty for b in own]
            yield rows.batch(batch)

    return batches()


def _check(vocabulary: Vocabulary, facts: CodecFacts, model: ModelConfig, folder: str) -> None:
    if facts.speech_vocab != model.speech_vocab:
        raise ValueError(
            f"model.speech_vocab is {model.speech_vocab}, but the tokens in {folder} are of a codec with "
            f"{facts.speech_vocab}: set model.speech_vocab to it"
        )
    if len(vocabulary) > model.text_vocab:
        raise ValueError(
            f"model.text_vocab is {model.text_vocab}, but the vocabulary in {folder} has {len(vocabulary)} symbols: "
            "raise model.text_vocab to at least that"
        )


def filled_share(batch: Batch) -> float:
    """Share of the positions that are not padding."""
    return float(np.mean(batch["segments_BT"] > 0))


def _records(folder: str, model: ModelConfig, split: str) -> Iterator[dict[str, np.ndarray]]:
    splits, vocabulary, facts = open_dataset(folder)
    _check(vocabulary, facts, model, folder)
    return (splits[split][i] for i in range(len(splits[split])))


def read_tokens(folder: str, model: ModelConfig, split: str) -> Iterator[np.ndarray]:
    """The speech tokens of each record of a split, with EOS behind them."""
    for record in _records(folder, model, split):
        yield np.append(record["speech"], model.eos)


def read_phones(folder: str, model: ModelConfig, split: str) -> list[list[int]]:
    """The phones of each record of a split, as ids in the vocabulary of text symbols."""
    return [record["phones"].tolist() for record in _records(folder, model, split)]


def read_texts(folder: str, model: ModelConfig, split: str) -> list[str]:
    """The text of each record of a split."""
    return [record["text"].decode() for record in _records(folder, model, split)]
