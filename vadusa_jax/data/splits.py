"""Which corpora make up which split: found by what lies in a folder, named by the user, or drawn by speakers."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import tensorflow_datasets as tfds

from vadusa_jax.data.corpora import AUDIO, Corpus, Libriheavy, LibriTTS, LJSpeech, Share, Tfds

Splits = Mapping[str, tuple[Corpus, ...]]
TFDS = "tfds:"
_MANIFESTS = (".jsonl", ".jsonl.gz")


def find_splits(root: str, given: list[str], audio: str | None = None) -> dict[str, tuple[Corpus, ...]]:
    """Split names -> corpora.

    Args:
        root: a corpus, a folder of several, or `tfds:NAME`, which is prepared first if it has to be.
        given: entries NAME=PART[,PART...]; a part is a folder or manifest below `root`, or a split of a tfds dataset.
            Without any, each part is a split, and a corpus without parts is the split train.
        audio: the folder of LibriLight, for the manifests of Libriheavy; by default download/librilight below `root`.

    Raises FileNotFoundError where there is no corpus, and ValueError for names that are none.
    """
    if root.startswith(TFDS):
        builder = tfds.builder(root.removeprefix(TFDS), file_format="array_record")
        builder.download_and_prepare()
        folder = builder.data_path
    else:
        folder = Path(root)
        if not folder.exists():
            raise FileNotFoundError(f"no corpus folder {root}")
    light = Path(audio) if audio else Path(root) / "download" / "librilight"
    parts: dict[str, Corpus | None]
    if (folder / "dataset_info.json").exists():
        found = tfds.builder_from_directory(str(folder)).info.splits
        parts = {name: Tfds(str(folder), name) for name in found}
    elif whole := open_corpus(folder, light):
        parts = {"train": whole}
    else:
        wanted = {part for entry in given for part in entry.partition("=")[2].split(",")}
        paths = [folder / part for part in sorted(wanted)] if given else sorted(folder.iterdir())
        parts = {str(path.relative_to(folder)): open_corpus(path, light) for path in paths}
    if not given:
        splits = {_stem(name): (corpus,) for name, corpus in parts.items() if corpus is not None}
    else:
        pairs = [entry.partition("=") for entry in given]
        splits = {name: tuple(parts.get(part) for part in named.split(",")) for name, _, named in pairs}
    if missing := [f"{name}: {corpora}" for name, corpora in splits.items() if None in corpora]:
        raise FileNotFoundError(
            f"not every part of these splits is a corpus in {root}: {missing}; it has {_has(parts)}"
        )
    if not splits:
        raise FileNotFoundError(
            f"{root} is no corpus and holds none: neither <speaker>/<chapter>/*.wav, nor metadata.csv, nor a manifest "
            "(*.jsonl, *.jsonl.gz), nor a tfds dataset"
        )
    if bad := [name for name in splits if not name.isidentifier()]:
        raise ValueError(f"split names must be words, got {bad}: name them, for example --split train=train-clean-100")
    return splits


def open_corpus(path: Path, audio: Path | None = None) -> Corpus | None:
    """The corpus that a folder or manifest is, None if it is none."""
    if path.name.endswith(_MANIFESTS):
        return Libriheavy(path, audio or path.parent) if path.is_file() else None
    if (path / "metadata.csv").is_file():
        return LJSpeech(path)
    if path.is_dir() and any(found.suffix.lower() in (*AUDIO, ".txt") for found in path.glob("*/*/*")):
        return LibriTTS(path)
    return None


def hold_out(splits: Splits, by: Literal["speaker", "key"], amount: float) -> dict[str, tuple[Corpus, ...]]:
    """Takes a split `dev` out of `train`: whole speakers, or single utterances by their keys.

    Which ones is decided by a hash of their names, so that it is the same everywhere. `amount` counts them, or below 1
    is their share. Raises ValueError if there is a dev split already, or if train would be left empty.
    """
    if "dev" in splits or "train" not in splits:
        raise ValueError(
            f"a dev split is taken out of `train` where there is no `dev`; these splits are {list(splits)}"
        )
    names = {getattr(utterance, by) for corpus in splits["train"] for utterance in corpus}
    count = round(amount) if amount >= 1 else max(1, round(amount * len(names)))
    if not 0 < count < len(names):
        advice = "; hold out utterances instead" if by == "speaker" else ""
        raise ValueError(f"{count} of {len(names)} {by}s cannot be held out{advice}")
    ranked = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    held = frozenset(ranked[:count])
    dev = tuple(Share(corpus, by, held) for corpus in splits["train"])
    return {**splits, "train": tuple(Share(c, by, held, others=True) for c in splits["train"]), "dev": dev}


def _stem(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in _MANIFESTS if name.endswith(suffix)), name)


def _has(parts: Mapping[str, Corpus | None]) -> list[str]:
    return [name for name, corpus in parts.items() if corpus is not None]
