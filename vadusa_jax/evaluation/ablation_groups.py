"""Models that were trained in several runs, `NAME@RUN` each: the runs of a name taken together, beside the first name.

Utterances are resampled, not runs: an interval tells what other sentences could change, and the dev losses of the runs,
which are all shown, what another seed does.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vadusa_jax.evaluation import intervals
from vadusa_jax.evaluation.ablation_plots import SAMPLING
from vadusa_jax.evaluation.report import QUALITY, SPEED, Columns

COLUMNS: Columns = {
    "model": ("model", str),
    "runs": ("runs", str),
    "dev_loss": ("dev loss of the runs", lambda losses: ", ".join(f"{loss:.3f}" for loss in losses)),
    "mode": ("mode", str),
    "tokens_per_step": SPEED["tokens_per_step"],
    "tokens_per_step_interval": SPEED["tokens_per_step_interval"],
    "wer": QUALITY["wer"],
    "wer_interval": QUALITY["wer_interval"],
    "wer_over_first": ("over the first model", QUALITY["wer_over_ar"][1]),
    "wer_over_first_interval": QUALITY["wer_over_ar_interval"],
}
Sums = Mapping[str, intervals.Rate]  # of "wer" and "tokens_per_step"


def compare(rows: Iterable[tuple[Mapping[str, Any], Sums]]) -> list[dict]:
    """One row for every name and way of decoding, from the rows of single runs and the sums that they are of.

    Differences are to the first name that was decoded alike, sentence by sentence.
    """
    found: dict[tuple, dict[str, list[tuple[Mapping[str, Any], Sums]]]] = {}
    for row, sums in rows:
        alike = (row["mode"], *(row[key] for key in SAMPLING))
        found.setdefault(alike, {}).setdefault(row["model"].partition("@")[0], []).append((row, sums))
    made = []
    for groups in found.values():
        base = None
        for name, runs in groups.items():
            wer, length = (np.sum([sums[key] for _, sums in runs], axis=0) for key in ("wer", "tokens_per_step"))
            losses = [row["dev_loss"] for row, _ in runs if row.get("dev_loss") is not None]
            made.append(
                {
                    "model": name,
                    "runs": len(runs),
                    "dev_loss": losses or None,
                    "mode": runs[0][0]["mode"],
                    "tokens_per_step": intervals.pooled(length),
                    "tokens_per_step_interval": intervals.interval(length),
                    "wer": intervals.pooled(wer),
                    "wer_interval": intervals.interval(wer),
                }
            )
            if base is not None:
                made[-1] |= {
                    "wer_over_first": intervals.pooled(wer) - intervals.pooled(base),
                    "wer_over_first_interval": intervals.difference_interval(wer, base),
                }
            base = wer if base is None else base
    return made
