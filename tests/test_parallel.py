"""Laws of training at scale: meshes, accumulation and rematerialisation do not change what is learned."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from toys import HEADS, MODEL, pack

from configs import tiny
from vadusa_jax.config import Config, DataConfig, HeadsConfig, MeshConfig, ModelConfig, TrainConfig, from_config_dict
from vadusa_jax.model.sharding import AXES, PARAMETERS, array_name, make_mesh, rows, shardings
from vadusa_jax.training.loop import begin, to_mesh
from vadusa_jax.training.losses import joint_loss
from vadusa_jax.training.optimizer import init_state, make_optimizer
from vadusa_jax.training.step import make_model, make_train_step

SMALL = Config(
    model=dataclasses.replace(MODEL, speech_vocab=18, layers=1),  # V = 19 divides by nothing
    heads=dataclasses.replace(HEADS, count=3, layers=1),
    data=DataConfig(batch_rows=8),
    train=TrainConfig(optimizer="adamw", learning_rate=3e-3, warmup_steps=3, steps=20),
)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), AXES)


def changed(config: Config, **train) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def losses(config: Config, mesh: Mesh, steps: int = 20) -> np.ndarray:
    """The sums of every step and head, with the norm of the gradient behind them."""
    graph, params = make_model(config)
    params = jax.device_put(params, shardings(params, mesh))
    optimizer = make_optimizer(config.train)
    state, step = init_state(optimizer, params, mesh), make_train_step(config, optimizer, graph, mesh)
    found = []
    for seed in range(steps):
        batch = pack([[10 + b, 16 - b, b] for b in range(8)], seed)
        batch |= {name: batch[name] % config.model.output_vocab for name in ("tokens_BT", "targets_BT")}
        params, state, sums, norm = step(params, state, to_mesh(batch, mesh))
        found.append([joint_loss(sums, config.heads), norm, *sums[:, 1] / sums[:, 0]])
    return np.array(found)


@pytest.fixture(scope="module")
def alone() -> np.ndarray:
    return losses(SMALL, one_device())


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(), MeshConfig(fsdp=4), MeshConfig(fsdp=2, tensor=2)],
    ids=["data 8", "data 2, fsdp 4", "data 2, fsdp 2, tensor 2"],
)
def test_losses_are_the_same_on_every_mesh(alone, mesh):
    np.testing.assert_allclose(losses(SMALL, make_mesh(mesh)), alone, rtol=1e-5)


@pytest.mark.parametrize(
    "train",
    [{"accumulate": 4}, {"remat": "blocks"}, {"remat": "dots", "loss_chunk": 16}],
    ids=["accumulated", "rematerialised", "chunked"],
)
def test_losses_are_the_same_however_memory_is_saved(alone, train):
    np.testing.assert_allclose(losses(changed(SMALL, **train), one_device()), alone, rtol=1e-5)


def test_all_of_it_at_once_with_heads_in_sequence():
    hydra = dataclasses.replace(SMALL, heads=dataclasses.replace(SMALL.heads, kind="hydra"))
    everything = changed(hydra, accumulate=2, remat="blocks", loss_chunk=24)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2))
    np.testing.assert_allclose(losses(everything, mesh, 5), losses(hydra, one_device(), 5), rtol=1e-5)


# where things live


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_every_parameter_has_exactly_one_row_in_the_table(kind):
    config = dataclasses.replace(SMALL, heads=dataclasses.replace(SMALL.heads, kind=kind))
    params = nnx.eval_shape(lambda: make_model(config)[1])
    names = [array_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for name in names:
        assert len([end for end in PARAMETERS if name.endswith(end)]) == 1, name
    for end in PARAMETERS:
        assert any(name.endswith(end) for name in names) or end == "heads/context"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_large_is_replicated(optimizer):
    config = changed(dataclasses.replace(SMALL, mesh=MeshConfig(fsdp=4)), optimizer=optimizer, ema=0.99)
    mesh, _, params, state, _ = begin(config)
    for path, x in jax.tree_util.tree_leaves_with_path((params, state)):
        if x.ndim > 1 and "bias" not in array_name(path):
            assert x.sharding.shard_shape(x.shape) != x.shape, array_name(path)
            assert x.addressable_shards[0].data.size * 4 == x.size
    assert rows(mesh).spec == P(("data", "fsdp"))


def test_rows_that_do_not_divide_are_an_error_with_the_way_out():
    config = from_config_dict(tiny.get_config())
    with pytest.raises(ValueError, match=r"batch_rows is 2, which does not divide by the 8 devices.*a multiple of 8"):
        begin(config)
    with pytest.raises(ValueError, match=r"accumulate=3: make data.batch_rows a multiple of 24"):
        begin(changed(SMALL, accumulate=3))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (MeshConfig(data=3), "mesh.data=3, fsdp=1, tensor=1 do not make up the 8 devices"),
        (MeshConfig(fsdp=16), "fsdp=16, tensor=1 do not make up the 8 devices"),
        (MeshConfig(tensor=8), "attention_heads is 4, which does not divide by mesh.tensor=8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(mesh, message):
    with pytest.raises(ValueError, match=message):
        begin(dataclasses.replace(SMALL, mesh=mesh))


def test_a_width_that_does_not_divide_is_named():
    mesh, params = make_mesh(MeshConfig(fsdp=8)), {"q": {"kernel": jax.ShapeDtypeStruct((12, 12), np.float32)}}
    with pytest.raises(ValueError, match=r"q/kernel \(12, 12\): 12 does not divide by the 8 devices of fsdp"):
        shardings(params, mesh)


# memory


def step_bytes(heads: int, **train) -> int:
    """Bytes of arguments and temporary arrays of one compiled step on one device."""
    model = ModelConfig(speech_vocab=1000, layers=3, width=128, attention_heads=2, ffn=352)
    config = changed(Config(model=model, heads=HeadsConfig(count=heads)), optimizer="adamw", **train)
    graph, params = nnx.eval_shape(lambda: make_model(config))
    optimizer = make_optimizer(config.train)
    state = jax.eval_shape(optimizer.init, params)
    names = ("tokens_BT", "targets_BT", "mask_BT", "segments_BT", "positions_BT")
    batch = {name: jax.ShapeDtypeStruct((4, 512), np.int32) for name in names}
    memory = make_train_step(config, optimizer, graph).lower(params, state, batch).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes


def test_memory_does_not_grow_with_the_heads():
    without, chunked, whole = step_bytes(0, loss_chunk=64), step_bytes(6, loss_chunk=64), step_bytes(6)
    print(f"step: {without / 1e6:.0f} MB without heads, {chunked / 1e6:.0f} with 6 in chunks, {whole / 1e6:.0f} whole")
    assert chunked < 1.3 * without and chunked < whole
