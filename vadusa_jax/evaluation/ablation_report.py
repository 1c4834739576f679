"""Rows of an ablation -> one page: every cell with its conditions, what was left out and why, the pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

from vadusa_jax.evaluation import ablation_groups
from vadusa_jax.evaluation.grid import Cell
from vadusa_jax.evaluation.report import QUALITY, SPEED, Columns, markdown_table

COLUMNS: Columns = {
    "model": ("model", str),
    "training": ("training", str),
    "mode": ("mode", str),
    "heads": ("heads", str),
    "nodes": ("nodes", str),
    **{key: (key.replace("_", "-"), str) for key in ("temperature", "top_k", "top_p", "repeat_window")},
    **{
        key: (SPEED | QUALITY)[key]
        for key in (
            *("batch", "device", "dtype", "tokens", "tokens_per_step", "tokens_per_step_interval"),
            *("passes_per_s", "rtf", "speedup", "speedup_interval"),
            *("wer", "wer_interval", "wer_over_truth", "wer_over_truth_interval"),
            *("wer_over_ar", "wer_over_ar_interval", "cer", "cer_interval", "dnsmos", "dnsmos_interval"),
            *("identical_to_ar", "finish_reasons"),
        )
    },
}


SUMMARY: Columns = {
    key: COLUMNS[key]
    for key in (
        *("model", "mode", "heads", "nodes", "temperature", "top_k", "top_p", "repeat_window"),
        *("batch", "device", "dtype", "tokens", "tokens_per_step", "passes_per_s", "speedup", "wer"),
    )
}


def page(
    facts: Mapping[str, Any],
    rows: Sequence[Mapping],
    left_out: Sequence[tuple[str, Cell, str]],
    pictures: Sequence[str],
    grouped: Sequence[Mapping] = (),
) -> str:
    """The page that a reader opens first; `left_out` holds (model, cell, why), the pictures lie beside the page."""
    lines = [
        "# Ablation\n",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "\n## Cells\n",
        markdown_table(rows, COLUMNS),
        "`ar` in a heading is plain decoding with the same sampling (`greedy_ar` for `greedy`), which took turns with "
        "the cell, batch after batch. Intervals: bootstrap over utterances; differences and speed-ups are paired.\n",
        *(["## Runs of a name together\n", markdown_table(grouped, ablation_groups.COLUMNS)] if grouped else []),
        *(f"![{name}]({name})\n" for name in pictures),
    ]
    if left_out:
        lines += ["## Left out\n", *(f"- {model}, {written(cell)}: {why}" for model, cell, why in left_out)]
    return "\n".join(lines) + "\n"


def written(cell: Cell) -> str:
    """`tolerance:3:nodes=12`, with the number of heads where it has one."""
    return f"`{cell.mode}`" + (f" with {cell.heads} heads" if cell.heads else "")
