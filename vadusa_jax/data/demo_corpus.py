"""The demo corpus, in LibriTTS layout: `<root>/<speaker>/<chapter>/<utterance>.wav` and `.normalized.txt`.

Its main speaker, who reads the test sentences, is a Piper voice (extra `[demo]`); others (`demo_voices.py`) read texts
of their own, so that a voice can be told from what it says. All of them are tools, run in processes of their own.
"""

import collections
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile
from scipy.signal import resample_poly
from tqdm import tqdm

from vadusa_jax.data import demo_voices, sentences

SAMPLE_RATE = 16_000


@dataclasses.dataclass(frozen=True)
class Levels:
    """What every sentence is trimmed and levelled to."""

    rms: float = 0.08  # of the trimmed sentence, unless its peak would pass `peak`
    peak: float = 0.95
    margin_s: float = 0.08  # kept around the speech; the rest of the silence goes
    silence: float = 0.01  # of the largest short-time level: below it a sentence has not begun or is over
    max_s: float = 7.5  # a longer sentence is not kept


def trim_and_level(wave_P: np.ndarray, settings: Levels, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
    """Leaves `margin_s` of silence at both ends and sets the level; silence alone comes back empty."""
    hop = sample_rate // 100
    frames = wave_P[: len(wave_P) // hop * hop].reshape(-1, hop)
    level = np.sqrt(np.mean(frames.astype(np.float64) ** 2, axis=1))
    loud = np.flatnonzero(level > settings.silence * level.max(initial=0.0))
    if not len(loud):
        return wave_P[:0]
    margin = round(settings.margin_s * sample_rate)
    wave_P = np.pad(wave_P, margin)[loud[0] * hop : (loud[-1] + 1) * hop + 2 * margin]
    gain = min(settings.rms / np.sqrt(np.mean(wave_P**2)), settings.peak / np.abs(wave_P).max())
    return (wave_P * gain).astype(np.float32)


def _start_worker(speaker: str, settings: Levels) -> None:
    global _speak, _settings
    _speak, _settings = demo_voices.load_speaker(speaker), settings


def _write_utterance(job: tuple[str, Path]) -> float:
    """Speaks and stores one utterance unless it is there; returns its seconds, 0 if it was not kept."""
    text, path = job
    if path.exists():
        return soundfile.info(path).duration
    wave_P, rate = _speak(text)
    wave_P = trim_and_level(resample_poly(wave_P.astype(np.float64), SAMPLE_RATE, rate), _settings)
    seconds = len(wave_P) / SAMPLE_RATE
    if not 0 < seconds <= _settings.max_s:
        return 0.0
    path.parent.mkdir(parents=True, exist_ok=True)
    # The transcript first: an utterance exists once its WAV does, and both appear whole.
    for target, write in (
        (path.with_suffix(".normalized.txt"), lambda aside: aside.write_text(text + "\n", encoding="utf-8")),
        (path, lambda aside: soundfile.write(aside, wave_P, SAMPLE_RATE, subtype="PCM_16", format="WAV")),
    ):
        aside = target.with_suffix(".aside")
        write(aside)
        os.replace(aside, target)
    return seconds


def _jobs(out: Path, split: str, texts: list[str], speaker: str) -> Iterator[tuple[str, Path]]:
    for i, text in enumerate(texts):
        chapter = f"{i // 1000:03d}"
        yield text, out / split / speaker / chapter / f"{speaker}_{chapter}_{i:06d}.wav"


def make_demo_corpus(
    out: str | os.PathLike,
    hours: float,
    seed: int = 0,
    workers: int = 2,
    speakers: Sequence[str] = (),
    hours_each: float = 1.5,
    settings: Levels | None = None,
) -> dict[str, float]:
    """Speaks the demo corpus into `out/{heldout,everyday,dev,train}` and returns the seconds of each split.

    `hours` bounds the main speaker's speech in `train`, and `hours_each` that of each further one, who is in `dev` and
    `train` alone. The texts depend on `seed` and speaker alone, the main speaker's audio varies from draw to draw. What
    is there already is kept, so that an interrupted run goes on and a longer one extends a shorter one.
    """
    out, settings, totals = Path(out), settings or Levels(), collections.Counter()
    for speaker in (demo_voices.MAIN, *speakers):
        main = speaker == demo_voices.MAIN
        budget = 3600 * (hours if main else hours_each)
        texts = sentences.demo_texts(round(budget / 1.5) + 1, seed, None if main else speaker)
        totals.update(_speak_texts(out, texts, budget, speaker, workers, settings))
    return dict(totals)


def _speak_texts(
    out: Path, texts: dict[str, list[str]], budget: float, speaker: str, workers: int, settings: Levels
) -> dict[str, float]:
    """Speaks one speaker's texts, those of `train` until there are `budget` seconds; returns those of each split."""
    seconds = dict.fromkeys(texts, 0.0)
    limits = dict.fromkeys(texts, float("inf")) | {"train": budget}
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (speaker, settings)) as pool:
        for split in texts:
            jobs = _jobs(out, split, texts[split], speaker)
            progress = tqdm(desc=f"{speaker}, {split}", unit=" sentences", mininterval=2)
            while seconds[split] < limits[split] and (block := list(itertools.islice(jobs, 32 * workers))):
                for spoken_s in pool.imap_unordered(_write_utterance, block, chunksize=2):
                    seconds[split] += spoken_s
                    progress.update()
                progress.set_postfix(hours=f"{seconds[split] / 3600:.2f}")
            progress.close()
    return seconds
