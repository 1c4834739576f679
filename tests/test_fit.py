"""Fitting trees: what is measured offline is what decoding meets."""

import numpy as np
import pytest
from toys import BATCH, DECODE, HEADS, MODEL, TREE, learned, said, speak

from vadusa_jax.decode.accept import EXACT, Greedy, Rule
from vadusa_jax.decode.fit import RANKS, fit, measure_hits, say_plainly
from vadusa_jax.decode.prompts import make_prompts
from vadusa_jax.decode.state import Prompts
from vadusa_jax.decode.tree import ROOT, Tree
from vadusa_jax.model.heads import SpeechLM


@pytest.fixture(scope="module")
def trained() -> SpeechLM:
    """Counts round and round, and never ends."""
    return learned(by=1, cycle=MODEL.speech_vocab)


def hits(lm: SpeechLM, prompts: Prompts, rule: Rule) -> np.ndarray:
    return measure_hits(lm, prompts, say_plainly(lm, prompts, DECODE, rule == Greedy()), DECODE, rule)


def walk(tree: Tree, hits_MKR: np.ndarray) -> int:
    """Steps that a tree takes along measured speech: each goes on behind the deepest path that was right."""
    at = steps = 0
    while at < len(hits_MKR):
        right = [len(p) for p in tree.paths if all(hits_MKR[at, k, r] for k, r in enumerate(p))]
        at, steps = at + 1 + max(right), steps + 1
    return steps


@pytest.mark.parametrize("rule", [EXACT, Greedy()])
def test_live_steps_are_those_that_the_measured_hits_predict(trained, rule):
    tokens = [[i, i + 1, i + 2] for i in range(BATCH)]
    prompts = make_prompts(tokens, [100] * BATCH, range(BATCH), 0, DECODE)
    counts = [len(row.tokens) - 1 for row in speak(trained, prompts, ROOT, rule)]
    hits_MKR = hits(trained, prompts, rule)
    assert hits_MKR.shape == (sum(counts), HEADS.count, RANKS)
    fast = speak(trained, prompts, TREE, rule)
    predicted = [1 + walk(TREE, part) for part in np.split(hits_MKR, np.cumsum(counts)[:-1])]
    assert [row.passes for row in fast] == predicted
    realised = sum(counts) / sum(row.passes - 1 for row in fast)
    assert realised > 3.5  # a model of predictable data really is fast


def test_a_fitted_tree_commits_what_its_fit_expects(trained):
    prompts = make_prompts([[i, i + 1, i + 2] for i in range(BATCH)], [100] * BATCH, range(BATCH), 0, DECODE)
    fitted = fit(hits(trained, prompts, EXACT), len(TREE), {1: {1: 1.0, len(TREE): 1.0}})
    rows = speak(trained, prompts, fitted.tree)
    assert said(rows) == said(speak(trained, prompts, TREE))
    realised = sum(len(row.tokens) - 1 for row in rows) / sum(row.passes - 1 for row in rows)
    # Steps begin where others ended, the fit looks at every position: the two means agree up to that.
    assert realised == pytest.approx(fitted.expected_T[-1], rel=0.1)


def test_a_measured_accuracy_is_the_accuracy_of_the_heads(trained):
    """Greedy hits at rank 0 are plain top-1 accuracy on what the model says: no serving error hides in between."""
    prompts = make_prompts([[i, i + 1, i + 2] for i in range(BATCH)], [100] * BATCH, range(BATCH), 0, DECODE)
    hits_MKR = hits(trained, prompts, Greedy())
    assert hits_MKR[:, :, 0].mean() > 0.9
