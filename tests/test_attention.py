"""One law of training attention: whatever way a device takes, the outcome is that of the whole [T, T]."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vadusa_jax.config import MeshConfig
from vadusa_jax.model.attention import chunked_attention, coded_attention, packed_attention, splash_attention
from vadusa_jax.model.backbone import Masked
from vadusa_jax.model.sharding import make_mesh

B, T, N, H = 2, 256, 2, 32
WAYS = {
    "chunks": functools.partial(chunked_attention, chunk=64),
    "many chunks": functools.partial(chunked_attention, chunk=32),
    "chunks that do not divide": functools.partial(chunked_attention, chunk=100),
    "kernel for TPUs": functools.partial(splash_attention, interpret=True),
    "code in the heads": functools.partial(coded_attention, implementation="xla"),
    "chosen here": packed_attention,
}


def plain(q_BTNH, k_BTNH, v_BTNH, segments_BT):
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return Masked(same_BTT & np.tri(segments_BT.shape[1], dtype=bool), None, None)(q_BTNH, k_BTNH, v_BTNH)[0]


@pytest.fixture(scope="module")
def inputs():
    """Queries, keys, values loud enough for sharp weights; rows of many segments, padding behind."""
    rng = np.random.default_rng(0)
    q, k, v, g = (jnp.asarray(3 * rng.normal(size=(B, T, N, H)), jnp.float32) for _ in range(4))
    segments_BT = np.zeros((B, T), np.int32)
    for b in range(B):
        ends = np.sort(rng.choice(np.arange(1, T - 30), 9 + 40 * b, replace=False))
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            segments_BT[b, start:end] = number
    return (q, k, v, jnp.asarray(segments_BT)), g


def out_and_gradients(way, inputs):
    (q, k, v, segments), g = inputs
    out, back = jax.vjp(lambda *x: way(*x, segments), q, k, v)
    return out, back(g)


@pytest.mark.parametrize("name", WAYS)
def test_every_way_equals_the_whole_square(inputs, name):
    expected, gradients = out_and_gradients(plain, inputs)
    got, got_gradients = jax.jit(lambda inputs: out_and_gradients(WAYS[name], inputs))(inputs)
    # The code takes precision from the logits, which is meant for inputs of 16 bit.
    near = 1e-3 if name == "code in the heads" else 1e-4
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=near)
    for a, b in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2 * near * float(jnp.abs(b).max()))


def test_the_kernel_runs_on_each_devices_own_rows_and_heads(inputs):
    mesh = make_mesh(MeshConfig(tensor=2))
    (q, k, v, segments), _ = inputs
    many = [jnp.concatenate([x, x]) for x in (q, k, v, segments)]

    @jax.jit
    def split(*x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return splash_attention(*x, interpret=True)

    with jax.set_mesh(mesh):
        np.testing.assert_allclose(split(*many)[:B], plain(q, k, v, segments), rtol=1e-4, atol=1e-4)


def test_no_square_of_a_long_row_is_made():
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(q, k, v, segments):
        return chunked_attention(q, k, v, segments).sum()

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, segments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 4096**2 * 4 / 4  # a quarter of what the weights of both heads would take
