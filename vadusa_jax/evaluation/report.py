"""Rows of figures -> tables and files. Every speed table names batch, device, dtype, tokens and mode."""

import ast
import csv
import html
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vadusa_jax.evaluation.scores import Scored

MISSING = "-"


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _interval(value: Sequence[float]) -> str:
    return f"{100 * value[0]:.1f} to {100 * value[1]:.1f}"


def _range(digits: int) -> Callable[[Sequence[float]], str]:
    return lambda value: " to ".join(f"{end:.{digits}f}" for end in value)


def _counts(value: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in value.items())


Columns = Mapping[str, tuple[str, Callable[[Any], str]]]  # key of a row -> heading and format


def _opinion(key: str) -> Columns:
    """The columns of a predicted opinion."""
    number, ends = _number(2), ("95% interval", _range(2))
    own = {key: (key.upper(), number), f"{key}_interval": ends}
    return own | {f"{key}_over_ar": ("over ar", number), f"{key}_over_ar_interval": ends}


SPEED: Columns = {
    "mode": ("mode", str),
    "rule": ("rule", str),
    "nodes": ("nodes", str),
    "batch": ("batch", str),
    "device": ("device", str),
    "dtype": ("dtype", str),
    "tokens": ("tokens", str),
    "steps": ("steps", str),
    "tokens_per_step": ("tokens per step", _number(2)),
    "tokens_per_step_interval": ("95% interval", _range(2)),
    "passes_per_s": ("passes a second of speech", _number(1)),
    "wall_s": ("wall s", _number(2)),
    "audio_s": ("audio s", _number(1)),
    "rtf": ("real-time factor", _number(3)),
    "rtf_interval": ("95% interval", _range(3)),
    "speedup": ("speed-up over ar", _number(2)),
    "speedup_interval": ("95% interval", _range(2)),
    "identical_to_ar": ("same as ar %", _percent),
    "finish_reasons": ("finish", _counts),
}
QUALITY: Columns = {
    "mode": ("mode", str),
    "utterances": ("utterances", str),
    "seeds": ("seeds", str),
    "wer": ("WER %", _percent),
    "wer_interval": ("95% interval", _interval),
    "wer_over_truth": ("over ground truth", _percent),
    "wer_over_truth_interval": ("95% interval", _interval),
    "wer_over_ar": ("over ar", _percent),
    "wer_over_ar_interval": ("95% interval", _interval),
    "cer": ("CER %", _percent),
    "cer_interval": ("95% interval", _interval),
    **_opinion("dnsmos"),
}
UTMOS = _opinion("utmos")  # where it was asked for
SPEAKERS: Columns = {
    "mode": ("mode", str),
    "speakers": ("speakers", str),
    "clips": ("clips", str),
    "own": ("like its own prompt", _number(2)),
    "own_interval": ("95% interval", _range(2)),
    "others": ("like the others", _number(2)),
    "pairs": ("more like its own %", _percent),
    "pairs_interval": ("95% interval", _interval),
}
SUMMARY: Columns = {
    key: (SPEED | QUALITY)[key]
    for key in ("mode", "nodes", "batch", "device", "dtype", "tokens", "tokens_per_step", "wall_s", "rtf", "speedup")
} | {"wer": QUALITY["wer"]}


def markdown_table(rows: Iterable[Mapping], columns: Columns) -> str:
    """A Markdown table of the chosen columns; None and absent values become a dash."""
    lines = [[heading for heading, _ in columns.values()], ["---"] * len(columns)]
    for row in rows:
        cells = (MISSING if row.get(key) is None else show(row[key]) for key, (_, show) in columns.items())
        lines.append([html.escape(cell, quote=False).replace("|", "\\|").replace("\n", " ") for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_json(path: Path, rows: Sequence[Mapping] | Mapping) -> None:
    """Rows as a JSON list (or what holds several such lists); a NaN is an error, as it is no JSON."""
    write_text(path, json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping]) -> None:
    """Rows as a spreadsheet, one column for every key of any row."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def read_csv(path: str | Path) -> list[dict]:
    """The rows that `write_csv` wrote: numbers, intervals and counts are values again, an empty cell is None."""

    def value(cell: str) -> Any:
        try:
            return ast.literal_eval(cell)
        except (ValueError, SyntaxError):
            return cell or None

    with Path(path).open(newline="", encoding="utf-8") as file:
        return [{key: value(cell) for key, cell in row.items()} for row in csv.DictReader(file)]


def utterance_rows(scored: Iterable[Scored]) -> list[dict]:
    """One row per clip, worst understood first, to look and listen into a figure."""
    return [
        {
            "mode": one.clip.mode,
            "seed": one.clip.seed,
            "id": one.clip.sentence.id,
            "wer": one.errors.wer,
            "word_errors": one.errors.word_errors,
            "dnsmos": one.dnsmos,
            "finish": one.clip.spoken.finish if one.clip.spoken else None,
            "text": one.clip.sentence.text,
            "transcript": one.transcript,
        }
        for one in sorted(scored, key=lambda one: (-one.errors.wer, one.clip.sentence.id, one.clip.mode))
    ]


WORST: Columns = {
    "mode": ("mode", str),
    "seed": ("seed", str),
    "id": ("id", str),
    "wer": ("WER %", _percent),
    "finish": ("finish", str),
    "text": ("text", str),
    "transcript": ("heard", str),
}


def report(
    title: str,
    facts: Mapping[str, Any],
    rows: Sequence[Mapping],
    utterances: Sequence[Mapping],
    speakers: Sequence[Mapping] = (),
) -> str:
    """The page that a reader opens first; the pictures are expected beside it."""
    if speakers:
        followed = ["## Speakers\n", markdown_table(speakers, SPEAKERS), "Cosines of speaker embeddings.\n"]
    else:
        followed = []
    spoken = [row for row in rows if row["tokens"]]
    return "\n".join(
        [
            f"# {title}\n",
            *(f"- {name}: {value}" for name, value in facts.items()),
            "\n## Words understood and predicted quality\n",
            markdown_table(rows, QUALITY | (UTMOS if rows[0].get("utmos") else {})),
            "Intervals: bootstrap over utterances; differences are paired.\n",
            *followed,
            "## Speed\n",
            markdown_table(spoken, SPEED),
            "Wall time is text in to wave out, compilation excluded. Tokens include EOS, steps include the prefill.\n",
            "![tokens per pass](acceptance.png)\n",
            "![spectrograms](spectrograms.png)\n",
            "## Worst utterances\n",
            markdown_table([row for row in utterances if row["wer"] > 0][:20], WORST),
        ]
    )
