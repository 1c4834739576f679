"""Clips -> one row of figures per mode: understood words, predicted quality, acceptance, time."""

import collections
import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from vadusa_jax.evaluation import metrics
from vadusa_jax.evaluation.clips import TRUTH, Clip

AR = "ar"  # the mode that speed-up and identity are measured against
KEYS = (
    *("mode", "rule", "nodes", "batch", "dtype", "device", "utterances", "seeds", "tokens", "steps"),
    *("tokens_per_step", "acceptance_histogram", "wall_s", "audio_s", "rtf", "speedup"),
    *("wer", "cer", "dnsmos", "finish_reasons", "identical_to_ar"),
)


@dataclasses.dataclass(frozen=True)
class Scored:
    """A clip and what the metrics make of it."""

    clip: Clip
    transcript: str
    errors: metrics.Errors
    dnsmos: float


def score(clips: Sequence[Clip], recogniser: metrics.Recogniser) -> list[Scored]:
    """Transcribes and marks every clip; equal waves (exact decoding beside AR) are listened to once."""

    def listen(clip: Clip) -> tuple[str, float]:
        return recogniser.transcribe(clip.wave_P, clip.sample_rate), metrics.dnsmos(clip.wave_P, clip.sample_rate)

    distinct = {clip.wave_P.tobytes(): clip for clip in clips}
    with ThreadPoolExecutor(recogniser.cpu_threads) as pool:
        heard = list(tqdm(pool.map(listen, distinct.values()), "listen", len(distinct), disable=None))
    known = dict(zip(distinct, heard, strict=True))
    scored = []
    for clip in clips:
        transcript, mos = known[clip.wave_P.tobytes()]
        scored.append(Scored(clip, transcript, metrics.count_errors(clip.sentence.text, transcript), mos))
    return scored


def conditions(voice: Any, mode: Any, batch: int) -> dict:
    """What a mode runs with: rule, tree as fitted to this device, batch, compute type, device."""
    return {
        "rule": mode.rule.name,
        "nodes": len(voice.trees.choose(mode)),
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


def quality(group: Sequence[Scored], truth: Sequence[Scored] | None, ar: Sequence[Scored] | None) -> dict:
    """Error rates and predicted opinion of one mode, with intervals over utterances and paired differences."""
    errors = per_utterance(group)
    total = sum(errors.values(), metrics.Errors())
    row = {
        "utterances": len(errors),
        "seeds": len({one.clip.seed for one in group}),
        "audio_s": sum(one.clip.audio_s for one in group),
        "wer": total.wer,
        "wer_interval": metrics.wer_interval(list(errors.values())),
        "cer": total.cer,
        "dnsmos": float(np.mean([one.dnsmos for one in group])),
    }
    for name, other in (("truth", truth), ("ar", ar)):
        if other and other is not group:
            base = per_utterance(other)
            row[f"wer_over_{name}"] = total.wer - sum(base.values(), metrics.Errors()).wer
            row[f"wer_over_{name}_interval"] = metrics.wer_interval(list(errors.values()), [base[id] for id in errors])
    return row


def per_utterance(group: Iterable[Scored]) -> dict[str, metrics.Errors]:
    """Errors by sentence id, summed over seeds."""
    errors = collections.defaultdict(metrics.Errors)
    for one in group:
        errors[one.clip.sentence.id] += one.errors
    return dict(errors)


def speed(group: Sequence[Scored], ar: Sequence[Scored] | None) -> dict:
    """Acceptance and time of one mode; `speedup` is AR's real-time factor, in the same run, over the mode's."""
    spoken = [one.clip.spoken for one in group]
    block_sizes = list(itertools.chain(*(metrics.blocks(s.block_of, s.steps) for s in spoken)))
    row = {
        "tokens": int(sum(block_sizes)),
        "steps": len(block_sizes),
        "tokens_per_step": metrics.tokens_per_step(block_sizes),
        "acceptance_histogram": metrics.acceptance_histogram(block_sizes),
        "wall_s": sum(one.clip.wall_s for one in group),
        "rtf": real_time_factor(group),
        "finish_reasons": dict(collections.Counter(s.finish for s in spoken)),
    }
    if ar:
        tokens_of = {(one.clip.sentence.id, one.clip.seed): one.clip.spoken.tokens for one in ar}
        same = [np.array_equal(o.clip.spoken.tokens, tokens_of[o.clip.sentence.id, o.clip.seed]) for o in group]
        row |= {"speedup": real_time_factor(ar) / row["rtf"], "identical_to_ar": float(np.mean(same))}
    return row


def real_time_factor(group: Iterable[Scored]) -> float:
    """Wall seconds per second of audio: below 1 is faster than speaking."""
    return sum(one.clip.wall_s for one in group) / max(sum(one.clip.audio_s for one in group), 1e-9)


def device() -> str:
    """What the figures were measured on."""
    kind = jax.devices()[0].device_kind
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{kind}, {usable} core{'s' * (usable > 1)}" if kind == "cpu" else kind
