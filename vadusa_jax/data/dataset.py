"""Token records: a tfds dataset of array_record files, written and read without TensorFlow.

A dataset folder holds one tfds dataset, `vocabulary.json` and `codec.json` (what the speech tokens mean).
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging
from tensorflow_datasets.proto import tf_example_pb2

from vadusa_jax.text import VOCABULARY, Vocabulary

NAME = "speech_tokens"


@dataclasses.dataclass(frozen=True)
class CodecFacts:
    """What the speech tokens of a dataset are: ids 0 .. speech_vocab - 1 at `frame_rate` a second."""

    speech_vocab: int
    frame_rate: float
    sample_rate: int


@dataclasses.dataclass(frozen=True)
class TokenRecord:
    """One utterance, ready for training: `phones` are local vocabulary ids, `speech` codec tokens."""

    id: str
    speaker: str
    text: str
    phones: np.ndarray
    speech: np.ndarray


def example(record: TokenRecord) -> dict[str, Any]:
    """A record as tfds takes it."""
    return dataclasses.asdict(record)


# A split on its way to the disk: records, or a Beam transform that gives examples under names that no two share.
Stream = Iterable[TokenRecord] | Any


class _OneOrder(tfds.core.ExampleWriter):
    """Writes the fields of a record in one order: Protocol Buffers leave it open, and it changes with the process."""

    def write(self, path: Any, examples: Iterable[tuple[Any, bytes]]) -> Any:
        return super().write(path, ((name, _in_order(record)) for name, record in examples))


def _in_order(record: bytes) -> bytes:
    return tf_example_pb2.Example.FromString(record).SerializeToString(deterministic=True)


class SpeechTokens(tfds.core.GeneratorBasedBuilder):
    """The tfds builder; the splits are given by the caller. Records lie in the order of a hash of their names."""

    VERSION = tfds.core.Version("1.0.0")
    name = NAME

    def __init__(self, splits: Mapping[str, Stream], **kwargs: Any) -> None:
        self._streams = splits
        super().__init__(file_format="array_record", **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        ids = tfds.features.Tensor(shape=(None,), dtype=np.int32)
        text = tfds.features.Text()
        features = {"id": text, "speaker": text, "text": text, "phones": ids, "speech": ids}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _example_writer(self) -> tfds.core.ExampleWriter:
        return _OneOrder(self.info.file_format)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager  # nothing is downloaded
        return {split: self._generate_examples(stream) for split, stream in self._streams.items()}

    def _generate_examples(self, stream: Stream) -> Any:
        if isinstance(stream, Iterable):  # named by a count: joined corpora may share ids
            return ((i, example(record)) for i, record in enumerate(stream))
        return stream  # tfds runs it in a pipeline


def write_dataset(
    folder: str | os.PathLike,
    splits: Mapping[str, Stream],
    vocabulary: Vocabulary,
    facts: CodecFacts,
    report: Callable[[], dict[str, Any]] = dict,
    beam_options: Sequence[str] = (),
) -> None:
    """Writes a whole dataset folder or none; an existing one is replaced only once the new one is complete.

    `report` is asked for report.json after the last record is drawn; what it raises leaves everything as it was.
    `beam_options` are those of the pipeline, where a split is a Beam transform.
    """
    folder = Path(folder)
    aside = folder.with_name(folder.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        SpeechTokens(splits, data_dir=str(aside)).download_and_prepare(download_config=_config(beam_options))
        vocabulary.save(aside / VOCABULARY)
        shutil.rmtree(aside / "downloads", ignore_errors=True)  # tfds makes it even for nothing
        for split, source in _read(aside).items():
            record_lengths(aside, split, source)
        (aside / "codec.json").write_text(json.dumps(dataclasses.asdict(facts), indent=2) + "\n")
        (aside / "report.json").write_text(json.dumps(report(), indent=2, sort_keys=True) + "\n")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _config(beam_options: Sequence[str]) -> tfds.download.DownloadConfig | None:
    if not beam_options:
        return None
    from apache_beam.options.pipeline_options import PipelineOptions

    return tfds.download.DownloadConfig(beam_options=PipelineOptions(list(beam_options)))


def open_dataset(folder: str | os.PathLike) -> tuple[Mapping[str, Sequence[dict]], Vocabulary, CodecFacts]:
    """The splits as random-access sequences of feature dicts, the phone vocabulary and the facts of the codec."""
    folder = Path(folder)
    if not _builder_dir(folder).is_dir():
        raise FileNotFoundError(
            f"no token dataset in {folder}; make one with `python -m vadusa_jax.prepare tokens --out {folder} ...`"
        )
    facts = CodecFacts(**json.loads((folder / "codec.json").read_text()))
    return _read(folder), Vocabulary.load(folder / VOCABULARY), facts


def _builder_dir(folder: Path) -> Path:
    return folder / NAME / str(SpeechTokens.VERSION)


def _read(folder: Path) -> Mapping[str, Sequence[dict]]:
    return tfds.builder_from_directory(str(_builder_dir(folder))).as_data_source()


def record_lengths(folder: str | os.PathLike, split: str, source: Sequence[dict]) -> np.ndarray:
    """Positions that each record of a split takes, `[phones] SEP [speech]`; 0 if it cannot be read."""
    return _kept_beside(Path(folder) / f"{split}.lengths.npy", source, _length)


def record_speakers(folder: str | os.PathLike, split: str, source: Sequence[dict]) -> np.ndarray:
    """A number for each record of a split that is the same for the same speaker; 0 if it cannot be read."""
    return _kept_beside(Path(folder) / f"{split}.speakers.npy", source, _speaker)


def _kept_beside(file: Path, source: Sequence[dict], measure: Callable[[Sequence[dict], int], int]) -> np.ndarray:
    """What is measured of each record, kept in a file so that only the first call reads all of them."""
    if file.exists() and len(found_N := np.load(file)) == len(source):
        return found_N
    found_N = np.array([measure(source, i) for i in range(len(source))], np.int32)
    aside = file.with_name(f"{file.name}.{os.getpid()}")  # several processes may do this at once
    try:
        with aside.open("wb") as out:
            np.save(out, found_N)
        aside.replace(file)
    except OSError:
        logging.warning("%s cannot be written: the records are read through at every start", file)
    return found_N


def _length(source: Sequence[dict], i: int) -> int:
    try:
        record = source[i]
    except Exception:  # array_record and tfds have no error type of their own; whoever reads the record says why
        return 0
    return len(record["phones"]) + 1 + len(record["speech"])


def _speaker(source: Sequence[dict], i: int) -> int:
    try:
        return zlib.crc32(source[i]["speaker"]) & 0x7FFFFFFF  # numbers that do not depend on who else is there
    except Exception:  # see `_length`
        return 0
