"""Log-mel <-> tokens: an encoder, a finite scalar quantiser (Mentzer et al., 2023, arXiv 2309.15505) and a decoder.

The quantiser has no code book to train: each of its few latent dimensions is squashed to a range and rounded to one of
`levels[d]` integers; a token is the mixed-radix number those integers spell. The decoder can be told who speaks, by the
timbre of a reference, so that the tokens need not say it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vadusa_jax.speech import features
from vadusa_jax.speech.convnext import ConvNeXt


@dataclasses.dataclass(frozen=True)
class Fsq:
    """The quantiser: `levels[d]` values in latent dimension d, prod(levels) codes."""

    levels: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return math.prod(self.levels)

    def squash(self, z: jax.Array) -> jax.Array:
        """Latents [..., D] to -0.5 .. levels[d] - 0.5: every digit owns an equal share of the sigmoid's range."""
        return jax.nn.sigmoid(z) * jnp.asarray(self.levels, jnp.float32).reshape((1,) * (z.ndim - 1) + (-1,)) - 0.5

    def round(self, squashed: jax.Array) -> jax.Array:
        """What `squash` gives to digits 0 .. levels[d] - 1 (floats), with the gradient of the squashing alone."""
        top = jnp.asarray(self.levels, jnp.float32).reshape((1,) * (squashed.ndim - 1) + (-1,)) - 1.0
        digits = jnp.clip(jnp.round(squashed), 0.0, top)
        return squashed + jax.lax.stop_gradient(digits - squashed)

    def centre(self, digits: jax.Array) -> jax.Array:
        """Digits [..., D] as decoder input, each dimension spread evenly over -1 .. 1."""
        top = jnp.asarray(self.levels, jnp.float32).reshape((1,) * (digits.ndim - 1) + (-1,)) - 1.0
        return digits * (2.0 / top) - 1.0

    def tokens(self, digits: jax.Array) -> jax.Array:
        """Digits [..., D] to int32 tokens [...]; the first digit is the least significant."""
        place = jnp.asarray(np.cumprod((1, *self.levels[:-1])), jnp.int32)
        return (jnp.round(digits).astype(jnp.int32) * place.reshape((1,) * (digits.ndim - 1) + (-1,))).sum(axis=-1)

    def digits(self, tokens: jax.Array) -> jax.Array:
        """Tokens [...] to digits [..., D] (floats): the inverse of `tokens`."""
        places = np.cumprod((1, *self.levels[:-1])).tolist()
        spelled = [tokens // place % level for place, level in zip(places, self.levels, strict=True)]
        return jnp.stack(spelled, axis=-1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class CodecConfig:
    """Sizes of a codec. Frames are `hop` samples; a token is `stack` frames."""

    sample_rate: int = 16_000
    hop: int = 160
    n_fft: int = 1024
    mels: int = 80
    stack: int = 2
    levels: tuple[int, ...] = (8, 5, 5, 5)  # (): the tokens are those of another codec,
    vocab: int = 0  # which has so many
    kernel: int = 7
    expansion: int = 3
    encoder_width: int = 256
    encoder_layers: int = 4
    decoder_width: int = 256
    decoder_layers: int = 4  # at the token rate
    refiner_layers: int = 2  # at the frame rate
    vocoder_width: int = 256
    vocoder_layers: int = 8
    vocoder_fft: int = 640
    timbre: int = 0  # numbers that tell who speaks, taken from a reference; 0: it is always the same speaker
    timbre_width: int = 128
    timbre_layers: int = 2

    def __post_init__(self):
        object.__setattr__(self, "levels", tuple(self.levels))  # JSON knows only lists
        if self.vocoder_fft % self.hop:
            raise ValueError(f"vocoder_fft {self.vocoder_fft} must be a multiple of hop {self.hop}")
        if bool(self.levels) == bool(self.vocab):
            raise ValueError(f"either levels {self.levels} or vocab {self.vocab} says what a token is")

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""
        return self.vocab or Fsq(self.levels).vocab_size

    @property
    def token_samples(self) -> int:
        """Waveform samples of one token."""
        return self.hop * self.stack


def log_mel(config: CodecConfig, wave_BP: jax.Array) -> jax.Array:
    """What the codec makes of waves [B, P]: log-mel [B, F, M], `stack` frames a token."""
    return features.log_mel(wave_BP, config.sample_rate, config.n_fft, config.hop, config.mels)


def to_unit(mel: jax.Array) -> jax.Array:
    """Log-mel (about -9.2 .. 0) scaled to about -1 .. 1 for the networks."""
    return mel / 3.0 + 1.9


def from_unit(unit: jax.Array) -> jax.Array:
    """The inverse of `to_unit`."""
    return (unit - 1.9) * 3.0


class Encoder(nnx.Module):
    """Log-mel [B, T * stack, M] -> digits [B, T, D]."""

    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.fsq, self.stack = Fsq(config.levels), config.stack
        self.body = ConvNeXt(
            config.mels * config.stack, len(config.levels), config.encoder_width, config.encoder_layers,
            config.kernel, config.expansion, rngs,
        )  # fmt: skip

    def squashed(self, mel_BFM: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """What is rounded to digits [B, T, D]."""
        batch, count, mels = mel_BFM.shape
        stacked = to_unit(mel_BFM).reshape(batch, count // self.stack, self.stack * mels)
        return self.fsq.squash(self.body(stacked, mask_BT))

    def __call__(self, mel_BFM: jax.Array, mask_BT: jax.Array) -> jax.Array:
        return self.fsq.round(self.squashed(mel_BFM, mask_BT))


class Timbre(nnx.Module):
    """Log-mel [B, F, M] of a reference -> its timbre [B, E], a mean over time of unit size; what it says is lost."""

    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.body = ConvNeXt(
            config.mels, config.timbre, config.timbre_width, config.timbre_layers, config.kernel, config.expansion, rngs
        )
        self.usual = nnx.Param(jnp.zeros(config.timbre))  # of who speaks where no reference is given

    def __call__(self, mel_BFM: jax.Array, mask_BF: jax.Array) -> jax.Array:
        h_BFE = self.body(to_unit(mel_BFM), mask_BF) * mask_BF[..., None]
        return unit_size(h_BFE.sum(axis=1) / mask_BF.sum(axis=1, keepdims=True))


def unit_size(timbre: jax.Array) -> jax.Array:
    """A timbre [..., E] with a root mean square of one."""
    return timbre * jax.lax.rsqrt(jnp.square(timbre).mean(axis=-1, keepdims=True) + 1e-6)


class Decoder(nnx.Module):
    """What tokens stand for, [B, T, D], and the timbre [B, E] of who says it -> log-mel [B, T * stack, M]."""

    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.levels, self.stack = config.levels, config.stack
        width, sizes = config.decoder_width, (config.kernel, config.expansion, rngs)
        if config.vocab:
            self.embedding = nnx.Embed(config.vocab, width, rngs=rngs)
        self.body = ConvNeXt(len(config.levels) or width, width * config.stack, width, config.decoder_layers, *sizes)
        self.refiner = ConvNeXt(width, config.mels, width, config.refiner_layers, *sizes)
        self.tints = nnx.List([nnx.Linear(config.timbre, width, rngs=rngs) for _ in range(2 * bool(config.timbre))])

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Tokens as the decoder takes them."""
        if not self.levels:
            return self.embedding(tokens_BT)
        fsq = Fsq(self.levels)
        return fsq.centre(fsq.digits(tokens_BT))

    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array, timbre_BE: jax.Array | None = None) -> jax.Array:
        body, refiner = (tint(timbre_BE)[:, None] for tint in self.tints) if self.tints else (0.0, 0.0)
        h_BTC = self.body(x_BTD, mask_BT, body)
        h_BFC = h_BTC.reshape(len(h_BTC), h_BTC.shape[1] * self.stack, -1)
        return from_unit(self.refiner(h_BFC, jnp.repeat(mask_BT, self.stack, axis=1), refiner))
