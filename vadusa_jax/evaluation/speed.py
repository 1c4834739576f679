"""Times decoding, mode beside mode: the modes take turns in every repetition, so that a busy machine slows all alike.

Every ratio (a speed-up, a share of the bandwidth, a share of the step) is of one repetition; what is reported is the
median of the ratios and their range, never a ratio of medians. Compilation comes before.
"""

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.decode.loop import Settings, advance, prefill
from vadusa_jax.decode.prompts import first_slots, take_rows
from vadusa_jax.decode.queue import decode_all
from vadusa_jax.decode.state import RUNNING, Prompts, State, grow
from vadusa_jax.evaluation import roofline
from vadusa_jax.evaluation.scores import AR, device
from vadusa_jax.evaluation.subjects import Subject
from vadusa_jax.model.heads import SpeechLM

PEER = "transformers"
WARM_TOKENS = 3  # said while compiling
BARE_S = 0.15  # bare passes are repeated for about as long as this


@dataclasses.dataclass(frozen=True)
class Run:
    """One repetition of one mode: all rows, batch after batch."""

    prefill_s: float
    decode_s: float
    batches: int
    tokens: int  # EOS included
    row_steps: int  # backbone passes that each row took part in, prefill included, summed over the rows
    passes: int  # backbone passes of the device, prefills left out
    live: float  # committed positions of the cache, summed over the rows of all these passes
    compilations: int
    bare_s: float  # one bare pass over as many nodes
    bandwidth: float  # bytes a second, measured beside it

    @property
    def wall_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def step_s(self) -> float:
        return self.decode_s / max(self.passes, 1)


@dataclasses.dataclass(frozen=True)
class PeerRun:
    """One repetition of another implementation: tokens of all rows, and the wall time from prompt to last token."""

    tokens: int
    wall_s: float


@dataclasses.dataclass(frozen=True)
class QueueRun:
    """One repetition of a queue of ragged rows."""

    tokens: int
    wall_s: float
    compilations: int
    transfers: int  # from the device


def take_turns(turns: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list]:
    """What each turn gives back in each repetition; the turns alternate."""
    results: dict[str, list] = {name: [] for name in turns}
    for _ in range(repeats):
        for name, turn in turns.items():
            results[name].append(turn())
    return results


def split(prompts: Prompts, batch: int) -> list[Prompts]:
    """Batches of one padded shape, so that each mode compiles once."""
    return [take_rows(prompts, slice(i, i + batch)) for i in range(0, len(prompts.length_B), batch)]


def decode(lm: SpeechLM, prompts: Prompts, settings: Settings) -> tuple[State, float, float, dict[int, int]]:
    """The final state of one batch, the seconds of the prefill and of all that follows, and passes by cache slots.

    The warm-up calls this too: an argument that is spelled out in one call and left to its default in another would
    compile anew.
    """
    began, passes, done = time.perf_counter(), {}, 1
    state = prefill(lm, prompts, settings=settings, slots=first_slots(prompts, settings.tree))
    jax.block_until_ready(state)
    prefilled = time.perf_counter()
    while True:
        state = advance(lm, prompts, state, settings=settings)
        steps_B, finish_B = jax.device_get((state.passes_B, state.finish_B))
        passes[state.said_BS.shape[1]], done = int(steps_B.max()) - done, int(steps_B.max())
        if (finish_B != RUNNING).all():
            return state, prefilled - began, time.perf_counter() - prefilled, passes
        state = grow(state)


def run_once(subject: Subject, batches: Sequence[Prompts], settings: Settings) -> Run:
    """Decodes all batches and waits for the last token of each; a batch runs until its longest row has ended.

    The bandwidth is measured before and after, so that what else the machine does slows both sides of its share alike.
    """
    lm, prefill_s, decode_s, tokens, row_steps, live = subject.lm, 0.0, 0.0, 0, 0, 0.0
    by_slots: collections.Counter[int] = collections.Counter()
    bandwidth = roofline.measure_bandwidth()
    with roofline.counting() as count:
        for prompts in batches:
            state, *seconds, passes = decode(lm, prompts, settings)
            prefill_s, decode_s = prefill_s + seconds[0], decode_s + seconds[1]
            said_B, steps_B, length_B = jax.device_get((state.count_B, state.passes_B, prompts.length_B))
            tokens, row_steps = tokens + int(said_B.sum()), row_steps + int(steps_B.sum())
            by_slots.update(passes)
            live += float(np.sum((steps_B - 1) * (length_B + said_B / 2)))
    passes, bandwidth = by_slots.total(), (bandwidth + roofline.measure_bandwidth()) / 2

    def bare_s(slots: int) -> float:
        count = max(8, int(BARE_S / decode_s * by_slots[slots]))
        return roofline.measure_bare_s(lm, settings.tree, len(batches[0].length_B), slots, count)

    return Run(
        prefill_s=prefill_s,
        decode_s=decode_s,
        batches=len(batches),
        tokens=tokens,
        row_steps=row_steps,
        passes=passes,
        live=live,
        compilations=count["compilations"],
        bare_s=sum(count * bare_s(slots) for slots, count in by_slots.items()) / max(passes, 1),
        bandwidth=bandwidth,
    )


def speed_rows(
    subject: Subject,
    modes: Mapping[str, Settings],
    batch: int,
    repeats: int,
    tick: Callable[[], Any] = lambda: None,
    peer: Callable[[Prompts], PeerRun] | None = None,
) -> list[dict]:
    """One row of figures per mode, all with one batch size; `tick` is called after every turn and every warm-up.

    `peer` decodes one batch with another implementation, which then takes its turns among the modes.
    """
    batches = split(subject.prompts, batch)
    shorter = dataclasses.replace(batches[0], limit_B=jnp.minimum(batches[0].limit_B, WARM_TOKENS))

    def warm_up(settings: Settings) -> None:
        for prompts in batches:  # whole: each size that the cache grows to is compiled
            *_, passes = decode(subject.lm, prompts, settings)
            for slots in passes:
                roofline.measure_bare_s(subject.lm, settings.tree, batch, slots, passes=1)
        tick()

    def turn(settings: Settings) -> Run:
        run = run_once(subject, batches, settings)
        tick()
        return run

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compiles side by side
        list(pool.map(warm_up, modes.values()))
    turns: dict[str, Callable] = {name: partial(turn, settings) for name, settings in modes.items()}
    if peer:
        peer(shorter)
        turns[PEER] = lambda: _joined(map(peer, batches))
    runs = take_turns(turns, repeats)
    facts = {"shape": subject.shape, "trained": subject.trained, "batch": batch, "device": device()}
    facts |= {"dtype": subject.dtype, "texts": len(subject.prompts.length_B), "repeats": repeats}
    made = []
    for name, settings in modes.items():
        condition = {"mode": name, "rule": settings.rule.name, "nodes": len(settings.tree)}
        made.append(condition | facts | figures(runs[name], runs.get(AR), subject, settings))
    if peer:
        made.append({"mode": PEER, "nodes": 1} | facts | peer_figures(runs[PEER], runs.get(AR)))
    return made


def figures(runs: Sequence[Run], ar: Sequence[Run] | None, subject: Subject, settings: Settings) -> dict:
    """The figures of one mode over its repetitions; `ar` holds plain decoding's runs in the same repetitions."""
    model, first = subject.lm.backbone.config, runs[0]
    weights = roofline.weight_bytes(subject.lm, settings.tree.depth)
    moved = weights + roofline.cache_bytes(model, first.live / max(first.passes, 1), jnp.dtype(subject.dtype))
    each = {
        "prefill_ms": [1e3 * run.prefill_s / run.batches for run in runs],
        "ms_per_step": [1e3 * run.step_s for run in runs],
        "bandwidth_share": [moved / run.bandwidth / run.step_s for run in runs],
        "beyond_bare": [1 - run.bare_s / run.step_s for run in runs],
        "bandwidth": [run.bandwidth for run in runs],
    }
    row = {"tokens": first.tokens, "steps": first.row_steps, "bytes_per_step": moved}
    if ar:
        each["step_ratio"] = [plain.step_s / run.step_s for run, plain in zip(runs, ar, strict=True)]
    if subject.trained or len(settings.tree) == 1:  # random drafts are accepted by chance: their tokens mean nothing
        row["tokens_per_step"] = first.tokens / first.row_steps
        each["tokens_per_s"] = [run.tokens / run.wall_s for run in runs]
        if ar:
            each["speedup"] = _over(runs, ar)
    return row | _medians(each) | {"compilations": sum(run.compilations for run in runs)}


def peer_figures(runs: Sequence[PeerRun], ar: Sequence[Run] | None) -> dict:
    """The figures of another implementation; its speed-up over our plain decoding is below 1 where it is slower."""
    each = {"tokens_per_s": [run.tokens / run.wall_s for run in runs]}
    if ar:
        each |= {"speedup": _over(runs, ar), "ar_over_peer": [1 / x for x in _over(runs, ar)]}
    return {"tokens": runs[0].tokens} | _medians(each)


def project(rows: Iterable[Mapping]) -> list[dict]:
    """Adds `projected_speedup` to the rows of untrained models: their measured step times, relative to plain decoding,
    times the tokens per step that the trained model reached with the same mode and nodes (best at the same batch).
    """
    rows, reached = [dict(row) for row in rows], {}
    for row in rows:
        if row["trained"] and row["mode"] != PEER:
            reached[row["mode"], row["nodes"], row["batch"]] = row["tokens_per_step"]
            reached.setdefault((row["mode"], row["nodes"]), row["tokens_per_step"])
    for row in rows:
        key = (row["mode"], row["nodes"])
        tokens_per_step = reached.get((*key, row["batch"]), reached.get(key))
        if not row["trained"] and tokens_per_step and "step_ratio" in row:
            row["projected_from"] = tokens_per_step
            row["projected_speedup"] = row["step_ratio"] * tokens_per_step
            row["projected_speedup_range"] = tuple(ratio * tokens_per_step for ratio in row["step_ratio_range"])
    return rows


def queue_rows(
    subject: Subject,
    mode: str,
    settings: Settings,
    batches: Sequence[int],
    repeats: int,
    tick: Callable[[], Any] = lambda: None,
) -> list[dict]:
    """The ragged rows through `decode_all`, one row of figures per batch size; `over_first` compares with the first."""

    def turn(batch: int) -> Callable[[], QueueRun]:
        def go() -> QueueRun:
            with roofline.counting() as count:
                began = time.perf_counter()
                said = decode_all(subject.lm, subject.ragged, batch=batch, settings=settings)
                wall_s = time.perf_counter() - began
            tick()
            return QueueRun(sum(len(one.tokens) for one in said), wall_s, count["compilations"], count["transfers"])

        decode_all(subject.lm, subject.ragged, batch=batch, settings=settings)  # compiles
        return go

    runs = take_turns({str(batch): turn(batch) for batch in batches}, repeats)
    first, made = runs[str(batches[0])], []
    for batch in batches:
        own = runs[str(batch)]
        each = {"tokens_per_s": [run.tokens / run.wall_s for run in own], "over_first": _over(own, first)}
        made.append(
            {"mode": mode, "nodes": len(settings.tree), "shape": subject.shape, "batch": batch, "device": device()}
            | {"dtype": subject.dtype, "texts": len(subject.ragged.length_B), "repeats": repeats}
            | {"tokens": own[0].tokens, "transfers": own[0].transfers}
            | {"transfers_per_64_tokens": max(64 * run.transfers / run.tokens for run in own)}
            | {"compilations": sum(run.compilations for run in own)}
            | _medians(each)
        )
    return made


def _joined(runs: Iterable[PeerRun]) -> PeerRun:
    runs = list(runs)
    return PeerRun(sum(run.tokens for run in runs), sum(run.wall_s for run in runs))


def _over(runs: Sequence, base: Sequence) -> list[float]:
    """Tokens a second relative to those of `base` in the same repetition."""
    return [(run.tokens / run.wall_s) / (other.tokens / other.wall_s) for run, other in zip(runs, base, strict=True)]


def _medians(each: Mapping[str, Sequence[float]]) -> dict:
    """The median of each figure, and its (lowest, highest) as `<name>_range`."""
    row = {}
    for key, values in each.items():
        row |= {key: float(np.median(values)), f"{key}_range": (float(min(values)), float(max(values)))}
    return row
