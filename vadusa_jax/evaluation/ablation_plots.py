"""Rows of an ablation -> pictures: speed-up against heads, quality against tolerance, and what quality costs speed."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from vadusa_jax.evaluation.clips import CODEC, TRUTH
from vadusa_jax.evaluation.plots import save_figure

SAMPLING = ("temperature", "top_k", "top_p", "repeat_window")
LABELS = {  # key of a row -> axis, and by how much its values are multiplied
    "speedup": ("speed-up over ar", 1),
    "tokens_per_step": ("tokens per step", 1),
    "wer": ("WER %", 100),
    "dnsmos": ("DNSMOS", 1),
}
_KNOB = re.compile(r"^(tolerance|topk):(\d+)|:(eps|alpha|threshold|beta)=([\d.]+)")


def plot_heads(path: Path, rows: Sequence[Mapping]) -> bool:
    """Speed-up and tokens per step against the number of draft heads; False if the rows have no two numbers."""
    rows = [row for row in rows if row.get("heads")]
    if len({row["heads"] for row in rows}) < 2:
        return False
    own = {model: {row["heads"] for row in rows if row["model"] == model} for model in {row["model"] for row in rows}}
    one_each = all(len(heads) == 1 for heads in own.values())  # a model for every number: they make one line
    keys, but = ("speedup", "tokens_per_step"), ("model",) if one_each else ()
    _lines(path, rows, "heads", "draft heads", keys, lambda row: row["mode"], but=but)
    return True


def plot_tolerance(path: Path, rows: Sequence[Mapping]) -> bool:
    """WER, and DNSMOS if it was predicted, against the tolerance (that of exact decoding is 1).

    False if the rows have no two tolerances.
    """
    frame = [row for row in rows if row["mode"] in (TRUTH, CODEC)]
    rows = [row | {"tolerance": count} for row in rows if (count := _tolerance(row))]
    if len({row["tolerance"] for row in rows}) < 2:
        return False

    def line(row: Mapping) -> str:
        return re.sub(r"^(exact|tolerance:\d+)", "tolerance", row["mode"]) + f", {row['heads']} heads"

    keys = [key for key in ("wer", "dnsmos") if all(row.get(key) is not None for row in rows)]
    _lines(path, rows, "tolerance", "tolerance", keys, line, frame)
    return True


def plot_tradeoff(path: Path, rows: Sequence[Mapping]) -> bool:
    """WER against speed-up and against tokens per step, all cells; settings of one rule are joined."""
    frame, spoken = [row for row in rows if not row.get("tokens")], [row for row in rows if row.get("tokens")]
    if not spoken:
        return False
    label = _labels(spoken, lambda row: _KNOB.sub(r"\1", row["mode"]) + (f", {row['heads']} heads" * _many(spoken)))
    names = list(dict.fromkeys(map(label, spoken)))
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    for axis, key in zip(axes, ("speedup", "tokens_per_step"), strict=True):
        for number, name in enumerate(names):
            points = sorted((row for row in spoken if label(row) == name), key=lambda row: row[key])
            _errorbars(axis, points, key, "wer", name, number)
            for row in points if len(names) < 20 else ():
                if knob := _KNOB.search(row["mode"]):
                    place = (row[key], 100 * row["wer"])
                    axis.annotate(knob[2] or knob[4], place, (4, 3), textcoords="offset points", fontsize=7)
        _frame(axis, frame, "wer")
        axis.set_xlabel(LABELS[key][0])
    axes[0].set_ylabel(LABELS["wer"][0])
    _finish(figure, axes, spoken)
    save_figure(figure, path)
    return True


def _lines(
    path: Path,
    rows: Sequence[Mapping],
    x: str,
    x_label: str,
    keys: Sequence[str],
    line: Callable[[Mapping], str],
    frame: Iterable[Mapping] = (),
    but: Sequence[str] = (),
) -> None:
    """One panel for each of the keys; rows that `line` names alike are joined, and `but` does not tell them apart."""
    label, frame = _labels(rows, line, but), list(frame)
    names = list(dict.fromkeys(map(label, rows)))
    figure, axes = plt.subplots(1, len(keys), figsize=(4 + 4 * len(keys), 4.4), layout="constrained", squeeze=False)
    axes = axes[0]
    for axis, key in zip(axes, keys, strict=True):
        for number, name in enumerate(names):
            _errorbars(axis, sorted((r for r in rows if label(r) == name), key=lambda r: r[x]), x, key, name, number)
        _frame(axis, frame, key)
        axis.set(xlabel=x_label, ylabel=LABELS[key][0])
        axis.set_xticks(sorted({row[x] for row in rows}))
    _finish(figure, axes, rows)
    save_figure(figure, path)


def _errorbars(axis: plt.Axes, rows: Sequence[Mapping], x: str, y: str, label: str, number: int) -> None:
    """Points joined in their order, with their intervals."""
    scale = LABELS[y][1]
    middle = scale * np.array([row[y] for row in rows])
    ends = scale * np.array([row.get(f"{y}_interval") or (row[y], row[y]) for row in rows]).T
    style = {"fmt": f"{'os^Dv<>P'[number // 10 % 8]}-", "color": f"C{number % 10}", "markersize": 4}
    errors = np.maximum(np.abs(ends - middle), 0)
    axis.errorbar([row[x] for row in rows], middle, errors, elinewidth=0.6, capsize=2, label=label, **style)


def _frame(axis: plt.Axes, rows: Iterable[Mapping], key: str) -> None:
    """What the recogniser makes of recordings and of their resynthesis, as level lines."""
    for row, style in zip(rows, itertools.cycle((":", "--", "-.")), strict=False):
        if row.get(key) is not None:
            name = " ".join(filter(None, (row["mode"], row.get("model"))))
            axis.axhline(LABELS[key][1] * row[key], color="black", linewidth=0.8, linestyle=style, label=name)


def _finish(figure: plt.Figure, axes: Iterable[plt.Axes], rows: Sequence[Mapping]) -> None:
    first, axes = rows[0], list(axes)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    figure.suptitle(
        f"{first['device']}, {first['dtype']}, batch {first['batch']}, {first['utterances']} sentences; 95% intervals",
        fontsize=9,
    )


def _labels(
    rows: Sequence[Mapping], line: Callable[[Mapping], str], but: Sequence[str] = ()
) -> Callable[[Mapping], str]:
    """Names a row's line: by `line`, and by model and sampling where the rows differ in them."""
    differing = [key for key in ("model", *SAMPLING) if key not in but and len({row[key] for row in rows}) > 1]
    return lambda row: ", ".join([line(row), *(f"{key.replace('_', '-')} {row[key]}" for key in differing)])


def _many(rows: Sequence[Mapping]) -> bool:
    """Whether one mode is there with several numbers of heads."""
    return len({row["heads"] for row in rows if row["heads"]}) > 1


def _tolerance(row: Mapping) -> int | None:
    found = re.match(r"(exact)|tolerance:(\d+)", row["mode"])
    return found and int(found[2] or 1)
