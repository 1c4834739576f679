"""Writes the tables of the README from the CSV files in vadusa_jax/assets/figures, which readme_figures.sh keeps there.

    python launch/readme_tables.py [--check]

A table follows its comment, `<!-- NAME.csv -->`. With --check nothing is written, and a table that differs is an error.
"""

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vadusa_jax.evaluation.report import markdown_table, read_csv

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "vadusa_jax" / "assets" / "figures"
Row = Mapping[str, object]
Cells = Mapping[str, Callable[[Row], str | None]]  # heading -> what stands below it; None is a dash


def percent(key: str) -> Callable[[Row], str | None]:
    """A share with its interval, in percent; None where the row has none."""

    def show(row: Row) -> str | None:
        if row[key] is None:
            return None
        low, high = row[f"{key}_interval"]
        return f"{100 * row[key]:.1f} ({100 * low:.1f} to {100 * high:.1f})"

    return show


TRAINING: Cells = {
    "heads": lambda row: row["model"],
    "dev loss of the runs": lambda row: ", ".join(f"{loss:.3f}" for loss in row["dev_loss"]),
    "mode": lambda row: f"`{row['mode']}`",
    "tokens per step": lambda row: f"{row['tokens_per_step']:.2f}",
    "WER % (95% interval)": percent("wer"),
    "over the first": percent("wer_over_first"),
}


def by_row(cells: Cells, rows: Sequence[Row]) -> str:
    """A line for every row of the file."""
    shown = [{heading: cell(row) for heading, cell in cells.items()} for row in rows]
    return markdown_table(shown, {heading: (heading, str) for heading in cells})


def heads_by_tolerance(rows: Sequence[Row]) -> str:
    """Tokens per step and WER: heads down, tolerance across."""
    rows = [row for row in rows if str(row["mode"]).startswith("tolerance:")]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = {}
    for row in rows:
        line = lines.setdefault(row["heads"], {"heads": str(row["heads"])})
        line[row["mode"]] = f"{row['tokens_per_step']:.2f}, {100 * row['wer']:.1f}"
    return markdown_table(lines.values(), {"heads": ("heads", str)} | {m: (f"`{m}`", str) for m in modes})


TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "heads": heads_by_tolerance,
    "training": functools.partial(by_row, TRAINING),
}


def written(readme: str) -> str:
    """The README with every table made anew."""
    return re.sub(
        r"(<!-- (\w+)\.csv -->\n)(?:\|.*\n)*",
        lambda found: found[1] + TABLES[found[2]](read_csv(FIGURES / f"{found[2]}.csv")),
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
