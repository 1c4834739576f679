"""How often one speech token follows another: what `draft.Viterbi` scores its paths with."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "transitions.safetensors"
UNSEEN = 0.01  # added to every count, so that no transition is impossible


def count_transitions(sequences: Iterable[np.ndarray], vocab: int) -> np.ndarray:
    """Log-probabilities `[V, V]` of the next token (column) after a token (row), from sequences that end with EOS."""
    count_VV = np.full((vocab, vocab), UNSEEN)
    for sequence in sequences:
        np.add.at(count_VV, (sequence[:-1], sequence[1:]), 1.0)
    return np.log(count_VV / count_VV.sum(axis=1, keepdims=True)).astype(np.float32)


def save_transitions(folder: Path, log_p_VV: np.ndarray) -> None:
    """Writes them beside a model as float16, whole or not at all."""
    aside = folder / f"{FILE}.partial"
    save_file({"log_p_VV": log_p_VV.astype(np.float16)}, aside)
    os.replace(aside, folder / FILE)


def load_transitions(folder: Path) -> np.ndarray | None:
    """What `save_transitions` wrote into the folder, or None."""
    path = folder / FILE
    return load_file(path)["log_p_VV"].astype(np.float32) if path.exists() else None
