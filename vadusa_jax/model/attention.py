"""Softmax attention: over a mask and a cache for decoding, inside the segments of packed rows for training.

Training never makes the [T, T] weights of a long row at once, forward or backward. How it avoids them depends on the
device (`packed_attention`), what it computes does not.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vadusa_jax.model.cache import KV
from vadusa_jax.model.sharding import ACTIVATIONS, ROWS, P

CHUNK = 256  # queries whose weights exist at one time, where the device has no kernel of its own
FEW = 4  # chunks of a row that are computed one by one, without a loop
SPLASH_BLOCKS = (1024, 512, 256, 128)  # queries and keys of one tile; the first that divides the row
FAR = 128.0  # how far the logits of another segment lie below those of the own one; exp(-FAR) is 0 in float32


def attend(q_GTH: jax.Array, own: KV, mask_BTT: jax.Array, cached: KV | None, seen_BTS: jax.Array | None) -> jax.Array:
    """Softmax attention over the keys of this call and over the cache (whose keys lie transposed, `[G, H, S]`).

    The two are never joined: joining keys would copy the whole cache at every step, and joining logits moves them
    twice. Softmax in float32 (or wider, when the queries are).
    """
    wide = jnp.promote_types(q_GTH.dtype, jnp.float32)
    q_GTH = q_GTH * q_GTH.shape[-1] ** -0.5

    def masked(logits_GTS: jax.Array, mask_BTS: jax.Array) -> jax.Array:
        mask_GTS = jnp.repeat(mask_BTS, len(q_GTH) // len(mask_BTS), axis=0)
        return jnp.where(mask_GTS, logits_GTS.astype(wide), -jnp.inf)

    k_GTH, v_GTH = own
    logits, values = [masked(jnp.einsum("GTH,GSH->GTS", q_GTH, k_GTH), mask_BTT)], [v_GTH]
    if cached is not None:
        k_GHS, v_GSH = cached
        logits.append(masked(jnp.einsum("GTH,GHS->GTS", q_GTH, k_GHS), seen_BTS))
        values.append(v_GSH)
    peak_GT1 = lax.stop_gradient(functools.reduce(jnp.maximum, [jnp.max(x, axis=-1, keepdims=True) for x in logits]))
    weights = [jnp.exp(x - peak_GT1) for x in logits]
    total_GT1 = sum(jnp.sum(x, axis=-1, keepdims=True) for x in weights)
    out = [jnp.einsum("GTS,GSH->GTH", x.astype(v.dtype), v) for x, v in zip(weights, values, strict=True)]
    return (sum(out) / total_GT1).astype(q_GTH.dtype)


def packed_attention(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Causal attention inside segments `[B, T, N, H]`; padding (segment 0) sees only earlier padding and itself.

    The device is that of the mesh in use, so that a TPU program can be compiled without a TPU: TPUs run the splash
    attention kernel, GPUs cuDNN in 16 bit; all else is computed in chunks of queries.
    """
    mesh = jax.sharding.get_abstract_mesh()
    platform = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    if platform == "tpu" and q_BTNH.shape[1] % SPLASH_BLOCKS[-1] == 0:
        way = splash_attention
    elif platform in ("gpu", "cuda") and q_BTNH.dtype.itemsize == 2:
        way = functools.partial(coded_attention, implementation="cudnn")
    else:
        way = chunked_attention
    return way(q_BTNH, k_BTNH, v_BTNH, segments_BT)


def chunked_attention(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array, chunk: int = CHUNK
) -> jax.Array:
    """Chunk by chunk of queries; the weights of a chunk are made again backward.

    In a row of a few chunks each looks at the keys up to its own end alone: half the work of the full square. In a
    longer one a loop goes over them, which keeps XLA from having all their weights at the same time, and all look at
    all keys.
    """
    batch, length, heads, _ = q_BTNH.shape

    def rows(start: jax.Array | int, q_BTNH: jax.Array, q_segments_BT: jax.Array, seen: int) -> jax.Array:
        causal_TS = np.arange(seen) <= start + np.arange(q_BTNH.shape[1])[:, None]
        mask_BTS = (q_segments_BT[:, :, None] == segments_BT[:, None, :seen]) & causal_TS
        each = (q_BTNH, k_BTNH[:, :seen], v_BTNH[:, :seen])
        q, k, v = (x.swapaxes(1, 2).reshape(batch * heads, x.shape[1], -1) for x in each)
        return attend(q, (k, v), mask_BTS, None, None).reshape(batch, heads, q.shape[1], -1).swapaxes(1, 2)

    rows = jax.checkpoint(rows, static_argnums=3)
    starts = np.arange(0, length, chunk)
    if len(starts) <= FEW or length % chunk:
        ends = np.minimum(starts + chunk, length).tolist()
        parts = [rows(s, q_BTNH[:, s:e], segments_BT[:, s:e], e) for s, e in zip(starts.tolist(), ends, strict=True)]
        return jnp.concatenate(parts, axis=1)
    cut = [jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0) for x in (q_BTNH, segments_BT)]
    out_CBTNH = lax.map(lambda part: rows(*part, length), (starts, *cut))
    return jnp.moveaxis(out_CBTNH, 0, 1).reshape(q_BTNH.shape)


def splash_attention(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array, interpret: bool = False
) -> jax.Array:
    """The Pallas kernel for TPUs that comes with JAX; T must be a multiple of 128.

    XLA cannot split a kernel over devices: under a mesh each device runs it on its own rows and heads.
    """
    # Here, since only training on TPUs needs it and Pallas is slow to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

    mesh = jax.sharding.get_abstract_mesh()
    length, heads = q_BTNH.shape[1:3]
    if not mesh.empty:
        heads //= mesh.shape["tensor"]
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * heads)
    block = next(b for b in SPLASH_BLOCKS if length % b == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash.BlockSizes(**dict.fromkeys(names, block), use_fused_bwd_kernel=True)

    def own(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array) -> jax.Array:
        kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
        q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH * q_BTNH.shape[-1] ** -0.5, k_BTNH, v_BTNH))
        out_BNTH = jax.vmap(kernel)(q, k, v, segment_ids=splash.SegmentIds(segments_BT, segments_BT))
        return out_BNTH.swapaxes(1, 2)

    if mesh.empty:
        return own(q_BTNH, k_BTNH, v_BTNH, segments_BT)
    spec = ACTIVATIONS["heads_BTNH"]
    split: Callable = jax.shard_map(own, in_specs=(spec, spec, spec, P(ROWS)), out_specs=spec, check_vma=False)
    return split(q_BTNH, k_BTNH, v_BTNH, segments_BT)


def coded_attention(
    q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array, segments_BT: jax.Array, implementation: str
) -> jax.Array:
    """`jax.nn.dot_product_attention`, whose fused kernels are causal but know no segments: they are put into the heads.

    Each head grows by the bits of the segment's number as +1 and -1, in queries and keys. Their product is the number
    of bits for the own segment, the same for all its keys, so that the softmax does not see it; every bit that differs
    takes 2, scaled here to FAR. (A mask or bias would be a whole [T, T].) It costs absolute precision of the logits,
    about 1e-4: nothing beside that of 16 bit inputs.
    """
    length, size = q_BTNH.shape[1], q_BTNH.shape[-1]
    bits = length.bit_length()  # a row has at most T segments
    code_BT1C = jnp.where((segments_BT[:, :, None, None] >> np.arange(bits)) & 1, 1.0, -1.0).astype(q_BTNH.dtype)
    code_BTNC = jnp.broadcast_to(code_BT1C, (*q_BTNH.shape[:3], bits))
    code_BTNC = jnp.pad(code_BTNC, ((0, 0), (0, 0), (0, 0), (0, -bits % 8)))  # kernels want heads in multiples of 8
    louder = 2.0 ** np.ceil(np.log2(FAR / 2 * size**0.5))  # a power of two: exact in every type
    q, k = (jnp.concatenate([x, c], axis=-1) for x, c in ((q_BTNH, louder * code_BTNC), (k_BTNH, code_BTNC)))
    v = jnp.pad(v_BTNH, ((0, 0), (0, 0), (0, 0), (0, code_BTNC.shape[-1])))  # kernels want one size of head
    out = jax.nn.dot_product_attention(q, k, v, scale=size**-0.5, is_causal=True, implementation=implementation)
    return out[..., :size]
