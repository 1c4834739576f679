"""Training of the non-autoregressive stage: each utterance with a random prompt and a random codebook to predict."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from vadusa_jax.config import TrainConfig
from vadusa_jax.model.nar import BUCKET, TARGET, Nar, NarConfig, Rows, make_rows
from vadusa_jax.training.losses import head_sums
from vadusa_jax.training.optimizer import make_optimizer

Utterance = tuple[np.ndarray, np.ndarray]  # phones [L], codes [Q, T]


def nar_sums(nar: Nar, rows: Rows) -> jax.Array:
    """`head_sums` (count, cross entropy, hits of the best guess) over the target frames, each row at its `stage_B`."""
    logits_BTV = nar(rows["phones_BT"], rows["codes_BQT"], rows["kind_BT"], rows["stage_B"])
    target_BT = jnp.take_along_axis(rows["codes_BQT"], rows["stage_B"][:, None, None], axis=1)[:, 0]
    return head_sums(logits_BTV, target_BT, rows["kind_BT"] == TARGET, (1,))


def nar_batches(
    utterances: Sequence[Utterance], config: NarConfig, rows: int, length: int, seed: int
) -> Iterator[Rows]:
    """Endless batches of `rows` whole utterances; up to half of each is its prompt.

    Rows are as long as the corpus needs; utterances of more than `length` positions are left out.
    """
    fitting = [u for u in utterances if len(u[0]) + u[1].shape[1] <= length]
    if not fitting:
        raise ValueError(f"none of {len(utterances)} utterances fits into {length} positions")
    longest = max(len(phones) + codes.shape[1] for phones, codes in fitting)
    length = min(length, -(-longest // BUCKET) * BUCKET)
    rng = np.random.default_rng(seed)
    while True:
        some = [fitting[i] for i in rng.integers(0, len(fitting), rows)]
        prompts = [int(rng.integers(0, codes.shape[1] // 2 + 1)) for _, codes in some]
        batch = make_rows([p for p, _ in some], [c for _, c in some], prompts, length, config.codebooks)
        yield batch | {"stage_B": rng.integers(1, config.codebooks, rows, np.int32)}


def train_nar(
    utterances: Sequence[Utterance], config: NarConfig, train: TrainConfig, rows: int = 8, length: int = 1024
) -> tuple[Nar, dict[str, float]]:
    """The trained stage, and its smoothed loss and accuracy over all codebooks at the end."""
    graph, params = nnx.split(Nar(config, jnp.dtype(train.dtype), rngs=nnx.Rngs(train.seed)))
    optimizer = make_optimizer(train)
    moments, running = optimizer.init(params), None
    batches = nar_batches(utterances, config, rows, length, train.seed)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: nnx.State, moments: optax.OptState, batch: Rows):
        def loss(params: nnx.State):
            sums = nar_sums(nnx.merge(graph, params), batch)
            return sums[1] / jnp.maximum(sums[0], 1.0), sums

        gradient, sums = jax.grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, sums

    with tqdm(range(train.steps), "codebooks", mininterval=5, disable=None) as bar:
        for i in bar:
            params, moments, sums = step(params, moments, next(batches))
            if i % train.log_every == 0 or i == train.steps - 1:
                count, ce, hits = (float(x) for x in sums)
                now = np.array([ce, hits]) / max(count, 1.0)
                running = now if running is None else 0.7 * running + 0.3 * now
                bar.set_postfix(loss=f"{running[0]:.3f}", top1=f"{running[1]:.3f}")
    return nnx.merge(graph, params), {"loss": float(running[0]), "top1": float(running[1])}
