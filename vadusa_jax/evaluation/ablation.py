"""Measures the cells of a grid one by one and keeps each in a file: what was killed goes on with the next cell.

A cell takes turns with its own plain decoding, batch after batch: both sides of a speed-up share batch and device, and
what else the machine does. Equal waves are listened to once, over all cells and all runs.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from vadusa_jax.evaluation.clips import TRUTH, recorded, reference_clips, speak
from vadusa_jax.evaluation.grid import Cell, drafts_with_heads, obstacle
from vadusa_jax.evaluation.metrics import Recogniser
from vadusa_jax.evaluation.report import utterance_rows, write_json
from vadusa_jax.evaluation.scores import (
    AR,
    QUALITY,
    SPEED,
    Heard,
    Scored,
    conditions,
    device,
    rate,
    rows,
    score,
    wave_key,
)
from vadusa_jax.evaluation.testsets import Sentence

NO_HEADS = "no heads"  # in the column of the training mode
SUMS = "sums"  # the key of what a row is made of, sentence by sentence; no column of a table
RATES = {"wer": QUALITY["wer"], "tokens_per_step": SPEED["tokens_per_step"]}  # what it holds of them, as `rate` sums it
NO_FIGURE = (".md", ".png")  # files of a voice that change no figure
Measured = tuple[list[dict], list[Scored]]  # rows, and the clips that they are of


@dataclasses.dataclass(frozen=True)
class Subject:
    """A voice, its name in the table, and the fingerprint of its files."""

    name: str
    voice: Any
    fingerprint: str
    dev_loss: float | None = None  # of the LM head, at the end of training


@dataclasses.dataclass(frozen=True)
class Study:
    """What all cells share."""

    sentences: Sequence[Sentence]
    seeds: int  # every sentence is spoken with the seeds 0 to N-1
    batch: int
    recogniser: Recogniser
    heard_by: str  # what the recogniser is
    opinions: Sequence[str]  # that are predicted, names of `metrics.OPINIONS`
    folder: Path  # of finished cells
    waves: Path | None = None  # where WAVs go


def run(study: Study, subject: Subject, cells: Sequence[Cell]) -> Iterator[dict]:
    """The rows of one voice: recordings and their resynthesis, then every cell that it can speak.

    A cell that is found finished is not measured again.
    """
    known = _heard_before(study)
    for row in _finished(study, "reference", _identity(study, subject), lambda: _references(study, subject, known)):
        yield row if row["mode"] == TRUTH else {"model": subject.name} | row
    bar = tqdm([cell for cell in cells if not obstacle(subject.voice, cell, study.batch)], disable=None)
    for cell in bar:
        bar.set_description(f"{subject.name}: {cell.name}")
        identity, waves = _identity(study, subject, cell), _waves(study, subject, cell)
        for row in _finished(study, cell.name, identity, lambda cell=cell: measure(study, subject, cell, known), waves):
            yield {"model": subject.name, "dev_loss": subject.dev_loss} | row


def measure(study: Study, subject: Subject, cell: Cell, known: dict[str, Heard]) -> Measured:
    """The row of a cell, and its clips, those of plain decoding and the recordings among them."""
    config = dataclasses.replace(subject.voice.config, decode=cell.decode)
    voice, plain = dataclasses.replace(subject.voice, config=config), cell == cell.reference
    modes = {AR: cell.reference.parsed} | ({} if plain else {cell.mode: cell.parsed})
    out = _waves(study, subject, cell)
    clips = speak(_FirstHeads(voice, cell.heads), study.sentences, modes, study.seeds, out, study.batch)
    scored = score([*recorded(study.sentences), *clips], study.recogniser, known, study.opinions)
    ran = {name: conditions(voice, mode, study.batch, cell.heads) for name, mode in modes.items()}
    table = {row["mode"]: row for row in rows(scored, ran)}
    row = table[AR if plain else cell.mode] | {
        "mode": cell.mode,
        "reference": cell.reference.mode,
        "reference_rtf": table[AR]["rtf"],
        "heads": (cell.heads or voice.lm.head_count) if drafts_with_heads(cell.parsed) else 0,
        "training": config.train.mode if voice.lm.head_count else NO_HEADS,
    }
    row |= {name: getattr(cell.decode, name) for name in ("temperature", "top_k", "top_p", "repeat_window")}
    own = [one for one in scored if one.clip.mode == (AR if plain else cell.mode)]
    row[SUMS] = {key: np.array(rate(own, *parts)).tolist() for key, parts in RATES.items()}
    return [row], scored


@dataclasses.dataclass(frozen=True)
class _FirstHeads:
    """A voice that uses its first draft heads only."""

    voice: Any
    heads: int | None

    def speak(self, texts: Sequence[str], mode: Any, seed: int) -> list:
        return self.voice.speak(texts, mode, seed, heads=self.heads)


def _references(study: Study, subject: Subject, known: dict[str, Heard]) -> Measured:
    scored = score(reference_clips(study.sentences, subject.voice.codec), study.recogniser, known, study.opinions)
    return rows(scored, {}), scored


def _identity(study: Study, subject: Subject, cell: Cell | None = None) -> dict:
    """Everything that the figures of a cell depend on; without one: of recordings and their resynthesis."""
    sentences = hashlib.sha256()
    for one in study.sentences:
        wave = b"" if one.wave_P is None else one.wave_P.tobytes()
        sentences.update(json.dumps([one.id, one.text, one.sample_rate, len(wave)]).encode() + wave)
    identity = {
        "model": subject.fingerprint,
        "sentences": sentences.hexdigest(),
        "recogniser": study.heard_by,
        "opinions": list(study.opinions),
        "jax": jax.__version__,
    }
    if cell is None:
        return identity
    dtype = jnp.dtype(subject.voice.lm.backbone.dtype).name
    conditions = {"seeds": list(range(study.seeds)), "batch": study.batch, "device": device(), "dtype": dtype}
    return identity | conditions | dataclasses.asdict(cell)


def _waves(study: Study, subject: Subject, cell: Cell) -> Path | None:
    """Where the WAVs of a cell go."""
    return study.waves / subject.name / cell.name if study.waves else None


def _finished(
    study: Study, name: str, identity: dict, work: Callable[[], Measured], waves: Path | None = None
) -> list[dict]:
    """The rows of what is kept under this identity (with `waves`, if they are there), or of the work, then kept."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = study.folder / f"{name}-{digest}.json"
    if not path.exists() or (waves and not waves.exists()):
        made, scored = work()
        heard = {wave_key(one.clip): dataclasses.asdict(Heard(one.transcript, one.dnsmos, one.utmos)) for one in scored}
        write_json(path, {"identity": identity, "rows": made, "utterances": utterance_rows(scored), "heard": heard})
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def _heard_before(study: Study) -> dict[str, Heard]:
    """What this recogniser heard in any kept cell, stale ones among them: a wave stays what it is."""
    known = {}
    for path in study.folder.glob("*.json"):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["identity"]["recogniser"] == study.heard_by:
            known |= {key: Heard(**heard) for key, heard in kept["heard"].items()}
    return known


def fingerprint(*folders: Path) -> str:
    """The same for folders that hold the same files."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in NO_FIGURE):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode() + data)
    return digest.hexdigest()
