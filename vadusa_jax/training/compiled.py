"""The training step compiled for devices that need not be there: nothing is made but shapes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from vadusa_jax.config import Config
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.sharding import check_fit, make_mesh, rows, shardings
from vadusa_jax.training.optimizer import make_optimizer
from vadusa_jax.training.step import make_train_step

BATCH = ("tokens_BT", "targets_BT", "mask_BT", "segments_BT", "positions_BT")


class DoesNotFit(RuntimeError):
    """The step needs more memory than a device has."""


def compile_train(config: Config, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """The training step of `config` on a mesh of the given devices; DoesNotFit if their memory is too small."""
    mesh = make_mesh(config.mesh, devices)
    check_fit(config, mesh)
    dtype = jnp.dtype(config.train.dtype)
    graph, params = nnx.split(nnx.eval_shape(lambda: SpeechLM(config.model, config.heads, dtype, rngs=nnx.Rngs(0))))
    optimizer = make_optimizer(config.train)
    state = jax.eval_shape(optimizer.init, params)

    def placed(tree):
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings(tree, mesh)
        )

    shape = (config.data.batch_rows, config.data.row_length)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows(mesh)) for name in BATCH}
    step = make_train_step(config, optimizer, graph, mesh)
    try:
        return step.lower(placed(params), placed(state), batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(f"{shape[0]} rows of {shape[1]}: {str(error).splitlines()[0]}") from error
