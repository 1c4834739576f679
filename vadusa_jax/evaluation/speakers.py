"""Does a voice follow its prompt? Prompts of several speakers, and how alike what is spoken is to each of them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vadusa_jax.data.records import LeftOut, Limits, read_utterance
from vadusa_jax.data.splits import open_corpus
from vadusa_jax.evaluation import intervals
from vadusa_jax.evaluation.clips import Clip
from vadusa_jax.text import UnspeakableText

Embed = Callable[[np.ndarray, int], np.ndarray]  # mono wave and its rate -> a vector that tells the speaker
SHORTEST = 1.5  # seconds of a prompt: less tells little of a speaker
RECORDED = "recorded"  # the row of another recording of each speaker, which frames the modes


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A speaker's prompt, another recording where there is one, and the voice that goes on from the prompt."""

    name: str
    prompt_P: np.ndarray
    other_P: np.ndarray | None
    sample_rate: int
    voice: Any


def read_speakers(voice: Any, corpus: Path) -> list[Speaker]:
    """The speakers of a corpus, each with its first recording that can be a prompt; ValueError for fewer than two."""
    found, rate = open_corpus(corpus), voice.codec.sample_rate
    if found is None:
        raise FileNotFoundError(f"{corpus} is no corpus; it should hold <speaker>/<chapter>/<utterance>.wav")
    limits = Limits(min_seconds=SHORTEST, max_seconds=voice.config.decode.prompt_seconds)
    told: dict[str, list[tuple[str, np.ndarray]]] = {}
    for utterance in found:
        mine = told.setdefault(utterance.speaker, [])
        if len(mine) < 2:
            try:
                text, wave_P, *_ = read_utterance(utterance, rate, limits)
                voice.like(wave_P, text)
            except (LeftOut, UnspeakableText):
                continue
            mine.append((text, wave_P))
    speakers = [
        Speaker(name, mine[0][1], mine[1][1] if mine[1:] else None, rate, voice.like(mine[0][1], mine[0][0]))
        for name, mine in told.items()
        if mine
    ]
    if len(speakers) < 2:
        names = ", ".join(told)
        raise ValueError(
            f"{corpus} has prompts of {len(speakers)} speakers, of {names}: at least two are needed, each with a "
            f"recording of {limits.min_seconds:g} to {limits.max_seconds:g} s and its text"
        )
    return speakers


def likeness(clips: Iterable[Clip], speakers: Sequence[Speaker], embed: Embed) -> list[dict]:
    """One row for each mode: cosines of what was spoken to its own prompt and to those of the others.

    `pairs` is the share of pairs of a clip and another speaker in which the clip is more like its own prompt.
    """
    numbers = {speaker.name: n for n, speaker in enumerate(speakers)}
    prompt_SE = np.stack([_direction(embed, speaker.prompt_P, speaker.sample_rate) for speaker in speakers])
    heard = [(c.mode, c.sentence.id, numbers[c.speaker], c.wave_P, c.sample_rate) for c in clips if c.speaker]
    heard += [(RECORDED, s.name, n, s.other_P, s.sample_rate) for n, s in enumerate(speakers) if s.other_P is not None]
    alike: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for mode, id, own, wave_P, rate in tqdm(heard, "compare", disable=None, leave=None):
        if len(wave_P):  # a clip without sound is like nobody
            cosine_S = prompt_SE @ _direction(embed, wave_P, rate)
            others = np.delete(cosine_S, own)
            found = float(cosine_S[own]), float(others.mean()), float((cosine_S[own] > others).mean())
        else:
            found = 0.0, 0.0, 0.0
        alike.setdefault(mode, {}).setdefault(id, []).append(found)
    rows = []
    for mode in sorted(alike, key=lambda mode: mode != RECORDED):
        by_id = list(alike[mode].values())  # seeds of one sentence are no independent clips
        row = {"mode": mode, "speakers": len(speakers), "clips": sum(map(len, by_id))}
        for number, key in enumerate(("own", "others", "pairs")):
            rate = [sum(found[number] for found in one) for one in by_id], [len(one) for one in by_id]
            row |= {key: intervals.pooled(rate), f"{key}_interval": intervals.interval(rate)}
        rows.append(row)
    return rows


def _direction(embed: Embed, wave_P: np.ndarray, rate: int) -> np.ndarray:
    vector_E = embed(wave_P, rate)
    return vector_E / max(float(np.linalg.norm(vector_E)), 1e-9)
