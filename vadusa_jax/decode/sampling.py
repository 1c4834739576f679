"""Sampling that plain and speculative decoding share: filters, and noise keyed by position.

The token at absolute position n of a sequence is `argmax(log p_n + G(key, n))` with Gumbel noise G: a sample of p_n
that depends on the sequence's key and on the position, never on the step, the tree or the batch that computed p_n.
Decoding with drafts therefore reproduces plain decoding token for token.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is done to the model's distribution before a token is drawn from it."""

    temperature: float = 0.8
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the most likely tokens that hold this much probability together; 1: all

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}; use a greedy mode for argmax")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"need top_k >= 0 and 0 < top_p <= 1, got top_k={self.top_k}, top_p={self.top_p}")

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Log of the target distribution over the last axis; -inf where a filter removed a token."""
        log_p = jax.nn.log_softmax(logits / self.temperature)
        k = min(self.top_k or logits.shape[-1], logits.shape[-1])
        if k == logits.shape[-1] and self.top_p == 1.0:
            return log_p
        largest = lax.top_k(log_p, k)[0]
        floor = largest[..., -1:]
        if self.top_p < 1.0:  # the mass *before* a token decides, so that the likeliest always stays
            mass = jnp.cumsum(jax.nn.softmax(largest), axis=-1) - jax.nn.softmax(largest)
            kept = jnp.sum(mass < self.top_p, axis=-1, keepdims=True)
            floor = jnp.take_along_axis(largest, kept - 1, axis=-1)
        log_p = jnp.where(log_p >= floor, log_p, -jnp.inf)
        return log_p - jax.nn.logsumexp(log_p, axis=-1, keepdims=True)


def keyed_noise(key_B: jax.Array, position_BJ: jax.Array, draws: int, vocab: int, dtype: jnp.dtype) -> jax.Array:
    """Gumbel noise `[B, J, X, V]` for X = `draws` independent draws at each position of each sequence.

    Draw 0 is the one that plain decoding uses. Noise is drawn in float32 whatever `dtype` is, so that a seed means
    the same in every precision.
    """

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        at_position = jax.random.fold_in(key, position)
        draw = jax.vmap(lambda x: jax.random.gumbel(jax.random.fold_in(at_position, x), (vocab,), jnp.float32))
        return draw(jnp.arange(draws))

    return jax.vmap(jax.vmap(one, (None, 0)))(key_B, position_BJ).astype(dtype)


def row_keys(seed: int, rows: jax.Array) -> jax.Array:
    """One key per sequence from the run's seed and the sequence's own number: moving a row changes nothing."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.asarray(rows))
