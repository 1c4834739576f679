"""Laws of checkpoints: what a run may start from, and that parameters of another config are refused by name."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys import TINY, same

from vadusa_jax.config import save_config
from vadusa_jax.training.checkpoint import CheckpointError, Checkpoints, first_parameters
from vadusa_jax.training.step import make_model
from vadusa_jax.weights import WeightsError, load_weights, save_weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, nnx.State]:
    """The folder of a run at step 6 and its parameters, which are not those that a model begins with."""
    folder, (_, params) = tmp_path_factory.mktemp("run"), make_model(TINY)
    params = jax.tree.map(lambda x: x + 0.5, params)
    save_config(folder, TINY)
    checkpoints = Checkpoints(folder)
    checkpoints.save(6, params, {"count": jnp.zeros(())}, {})
    checkpoints.close()
    return folder, params


@pytest.mark.parametrize("heads", [{"count": 3}, {"kind": "hydra"}, {"layers": 2}])
def test_new_heads_on_a_trained_backbone_start_from_its_lm_head(whole, heads):
    config = dataclasses.replace(TINY, heads=dataclasses.replace(TINY.heads, **heads))
    params = first_parameters(whole[0], config)
    assert all(same(params["backbone"], whole[1]["backbone"]))
    for output_DV in params["heads"]["output"][...]:
        np.testing.assert_array_equal(output_DV, whole[1]["backbone"]["lm_head"]["kernel"][...])
    assert not np.any(params["heads"]["residual"][...])


def test_parameters_of_another_config_are_no_start(whole):
    wide = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, width=32))
    with pytest.raises(CheckpointError, match=r"does not fit the config: model\.width is 16, not 32"):
        first_parameters(whole[0], wide)


@pytest.mark.parametrize(
    ("room", "change", "parameter", "shapes"),
    [
        ("model", {"width": 32}, "backbone.blocks.0", ["(32,)", "(16,)"]),
        ("heads", {"count": 3}, "heads.bias", ["(1, 3, 16)", "(1, 2, 16)"]),
        ("heads", {"layers": 2}, "heads.bias", ["(2, 2, 16)", "(1, 2, 16)"]),
        ("model", {"layers": 2}, "backbone.blocks.1", []),
    ],
)
def test_another_config_is_refused_by_checkpoints_and_weights(whole, tmp_path, room, change, parameter, shapes):
    other = dataclasses.replace(TINY, **{room: dataclasses.replace(getattr(TINY, room), **change)})
    graph, params = make_model(other)
    with pytest.raises(CheckpointError, match=f"parameter {parameter}".replace(".", "/")) as by_checkpoint:
        Checkpoints(whole[0]).load(params)
    save_weights(nnx.merge(*make_model(TINY)), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"parameter {parameter}") as by_weights:
        load_weights(nnx.merge(graph, params), tmp_path / "model.safetensors")
    for shape in shapes:
        assert shape in str(by_checkpoint.value) and shape in str(by_weights.value)


def test_a_smaller_model_is_refused_as_a_larger_one_is(whole, tmp_path):
    deeper = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, layers=2))
    graph, params = make_model(deeper)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, params, {"count": jnp.zeros(())}, {})
    checkpoints.close()
    with pytest.raises(CheckpointError, match="parameter backbone/blocks/1"):
        Checkpoints(tmp_path).load(make_model(TINY)[1])
    save_weights(nnx.merge(graph, params), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"parameter backbone.blocks.1"):
        load_weights(nnx.merge(*make_model(TINY)), tmp_path / "model.safetensors")
