"""Every acceptance rule keeps the guarantee that its docstring gives, and reads as it is defined."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from toys import BATCH, DECODE, MODEL, check_counts, random_prompts, random_tree, said, speak, toy_model

from vadusa_jax.decode.accept import (
    EXACT,
    Greedy,
    Pcg,
    Position,
    Rule,
    Ssd,
    Tolerance,
    TopK,
    Typical,
    Unverified,
    judge,
)
from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.decode.prompts import make_prompts, make_settings
from vadusa_jax.decode.sampling import keyed_noise, row_keys
from vadusa_jax.decode.tree import ROOT, Tree
from vadusa_jax.model.heads import SpeechLM

V, MANY = 12, 20_000
seeds = st.integers(0, 2**31 - 1)
UNAIDED = (EXACT, Tolerance(4), Typical(0.09, 0.3), TopK(3), Unverified())


@pytest.fixture(scope="module")
def lm() -> SpeechLM:
    return toy_model(model=dataclasses.replace(MODEL, layers=1))  # rules do not see the layers


@functools.cache
def noise(draws: int, seed: int = 0) -> jax.Array:
    """Noise `[MANY, X, V]` of as many positions."""
    make = jax.jit(lambda keys, at: keyed_noise(keys, at, draws, V, jnp.float32))
    return make(row_keys(seed, np.arange(1)), np.arange(MANY)[None])[0]


def distribution(seed: int, loud: float = 1.5) -> np.ndarray:
    logits_V = loud * np.random.default_rng(seed).standard_normal(V)
    return (logits_V - np.log(np.exp(logits_V).sum())).astype(np.float32)


def everywhere(log_p_V: np.ndarray) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(log_p_V), (MANY, V))


@pytest.mark.parametrize("rule", [*UNAIDED, Greedy(), Pcg(1.0)], ids=lambda rule: rule.name)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_without_drafts_every_rule_is_plain_decoding(lm, rule, seed):
    prompts = make_prompts(random_prompts(np.random.default_rng(seed)), [40] * BATCH, range(BATCH), seed, DECODE)
    plain = Greedy() if rule == Greedy() else EXACT
    assert said(speak(lm, prompts, ROOT, rule)) == said(speak(lm, prompts, ROOT, plain))


def test_rules_are_named_as_they_are_written():
    for name in ("greedy", "tolerance:3", "typical:eps=0.2:alpha=0.5", "topk:5", "pcg:threshold=0.4", "ssd:beta=0.1"):
        assert parse_mode(name).rule.name == name
    assert parse_mode("exact").rule.name == "tolerance:1"
    wrong_ones = ("topk:0", "topk", "tolerance:0", "ssd:beta=2", "ar:nodes=4", "viterbi:nodes=4", "ssd:chain=3")
    for wrong in (*wrong_ones, "pcg:x=1", "exact:nodes=-2", "exact:nodes=4:chain=2"):
        with pytest.raises(ValueError, match=f"unknown mode '{wrong}'"):
            parse_mode(wrong)


# definitions


@settings(max_examples=20)
@given(seeds, st.floats(0.01, 0.5), st.floats(0.1, 1.0), st.integers(1, V))
def test_typical_and_top_k_accept_what_a_plain_reading_accepts(seed, eps, alpha, k):
    log_p_V, token_R = distribution(seed), jnp.arange(V)
    at = Position(jnp.asarray(log_p_V), noise(1)[0])
    p_V = np.exp(log_p_V.astype(np.float64))
    bound = min(eps, alpha * np.exp(-stats.entropy(p_V)))
    clear_V = np.abs(p_V - bound) > 1e-6
    typical_V = np.asarray(Typical(eps, alpha).accepts(at, token_R, None))
    np.testing.assert_array_equal(typical_V[clear_V], (p_V > bound)[clear_V])
    wanted = set(np.argsort(-p_V)[:k].tolist())
    assert set(np.flatnonzero(TopK(k).accepts(at, token_R, None)).tolist()) == wanted
    assert np.asarray(Unverified().accepts(at, token_R, None)).all()


def test_a_token_that_a_filter_removed_is_accepted_by_no_rule():
    log_p_V = np.where(np.arange(V) < 3, np.log(1 / 3), -np.inf).astype(np.float32)
    at = Position(jnp.asarray(log_p_V), noise(4)[0])
    table = Pcg(-1.0).table(jnp.ones((V, 4)))
    for rule in (*UNAIDED[:-1], Greedy(), Pcg(-1.0)):
        assert not np.asarray(rule.accepts(at, jnp.arange(3, V), table)).any()


TREES = [random_tree(nodes, nodes) for nodes in (1, 2, 5, 9, 14, 24)]  # a few: every tree is another compilation


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(TREES))
def test_the_longest_accepted_path_wins_and_ties_go_to_the_likelier(seed, tree):
    """Against a walk over all paths, with a rule that allows a random set of tokens."""
    rng = np.random.default_rng(seed)
    token_BT = rng.integers(0, V, (2, len(tree)))
    log_p_BTV = np.log(rng.dirichlet(np.ones(V), (2, len(tree)))).astype(np.float32)
    allowed_BTV = rng.random((2, len(tree), V)) < 0.6

    class Listed(Unverified):
        def accepts(self, at: Position, token: jax.Array, table: None) -> jax.Array:
            return jnp.take_along_axis(jnp.asarray(allowed_BTV), token, axis=-1)

    at = Position(jnp.asarray(log_p_BTV), jnp.zeros((2, len(tree), 1, V)))
    node_B, accepted_B = judge(Listed(), tree, jnp.asarray(token_BT), at, None)
    for b in range(2):
        found = {}
        for i, path in enumerate(tree.path_TJ):
            way = [(int(path[d]), int(path[d + 1])) for d in range(tree.depth_T[i])]
            if all(allowed_BTV[b, parent, token_BT[b, child]] for parent, child in way):
                likelihood = sum(log_p_BTV[b, parent, token_BT[b, child]] for parent, child in way)
                found[i] = (len(way), likelihood)
        best = max(found.values())
        assert accepted_B[b] == best[0]
        assert found[int(node_B[b])][0] == best[0] and found[int(node_B[b])][1] == pytest.approx(best[1], abs=1e-4)


# PCG


def embeddings(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((V, 3)), jnp.float32)


def test_groups_are_tokens_that_are_alike_and_eos_is_alone():
    embedding_VD = embeddings()
    table_VV = np.asarray(Pcg(0.5).table(embedding_VD))
    unit_VD = np.asarray(embedding_VD) / np.linalg.norm(embedding_VD, axis=1, keepdims=True)
    wanted_VV = unit_VD @ unit_VD.T > 0.5
    np.testing.assert_array_equal(table_VV[:-1, :-1], wanted_VV[:-1, :-1])
    assert table_VV[-1].tolist() == table_VV[:, -1].tolist() == [False] * (V - 1) + [True]
    assert table_VV.sum() > V + 4
    np.testing.assert_array_equal(Pcg(1.0).table(embedding_VD), np.eye(V, dtype=bool))


@pytest.mark.parametrize("seed", range(3))
def test_pcg_draws_groups_and_tokens_from_their_own_distributions(seed):
    rule, log_p_V = Pcg(0.3), distribution(seed)
    table = rule.table(embeddings(seed))
    at = Position(everywhere(log_p_V), noise(2))
    group_M, token_M = np.asarray(rule.group(at, table)), np.asarray(rule.say(at, table))
    p_V, holds_VV = np.exp(log_p_V.astype(np.float64)), np.asarray(table)
    check_counts(group_M, holds_VV @ (p_V / holds_VV.sum(axis=0)))
    check_counts(token_M, p_V)
    assert holds_VV[group_M, token_M].all()
    accepted_MV = np.asarray(rule.accepts(at, jnp.broadcast_to(jnp.arange(V), (MANY, V)), table))
    np.testing.assert_array_equal(accepted_MV, holds_VV[group_M])


def test_pcg_at_a_threshold_of_one_equals_exact_by_seed(lm):
    prompts = make_prompts(random_prompts(np.random.default_rng(1)), [40] * BATCH, range(BATCH), 0, DECODE)
    assert said(speak(lm, prompts, random_tree(2, 12), Pcg(1.0))) == said(speak(lm, prompts))
    tokens = [sum(row.passes for row in speak(lm, prompts, random_tree(2, 12), Pcg(t))) for t in (1.0, 0.1)]
    assert tokens[1] <= tokens[0]


# SSD


@pytest.mark.parametrize(("p_seed", "q_seed"), [(0, 0), (0, 1), (2, 3), (4, 5)])
def test_ssd_without_beta_loses_nothing(p_seed, q_seed):
    """Draft from q, judge, and say what is left: the tokens are distributed as p."""
    log_p_V, log_q_V, rule = distribution(p_seed), distribution(q_seed), Ssd(0.0)
    at = Position(everywhere(log_p_V), noise(rule.draws), log_q=everywhere(log_q_V))
    draft_M = np.asarray(jnp.argmax(at.log_q + at.noise[:, -1], axis=-1))
    accepted_M = np.asarray(rule.accepts(at, jnp.asarray(draft_M)[:, None], None))[:, 0]
    token_M = np.where(accepted_M, draft_M, np.asarray(rule.say(at, None)))
    p_V, q_V = np.exp(log_p_V.astype(np.float64)), np.exp(log_q_V.astype(np.float64))
    check_counts(token_M, p_V)
    assert accepted_M.mean() == pytest.approx(np.minimum(p_V, q_V).sum(), abs=0.02)
    more_M = np.asarray(Ssd(0.2).accepts(at, jnp.asarray(draft_M)[:, None], None))[:, 0]
    assert (more_M >= accepted_M).all() and (p_seed == q_seed or more_M.mean() > accepted_M.mean() + 0.05)
    nothing = dataclasses.replace(at, log_q=jnp.full((MANY, V), -jnp.inf))  # behind the last draft: p itself
    np.testing.assert_array_equal(rule.say(nothing, None), jnp.argmax(at.log_p + at.noise[:, 0], axis=-1))


# tolerance


def test_a_larger_tolerance_accepts_more_on_average(lm):
    tree = Tree(((), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    rng, steps = np.random.default_rng(0), []
    prompts = make_prompts(random_prompts(rng), [40] * BATCH, range(BATCH), 0, DECODE)
    for draws in (1, 2, 6):
        rows = speak(lm, prompts, tree, Tolerance(draws))
        steps.append(sum(len(row.tokens) for row in rows) / sum(row.passes for row in rows))
    assert steps == sorted(steps) and steps[-1] > 1.2 * steps[0]


@pytest.mark.parametrize("rule", [Pcg(0.5), Ssd(0.0)], ids=lambda rule: rule.name)
def test_repetition_aware_sampling_needs_a_rule_that_draws_plainly(rule: Rule):
    with pytest.raises(ValueError, match="repetition-aware sampling does not go with"):
        make_settings(ROOT, rule, dataclasses.replace(DECODE, repeat_window=10))


def test_the_toy_speaks_the_vocabulary_that_rules_see(lm):
    assert lm.backbone.embedding.shape[0] == MODEL.vocab >= MODEL.output_vocab
