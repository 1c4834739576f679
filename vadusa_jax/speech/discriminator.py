"""Tells recorded waves from made ones, so that the vocoder learns what its spectral losses cannot say.

A small network looks at the log spectrum of each resolution (as UnivNet's, arXiv 2106.07889), frequencies as channels:
matrix products alone, which a CPU is good at. Hinge losses and feature matching as in SoundStream (arXiv 2107.03312).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vadusa_jax.speech import features
from vadusa_jax.speech.convnext import ConvNeXt
from vadusa_jax.speech.fsq import to_unit
from vadusa_jax.speech.vocoder import QUIET, RESOLUTIONS

Seen = list[list[jax.Array]]  # of each resolution, what the blocks give, [B, F, C], and the verdict [B, F, 1]


class Discriminator(nnx.Module):
    """Wave [B, P] -> what each resolution's network makes of it; a positive verdict says recorded."""

    def __init__(self, width: int, layers: int, kernel: int, *, rngs: nnx.Rngs):
        self.bodies = nnx.List(
            [ConvNeXt(n_fft // 2 + 1, 1, width, layers, kernel, 2, rngs) for n_fft, _ in RESOLUTIONS]
        )

    def __call__(self, wave_BP: jax.Array) -> Seen:
        seen = []
        for body, resolution in zip(self.bodies, RESOLUTIONS, strict=True):
            spectrum_BFC = to_unit(jnp.log(features.magnitude(wave_BP, *resolution) + QUIET))
            states = body.states(spectrum_BFC, jnp.ones(spectrum_BFC.shape[:2]))
            seen.append([*states[1:], body.leave(body.norm(states[-1]))])
        return seen


def judging_loss(made: Seen, recorded: Seen) -> jax.Array:
    """Hinge loss of the discriminator."""
    margins = [nnx.relu(1 + m[-1]).mean() + nnx.relu(1 - r[-1]).mean() for m, r in zip(made, recorded, strict=True)]
    return sum(margins) / len(margins)


def deceiving_loss(made: Seen) -> jax.Array:
    """Hinge loss of the vocoder."""
    return sum(nnx.relu(1 - m[-1]).mean() for m in made) / len(made)


def matching_loss(made: Seen, recorded: Seen) -> jax.Array:
    """How far what the blocks give lies apart, over how large it is."""
    pairs = [pair for m, r in zip(made, recorded, strict=True) for pair in zip(m[:-1], r[:-1], strict=True)]
    apart = [jnp.abs(a - jax.lax.stop_gradient(b)).mean() / jax.lax.stop_gradient(jnp.abs(b).mean()) for a, b in pairs]
    return sum(apart) / len(apart)
