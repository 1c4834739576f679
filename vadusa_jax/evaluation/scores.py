"""Clips -> one row of figures per mode: understood words, predicted quality, acceptance, time."""

import collections
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from vadusa_jax.evaluation import intervals, metrics
from vadusa_jax.evaluation.clips import TRUTH, Clip
from vadusa_jax.speech.features import resample

AR = "ar"  # the mode that speed-up and identity are measured against
KEYS = (
    *("mode", "rule", "nodes", "batch", "dtype", "device", "utterances", "seeds", "tokens", "steps"),
    *("tokens_per_step", "passes_per_s", "acceptance_histogram", "wall_s", "audio_s", "rtf", "speedup"),
    *("wer", "cer", "dnsmos", "finish_reasons", "identical_to_ar"),
)


@dataclasses.dataclass(frozen=True)
class Heard:
    """What recogniser and quality predictors make of a wave."""

    transcript: str
    dnsmos: float | None = None  # where they were asked for
    utmos: float | None = None


@dataclasses.dataclass(frozen=True)
class Scored:
    """A clip and what the metrics make of it."""

    clip: Clip
    transcript: str
    errors: metrics.Errors
    dnsmos: float | None = None
    utmos: float | None = None


def score(
    clips: Sequence[Clip],
    recogniser: metrics.Recogniser,
    known: MutableMapping[str, Heard] | None = None,
    opinions: Sequence[str] = ("dnsmos",),
) -> list[Scored]:
    """Transcribes and marks every clip; equal waves (exact decoding beside AR) are listened to once.

    `known` is what was heard before, by `wave_key`; it gains what is new. `opinions` are names of `metrics.OPINIONS`.
    """

    def listen(clip: Clip) -> Heard:
        wave = resample(clip.wave_P, clip.sample_rate, metrics.SAMPLE_RATE), metrics.SAMPLE_RATE
        return Heard(recogniser.transcribe(*wave), **{name: metrics.OPINIONS[name](*wave) for name in opinions})

    def enough(key: str) -> bool:
        return key in known and all(getattr(known[key], name) is not None for name in opinions)

    known = {} if known is None else known
    keys = [wave_key(clip) for clip in clips]
    new = {key: clip for key, clip in zip(keys, clips, strict=True) if not enough(key)}
    with ThreadPoolExecutor(recogniser.cpu_threads) as pool:
        heard = list(tqdm(pool.map(listen, new.values()), "listen", len(new), disable=None, leave=None))
    known.update(zip(new, heard, strict=True))
    return [
        Scored(clip, h.transcript, metrics.count_errors(clip.sentence.text, h.transcript), h.dnsmos, h.utmos)
        for clip, h in ((clip, known[key]) for key, clip in zip(keys, clips, strict=True))
    ]


def wave_key(clip: Clip) -> str:
    """The same for equal waves."""
    return hashlib.sha256(clip.wave_P.tobytes()).hexdigest()[:24]


def conditions(voice: Any, mode: Any, batch: int, heads: int | None = None) -> dict:
    """What a mode runs with: rule, tree as fitted to this device, batch, compute type, device."""
    return {
        "rule": mode.rule.name,
        "nodes": len(voice.settings(mode, heads, batch).tree),
        "batch": batch,
        "dtype": jnp.dtype(voice.lm.backbone.dtype).name,
        "device": device(),
    }


def rows(scored: Iterable[Scored], ran: Mapping[str, Mapping]) -> list[dict]:
    """One row per mode, in the order of first appearance, with all `KEYS`; what a mode cannot have is None.

    `ran` holds the `conditions` of every spoken mode by its name.
    """
    by_mode: dict[str, list[Scored]] = {}
    for one in scored:
        by_mode.setdefault(one.clip.mode, []).append(one)
    made = []
    for name, group in by_mode.items():
        row = dict.fromkeys(KEYS) | {"mode": name} | ran.get(name, {})
        row |= quality(group, by_mode.get(TRUTH), by_mode.get(AR))
        if name in ran:
            row |= speed(group, by_mode.get(AR))
        made.append(row)
    return made


QUALITY = {  # what is summed over, and under, the line
    "wer": (lambda one: one.errors.word_errors, lambda one: one.errors.words),
    "cer": (lambda one: one.errors.char_errors, lambda one: one.errors.chars),
    "dnsmos": (lambda one: one.dnsmos, lambda one: 1),
    "utmos": (lambda one: one.utmos, lambda one: 1),
}
SPEED = {
    "tokens_per_step": (lambda one: len(one.clip.spoken.block_of), lambda one: one.clip.spoken.steps),
    "passes_per_s": (lambda one: one.clip.spoken.steps, lambda one: one.clip.audio_s),  # of speech, whatever a token is
    "rtf": (lambda one: one.clip.wall_s, lambda one: one.clip.audio_s),  # below 1 is faster than speaking
}


def quality(group: Sequence[Scored], truth: Sequence[Scored] | None, ar: Sequence[Scored] | None) -> dict:
    """Error rates and predicted opinion of one mode, with intervals over utterances and paired differences."""
    row = {
        "utterances": len({one.clip.sentence.id for one in group}),
        "seeds": len({one.clip.seed for one in group}),
        "audio_s": sum(one.clip.audio_s for one in group),
    }
    for key, (above, below) in QUALITY.items():
        if any(above(one) is None for one in group):
            continue
        own = rate(group, above, below)
        row |= {key: intervals.pooled(own), f"{key}_interval": intervals.interval(own)}
        for name, other in (("truth", truth), ("ar", ar)):
            if other and other is not group:
                base = rate(other, above, below)
                row[f"{key}_over_{name}"] = intervals.pooled(own) - intervals.pooled(base)
                row[f"{key}_over_{name}_interval"] = intervals.difference_interval(own, base)
    return row


def speed(group: Sequence[Scored], ar: Sequence[Scored] | None) -> dict:
    """Acceptance and time of one mode; `speedup` is AR's real-time factor, in the same run, over the mode's."""
    spoken = [one.clip.spoken for one in group]
    block_sizes = list(itertools.chain(*(metrics.blocks(s.block_of, s.steps) for s in spoken)))
    row = {
        "tokens": int(sum(block_sizes)),
        "steps": len(block_sizes),
        "acceptance_histogram": metrics.acceptance_histogram(block_sizes),
        "wall_s": sum(one.clip.wall_s for one in group),
        "finish_reasons": dict(collections.Counter(s.finish for s in spoken)),
    }
    for key, (above, below) in SPEED.items():
        own = rate(group, above, below)
        row |= {key: intervals.pooled(own), f"{key}_interval": intervals.interval(own)}
    if ar:
        own, base = rate(group, *SPEED["rtf"]), rate(ar, *SPEED["rtf"])
        tokens_of = {(one.clip.sentence.id, one.clip.seed): one.clip.spoken.tokens for one in ar}
        same = [np.array_equal(o.clip.spoken.tokens, tokens_of[o.clip.sentence.id, o.clip.seed]) for o in group]
        row |= {
            "speedup": intervals.pooled(base) / row["rtf"],
            "speedup_interval": intervals.ratio_interval(base, own),
            "identical_to_ar": float(np.mean(same)),
        }
    return row


def rate(group: Iterable[Scored], above: Callable[[Scored], float], below: Callable[[Scored], float]) -> intervals.Rate:
    """One entry per utterance, in the order of their ids: the sums over its seeds."""
    sums = collections.defaultdict(lambda: np.zeros(2))
    for one in group:
        sums[one.clip.sentence.id] += (above(one), below(one))
    return tuple(np.array([sums[id] for id in sorted(sums)]).T)


def device() -> str:
    """What the figures were measured on."""
    kind = jax.devices()[0].device_kind
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{kind}, {usable} core{'s' * (usable > 1)}" if kind == "cpu" else kind
