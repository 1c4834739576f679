"""The training loop: save, next batch, step, look at the previous step."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from vadusa_jax.config import Config, save_config
from vadusa_jax.model.sharding import check_fit, make_mesh, rows, shardings
from vadusa_jax.training.checkpoint import Checkpoints
from vadusa_jax.training.losses import TOP, Batch, joint_loss, metrics
from vadusa_jax.training.optimizer import init_state, make_optimizer
from vadusa_jax.training.step import make_eval_step, make_model, make_train_step


class TrainingDiverged(RuntimeError):
    """The loss or a parameter is not a number any more."""


def train(
    config: Config,
    folder: Path,
    batches: Iterator[Batch],
    dev: Callable[[], Iterator[Batch]],
    resume: bool = False,
    progress: bool = True,
    init: nnx.State | None = None,
) -> nnx.State:
    """Trains until step `config.train.steps` and returns the parameters.

    Args:
        config: the whole run; saved to `folder`.
        folder: receives checkpoints, `config.json` and `metrics.jsonl`.
        batches: endless packed batches (NumPy) of this process, with grain's `get_state` and `set_state`.
        dev: makes one pass over the dev set.
        resume: go on from the newest checkpoint in `folder`, exactly: the same losses as without the interruption.
        progress: show a progress bar.
        init: parameters to start from instead of random ones, as `first_parameters` reads them.
    """
    mesh, graph, params, optimizer_state, train_step = begin(config, init)
    eval_step = make_eval_step(graph, mesh)

    checkpoints, start = Checkpoints(folder, config.train.keep), 0
    if checkpoints.latest_step is not None:
        if not resume:
            raise FileExistsError(f"{folder} holds a run at step {checkpoints.latest_step}: pass --resume to go on")
        start, params, optimizer_state, data_state = checkpoints.load(params, optimizer_state)
        batches.set_state(data_state)
    save_config(folder, config)

    with Log(folder / "metrics.jsonl", config.train.steps, start, progress) as log:
        pending = None
        for step in range(start + 1, config.train.steps + 1):
            batch = next(batches)
            tokens = int(np.sum(batch["segments_BT"] > 0))
            params, optimizer_state, sums, norm = train_step(params, optimizer_state, to_mesh(batch, mesh))
            if pending is not None:  # the previous step: reading this one now would leave the device idle
                log.step(*pending, config)
            pending = (step, sums, norm, tokens)
            last = step == config.train.steps
            if step % config.train.eval_every == 0 or last:
                log.write(step, evaluate(eval_step, params, dev(), mesh, config))
            if step % config.train.checkpoint_every == 0 or last:
                require_finite(params, step)
                checkpoints.save(step, params, optimizer_state, batches.get_state())
        if pending is not None:
            log.step(*pending, config)
    checkpoints.close()
    return params


def begin(config: Config, init: nnx.State | None = None) -> tuple:
    """The mesh, the model's graph, its first parameters and optimiser state on the mesh, and the compiled step."""
    mesh = make_mesh(config.mesh)
    check_fit(config, mesh)
    graph, params = make_model(config)
    params = jax.device_put(params if init is None else init, shardings(params, mesh))
    optimizer = make_optimizer(config.train)
    optimizer_state = init_state(optimizer, params, mesh)
    return mesh, graph, params, optimizer_state, make_train_step(config, optimizer, graph, mesh)


def require_finite(params: nnx.State, step: int) -> None:
    """Raises TrainingDiverged before a broken state takes the place of a good one."""
    if not math.isfinite(norm := float(optax.tree.norm(params))):
        raise TrainingDiverged(f"the parameters' norm is {norm} at step {step}; the last checkpoint is intact")


def to_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """Puts this process's rows on its devices of the mesh."""
    return {name: jax.make_array_from_process_local_data(rows(mesh), x) for name, x in batch.items()}


def evaluate(eval_step, params: nnx.State, batches: Iterator[Batch], mesh: Mesh, config: Config) -> dict[str, float]:
    """Loss and top-n accuracies of every head over a whole pass, as `dev/...`."""
    sums = sum(jax.device_get(eval_step(params, to_mesh(batch, mesh))) for batch in batches)
    named = {"loss": float(joint_loss(sums, config.heads))} | metrics(sums, TOP)
    return {f"dev/{name}": value for name, value in named.items()}


class Log:
    """`metrics.jsonl` and the progress line."""

    def __init__(self, path: Path, steps: int, start: int, progress: bool):
        self._file, self._began, self._tokens = path.open("a"), time.monotonic(), 0
        self._bar = tqdm(total=steps, initial=start, unit="step", disable=not progress, mininterval=5)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
        self._file.close()

    def step(self, step: int, sums: jax.Array, norm: jax.Array, tokens: int, config: Config) -> None:
        """Counts one finished step; every `log_every` steps its figures are written."""
        self._bar.update()
        self._tokens += tokens
        if step % config.train.log_every and step != config.train.steps:
            return
        loss = float(joint_loss(sums, config.heads))
        if not math.isfinite(loss):
            raise TrainingDiverged(f"loss is {loss} at step {step}; the last checkpoint is intact")
        rate = self._tokens / (time.monotonic() - self._began)
        self.write(step, {"loss": loss, "grad_norm": float(norm), "tokens_per_s": rate} | metrics(sums))
        self._bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{rate:.0f}", refresh=False)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one line of figures."""
        self._file.write(json.dumps({"step": step} | {k: round(v, 6) for k, v in values.items()}) + "\n")
        self._file.flush()
        if "dev/lm/loss" in values:
            self._bar.write(f"step {step}: " + ", ".join(f"{k} {values[k]:.3f}" for k in _SHOWN if k in values))


_SHOWN = ("dev/loss", "dev/lm/loss", "dev/lm/top1", *(f"dev/head{k}/top1" for k in range(1, 7)))


def measure_step_s(config: Config, batches: Iterator[Batch], repeats: int = 5) -> float:
    """Seconds of one training step on these devices, compilation left out; nothing is kept."""
    mesh, _, *state, train_step = begin(config)
    for i in range(repeats + 1):
        *state, sums, _ = train_step(*state, to_mesh(next(batches), mesh))
        jax.block_until_ready(sums)
        if i == 0:
            began = time.monotonic()
    return (time.monotonic() - began) / repeats
