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


NAMES = {"ground_truth": "recorded speech", "codec": "recorded speech through the codec"}


def mode(row: Row) -> str:
    """As it is written on the command line; what frames the modes by name."""
    return NAMES.get(row["mode"], f"`{row['mode']}`")


def number(key: str, digits: int = 0, scale: float = 1.0, unit: str = "") -> Callable[[Row], str | None]:
    """A number; None where the row has none."""
    return lambda row: None if row[key] is None else f"{scale * row[key]:.{digits}f}{unit}"


def spread(key: str, digits: int = 2, scale: float = 1.0, ends: str = "range") -> Callable[[Row], str | None]:
    """A number with the ends of its range or interval; None where the row has none."""

    def show(row: Row) -> str | None:
        if row[key] is None:
            return None
        value, low, high = (f"{scale * x:.{digits}f}" for x in (row[key], *row[f"{key}_{ends}"]))
        return f"{value} ({low} to {high})"

    return show


def percent(key: str) -> Callable[[Row], str | None]:
    """A share with its interval, in percent."""
    return spread(key, 1, 100, "interval")


SPOKEN: Cells = {
    "mode": mode,
    "nodes": number("nodes"),
    "tokens": number("tokens"),
    "tokens per step": number("tokens_per_step", 2),
    "WER % (95% interval)": percent("wer"),
    "over recorded speech": percent("wer_over_truth"),
    "over `ar`": percent("wer_over_ar"),
}
SPEED: Cells = {
    "shape": lambda row: row["shape"],
    "mode": mode,
    "ms per step": spread("ms_per_step"),
    "tokens per step": number("tokens_per_step", 2),
    "speed-up over `ar`": spread("speedup"),
    "projected": spread("projected_speedup"),
    "beyond the bare pass %": spread("beyond_bare", 0, 100),
}
TYPES: Cells = {
    "tokens": lambda row: row["model"],
    "mode": mode,
    "tokens per step": number("tokens_per_step", 2),
    "passes a second of speech": number("passes_per_s", 1),
    "WER % (95% interval)": percent("wer"),
}
DECODE: Cells = {
    "nodes": number("nodes"),
    "minimum MB": number("minimum_bytes", 0, 1e-6),
    "main memory MB": number("hbm_bytes", 0, 1e-6),
    "XLA's bytes accessed MB": number("xla_bytes", 0, 1e-6),
    "roofline µs": number("roofline_us"),
    "tokens per step, exact": number("tokens_per_step", 2),
    "projected speed-up": number("projected_speedup", 2),
}
PODS: Cells = {
    "topology": lambda row: row["topology"],
    "chips": number("chips"),
    "positions a chip": lambda row: f"{row['tokens']:,.0f}",
    "memory GB (of 17.2)": number("memory_bytes", 1, 1e-9),
    "all-reduce, sent MB": lambda row: f"{row['collectives']['all-reduce']['bytes'] / 1e6:.0f}",
    "links ms": number("ici_s", 1, 1e3),
    "links, not hidden %": number("ici_share", 1, 100),
    "positions a second, at most": number("tokens_per_s", 1, 1e-6, " M"),
}
TRAINING: Cells = {
    "heads": lambda row: row["model"],
    "dev loss of the runs": lambda row: ", ".join(f"{loss:.3f}" for loss in row["dev_loss"]),
    "mode": mode,
    "tokens per step": number("tokens_per_step", 2),
    "WER % (95% interval)": percent("wer"),
    "over the first": percent("wer_over_first"),
}


def by_row(cells: Cells, rows: Sequence[Row]) -> str:
    """A line for every row of the file."""
    shown = [{heading: cell(row) for heading, cell in cells.items()} for row in rows]
    return markdown_table(shown, {heading: (heading, str) for heading in cells})


def one_by_one(cells: Cells, rows: Sequence[Row]) -> str:
    """A line for every row of batch 1."""
    return by_row(cells, [row for row in rows if row["batch"] == 1])


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
    "speed": functools.partial(one_by_one, SPEED),
    "types": functools.partial(by_row, TYPES),
    "decode": functools.partial(by_row, DECODE),
    **dict.fromkeys(("pods", "pods_16"), functools.partial(by_row, PODS)),
    **dict.fromkeys(("heldout", "everyday", "rules"), functools.partial(by_row, SPOKEN)),
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
