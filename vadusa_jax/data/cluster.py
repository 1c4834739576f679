"""Encoding on many machines: the transform that tfds runs with Apache Beam, the extra `[beam]`.

Where it runs is a matter of pipeline options. All workers need the package, the audio, the codec folder and the output
folder under the same paths: a shared file system, which array_record can only write to as mounted. An interrupted
pipeline starts anew; its engine repeats what single workers fail at.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam

from vadusa_jax.data.corpora import Corpus, Utterance
from vadusa_jax.data.dataset import example
from vadusa_jax.data.records import Kept, LeftOut, Outcome, Report, distinct
from vadusa_jax.data.shards import Recipe

Named = tuple[str, Outcome]


class Encode(beam.PTransform):
    """A split as what tfds writes: keys and examples. On the way its report is written to `report` as JSON."""

    def __init__(self, corpora: tuple[Corpus, ...], recipe: Recipe, report: Path):
        super().__init__()
        self._corpora, self._recipe, self._report = corpora, recipe, report

    def expand(self, start: beam.Pipeline) -> beam.PCollection:
        outcomes = (
            start
            | "corpora" >> beam.Create([self._corpora])
            | "list" >> beam.FlatMap(distinct)
            | "share out" >> beam.Reshuffle()
            | "encode" >> beam.ParDo(_Encoder(self._recipe))
        )
        tally = outcomes | "tally" >> beam.CombineGlobally(_Tally())
        tally | "report" >> beam.Map(_write, str(self._report))
        return outcomes | "keep" >> beam.FlatMap(_examples)


class _Encoder(beam.DoFn):
    def __init__(self, recipe: Recipe):
        self._recipe = recipe

    def setup(self) -> None:
        self._encoder = self._recipe.encoder()

    def process(self, named: tuple[str, Utterance | LeftOut]) -> Iterator[Named]:
        name, utterance = named
        yield name, self._encoder(utterance)


class _Tally(beam.CombineFn):
    def create_accumulator(self) -> Report:
        return Report()

    def add_input(self, report: Report, named: Named) -> Report:
        return report.add(*named)

    def merge_accumulators(self, reports: list[Report]) -> Report:
        total = Report()
        for report in reports:
            total.merge(report)
        return total

    def extract_output(self, report: Report) -> dict[str, Any]:
        return report.asdict()


def _write(report: dict[str, Any], path: str) -> None:
    Path(path).write_text(json.dumps(report), encoding="utf-8")


def _examples(named: Named) -> Iterator[tuple[str, dict[str, Any]]]:
    name, found = named
    if isinstance(found, Kept):
        yield name, example(found.record)
