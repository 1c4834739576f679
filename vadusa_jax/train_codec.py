"""Makes codecs: trains the embedded one on a corpus, takes one from the hub, or gives one a voice.

    python -m vadusa_jax.train_codec --corpus out/corpus/train --out out/codec --minutes_codec 12 --minutes_vocoder 20

Tokens first, then the vocoder. After the first stage the folder holds a codec that encodes; after the second it decodes
as well. A stage whose result is there is skipped, so an interrupted run goes on where it can. `training.json` in the
folder tells what was done. Where the corpus has several speakers, the codec takes the timbre of a reference.

    python -m vadusa_jax.train_codec hub --model encodec --out out/codec
    python -m vadusa_jax.train_codec hub --model kyutai/mimi --codebooks 8 --out out/codec
    python -m vadusa_jax.train_codec kmeans --model hubert --layer 9 --clusters 500 --corpus LibriTTS/train-clean-100 \
        --out out/codec

`hub` takes encodec, dac, mimi, wavtokenizer, xcodec2 or neucodec, `kmeans` hubert, wav2vec2 or wavlm: the weights that
`speech/huggingface.py` lists, or any others of these kinds by hub name or folder (extra `[codecs]`). Processes of one
`kmeans` run (`training/hosts.py` says how they find each other) each read their share of the corpus; the first writes
the codec.

    python -m vadusa_jax.train_codec sound --codec out/kmeans --corpus LibriTTS/train-clean-100 --out out/codec

trains the same mel decoder and vocoder on the tokens of any other codec, so that semantic tokens become audible, in the
timbre of a reference: both stages of the embedded codec, without an encoder.

    python -m vadusa_jax.train_codec --init out/codec --corpus LibriTTS/train-clean-100 --out out/codec_more

trains an embedded codec further, on other speakers for example. Its tokens wander, and a language model of them has to
be trained anew; those of the speakers that `--keep NAME` gives stay nearly what they were, so that it only has to be
trained further.

    python -m vadusa_jax.train_codec codebooks --codec out/codec --corpus LibriTTS/train-clean-100 --out out/nar

trains the non-autoregressive stage that fills in the other codebooks of a codec with several (`model/nar.py`); `export
--nar` puts it into a voice. An interrupted run goes on from its last checkpoint in the folder; exit codes are those of
`train`. All codes are held in memory: about 4 MB for an hour of Mimi with 8 codebooks.
"""

import collections
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from jax.experimental import multihost_utils
from tqdm import tqdm

from vadusa_jax.config import TrainConfig
from vadusa_jax.data.corpora import Utterance
from vadusa_jax.data.records import LeftOut, Limits, read_utterance
from vadusa_jax.data.splits import open_corpus
from vadusa_jax.model.nar import NarConfig, save_nar
from vadusa_jax.speech import Codec, FsqCodec, load_codec
from vadusa_jax.speech.fsq import CodecConfig
from vadusa_jax.speech.recordings import Recording
from vadusa_jax.speech.rendered import RenderedCodec, sizes_for
from vadusa_jax.speech.stage import CodecTraining
from vadusa_jax.speech.training import train_decoder, train_tokens, train_vocoder
from vadusa_jax.text import UnspeakableText, Vocabulary, phonemize
from vadusa_jax.training import hosts
from vadusa_jax.training.nar import train_nar
from vadusa_jax.training.stopping import PREEMPTED, Preempted

DEFAULTS = CodecTraining()
TIMBRE = 64  # numbers of a timbre
CORPUS = flags.DEFINE_string(
    "corpus", None, "Folder <speaker>/<chapter>/<utterance>.wav, or the one that holds it as train."
)
OUT = flags.DEFINE_string("out", "out/codec", "Codec folder to write.")
MINUTES_CODEC = flags.DEFINE_float("minutes_codec", DEFAULTS.minutes_codec, "Training of the tokens.", 0.01)
MINUTES_VOCODER = flags.DEFINE_float("minutes_vocoder", DEFAULTS.minutes_vocoder, "Training of the vocoder.", 0.01)
SEED = flags.DEFINE_integer("seed", DEFAULTS.seed, "Seed of the parameters and of the order of the data.")
HOURS = flags.DEFINE_float("hours", None, "Use at most this much of the corpus, spread evenly.", 0.0)
MODEL = flags.DEFINE_string("model", None, "hub, kmeans: kind, hub name or folder of the model.")
CODEBOOKS = flags.DEFINE_integer("codebooks", 1, "hub: codebooks that are used; the first is for the backbone.", 1)
LAYER = flags.DEFINE_integer("layer", 9, "kmeans: hidden layer whose output is clustered.", 0)
CLUSTERS = flags.DEFINE_integer("clusters", 500, "kmeans: centres, one token each.", 1)
CODEC = flags.DEFINE_string("codec", None, "sound, codebooks: folder of the codec.")
STEPS = flags.DEFINE_integer("steps", TrainConfig.steps, "codebooks: steps of training.", 1)
DEPTH = flags.DEFINE_integer("depth", NarConfig.layers, "codebooks: layers of the stage.", 1)
WIDTH = flags.DEFINE_integer("width", NarConfig.width, "codebooks: width of the stage, 64 for each attention head.", 64)
flags.register_validator("width", lambda width: width % 64 == 0, "must be a multiple of 64")
INIT = flags.DEFINE_string("init", None, "Folder of an embedded codec to train further; its sizes are kept.")
KEEP = flags.DEFINE_list("keep", [], "Speakers of the corpus whose tokens --init leaves as they are, as far as it can.")
AGAIN = flags.DEFINE_bool("again", False, "Train a finished vocoder for some minutes more.")


def main(argv: list[str]) -> None:
    out, word = Path(OUT.value), argv[1:]
    needed = {
        "hub": {"model"},
        "kmeans": {"model", "corpus"},
        "sound": {"codec", "corpus"},
        "codebooks": {"codec", "corpus"},
    }
    if word and (len(word) > 1 or word[0] not in needed):
        raise app.UsageError(f"the first word must be hub, kmeans, sound, codebooks or none, got {word}")
    if missing := [name for name in needed[word[0]] if not flags.FLAGS[name].value] if word else not CORPUS.value:
        raise app.UsageError(f"{' '.join(word)} needs --{', --'.join(missing) if word else 'corpus'}")
    match word:
        case ["hub"]:
            from vadusa_jax.speech.huggingface import HubCodec

            HubCodec.fetch(MODEL.value, CODEBOOKS.value).save(out)
        case ["kmeans"]:
            with hosts.joined():
                make_kmeans(out)
        case ["codebooks"]:
            try:
                train_codebooks(out)
            except Preempted as notice:
                print(notice, file=sys.stderr)
                sys.exit(PREEMPTED)
        case _:
            train_sound(out, load_codec(CODEC.value) if word else None)


def make_kmeans(out: Path) -> None:
    """Clusters the corpus, each process its share."""
    from vadusa_jax.speech import kmeans
    from vadusa_jax.speech.huggingface import HubFeatures

    features = HubFeatures.fetch(MODEL.value, LAYER.value)
    share, reasons = _utterances(CORPUS.value)[jax.process_index() :: jax.process_count()], collections.Counter()
    heard = _heard(share, features.sample_rate, reasons, jax.process_count())
    frames = (features.extract(wave_P) for *_, wave_P in heard)
    centres = kmeans.fit(frames, CLUSTERS.value, SEED.value)
    if jax.process_count() > 1:
        gathered = multihost_utils.process_allgather((centres.centre_KD, centres.count_K))
        centres = kmeans.merge([kmeans.Centres(*part) for part in zip(*gathered, strict=True)], SEED.value)
    if hosts.is_first():
        kmeans.KmeansCodec(features, centres).save(out)
        print(
            f"{out}: {CLUSTERS.value} centres of {MODEL.value}, layer {LAYER.value}, {centres.count_K.sum():.0f} frames"
        )
    if reasons:
        print(f"skipped by process {jax.process_index()}: {dict(reasons)}")


def train_codebooks(out: Path) -> None:
    """Trains the non-autoregressive stage of a codec."""
    codec, vocabulary, reasons = load_codec(CODEC.value), Vocabulary.english(), collections.Counter()
    if getattr(codec, "codebooks", 1) < 2:
        raise app.UsageError(f"{CODEC.value} has one codebook: there is nothing to fill in")
    spoken = [
        (np.array(vocabulary.encode(phones)), codec.encode_all(wave_P))
        for _, phones, wave_P in _spoken(_utterances(CORPUS.value), codec.sample_rate, reasons)
    ]
    width = WIDTH.value
    sizes = {"layers": DEPTH.value, "width": width, "attention_heads": width // 64, "ffn": 11 * width // 4}
    config = NarConfig(codec.codebooks, codec.vocab_size, len(vocabulary), **sizes)
    nar, figures = train_nar(spoken, config, TrainConfig(steps=STEPS.value, seed=SEED.value), out)
    save_nar(out, nar)
    print(f"{out}: {len(spoken)} utterances, skipped: {dict(reasons) or 'none'}, {figures}")


def train_sound(out: Path, other: Codec | None) -> None:
    """Both stages of the embedded codec, or of what makes another one's tokens audible; those not there yet."""
    training = recipe()
    codec = load_codec(out) if (out / "codec.json").exists() else None
    start = load_codec(INIT.value) if INIT.value else None
    wanted = RenderedCodec if other else FsqCodec
    if codec and not isinstance(codec, wanted):
        raise app.UsageError(f"{out} holds a {type(codec).__name__}, a {wanted.__name__} is asked: give another --out")
    if start and other:
        raise app.UsageError("sound begins from nothing: it takes no --init")
    if start and not isinstance(start, FsqCodec):
        raise app.UsageError(f"--init trains an embedded codec further: {INIT.value} is a {type(start).__name__}")
    if KEEP.value and not start:
        raise app.UsageError("--keep is for the tokens of --init, which is not given")
    if codec and other:
        other = codec.inner  # whose tokens stage 1 learned
    if codec and "vocoder" in trained_stages(out) and not AGAIN.value:
        print(f"{out} is complete; --again trains its vocoder further")
        return
    config = start.config if start else sizes_for(other, CodecConfig()) if other else CodecConfig()
    vocabulary = Vocabulary.english()
    recordings = read_recordings(CORPUS.value, vocabulary, config.sample_rate)
    if other:
        encoded = tqdm(recordings, "encode", disable=None)
        recordings = [dataclasses.replace(one, tokens_T=other.encode(one.wave_P)) for one in encoded]
    if not config.timbre and len({recording.speaker for recording in recordings}) > 1:
        config = dataclasses.replace(config, timbre=TIMBRE)
    if codec is None:
        if other:
            renderer, figures = train_decoder(recordings, config, training)
            codec = RenderedCodec(other, renderer)
        else:
            codec, figures = train_tokens(recordings, len(vocabulary), config, training, start)
        save(codec, out, "tokens", figures)
    codec, figures = train_vocoder(codec, recordings, training)
    save(codec, out, "vocoder", figures)


def recipe() -> CodecTraining:
    """What the command line says of the training."""
    minutes = {"minutes_codec": MINUTES_CODEC.value, "minutes_vocoder": MINUTES_VOCODER.value}
    return dataclasses.replace(DEFAULTS, seed=SEED.value, **minutes)


def read_recordings(root: str, vocabulary: Vocabulary, sample_rate: int) -> list[Recording]:
    """Waves and phones of a corpus; what cannot be used is counted by reason and left out."""
    reasons = collections.Counter()
    recordings = [
        Recording(wave_P, vocabulary.encode(phones), speaker, speaker in KEEP.value)
        for speaker, phones, wave_P in _spoken(_utterances(root), sample_rate, reasons)
    ]
    hours = sum(len(one.wave_P) for one in recordings) / sample_rate / 3600
    print(f"{len(recordings)} recordings, {hours:.2f} h; skipped: {dict(reasons) or 'none'}")
    if not recordings:
        raise app.UsageError(f"{root} holds no usable recording")
    if strangers := set(KEEP.value) - {recording.speaker for recording in recordings}:
        raise app.UsageError(f"--keep: nothing usable of {', '.join(sorted(strangers))} in {root}")
    return recordings


def _utterances(root: str) -> list[Utterance]:
    """The utterances of a corpus or of its train folder, every chapter early."""
    train = Path(root) / "train"
    corpus = open_corpus(train if train.is_dir() else Path(root))
    if corpus is None:
        raise FileNotFoundError(f"{root} is no corpus; it should hold <speaker>/<chapter>/<utterance>.wav")
    return _spread(list(corpus))


def _heard(
    utterances: list[Utterance], sample_rate: int, reasons: collections.Counter, processes: int = 1
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Speaker, text and wave of each utterance that can be heard, up to a process's part of --hours of them.

    Those that cannot are counted in `reasons`.
    """
    seconds, most = 0.0, 3600 * HOURS.value / processes if HOURS.value else float("inf")
    for utterance in tqdm(utterances, "read", disable=None):
        if seconds >= most:
            return
        try:
            text, wave_P, _, _ = read_utterance(utterance, sample_rate, Limits())
        except LeftOut as error:
            reasons[error.reason] += 1
            continue
        seconds += len(wave_P) / sample_rate
        yield utterance.speaker, text, wave_P


def _spoken(
    utterances: list[Utterance], sample_rate: int, reasons: collections.Counter
) -> Iterator[tuple[str, str, np.ndarray]]:
    """Speaker, phones and wave of each utterance that can be heard and spoken; the others are counted in `reasons`."""
    for speaker, text, wave_P in _heard(utterances, sample_rate, reasons):
        try:
            yield speaker, phonemize(text), wave_P
        except UnspeakableText:
            reasons["unspeakable text"] += 1


def trained_stages(folder: Path) -> dict:
    """What `training.json` tells: figures by stage, and with `--init` those of the codec at the start."""
    report = folder / "training.json"
    return json.loads(report.read_text()) if report.exists() else {}


def save(codec: Codec, out: Path, stage: str, figures: dict[str, float]) -> None:
    """Replaces the codec folder, and tells what was trained."""
    told = trained_stages(out)
    if INIT.value and not told:
        told = {"start": trained_stages(Path(INIT.value))}
    codec.save(out)
    fresh = out / ".training.json"
    fresh.write_text(
        json.dumps(told | {stage: {"corpus": Path(CORPUS.value).resolve().name} | figures}, indent=2) + "\n"
    )
    os.replace(fresh, out / "training.json")
    print(f"{out}: {stage} trained, {', '.join(f'{key} {value:.3f}' for key, value in figures.items())}")


def _spread(utterances: list[Utterance]) -> list[Utterance]:
    """Every chapter early: a stride through the sorted list, so that any first part is a sample of all."""
    stride = 97
    return [utterance for start in range(stride) for utterance in utterances[start::stride]]


if __name__ == "__main__":
    app.run(main)
