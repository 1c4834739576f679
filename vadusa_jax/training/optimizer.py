"""What is learned and how: training modes, learning rates, optimisers, the average of the parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from vadusa_jax.config import TrainConfig
from vadusa_jax.model.sharding import array_name, shardings


def learned(train: TrainConfig) -> Callable:
    """The nnx filter of the parameters that are learned: the heads alone, or all.

    `frozen` is Medusa-1: no backward pass through the backbone, no optimiser state for it. `joint` and `finetune`
    (Medusa-2, where the backbone waits for the heads) learn all.
    """
    if train.mode not in ("joint", "frozen", "finetune"):
        raise ValueError(f"train.mode must be 'joint', 'frozen' or 'finetune', got {train.mode!r}")
    return nnx.PathContains("heads") if train.mode == "frozen" else nnx.Everything()


def schedule(train: TrainConfig, peak: float, start: int = 0) -> optax.Schedule:
    """The learning rate: 0 for `start` steps, a linear warm-up to `peak`, down to a hundredth of it at the last step.

    After the warm-up `cosine` falls all the way; `wsd` stays level and falls in a line over the last `decay_share`
    (arXiv 2404.06395).
    """
    steps = train.steps - start
    if steps <= 0:
        raise ValueError(f"train.heads_warmup_steps is {start}: it must be below train.steps, {train.steps}")
    warmup, end = min(train.warmup_steps, steps // 2), 0.01 * peak
    if train.schedule == "cosine":
        rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end)
    elif train.schedule == "wsd":
        decay = min(round(train.decay_share * train.steps), steps - warmup)
        parts = [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, end, decay),
        ]
        rate = optax.join_schedules(parts, [warmup, steps - decay])
    else:
        raise ValueError(f"train.schedule must be 'cosine' or 'wsd', got {train.schedule!r}")
    return optax.join_schedules([optax.constant_schedule(0.0), rate], [start]) if start else rate


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """The whole update from gradients of what is learned, for all parameters of the model.

    Muon for the matrices and Adam for the rest (far ahead of AdamW on small budgets), or AdamW for all, after clipping
    by the global norm. `init` and `update` take the model's parameters and look only at those that are learned.
    """
    which = learned(train)
    if train.mode == "finetune":
        start = train.heads_warmup_steps
        update = optax.partition(
            {"heads": _rule(train, train.heads_rate), "backbone": _rule(train, 1.0, start)},
            lambda params: jax.tree_util.tree_map_with_path(lambda path, _: array_name(path).split("/")[0], params),
        )
        parts = [wait(start, "backbone"), optax.clip_by_global_norm(train.clip_norm), update]
    else:
        parts = [optax.clip_by_global_norm(train.clip_norm), _rule(train, 1.0)]
    whole = optax.chain(*parts, *([average(train.ema)] if train.ema else []))

    def some(params: nnx.State) -> nnx.State:
        return nnx.filter_state(params, which)

    def update(gradient: nnx.State, state: optax.OptState, params: nnx.State) -> tuple[nnx.State, optax.OptState]:
        return whole.update(gradient, state, some(params))

    return optax.GradientTransformation(lambda params: whole.init(some(params)), update)


def _rule(train: TrainConfig, times: float, start: int = 0) -> optax.GradientTransformation:
    rate, adam_rate = (schedule(train, times * peak, start) for peak in (train.learning_rate, train.adam_learning_rate))
    if train.optimizer == "muon":
        return optax.contrib.muon(
            rate,
            weight_decay=train.weight_decay,
            adam_learning_rate=adam_rate,
            muon_weight_dimension_numbers=_matrices,
        )
    if train.optimizer == "adamw":
        return optax.adamw(rate, b2=0.98, weight_decay=train.weight_decay)
    raise ValueError(f"train.optimizer must be 'muon' or 'adamw', got {train.optimizer!r}")


def _matrices(params: nnx.State) -> nnx.State:
    """What Muon orthogonalises: the hidden matrices, and the draft heads' stacked ones slice by slice."""

    def numbers(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = set(array_name(path).split("/"))
        if names & {"embedding", "lm_head", "output", "bias"} or x.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree_util.tree_map_with_path(numbers, params)


class Waiting(NamedTuple):
    """Steps so far."""

    count: jax.Array


def wait(steps: int, room: str) -> optax.GradientTransformation:
    """No gradient for the parameters under `room` during the first `steps` steps, nor its share of the norm."""

    def update(gradient: Any, state: Waiting, params: Any = None) -> tuple[Any, Waiting]:
        def held(path: tuple, g: jax.Array) -> jax.Array:
            return jnp.where(state.count < steps, 0.0, g) if array_name(path).split("/")[0] == room else g

        return jax.tree_util.tree_map_with_path(held, gradient), Waiting(optax.safe_increment(state.count))

    return optax.GradientTransformation(lambda params: Waiting(jnp.zeros((), jnp.int32)), update)


class Averaged(NamedTuple):
    """Steps so far, and the moving average of the parameters."""

    count: jax.Array
    average: Any


def average(decay: float) -> optax.GradientTransformation:
    """Keeps `average = d * average + (1 - d) * parameters`, the parameters after this update; the last of a chain.

    d is `decay`, at first less, `(1 + n) / (10 + n)` after n steps, so that the random start is soon forgotten.
    """

    def init(params: Any) -> Averaged:
        return Averaged(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates: Any, state: Averaged, params: Any) -> tuple[Any, Averaged]:
        keep = jnp.minimum(decay, (1 + state.count) / (10 + state.count))
        new = optax.apply_updates(params, updates)
        mixed = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, state.average, new)
        return updates, Averaged(optax.safe_increment(state.count), mixed)

    return optax.GradientTransformation(init, update)


def init_state(optimizer: optax.GradientTransformation, params: nnx.State, mesh: Mesh) -> optax.OptState:
    """The first optimiser state, made where it is to live: what mirrors a parameter beside that parameter."""
    return jax.jit(optimizer.init, out_shardings=shardings(jax.eval_shape(optimizer.init, params), mesh))(params)
