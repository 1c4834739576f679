"""The decode loop: prompts in, speech tokens out, in compiled while loops with static shapes.

Plain autoregressive decoding is this loop with a tree that is only its root. The loop is the one place where model,
cache, tree, drafter and acceptance rule meet; it talks to the host only when a row has finished or its slots are full.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from vadusa_jax.decode.accept import Pcg, Position, Rule, Ssd, judge
from vadusa_jax.decode.draft import MEDUSA, Context, Drafter, DraftLM
from vadusa_jax.decode.sampling import keyed_noise
from vadusa_jax.decode.state import RUNNING, Prompts, State, commit, grow
from vadusa_jax.decode.tree import Tree
from vadusa_jax.model import cache as kv
from vadusa_jax.model.compiler import jit_for_decoding
from vadusa_jax.model.heads import SpeechLM

NEVER = 2**30  # a count of tokens that no row reaches


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the compiled loop depends on."""

    tree: Tree
    rule: Rule
    repeat_limit: int  # one token this often in a row ends with REPEAT
    repeat_window: int = 0  # repetition-aware sampling looks back so many tokens; 0: off
    repeats: int = 1  # and draws a token again that was said so often among them
    coupled: bool = True  # rank guesses with the noise that the target will be drawn with

    def __post_init__(self):
        if self.repeat_window and isinstance(self.rule, (Pcg, Ssd)):
            raise ValueError(f"repetition-aware sampling does not go with {self.rule.name}, which draws in its own way")

    @property
    def draws(self) -> int:
        """Noise rows per position."""
        return self.rule.draws * (2 if self.repeat_window else 1)


@jit_for_decoding(static_argnames=("settings", "slots"))
def prefill(model: SpeechLM, prompts: Prompts, *, settings: Settings, slots: int, drafter: Drafter = MEDUSA) -> State:
    """One pass over the prompts, and the first token of each row.

    Args:
        model: backbone and draft heads.
        prompts: at least one row; `limit_B` at least 1.
        settings: tree and rule (one compilation each).
        slots: cache slots a row to begin with, of a bucket, so that few sizes are compiled; `grow` makes more.
        drafter: who fills the tree.
    """
    drafter.check(model, settings.tree)
    if isinstance(settings.rule, Ssd) and settings.tree.depth and not isinstance(drafter, DraftLM):
        raise ValueError(f"{settings.rule.name} needs a drafter that draws its guesses: a draft language model")
    batch, padded = prompts.tokens_BP.shape
    slots = max(slots, padded)
    positions_BP = jnp.broadcast_to(jnp.arange(padded), (batch, padded))
    causal_BPP = jnp.broadcast_to(jnp.tril(jnp.ones((padded, padded), bool)), (batch, padded, padded))
    h_BPD, new = model.backbone(prompts.tokens_BP, positions_BP, causal_BPP)
    cache = kv.empty(model.backbone.config, batch, slots, settings.tree.depth + 1, h_BPD.dtype)
    cache = kv.append(cache, new, prompts.length_B)
    h_BD = h_BPD[jnp.arange(batch), prompts.length_B - 1]
    zero_B, buffer_BS = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, slots), jnp.int32)
    memory = drafter.begin(prompts.tokens_BP, prompts.length_B, slots) if settings.tree.depth else None
    state = State(cache, buffer_BS, buffer_BS, zero_B, zero_B, zero_B, h_BD, memory, zero_B, zero_B)
    recent_B1W = jnp.full((batch, 1, settings.repeat_window), -1)
    at = target(model, prompts, h_BD[:, None], prompts.length_B[:, None], recent_B1W, settings)
    first_B1 = settings.rule.say(at, rule_table(model, settings))
    return commit(
        state,
        first_B1,
        jnp.ones((batch,), jnp.int32),
        prompts.limit_B,
        settings.repeat_limit,
        model.backbone.config.eos,
    )


@jit_for_decoding(static_argnames=("settings",), donate_argnames=("state",))
def advance(
    model: SpeechLM,
    prompts: Prompts,
    state: State,
    running: jax.Array | int = 1,
    count: jax.Array | int = NEVER,
    *,
    settings: Settings,
    drafter: Drafter = MEDUSA,
) -> State:
    """Decodes on while at least `running` rows are unfinished, none of these has said `count` tokens and there is room.

    By default: until every row has finished. Where it stops for no such reason the slots are full, and `grow` gives
    more. The state given is used up: its cache is written in place.
    """
    table = rule_table(model, settings)
    ready = drafter.prepare(model, settings.tree) if settings.tree.depth else None

    def go_on(state: State) -> jax.Array:
        running_B = state.finish_B == RUNNING  # finished rows are frozen and wait for the others
        most_B = state.cache.length_B + state.cache.path_B + settings.tree.depth + 1  # if a whole path is accepted
        return (
            (jnp.sum(running_B) >= running)
            & ~jnp.any(running_B & (state.count_B >= count))
            & jnp.all(most_B <= state.said_BS.shape[1])
        )

    one = functools.partial(step, model, prompts, settings, drafter, table, ready)
    return jax.lax.while_loop(go_on, one, state)


def generate(model: SpeechLM, prompts: Prompts, *, settings: Settings, slots: int, drafter: Drafter = MEDUSA) -> State:
    """Decodes all rows until each has finished: `prefill`, then `advance` and `grow`.

    Returns:
        The final state: `said_BS` up to `count_B`, `step_BS`, `passes_B`, `finish_B`.
    """
    state = prefill(model, prompts, settings=settings, slots=slots, drafter=drafter)
    while True:
        state = advance(model, prompts, state, settings=settings, drafter=drafter)
        if (jax.device_get(state.finish_B) != RUNNING).all():
            return state
        state = grow(state)


def step(
    model: SpeechLM, prompts: Prompts, settings: Settings, drafter: Drafter, table: Any, ready: Any, state: State
) -> State:
    """One step for all rows: draft, verify, accept, commit; a finished row stays as it is.

    `table` and `ready` are what rule and drafter worked out before the loop.
    """
    tree, rule, rows = settings.tree, settings.rule, jnp.arange(len(state.root_B))
    depth_T = jnp.asarray(tree.depth_T)
    cache = kv.flush(state.cache)
    length_B = cache.length_B

    # Draft: the noise of a position serves the guesses for it and the target that judges them.
    noise_BJXV = _noise(model, prompts, length_B[:, None] + 1 + jnp.arange(tree.depth + 1), settings)
    token_BT, log_q_BJV, memory = state.root_B[:, None], None, state.memory
    if tree.depth:
        first_noise = noise_BJXV[:, :, ::2] if settings.repeat_window else noise_BJXV
        coupled = rule.coupled if settings.coupled else 0
        scores = functools.partial(log_probs, prompts)
        at = Context(state.h_BD, state.root_B, length_B, scores, first_noise, coupled)
        drafted_BT, log_q_BJV, memory = drafter.draft(model, ready, tree, memory, at)
        token_BT = jnp.concatenate([token_BT, drafted_BT], axis=1)

    # Verify: one pass over the tree; each node sees the cache and its ancestors.
    mask_BTT = jnp.broadcast_to(jnp.asarray(tree.ancestor_TT), (len(rows), len(tree), len(tree)))
    h_BTD, new = model.backbone(token_BT, length_B[:, None] + depth_T, mask_BTT, cache)

    # Accept: the longest path that the rule allows, then one token more.
    if log_q_BJV is not None:  # behind the last node nothing was drafted
        nothing_B1V = jnp.full_like(log_q_BJV[:, :1], -jnp.inf)
        log_q_BJV = jnp.concatenate([log_q_BJV, nothing_B1V], axis=1)[:, depth_T]
    position_BT, recent_BTW = length_B[:, None] + 1 + depth_T, _recent(state, token_BT, settings)
    at = target(model, prompts, h_BTD, position_BT, recent_BTW, settings, noise_BJXV[:, depth_T], log_q_BJV)
    node_B, accepted_B = judge(rule, tree, token_BT, at, table)
    path_BJ = jnp.asarray(tree.path_TJ)[node_B]
    next_B = rule.say(at, table)[rows, node_B]
    after_BJ = jnp.concatenate([token_BT[rows[:, None], path_BJ[:, 1:]], next_B[:, None]], axis=1)
    block_BJ = jnp.where(jnp.arange(tree.depth + 1) == accepted_B[:, None], next_B[:, None], after_BJ)

    # Commit: the path is for the cache, the block is said; a finished row keeps its length.
    kept_B = jnp.where(state.finish_B == RUNNING, accepted_B + 1, 0)
    cache = kv.accept(cache, new, path_BJ, kept_B)
    memory = drafter.keep(memory, length_B + kept_B) if tree.depth else None
    state = dataclasses.replace(state, cache=cache, h_BD=h_BTD[rows, node_B], memory=memory)
    return commit(state, block_BJ, accepted_B + 1, prompts.limit_B, settings.repeat_limit, model.backbone.config.eos)


def target(
    model: SpeechLM,
    prompts: Prompts,
    h_BTD: jax.Array,
    position_BT: jax.Array,
    recent_BTW: jax.Array,
    settings: Settings,
    noise_BTXV: jax.Array | None = None,
    log_q_BTV: jax.Array | None = None,
) -> Position:
    """What the rule sees of the positions that hidden states predict; their noise may be at hand already."""
    if noise_BTXV is None:
        noise_BTXV = _noise(model, prompts, position_BT, settings)
    logits_BTV = _may_end(prompts, model.backbone.logits(h_BTD), position_BT)
    log_p_BTV = prompts.sampling.log_probs(logits_BTV)
    if not settings.repeat_window:
        return Position(log_p_BTV, noise_BTXV, log_q=log_q_BTV)
    return Position(log_p_BTV, noise_BTXV, prompts.sampling.free(logits_BTV), recent_BTW, log_q_BTV, settings.repeats)


def log_probs(prompts: Prompts, logits_BJV: jax.Array, position_BJ: jax.Array, filtered: bool) -> jax.Array:
    """Logits of positions as each row samples them, with or without its top-k and top-p."""
    sampling = prompts.sampling
    return (sampling.log_probs if filtered else sampling.free)(_may_end(prompts, logits_BJV, position_BJ))


def _may_end(prompts: Prompts, logits_BJV: jax.Array, position_BJ: jax.Array) -> jax.Array:
    """EOS, the last of the scores, is impossible before the least number of tokens."""
    early_BJ = position_BJ < (prompts.length_B + prompts.least_B)[:, None]
    is_eos_V = jnp.arange(logits_BJV.shape[-1]) == logits_BJV.shape[-1] - 1
    return jnp.where(early_BJ[..., None] & is_eos_V, -jnp.inf, logits_BJV)


def _recent(state: State, token_BT: jax.Array, settings: Settings) -> jax.Array:
    """The last W tokens up to each node `[B, T, W]`, -1 before the first: what was said, then the node's own path."""
    tree, width = settings.tree, settings.repeat_window
    index_BW = state.count_B[:, None] - width + jnp.arange(width)
    said_BW = jnp.take_along_axis(state.said_BS, jnp.maximum(index_BW, 0), axis=1)
    said_BW = jnp.where(index_BW >= 0, said_BW, -1)  # the root is the last of them
    path_BTJ = token_BT[:, tree.path_TJ[:, 1:]]
    history_BTL = jnp.concatenate([jnp.repeat(said_BW[:, None], len(tree), axis=1), path_BTJ], axis=2)
    window_TW = tree.depth_T[:, None] + jnp.arange(width)
    return jnp.take_along_axis(history_BTL, jnp.broadcast_to(window_TW, (*token_BT.shape, width)), axis=2)


def rule_table(model: SpeechLM, settings: Settings) -> Any:
    """What the rule works out once per run."""
    return settings.rule.table(model.backbone.embedding[: model.backbone.config.output_vocab])


def _noise(model: SpeechLM, prompts: Prompts, position_BJ: jax.Array, settings: Settings) -> jax.Array:
    vocab = model.backbone.config.output_vocab
    return keyed_noise(prompts.key_B, position_BJ, settings.draws, vocab, jnp.float32)
