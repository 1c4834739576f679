"""Clips -> pictures: which pass said what, over the spectrogram, and one pass with all that it drafted."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import signal

from vadusa_jax.evaluation import metrics
from vadusa_jax.evaluation.clips import Clip
from vadusa_jax.evaluation.plots import block_colours, leaf_positions, plt, save_figure
from vadusa_jax.evaluation.steps import Step


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
    swatches = [plt.Rectangle((0, 0), 1, 1, color=block_colours(largest)(n)) for n in range(1, largest + 1)]
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
    save_figure(figure, path, colours=64)  # small: it is shown in the README


def _story(clip: Clip) -> str:
    """The way from the text to the drafts, in words."""
    text = textwrap.fill(f"“{clip.sentence.text}”", 34)
    phones = textwrap.shorten(clip.spoken.phones, 34, placeholder=" ...")
    return f"{text}\n→ phones: {phones}\n→ backbone → the next token\n→ draft heads → guesses behind it"


def _draw_drafts(axis: plt.Axes, step: Step) -> None:
    """The tree from left to right, one column a head; what stands is filled, and the model's own token follows it."""
    tree, stands = step.tree, step.path
    y_T, last = -leaf_positions(tree), stands[-1]
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


def _draw_blocks(spectrum: plt.Axes, strip: plt.Axes, clip: Clip, sizes: np.ndarray, largest: int) -> np.ndarray:
    """A spectrogram with the edges of the blocks, and beneath it one cell a pass; returns the edges in seconds."""
    _draw_spectrogram(spectrum, clip)
    seconds_per_token = clip.audio_s / max(len(clip.spoken.tokens), 1)
    edges = np.minimum(np.concatenate([[0], np.cumsum(sizes)]) * seconds_per_token, clip.audio_s)
    spectrum.vlines(edges, 0, clip.sample_rate / 2, color="white", linewidth=0.4, alpha=0.45)
    strip.barh(0, np.diff(edges), left=edges[:-1], height=1, color=block_colours(largest)(sizes), ec="w", lw=0.3)
    strip.set(xlabel="seconds", yticks=[], ylim=(-0.5, 0.5))
    strip.spines[:].set_visible(False)
    return edges


def _draw_spectrogram(axis: plt.Axes, clip: Clip) -> None:
    padded_P = np.pad(clip.wave_P, (0, max(0, 1024 - len(clip.wave_P))))
    hertz, seconds, power = signal.spectrogram(padded_P, clip.sample_rate, nperseg=512, noverlap=512 - 80)
    axis.pcolormesh(seconds, hertz, 10 * np.log10(power + 1e-12), cmap="magma", vmin=-120, vmax=-40, rasterized=True)
    axis.yaxis.set_major_formatter(lambda hertz, _: f"{hertz / 1000:g}")
