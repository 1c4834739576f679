"""Draft heads: K small predictors that look further ahead than the LM head."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from vadusa_jax.config import HeadsConfig, ModelConfig
from vadusa_jax.model.backbone import Backbone
from vadusa_jax.model.products import product

HeadWeights = tuple[jax.Array, jax.Array, jax.Array]  # residual [L, K, D, D], bias [L, K, D], output [K, D, V]


class DraftHeads(nnx.Module):
    """Medusa heads (arXiv 2401.10774): they look at the final normalised hidden state alone.

    Head k (k = 1..K) at position t predicts token t+1+k. Each head is `layers` residual blocks `h + SiLU(W h + b)` and
    an output matrix U. W and b start at zero, so a new head is exactly its output matrix. The heads are stacked on a
    leading axis and run as one einsum.
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
        for w_KDD, b_KD in zip(self.residual[...], self.bias[...], strict=True):
            h = h + jax.nn.silu(product(h, w_KDD[k - 1]) + b_KD[k - 1].astype(self.dtype))
        logits = product(h, self.output[k - 1])
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def each(self, h: jax.Array, embedded: Callable[[int], jax.Array]) -> Iterator[jax.Array]:
        """Logits `[..., V]` of head after head: all at once would be K times larger. `embedded` is not needed."""
        for k in range(1, self.output.shape[0] + 1):
            yield self.one(h, k)


def draft_logits(h: jax.Array, weights: HeadWeights) -> jax.Array:
    """`[..., D]` to the logits `[..., K, V]` of the K heads whose weights are given, in float32 or wider."""
    residual, bias, output = weights
    z_KD = jnp.broadcast_to(h[..., None, :], (*h.shape[:-1], output.shape[0], h.shape[-1]))
    for w_KDD, b_KD in zip(residual, bias, strict=True):
        z_KD = z_KD + jax.nn.silu(jnp.einsum("...KD,KDE->...KE", z_KD, w_KDD) + b_KD)
    logits_KV = jnp.einsum("...KD,KDV->...KV", z_KD, output)
    return logits_KV.astype(jnp.promote_types(logits_KV.dtype, jnp.float32))


class SequentialHeads(nnx.Module):
    """Draft heads in sequence (after Hydra, arXiv 2402.05109): head k also sees the k tokens behind position t.

    Head k takes the state z of head k-1 (the hidden state h_t for the first) and the embedding e of token t+k:
    `z + SiLU(W z + E e + b)`, then an output matrix. W, E and b start at zero, so a new head is its output matrix.
    """

    def __init__(self, config: HeadsConfig, model: ModelConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.dtype = dtype
        self.residual = nnx.Param(jnp.zeros((config.count, model.width, model.width)))
        self.context = nnx.Param(jnp.zeros((config.count, model.width, model.width)))
        self.bias = nnx.Param(jnp.zeros((config.count, model.width)))
        init = nnx.initializers.normal(0.02)
        self.output = nnx.Param(init(rngs.params(), (config.count, model.width, model.output_vocab)))

    def follow(self, k: int, z: jax.Array, embedded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """State `[..., D]` and logits `[..., V]` of head k, from head k-1's state and the embedding of token t+k."""
        parts = (self.residual, self.context, self.bias, self.output)
        residual_DE, context_DE, bias_E, output_DV = (p[k - 1] for p in parts)
        z = z + jax.nn.silu(product(z, residual_DE) + product(embedded, context_DE) + bias_E.astype(self.dtype))
        logits = product(z, output_DV)
        return z, logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def each(self, h: jax.Array, embedded: Callable[[int], jax.Array]) -> Iterator[jax.Array]:
        """Logits `[..., V]` of head after head; `embedded(k)` gives the embeddings of the tokens k further on."""
        for k in range(1, self.output.shape[0] + 1):
            h, logits = self.follow(k, h, embedded(k))
            yield logits


HEADS = {"medusa": DraftHeads, "hydra": SequentialHeads}


class SpeechLM(nnx.Module):
    """Backbone and draft heads: the whole trainable model. With `heads.count` 0 it is the backbone alone."""

    def __init__(self, model: ModelConfig, heads: HeadsConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.backbone = Backbone(model, dtype, rngs=rngs)
        if heads.kind not in HEADS:
            raise ValueError(f"heads.kind must be one of {sorted(HEADS)}, got {heads.kind!r}")
        self.head_count = heads.count
        self.heads = HEADS[heads.kind](heads, model, dtype, rngs=rngs) if heads.count else None

    def copy_lm_head(self) -> None:
        """Starts every draft head as a copy of the LM head: how heads are added to a trained backbone (Medusa-1)."""
        if self.heads is None:
            return
        lm_DV = self.backbone.lm_head.kernel[...]
        self.heads.output[...] = jnp.broadcast_to(lm_DV, self.heads.output.shape)
