"""The audio of a measurement: every sentence as recorded, as the codec gives it back, and as spoken in every mode."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import soundfile
from tqdm import tqdm

from vadusa_jax.evaluation.testsets import Sentence
from vadusa_jax.speech.features import check_wave

TRUTH, CODEC = "ground_truth", "codec"  # they frame the modes: what the recogniser makes of perfect speech and tokens


@dataclasses.dataclass(frozen=True)
class Clip:
    """One sentence as audio: recorded, resynthesised, or spoken in a mode (then with `spoken` and its wall time)."""

    sentence: Sentence
    mode: str
    seed: int
    wave_P: np.ndarray
    sample_rate: int
    spoken: Any = None
    wall_s: float = 0.0
    speaker: str = ""  # whose prompt it follows

    @property
    def audio_s(self) -> float:
        """Length in seconds."""
        return len(self.wave_P) / self.sample_rate


def split_speakable(voice: Any, sentences: Iterable[Sentence]) -> tuple[list[Sentence], list[tuple[Sentence, str]]]:
    """What the voice can speak, and the others with the reason: one bad line must not end a run over many."""
    kept, set_aside = [], []
    for sentence in sentences:
        if why := voice.complaint(sentence.text):
            set_aside.append((sentence, why))
        else:
            kept.append(sentence)
    return kept, set_aside


def recorded(sentences: Iterable[Sentence]) -> list[Clip]:
    """The recordings of the sentences that have one."""
    return [Clip(s, TRUTH, 0, s.wave_P, s.sample_rate) for s in sentences if s.wave_P is not None]


def reference_clips(sentences: Iterable[Sentence], codec: Any, out: Path | None = None) -> list[Clip]:
    """The recordings of the sentences that have one, and the same through the codec, which go to `out`."""
    clips = []
    for truth in tqdm(recorded(sentences), "resynthesise", disable=None, leave=None):
        heard_P = check_wave(truth.wave_P, truth.sample_rate, codec.sample_rate)
        if getattr(codec, "codebooks", 1) > 1:
            resynthesis_P = codec.decode_all(codec.encode_all(heard_P))
        else:
            resynthesis_P = codec.decode(codec.encode(heard_P))
        clips += [truth, Clip(truth.sentence, CODEC, 0, resynthesis_P, codec.sample_rate)]
        if out:
            save_wave(out / CODEC / f"{truth.sentence.id}.wav", resynthesis_P, codec.sample_rate)
    return clips


def speak(
    voice: Any,
    sentences: Sequence[Sentence],
    modes: Mapping[str, Any],
    seeds: int,
    out: Path | None = None,
    batch: int = 1,
    speaker: str = "",
) -> list[Clip]:
    """Speaks all sentences in all modes with seeds 0, 1, ...; each WAV goes to `out` as soon as it is spoken.

    The modes take turns on every batch of sentences, so that a busy machine slows them all alike. A batch shares its
    wall time evenly.
    """
    clips = []
    groups = [sentences[i : i + batch] for i in range(0, len(sentences), batch)]
    turns = [(seed, group, name) for seed in range(seeds) for group in groups for name in modes]
    for seed, group, name in tqdm(turns, "speak", disable=None, leave=None):
        texts = [sentence.text for sentence in group]
        spoken, wall_s = timed(lambda texts=texts, name=name, seed=seed: voice.speak(texts, modes[name], seed))
        for sentence, one in zip(group, spoken, strict=True):
            clips.append(Clip(sentence, name, seed, one.wave, one.sample_rate, one, wall_s / len(group), speaker))
            if out:
                save_wave(out / file_name(name) / f"seed{seed}" / f"{sentence.id}.wav", one.wave, one.sample_rate)
    return clips


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """(result, wall seconds); a call during which XLA compiled is made once more, so that only running counts."""
    compiled = []

    def note(event: str, *_, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for _ in range(2):
            compiled.clear()
            start = time.perf_counter()
            result = call()
            wall_s = time.perf_counter() - start
            if not compiled:
                break
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return result, wall_s


def file_name(mode: str) -> str:
    """A mode as a folder name: `tolerance:3:nodes=16` -> `tolerance-3-nodes-16`."""
    return mode.replace(":", "-").replace("=", "-")


def save_wave(path: Path, wave_P: np.ndarray, sample_rate: int) -> None:
    """Writes 16-bit PCM, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    soundfile.write(partial, np.clip(wave_P, -1, 1), sample_rate, subtype="PCM_16", format="WAV")
    os.replace(partial, path)
