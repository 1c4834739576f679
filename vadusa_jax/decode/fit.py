"""Fitting the tree to the model and to the machine: measured acceptance over measured step time."""

import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import EXACT, Greedy, Rule, rank_drafts
from vadusa_jax.decode.loop import Prompts, Settings, generate, slots_needed
from vadusa_jax.decode.prompts import make_prompts, make_sampling, slots_bucket, slots_for
from vadusa_jax.decode.sampling import Sampling, keyed_noise
from vadusa_jax.decode.tree import ROOT, Tree, grow
from vadusa_jax.decode.trees import FittedTree, device_kind
from vadusa_jax.model.heads import SpeechLM

RANKS = 10  # guesses of a head that are considered


def say_plainly(
    lm: SpeechLM, prompts: Prompts, decode: DecodeConfig, greedy: bool, batch: int = 10
) -> list[np.ndarray]:
    """What plain decoding makes of the prompts: for each row the prompt and all that is said after it."""
    settings = Settings(ROOT, Greedy() if greedy else EXACT, make_sampling(decode), decode.repeat_limit)
    slots = slots_for(prompts, ROOT)
    sequences = []
    for i in range(0, len(prompts.length_B), batch):
        part = jax.tree.map(lambda x, i=i: x[i : i + batch], prompts)
        state = generate(lm, part, settings=settings, slots=slots)
        for b, (start, count) in enumerate(zip(part.length_B.tolist(), state.count_B.tolist(), strict=True)):
            prompt, said = np.asarray(part.tokens_BP[b, :start]), np.asarray(state.said_BS[b, :count])
            sequences.append(np.concatenate([prompt, said]))
    return sequences


def measure_hits(
    lm: SpeechLM, prompts: Prompts, sequences: Sequence[np.ndarray], decode: DecodeConfig, rule: Rule
) -> np.ndarray:
    """Which guesses of which head the rule would accept along what `say_plainly` said: `[M, K, R]` booleans.

    At every position of that speech, head k's guesses for the position k + 1 ahead are compared with what the rule
    allows there: with the noise, the filters and the temperature that decoding uses, so that what is measured here is
    what decoding meets.
    """
    sampling, slots, hits = make_sampling(decode), slots_for(prompts, ROOT), []
    for b, sequence in enumerate(sequences):
        tokens_T = np.zeros(slots, np.int32)
        tokens_T[: len(sequence)] = sequence
        hits_TKR = _hits(lm, jnp.asarray(tokens_T), len(sequence), prompts.key_B[b], rule, sampling)
        first = int(prompts.length_B[b]) - 1
        hits.append(np.asarray(hits_TKR)[first : len(sequence) - 2])  # where a step began: its root is not EOS
    return np.concatenate(hits)


@functools.partial(jax.jit, static_argnames=("rule", "sampling"))
def _hits(lm: SpeechLM, tokens_T: jax.Array, end: int, key: jax.Array, rule: Rule, sampling: Sampling) -> jax.Array:
    length = len(tokens_T)
    position_T = jnp.arange(length)
    h_BTD, _ = lm.backbone(tokens_T[None], position_T[None], jnp.tril(jnp.ones((1, length, length), bool)))
    logits_TV = lm.backbone.logits(h_BTD[0])
    noise_TXV = keyed_noise(key[None], position_T[None] + 1, rule.draws, logits_TV.shape[-1], logits_TV.dtype)[0]
    allowed_TA = rule.allowed(sampling.log_probs(logits_TV), noise_TXV)
    hits = []
    for k in range(1, lm.heads.output.shape[0] + 1):
        log_q_TV = sampling.log_probs(lm.heads.one(h_BTD[0], k))
        guess_TR = rank_drafts(log_q_TV, jnp.roll(noise_TXV, -k, axis=0), RANKS)
        right_TR = jnp.any(guess_TR[..., None] == jnp.roll(allowed_TA, -k, axis=0)[:, None], axis=-1)
        hits.append(right_TR & (position_T[:, None] + 1 + k < end))
    return jnp.stack(hits, axis=1)


def measure_step_s(
    lm: SpeechLM, tree: Tree, decode: DecodeConfig, batch: int = 1, tokens: int = 100, repeats: int = 3
) -> float:
    """Seconds of one decode step with this tree on this device: the best of a few runs."""
    prompt = [list(range(lm.backbone.config.eos + 1, lm.backbone.config.eos + 33))] * batch
    prompts = make_prompts(prompt, [tokens] * batch, list(range(batch)), seed=0)
    settings = Settings(tree, EXACT, make_sampling(decode), repeat_limit=10**6)
    slots = slots_bucket(slots_needed(len(prompt[0]), 2 * tokens, tree))
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        state = jax.block_until_ready(generate(lm, prompts, settings=settings, slots=slots))
        seconds.append((time.perf_counter() - began) / max(int(state.passes_B.max()), 1))
    return min(seconds[1:])


def fit(hits_MKR: np.ndarray, nodes: int, step_s: dict[int, float]) -> FittedTree:
    """Grows the tree for measured hits and picks the size with most tokens per second at measured step times."""
    tree, expected_T = grow(hits_MKR, nodes)
    best = max((t for t in step_s if t <= len(tree)), key=lambda t: expected_T[t - 1] / step_s[t])
    accuracy_KR = tuple(tuple(round(float(a), 4) for a in row) for row in hits_MKR.mean(0))
    return FittedTree(tree, tuple(np.round(expected_T, 4).tolist()), {device_kind(): best}, accuracy_KR)


def wide_tree(heads: int, nodes: int) -> Tree:
    """A tree of `nodes` nodes that uses all heads whatever its size: a chain first, then siblings of it."""
    chain = [(0,) * d for d in range(heads + 1)]
    siblings = [(0,) * d + (r,) for r in range(1, nodes) for d in range(heads)]
    return Tree(tuple((chain + siblings)[:nodes]))


def fit_sizes(nodes: int) -> Sequence[int]:
    """Tree sizes whose step time is measured."""
    return [t for t in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96) if t <= nodes]
