"""The KV cache: what the backbone remembers of the committed positions, and nothing else.

Drafted nodes never enter the cache. A pass over the draft tree attends to the cache *and* to the tree's own keys
and values; afterwards only the accepted path is written behind the committed positions. A rejected draft therefore
costs no clean-up, and the cache needs room for one path, not for a whole tree.

A path waits beside the slots until the next pass begins: written before anything reads the slots, it is written in
place. Written at the end of its own pass, whose attention reads the same slots in no fixed order, it would make XLA
copy the whole cache first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from vadusa_jax.config import ModelConfig

KV = tuple[jax.Array, jax.Array]  # k_GTH, v_GTH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys `[G, H, S]` and values `[G, S, H]` of each layer: the two products of attention read both row by row.

    G counts the attention heads of all rows, row after row. Rows and heads share an axis, since XLA would otherwise
    strip a batch of one from what it reads and not from what it writes, and copy the cache in between.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length_B: jax.Array  # committed positions of each row; slots from there on hold rubbish that no query sees
    path: tuple[KV, ...]  # each layer's keys and values `[G, J, H]` of the path that waits to be written
    path_B: jax.Array  # positions of it that are accepted


def empty(model: ModelConfig, batch: int, slots: int, path: int, dtype: jnp.dtype) -> Cache:
    """A cache with `slots` free slots a row, and room for paths of `path` positions."""

    heads, size = batch * model.attention_heads, model.width // model.attention_heads

    def zeros(*shape: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((heads, *shape), dtype) for _ in range(model.layers))

    none_B = jnp.zeros((batch,), jnp.int32)
    waiting = tuple(zip(zeros(path, size), zeros(path, size), strict=True))
    return Cache(zeros(size, slots), zeros(slots, size), none_B, waiting, none_B)


def grow(cache: Cache) -> Cache:
    """The cache with twice the slots."""

    def double(x_GXX: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x_GXX, [(0, x_GXX.shape[a] if a == axis else 0) for a in range(3)])

    keys, values = (tuple(double(x, axis) for x in xs) for xs, axis in ((cache.keys, 2), (cache.values, 1)))
    return dataclasses.replace(cache, keys=keys, values=values)


def append(cache: Cache, new: tuple[KV, ...], count_B: jax.Array) -> Cache:
    """Writes the new positions `[G, J, H]` of each layer behind each row and keeps the first `count_B` of them.

    All J positions are written (static shapes); those past `count_B` are overwritten by the next append. The caller
    guarantees `length_B + J <= S`: a slice update past the end would be moved back over committed slots.
    """
    at_B = cache.length_B
    keys = tuple(_write(old, k.swapaxes(1, 2), at_B, axis=2) for old, (k, _) in zip(cache.keys, new, strict=True))
    values = tuple(_write(old, v, at_B, axis=1) for old, (_, v) in zip(cache.values, new, strict=True))
    return dataclasses.replace(cache, keys=keys, values=values, length_B=cache.length_B + count_B)


def accept(cache: Cache, new: tuple[KV, ...], path_BJ: jax.Array, count_B: jax.Array) -> Cache:
    """Takes the first `count_B` nodes of `path_BJ` out of the tree's keys and values `[G, T, H]`, for `flush`."""
    if new[0][0].shape[1] == 1:  # plain decoding: the root is the whole path
        return dataclasses.replace(cache, path=new, path_B=count_B)
    index_GJH = jnp.repeat(path_BJ, len(new[0][0]) // len(path_BJ), axis=0)[..., None]
    path = jax.tree.map(lambda x_GTH: jnp.take_along_axis(x_GTH, index_GJH, axis=1), new)
    return dataclasses.replace(cache, path=path, path_B=count_B)


def flush(cache: Cache) -> Cache:
    """Writes the waiting path; to be called before a pass reads the cache."""
    return dataclasses.replace(append(cache, cache.path, cache.path_B), path_B=jnp.zeros_like(cache.path_B))


def _write(old_GXX: jax.Array, new_GXX: jax.Array, start_B: jax.Array, axis: int) -> jax.Array:
    # One in-place slice update a row: a vmapped update becomes a scatter, which XLA's CPU backend runs element-wise.
    heads = len(new_GXX) // len(start_B)
    for b in range(len(start_B)):
        at = [jnp.zeros((), start_B.dtype)] * 3
        at[0], at[axis] = jnp.asarray(b * heads, start_B.dtype), start_B[b]
        old_GXX = lax.dynamic_update_slice(old_GXX, new_GXX[b * heads : (b + 1) * heads], at)
    return old_GXX
