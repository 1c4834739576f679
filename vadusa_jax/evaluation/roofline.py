"""What a decode step cannot do without: the bytes it must move, the bandwidth they move at, and one bare pass.

Also counts what should not happen while decoding: compilation, and fetching from the device.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from vadusa_jax.config import ModelConfig
from vadusa_jax.decode.tree import Tree
from vadusa_jax.model import cache as kv
from vadusa_jax.model.compiler import jit_for_decoding
from vadusa_jax.model.heads import SpeechLM

STREAM_BYTES = 256 * 2**20  # far more than a last-level cache holds
READS = 16  # 0.1 to 0.2 s on a CPU


def measure_bandwidth() -> float:
    """Bytes a second at which a large array is summed, over and over: what the weights could stream at.

    It is the mean over READS, as a step's time is over the steps: the fastest of a few would be of moments at which
    nothing else ran. A sum reads faster than a matrix-vector product does (by a fifth on a CPU), so that it is nearer
    to what the memory gives.
    """
    stream, began = _stream(), time.perf_counter()
    jax.block_until_ready([_read(stream) for _ in range(READS)])
    return READS * stream.nbytes / (time.perf_counter() - began)


@functools.cache
def _stream() -> jax.Array:
    stream = jnp.ones((STREAM_BYTES // 4,), jnp.float32)
    jax.block_until_ready(_read(stream))  # compiles
    return stream


_read = jax.jit(jnp.sum)


def weight_bytes(lm: SpeechLM, heads: int) -> int:
    """Bytes of the parameters that one step reads: backbone, LM head and the first `heads` draft heads.

    Of the embedding table a step reads one row a node, which is left out.
    """
    backbone = _nbytes(lm.backbone) - lm.backbone.config.vocab * lm.backbone.config.width * _itemsize(lm)
    # Every parameter of the heads has one slice a head.
    return backbone + (_nbytes(lm.heads) * heads // lm.head_count if heads else 0)


def _nbytes(module: nnx.Module) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _itemsize(lm: SpeechLM) -> int:
    return jax.tree.leaves(nnx.state(lm.backbone, nnx.Param))[0].dtype.itemsize


def cache_bytes(model: ModelConfig, positions: float, dtype: jnp.dtype) -> float:
    """Bytes of the keys and values of so many positions, over all layers."""
    return 2 * model.layers * model.width * jnp.dtype(dtype).itemsize * positions


def measure_bare_s(lm: SpeechLM, tree: Tree, batch: int, slots: int, passes: int) -> float:
    """Seconds of one pass of the backbone and the LM head over the tree's nodes beside a cache, and of nothing else.

    The `passes` follow each other in one loop on the device, so that sending them off does not count.
    """
    mask_TT, depth_T = jnp.asarray(tree.ancestor_TT), jnp.asarray(tree.depth_T)
    cache = _cache(lm.backbone.config, batch, slots, lm.backbone.dtype)
    began = time.perf_counter()
    jax.block_until_ready(_bare(lm, mask_TT, depth_T, cache, jnp.int32(passes)))
    return (time.perf_counter() - began) / passes


@functools.lru_cache(maxsize=2)
def _cache(model: ModelConfig, batch: int, slots: int, dtype: jnp.dtype) -> kv.Cache:
    return jax.block_until_ready(
        dataclasses.replace(kv.empty(model, batch, slots, 1, dtype), length_B=jnp.full((batch,), slots // 2, jnp.int32))
    )


@jit_for_decoding()
def _bare(lm: SpeechLM, mask_TT: jax.Array, depth_T: jax.Array, cache: kv.Cache, passes: jax.Array) -> jax.Array:
    batch, vocab = len(cache.length_B), lm.backbone.config.output_vocab
    mask_BTT = jnp.broadcast_to(mask_TT, (batch, *mask_TT.shape))

    def one(_, token_BT: jax.Array) -> jax.Array:
        h_BTD, _ = lm.backbone(token_BT, cache.length_B[:, None] + depth_T, mask_BTT, cache)
        best_BT = jnp.max(lm.backbone.logits(h_BTD), axis=-1)  # a pass waits for the one before, as in decoding
        return (token_BT + (best_BT > 0)) % vocab

    return jax.lax.fori_loop(0, passes, one, jnp.zeros((batch, len(depth_T)), jnp.int32))


@contextlib.contextmanager
def counting() -> Iterator[collections.Counter]:
    """Counts `compilations` by XLA and `transfers` from the device with `jax.device_get` until the block ends.

    A transfer that nobody asked for is an error on accelerators; CPUs have none to guard, their memory is the host's.
    """
    count, fetch = collections.Counter(compilations=0, transfers=0), jax.device_get

    def note(event: str, *_, **__) -> None:
        count["compilations"] += event.endswith("backend_compile_duration")

    def device_get(x):
        count["transfers"] += 1
        return fetch(x)

    jax.monitoring.register_event_duration_secs_listener(note)
    jax.device_get = device_get
    try:
        with jax.transfer_guard_device_to_host("disallow"):
            yield count
    finally:
        jax.device_get = fetch
        jax.monitoring.unregister_event_duration_listener(note)
