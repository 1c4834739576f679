"""One training step, compiled for a mesh: optimiser, gradient, update."""

import functools

import jax
import optax
from flax import nnx

from vadusa_jax.config import Config, TrainConfig
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.training.losses import TOP, TRAIN_TOP, Batch, joint_loss, loss_sums


def schedule(train: TrainConfig, peak: float) -> optax.Schedule:
    """Linear warm-up, then a cosine down to a hundredth of the peak at the last step."""
    steps = train.steps
    return optax.warmup_cosine_decay_schedule(0.0, peak, min(train.warmup_steps, steps // 2), steps, 0.01 * peak)


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """Muon for the matrices and Adam for the rest (far ahead of AdamW on small budgets), or AdamW for all."""
    rate = functools.partial(schedule, train)
    if train.optimizer == "muon":
        update = optax.contrib.muon(
            rate(train.learning_rate),
            weight_decay=train.weight_decay,
            adam_learning_rate=rate(train.adam_learning_rate),
            muon_weight_dimension_numbers=_matrices,
        )
    elif train.optimizer == "adamw":
        update = optax.adamw(rate(train.learning_rate), b2=0.98, weight_decay=train.weight_decay)
    else:
        raise ValueError(f"train.optimizer must be 'muon' or 'adamw', got {train.optimizer!r}")
    return optax.chain(optax.clip_by_global_norm(train.clip_norm), update)


def _matrices(params: nnx.State) -> nnx.State:
    """What Muon orthogonalises: the hidden matrices, and the draft heads' stacked ones slice by slice."""

    def numbers(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = {str(getattr(key, "key", getattr(key, "name", key))) for key in path}
        if names & {"embedding", "lm_head", "output", "bias"} or x.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(numbers, params)


def make_train_step(config: Config, optimizer: optax.GradientTransformation, graph: nnx.GraphDef):
    """The compiled step `(params, optimizer_state, batch) -> (params, optimizer_state, sums, norm)`.

    Where arrays live follows from what is passed in: parameters replicated and rows split gives data parallelism, and
    the sums and gradients of all devices are the same as those of one.
    """

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: nnx.State, optimizer_state: optax.OptState, batch: Batch):
        def loss(params: nnx.State):
            sums = loss_sums(nnx.merge(graph, params), batch, TRAIN_TOP)
            return joint_loss(sums, config.heads), sums

        gradient, sums = jax.grad(loss, has_aux=True)(params)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, sums, optax.tree.norm(gradient)

    return step


def make_eval_step(graph: nnx.GraphDef):
    """The compiled sums of one batch with top-n accuracies: `(params, batch) -> [1 + K, 2 + len(TOP)]`."""
    return jax.jit(lambda params, batch: loss_sums(nnx.merge(graph, params), batch, TOP))


def make_model(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """A freshly initialised model as its graph and its parameters."""
    dtype = jax.numpy.dtype(config.train.dtype)
    return nnx.split(SpeechLM(config.model, config.heads, dtype, rngs=nnx.Rngs(config.train.seed)))
