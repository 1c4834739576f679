"""Rows and clips -> pictures: how many tokens a pass commits, where in the sentence it does, and what that gains."""

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image
from scipy import signal

from vadusa_jax.decode.tree import Tree
from vadusa_jax.decode.trees import FittedTree
from vadusa_jax.evaluation import metrics
from vadusa_jax.evaluation.clips import Clip
from vadusa_jax.evaluation.scores import AR
from vadusa_jax.evaluation.steps import Step

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
        bars = axis.bar(sizes, 100 * share, color=_block_colours(largest)(sizes), width=0.85)
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


def plot_spectrograms(path: Path, clips: Sequence[Clip]) -> None:
    """Spectrograms of one sentence in several modes, with the accepted blocks beneath and their edges drawn through.

    One coloured cell is one backbone pass: the wider and the brighter, the more tokens it committed.
    """
    block_sizes = [metrics.blocks(clip.spoken.block_of, clip.spoken.steps) for clip in clips]
    largest = max(int(sizes.max()) for sizes in block_sizes)
    longest = max(clip.audio_s for clip in clips)
    figure, axes = plt.subplots(
        2,
        len(clips),
        figsize=(1.2 + 5.2 * len(clips), 3.9),
        height_ratios=(9, 1),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for (spectrum, strip), clip, sizes in zip(axes.T, clips, block_sizes, strict=True):
        _draw_blocks(spectrum, strip, clip, sizes, largest)
        spectrum.set_title(f"{clip.mode}: {metrics.tokens_per_step(sizes):.2f} tokens per step, {len(sizes)} passes")
        spectrum.set_xlim(0, longest)
    axes[0, 0].set_ylabel("kHz")
    axes[1, 0].set_ylabel("passes", rotation=0, ha="right", va="center")
    swatches = [plt.Rectangle((0, 0), 1, 1, color=_block_colours(largest)(n)) for n in range(1, largest + 1)]
    figure.legend(
        swatches,
        [str(n) for n in range(1, largest + 1)],
        title="tokens committed in one pass",
        loc="outside lower center",
        ncols=largest,
        frameon=False,
    )
    figure.suptitle(f"“{clips[0].sentence.text}”")
    save_figure(figure, path)


def plot_step(path: Path, clip: Clip, steps: Sequence[Step], number: int | None = None) -> None:
    """How decoding works, on one pass of a sentence: what was drafted, what of it stands, and where that is heard.

    Args:
        path: of the PNG.
        clip: the sentence as it was spoken.
        steps: its passes as `record_steps` saw them, in the same mode.
        number: the pass that is shown, from 1 on; by default the first that says as many tokens as a pass does on
            average.
    """
    sizes = metrics.blocks(clip.spoken.block_of, clip.spoken.steps)
    if [len(step.block) for step in steps] != sizes[1:].tolist():
        raise ValueError("the clip was spoken in another mode or with another seed than the passes")
    if number is None:
        typical = round(float(np.mean(sizes[1:])))
        number = 1 + int(np.argmin(np.abs(sizes[1:] - typical)))
    figure, (top, spectrum, strip) = plt.subplots(
        3, 1, figsize=(10, 6.2), height_ratios=(12, 7, 1), layout="constrained"
    )
    _draw_drafts(top, steps[number - 1])
    top.set_title(
        f"pass {number} of {len(steps)} says {sizes[number]} tokens; {metrics.tokens_per_step(sizes):.2f} on average "
        f"({clip.mode})"
    )
    top.text(0, 0.98, _story(clip), transform=top.transAxes, va="top", fontsize=9, linespacing=1.5)
    edges = _draw_blocks(spectrum, strip, clip, sizes, int(sizes.max()))
    for axis in (spectrum, strip):
        axis.set_xlim(0, clip.audio_s)
        axis.axvspan(edges[number], edges[number + 1], facecolor="none", edgecolor="tab:cyan", linewidth=2.5)
    spectrum.set(ylabel="kHz", xticks=[])
    strip.set_ylabel("passes", rotation=0, ha="right", va="center")
    save_figure(figure, path)
    with Image.open(path) as picture:  # a quarter of the bytes: this one is shown in the README
        picture.convert("RGB").quantize(64).save(path, format="png", optimize=True)


def _story(clip: Clip) -> str:
    """The way from the text to the drafts, in words."""
    text = textwrap.fill(f"“{clip.sentence.text}”", 34)
    phones = textwrap.shorten(clip.spoken.phones, 34, placeholder=" ...")
    return f"{text}\n→ phones: {phones}\n→ backbone → the next token\n→ draft heads → guesses behind it"


def _draw_drafts(axis: plt.Axes, step: Step) -> None:
    """The tree from left to right, one column a head; what stands is filled, and the model's own token follows it."""
    tree, stands = step.tree, step.path
    y_T, last = -_leaf_positions(tree), stands[-1]
    for i in range(1, len(tree)):
        ends, kept = (tree.parent_T[i], i), i in stands
        style = {"color": "tab:green" if kept else "0.75", "linewidth": 2.5 if kept else 1, "zorder": kept}
        axis.plot(tree.depth_T[list(ends)], y_T[list(ends)], **style)
    own = (tree.depth_T[last] + 1, y_T[last])
    axis.plot([tree.depth_T[last], own[0]], [y_T[last]] * 2, color="tab:blue", linewidth=2.5, linestyle=":", zorder=0)
    nodes = [
        (tree.depth_T[i], y_T[i], step.token_T[i], "tab:green" if i in stands else "white") for i in range(len(tree))
    ]
    for x, y, token, colour in [*nodes, (*own, step.block[-1], "tab:blue")]:
        box = {"boxstyle": "round,pad=0.25", "facecolor": colour, "edgecolor": "0.6"}
        dark = colour == "white"
        axis.text(x, y, str(token), ha="center", va="center", fontsize=8, bbox=box, color="0.45" if dark else "white")
    for depth in range(tree.depth + 1):
        axis.text(depth, y_T.max() + 1.3, f"head {depth}" if depth else "said last", ha="center", fontsize=9)
    handles = [plt.Line2D([], [], color=c, linewidth=4) for c in ("tab:green", "tab:blue", "0.75")]
    axis.legend(
        handles,
        ["drafted, and stands", "the model's own token behind it", "drafted in vain"],
        loc="lower left",
        frameon=False,
        fontsize=9,
    )
    axis.set(xlim=(-2.6, tree.depth + 1.6), ylim=(y_T.min() - 1, y_T.max() + 2.2))
    axis.axis("off")


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
        x_T = _leaf_positions(f.tree)
        for i in range(1, len(f.tree)):
            parent, depth = f.tree.parent_T[i], f.tree.depth_T[i]
            width = 0.3 + 4 * f.accuracy_KR[depth - 1][f.tree.rank_T[i]]
            axis.plot([x_T[parent], x_T[i]], [1 - depth, -depth], color="tab:blue", linewidth=width, zorder=1)
        order = axis.scatter(x_T, -f.tree.depth_T, c=range(1, len(f.tree) + 1), s=40, cmap="viridis_r", zorder=2)
        figure.colorbar(order, ax=axis, label="node, in order of growth")
        chosen = ", ".join(f"{nodes} nodes on {where}" for where, nodes in f.nodes.items())
        axis.set(title=f"{name}: {chosen}", ylabel="depth", xticks=[], yticks=range(0, -f.tree.depth - 1, -1))
    save_figure(figure, path)


def _leaf_positions(tree: Tree) -> np.ndarray:
    """Where each node is drawn from left to right: leaves side by side, a parent above the middle of its children."""
    x_T, leaves = np.zeros(len(tree)), 0
    for path in sorted(tree.paths, key=lambda p: (*p, np.inf)):  # children before their parent
        i = tree.paths.index(path)
        children = [j for j in range(1, len(tree)) if tree.parent_T[j] == i]
        x_T[i] = np.mean(x_T[children]) if children else leaves
        leaves += not children
    return x_T


def _draw_blocks(spectrum: plt.Axes, strip: plt.Axes, clip: Clip, sizes: np.ndarray, largest: int) -> np.ndarray:
    """A spectrogram with the edges of the blocks, and beneath it one cell a pass; returns the edges in seconds."""
    _draw_spectrogram(spectrum, clip)
    seconds_per_token = clip.audio_s / max(len(clip.spoken.tokens), 1)
    edges = np.minimum(np.concatenate([[0], np.cumsum(sizes)]) * seconds_per_token, clip.audio_s)
    spectrum.vlines(edges, 0, clip.sample_rate / 2, color="white", linewidth=0.4, alpha=0.45)
    strip.barh(0, np.diff(edges), left=edges[:-1], height=1, color=_block_colours(largest)(sizes), ec="w", lw=0.3)
    strip.set(xlabel="seconds", yticks=[], ylim=(-0.5, 0.5))
    strip.spines[:].set_visible(False)
    return edges


def _draw_spectrogram(axis: plt.Axes, clip: Clip) -> None:
    padded_P = np.pad(clip.wave_P, (0, max(0, 1024 - len(clip.wave_P))))
    hertz, seconds, power = signal.spectrogram(padded_P, clip.sample_rate, nperseg=512, noverlap=512 - 80)
    axis.pcolormesh(seconds, hertz, 10 * np.log10(power + 1e-12), cmap="magma", vmin=-120, vmax=-40, rasterized=True)
    axis.yaxis.set_major_formatter(lambda hertz, _: f"{hertz / 1000:g}")


def _block_colours(largest: int) -> Callable[[Any], np.ndarray]:
    """Colour of a block size; one scale for all panels of a picture."""
    return lambda sizes: plt.get_cmap("viridis")(np.asarray(sizes) / max(largest, 1) * 0.95)


def save_figure(figure: plt.Figure, path: Path) -> None:
    """Writes a PNG whole or not at all, and closes the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=150, format="png")
    plt.close(figure)
    os.replace(partial, path)
