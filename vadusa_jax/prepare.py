"""Makes what training reads: the spoken demo corpus, and the token dataset of any corpus in LibriTTS layout.

    python -m vadusa_jax.prepare corpus --hours 4 --out out/corpus
    python -m vadusa_jax.prepare tokens --corpus out/corpus --codec out/codec --out out/tokens
    python -m vadusa_jax.prepare tokens --corpus LibriTTS --split train=train-clean-100,train-clean-360 \\
        --split dev=dev-clean --codec out/codec --out out/tokens
    python -m vadusa_jax.prepare bpe --tokens out/tokens --codec out/codec --vocab 4096 --out out/units

`corpus` goes on where it was stopped. `tokens` leaves a complete dataset or none; inputs that cannot be used are left
out, counted by reason in the table, and listed in report.json. `bpe` turns a token dataset into acoustic BPE units,
without audio; the codec that speaks them is then OUT/codec.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import tensorflow_datasets as tfds
from absl import app, flags, logging
from tqdm import tqdm

from vadusa_jax.config import DataConfig
from vadusa_jax.data import corpora, dataset, records, units
from vadusa_jax.speech import load_codec
from vadusa_jax.text import Vocabulary

_OUT = flags.DEFINE_string("out", None, "Folder to write.", required=True)
_HOURS = flags.DEFINE_float("hours", 4.0, "corpus: hours of training speech.", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "corpus: decides the texts.")
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count(), "corpus: speaking processes, one core each.", lower_bound=1)
_CORPUS = flags.DEFINE_string("corpus", None, "tokens: folder of split folders, each <speaker>/<chapter>/*.wav.")
_CODEC = flags.DEFINE_string("codec", None, "tokens, bpe: folder of the codec.")
_TOKENS = flags.DEFINE_string("tokens", None, "bpe: folder of the token dataset.")
_VOCAB = flags.DEFINE_integer("vocab", 4096, "bpe: units, the codec's tokens included.", lower_bound=1)
_SPLIT = flags.DEFINE_multi_string(
    "split", [], "tokens: NAME=FOLDER[,FOLDER...]; without any, every folder of the corpus is a split."
)
_ROW_LENGTH = flags.DEFINE_integer(
    "row_length", DataConfig.row_length, "tokens: positions of a packed row; longer utterances are left out."
)


def split_folders(corpus: Path, given: list[str]) -> dict[str, list[Path]]:
    """Split names -> their folders; `given` entries are NAME=FOLDER[,FOLDER...] below `corpus`."""
    if not corpus.is_dir():
        raise FileNotFoundError(f"no corpus folder {corpus}")
    if given:
        pairs = [entry.partition("=") for entry in given]
        splits = {name: [corpus / folder for folder in folders.split(",")] for name, _, folders in pairs}
    else:
        splits = {folder.name: [folder] for folder in sorted(corpus.iterdir()) if any(folder.glob("*/*/*.wav"))}
    missing = {str(folder) for folders in splits.values() for folder in folders if not any(folder.glob("*/*/*.wav"))}
    if missing or not splits:
        raise FileNotFoundError(f"no <speaker>/<chapter>/*.wav below {sorted(missing) or corpus}")
    if bad := [name for name in splits if not name.isidentifier()]:
        raise ValueError(f"split names must be words, got {bad}: name them, for example --split train=train-clean-100")
    return splits


def make_tokens(corpus: Path, codec_folder: str, out: Path, given_splits: list[str], row_length: int) -> dict:
    """Writes the token dataset of `corpus` and returns its report, a `SplitReport` as dict for each split."""
    codec, vocabulary = load_codec(codec_folder), Vocabulary.english()
    folders = split_folders(corpus, given_splits)
    report: dict[str, dict] = {}

    def stream(split: str) -> Iterator[dataset.TokenRecord]:
        found = records.SplitReport()
        drawn = records.split_records(folders[split], codec, vocabulary, row_length, found)
        yield from _progress(drawn, split, folders[split])
        report[split] = found.asdict()
        if not found.kept:
            raise ValueError(f"split {split!r}: none of {found.found} utterances can be used: {found.skipped}")

    facts = dataset.CodecFacts(codec.vocab_size, codec.frame_rate, codec.sample_rate)
    dataset.write_dataset(out, {split: stream(split) for split in folders}, vocabulary, facts, report)
    return report


def _progress(drawn: Iterable, split: str, folders: list[Path]) -> Iterable:
    total = sum(1 for folder in folders for _ in folder.glob("*/*/*.wav"))
    return tqdm(drawn, desc=split, total=total, unit=" utterances", mininterval=1)


def table(report: dict[str, dict]) -> str:
    """The report as lines of text: one a split, and one for every reason to leave something out."""
    lines = [f"{'split':12}{'found':>8}{'kept':>8}{'resampled':>11}{'hours':>8}{'phones':>9}{'tokens':>10}"]
    for split, r in report.items():
        hours = r["seconds"] / 3600
        counts = f"{r['found']:8}{r['kept']:8}{r['resampled']:11}{hours:8.2f}{r['phones']:9}{r['speech_tokens']:10}"
        lines.append(f"{split:12}{counts}")
        lines += [f"    left out, {reason}: {count}" for reason, count in r["skipped_counts"].items()]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    tfds.disable_progress_bar()  # one bar, ours, is enough
    logging.set_verbosity(logging.WARNING)
    match argv[1:]:
        case ["corpus"]:
            seconds = corpora.make_demo_corpus(_OUT.value, _HOURS.value, _SEED.value, _WORKERS.value)
            print("\n".join(f"{split:12}{s / 3600:8.2f} hours" for split, s in seconds.items()))
        case ["tokens"]:
            if not (_CORPUS.value and _CODEC.value):
                raise app.UsageError("tokens needs --corpus and --codec")
            out = Path(_OUT.value)
            print(table(make_tokens(Path(_CORPUS.value), _CODEC.value, out, _SPLIT.value, _ROW_LENGTH.value)))
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
