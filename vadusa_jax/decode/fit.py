"""Fitting the tree to the model and to the machine: measured acceptance over measured step time."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import EXACT, Greedy, Position, Rule
from vadusa_jax.decode.draft import head_drafter, rank_drafts
from vadusa_jax.decode.loop import Settings, advance, log_probs, prefill, rule_table, target
from vadusa_jax.decode.prompts import make_prompts, make_settings, slots_bucket, take_rows
from vadusa_jax.decode.queue import decode_all
from vadusa_jax.decode.state import Prompts
from vadusa_jax.decode.tree import ROOT, Tree, grow
from vadusa_jax.decode.trees import FittedTree, machine
from vadusa_jax.model.heads import SpeechLM

RANKS = 10  # guesses of a head that are considered


def say_plainly(
    lm: SpeechLM, prompts: Prompts, decode: DecodeConfig, greedy: bool, batch: int = 10
) -> list[np.ndarray]:
    """What plain decoding makes of the prompts: for each row the prompt and all that is said after it."""
    settings = make_settings(ROOT, Greedy() if greedy else EXACT, decode)
    spoken = decode_all(lm, prompts, settings=settings, batch=batch)
    return [
        np.concatenate([np.asarray(tokens_P[:length]), one.tokens])
        for tokens_P, length, one in zip(prompts.tokens_BP, prompts.length_B, spoken, strict=True)
    ]


def measure_hits(
    lm: SpeechLM, prompts: Prompts, sequences: Sequence[np.ndarray], decode: DecodeConfig, rule: Rule
) -> np.ndarray:
    """Which guesses of which head the rule would accept along what `say_plainly` said: `[M, K, R]` booleans.

    At every position of that speech, head k's guesses for the position k + 1 ahead are put before the rule: with the
    noise, the filters and the temperature that decoding uses, so that what is measured here is what decoding meets.
    """
    settings, hits = make_settings(ROOT, rule, decode), []
    slots = slots_bucket(max(map(len, sequences), default=0))
    for b, sequence in enumerate(sequences):
        tokens_T = np.zeros(slots, np.int32)
        tokens_T[: len(sequence)] = sequence
        hits_TKR = _hits(lm, take_rows(prompts, [b]), jnp.asarray(tokens_T), len(sequence), settings)
        first = int(prompts.length_B[b]) - 1
        hits.append(np.asarray(hits_TKR)[first : len(sequence) - 2])  # where a step began: its root is not EOS
    return np.concatenate(hits)


@functools.partial(jax.jit, static_argnames=("settings",))
def _hits(lm: SpeechLM, prompt: Prompts, tokens_T: jax.Array, end: int, settings: Settings) -> jax.Array:
    position_T, rule = jnp.arange(len(tokens_T)), settings.rule
    h_1TD, at = positions_along(lm, prompt, tokens_T, settings)
    hits, table = [], rule_table(lm, settings)
    heads = lm.heads.each(h_1TD, lambda k: lm.backbone.embed(jnp.roll(tokens_T, -k)[None]))
    for k, logits_1TV in enumerate(heads, start=1):
        ahead = jax.tree.map(lambda x, k=k: jnp.roll(x, -k, axis=1), at)
        log_q_1TV = log_probs(prompt, logits_1TV, position_T[None] + 1 + k, filtered=False)
        guess_1TR = rank_drafts(log_q_1TV, ahead.drawing_noise(rule.coupled), RANKS)
        right_TR = rule.accepts(ahead, guess_1TR, table)[0]
        hits.append(right_TR & (position_T[:, None] + 1 + k < end))
    return jnp.stack(hits, axis=1)


def positions_along(
    lm: SpeechLM, prompt: Prompts, tokens_T: jax.Array, settings: Settings
) -> tuple[jax.Array, Position]:
    """Hidden states `[1, T, D]` along a prompt and what was said after it, and the position behind each of them."""
    position_T = jnp.arange(len(tokens_T))
    causal_1TT = jnp.tril(jnp.ones((1, len(tokens_T), len(tokens_T)), bool))
    h_1TD, _ = lm.backbone(tokens_T[None], position_T[None], causal_1TT)
    recent_1TW = _recent(tokens_T, prompt.length_B, settings)
    return h_1TD, target(lm, prompt, h_1TD, position_T[None] + 1, recent_1TW, settings)


def _recent(tokens_T: jax.Array, length_B: jax.Array, settings: Settings) -> jax.Array:
    """The last W tokens said up to each position `[1, T, W]`; the prompt's do not count."""
    index_TW = jnp.arange(len(tokens_T))[:, None] - settings.repeat_window + 1 + jnp.arange(settings.repeat_window)
    return jnp.where(index_TW >= length_B[0], tokens_T[index_TW], -1)[None]


def measure_step_s(
    lm: SpeechLM, tree: Tree, decode: DecodeConfig, batch: int = 1, tokens: int = 100, repeats: int = 3
) -> float:
    """Seconds of one decode step with this tree on this device: the best of a few runs."""
    prompt = [list(range(lm.backbone.config.eos + 1, lm.backbone.config.eos + 33))] * batch
    prompts = make_prompts(prompt, [tokens] * batch, list(range(batch)), 0, decode)
    settings, drafter = make_settings(tree, EXACT, dataclasses.replace(decode, repeat_limit=10**6)), head_drafter(lm)
    slots = slots_bucket(len(prompt[0]) + tokens + 2 * (tree.depth + 1))  # room for all of it: nothing grows
    seconds = []
    for _ in range(repeats + 1):
        state = jax.block_until_ready(prefill(lm, prompts, settings=settings, slots=slots, drafter=drafter))
        began = time.perf_counter()
        state = jax.block_until_ready(advance(lm, prompts, state, settings=settings, drafter=drafter))
        seconds.append((time.perf_counter() - began) / max(int(state.passes_B.max()) - 1, 1))
    return min(seconds[1:])


def fit(hits_MKR: np.ndarray, nodes: int, step_s: Mapping[int, Mapping[int, float]]) -> FittedTree:
    """Grows the tree for measured hits and picks the size with most tokens per second at measured step times.

    `step_s[batch][nodes]` are seconds of a step. One node is plain decoding: it wins where drafts would lose.
    """
    tree, expected_T = grow(hits_MKR, nodes)

    def best(seconds: Mapping[int, float]) -> int:
        return max((t for t in seconds if t <= len(tree)), key=lambda t: expected_T[t - 1] / seconds[t])

    fastest = {machine(batch): best(seconds) for batch, seconds in step_s.items()}
    accuracy_KR = tuple(tuple(round(float(a), 4) for a in row) for row in hits_MKR.mean(0))
    return FittedTree(tree, tuple(np.round(expected_T, 4).tolist()), fastest, accuracy_KR)


def realised(lm: SpeechLM, prompts: Prompts, decode: DecodeConfig, rule: Rule, tree: Tree, batch: int = 10) -> float:
    """Tokens per step, prefills and their tokens left out, when the prompts are really spoken with this tree."""
    said = decode_all(lm, prompts, settings=make_settings(tree, rule, decode), batch=batch, drafter=head_drafter(lm))
    return sum(len(one.tokens) - 1 for one in said) / max(sum(one.steps - 1 for one in said), 1)


def wide_tree(heads: int, nodes: int) -> Tree:
    """A tree of `nodes` nodes that uses all heads whatever its size: a chain first, then siblings of it."""
    chain = [(0,) * d for d in range(heads + 1)]
    siblings = [(0,) * d + (r,) for r in range(1, nodes) for d in range(heads)]
    return Tree(tuple((chain + siblings)[:nodes]))


def fit_sizes(nodes: int) -> Sequence[int]:
    """Tree sizes whose step time is measured."""
    return [t for t in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96) if t <= nodes]
