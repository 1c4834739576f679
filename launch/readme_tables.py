"""Writes the tables of the README from the CSV files in vadusa_jax/assets/figures, which readme_figures.sh keeps there.

    python launch/readme_tables.py [--check]

A table follows its comment, `<!-- NAME.csv -->`. With --check nothing is written, and a table that differs is an error.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vadusa_jax.evaluation.report import markdown_table, read_csv

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "vadusa_jax" / "assets" / "figures"
FRAMES = {"ground_truth": "recorded speech", "codec": "recorded speech through the codec"}
Row = Mapping[str, object]
Cells = Mapping[str, Callable[[Row], object]]  # heading -> what stands below it; None is a dash


def figure(key: str, digits: int = 2, scale: float = 1.0, ends: str = "interval") -> Callable[[Row], str | None]:
    """A number with its interval or range where the row has one."""

    def show(row: Row) -> str | None:
        if (value := row.get(key)) is None:
            return None
        shown, between = f"{scale * value:.{digits}f}", row.get(f"{key}_{ends}")
        return shown + (f" ({' to '.join(f'{scale * x:.{digits}f}' for x in between)})" if between else "")

    return show


def mode(row: Row) -> str:
    return FRAMES.get(row["mode"], f"`{row['mode']}`")


def plain(key: str) -> Callable[[Row], object]:
    return lambda row: row.get(key)


def number(key: str, digits: int = 2) -> Callable[[Row], str | None]:
    return lambda row: None if row.get(key) is None else f"{row[key]:.{digits}f}"


WER = {"WER % (95% interval)": figure("wer", 1, 100)}
OVER_TRUTH = {"over recorded speech": figure("wer_over_truth", 1, 100)}
OVER_AR = {"over `ar`, paired": figure("wer_over_ar", 1, 100)}
DNSMOS = {"DNSMOS": number("dnsmos")}
LENGTH = {"nodes": plain("nodes"), "tokens per step": number("tokens_per_step")}
SPOKEN: Cells = {"mode": mode, "tokens": plain("tokens")} | LENGTH | WER | OVER_TRUTH | OVER_AR | DNSMOS
SPEED: Cells = {
    "shape": plain("shape"),
    "mode": mode,
    "nodes": plain("nodes"),
    "batch": plain("batch"),
    "ms per step": figure("ms_per_step", ends="range"),
    "tokens per step": number("tokens_per_step"),
    "speed-up over `ar`": figure("speedup", ends="range"),
    "projected": figure("projected_speedup", ends="range"),
    "% beyond the bare pass": number("beyond_bare_percent", 0),
}
TABLES: dict[str, Cells] = {
    "heldout": SPOKEN,
    "everyday": SPOKEN,
    "speed": SPEED,
    "speakers": {
        "mode": lambda row: "another recording" if row["mode"] == "recorded" else f"`{row['mode']}`",
        "clips": plain("clips"),
        "like its own prompt": figure("own"),
        "like the others": number("others"),
        "more like its own, %": figure("pairs", 1, 100),
    },
    "rules": {"mode": mode} | LENGTH | WER | OVER_AR,
    "tokens": {"tokens": plain("model"), "mode": mode} | LENGTH
    | {"passes a second of speech": number("passes_per_s", 1)} | WER | OVER_TRUTH,
    "training": {
        "heads": plain("model"),
        "dev loss of the runs": lambda row: ", ".join(f"{loss:.3f}" for loss in row["dev_loss"]),
        "mode": mode,
        "tokens per step": number("tokens_per_step"),
    } | WER | {"over the first": figure("wer_over_first", 1, 100)},
}  # fmt: skip


def table(name: str, rows: Sequence[Row]) -> str:
    """The table of a file as Markdown."""
    if name == "heads":
        return heads_by_tolerance(rows)
    cells = TABLES[name]
    rows = [row | {"beyond_bare_percent": 100 * row["beyond_bare"]} if row.get("beyond_bare") else row for row in rows]
    shown = [{heading: cell(row) for heading, cell in cells.items()} for row in rows]
    shown = [{heading: None if value is None else str(value) for heading, value in row.items()} for row in shown]
    used = [heading for heading in cells if any(row[heading] is not None for row in shown)]
    return markdown_table(shown, {heading: (heading, str) for heading in used})


def heads_by_tolerance(rows: Sequence[Row]) -> str:
    """Tokens per step and WER: heads down, tolerance across."""
    rows = [row for row in rows if str(row["mode"]).startswith("tolerance:")]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = {}
    for row in rows:
        line = lines.setdefault(row["heads"], {"heads": str(row["heads"])})
        line[row["mode"]] = f"{row['tokens_per_step']:.2f}, {100 * row['wer']:.1f}"
    return markdown_table(lines.values(), {"heads": ("heads", str)} | {m: (f"`{m}`", str) for m in modes})


def written(readme: str) -> str:
    """The README with every table made anew."""
    return re.sub(
        r"(<!-- (\w+)\.csv -->\n)(?:\|.*\n)*",
        lambda found: found[1] + table(found[2], read_csv(FIGURES / f"{found[2]}.csv")),
        readme,
    )


def main() -> None:
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = written(old)
    if sys.argv[1:] == ["--check"]:
        if new != old:
            sys.exit("README.md differs from vadusa_jax/assets/figures: run python launch/readme_tables.py")
    elif sys.argv[1:]:
        print(__doc__)
    else:
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
