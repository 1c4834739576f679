"""Streaming against not streaming, in one run: time to the first sound, and time to the last."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vadusa_jax.decode.modes import Mode
from vadusa_jax.evaluation.report import SPEED, Columns
from vadusa_jax.evaluation.scores import conditions

SECONDS = 10.0  # of speech that is streamed


def text_of(voice: Any, sentences: Sequence[str], mode: Mode, seconds: float = SECONDS) -> str:
    """Sentences joined until they make so much speech."""
    text, spoken = [], 0.0
    for sentence in itertools.cycle(sentences):
        (one,) = voice.speak([sentence], mode)
        text, spoken = [*text, sentence], spoken + len(one.wave) / one.sample_rate
        if spoken >= seconds:
            return " ".join(text)


def stream_rows(voice: Any, modes: Mapping[str, Mode], text: str, repeats: int) -> list[dict]:
    """One row per mode: the text streamed, and spoken sentence by sentence and given out as a whole, in turns."""
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in modes}
    for repeat in range(repeats + 1):
        for name, mode in modes.items():
            began, first_s, samples = time.perf_counter(), 0.0, 0
            for wave_P in voice.stream(text, mode):
                first_s, samples = first_s or time.perf_counter() - began, samples + len(wave_P)
            streamed_s, began = time.perf_counter() - began, time.perf_counter()
            whole = [one.wave for _, one in voice.speak_each(voice.pieces(text), mode, batch=1)]
            whole_s = time.perf_counter() - began
            if samples != sum(map(len, whole)):
                raise AssertionError(f"{name}: {samples} samples streamed, {sum(map(len, whole))} spoken")
            if repeat:  # the first one compiled
                times[name].append((first_s, streamed_s, whole_s))
    made = []
    for name, mode in modes.items():
        first_s, streamed_s, whole_s = np.median(times[name], axis=0).tolist()
        share = [first / whole for first, _, whole in times[name]]
        made.append(
            {"mode": name}
            | conditions(voice, mode, batch=1)
            | {"seconds": samples / voice.codec.sample_rate, "repeats": repeats}
            | {"first_ms": 1e3 * first_s, "streamed_ms": 1e3 * streamed_s, "whole_ms": 1e3 * whole_s}
            | {"first_share": float(np.median(share)), "first_share_range": (min(share), max(share))}
        )
    return made


STREAM_COLUMNS: Columns = {
    **{key: SPEED[key] for key in ("mode", "nodes", "batch", "device", "dtype")},
    "seconds": ("s of speech", "{:.1f}".format),
    "first_ms": ("first sound ms", "{:.0f}".format),
    "streamed_ms": ("last sound ms", "{:.0f}".format),
    "whole_ms": ("not streaming ms", "{:.0f}".format),
    "first_share": ("first sound, % of not streaming", "{:.0%}".format),
    "first_share_range": ("range", lambda value: " to ".join(map("{:.0%}".format, value))),
}
