"""Drafters: who fills the tree with guesses.

A drafter is a value that the decode loop takes as an argument: its arrays (a transition matrix, a draft model) are
data, everything else about it is compiled in.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.decode.sampling import likeliest, likeliest_few
from vadusa_jax.decode.tree import Tree, TreeError, chain
from vadusa_jax.model import cache as kv
from vadusa_jax.model.backbone import Backbone
from vadusa_jax.model.heads import HeadWeights, SequentialHeads, SpeechLM, draft_logits


@dataclasses.dataclass(frozen=True)
class Context:
    """Where a step stands before it drafts."""

    h_BD: jax.Array  # hidden state that decided the root
    root_B: jax.Array  # last token said
    length_B: jax.Array  # its position
    log_probs: Callable[[jax.Array, jax.Array, bool], jax.Array]  # of logits and positions, filtered or not
    noise_BJXV: jax.Array  # of the positions behind the root, all rows of the rule
    coupled: int  # rows of it that guesses are ranked with

    def log_q(self, logits_BIV: jax.Array, depth_I: Sequence[int]) -> jax.Array:
        """Guesses for the positions `depth_I` behind the root as they would be sampled."""
        return self.log_probs(logits_BIV, self.length_B[:, None] + jnp.asarray(depth_I), True)

    def best(self, logits_BIV: jax.Array, depth_I: Sequence[int], ranks: int) -> jax.Array:
        """The best guesses `[B, I, R]` for the positions `depth_I` behind the root.

        Unfiltered: finding the top k takes longer than all else here, and guesses are right as often without.
        """
        noise_BIXV = self.noise_BJXV[:, np.asarray(depth_I) - 1, : self.coupled]
        log_q_BIV = self.log_probs(logits_BIV, self.length_B[:, None] + jnp.asarray(depth_I), False)
        return rank_drafts(log_q_BIV, noise_BIXV, ranks)


class Drafter(Protocol):
    """Fills a tree. `memory` is what a drafter keeps between steps: None where the hidden state is enough."""

    def check(self, model: SpeechLM, tree: Tree) -> None:
        """Raises TreeError if the drafter cannot fill the tree with this model."""
        ...

    def begin(self, tokens_BP: jax.Array, length_B: jax.Array, slots: int) -> Any:
        """The memory after the prompt."""
        ...

    def prepare(self, model: SpeechLM, tree: Tree) -> Any:
        """What the drafter works out once, before the loop: copies of weights would be made in every step."""
        ...

    def draft(
        self, model: SpeechLM, ready: Any, tree: Tree, memory: Any, at: Context
    ) -> tuple[jax.Array, jax.Array | None, Any]:
        """The tokens `[B, T-1]` of all nodes but the root, the log of what each depth was drawn from, `[B, depth, V]`
        (None where guesses are no draws), and the new memory.
        """
        ...

    def keep(self, memory: Any, length_B: jax.Array) -> Any:
        """The memory once `length_B` positions of each row are committed."""
        ...


class _Memoryless:
    """What drafters share that need only the hidden state."""

    def check(self, model: SpeechLM, tree: Tree) -> None:
        tree.check(model.head_count, model.backbone.config.output_vocab)

    def begin(self, tokens_BP: jax.Array, length_B: jax.Array, slots: int) -> None:
        return None

    def prepare(self, model: SpeechLM, tree: Tree) -> Any:
        return None

    def keep(self, memory: None, length_B: jax.Array) -> None:
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Medusa(_Memoryless):
    """Draft heads that guess independently of each other: head d guesses all nodes of depth d at once."""

    def prepare(self, model: SpeechLM, tree: Tree) -> HeadWeights:
        return model.heads.first(tree.depth)

    def draft(
        self, model: SpeechLM, ready: HeadWeights, tree: Tree, memory: None, at: Context
    ) -> tuple[jax.Array, None, None]:
        guess_BJR = at.best(draft_logits(at.h_BD, ready), range(1, tree.depth + 1), tree.ranks)
        return guess_BJR[:, jnp.asarray(tree.depth_T[1:] - 1), jnp.asarray(tree.rank_T[1:])], None, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequential(_Memoryless):
    """Draft heads that see what was drafted before them (Hydra, arXiv 2402.05109): the tree grows depth by depth."""

    def draft(
        self, model: SpeechLM, ready: None, tree: Tree, memory: None, at: Context
    ) -> tuple[jax.Array, None, None]:
        token = {0: at.root_B}  # of every node so far
        parents, z_BID = [0], at.h_BD[:, None]  # nodes of the last depth that have children, and their states
        for depth in range(1, tree.depth + 1):
            embedded_BID = model.backbone.embed(jnp.stack([token[i] for i in parents], axis=1))
            z_BID, logits_BIV = model.heads.follow(depth, z_BID, embedded_BID)
            guess_BIR = at.best(logits_BIV, [depth] * len(parents), tree.ranks)
            nodes = np.flatnonzero(tree.depth_T == depth)
            token |= {i: guess_BIR[:, parents.index(tree.parent_T[i]), tree.rank_T[i]] for i in nodes}
            inner = [i for i in nodes if i in tree.parent_T]
            z_BID = z_BID[:, np.array([parents.index(tree.parent_T[i]) for i in inner], np.int32)]
            parents = inner
        return jnp.stack([token[i] for i in range(1, len(tree))], axis=1), None, None


MEDUSA = Medusa()


def head_drafter(model: SpeechLM) -> Drafter:
    """The drafter that goes with a model's heads."""
    return Sequential() if isinstance(model.heads, SequentialHeads) else MEDUSA


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Viterbi(_Memoryless):
    """The likeliest path through the heads' guesses by a matrix of token transitions (arXiv 2410.13839).

    Drafts a chain that is said unverified (`accept.Unverified`): every step says one token and one of each head.
    Our reading: a path's score is the sum of the heads' log q, with the noise of the position added while sampling,
    and of the log-probabilities of its transitions, starting from the root.
    """

    log_transition_VV: jax.Array  # from the row's token to the column's
    width: int = dataclasses.field(default=16, metadata={"static": True})  # guesses of a head that paths go through

    def check(self, model: SpeechLM, tree: Tree) -> None:
        super().check(model, tree)
        _check_chain(self, tree)

    def prepare(self, model: SpeechLM, tree: Tree) -> HeadWeights:
        return model.heads.first(tree.depth)

    def draft(
        self, model: SpeechLM, ready: HeadWeights, tree: Tree, memory: None, at: Context
    ) -> tuple[jax.Array, None, None]:
        depths, rows = range(1, tree.depth + 1), jnp.arange(len(at.root_B))
        score_BDV = at.log_q(draft_logits(at.h_BD, ready), depths)
        if at.coupled:
            score_BDV += at.noise_BJXV[:, : tree.depth, 0]
        guess_BDR = likeliest_few(score_BDV, self.width)
        own_BDR = jnp.take_along_axis(score_BDV, guess_BDR, axis=-1)
        best_BR = own_BDR[:, 0] + self.log_transition_VV[at.root_B[:, None], guess_BDR[:, 0]]
        back = []
        for d in range(1, tree.depth):
            step_BRR = best_BR[:, :, None] + self.log_transition_VV[guess_BDR[:, d - 1, :, None], guess_BDR[:, d, None]]
            back.append(jnp.argmax(step_BRR, axis=1))
            best_BR = jnp.max(step_BRR, axis=1) + own_BDR[:, d]
        at_B, tokens = jnp.argmax(best_BR, axis=-1), []
        for d in reversed(range(tree.depth)):
            tokens.insert(0, guess_BDR[rows, d, at_B])
            at_B = back[d - 1][rows, at_B] if d else at_B
        return jnp.stack(tokens, axis=1), None, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftLM:
    """A small language model that drafts a chain by speaking ahead on its own; its memory is its KV cache.

    It draws with the last noise row of the rule: the target's own noise under `exact`, noise of its own under `Ssd`.
    """

    backbone: Backbone

    def check(self, model: SpeechLM, tree: Tree) -> None:
        _check_chain(self, tree)
        if self.backbone.config.output_vocab != model.backbone.config.output_vocab:
            raise TreeError(
                f"the draft model scores {self.backbone.config.output_vocab} tokens, the model "
                f"{model.backbone.config.output_vocab}: they need one vocabulary"
            )

    def begin(self, tokens_BP: jax.Array, length_B: jax.Array, slots: int) -> kv.Cache:
        batch, padded = tokens_BP.shape
        causal_BPP = jnp.broadcast_to(jnp.tril(jnp.ones((padded, padded), bool)), (batch, padded, padded))
        h_BPD, new = self.backbone(tokens_BP, jnp.broadcast_to(jnp.arange(padded), (batch, padded)), causal_BPP)
        cache = kv.empty(self.backbone.config, batch, slots, 1, h_BPD.dtype)
        return kv.append(cache, new, length_B)

    def prepare(self, model: SpeechLM, tree: Tree) -> None:
        return None

    def draft(
        self, model: SpeechLM, ready: None, tree: Tree, memory: kv.Cache, at: Context
    ) -> tuple[jax.Array, jax.Array, kv.Cache]:
        token_B, tokens, log_q = at.root_B, [], []
        batch, one_B = len(token_B), jnp.ones_like(token_B)
        for depth in range(1, tree.depth + 2):  # the last pass guesses nothing: it remembers the last guess
            memory = kv.flush(memory)
            alone_B11 = jnp.ones((batch, 1, 1), bool)
            h_B1D, new = self.backbone(token_B[:, None], at.length_B[:, None] + depth - 1, alone_B11, memory)
            memory = kv.accept(memory, new, jnp.zeros((batch, 1), jnp.int32), one_B)
            if depth <= tree.depth:
                log_q_BV = at.log_q(self.backbone.logits(h_B1D), [depth])[:, 0]
                noise_BXV = at.noise_BJXV[:, depth - 1, -1:]
                token_B = likeliest(log_q_BV + noise_BXV[:, 0] if noise_BXV.shape[1] else log_q_BV)
                tokens.append(token_B)
                log_q.append(log_q_BV)
        return jnp.stack(tokens, axis=1), jnp.stack(log_q, axis=1), memory

    def keep(self, memory: kv.Cache, length_B: jax.Array) -> kv.Cache:
        return dataclasses.replace(kv.flush(memory), length_B=length_B)  # what lies behind is overwritten


def _check_chain(drafter: Drafter, tree: Tree) -> None:
    if tree != chain(tree.depth):
        raise TreeError(f"{type(drafter).__name__} drafts a chain, the tree branches: use `:chain=N` instead of a tree")


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
