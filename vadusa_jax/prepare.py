"""Makes what training reads: the spoken demo corpus, and the token dataset of any corpus.

    python -m vadusa_jax.prepare corpus --hours 4 --speakers all --out out/corpus
    python -m vadusa_jax.prepare tokens --corpus out/corpus --codec out/codec --out out/tokens
    python -m vadusa_jax.prepare tokens --corpus LibriTTS --split train=train-clean-100,train-clean-360 \\
        --split dev=dev-clean --codec out/codec --out out/tokens
    python -m vadusa_jax.prepare tokens --corpus libriheavy --audio librilight \\
        --split train=libriheavy_cuts_small.jsonl.gz --dev_speakers 20 --codec out/codec --out out/tokens
    python -m vadusa_jax.prepare tokens --corpus LJSpeech-1.1 --dev_utterances 100 --codec out/codec --out out/tokens
    python -m vadusa_jax.prepare tokens --corpus tfds:libritts --split train=train_clean100 --split dev=dev_clean ...
    python -m vadusa_jax.prepare bpe --tokens out/tokens --codec out/codec --vocab 4096 --out out/units

`corpus` and `tokens` go on where they were stopped. `tokens` leaves a complete dataset or none: until it is complete,
what is encoded lies in `<out>.shards`. Inputs that cannot be used are left out, counted by reason in the table, and
named in report.json. `bpe` turns a token dataset into acoustic BPE units, without audio; the codec that speaks them is
then OUT/codec. A corpus too large for one machine is encoded by Apache Beam, wherever `--beam_options` say:

    --beam_options="--runner=DirectRunner --direct_running_mode=multi_processing --direct_num_workers=8"
    --beam_options="--runner=FlinkRunner --flink_master=HOST:8081 --environment_type=LOOPBACK"
    --beam_options="--runner=DataflowRunner --project=P --region=R --temp_location=gs://B/tmp --sdk_container_image=I"
"""

import itertools
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import app, flags, logging

from vadusa_jax.data import dataset, demo_corpus, records, shards, units
from vadusa_jax.data.demo_voices import find_speakers
from vadusa_jax.data.splits import Splits, find_splits, hold_out
from vadusa_jax.speech import load_codec
from vadusa_jax.text import Vocabulary

_LIMITS = records.Limits()
_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
_HOURS = flags.DEFINE_float("hours", 4.0, "corpus: hours of training speech of the main speaker.", lower_bound=0.0)
_SPEAKERS = flags.DEFINE_list("speakers", [], "corpus: further speakers, or `all` that flite and espeak-ng have here.")
_HOURS_EACH = flags.DEFINE_float("hours_each", 1.5, "corpus: hours of each of them.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "corpus: decides the texts.")
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count(), "Processes, one core each.", lower_bound=1)
_CORPUS = flags.DEFINE_string("corpus", None, "tokens: a corpus, a folder of several, or tfds:NAME.")
_AUDIO = flags.DEFINE_string("audio", None, "tokens: LibriLight's folder; default <corpus>/download/librilight.")
_CODEC = flags.DEFINE_string("codec", None, "tokens, bpe: folder of the codec.")
_TOKENS = flags.DEFINE_string("tokens", None, "bpe: folder of the token dataset.")
_VOCAB = flags.DEFINE_integer("vocab", 4096, "bpe: units, the codec's tokens included.", lower_bound=1)
_SPLIT = flags.DEFINE_multi_string(
    "split", [], "tokens: NAME=PART[,PART...], folders or manifests below the corpus; without any, each is a split."
)
_DEV_SPEAKERS = flags.DEFINE_float("dev_speakers", 0, "tokens: speakers of train, or their share, to be dev.", 0.0)
_DEV_UTTERANCES = flags.DEFINE_float("dev_utterances", 0, "tokens: utterances of train, or their share.", 0.0)
_ROW_LENGTH = flags.DEFINE_integer("row_length", _LIMITS.row_length, "tokens: positions of a packed row; the most.")
_MIN_SECONDS = flags.DEFINE_float("min_seconds", _LIMITS.min_seconds, "tokens: of an utterance, the least.")
_MAX_SECONDS = flags.DEFINE_float("max_seconds", _LIMITS.max_seconds, "tokens: the most.")
_MIN_CHARACTERS = flags.DEFINE_float("min_characters", _LIMITS.min_characters, "tokens: a second, the least.")
_MAX_CHARACTERS = flags.DEFINE_float("max_characters", _LIMITS.max_characters, "tokens: the most.")
_BEAM = flags.DEFINE_string("beam_options", None, "tokens: pipeline options; encodes with Apache Beam.")


def make_tokens(
    splits: Splits, recipe: shards.Recipe, out: Path, workers: int = 1, beam_options: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Writes the token dataset of `splits` and returns its report, a `records.Report` as dict for each split.

    Raises ValueError if a split has no utterance that can be used.
    """
    codec, aside = recipe.load(recipe.codec), out.with_name(out.name + ".shards")
    facts = dataset.CodecFacts(codec.vocab_size, codec.frame_rate, codec.sample_rate)
    aside.mkdir(parents=True, exist_ok=True)
    report: dict[str, dict[str, Any]] = {}

    def encoded(split: str, paths: list[Path]) -> Iterator[dataset.TokenRecord]:
        tally = records.Report()
        for name, found in itertools.chain.from_iterable(map(shards.read, paths)):
            tally.add(name, found)
            if isinstance(found, records.Kept):
                yield found.record
        report[split] = _usable(split, tally.asdict())

    if beam_options:
        from vadusa_jax.data.cluster import Encode  # the extra [beam]

        files = {split: aside / f"{split}.report.json" for split in splits}
        streams = {split: Encode(splits[split], recipe, file) for split, file in files.items()}
    else:
        paths, speed = shards.encode(splits, recipe, aside, workers)
        print(f"{speed:.0f} hours of audio per hour, {workers} processes, loading the codec included")
        streams = {split: encoded(split, paths[split]) for split in splits}

    def reported() -> dict[str, dict[str, Any]]:
        if beam_options:
            report.update({split: _usable(split, json.loads(file.read_text())) for split, file in files.items()})
        return report

    dataset.write_dataset(out, streams, Vocabulary.english(), facts, reported, beam_options)
    shutil.rmtree(aside)
    return report


def _usable(split: str, report: dict[str, Any]) -> dict[str, Any]:
    if not report["kept"]:
        reasons = {reason: left["names"] for reason, left in report["left_out"].items()}
        raise ValueError(f"split {split!r}: none of {report['found']} utterances can be used: {reasons}")
    return report


def main(argv: list[str]) -> None:
    tfds.disable_progress_bar()  # one bar, ours, is enough
    logging.set_verbosity(logging.WARNING)
    match argv[1:]:
        case ["corpus"]:
            speakers = find_speakers(None if _SPEAKERS.value == ["all"] else _SPEAKERS.value)
            print(f"further speakers: {', '.join(speakers) or 'none'}")
            seconds = demo_corpus.make_demo_corpus(
                _OUT.value, _HOURS.value, _SEED.value, _WORKERS.value, speakers, _HOURS_EACH.value
            )
            print("\n".join(f"{split:12}{s / 3600:8.2f} hours" for split, s in seconds.items()))
        case ["tokens"]:
            if not (_CORPUS.value and _CODEC.value):
                raise app.UsageError("tokens needs --corpus and --codec")
            splits = find_splits(_CORPUS.value, _SPLIT.value, _AUDIO.value)
            for by, amount in (("speaker", _DEV_SPEAKERS.value), ("key", _DEV_UTTERANCES.value)):
                splits = hold_out(splits, by, amount) if amount else splits
            limits = records.Limits(
                *(_MIN_SECONDS.value, _MAX_SECONDS.value, _MIN_CHARACTERS.value, _MAX_CHARACTERS.value),
                _ROW_LENGTH.value,
            )
            recipe = shards.Recipe(load_codec, _CODEC.value, limits, shards.hash_folder(_CODEC.value))
            beam_options = shlex.split(_BEAM.value or "")
            print(records.table(make_tokens(splits, recipe, Path(_OUT.value), _WORKERS.value, beam_options)))
        case ["bpe"]:
            if not (_TOKENS.value and _CODEC.value):
                raise app.UsageError("bpe needs --tokens and --codec")
            report = units.to_units(Path(_TOKENS.value), Path(_CODEC.value), _VOCAB.value, Path(_OUT.value))
            for split, r in report.items():
                print(f"{split:12}{r['tokens']:10} tokens{r['units']:10} units{r['units_per_token']:8.3f} for each")
        case _:
            raise app.UsageError(f"the first word must be corpus, tokens or bpe, got {argv[1:]}")


if __name__ == "__main__":
    app.run(main)
