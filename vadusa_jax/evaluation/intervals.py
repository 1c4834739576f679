"""What chance could do to a figure: 95% bootstrap intervals over utterances.

A figure is one sum over another (errors over words, wall seconds over seconds of audio), so that a long utterance
counts for more. Utterances are resampled whole, and the same ones for both sides of a comparison, which makes it a
paired one. Sum an utterance's seeds first: repeats are not independent. Fewer than two utterances have no interval:
None.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

Rate = tuple[Sequence[float], Sequence[float]]  # what is summed over, and under, the line: one entry per utterance
Interval = tuple[float, float]
RESAMPLES = 2000


def pooled(rate: Rate) -> float:
    """The figure itself; over nothing it is its upper sum."""
    return float(_over(*map(np.sum, rate)))


def interval(rate: Rate, seed: int = 0) -> Interval | None:
    """Interval of a figure."""
    return _bootstrap(_over, rate, seed)


def difference_interval(rate: Rate, base: Rate, seed: int = 0) -> Interval | None:
    """Interval of a figure less that of a second system; `rate[0][i]` and `base[0][i]` are of one utterance."""
    return _bootstrap(lambda a, b, c, d: _over(a, b) - _over(c, d), (*rate, *base), seed)


def ratio_interval(rate: Rate, base: Rate, seed: int = 0) -> Interval | None:
    """Interval of a figure over that of a second system, which must not be 0."""
    return _bootstrap(lambda a, b, c, d: _over(a, b) / _over(c, d), (*rate, *base), seed)


def _over(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return above / np.where(below == 0, 1, below)


def _bootstrap(figure: Callable[..., np.ndarray], columns: Sequence[Sequence[float]], seed: int) -> Interval | None:
    """Percentile interval of `figure`, which takes the sum of each column over the utterances."""
    if len(columns[0]) < 2:
        return None
    found = stats.bootstrap(
        [np.asarray(column, np.float64) for column in columns],
        lambda *columns, axis: figure(*(column.sum(axis) for column in columns)),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
