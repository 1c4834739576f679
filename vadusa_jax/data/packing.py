"""Which records share a row: a plan made of lengths alone, before any record is read.

Every process makes the same plan and reads only its own rows of it. So what is trained on does not depend on how many
processes there are, a step's number says which records it holds, and no state has to be kept to go on.
"""

import numpy as np

TRIES = 8  # draws of a speech prompt that is short enough


def first_fit(length_N: np.ndarray, order: np.ndarray, row_length: int, bins: int) -> list[np.ndarray]:
    """The numbers of the records of each row.

    Records are taken in the given order, each into the first of `bins` open rows that has room; when none has, the
    fullest row is closed and a new one opened.

    Args:
        length_N: positions that each record takes, none more than `row_length`.
        order: the numbers of the records to pack.
        row_length: positions of a row.
        bins: rows that are open at a time: more of them leave less padding.
    """
    room = np.full(bins, row_length)
    open_rows: list[list[int]] = [[] for _ in range(bins)]
    rows = []
    for number in order.tolist():
        length = length_N[number]
        best = int(np.argmax(room >= length))
        if room[best] < length:
            best = int(np.argmin(room))
            rows.append(open_rows[best])
            open_rows[best], room[best] = [], row_length
        open_rows[best].append(number)
        room[best] -= length
    return [np.array(row, np.int32) for row in (*rows, *open_rows) if row]


def pair_up(
    length_N: np.ndarray, speaker_N: np.ndarray, share: float, row_length: int, seed: int, usual_alone: bool = False
) -> np.ndarray:
    """The number of the record that goes in front of each as its speech prompt, -1 for none.

    A `share` of the records gets one, of the same speaker and such that both fit into a row: the first fitting one of a
    few drawn. With `usual_alone` it is a share of those of the speaker with most records, and all of the others get one
    where there is one. The same seed draws the same.
    """
    rng, before_N = np.random.default_rng(seed), np.full(len(length_N), -1)
    speakers, counts = np.unique(speaker_N, return_counts=True)
    for speaker, count in zip(speakers, counts, strict=True):
        members = np.flatnonzero((speaker_N == speaker) & (length_N > 0))
        own_share = 1.0 if usual_alone and count < counts.max() else share
        chosen = members[rng.random(len(members)) < own_share]
        if len(members) < 2 or not len(chosen):
            continue
        drawn_CK = members[rng.integers(len(members), size=(len(chosen), TRIES))]
        fits_CK = (drawn_CK != chosen[:, None]) & (length_N[drawn_CK] + length_N[chosen][:, None] <= row_length)
        first_C = drawn_CK[np.arange(len(chosen)), np.argmax(fits_CK, axis=1)]
        before_N[chosen] = np.where(fits_CK.any(axis=1), first_C, -1)
    return before_N
