"""The training loop: save, next batch, step, look at the previous step."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from vadusa_jax.config import Config, save_config
from vadusa_jax.data.batches import TrainBatches
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.sharding import check_fit, make_mesh, rows, shardings
from vadusa_jax.training.checkpoint import Checkpoints
from vadusa_jax.training.hosts import anywhere, is_first, require_agreement, total, whole
from vadusa_jax.training.losses import TOP, Batch, joint_loss, metrics
from vadusa_jax.training.optimizer import init_state, make_optimizer
from vadusa_jax.training.step import make_eval_step, make_model, make_train_step
from vadusa_jax.training.stopping import Notice, Preempted
from vadusa_jax.training.watch import Sent, TrainingDiverged, Watch


def train(
    config: Config,
    folder: Path,
    batches: TrainBatches,
    dev: Callable[[], Iterator[Batch]],
    resume: bool = False,
    progress: bool = True,
    init: nnx.State | None = None,
    listen: Callable[[int, SpeechLM], None] | None = None,
    profile: int = 0,
) -> nnx.State:
    """Trains until step `config.train.steps` and returns the parameters.

    Args:
        config: the whole run; saved to `folder`.
        folder: receives checkpoints, `config.json`, `metrics.jsonl` and `events/`; the same for all processes.
        batches: endless packed batches of this process's rows.
        dev: makes one pass over this process's rows of the dev set.
        resume: go on from the newest checkpoint in `folder`, exactly: the same losses as without the interruption.
        progress: show a progress bar.
        init: parameters to start from instead of random ones, as `first_parameters` reads them.
        listen: called by process 0 at every evaluation, with the step's number and the model so far.
        profile: trace so many steps into `folder`.

    Raises:
        Preempted: SIGTERM came in any process; the run is saved and goes on with `resume`.
        TrainingDiverged: the loss or a parameter is no number any more; the last checkpoint is intact.
        Disagreement: the processes were started with different settings, records or folders.
    """
    mesh, graph, params, optimizer_state, train_step = begin(config, init)
    eval_step = make_eval_step(graph, mesh)

    checkpoints = Checkpoints(folder, config.train.keep, config.train.keep_every, clean=True)
    start = checkpoints.latest_step or 0
    require_agreement(_settings(config) | {"last checkpoint": start, "records read": batches.fingerprint})
    if start:
        if not resume:
            raise FileExistsError(f"{folder} holds a run at step {start}: pass --resume to go on")
        _, params, optimizer_state, data_state = checkpoints.load(params, optimizer_state)
        batches.set_state(data_state)
    if is_first():
        save_config(folder, config)

    skipped = int(optimizer_state.total_notfinite)
    watching = Watch(folder, config, params, start, skipped, progress, profile)
    with Notice() as notice, watching as watch, contextlib.closing(checkpoints):  # a save under way is completed
        sent = None
        for step in range(start + 1, config.train.steps + 1):
            batch = watch.fetch(batches)
            params, optimizer_state, sums, norm = train_step(params, optimizer_state, to_mesh(batch, mesh))
            before, sent = sent, Sent(step, sums, norm, _tokens(batch, config), anywhere(notice.given, mesh))
            # The step before: looking at this one now would leave the devices idle.
            stop = before is not None and watch.settle(before, batches.names)
            end, evals = step == config.train.steps, step % config.train.eval_every == 0
            saves = step % config.train.checkpoint_every == 0
            if not (end or stop or evals or saves):
                continue
            stop |= watch.settle(sent, batches.names)
            sent = None
            if stop:  # there may be little time left
                _save(checkpoints, step, params, optimizer_state, batches)
            if end or evals:
                figures = evaluate(eval_step, params, dev(), mesh, config)
                watch.write(step, figures | {"corrupt_records": total(len(batches.corrupt))})
                if listen:
                    here = whole(params)  # all processes take part
                    if is_first():
                        listen(step, nnx.merge(graph, here))
            if (end or saves) and not stop:  # figures first: a run that is killed here does the step again
                _save(checkpoints, step, params, optimizer_state, batches)
            if stop and not end:
                raise Preempted(
                    f"asked to end: saved step {step} of {config.train.steps} in {folder}; --resume goes on"
                )
            watch.restart()
    return params


def begin(config: Config, init: nnx.State | None = None) -> tuple:
    """The mesh, the model's graph, its first parameters and optimiser state on the mesh, and the compiled step."""
    mesh = make_mesh(config.mesh)
    check_fit(config, mesh)
    graph, params = make_model(config)
    params = jax.device_put(params if init is None else init, shardings(params, mesh))
    # An update from a gradient that is no number is left out and counted; `Watch` decides whether the run goes on.
    optimizer = optax.apply_if_finite(make_optimizer(config.train), max_consecutive_errors=2**30)
    optimizer_state = init_state(optimizer, params, mesh)
    return mesh, graph, params, optimizer_state, make_train_step(config, optimizer, graph, mesh)


def _save(checkpoints: Checkpoints, step: int, params: nnx.State, optimizer_state, batches: TrainBatches) -> None:
    require_finite(params, step)
    checkpoints.save(step, params, optimizer_state, batches.get_state())


def _settings(config: Config) -> dict:
    """What all processes must have set alike, by name; where the records lie is each one's own affair."""
    rooms = dataclasses.asdict(config)
    named = {f"{room}.{name}": value for room, values in rooms.items() for name, value in values.items()}
    return {name: value for name, value in named.items() if name != "data.dir"}


def _tokens(batch: Batch, config: Config) -> int:
    """Positions of the global batch that are not padding, if the other processes' rows are as full as these."""
    own = batch["segments_BT"]
    return int(np.sum(own > 0)) * config.data.batch_rows // len(own)


def require_finite(params: nnx.State, step: int) -> None:
    """Raises TrainingDiverged before a broken state takes the place of a good one."""
    if not math.isfinite(norm := float(_norm(params))):
        raise TrainingDiverged(f"the parameters' norm is {norm} at step {step}; the last checkpoint is intact")


_norm = jax.jit(optax.tree.norm)


def to_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """Puts this process's rows on its devices of the mesh."""
    return {name: jax.make_array_from_process_local_data(rows(mesh), x) for name, x in batch.items()}


def evaluate(eval_step, params: nnx.State, batches: Iterator[Batch], mesh: Mesh, config: Config) -> dict[str, float]:
    """Loss and top-n accuracies of every head over a whole pass, as `dev/...`."""
    sums = sum(jax.device_get(eval_step(params, to_mesh(batch, mesh))) for batch in batches)
    named = {"loss": float(joint_loss(sums, config.heads))} | metrics(sums, TOP)
    return {f"dev/{name}": value for name, value in named.items()}


def measure_step_s(config: Config, batches: Iterator[Batch], repeats: int = 5) -> float:
    """Seconds of one training step on these devices, compilation left out; nothing is kept."""
    mesh, _, *state, train_step = begin(config)
    for i in range(repeats + 1):
        *state, sums, _ = train_step(*state, to_mesh(next(batches), mesh))
        jax.block_until_ready(sums)
        if i == 0:
            began = time.monotonic()
    return (time.monotonic() - began) / repeats
