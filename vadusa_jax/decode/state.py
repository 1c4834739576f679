"""What decoding starts from and what it carries: prompts, and the state between two steps."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from vadusa_jax.decode.sampling import RowSampling
from vadusa_jax.model import cache as kv
from vadusa_jax.model.compiler import jit_for_decoding

FINISH = ("running", "eos", "length", "repeat")  # why a row ended; `repeat`: one token said too often in a row
RUNNING, EOS, LENGTH, REPEAT = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything a step needs and leaves behind; every array begins with the batch rows, or with rows x heads."""

    cache: kv.Cache
    said_BS: jax.Array  # tokens said so far, EOS included; valid below count_B
    step_BS: jax.Array  # backbone pass in which each of them was decided; pass 0 is the prefill
    count_B: jax.Array
    run_B: jax.Array  # how often the last token has been said in a row
    root_B: jax.Array  # last token said: the next pass begins with it
    h_BD: jax.Array  # hidden state that decided it: the draft heads look ahead from here
    memory: Any  # what the drafter keeps
    passes_B: jax.Array  # backbone passes, prefill included
    finish_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of prompts, padded on the right, and what is asked of each row."""

    tokens_BP: jax.Array
    length_B: jax.Array
    least_B: jax.Array  # EOS may not come before so many tokens
    limit_B: jax.Array  # most tokens to say, EOS included
    key_B: jax.Array
    sampling: RowSampling


Rows = TypeVar("Rows", State, Prompts)


@jax.jit
def grow(state: State) -> State:
    """The state with twice the slots: a pass attends to all slots, so that few are better while few are in use."""

    def wider(x_BS: jax.Array) -> jax.Array:
        return jnp.pad(x_BS, ((0, 0), (0, x_BS.shape[1])))

    memory = None if state.memory is None else kv.grow(state.memory)
    said_BS, step_BS = wider(state.said_BS), wider(state.step_BS)
    return dataclasses.replace(state, cache=kv.grow(state.cache), said_BS=said_BS, step_BS=step_BS, memory=memory)


@jit_for_decoding(donate_argnames=("rows",))
def put_row(rows: Rows, row: jax.Array | int, one: Rows) -> Rows:
    """The rows with row `row` replaced by the only one of `one`, which has the same shapes; `rows` is used up."""
    return jax.tree.map(lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, row * len(new), 0), rows, one)


def commit(
    state: State, block_BJ: jax.Array, size_B: jax.Array, limit_B: jax.Array, repeat_limit: int, eos: int
) -> State:
    """Appends the first `size_B` tokens of the block, up to and with the first that ends its row."""
    rows, running_B = jnp.arange(len(size_B)), state.finish_B == RUNNING
    run_B, run_BJ = state.run_B, []
    last_B = jnp.where(state.count_B > 0, state.root_B, -1)
    for j in range(block_BJ.shape[1]):
        run_B = jnp.where(block_BJ[:, j] == last_B, run_B + 1, 1)
        last_B = block_BJ[:, j]
        run_BJ.append(run_B)
    run_BJ = jnp.stack(run_BJ, axis=1)
    index_BJ = state.count_B[:, None] + jnp.arange(block_BJ.shape[1])
    why_BJ = jnp.where(index_BJ + 1 >= limit_B[:, None], LENGTH, RUNNING)
    why_BJ = jnp.where(run_BJ >= repeat_limit, REPEAT, why_BJ)
    why_BJ = jnp.where(block_BJ == eos, EOS, why_BJ)
    inside_BJ = jnp.arange(block_BJ.shape[1]) < size_B[:, None]
    ends_BJ = (why_BJ != RUNNING) & inside_BJ
    ended_before_BJ = jnp.cumsum(ends_BJ, axis=1) - ends_BJ > 0
    said_BJ = inside_BJ & ~ended_before_BJ & running_B[:, None]

    kept_B = jnp.sum(said_BJ, axis=1)
    where_BJ = jnp.where(said_BJ, index_BJ, state.said_BS.shape[1])  # past the end: dropped
    last_B = jnp.maximum(kept_B - 1, 0)
    new_finish_B = jnp.max(jnp.where(ends_BJ & said_BJ, why_BJ, RUNNING), axis=1)
    return dataclasses.replace(
        state,
        said_BS=state.said_BS.at[rows[:, None], where_BJ].set(block_BJ, mode="drop"),
        step_BS=state.step_BS.at[rows[:, None], where_BJ].set(state.passes_B[:, None], mode="drop"),
        count_B=state.count_B + kept_B,
        run_B=jnp.where(running_B, run_BJ[rows, last_B], state.run_B),
        root_B=jnp.where(running_B, block_BJ[rows, last_B], state.root_B),
        passes_B=state.passes_B + running_B,
        finish_B=jnp.where(running_B, new_finish_B, state.finish_B),
    )
