"""The one building block of the codec: a one-dimensional ConvNeXt stack (Liu et al., 2022; Siuzdak, 2023, for speech).

Its depthwise convolution is a sum of shifted copies: the same result as a grouped convolution, and many times faster
in XLA on a CPU.
"""

import jax
import jax.numpy as jnp
from flax import nnx


class ConvNeXtBlock(nnx.Module):
    """Depthwise convolution, norm and a two-layer network around a residual; masked positions stay zero."""

    def __init__(self, width: int, kernel: int, expansion: int, *, rngs: nnx.Rngs):
        self.taps = nnx.Param(jax.random.normal(rngs.params(), (kernel, width)) * kernel**-0.5)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, width * expansion, rngs=rngs)
        self.narrow = nnx.Linear(width * expansion, width, rngs=rngs)
        self.gain = nnx.Param(jnp.full((width,), 0.2, jnp.float32))  # a bare 0.2 is a weak type: another compilation

    def __call__(self, h_BTC: jax.Array, mask_BT1: jax.Array) -> jax.Array:
        mixed_BTC = shifted_sum(h_BTC, self.taps[...])
        update_BTC = self.narrow(nnx.gelu(self.widen(self.norm(mixed_BTC))))
        return (h_BTC + self.gain[...][None, None] * update_BTC) * mask_BT1


class ConvNeXt(nnx.Module):
    """Linear in, `layers` blocks of `width`, norm, linear out. Works on [B, T, inputs] -> [B, T, outputs]."""

    def __init__(self, inputs: int, outputs: int, width: int, layers: int, kernel: int, expansion: int, rngs: nnx.Rngs):
        self.enter = nnx.Linear(inputs, width, rngs=rngs)
        self.blocks = nnx.List([ConvNeXtBlock(width, kernel, expansion, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.leave = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, x_BTC: jax.Array, mask_BT: jax.Array, tint_B1C: jax.Array | float = 0.0) -> jax.Array:
        """`tint_B1C` is added everywhere before the first block."""
        return self.leave(self.norm(self.states(x_BTC, mask_BT, tint_B1C)[-1]))

    def states(self, x_BTC: jax.Array, mask_BT: jax.Array, tint_B1C: jax.Array | float = 0.0) -> list[jax.Array]:
        """What each block gives."""
        mask_BT1 = mask_BT[..., None]
        states = [(self.enter(x_BTC) + tint_B1C) * mask_BT1]
        for block in self.blocks:
            states.append(block(states[-1], mask_BT1))
        return states


def shifted_sum(h_BTC: jax.Array, taps_KC: jax.Array) -> jax.Array:
    """Depthwise convolution with zeros outside: out[t] = sum_i taps[i] * h[t + i - K // 2]."""
    kernel, steps = len(taps_KC), h_BTC.shape[1]
    padded = jnp.pad(h_BTC, ((0, 0), (kernel // 2, kernel - 1 - kernel // 2), (0, 0)))
    return sum(padded[:, i : i + steps] * taps_KC[i][None, None] for i in range(kernel))
