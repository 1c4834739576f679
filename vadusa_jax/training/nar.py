"""Training of the non-autoregressive stage: each utterance with a random prompt and a random codebook to predict."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from vadusa_jax.config import TrainConfig
from vadusa_jax.model.nar import BUCKET, TARGET, Nar, NarConfig, Rows, make_rows
from vadusa_jax.training.checkpoint import Checkpoints
from vadusa_jax.training.loop import require_finite
from vadusa_jax.training.losses import head_sums
from vadusa_jax.training.optimizer import make_optimizer
from vadusa_jax.training.stopping import Notice, Preempted

Utterance = tuple[np.ndarray, np.ndarray]  # phones [L], codes [Q, T]


def nar_sums(nar: Nar, rows: Rows) -> jax.Array:
    """`head_sums` (count, cross entropy, hits of the best guess) over the target frames, each row at its `stage_B`."""
    logits_BTV = nar(rows["phones_BT"], rows["codes_BQT"], rows["kind_BT"], rows["stage_B"])
    target_BT = jnp.take_along_axis(rows["codes_BQT"], rows["stage_B"][:, None, None], axis=1)[:, 0]
    return head_sums(logits_BTV, target_BT, rows["kind_BT"] == TARGET, (1,))


def nar_batches(
    utterances: Sequence[Utterance], config: NarConfig, rows: int, length: int, seed: int, start: int = 0
) -> Iterator[Rows]:
    """Endless batches of `rows` whole utterances, from number `start` on; up to half of each is its prompt.

    Rows are as long as the corpus needs; utterances of more than `length` positions are left out.
    """
    fitting = [u for u in utterances if len(u[0]) + u[1].shape[1] <= length]
    if not fitting:
        raise ValueError(f"none of {len(utterances)} utterances fits into {length} positions")
    longest = max(len(phones) + codes.shape[1] for phones, codes in fitting)
    length = min(length, -(-longest // BUCKET) * BUCKET)
    for number in itertools.count(start):
        rng = np.random.default_rng((seed, number))  # a batch depends on its number alone: runs go on anywhere
        some = [fitting[i] for i in rng.integers(0, len(fitting), rows)]
        prompts = [int(rng.integers(0, codes.shape[1] // 2 + 1)) for _, codes in some]
        batch = make_rows([p for p, _ in some], [c for _, c in some], prompts, length, config.codebooks)
        yield batch | {"stage_B": rng.integers(1, config.codebooks, rows, np.int32)}


@functools.cache
def _parts(config: NarConfig, train: TrainConfig) -> tuple[nnx.GraphDef, optax.GradientTransformation, Callable]:
    """Graph, optimiser, and the compiled step `(params, moments, batch) -> (params, moments, sums)`."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Nar(config, jnp.dtype(train.dtype), rngs=nnx.Rngs(0))))
    optimizer = make_optimizer(train)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: nnx.State, moments: optax.OptState, batch: Rows):
        def loss(params: nnx.State):
            sums = nar_sums(nnx.merge(graph, params), batch)
            return sums[1] / jnp.maximum(sums[0], 1.0), sums

        gradient, sums = jax.grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, sums

    return graph, optimizer, step


def train_nar(
    utterances: Sequence[Utterance],
    config: NarConfig,
    train: TrainConfig,
    folder: Path,
    rows: int = 8,
    length: int = 1024,
) -> tuple[Nar, dict[str, float]]:
    """The trained stage, and its smoothed loss and accuracy over all codebooks at the end.

    `folder` keeps checkpoints; a run that is there goes on exactly as if it had not been interrupted.

    Raises:
        Preempted: SIGTERM came; the run is saved.
        TrainingDiverged: a parameter is no number any more; the last checkpoint is intact.
        CheckpointError: the run in `folder` is of another `config`.
    """
    graph, optimizer, update = _parts(config, train)
    params, figures = nnx.state(Nar(config, jnp.dtype(train.dtype), rngs=nnx.Rngs(train.seed))), {}
    moments = jax.jit(optimizer.init)(params)
    checkpoints = Checkpoints(folder, train.keep, clean=True)
    if start := checkpoints.latest_step or 0:
        _, params, moments, figures = checkpoints.load(params, moments)
    batches = nar_batches(utterances, config, rows, length, train.seed, start)
    bar = tqdm(total=train.steps, initial=start, desc="codebooks", mininterval=5, disable=None)
    with Notice() as notice, contextlib.closing(checkpoints), bar:
        for step in range(start + 1, train.steps + 1):
            params, moments, sums = update(params, moments, next(batches))
            bar.update()
            stop, end = notice.given, step == train.steps
            if step % train.log_every == 0 or end:
                count, *rest = (float(x) for x in sums)
                now = {name: x / max(count, 1.0) for name, x in zip(("loss", "top1"), rest, strict=True)}
                figures = {name: 0.7 * figures.get(name, x) + 0.3 * x for name, x in now.items()}
                bar.set_postfix({name: f"{x:.3f}" for name, x in figures.items()}, refresh=False)
            if step % train.checkpoint_every == 0 or stop or end:
                require_finite(params, step)
                checkpoints.save(step, params, moments, figures)
            if stop and not end:
                raise Preempted(f"asked to end: saved step {step} of {train.steps} in {folder}; the next run goes on")
    return nnx.merge(graph, params), figures
