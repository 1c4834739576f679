"""Tokens of any codec and the timbre of a reference -> waveform: mel decoder and vocoder."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vadusa_jax.speech import features
from vadusa_jax.speech.fsq import CodecConfig, Decoder, Timbre, log_mel
from vadusa_jax.speech.vocoder import Vocoder
from vadusa_jax.weights import load_weights, save_weights

BUCKET = 128  # tokens; lengths are padded to a multiple (or half of one), so that few shapes are ever compiled
LONGEST_REFERENCE = 30.0  # seconds: what comes after is not needed to know a timbre


@dataclasses.dataclass(frozen=True)
class Renderer:
    """Mel decoder, vocoder, and who speaks. Without a vocoder there is no sound yet."""

    config: CodecConfig
    decoder: Decoder
    vocoder: Vocoder | None = None
    timbre: Timbre | None = None
    timbre_E: np.ndarray | None = None  # who speaks; None: the usual speaker

    @property
    def receptive_field(self) -> int:
        """Every layer reaches half a kernel; a frame of the inverse STFT reaches half its hops."""
        config = self.config
        reach, overlap = config.kernel // 2, config.vocoder_fft // config.hop // 2
        frames = reach * (config.refiner_layers + config.vocoder_layers) + overlap
        return reach * config.decoder_layers + -(-frames // config.stack)

    @functools.cached_property
    def _sounding(self) -> tuple[nnx.GraphDef, nnx.State, nnx.GraphDef, nnx.State]:
        return *nnx.split(self.decoder), *nnx.split(self.vocoder)

    @functools.cached_property
    def _timbre_BE(self) -> jax.Array | None:
        if self.timbre is None:
            return None
        return (self.timbre.usual[...] if self.timbre_E is None else jnp.asarray(self.timbre_E))[None]

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        """Int tokens [T] -> float32 wave [T * token_samples]; no tokens make an empty wave."""
        tokens_T = np.asarray(tokens_T, np.int32)
        if tokens_T.ndim != 1:
            raise ValueError(f"expected tokens [T] of one utterance, got shape {tokens_T.shape}")
        if tokens_T.size and not 0 <= tokens_T.min() <= tokens_T.max() < self.config.vocab_size:
            largest = self.config.vocab_size - 1
            raise ValueError(f"tokens {tokens_T.min()}..{tokens_T.max()} are not all in 0..{largest}")
        if self.vocoder is None:
            raise ValueError("this codec was saved before its vocoder was trained: it encodes only")
        if not tokens_T.size:
            return np.zeros(0, np.float32)
        padded = np.zeros((1, bucket(len(tokens_T))), np.int32)
        padded[0, : len(tokens_T)] = tokens_T
        wave_BP = _decode(self.config, *self._sounding, padded, len(tokens_T), self._timbre_BE)
        return np.asarray(wave_BP)[0, : len(tokens_T) * self.config.token_samples]

    def like(self, wave_P: np.ndarray) -> "Renderer":
        """This renderer with the timbre of a float32 mono wave [P], of its first 30 seconds at most."""
        if self.timbre is None:
            return self
        return dataclasses.replace(self, timbre_E=self.timbre_of(wave_P))

    def timbre_of(self, wave_P: np.ndarray) -> np.ndarray:
        """The timbre [E] of a float32 mono wave [P]; raises BadAudio."""
        rate, step = self.config.sample_rate, self.config.token_samples
        wave_P = features.check_wave(wave_P, rate, rate)[: round(LONGEST_REFERENCE * rate)]
        count = -(-len(wave_P) // step)
        padded = np.zeros((1, bucket(count) * step), np.float32)
        padded[0, : len(wave_P)] = wave_P
        return np.asarray(_timbre(self.config, *nnx.split(self.timbre), padded, count))[0]

    def save(self, folder: Path) -> None:
        """Writes one float16 safetensors file per part; of timbres only the usual one, not that of `like`."""
        for name in ("decoder", "vocoder", "timbre"):
            if part := getattr(self, name):
                save_weights(part, folder / f"{name}.safetensors")

    def loaded(self, folder: Path) -> "Renderer":
        """This renderer, which may be of shapes alone, filled with what `save` wrote; a vocoder may be missing.

        Any mismatch is an error that names the parameter and both shapes.
        """
        load_weights(self.decoder, folder / "decoder.safetensors")
        if self.timbre is not None:
            load_weights(self.timbre, folder / "timbre.safetensors")
        if not (folder / "vocoder.safetensors").exists():
            return dataclasses.replace(self, vocoder=None)
        load_weights(self.vocoder, folder / "vocoder.safetensors")
        return self


def new_renderer(config: CodecConfig, seed: int | None) -> Renderer:
    """An untrained renderer; without a seed one of shapes alone, whose weights are to be loaded."""

    def parts() -> tuple[Decoder, Vocoder, Timbre | None]:
        rngs = nnx.Rngs((seed or 0) + 1)
        timbre = Timbre(config, rngs=rngs) if config.timbre else None
        return Decoder(config, rngs=rngs), Vocoder(config, rngs=rngs), timbre

    return Renderer(config, *(nnx.eval_shape(parts) if seed is None else parts()))


def bucket(count: int) -> int:
    """Tokens that a wave or an utterance of so many is padded to."""
    return BUCKET // 2 if count <= BUCKET // 2 else -(-count // BUCKET) * BUCKET


def token_mask(length: int, valid: jax.Array | int) -> jax.Array:
    """1 for the first `valid` of `length` tokens, `[1, length]`."""
    return (jnp.arange(length)[None] < valid).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _decode(config, decoder_graph, decoder_state, vocoder_graph, vocoder_state, tokens_BT, valid, timbre_BE):
    mask_BT, decoder = token_mask(tokens_BT.shape[1], valid), nnx.merge(decoder_graph, decoder_state)
    mel_BFM = decoder(decoder.embed(tokens_BT), mask_BT, timbre_BE)
    return nnx.merge(vocoder_graph, vocoder_state)(mel_BFM, jnp.repeat(mask_BT, config.stack, axis=1))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _timbre(config: CodecConfig, graph: nnx.GraphDef, state: nnx.State, wave_BP: jax.Array, valid: int) -> jax.Array:
    mel_BFM = log_mel(config, wave_BP)
    mask_BT = token_mask(wave_BP.shape[1] // config.token_samples, valid)
    return nnx.merge(graph, state)(mel_BFM, jnp.repeat(mask_BT, config.stack, axis=1))
