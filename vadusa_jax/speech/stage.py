"""One stage of a codec's training, and the choices of both.

A stage ends after its minutes, or after `steps` where they are given (then it repeats exactly); the learning rate falls
along a cosine of the share that is over.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from tqdm import tqdm

from vadusa_jax.speech.recordings import Batch, BatchSizes

WARM_UP = 0.03  # share of a stage
LOG_EVERY = 20  # steps


@dataclasses.dataclass(frozen=True)
class CodecTraining:
    """Choices of both stages."""

    minutes_codec: float = 12.0
    minutes_vocoder: float = 20.0
    steps: int | None = None  # of each stage, in place of minutes
    optimizer: str = "muon"  # "muon" (matrices by Muon, the rest by Adam) or "adamw"
    learning_rate: float = 2e-2  # of Muon
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    batch: BatchSizes = dataclasses.field(default_factory=BatchSizes)
    phone_weight: float = 0.2
    keep_weight: float = 3.0  # a kept digit that is off by one weighs as much as this much of log-mel
    reader_width: int = 192
    reader_layers: int = 3
    deceiving_weight: float = 0.05  # stage 2: of the discriminator's losses
    matching_weight: float = 0.5
    judge_width: int = 128
    judge_layers: int = 3
    seed: int = 0


def fit(
    modules: dict[str, nnx.Module],
    fixed: dict[str, nnx.Module],
    loss: Callable,
    batches: Iterator[Batch],
    training: CodecTraining,
    minutes: float,
    name: str,
) -> tuple[dict[str, nnx.Module], dict[str, float]]:
    """Trains `modules` (which see the `fixed` ones beside them) until the stage is over, compilation not counted."""
    graph, params = nnx.split(modules)
    params = jax.tree.map(jnp.copy, params)  # a step takes what it is given: those of the modules stay as they are
    fixed_graph, fixed_params = nnx.split(fixed)
    optimizer = optax.chain(optax.clip_by_global_norm(training.clip_norm), _rule(training))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments, fixed_params, batch, scale):
        def objective(params):
            return loss(nnx.merge(graph, params) | nnx.merge(fixed_graph, fixed_params), batch)

        gradients, figures = jax.grad(objective, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: scale * u, updates)), moments, figures

    moments, running, steps, seconds = optimizer.init(params), {}, 0, 60.0 * minutes
    start = time.monotonic()

    def progress() -> float:
        return steps / training.steps if training.steps else (time.monotonic() - start) / seconds

    with tqdm(total=100, desc=name, unit="%", mininterval=5) as bar:
        while (over := progress()) < 1.0:
            params, moments, figures = step(params, moments, fixed_params, next(batches), _scale(over))
            if steps == 0:
                jax.block_until_ready(params)
                start = time.monotonic()
            steps += 1
            if steps % LOG_EVERY == 1:
                figures = {key: float(value) for key, value in figures.items()}
                running = {key: 0.7 * running.get(key, value) + 0.3 * value for key, value in figures.items()}
                bar.update(min(int(100 * progress()), 100) - bar.n)
                bar.set_postfix({"step": steps} | {key: f"{value:.3f}" for key, value in running.items()})
        jax.block_until_ready(params)
        bar.update(100 - bar.n)
    return nnx.merge(graph, params), running | {"steps": steps, "step_ms": 1e3 * (time.monotonic() - start) / steps}


def _scale(progress: float) -> float:
    """Share of the learning rate at a share of the stage: a short ramp, then half a cosine."""
    return min(progress / WARM_UP, 1.0) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _rule(training: CodecTraining) -> optax.GradientTransformation:
    if training.optimizer == "muon":
        return optax.contrib.muon(
            training.learning_rate,
            weight_decay=training.weight_decay,
            adam_learning_rate=training.adam_learning_rate,
            adam_b2=0.98,
            muon_weight_dimension_numbers=_kernels,
        )
    if training.optimizer == "adamw":
        rate, decay = training.adam_learning_rate, training.weight_decay
        return optax.adamw(rate, b2=0.98, weight_decay=decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    raise ValueError(f"optimizer must be 'muon' or 'adamw', got {training.optimizer!r}")


def _kernels(params: nnx.State) -> nnx.State:
    """What Muon orthogonalises: the kernels of linear layers."""

    def numbers(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        kernel = any(getattr(key, "key", getattr(key, "name", None)) == "kernel" for key in path)
        return optax.contrib.MuonDimensionNumbers() if kernel and x.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(numbers, params)
