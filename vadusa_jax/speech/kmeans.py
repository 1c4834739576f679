"""Speech tokens as the nearest of K centres in a space of features, such as a layer of HuBERT (arXiv 2106.07447).

The centres are scikit-learn's mini-batch k-means. Processes that each read a share of a corpus fit each their own, and
`merge` makes one set of them all: weighted k-means over the union of their centres (Guha et al., 2003, "Clustering data
streams"), the same on every process, and the same however they were timed.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import load_file, save_file

from vadusa_jax.speech.codec import codec_folder

BATCH_PER_CENTRE = 20  # frames of one mini-batch, for each centre
FILE = "centres.safetensors"


class Features(Protocol):
    """Waveform -> frames of features."""

    @property
    def frame_rate(self) -> float:
        """Frames per second."""

    @property
    def sample_rate(self) -> int:
        """Samples per second of the waveform."""

    @property
    def reach(self) -> int:
        """Frames on each side that a frame depends on, or nearly so."""

    def extract(self, wave_P: np.ndarray) -> np.ndarray:
        """Float32 mono wave [P] -> float32 frames [ceil(P * frame_rate / sample_rate), D]; raises BadAudio."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Writes what `load` needs into a folder; what goes into its codec.json comes back."""


@dataclasses.dataclass(frozen=True)
class Centres:
    """The centres, and how many frames each stands for."""

    centre_KD: np.ndarray
    count_K: np.ndarray

    @functools.cached_property
    def _half_square_K(self) -> np.ndarray:
        return 0.5 * np.square(self.centre_KD).sum(axis=1)

    def nearest(self, frame_TD: np.ndarray) -> np.ndarray:
        """Frames [T, D] -> the number [T] of the centre nearest to each (Euclidean; the lowest of equals)."""
        return np.argmax(frame_TD @ self.centre_KD.T - self._half_square_K, axis=1).astype(np.int32)

    def save(self, folder: Path) -> None:
        save_file({"centre_KD": self.centre_KD, "count_K": self.count_K}, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "Centres":
        return cls(**load_file(folder / FILE))


def fit(frames: Iterable[np.ndarray], clusters: int, seed: int = 0) -> Centres:
    """Mini-batch k-means in one pass over frames [n, D] of any n; ValueError when there are too few."""
    from sklearn.cluster import MiniBatchKMeans  # its own second to import, and only for fitting

    model, total = MiniBatchKMeans(clusters, random_state=seed, n_init=1), 0
    for batch_ND in _batches(frames, clusters * BATCH_PER_CENTRE):
        if not total and len(batch_ND) < clusters:
            raise ValueError(f"{len(batch_ND)} frames cannot make {clusters} clusters: give more speech")
        model.partial_fit(batch_ND)
        total += len(batch_ND)
    if not total:
        raise ValueError(f"no frames to make {clusters} clusters of")
    # Its counts forget centres that were placed anew, and say nothing of the pass as a whole: scale them to it.
    share_K = model._counts / model._counts.sum()
    return Centres(model.cluster_centers_.astype(np.float32), (total * share_K).astype(np.float32))


def merge(parts: Sequence[Centres], seed: int = 0) -> Centres:
    """One set of centres from those of several shares of a corpus, each centre weighing what it stands for."""
    if len(parts) == 1:
        return parts[0]
    from sklearn.cluster import KMeans

    centre_ND = np.concatenate([part.centre_KD for part in parts])
    count_N = np.concatenate([part.count_K for part in parts])
    clusters = len(parts[0].centre_KD)
    model = KMeans(clusters, n_init=4, random_state=seed).fit(centre_ND, sample_weight=count_N)
    count_K = np.bincount(model.labels_, count_N, minlength=clusters)
    return Centres(model.cluster_centers_.astype(np.float32), count_K.astype(np.float32))


def _batches(frames: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    held, count = [], 0
    for frame_ND in frames:
        held.append(frame_ND)
        count += len(frame_ND)
        if count >= size:
            yield np.concatenate(held)
            held, count = [], 0
    if held:
        yield np.concatenate(held)


@dataclasses.dataclass(frozen=True)
class KmeansCodec:
    """Semantic tokens: it encodes only, since the centres forget who speaks."""

    features: Features
    centres: Centres

    @property
    def frame_rate(self) -> float:
        return self.features.frame_rate

    @property
    def vocab_size(self) -> int:
        return len(self.centres.centre_KD)

    @property
    def sample_rate(self) -> int:
        return self.features.sample_rate

    @property
    def receptive_field(self) -> int:
        return self.features.reach

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        return self.centres.nearest(self.features.extract(wave_P))

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        raise ValueError("k-means tokens are encoded only: `train_codec sound` makes them audible")

    def like(self, wave_P: np.ndarray) -> "KmeansCodec":
        return self

    def save(self, folder: str | Path) -> None:
        """Writes `codec.json`, the centres and the feature model."""
        config: dict[str, Any] = {}
        with codec_folder(folder, "kmeans", config) as fresh:
            self.centres.save(fresh)
            config |= self.features.save(fresh)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> "KmeansCodec":
        from vadusa_jax.speech.huggingface import HubFeatures  # PyTorch, only where it is needed

        return cls(HubFeatures.load(folder, config), Centres.load(folder))
