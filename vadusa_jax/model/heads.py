"""Medusa draft heads (arXiv 2401.10774): K small predictors that look further ahead than the LM head."""

import jax
import jax.numpy as jnp
from flax import nnx

from vadusa_jax.config import HeadsConfig, ModelConfig
from vadusa_jax.model.backbone import Backbone

HeadWeights = tuple[jax.Array, jax.Array, jax.Array]  # residual [L, K, D, D], bias [L, K, D], output [K, D, V]


class DraftHeads(nnx.Module):
    """Head k (k = 1..K) at position t predicts token t+1+k, from the final normalised hidden state h_t.

    Each head is `layers` residual blocks `h + SiLU(W h + b)` and an output matrix U. W and b start at zero, so a new
    head is exactly its output matrix. The heads are stacked on a leading axis and run as one einsum.
    """

    def __init__(self, config: HeadsConfig, model: ModelConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.dtype = dtype
        self.residual = nnx.Param(jnp.zeros((config.layers, config.count, model.width, model.width)))
        self.bias = nnx.Param(jnp.zeros((config.layers, config.count, model.width)))
        init = nnx.initializers.normal(0.02)
        self.output = nnx.Param(init(rngs.params(), (config.count, model.width, model.output_vocab)))

    def __call__(self, h: jax.Array, first: int | None = None) -> jax.Array:
        """`[..., D]` to the logits `[..., K, V]` of the `first` heads (default: all), in float32 or wider."""
        return draft_logits(h, self.first(first))

    def first(self, count: int | None) -> HeadWeights:
        """The weights of the first `count` heads (None: all): cut out once when decoding starts, not per step."""
        residual, bias, output = (p[...].astype(self.dtype) for p in (self.residual, self.bias, self.output))
        return residual[:, :count], bias[:, :count], output[:count]

    def one(self, h: jax.Array, k: int) -> jax.Array:
        """`[..., D]` to the logits `[..., V]` of head k = 1..K alone."""
        residual, bias, output = (p[...].astype(self.dtype) for p in (self.residual, self.bias, self.output))
        return draft_logits(h, (residual[:, k - 1 : k], bias[:, k - 1 : k], output[k - 1 : k]))[..., 0, :]


def draft_logits(h: jax.Array, weights: HeadWeights) -> jax.Array:
    """`[..., D]` to the logits `[..., K, V]` of the K heads whose weights are given, in float32 or wider."""
    residual, bias, output = weights
    z_KD = jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], output.shape[0], h.shape[-1]))
    for w_KDD, b_KD in zip(residual, bias, strict=True):
        z_KD = z_KD + jax.nn.silu(jnp.einsum("...KD,KDE->...KE", z_KD, w_KDD) + b_KD)
    logits_KV = jnp.einsum("...KD,KDV->...KV", z_KD, output)
    return logits_KV.astype(jnp.promote_types(logits_KV.dtype, jnp.float32))


class SpeechLM(nnx.Module):
    """Backbone and draft heads: the whole trainable model."""

    def __init__(self, model: ModelConfig, heads: HeadsConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.backbone = Backbone(model, dtype, rngs=rngs)
        self.heads = DraftHeads(heads, model, dtype, rngs=rngs)

    def copy_lm_head(self) -> None:
        """Starts every draft head as a copy of the LM head: how heads are added to a trained backbone (Medusa-1)."""
        lm_DV = self.backbone.lm_head.kernel[...]
        self.heads.output[...] = jnp.broadcast_to(lm_DV, self.heads.output.shape)
