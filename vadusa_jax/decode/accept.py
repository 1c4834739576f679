"""Acceptance rules: which drafted tokens may stand, and what is said where none may. Pure functions, no model.

A rule judges one position at a time: from the target distribution there and the noise that belongs to the position,
it says a token unaided and tells which drafted tokens may stand in its place. The tree is no concern of a rule.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from vadusa_jax.decode.sampling import likeliest
from vadusa_jax.decode.tree import Tree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("log_p", "noise", "free", "recent", "log_q"),
    meta_fields=("repeats",),
)
@dataclasses.dataclass(frozen=True)
class Position:
    """What a rule knows of the position that is to be filled; every array may have any leading axes."""

    log_p: jax.Array  # [..., V] log of the target distribution, as it is filtered
    noise: jax.Array  # [..., X, V] Gumbel noise of this position
    free: jax.Array | None = None  # [..., V] the distribution before the filters; only with repetition-aware sampling
    recent: jax.Array | None = None  # [..., W] the last W tokens before this position, -1 where there are none
    log_q: jax.Array | None = None  # [..., V] what the draft was drawn from; -inf throughout where nothing was drafted
    repeats: int = 0  # so often among the recent tokens is too often; 0: repetition-aware sampling is off

    def drawing_noise(self, draws: int) -> jax.Array:
        """The noise `[..., draws, V]` that first draws use; second ones (of repetition-aware sampling) lie between."""
        return self.noise[..., : 2 * draws : 2, :] if self.repeats else self.noise[..., :draws, :]


class Rule(Protocol):
    """One acceptance rule; each implementation states its guarantee."""

    @property
    def name(self) -> str:
        """How the rule is written, and the key of its trees."""
        ...

    @property
    def draws(self) -> int:
        """X: independent noise rows that the rule needs per position."""
        ...

    @property
    def coupled(self) -> int:
        """How many of these rows, from the first on, decide what may stand: drafts are ranked with them."""
        ...

    def table(self, embedding_VD: jax.Array) -> Any:
        """What the rule works out once per run from the embeddings of speech tokens and EOS; None for most."""
        ...

    def say(self, at: Position, table: Any) -> jax.Array:
        """The token `[...]` that is said where no draft is accepted."""
        ...

    def accepts(self, at: Position, token: jax.Array, table: Any) -> jax.Array:
        """Whether each of the drafted tokens `[..., R]` may stand at the position: booleans `[..., R]`."""
        ...


def draw(at: Position, draws: int) -> jax.Array:
    """Keyed draws `[..., A]` from the target distribution, A = `draws`.

    With repetition-aware sampling (VALL-E 2, arXiv 2406.05370, section 3.2) a token that is frequent among the recent
    ones is drawn again, from the unfiltered distribution without that token.
    """
    token = likeliest(at.log_p[..., None, :] + at.drawing_noise(draws))
    if not at.repeats:
        return token
    seen = jnp.sum(at.recent[..., None, :] == token[..., None], axis=-1)
    vocabulary = jnp.arange(at.log_p.shape[-1])
    others = jnp.where(vocabulary == token[..., None], -jnp.inf, at.free[..., None, :])
    return jnp.where(seen >= at.repeats, likeliest(others + at.noise[..., 1 : 2 * draws : 2, :]), token)


class _Unaided:
    """What rules share that say a keyed draw where no draft is accepted: without drafts they are plain sampling."""

    @property
    def coupled(self) -> int:
        return self.draws

    def table(self, embedding_VD: jax.Array) -> None:
        return None

    def say(self, at: Position, table: None) -> jax.Array:
        return draw(at, 1)[..., 0]


@dataclasses.dataclass(frozen=True)
class Greedy(_Unaided):
    """Accepts the most likely token. Guarantee: the output equals greedy autoregressive decoding."""

    name, draws = "greedy", 0

    def say(self, at: Position, table: None) -> jax.Array:
        return likeliest(at.log_p)

    def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
        return token == likeliest(at.log_p)[..., None]


@dataclasses.dataclass(frozen=True)
class Tolerance(_Unaided):
    """Accepts any of `draws` keyed draws from the target distribution: our reading of VADUSA's tolerance.

    Guarantee: one draw is `exact`: the output equals sampled autoregressive decoding, token for token by seed. More
    draws trade likeness for speed: every token that is said is still a draw from the model's own distribution.
    """

    draws: int

    def __post_init__(self):
        if self.draws < 1:
            raise ValueError(f"tolerance must be at least 1, got {self.draws}")

    @property
    def name(self) -> str:
        return f"tolerance:{self.draws}"

    def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
        return jnp.any(token[..., None] == draw(at, self.draws)[..., None, :], axis=-1)


EXACT = Tolerance(1)


@dataclasses.dataclass(frozen=True)
class Typical(_Unaided):
    """Accepts x if p(x) > min(eps, alpha exp(-H(p))) (Medusa, arXiv 2401.10774, section 2.3.1). No guarantee."""

    eps: float
    alpha: float
    draws = 1

    @property
    def name(self) -> str:
        return f"typical:eps={self.eps:g}:alpha={self.alpha:g}"

    def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
        p = jnp.exp(at.log_p)
        entropy = -jnp.sum(jnp.where(p > 0, p * at.log_p, 0.0), axis=-1, keepdims=True)
        return jnp.exp(_at(at.log_p, token)) > jnp.minimum(self.eps, self.alpha * jnp.exp(-entropy))


@dataclasses.dataclass(frozen=True)
class TopK(_Unaided):
    """Accepts x if it is among the k most likely tokens (as LLaSA+, arXiv 2508.06262, verifies). No guarantee."""

    k: int
    draws = 1

    def __post_init__(self):
        if self.k < 1:
            raise ValueError(f"top-k acceptance needs k of at least 1, got {self.k}")

    @property
    def name(self) -> str:
        return f"topk:{self.k}"

    def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
        own = _at(at.log_p, token)
        likelier = jnp.sum(at.log_p[..., None, :] > own[..., None], axis=-1)
        return (likelier < self.k) & (own > -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Pcg:
    """Accepts x if it is in the keyed draw of a group of alike tokens (after PCG, arXiv 2511.13732; our reading).

    The group of t holds the tokens whose embeddings have a cosine above `threshold` with that of t; a token's mass is
    split evenly over the groups that hold it. Guarantee: groups follow their own distribution under the target
    exactly; without drafts so do tokens; at a threshold of 1 the output equals `exact`, token for token by seed.
    """

    threshold: float
    draws, coupled = 2, 1  # one for the group, one for the token within

    @property
    def name(self) -> str:
        return f"pcg:threshold={self.threshold:g}"

    def table(self, embedding_VD: jax.Array) -> jax.Array:
        """`[V, V]`: whether group g holds token t. EOS, the last token, is alone in its group and in no other."""
        unit_VD = embedding_VD / jnp.linalg.norm(embedding_VD, axis=-1, keepdims=True)
        cosine_VV = jnp.matmul(unit_VD, unit_VD.T, precision="highest")
        speech_V = jnp.arange(len(embedding_VD)) < len(embedding_VD) - 1
        alike_VV = (cosine_VV > self.threshold) & speech_V & speech_V[:, None] & (self.threshold < 1)
        return alike_VV | jnp.eye(len(embedding_VD), dtype=bool)

    def group(self, at: Position, table: jax.Array) -> jax.Array:
        """The keyed draw `[...]` of a group."""
        share = jnp.exp(at.log_p) / jnp.sum(table, axis=0)
        mass = jnp.matmul(share, table.T.astype(share.dtype), precision="highest")
        return likeliest(jnp.log(mass) + at.noise[..., 0, :])

    def say(self, at: Position, table: jax.Array) -> jax.Array:
        within = jnp.where(table[self.group(at, table)], at.log_p - jnp.log(jnp.sum(table, axis=0)), -jnp.inf)
        return likeliest(within + at.noise[..., 1, :])

    def accepts(self, at: Position, token: jax.Array, table: jax.Array) -> jax.Array:
        return table[self.group(at, table)[..., None], token] & (_at(at.log_p, token) > -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Ssd:
    """Accepts x with probability min(1, p(x) / q(x)) + beta (SSD, arXiv 2505.15380), q being what x was drawn from.

    Where a draft is refused, the token comes from the residual max(0, p - q). Guarantee: at beta = 0 the output has
    the distribution of sampled autoregressive decoding (not its tokens by seed). Needs a drafter that draws from
    its q: a draft language model, which drafts a chain.
    """

    beta: float
    draws, coupled = 3, 0  # the residual's, the judge's (its first number), and the drafter's own

    def __post_init__(self):
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must be in 0..1, got {self.beta}")

    @property
    def name(self) -> str:
        return f"ssd:beta={self.beta:g}"

    def table(self, embedding_VD: jax.Array) -> None:
        return None

    def say(self, at: Position, table: None) -> jax.Array:
        q = 0.0 if at.log_q is None else jnp.exp(at.log_q)  # nothing was drafted for the first token
        residual = jnp.maximum(jnp.exp(at.log_p) - q, 0.0)
        some = jnp.sum(residual, axis=-1, keepdims=True) > 0  # p = q to the last bit: refused by rounding alone
        return likeliest(jnp.where(some, jnp.log(residual), at.log_p) + at.noise[..., 0, :])

    def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
        uniform = jnp.exp(-jnp.exp(-at.noise[..., 1, :1]))
        return uniform < jnp.exp(jnp.minimum(0.0, _at(at.log_p, token) - _at(at.log_q, token))) + self.beta


@dataclasses.dataclass(frozen=True)
class Unverified(_Unaided):
    """Accepts every draft: for drafters that need no verification. No guarantee."""

    name, draws = "unverified", 1

    def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
        return jnp.ones(token.shape, bool)


def _at(log_p: jax.Array, token: jax.Array) -> jax.Array:
    """`log_p[..., V]` at the tokens `[..., R]`."""
    return jnp.take_along_axis(log_p, token, axis=-1)


def judge(rule: Rule, tree: Tree, token_BT: jax.Array, at: Position, table: Any) -> tuple[jax.Array, jax.Array]:
    """The deepest node that is accepted together with all its ancestors; ties go to the likelier path.

    Takes the tokens of the nodes and the position `[B, T, ...]` behind each of them.

    Returns:
        node_B, the index of that node, and accepted_B, its depth (the number of drafted tokens accepted).
    """
    if not tree.depth:
        zero_B = jnp.zeros(len(token_BT), jnp.int32)
        return zero_B, zero_B
    child_BTC = token_BT[:, jnp.asarray(tree.child_TC)]
    mine = (slice(None), jnp.asarray(tree.parent_T), jnp.asarray(tree.sibling_T))
    is_root_T, mask_TT = jnp.arange(len(tree)) == 0, jnp.asarray(tree.ancestor_TT)
    ok_BT = rule.accepts(at, child_BTC, table)[mine] | is_root_T
    whole_BT = jnp.all(ok_BT[:, None, :] | ~mask_TT, axis=-1)
    edge_BT = jnp.where(ok_BT & ~is_root_T, _at(at.log_p, child_BTC)[mine], 0.0)
    edge_BT = jnp.maximum(edge_BT, -1e30)  # a token drawn again may be one that the filters removed
    likelihood_BT = jnp.sum(jnp.where(mask_TT, edge_BT[:, None, :], 0.0), axis=-1)
    depth_BT = jnp.where(whole_BT, jnp.asarray(tree.depth_T), -1)
    accepted_B = jnp.max(depth_BT, axis=-1)
    node_B = jnp.argmax(jnp.where(depth_BT == accepted_B[:, None], likelihood_BT, -jnp.inf), axis=-1)
    return node_B, accepted_B
