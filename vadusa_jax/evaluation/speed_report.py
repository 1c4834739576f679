"""Speed figures -> the table that states its conditions, a legend, and a summary beside the bars the project sets."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vadusa_jax.evaluation.report import SPEED, Columns, markdown_table
from vadusa_jax.evaluation.scores import AR, device
from vadusa_jax.evaluation.speed import PEER
from vadusa_jax.evaluation.streaming import STREAM_COLUMNS


def _fixed(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{scale * value:.{digits}f}"


def _range(digits: int, scale: float = 1.0) -> Callable[[Sequence[float]], str]:
    return lambda value: " to ".join(f"{scale * x:.{digits}f}" for x in value)


SPEED_COLUMNS: Columns = {
    "shape": ("shape", str),
    **{key: SPEED[key] for key in ("mode", "rule", "nodes", "batch", "device", "dtype")},
    "texts": ("texts", str),
    "tokens": SPEED["tokens"],
    "prefill_ms": ("prefill ms", _fixed(1)),
    "ms_per_step": ("ms per step", _fixed(2)),
    "ms_per_step_range": ("range", _range(2)),
    "tokens_per_step": SPEED["tokens_per_step"],
    "tokens_per_s": ("tokens per s", _fixed(0)),
    "speedup": SPEED["speedup"],
    "speedup_range": ("range", _range(2)),
    "projected_speedup": ("projected speed-up", _fixed(2)),
    "projected_speedup_range": ("range", _range(2)),
    "bytes_per_step": ("MB per step", _fixed(1, 1e-6)),
    "bandwidth_share": ("% of bandwidth", _fixed(0, 100)),
    "bandwidth_share_range": ("range", _range(0, 100)),
    "beyond_bare": ("% beyond bare pass", _fixed(0, 100)),
    "beyond_bare_range": ("range", _range(0, 100)),
}
QUEUE_COLUMNS: Columns = {
    **{key: SPEED_COLUMNS[key] for key in ("shape", "mode", "nodes", "batch", "device", "dtype", "texts", "tokens")},
    "tokens_per_s": SPEED_COLUMNS["tokens_per_s"],
    "tokens_per_s_range": ("range", _range(0)),
    "over_first": ("over the first batch size", _fixed(2)),
    "over_first_range": ("range", _range(2)),
    "transfers_per_64_tokens": ("transfers per 64 tokens", _fixed(2)),
    "compilations": ("recompilations", str),
}
LEGEND = """\
Medians and ranges over {repeats} repetitions in which the modes took turns; every ratio is of one repetition. \
Compilation is excluded. Tokens include EOS, and tokens per step count the prefill as a step; ms per step does not. \
Tokens per s and speed-up are from prompt to last token, prefill included, of batches that run until their longest \
row ends; speed-up is over `ar` of the same shape, dtype and batch.
Projected speed-up (shapes with random weights, whose drafts mean nothing): the measured step time of `ar` over that \
of the mode, times the tokens per step that the trained voice reached in the same mode, with as many nodes.
MB per step: weights read once (backbone, LM head, draft heads in use) and the cache's live positions. % of bandwidth: \
the time these take at the bandwidth measured in this run, over the step's. It may pass 100 where the weights stay in \
a CPU's cache, which is faster than the memory that the bandwidth was measured on.
% beyond bare pass: the part of the step that is not the backbone and the LM head over as many nodes: drafting, \
accepting, committing. Below 0 is noise."""


def legend(repeats: int) -> str:
    """How the columns are to be read."""
    return LEGEND.format(repeats=repeats)


def summary(rows: Sequence[Mapping], queues: Sequence[Mapping]) -> dict[str, Any]:
    """What the run says as a whole; keys of the JSON file."""
    ours = [row for row in rows if row["mode"] != PEER]
    timed = [*ours, *queues]
    made = {
        "device": device(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "bandwidth_gb_per_s": float(np.median([row["bandwidth"] for row in ours])) / 1e9,
        "bandwidth_gb_per_s_range": _extremes([x for row in ours for x in row["bandwidth_range"]], 1e-9),
        "recompilations": sum(row["compilations"] for row in timed),
    }
    if queues:
        made["transfers_per_64_tokens"] = max(row["transfers_per_64_tokens"] for row in queues)
    return made


def _extremes(values: Sequence[float], scale: float = 1.0) -> tuple[float, float]:
    return scale * min(values), scale * max(values)


BARS: Columns = {
    "figure": ("figure", str),
    "of": ("of", str),
    "value": ("value", _fixed(2)),
    "bar": ("bar", str),
}


def bars(rows: Sequence[Mapping], queues: Sequence[Mapping]) -> list[dict]:
    """The figures that the project has set itself bars for, one row each, with what they were measured on."""
    made = []

    def add(figure: str, row: Mapping, value: float, bar: str) -> None:
        of = f"{row['shape']}, {row['mode']}, {row['nodes']} nodes, batch {row['batch']}, {row['dtype']}"
        made.append({"figure": figure, "of": of, "value": value, "bar": bar})

    for row in rows:
        if row["mode"] == AR and row["batch"] == 1:
            add(
                "AR step over the time of its bytes at the bandwidth",
                row,
                1 / row["bandwidth_share"],
                "at most 1.4 (25m)",
            )
    for group in _groups(rows):
        if drafting := [row for row in group if row["nodes"] > 1]:
            worst = max(drafting, key=lambda row: row["beyond_bare"])
            add("largest share of a step beyond the bare pass", worst, worst["beyond_bare"], "at most 0.15")
        if best := [row for row in group if "speedup" in row and row["nodes"] > 1]:
            best = max(best, key=lambda row: row["speedup"])
            add("largest speed-up over ar", best, best["speedup"], "")
        if best := [row for row in group if "projected_speedup" in row]:
            best = max(best, key=lambda row: row["projected_speedup"])
            add("largest projected speed-up over ar", best, best["projected_speedup"], "")
    for row in queues:
        if row["over_first_range"] != (1.0, 1.0):
            add(
                "tokens per s of ragged rows over the first batch size",
                row,
                row["over_first"],
                "at least 2.5 (25m, batch 8)",
            )
    for row in rows:
        if "ar_over_peer" in row:
            add("tokens per s of our ar over transformers", row, row["ar_over_peer"], "at least 2 (25m)")
    return made


def _groups(rows: Iterable[Mapping]) -> list[list[Mapping]]:
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["batch"], row["dtype"]), []).append(row)
    return list(groups.values())


def page(rows: Sequence[Mapping], queues: Sequence[Mapping], streams: Sequence[Mapping], repeats: int) -> str:
    """All that `bench` prints, as Markdown."""
    facts = summary(rows, queues)
    line = (
        f"{facts['device']}, {facts['threads']} threads; bandwidth {facts['bandwidth_gb_per_s']:.1f} GB/s "
        f"({_range(1)(facts['bandwidth_gb_per_s_range'])}); recompilations while timed: {facts['recompilations']}"
    )
    if queues:
        line += f"; transfers from the device per 64 tokens: {facts['transfers_per_64_tokens']:.2f}"
    tables = [markdown_table(rows, SPEED_COLUMNS), legend(repeats) + "\n"]
    if queues:
        tables += ["Rows of different lengths through the queue:\n", markdown_table(queues, QUEUE_COLUMNS)]
    if streams:
        tables += ["Streaming, each text sentence by sentence:\n", markdown_table(streams, STREAM_COLUMNS)]
    return "\n".join([*tables, markdown_table(bars(rows, queues), BARS), line])
