"""Acceptance rules: which drafted tokens may stand, and what is said where none may. Pure functions, no model.

A rule looks at every node of the draft tree at once. From the target distribution at a node and the noise of the
position it predicts, it names the tokens that may follow; the first of them is what plain decoding would say there.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from vadusa_jax.decode.sampling import likeliest, likeliest_few
from vadusa_jax.decode.tree import Tree


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

    def allowed(self, log_p: jax.Array, noise: jax.Array) -> jax.Array:
        """Tokens `[..., A]` that may follow, the first being the one to say unaided.

        Takes log_p `[..., V]` and noise `[..., X, V]` of the same position.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Accepts the most likely token. Guarantee: the output equals greedy autoregressive decoding."""

    name, draws = "greedy", 0

    def allowed(self, log_p: jax.Array, noise: jax.Array) -> jax.Array:
        return likeliest(log_p)[..., None]


@dataclasses.dataclass(frozen=True)
class Tolerance:
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

    def allowed(self, log_p: jax.Array, noise: jax.Array) -> jax.Array:
        return likeliest(log_p[..., None, :] + noise)


EXACT = Tolerance(1)


def rank_drafts(log_q: jax.Array, noise: jax.Array, ranks: int) -> jax.Array:
    """The `ranks` best guesses of a head, likeliest to be *drawn* first: `[..., R]`.

    Takes the head's log_q `[..., V]` and the noise `[..., X, V]` with which the target will be drawn at that position.
    The noise is known before the target is, so a guess that the noise favours is the better guess: this couples draft
    and target (they share their Gumbel noise) and never changes what is said, only how often a guess is right. With
    several draws a token counts by the draw in which it comes closest to winning.
    """
    score = log_q
    if noise.shape[-2]:
        perturbed = log_q[..., None, :] + noise
        behind = jnp.max(perturbed - jnp.max(perturbed, axis=-1, keepdims=True), axis=-2)
        score = jnp.where(behind == 0.0, jnp.exp(log_q), behind)  # the draws come first, the likeliest ahead
    return likeliest_few(score, ranks)


def longest_path(
    tree: Tree, token_BT: jax.Array, allowed_BTA: jax.Array, log_p_BTV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The deepest node that is accepted together with all its ancestors; ties go to the likelier path.

    Returns:
        node_B, the index of that node, and accepted_B, its depth (the number of drafted tokens accepted).
    """
    parent_T, mask_TT = jnp.asarray(tree.parent_T), jnp.asarray(tree.ancestor_TT)
    is_root_T = jnp.arange(len(tree)) == 0
    ok_BT = jnp.any(token_BT[..., None] == allowed_BTA[:, parent_T], axis=-1) | is_root_T
    whole_BT = jnp.all(ok_BT[:, None, :] | ~mask_TT, axis=-1)
    edge_BT = log_p_BTV[jnp.arange(len(token_BT))[:, None], parent_T, token_BT]
    edge_BT = jnp.where(ok_BT & ~is_root_T, edge_BT, 0.0)
    likelihood_BT = jnp.sum(jnp.where(mask_TT, edge_BT[:, None, :], 0.0), axis=-1)
    depth_BT = jnp.where(whole_BT, jnp.asarray(tree.depth_T), -1)
    accepted_B = jnp.max(depth_BT, axis=-1)
    node_B = jnp.argmax(jnp.where(depth_BT == accepted_B[:, None], likelihood_BT, -jnp.inf), axis=-1)
    return node_B, accepted_B
