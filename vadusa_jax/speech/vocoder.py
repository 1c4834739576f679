"""Log-mel -> waveform: ConvNeXt blocks at the frame rate and an inverse-STFT head (Vocos, arXiv 2306.00814).

The losses compare spectra at several resolutions (Yamamoto et al., 2020, arXiv 1910.11480) and the log-mel itself;
a discriminator judges beside them (`discriminator.py`).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vadusa_jax.speech import features
from vadusa_jax.speech.convnext import ConvNeXt
from vadusa_jax.speech.fsq import CodecConfig, to_unit

RESOLUTIONS = ((256, 64), (512, 128), (1024, 256))  # n_fft, hop
QUIET = 1e-5  # amplitude under which log spectra are not compared


class Vocoder(nnx.Module):
    """Log-mel [B, F, M] -> wave [B, F * hop]."""

    def __init__(self, config: CodecConfig, *, rngs: nnx.Rngs):
        self.hop, bins = config.hop, config.vocoder_fft // 2 + 1
        self.body = ConvNeXt(
            config.mels, 2 * bins, config.vocoder_width, config.vocoder_layers, config.kernel, config.expansion, rngs
        )

    def __call__(self, mel_BFM: jax.Array, mask_BF: jax.Array) -> jax.Array:
        size, phase = jnp.split(self.body(to_unit(mel_BFM), mask_BF), 2, axis=-1)
        spectrum = jnp.exp(jnp.minimum(size, 6.0)) * jnp.exp(1j * phase)
        return features.istft(spectrum, self.hop, mask_BF)


def spectral_loss(wave_BP: jax.Array, target_BP: jax.Array) -> jax.Array:
    """Spectral convergence plus L1 of log magnitudes, averaged over the resolutions."""
    return sum(_distance(wave_BP, target_BP, *resolution) for resolution in RESOLUTIONS) / len(RESOLUTIONS)


def _distance(wave_BP: jax.Array, target_BP: jax.Array, n_fft: int, hop: int) -> jax.Array:
    made, wanted = (features.magnitude(w, n_fft, hop) for w in (wave_BP, target_BP))
    convergence = jnp.linalg.norm(made - wanted) / (jnp.linalg.norm(wanted) + 1e-3)
    return convergence + jnp.abs(jnp.log(made + QUIET) - jnp.log(wanted + QUIET)).mean()
