"""The decode loop: prompts in, speech tokens out, in one compiled while loop with static shapes.

Plain autoregressive decoding is this loop with a tree that is only its root. The loop is the one place where model,
cache, tree and acceptance rule meet; it never talks to the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from vadusa_jax.decode.accept import Rule, longest_path, rank_drafts
from vadusa_jax.decode.sampling import Sampling, keyed_noise
from vadusa_jax.decode.tree import Tree
from vadusa_jax.model import cache as kv
from vadusa_jax.model.heads import SpeechLM

FINISH = ("running", "eos", "length", "repeat")  # why a row ended; `repeat`: one token said too often in a row
RUNNING, EOS, LENGTH, REPEAT = range(4)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the compiled loop depends on."""

    tree: Tree
    rule: Rule
    sampling: Sampling
    repeat_limit: int
    coupled: bool = True  # rank guesses with the noise that the target will be drawn with


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Everything a step needs and leaves behind."""

    cache: kv.Cache
    said_BS: jax.Array  # tokens said so far, EOS included; valid below count_B
    step_BS: jax.Array  # backbone pass in which each of them was decided; pass 0 is the prefill
    count_B: jax.Array
    run_B: jax.Array  # how often the last token has been said in a row
    root_B: jax.Array  # last token said: the next pass begins with it
    draft_BKV: jax.Array  # the heads' logits at the position before the root
    passes_B: jax.Array  # backbone passes, prefill included
    finish_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of prompts, padded on the right, with the limit and the key of each row."""

    tokens_BP: jax.Array
    length_B: jax.Array
    limit_B: jax.Array  # most tokens to say, EOS included
    key_B: jax.Array


@functools.partial(jax.jit, static_argnames=("settings", "slots"))
def generate(model: SpeechLM, prompts: Prompts, *, settings: Settings, slots: int) -> State:
    """Decodes all rows until each has finished.

    Args:
        model: backbone and draft heads.
        prompts: at least one row; `limit_B` at least 1.
        settings: tree, rule and sampling (one compilation each).
        slots: cache slots a row, at least `slots_needed(...)`: the caller picks a bucket, so that few are compiled.

    Returns:
        The final state: `said_BS` up to `count_B`, `step_BS`, `passes_B`, `finish_B`.
    """
    state = _prefill(model, prompts, settings, slots)

    def unfinished(state: State) -> jax.Array:
        return jnp.any(state.finish_B == RUNNING)  # finished rows are frozen and wait for the others

    return jax.lax.while_loop(unfinished, functools.partial(_step, model, prompts, settings), state)


def slots_needed(prompt_length: int, limit: int, tree: Tree) -> int:
    """Cache slots for a prompt, what it may say, and one whole path behind it."""
    return prompt_length + limit + tree.depth + 1


def _prefill(model: SpeechLM, prompts: Prompts, settings: Settings, slots: int) -> State:
    batch, padded = prompts.tokens_BP.shape
    positions_BP = jnp.broadcast_to(jnp.arange(padded), (batch, padded))
    causal_BPP = jnp.broadcast_to(jnp.tril(jnp.ones((padded, padded), bool)), (batch, padded, padded))
    h_BPD, new = model.backbone(prompts.tokens_BP, positions_BP, causal_BPP)
    cache = kv.empty(model.backbone.config, batch, max(slots, padded), settings.tree.depth + 1, h_BPD.dtype)
    cache = kv.append(cache, new, prompts.length_B)
    h_BD = h_BPD[jnp.arange(batch), prompts.length_B - 1]
    log_p_BV = settings.sampling.log_probs(model.backbone.logits(h_BD))
    noise_BXV = _noise(prompts.key_B, prompts.length_B[:, None], settings, log_p_BV)[:, 0]
    first_B = settings.rule.allowed(log_p_BV, noise_BXV)[:, 0]
    zero_B = jnp.zeros((batch,), jnp.int32)
    buffer_BS = jnp.zeros((batch, slots), jnp.int32)
    state = State(cache, buffer_BS, buffer_BS, zero_B, zero_B, zero_B, _draft(model, settings, h_BD), zero_B, zero_B)
    return _say(state, first_B[:, None], jnp.ones((batch,), jnp.int32), prompts.limit_B, settings, model)


def _step(model: SpeechLM, prompts: Prompts, settings: Settings, state: State) -> State:
    tree, rows = settings.tree, jnp.arange(len(state.root_B))
    depth_T = jnp.asarray(tree.depth_T)
    cache = kv.flush(state.cache)
    length_B = cache.length_B

    # Draft: the noise of a position serves the guesses for it and the target that judges them.
    target_BJ = length_B[:, None] + 1 + jnp.arange(tree.depth + 1)
    noise_BJXV = _noise(prompts.key_B, target_BJ, settings, state.draft_BKV)
    token_BT = state.root_B[:, None]
    if tree.depth:
        log_q_BKV = settings.sampling.log_probs(state.draft_BKV)
        known_BKXV = noise_BJXV[:, : tree.depth, : None if settings.coupled else 0]
        guess_BKR = rank_drafts(log_q_BKV, known_BKXV, tree.ranks)
        drafted_BT = guess_BKR[:, jnp.asarray(tree.depth_T[1:] - 1), jnp.asarray(tree.rank_T[1:])]
        token_BT = jnp.concatenate([token_BT, drafted_BT], axis=1)

    # Verify: one pass over the tree; each node sees the cache and its ancestors.
    mask_BTT = jnp.broadcast_to(jnp.asarray(tree.ancestor_TT), (len(rows), len(tree), len(tree)))
    h_BTD, new = model.backbone(token_BT, length_B[:, None] + depth_T, mask_BTT, cache)

    # Accept: the longest path that the rule allows, then one token more.
    log_p_BTV = settings.sampling.log_probs(model.backbone.logits(h_BTD))
    allowed_BTA = settings.rule.allowed(log_p_BTV, noise_BJXV[:, depth_T])
    node_B, accepted_B = longest_path(tree, token_BT, allowed_BTA, log_p_BTV)
    path_BJ = jnp.asarray(tree.path_TJ)[node_B]
    next_B = allowed_BTA[rows, node_B, 0]
    after_BJ = jnp.concatenate([token_BT[rows[:, None], path_BJ[:, 1:]], next_B[:, None]], axis=1)
    block_BJ = jnp.where(jnp.arange(tree.depth + 1) == accepted_B[:, None], next_B[:, None], after_BJ)

    # Commit: the path is for the cache, the block is said; a finished row keeps its length.
    cache = kv.accept(cache, new, path_BJ, jnp.where(state.finish_B == RUNNING, accepted_B + 1, 0))
    state = dataclasses.replace(state, cache=cache, draft_BKV=_draft(model, settings, h_BTD[rows, node_B]))
    return _say(state, block_BJ, accepted_B + 1, prompts.limit_B, settings, model)


def _say(
    state: State, block_BJ: jax.Array, size_B: jax.Array, limit_B: jax.Array, settings: Settings, model: SpeechLM
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
    why_BJ = jnp.where(run_BJ >= settings.repeat_limit, REPEAT, why_BJ)
    why_BJ = jnp.where(block_BJ == model.backbone.config.eos, EOS, why_BJ)
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


def _draft(model: SpeechLM, settings: Settings, h_BD: jax.Array) -> jax.Array:
    """The logits of the heads that the tree uses, `[B, depth, V]`."""
    if not settings.tree.depth:
        return jnp.zeros((len(h_BD), 0, model.backbone.config.output_vocab), h_BD.dtype)
    return model.heads(h_BD, settings.tree.depth)


def _noise(key_B: jax.Array, position_BJ: jax.Array, settings: Settings, like: jax.Array) -> jax.Array:
    return keyed_noise(key_B, position_BJ, settings.rule.draws, like.shape[-1], like.dtype)
