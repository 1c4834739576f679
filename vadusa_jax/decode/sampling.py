"""Sampling that plain and speculative decoding share: filters, and noise keyed by position.

The token at absolute position n of a sequence is `argmax(log p_n + G(key, n))` with Gumbel noise G: a sample of p_n
that depends on the sequence's key and on the position, never on the step, the tree or the batch that computed p_n.
Decoding with drafts therefore reproduces plain decoding token for token.
"""

import dataclasses
from collections.abc import Callable, Sequence

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
        return RowSampling.of([self]).log_probs(logits[None])[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """The `Sampling` of each row of a batch; None for a filter that no row uses, so that it is not compiled."""

    temperature_B: jax.Array
    top_k_B: jax.Array | None
    top_p_B: jax.Array | None

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> "RowSampling":
        """One row for each setting."""
        top_k_B = jnp.array([r.top_k or jnp.iinfo(jnp.int32).max for r in rows], jnp.int32)
        top_p_B = jnp.array([r.top_p for r in rows], jnp.float32)
        return cls(
            jnp.array([r.temperature for r in rows], jnp.float32),
            top_k_B if any(r.top_k for r in rows) else None,
            top_p_B if any(r.top_p < 1 for r in rows) else None,
        )

    def free(self, logits: jax.Array) -> jax.Array:
        """Log of the distribution `[B, ..., V]` before the filters."""
        return jax.nn.log_softmax(logits / _per_row(self.temperature_B, logits).astype(logits.dtype))

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Log of the target distribution `[B, ..., V]`; -inf where a filter removed a token."""
        log_p = self.free(logits)
        if self.top_k_B is not None:
            top_k = jnp.minimum(_per_row(self.top_k_B, log_p)[..., 0], log_p.shape[-1])
            log_p = _keep(log_p, lambda kept: jnp.sum(kept, axis=-1), top_k)
        if self.top_p_B is not None:
            p, top_p = jnp.exp(log_p), _per_row(self.top_p_B, log_p)[..., 0]
            # Where rounding keeps the sum of all under a top_p of 1, nothing is enough and everything stays.
            log_p = _keep(log_p, lambda kept: jnp.sum(jnp.where(kept, p, 0.0), axis=-1), top_p)
        return log_p


def _per_row(x_B: jax.Array, like: jax.Array) -> jax.Array:
    return x_B.reshape(-1, *[1] * (like.ndim - 1))


def _keep(log_p: jax.Array, amount: Callable[[jax.Array], jax.Array], enough: jax.Array) -> jax.Array:
    """Keeps the fewest most likely tokens whose `amount` is `enough` (ties with the last stay) and renormalises.

    The floor is found by bisection over the bits of the floats, which are ordered like the floats themselves, until
    the amount is met exactly or one float is left: exact, and on the CPU an order faster than the sort that XLA makes
    of `top_k`. A thousand speech tokens take about 8 halvings.
    """
    surprise = jnp.maximum(-log_p, 0.0)  # infinite where an earlier filter removed the token
    bits = jnp.int64 if log_p.dtype == jnp.float64 else jnp.int32
    ordered = lax.bitcast_convert_type(surprise + 0.0, bits)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        found = amount(ordered <= middle[..., None])
        low = jnp.where(found > enough, low, jnp.where(found < enough, middle + 1, middle))
        return low, jnp.where(found < enough, high, middle)

    bounds = jnp.min(ordered, axis=-1), jnp.max(ordered, axis=-1)
    _, floor = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, bounds)
    floor = jnp.max(jnp.where(ordered <= floor[..., None], ordered, 0), axis=-1)  # of the last token that stays
    # A few last bits of slack: where XLA computes log_p again for this line, a token may fall past its own floor.
    log_p = jnp.where(ordered <= floor[..., None] + 8, log_p, -jnp.inf)
    return log_p - jax.nn.logsumexp(log_p, axis=-1, keepdims=True)


def likeliest(x: jax.Array) -> jax.Array:
    """Index of the (first) maximum over the last axis: `argmax` as two plain reductions, which CPUs vectorise."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, x.shape[-1] - 1), axis=-1)


def likeliest_few(x: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` largest over the last axis, largest first: `[..., count]`, for a small count."""
    index, found = jnp.arange(x.shape[-1], dtype=jnp.int32), []
    for _ in range(count):
        found.append(likeliest(x))
        x = jnp.where(index == found[-1][..., None], -jnp.inf, x)
    return jnp.stack(found, axis=-1)


def keyed_noise(key_B: jax.Array, position_BJ: jax.Array, draws: int, vocab: int, dtype: jnp.dtype) -> jax.Array:
    """Gumbel noise `[B, J, X, V]` for X = `draws` independent draws at each position of each sequence.

    Draw 0 is the one that plain decoding uses. Noise is drawn in float32 whatever `dtype` is, so that a seed means
    the same in every precision. Keys are folded and bits drawn as `jax.random` does it, bit for bit.
    """
    key = tuple(jnp.moveaxis(jax.random.key_data(key_B), -1, 0))

    def fold(key: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = (half[..., None] for half in key)
        number = number.astype(jnp.uint32)
        return _threefry((first, second), (jnp.zeros_like(number), number))

    at_position = fold(key, position_BJ)
    a_BJXV, b_BJXV = fold(fold(at_position, jnp.arange(draws)), jnp.arange(vocab))
    mantissa_BJXV = ((a_BJXV ^ b_BJXV) >> 9) | jnp.uint32(0x3F800000)  # a float in [1, 2)
    uniform_BJXV = lax.bitcast_convert_type(mantissa_BJXV, jnp.float32) - 1.0
    uniform_BJXV = jnp.maximum(uniform_BJXV, jnp.finfo(jnp.float32).tiny)
    return -jnp.log(-jnp.log(uniform_BJXV)).astype(dtype)


def _threefry(key: tuple[jax.Array, jax.Array], x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 (Salmon et al. 2011), 20 rounds in one fusion: JAX's own is a loop of many kernels on CPUs."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    a, b = x[0] + keys[0], x[1] + keys[1]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            a = a + b
            b = ((b << turn) | (b >> (32 - turn))) ^ a
        a, b = a + keys[(i + 1) % 3], b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return a, b


def row_keys(seed: int, rows: jax.Array) -> jax.Array:
    """One key per sequence from the run's seed and the sequence's own number: moving a row changes nothing."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), row))(jnp.asarray(rows))
