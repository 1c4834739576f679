"""The backbone: a pre-norm decoder-only transformer (RMSNorm, rotary positions, SwiGLU, no biases).

It takes positions and a mask and knows neither draft heads nor trees: a packed training row, a prompt and a draft
tree differ only in what their tokens may see.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from vadusa_jax.config import ModelConfig
from vadusa_jax.model.attention import attend, packed_attention
from vadusa_jax.model.cache import KV, Cache
from vadusa_jax.model.products import lookup, product
from vadusa_jax.model.sharding import constrain


def rotation(positions_BT: jax.Array, half: int, theta: float, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles (arXiv 2104.09864), `[B, T, 1, half]`, from angles in float32."""
    frequency_H = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1H = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_H[None, None, None, :]
    # The barrier keeps XLA from computing them again inside every layer's fusions.
    return lax.optimization_barrier((jnp.cos(angle_BT1H).astype(dtype), jnp.sin(angle_BT1H).astype(dtype)))


def rotate(x_BTNH: jax.Array, by: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of each head against each other by the angles of `rotation`."""
    cos, sin = by
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Linear(nnx.Module):
    """A matrix product without a bias, computed in `dtype`."""

    def __init__(self, inputs: int, outputs: int, std: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.dtype = dtype
        self.kernel = nnx.Param(nnx.initializers.normal(std)(rngs.params(), (inputs, outputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return product(x.astype(self.dtype), self.kernel[...])


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind a norm and added back."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        width, ffn = config.width, config.ffn
        self.attention_heads = config.attention_heads
        residual_std = 0.02 / (2 * config.layers) ** 0.5  # the residual stream starts no louder with more layers

        def linear(inputs: int, outputs: int, std: float = 0.02) -> Linear:
            return Linear(inputs, outputs, std, dtype, rngs)

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)

        self.attention_norm = norm()
        self.q, self.k, self.v = linear(width, width), linear(width, width), linear(width, width)
        self.out = linear(width, width, residual_std)
        self.ffn_norm = norm()
        self.gate, self.up, self.down = linear(width, ffn), linear(width, ffn), linear(ffn, width, residual_std)

    def __call__(
        self, h_BTD: jax.Array, by: tuple[jax.Array, jax.Array], attend: Callable[..., tuple[jax.Array, KV | None]]
    ) -> tuple[jax.Array, KV | None]:
        x_BTD = self.attention_norm(h_BTD)
        split = (*x_BTD.shape[:2], self.attention_heads, -1)
        q_BTNH, k_BTNH = (rotate(x.reshape(split), by) for x in (self.q(x_BTD), self.k(x_BTD)))
        heads = (constrain(x, "heads_BTNH") for x in (q_BTNH, k_BTNH, self.v(x_BTD).reshape(split)))
        out_BTNH, kv = attend(*heads)
        h_BTD = constrain(h_BTD + self.out(out_BTNH.reshape(x_BTD.shape)), "hidden_BTD")
        x_BTD = self.ffn_norm(h_BTD)
        inner_BTF = constrain(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD), "inner_BTF")
        return constrain(h_BTD + self.down(inner_BTF), "hidden_BTD"), kv


@dataclasses.dataclass(frozen=True)
class Packed:
    """What tokens of packed training rows see: all before them in their own segment; no cache, and none is made."""

    segments_BT: jax.Array

    def __call__(self, q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> tuple[jax.Array, None]:
        return packed_attention(q_BTNH, k_BTNH, v_BTNH, self.segments_BT), None


@dataclasses.dataclass(frozen=True)
class Masked:
    """What tokens see in general: those of this call by a mask, and one layer's cache."""

    mask_BTT: jax.Array
    cached: KV | None
    seen_BTS: jax.Array | None

    def __call__(self, q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> tuple[jax.Array, KV]:
        batch, length, heads, _ = q_BTNH.shape
        q, k, v = (x.transpose(0, 2, 1, 3).reshape(batch * heads, length, -1) for x in (q_BTNH, k_BTNH, v_BTNH))
        out_GTH = attend(q, (k, v), self.mask_BTT, self.cached, self.seen_BTS)
        return out_GTH.reshape(batch, heads, length, -1).transpose(0, 2, 1, 3), (k, v)


def rematerialised(run: Callable, remat: str) -> Callable:
    """`run` with what it computes made again backward, as `train.remat` says."""
    if remat == "none":
        return run
    policies = {"blocks": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if remat not in policies:
        raise ValueError(f"train.remat must be 'none', 'dots' or 'blocks', got {remat!r}")
    return jax.checkpoint(run, policy=policies[remat])


class Backbone(nnx.Module):
    """Tokens to final normalised hidden states, and the LM head over speech tokens and EOS."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        if config.width % (2 * config.attention_heads):
            raise ValueError(
                f"width {config.width} must be an even multiple of attention_heads {config.attention_heads}"
            )
        init = nnx.initializers.normal(0.02)
        self.config = config
        self.dtype = dtype
        self.embedding = nnx.Param(init(rngs.params(), (config.vocab, config.width)))
        self.blocks = nnx.List([Block(config, dtype, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.lm_head = Linear(config.width, config.output_vocab, 0.02, dtype, rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        mask: jax.Array | Packed,
        cache: Cache | None = None,
        remat: str = "none",
    ) -> tuple[jax.Array, tuple[KV | None, ...]]:
        """Runs the tokens through all layers.

        Args:
            tokens_BT: ids in the model's vocabulary (speech tokens, EOS, text symbols).
            positions_BT: position of each token in its own sequence, below `max_length`.
            mask: what each token sees of the tokens in this call, itself included: `[B, T, T]`, or `Packed`.
            cache: committed positions that every token of the row sees as well; not with `Packed`.
            remat: what the backward pass makes again instead of keeping it (`train.remat`).

        Returns:
            h_BTD, the final normalised hidden states, and each layer's new keys and values (for the cache; with
            `Packed` none).
        """
        h_BTD = constrain(self.embed(tokens_BT), "hidden_BTD")
        seen_BTS = None
        if cache is not None:
            slots = jnp.arange(cache.values[0].shape[1])
            seen_BTS = jnp.broadcast_to(slots < cache.length_B[:, None, None], (*tokens_BT.shape, len(slots)))
        half = self.config.width // self.config.attention_heads // 2
        by = rotation(positions_BT, half, self.config.rope_theta, h_BTD.dtype)
        new = []
        for i, block in enumerate(self.blocks):  # unrolled: a scan over stacked layers would copy weights and cache
            cached = None if cache is None else (cache.keys[i], cache.values[i])
            sees = mask if isinstance(mask, Packed) else Masked(mask, cached, seen_BTS)
            h_BTD, kv = rematerialised(functools.partial(block, by=by, attend=sees), remat)(h_BTD)
            new.append(kv)
        return self.norm(h_BTD), tuple(new)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Embeddings `[B, T, D]` of tokens."""
        return lookup(self.embedding[...], tokens_BT).astype(self.dtype)

    def logits(self, h: jax.Array) -> jax.Array:
        """LM head: `[..., D]` to `[..., V]`, in float32 or wider."""
        logits = self.lm_head(h)
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
