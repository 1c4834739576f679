"""Recorded sentences -> batches for the training of codecs; each comes with a reference of the same speaker."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from vadusa_jax.speech.fsq import CodecConfig

POOL = 32  # sentences among which the one that fills a row best is chosen
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recording:
    """One spoken sentence and what it says, as ids 1 .. symbols - 1 (0 is CTC's blank)."""

    wave_P: np.ndarray
    phones: Sequence[int]
    speaker: str = ""
    kept: bool = False  # whether the codec that is trained further shall keep its tokens
    tokens_T: np.ndarray | None = None  # of a codec that is not trained here


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """How much of the recordings a batch holds."""

    row_seconds: float = 8.0  # stage 1: a row holds whole sentences of one speaker, silence to the end
    rows: int = 2
    crops: int = 8  # stage 2
    crop_tokens: int = 48
    margin_tokens: int = 16  # the reach of the decoder
    reference_seconds: float = 2.0


class References:
    """Stretches of what the same speaker says elsewhere."""

    def __init__(self, recordings: Sequence[Recording], config: CodecConfig, sizes: BatchSizes):
        self._recordings, self._samples = recordings, round(sizes.reference_seconds * config.sample_rate)
        self._samples -= self._samples % config.hop
        self._of = collections.defaultdict(list)
        for i, recording in enumerate(recordings):
            self._of[recording.speaker].append(i)

    def draw(self, i: int, rng: np.random.Generator) -> np.ndarray:
        """A stretch of another recording of the speaker of recording `i`, of this one if there is no other."""
        mine = self._of[self._recordings[i].speaker]
        other = mine[int(rng.integers(len(mine)))]
        if other == i:
            other = mine[(mine.index(i) + 1) % len(mine)]
        wave_P = self._recordings[other].wave_P
        start = int(rng.integers(max(1, len(wave_P) - self._samples + 1)))
        return np.resize(wave_P[start : start + self._samples], self._samples)  # a short one is repeated


def sentence_rows(
    recordings: Sequence[Recording], config: CodecConfig, sizes: BatchSizes, seed: int = 0
) -> Iterator[Batch]:
    """Endless shuffled batches of rows that hold whole sentences of one speaker. Longer sentences are left out."""
    limit = int(sizes.row_seconds * config.sample_rate) // config.token_samples
    length_N = [-(-len(r.wave_P) // config.token_samples) for r in recordings]
    fitting = [i for i, length in enumerate(length_N) if length <= limit]
    if not fitting:
        raise ValueError(f"none of {len(recordings)} recordings is shorter than row_seconds {sizes.row_seconds}")
    label_limit = limit * 3 // 4
    rng, pool, references = np.random.default_rng(seed), [], References(recordings, config, sizes)
    queue = _endless(fitting, rng)
    while True:
        batch = {
            "wave_BP": np.zeros((sizes.rows, limit * config.token_samples), np.float32),
            "mask_BT": np.zeros((sizes.rows, limit), np.float32),
            "phones_BL": np.zeros((sizes.rows, label_limit), np.int32),
            "tokens_BT": np.zeros((sizes.rows, limit), np.int32),
            "kept_B": np.zeros(sizes.rows, np.float32),
        }
        reference_BP = []
        for row in range(sizes.rows):
            at, spelled = 0, 0
            pool += [next(queue) for _ in range(POOL - len(pool))]
            speaker = recordings[pool[0]].speaker
            reference_BP.append(references.draw(pool[0], rng))
            batch["kept_B"][row] = recordings[pool[0]].kept
            while choice := [i for i in pool if length_N[i] <= limit - at and recordings[i].speaker == speaker]:
                best = choice[0] if at == 0 else max(choice, key=length_N.__getitem__)
                pool.remove(best)
                wave_P, phones = recordings[best].wave_P, recordings[best].phones[: label_limit - spelled]
                batch["wave_BP"][row, at * config.token_samples :][: len(wave_P)] = wave_P
                batch["mask_BT"][row, at : at + length_N[best]] = 1.0
                batch["phones_BL"][row, spelled : spelled + len(phones)] = phones
                if (tokens_T := recordings[best].tokens_T) is not None:
                    batch["tokens_BT"][row, at : at + length_N[best]] = tokens_T
                at, spelled = at + length_N[best], spelled + len(phones)
        yield batch | {"reference_BP": np.stack(reference_BP)}


def crops(recordings: Sequence[Recording], config: CodecConfig, sizes: BatchSizes, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of crops with their margins, drawn evenly over all the sound; `mask_BT` is 0 outside of it."""
    size, margin, step = sizes.crop_tokens + 2 * sizes.margin_tokens, sizes.margin_tokens, config.token_samples
    counts = np.array([-(-len(r.wave_P) // step) for r in recordings])
    rng, references = np.random.default_rng(seed), References(recordings, config, sizes)
    while True:
        wave_BP = np.zeros((sizes.crops, size * step), np.float32)
        mask_BT = np.zeros((sizes.crops, size), np.float32)
        tokens_BT = np.zeros((sizes.crops, size), np.int32)
        chosen = rng.choice(len(recordings), sizes.crops, p=counts / counts.sum())
        for row, i in enumerate(chosen):
            start = int(rng.integers(-margin, max(counts[i] + margin - size, -margin) + 1))
            here, at = slice(max(start, 0), max(start, 0) + size + min(start, 0)), max(-start, 0)
            sound_P = recordings[i].wave_P[here.start * step : here.stop * step]
            wave_BP[row, at * step :][: len(sound_P)] = sound_P
            mask_BT[row, at : counts[i] - start] = 1.0
            if (tokens_T := recordings[i].tokens_T) is not None:
                tokens_BT[row, at:][: len(tokens_T[here])] = tokens_T[here]
        reference_BP = np.stack([references.draw(int(i), rng) for i in chosen])
        yield {"wave_BP": wave_BP, "mask_BT": mask_BT, "tokens_BT": tokens_BT, "reference_BP": reference_BP}


def _endless(items: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(items).tolist()
