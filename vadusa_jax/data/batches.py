"""Token records -> packed rows, with grain: shuffled, sharded, repeated, first-fit packed, resumable at any step.

A sequence is `[phones] SEP [speech] EOS`; a row holds several of them one after another. Every row array is [B, T]:
`tokens` and `targets` (the next token), `mask` (1 where the target is a speech token or EOS), `segments` (1, 2, ...
in a row, 0 for padding) and `positions` (from 0 in every segment). EOS is only ever a target, never an input.
"""

from collections.abc import Iterator, Mapping

import grain
import numpy as np

from vadusa_jax.config import DataConfig, ModelConfig
from vadusa_jax.data.dataset import CodecFacts, open_dataset
from vadusa_jax.text import PAD, SEP, Vocabulary

Batch = dict[str, np.ndarray]
_FEATURES = ("tokens", "targets", "mask")


def sequence(record: Mapping[str, np.ndarray], model: ModelConfig, limit: int) -> Batch:
    """One record as unpacked `tokens`, `targets` and `mask` [T]; more than `limit` positions is an error."""
    text_offset = model.eos + 1
    whole = np.concatenate([record["phones"] + text_offset, [SEP + text_offset], record["speech"], [model.eos]])
    whole = whole.astype(np.int32)
    if len(whole) - 1 > limit:
        raise ValueError(
            f"record {record['id']!r} takes {len(whole) - 1} positions and a row has {limit}: "
            "raise data.row_length, or prepare the tokens again with a smaller --row_length"
        )
    return {
        "tokens": whole[:-1],
        "targets": whole[1:],
        "mask": (np.arange(len(whole) - 1) >= len(record["phones"])).astype(np.int32),
    }


def _pack(sequences: grain.IterDataset, data: DataConfig, model: ModelConfig, shuffle: bool) -> grain.IterDataset:
    lengths = dict.fromkeys(_FEATURES, data.row_length)
    padding = {"tokens": PAD + model.eos + 1, "targets": PAD + model.eos + 1, "mask": 0}
    rows = grain.experimental.FirstFitPackIterDataset(
        sequences,
        length_struct=lengths,
        num_packing_bins=data.packing_bins,
        seed=data.seed,
        shuffle_bins=shuffle,
        padding_struct=padding,
    )
    return rows.map(
        lambda row: {
            **{f"{name}_BT": row[name] for name in _FEATURES},
            "segments_BT": row["tokens_segment_ids"],
            "positions_BT": row["tokens_positions"],
        }
    )


def _source(data: DataConfig, model: ModelConfig, split: str) -> grain.MapDataset:
    splits, vocabulary, facts = open_dataset(data.dir)
    _check(vocabulary, facts, model, data.dir)
    if split not in splits:
        raise ValueError(f"{data.dir} has no split {split!r}; it has {sorted(splits)}")
    return grain.MapDataset.source(splits[split])


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


def train_batches(
    data: DataConfig, model: ModelConfig, process_index: int = 0, process_count: int = 1
) -> grain.DatasetIterator:
    """Endless batches of this process's `batch_rows / process_count` rows; every epoch has another order.

    The stream depends on `data` and the shard alone. `get_state()` and `set_state()` of the iterator resume it exactly.
    """
    rows, left_over = divmod(data.batch_rows, process_count)
    if left_over or not rows:
        raise ValueError(f"data.batch_rows is {data.batch_rows}: make it a multiple of the {process_count} processes")
    records = _source(data, model, "train").shuffle(seed=data.seed)
    if len(records) < process_count:
        raise ValueError(f"{data.dir} has {len(records)} training records for {process_count} processes")
    shard = records[process_index::process_count].repeat()
    sequences = shard.map(lambda record: sequence(record, model, data.row_length)).to_iter_dataset(
        grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
    )
    return iter(_pack(sequences, data, model, shuffle=True).batch(rows))


def dev_batches(data: DataConfig, model: ModelConfig, split: str = "dev") -> Iterator[Batch]:
    """One pass over a split in its own order, all batches of `batch_rows` rows; the last is filled up with padding."""
    sequences = _source(data, model, split).map(lambda record: sequence(record, model, data.row_length))
    rows = _pack(sequences.to_iter_dataset(), data, model, shuffle=False)
    return iter(rows.batch(data.batch_rows, batch_fn=lambda rows_T: _stack(rows_T, data, model)))


def _stack(rows: list[Batch], data: DataConfig, model: ModelConfig) -> Batch:
    def padded(name: str) -> np.ndarray:
        value = PAD + model.eos + 1 if name in ("tokens_BT", "targets_BT") else 0
        batch_BT = np.full((data.batch_rows, data.row_length), value, np.int32)
        batch_BT[: len(rows)] = [row[name] for row in rows]
        return batch_BT

    return {name: padded(name) for name in rows[0]}


def filled_share(batch: Batch) -> float:
    """Share of the positions that are not padding."""
    return float(np.mean(batch["segments_BT"] > 0))


def read_tokens(folder: str, model: ModelConfig, split: str) -> Iterator[np.ndarray]:
    """The speech tokens of each record of a split, with EOS behind them."""
    for record in _source(DataConfig(dir=folder), model, split):
        yield np.append(record["speech"], model.eos)


def read_phones(folder: str, model: ModelConfig, split: str) -> list[list[int]]:
    """The phones of each record of a split, as ids in the vocabulary of text symbols."""
    return [record["phones"].tolist() for record in _source(DataConfig(dir=folder), model, split)]
