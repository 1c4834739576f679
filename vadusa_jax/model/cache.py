"""The KV cache: what the backbone remembers of the committed positions, and nothing else.

Drafted nodes never enter the cache. A pass over the draft tree attends to the cache *and* to the tree's own keys
and values; afterwards only the accepted path is written behind the committed positions. A rejected draft therefore
costs no clean-up, and the cache needs room for one path, not for a whole tree.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from vadusa_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of each layer (`[B, N, S, H]`, heads before slots so that no step transposes them)."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length_B: jax.Array  # committed positions of each row; slots from there on hold rubbish that no query sees


def empty(model: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> Cache:
    """A cache with `slots` free slots a row."""
    shape_BNSH = (batch, model.attention_heads, slots, model.width // model.attention_heads)
    keys = tuple(jnp.zeros(shape_BNSH, dtype) for _ in range(model.layers))
    values = tuple(jnp.zeros(shape_BNSH, dtype) for _ in range(model.layers))
    return Cache(keys, values, jnp.zeros((batch,), jnp.int32))


def append(cache: Cache, new: tuple[tuple[jax.Array, jax.Array], ...], count_B: jax.Array) -> Cache:
    """Writes the new positions `[B, N, J, H]` of each layer behind each row and keeps the first `count_B` of them.

    All J positions are written (static shapes); those past `count_B` are overwritten by the next append. The caller
    guarantees `length_B + J <= S`: a slice update past the end would be moved back over committed slots.
    """
    keys = tuple(_write(old, k, cache.length_B) for old, (k, _) in zip(cache.keys, new, strict=True))
    values = tuple(_write(old, v, cache.length_B) for old, (_, v) in zip(cache.values, new, strict=True))
    return Cache(keys, values, cache.length_B + count_B)


def take_path(
    new: tuple[tuple[jax.Array, jax.Array], ...], path_BJ: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Picks the nodes `path_BJ` out of the tree's keys and values `[B, N, T, H]`, in path order."""
    index_BNJH = path_BJ[:, None, :, None]
    return tuple(
        (jnp.take_along_axis(k, index_BNJH, axis=2), jnp.take_along_axis(v, index_BNJH, axis=2)) for k, v in new
    )


def _write(old_BNSH: jax.Array, new_BNJH: jax.Array, start_B: jax.Array) -> jax.Array:
    # One in-place slice update a row: a vmapped update becomes a scatter, which XLA's CPU backend runs element-wise.
    for b in range(old_BNSH.shape[0]):
        at = [jnp.asarray(i, start_B.dtype) for i in (b, 0, start_B[b], 0)]
        old_BNSH = lax.dynamic_update_slice(old_BNSH, new_BNJH[b : b + 1], at)
    return old_BNSH
