"""Encoding on all cores of one machine, in shards that outlive an interruption.

A shard is what became of 64 utterances in a row, as a file of JSON lines. Its name holds a hash of all that decides its
content, so a shard that is there is right, whatever ran before. Encoding happens in single-threaded processes only:
the bytes of a shard depend neither on how many there are nor on how many cores the machine has.
"""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from vadusa_jax.data.corpora import Utterance
from vadusa_jax.data.dataset import TokenRecord
from vadusa_jax.data.records import Kept, LeftOut, Limits, Outcome, distinct, outcome
from vadusa_jax.data.splits import Splits
from vadusa_jax.speech import Codec
from vadusa_jax.text import Vocabulary

SIZE = 64  # utterances of a shard: some seconds of work, small enough that a few hundred utterances occupy all cores
_VERSION = 1  # of the file format and of what `outcome` does


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How utterances are encoded, as a value that other processes can be given."""

    load: Callable[[str], Codec]
    codec: str
    limits: Limits
    codec_hash: str = ""

    def encoder(self) -> Callable[[Utterance | LeftOut], Outcome]:
        """Loads the codec."""
        codec, vocabulary = self.load(self.codec), Vocabulary.english()
        return lambda utterance: outcome(utterance, codec, vocabulary, self.limits)


def hash_folder(folder: str | os.PathLike) -> str:
    """A hash of the files of a codec folder, names and bytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def encode(splits: Splits, recipe: Recipe, folder: Path, workers: int) -> tuple[dict[str, list[Path]], float]:
    """Shard files of each split, in order, and the hours of audio per hour of the clock of those that were made now.

    `workers` 0 encodes in this process: for tests, since what else it does may change the last bits of the sound.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (split, (folder / f"{split}-{i:05d}", tuple(part)))
        for split, corpora in splits.items()
        for i, part in enumerate(_batched(distinct(corpora), SIZE))
    ]
    started, seconds, paths = time.monotonic(), 0.0, {split: [] for split in splits}
    with tqdm(total=sum(len(part) for _, (_, part) in jobs), unit=" utterances", mininterval=1) as progress:
        made = _map([job for _, job in jobs], recipe, min(workers, len(jobs)))
        for (split, (_, part)), (path, fresh) in zip(jobs, made, strict=True):
            paths[split].append(path)
            seconds += fresh
            progress.update(len(part))
    return paths, seconds / max(time.monotonic() - started, 1e-9)


def read(path: Path) -> Iterator[tuple[str, Outcome]]:
    """The names and outcomes of a shard."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            name, fields = json.loads(line)
            if "reason" in fields:
                yield name, LeftOut(**fields)
            else:
                record = fields.pop("record")
                ids = {key: np.array(record.pop(key), np.int32) for key in ("phones", "speech")}
                yield name, Kept(TokenRecord(**record, **ids), **fields)


Job = tuple[Path, tuple[tuple[str, Utterance | LeftOut], ...]]


def _batched(items: Iterator, size: int) -> Iterator[list]:
    while part := list(itertools.islice(items, size)):
        yield part


def _map(jobs: list[Job], recipe: Recipe, workers: int) -> Iterator[tuple[Path, float]]:
    if not workers:
        encoder = recipe.encoder()
        yield from (_make(job, recipe, encoder) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process that runs JAX can hang
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _start, (recipe,)) as pool:
        try:
            yield from pool.map(_work, jobs)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # what is being encoded is finished and kept
            raise


def _start(recipe: Recipe) -> None:
    """In a new process, before JAX and Torch have looked for cores: one thread each, no accelerator."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "1", "OMP_NUM_THREADS": "1"}
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    global _recipe, _encoder
    _recipe, _encoder = recipe, recipe.encoder()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # it was killed: nobody else would end this process


def _work(job: Job) -> tuple[Path, float]:
    return _make(job, _recipe, _encoder)


def _make(job: Job, recipe: Recipe, encoder: Callable[[Utterance | LeftOut], Outcome]) -> tuple[Path, float]:
    """Writes a shard unless it is there; returns its file and the seconds of audio that were encoded for it."""
    stem, part = job
    stamps = [u.args if isinstance(u, LeftOut) else (u, u.audio.stamp()) for _, u in part]
    decides = (_VERSION, recipe.codec_hash, recipe.limits, Vocabulary.english().symbols, stamps)
    path = stem.with_name(f"{stem.name}-{hashlib.sha256(repr(decides).encode()).hexdigest()[:16]}.jsonl")
    if path.exists():
        return path, 0.0
    found = [(name, encoder(utterance)) for name, utterance in part]
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text("".join(json.dumps(_fields(*pair), ensure_ascii=False) + "\n" for pair in found), "utf-8")
    os.replace(aside, path)
    return path, sum(result.seconds for _, result in found)


def _fields(name: str, found: Outcome) -> list:
    if isinstance(found, LeftOut):
        return [name, {key: getattr(found, key) for key in ("key", "reason", "detail", "seconds")}]
    record = dataclasses.asdict(found.record)
    record |= {key: record[key].tolist() for key in ("phones", "speech")}
    return [name, {"record": record, "seconds": found.seconds, "resampled": found.resampled}]
