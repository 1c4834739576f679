"""A dataset of speech tokens -> the same in acoustic BPE units, without its audio."""

from collections.abc import Iterator
from pathlib import Path

from vadusa_jax.data.dataset import CodecFacts, TokenRecord, open_dataset, write_dataset
from vadusa_jax.speech import load_codec
from vadusa_jax.speech.bpe import BpeCodec, train_units

CODEC = "codec"  # folder of the codec in units, inside the new dataset's


def to_units(tokens: Path, codec_folder: Path, vocab_size: int, out: Path) -> dict[str, dict]:
    """Makes units of the train split, writes the dataset in them with their codec, and returns its report.

    The report tells for each split how many tokens and units there are, and units for each token.
    """
    splits, vocabulary, facts = open_dataset(tokens)
    inner = load_codec(codec_folder)
    if inner.vocab_size != facts.speech_vocab:
        raise ValueError(f"{codec_folder} has {inner.vocab_size} tokens, those of {tokens} have {facts.speech_vocab}")
    units = train_units((record["speech"] for record in splits["train"]), inner.vocab_size, vocab_size)
    report: dict[str, dict] = {}

    def stream(split: str) -> Iterator[TokenRecord]:
        counts = {"tokens": 0, "units": 0}
        for record in splits[split]:
            speech = units.encode(record["speech"])
            counts["tokens"] += len(record["speech"])
            counts["units"] += len(speech)
            yield TokenRecord(
                **{name: record[name].decode() for name in ("id", "speaker", "text")},
                phones=record["phones"],
                speech=speech,
            )
        report[split] = counts | {"units_per_token": counts["units"] / counts["tokens"]}

    said = [(len(record["speech"]), len(units.encode(record["speech"]))) for record in splits["train"]]
    codec = BpeCodec(inner, units, sum(t for t, _ in said) / sum(u for _, u in said))
    new_facts = CodecFacts(codec.vocab_size, codec.frame_rate, facts.sample_rate)
    write_dataset(out, {split: stream(split) for split in splits}, vocabulary, new_facts, lambda: report)
    codec.save(out / CODEC)
    return report
