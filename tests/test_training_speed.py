"""What a training step asks of a machine: operations are counted, and timed beside the machine's peak."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from toys import TINY, tiny_tokens

from vadusa_jax.data.batches import train_batches
from vadusa_jax.model.chips import token_flops
from vadusa_jax.training.compiled import BATCH
from vadusa_jax.training.loop import begin
from vadusa_jax.training.speed import measure, product_flops
from vadusa_jax.training.step import make_model


def counted(f, *arguments) -> float:
    return product_flops(jax.make_jaxpr(f)(*arguments))


def test_products_are_counted_as_often_as_they_run_and_on_all_devices():
    x, w = jnp.ones((2, 4)), jnp.ones((4, 4))
    once = 2 * 2 * 4 * 4
    assert counted(jnp.dot, x, w) == once
    assert counted(jax.jit(lambda w: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)), w) == 3 * once
    assert counted(lambda w: jax.lax.cond(w[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), w) == 2 * once
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert counted(jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")), x, w) == once


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_can_be_timed_before_it_is_begun(tmp_path, optimizer):
    config = dataclasses.replace(
        TINY,
        data=tiny_tokens(tmp_path / "tokens"),
        train=dataclasses.replace(TINY.train, optimizer=optimizer),
    )
    speed = measure(config, train_batches(config.data, config.model), repeats=2)
    params = make_model(config)[1]
    per_token = token_flops(params, config.model, config.data.row_length)
    assert speed.tokens == config.data.batch_rows * config.data.row_length
    assert speed.model_flops == speed.tokens * per_token
    assert len(speed.step_s) == len(speed.peak) == 2 and 0 < min(speed.step_s) <= speed.seconds <= max(speed.step_s)
    # Attention looks at the keys up to the end of its chunk; Muon multiplies on top.
    assert np.isclose(speed.product_flops, speed.model_flops, rtol=0.5) or optimizer == "muon"
    assert str(speed).count("of the peak") == 2


def test_what_is_made_again_backward_is_what_the_setting_says():
    def flops(remat: str) -> float:
        config = dataclasses.replace(TINY, train=dataclasses.replace(TINY.train, optimizer="adamw", remat=remat))
        _, _, params, state, step = begin(config)
        batch = {name: jnp.ones((config.data.batch_rows, config.data.row_length), jnp.int32) for name in BATCH}
        return counted(step, params, state, batch)

    model, positions = TINY.model, TINY.data.batch_rows * TINY.data.row_length
    # All products of a layer with parameters but the last, whose result the backward pass has no need of.
    layers = 2 * positions * model.layers * (4 * model.width**2 + 2 * model.width * model.ffn)
    none, dots, blocks = map(flops, ("none", "dots", "blocks"))
    assert none < dots and blocks - dots == layers
