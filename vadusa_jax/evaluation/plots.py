"""Rows of figures -> pictures: how many tokens a pass commits, what that gains, how training went, fitted trees."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from vadusa_jax.decode.tree import Tree
from vadusa_jax.decode.trees import FittedTree
from vadusa_jax.evaluation.scores import AR

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_acceptance(path: Path, rows: Sequence[Mapping]) -> None:
    """How many tokens the passes committed, as a share of the passes, one row of bars per mode."""
    rows = [row for row in rows if row["acceptance_histogram"]]
    largest = max(int(size) for row in rows for size in row["acceptance_histogram"])
    sizes = np.arange(1, largest + 1)
    figure, axes = plt.subplots(
        1, len(rows), figsize=(1 + 2.6 * len(rows), 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, row in zip(axes[0], rows, strict=True):
        share = np.array([row["acceptance_histogram"].get(str(size), 0) for size in sizes]) / row["steps"]
        bars = axis.bar(sizes, 100 * share, color=block_colours(largest)(sizes), width=0.85)
        axis.bar_label(bars, [f"{100 * s:.0f}" if s >= 0.005 else "" for s in share], fontsize=7, padding=1)
        axis.set_title(f"{row['mode']}: {row['tokens_per_step']:.2f} tokens per step", fontsize=9)
        axis.set_xticks(sizes)
        axis.set_xlabel("tokens committed in one pass")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("% of passes")
    save_figure(figure, path)


def plot_speed(path: Path, rows: Sequence[Mapping]) -> None:
    """Speed-up (or its projection) and step time against the nodes of the tree; two panels per model and batch."""
    rows = [row for row in rows if row.get("ms_per_step")]
    groups = list(dict.fromkeys((row["shape"], row["dtype"], row["batch"]) for row in rows))
    figure, panels = plt.subplots(
        2, len(groups), figsize=(1 + 3.2 * len(groups), 5), sharex=True, squeeze=False, layout="constrained"
    )
    for (above, below), group in zip(panels.T, groups, strict=True):
        inside = [row for row in rows if (row["shape"], row["dtype"], row["batch"]) == group]
        projected = not inside[0]["trained"]
        for rule in dict.fromkeys(row["rule"] for row in inside if row["nodes"] > 1):
            of_rule = [row for row in inside if row["mode"] == AR or (row["rule"] == rule and row["nodes"] > 1)]
            for axis, key in ((above, "projected_speedup" if projected else "speedup"), (below, "ms_per_step")):
                _line(axis, [row for row in of_rule if key in row], key, rule)
        above.axhline(1, color="black", linewidth=0.8, linestyle=":")
        above.set(title=f"{group[0]}, {group[1]}, batch {group[2]}")
        above.set_ylabel("projected speed-up over ar" if projected else "speed-up over ar")
        below.set(xlabel="nodes of the draft tree (1: ar)", ylabel="ms per step", xscale="log")
        nodes = sorted({row["nodes"] for row in inside})
        below.set_xticks(nodes, [str(n) for n in nodes])
        below.xaxis.set_minor_locator(plt.NullLocator())
        below.legend(fontsize=7, frameon=False)
        for axis in (above, below):
            axis.set_ylim(0, 1.1 * axis.dataLim.y1)
            axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(rows[0]["device"], fontsize=9)
    save_figure(figure, path)


def _line(axis: plt.Axes, rows: Sequence[Mapping], key: str, label: str) -> None:
    """Medians joined in order of nodes, with the range of the repetitions where the rows have one."""
    rows = sorted({row["nodes"]: row for row in rows}.values(), key=lambda row: row["nodes"])
    if rows:
        middle = np.array([row[key] for row in rows])
        ends = np.array([row.get(f"{key}_range", (row[key], row[key])) for row in rows]).T
        axis.errorbar([row["nodes"] for row in rows], middle, np.abs(ends - middle), fmt="o-", capsize=2, label=label)


def plot_training(path: Path, rows: Sequence[Mapping]) -> None:
    """Loss and first-guess accuracy of the LM head and of every draft head, as `metrics.jsonl` of a run has them.

    Lines are training steps, dots the dev set.
    """
    names = sorted({key.split("/")[0] for row in rows for key in row if key.endswith("/top1") and key.count("/") == 1})
    names.sort(key=lambda name: name != "lm")
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, figure_name, scale in ((axes[0], "loss", 1), (axes[1], "top1", 100)):
        for number, name in enumerate(names):
            for prefix, style in (("", "-"), ("dev/", "o")):
                key = f"{prefix}{name}/{figure_name}"
                seen = [(row["step"], scale * row[key]) for row in rows if key in row]
                label = None if prefix else name.replace("head", "head ").replace("lm", "LM head")
                axis.plot(*np.array(seen).reshape(-1, 2).T, style, color=f"C{number}", markersize=4, label=label)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("cross entropy, nats")
    axes[1].set_ylabel("first guess right, %")
    axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def plot_trees(path: Path, fitted: Mapping[str, FittedTree]) -> None:
    """Draws each rule's tree from the root down: a line's width is how often its guess would be accepted."""
    figure, axes = plt.subplots(len(fitted), 1, figsize=(12, 3 * len(fitted)), squeeze=False)
    for axis, (name, f) in zip(axes[:, 0], fitted.items(), strict=True):
        x_T = leaf_positions(f.tree)
        for i in range(1, len(f.tree)):
            parent, depth = f.tree.parent_T[i], f.tree.depth_T[i]
            width = 0.3 + 4 * f.accuracy_KR[depth - 1][f.tree.rank_T[i]]
            axis.plot([x_T[parent], x_T[i]], [1 - depth, -depth], color="tab:blue", linewidth=width, zorder=1)
        order = axis.scatter(x_T, -f.tree.depth_T, c=range(1, len(f.tree) + 1), s=40, cmap="viridis_r", zorder=2)
        figure.colorbar(order, ax=axis, label="node, in order of growth")
        chosen = ", ".join(f"{nodes} nodes on {where}" for where, nodes in f.nodes.items())
        axis.set(title=f"{name}: {chosen}", ylabel="depth", xticks=[], yticks=range(0, -f.tree.depth - 1, -1))
    save_figure(figure, path)


def leaf_positions(tree: Tree) -> np.ndarray:
    """Where each node is drawn from left to right: leaves side by side, a parent above the middle of its children."""
    x_T, leaves = np.zeros(len(tree)), 0
    for path in sorted(tree.paths, key=lambda p: (*p, np.inf)):  # children before their parent
        i = tree.paths.index(path)
        children = [j for j in range(1, len(tree)) if tree.parent_T[j] == i]
        x_T[i] = np.mean(x_T[children]) if children else leaves
        leaves += not children
    return x_T


def block_colours(largest: int) -> Callable[[Any], np.ndarray]:
    """Colour of a block size; one scale for all panels of a picture."""
    return lambda sizes: plt.get_cmap("viridis")(np.asarray(sizes) / max(largest, 1) * 0.95)


def save_figure(figure: plt.Figure, path: Path, colours: int | None = None) -> None:
    """Writes a PNG whole or not at all, with that many `colours` (64: a quarter of the bytes); closes the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=150, format="png")
    plt.close(figure)
    if colours:
        with Image.open(partial) as picture:
            small = picture.convert("RGB").quantize(colours)
        small.save(partial, format="png", optimize=True)
    os.replace(partial, path)
