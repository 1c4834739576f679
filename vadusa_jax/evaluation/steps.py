"""Decoding looked at pass by pass: what was drafted, and what of it stands.

The compiled loop is the one that speaks. It stops after every pass, and its drafter is wrapped in one that remembers
what it drafted.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.decode.draft import Context, Drafter
from vadusa_jax.decode.loop import advance, prefill
from vadusa_jax.decode.prompts import check_room, slots_bucket
from vadusa_jax.decode.state import RUNNING, State
from vadusa_jax.decode.tree import Tree
from vadusa_jax.text import Line


@dataclasses.dataclass(frozen=True)
class Step:
    """One pass of the model over a draft tree."""

    tree: Tree
    token_T: np.ndarray  # int32: the last token said, then what was drafted behind it
    block: np.ndarray  # int32: the tokens that the pass said

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes that stand, the root first; the last token of the block is the model's own, or the end."""
        nodes = [0]
        for token in self.block[:-1]:
            children = np.flatnonzero((self.tree.parent_T == nodes[-1]) & (np.arange(len(self.tree)) > 0))
            nodes.append(int(next(i for i in children if self.token_T[i] == token)))
        return tuple(nodes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("drafter",), meta_fields=("nodes",))
@dataclasses.dataclass(frozen=True)
class Recorder:
    """A drafter that keeps, beside the memory of its own, the tokens `[B, nodes]` of its last draft."""

    drafter: Drafter
    nodes: int

    def check(self, model: Any, tree: Tree) -> None:
        self.drafter.check(model, tree)

    def begin(self, tokens_BP: jax.Array, length_B: jax.Array, slots: int) -> tuple[Any, jax.Array]:
        return self.drafter.begin(tokens_BP, length_B, slots), jnp.zeros((len(tokens_BP), self.nodes), jnp.int32)

    def prepare(self, model: Any, tree: Tree) -> Any:
        return self.drafter.prepare(model, tree)

    def draft(
        self, model: Any, ready: Any, tree: Tree, memory: tuple[Any, jax.Array], at: Context
    ) -> tuple[jax.Array, jax.Array | None, tuple[Any, jax.Array]]:
        token_BT, log_q_BJV, own = self.drafter.draft(model, ready, tree, memory[0], at)
        return token_BT, log_q_BJV, (own, token_BT.astype(jnp.int32))

    def keep(self, memory: tuple[Any, jax.Array], length_B: jax.Array) -> tuple[Any, jax.Array]:
        return self.drafter.keep(memory[0], length_B), memory[1]


def record_steps(voice: Any, text: str, mode: Any, seed: int = 0) -> list[Step]:
    """Every pass behind the prefill, when `voice.speak` says the text in a mode that drafts by heads or by Viterbi.

    The blocks, behind the one token of the prefill, are what `speak` says: text and seed decide it.
    Raises what `voice.speak` raises, and ValueError for `ssd`, which needs its own drafter.
    """
    prompts, settings = voice.prompts([Line.of(text)], seed), voice.settings(mode)
    check_room(prompts, voice.config.model)
    tree, drafter = settings.tree, Recorder(voice.drafter(mode), len(settings.tree) - 1)
    room = prompts.tokens_BP.shape[1] + int(prompts.limit_B[0]) + 2 * (tree.depth + 1)  # nothing has to grow
    state = prefill(voice.lm, prompts, settings=settings, slots=slots_bucket(room), drafter=drafter)
    steps, (said, _, finish) = [], _said(state)
    while finish == RUNNING:
        state = advance(voice.lm, prompts, state, count=len(said) + 1, settings=settings, drafter=drafter)
        before, (said, drafted, finish) = said, _said(state)
        steps.append(Step(tree, np.concatenate([before[-1:], drafted]), said[len(before) :]))
    return steps


def _said(state: State) -> tuple[np.ndarray, np.ndarray, int]:
    """What the only row has said, what was drafted last, and why it ended."""
    drafted = state.memory[1] if state.memory is not None else np.zeros((1, 0), np.int32)
    said, count, drafted, finish = jax.device_get((state.said_BS, state.count_B, drafted, state.finish_B))
    return said[0, : count[0]], drafted[0], int(finish[0])
