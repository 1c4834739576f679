"""The codec protocol, codec folders, and the embedded codec: one token of 1,000 every 20 ms."""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from vadusa_jax import config as configs
from vadusa_jax.speech import features
from vadusa_jax.speech.fsq import CodecConfig, Encoder, Fsq, log_mel
from vadusa_jax.speech.renderer import Renderer, bucket, new_renderer, token_mask
from vadusa_jax.weights import load_weights, save_weights

VERSION = 1
INNER = "inner"  # folder of the codec that another one is made of
KINDS = {  # what codec.json may name, and its class: each is imported only where it is met
    "fsq": ("vadusa_jax.speech.codec", "FsqCodec"),
    "kmeans": ("vadusa_jax.speech.kmeans", "KmeansCodec"),
    "hub": ("vadusa_jax.speech.huggingface", "HubCodec"),
    "bpe": ("vadusa_jax.speech.bpe", "BpeCodec"),
    "rendered": ("vadusa_jax.speech.rendered", "RenderedCodec"),
}


class Codec(Protocol):
    """Waveform <-> speech tokens. Everything above this room knows no more of a codec than this."""

    @property
    def frame_rate(self) -> float:
        """Tokens per second."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""

    @property
    def sample_rate(self) -> int:
        """Samples per second of every waveform that goes in or comes out."""

    @property
    def receptive_field(self) -> int:
        """Tokens on each side of a token that its sound depends on, or nearly so (see `stream.render`)."""

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        """Float32 mono wave [P] -> int32 tokens [ceil(P * frame_rate / sample_rate)]; raises BadAudio."""

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        """Tokens [T] -> float32 wave [T * sample_rate / frame_rate]; with acoustic BPE that long on average."""

    def like(self, wave_P: np.ndarray) -> "Codec":
        """This codec with the timbre of a float32 mono wave; itself if its tokens carry the timbre."""

    def save(self, folder: str | Path) -> None:
        """Writes the folder that `load_codec` reads, whole or not at all."""


def plain(codec: Codec, chunks: Iterable[np.ndarray]) -> tuple[Codec, Iterable[np.ndarray]]:
    """A codec whose tokens all last equally long, and the chunks [n] of tokens in its terms."""
    if units := getattr(codec, "units", None):  # acoustic BPE
        return codec.inner, map(units.decode, chunks)
    return codec, chunks


@dataclasses.dataclass(frozen=True)
class FsqCodec:
    """Encoder with finite scalar quantiser, and what makes sound of its tokens."""

    encoder: Encoder
    renderer: Renderer

    @property
    def config(self) -> CodecConfig:
        return self.renderer.config

    @property
    def frame_rate(self) -> float:
        return self.config.sample_rate / self.config.token_samples

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def sample_rate(self) -> int:
        return self.config.sample_rate

    @property
    def receptive_field(self) -> int:
        return self.renderer.receptive_field

    @functools.cached_property
    def _coding(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(self.encoder)  # once: splitting anew adds a quarter to the time of a short window

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        """Float32 mono wave [P] -> int32 tokens [ceil(P / 320)]; the last token is filled up with silence."""
        wave_P = features.check_wave(wave_P, self.sample_rate, self.sample_rate)
        count = -(-len(wave_P) // self.config.token_samples)
        padded = np.zeros((1, bucket(count) * self.config.token_samples), np.float32)
        padded[0, : len(wave_P)] = wave_P
        return np.asarray(_encode(self.config, *self._coding, padded, count))[0, :count]

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        """Int tokens [T] -> float32 wave [T * 320]; no tokens make an empty wave."""
        return self.renderer.decode(tokens_T)

    def like(self, wave_P: np.ndarray) -> "FsqCodec":
        return dataclasses.replace(self, renderer=self.renderer.like(wave_P))

    def save(self, folder: str | Path) -> None:
        """Writes `codec.json` and one float16 safetensors file per part."""
        with codec_folder(folder, "fsq", dataclasses.asdict(self.config)) as fresh:
            save_weights(self.encoder, fresh / "encoder.safetensors")
            self.renderer.save(fresh)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> "FsqCodec":
        """What `save` wrote; any mismatch is an error that names the parameter and both shapes."""
        codec = new_codec(configs.from_dict(CodecConfig, config), seed=None)
        load_weights(codec.encoder, folder / "encoder.safetensors")
        return cls(codec.encoder, codec.renderer.loaded(folder))


@contextlib.contextmanager
def codec_folder(folder: str | Path, kind: str, config: dict[str, Any]) -> Iterator[Path]:
    """A fresh folder, to be filled; with its `codec.json` it takes the place of `folder` when all went well."""
    folder = Path(folder)
    fresh, stale = folder.with_name(f".{folder.name}.fresh"), folder.with_name(f".{folder.name}.stale")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    facts = {"version": VERSION, "codec": kind, "config": config}
    (fresh / "codec.json").write_text(json.dumps(facts, indent=2) + "\n")
    if folder.exists():
        os.replace(folder, stale)
    os.replace(fresh, folder)
    shutil.rmtree(stale, ignore_errors=True)


def load_codec(folder: str | Path) -> Codec:
    """The codec of a folder, whatever its kind: `codec.json` names it."""
    folder = Path(folder)
    if not (folder / "codec.json").exists():
        raise ValueError(f"{folder} holds no codec.json: not a codec folder")
    facts = json.loads((folder / "codec.json").read_text())
    if facts.get("version") != VERSION or facts.get("codec") not in KINDS:
        raise ValueError(
            f"{folder}/codec.json is version {facts.get('version')} of codec {facts.get('codec')!r}; "
            f"this code reads version {VERSION} of {sorted(KINDS)}"
        )
    room, name = KINDS[facts["codec"]]
    return getattr(importlib.import_module(room), name).load(folder, facts["config"])


def new_codec(config: CodecConfig, seed: int | None) -> FsqCodec:
    """An untrained codec; without a seed one of shapes alone, whose weights are to be loaded."""

    def encoder() -> Encoder:
        return Encoder(config, rngs=nnx.Rngs(seed or 0))

    return FsqCodec(nnx.eval_shape(encoder) if seed is None else encoder(), new_renderer(config, seed))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _encode(config: CodecConfig, graph: nnx.GraphDef, state: nnx.State, wave_BP: jax.Array, valid: int) -> jax.Array:
    encoder = nnx.merge(graph, state)
    mel_BFM = log_mel(config, wave_BP)
    digits_BTD = encoder(mel_BFM, token_mask(wave_BP.shape[1] // config.token_samples, valid))
    return Fsq(config.levels).tokens(digits_BTD)
