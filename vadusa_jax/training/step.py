"""One training step, compiled for a mesh: gradient and update."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from vadusa_jax.config import Config
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.training.losses import TOP, TRAIN_TOP, Batch, head_counts, joint_loss, loss_sums
from vadusa_jax.training.optimizer import learned


def make_train_step(
    config: Config, optimizer: optax.GradientTransformation, graph: nnx.GraphDef, mesh: Mesh | None = None
):
    """The compiled step `(params, optimizer_state, batch) -> (params, optimizer_state, sums, norm)`.

    Parameters, state and rows live where they are passed in (`model/sharding.py`); with `mesh` what is computed in
    between is placed too. Whatever the mesh and `train.accumulate`, losses and gradients are those of the whole batch.
    """
    train = config.train
    filters = (learned(train), ...)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: nnx.State, optimizer_state: optax.OptState, batch: Batch):
        learning, fixed = nnx.split_state(params, *filters)
        counts = head_counts(batch, config.heads.count)

        def loss(learning: nnx.State, part: Batch):
            sums = loss_sums(nnx.merge(graph, learning, fixed), part, TRAIN_TOP, train=train)
            return joint_loss(sums, config.heads, counts), sums

        def add(total: tuple[nnx.State, jax.Array], part: Batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss, has_aux=True)(learning, part)), None

        with _using(mesh):
            if train.accumulate == 1:
                gradient, sums = jax.grad(loss, has_aux=True)(learning, batch)
            else:
                nothing = jax.tree.map(jnp.zeros_like, (learning, jnp.zeros((len(counts), 2 + len(TRAIN_TOP)))))
                (gradient, sums), _ = lax.scan(add, nothing, _parts(batch, train.accumulate))
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        params = nnx.merge_state(optax.apply_updates(learning, updates), fixed)
        return params, optimizer_state, sums, optax.tree.norm(gradient)

    return step


def make_eval_step(graph: nnx.GraphDef, mesh: Mesh | None = None):
    """The compiled sums of one batch with top-n accuracies: `(params, batch) -> [1 + K, 2 + len(TOP)]`."""

    @jax.jit
    def step(params: nnx.State, batch: Batch) -> jax.Array:
        with _using(mesh):
            return loss_sums(nnx.merge(graph, params), batch, TOP)

    return step


def _parts(batch: Batch, parts: int) -> Batch:
    """The batch in so many parts of its rows `[parts, B / parts, T]`, each with rows from every device."""
    return {name: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}


def _using(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else contextlib.nullcontext()


def make_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """A freshly initialised model as its graph and its parameters."""
    dtype = jax.numpy.dtype(config.train.dtype)
    return nnx.split(SpeechLM(config.model, config.heads, dtype, rngs=nnx.Rngs(config.train.seed)))
