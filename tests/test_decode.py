"""Laws of decoding: drafts change how fast a sentence is said and never what is said."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    BATCH,
    DECODE,
    HEADS,
    MODEL,
    REPEATS,
    SLOTS,
    TREE,
    Row,
    lean,
    learned,
    random_prompts,
    random_tree,
    said,
    speak,
    toy_model,
)

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import EXACT, Greedy, Tolerance
from vadusa_jax.decode.loop import advance, prefill
from vadusa_jax.decode.prompts import TooLong, make_prompts, make_settings, text_prompt, token_limit
from vadusa_jax.decode.tree import ROOT, Tree
from vadusa_jax.model import cache as kv
from vadusa_jax.model.heads import SpeechLM

EOS, LENGTH, REPEAT = 1, 2, 3


def check_row(row: Row, limit: int, tree: Tree) -> None:
    """What is true of every row, whatever was said."""
    assert MODEL.eos not in row.tokens[:-1]
    assert (row.finish == EOS) == (row.tokens[-1] == MODEL.eos)
    assert 1 <= len(row.tokens) <= limit
    if row.finish == LENGTH:
        assert len(row.tokens) == limit
    blocks = np.bincount(row.steps, minlength=row.passes)
    assert len(blocks) == row.passes  # passes are counted from the prefill to the one that ended the row
    assert blocks[0] == 1 and blocks.min() >= 1 and blocks.max() <= tree.depth + 1
    assert (np.diff(row.steps) >= 0).all()
    assert blocks.mean() == len(row.tokens) / row.passes  # acceptance length: committed tokens over steps


@pytest.fixture(scope="module")
def lm() -> SpeechLM:
    return toy_model()


@pytest.fixture(scope="module")
def stuck() -> SpeechLM:
    """Says the same token again and again."""
    return learned(by=0, cycle=MODEL.speech_vocab)


# the tree pass


@functools.partial(jax.jit, static_argnames="tree_nodes")
def tree_pass(lm, prompt_BT, token_BT, depth_T, mask_TT, path_TJ, tree_nodes):
    """Hidden states of a tree by one pass over a cache, and of every path by a pass of its own."""
    length = prompt_BT.shape[1]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    h_BTD, new = lm.backbone(prompt_BT, jnp.arange(length)[None], causal)
    cache = kv.append(kv.empty(MODEL, 1, length + 5, 1, h_BTD.dtype), new, jnp.array([length]))
    tree_BTD, _ = lm.backbone(token_BT, length + depth_T[None], mask_TT[None], cache)
    whole_TS = jnp.concatenate([jnp.tile(prompt_BT, (tree_nodes, 1)), token_BT[0, path_TJ]], axis=1)
    slots = whole_TS.shape[1]
    causal = jnp.tril(jnp.ones((1, slots, slots), bool))
    path_TSD, _ = lm.backbone(whole_TS, jnp.arange(slots)[None], causal)
    return tree_BTD[0], path_TSD[jnp.arange(tree_nodes), length + depth_T]


@pytest.mark.parametrize(("x64", "tolerance"), [(False, 2e-5), (True, 1e-12)])
def test_a_pass_over_the_tree_equals_a_pass_over_every_path(x64, tolerance):
    with jax.enable_x64(x64):
        lm = toy_model(1, jnp.float64 if x64 else jnp.float32)
        for seed in range(8):
            rng, tree = np.random.default_rng(seed), random_tree(seed, 12)
            path_TJ = np.pad(tree.path_TJ, ((0, 0), (0, HEADS.count - tree.depth)), mode="edge")
            prompt_BT, token_BT = rng.integers(0, MODEL.vocab, (1, 9)), rng.integers(0, MODEL.vocab, (1, 12))
            by_tree_TD, by_path_TD = tree_pass(
                lm, prompt_BT, token_BT, jnp.asarray(tree.depth_T), jnp.asarray(tree.ancestor_TT), path_TJ, 12
            )
            assert by_tree_TD.dtype == (jnp.float64 if x64 else jnp.float32)
            np.testing.assert_allclose(by_tree_TD, by_path_TD, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tree", [ROOT, Tree(((), (0,))), TREE], ids=len)
@pytest.mark.parametrize("rows", [1, 3])
def test_no_step_copies_the_cache(lm, tree, rows):
    prompts = make_prompts([[20, 21, 22]] * rows, [40] * rows, range(rows), 0, DECODE)
    settings = make_settings(tree, EXACT, DECODE)
    state = prefill(lm, prompts, settings=settings, slots=SLOTS)
    compiled = advance.compiled().lower(lm, prompts, state, settings=settings).compile().as_text()
    heads, size = rows * MODEL.attention_heads, MODEL.width // MODEL.attention_heads
    steps, _ = compiled.split("ENTRY ")  # all that the loop calls comes before the entry computation
    for shape in (f"f32[{heads},{size},{SLOTS}]", f"f32[{heads},{SLOTS},{size}]"):  # keys, values
        assert shape in steps
        assert not [line for line in steps.splitlines() if re.search(rf"= {re.escape(shape)}\S* copy\(", line)]


# speculative decoding equals plain decoding


def test_drafts_never_change_what_is_said_on_a_thousand_prompts(lm):
    trees, rng = (TREE, random_tree(5, 8), Tree(((), (0,)))), np.random.default_rng(0)
    steps = dict.fromkeys(trees, 0)
    tokens = 0
    for seed in range(125):
        limits = rng.integers(1, 40, BATCH)
        prompts = make_prompts(random_prompts(rng), limits, rng.integers(0, 10**6, BATCH), seed, DECODE)
        plain = speak(lm, prompts)
        tokens += sum(len(row.tokens) for row in plain)
        for tree in trees if seed < 15 else trees[:1]:
            fast = speak(lm, prompts, tree)
            assert said(fast) == said(plain)
            for row, limit in zip(fast, limits, strict=True):
                check_row(row, limit, tree)
            steps[tree] += sum(row.passes for row in fast)
    assert tokens > 1.2 * steps[TREE]  # and drafts were accepted, so the law was put to the test


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_greedy_speculation_equals_greedy_decoding(lm, seed):
    rng = np.random.default_rng(seed)
    prompts = make_prompts(random_prompts(rng), [40] * BATCH, range(BATCH), seed, DECODE)
    assert said(speak(lm, prompts, TREE, Greedy())) == said(speak(lm, prompts, ROOT, Greedy()))


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_coupling_drafts_to_the_noise_changes_the_steps_alone(lm, seed):
    prompts = make_prompts(random_prompts(np.random.default_rng(seed)), [40] * BATCH, range(BATCH), seed, DECODE)
    coupled, uncoupled = speak(lm, prompts, TREE), speak(lm, prompts, TREE, coupled=False)
    assert said(coupled) == said(uncoupled)
    assert sum(row.passes for row in coupled) < sum(row.passes for row in uncoupled)


def test_a_tolerance_ends_rows_as_exact_decoding_does_in_fewer_steps(lm):
    prompts = make_prompts(random_prompts(np.random.default_rng(1)), [40] * BATCH, range(BATCH), 0, DECODE)
    rows, exact = speak(lm, prompts, TREE, Tolerance(3)), speak(lm, prompts, TREE)
    for row in rows:
        check_row(row, 40, TREE)
    steps_per_token = [sum(r.passes for r in each) / sum(len(r.tokens) for r in each) for each in (rows, exact)]
    assert steps_per_token[0] < steps_per_token[1]


def test_equality_holds_over_two_thousand_tokens():
    lm = lean(toy_model(), MODEL.eos, -60.0)
    prompts = make_prompts([[20, 21, 22]], [2100], [0], 0, DECODE)
    plain, fast = speak(lm, prompts, slots=4096), speak(lm, prompts, TREE)  # all slots at once, and as they are needed
    assert said(fast) == said(plain)
    assert len(plain[0].tokens) == 2100 and plain[0].finish == LENGTH
    check_row(fast[0], 2100, TREE)


# batches


def test_ragged_batches_equal_each_row_alone(lm):
    eager = lean(toy_model(), MODEL.eos, 2.0)  # rows that end at once beside rows that go on
    rng = np.random.default_rng(3)
    tokens, limits, numbers = random_prompts(rng, 7), rng.integers(1, 40, 7), rng.integers(0, 1000, 7)
    limits[2], tokens[3] = 1, tokens[3][:1]

    def rows(model: SpeechLM, which: list[int]) -> list[Row]:
        return speak(model, make_prompts([tokens[i] for i in which], limits[which], numbers[which], 0, DECODE), TREE)

    for model in (lm, eager):
        alone = [rows(model, [i])[0] for i in range(7)]
        assert rows(model, list(range(7))) == alone
        order = [4, 1, 6, 0, 3, 5, 2]
        assert rows(model, order) == [alone[i] for i in order]
        for pair in ([0, 1], [2, 5], [6, 3]):
            assert rows(model, pair) == [alone[i] for i in pair]
    assert min(len(row.tokens) for row in alone) == 1 < max(len(row.tokens) for row in alone)


# ends


def test_nothing_follows_eos_at_any_depth_of_the_tree():
    lm, depths = learned(by=1, cycle=MODEL.output_vocab), set()  # after the last speech token it counts on to EOS
    for seed in range(12):
        prompts = make_prompts([[i, i + 1] for i in range(BATCH)], [60] * BATCH, range(BATCH), seed, DECODE)
        plain, fast = speak(lm, prompts), speak(lm, prompts, TREE)
        assert said(fast) == said(plain)
        for row in fast:
            check_row(row, 60, TREE)
            if row.finish == EOS:
                depths.add(row.steps.count(row.passes - 1) - 1)
    assert depths >= set(range(TREE.depth + 1))


def test_an_immediate_eos_is_a_result_of_one_pass():
    prompts = make_prompts(random_prompts(np.random.default_rng(0)), [60] * BATCH, range(BATCH), 0, DECODE)
    for tree in (ROOT, TREE):
        rows = speak(lean(toy_model(), MODEL.eos, 100.0), prompts, tree)
        assert rows == [Row((MODEL.eos,), (0,), 1, EOS)] * BATCH


def test_a_limit_within_one_tree_stops_cleanly_and_writes_nowhere_else():
    lm = lean(toy_model(), MODEL.eos, -60.0)
    tokens = [list(range(1, 11))] * BATCH
    whole = speak(lm, make_prompts(tokens, [40] * BATCH, [0] * BATCH, 0, DECODE))[0].tokens
    for tree, slots in ((ROOT, SLOTS), (TREE, SLOTS), (TREE, 1)):
        limits = list(range(1, BATCH + 1))
        rows = speak(lm, make_prompts(tokens, limits, [0] * BATCH, 0, DECODE), tree, slots=slots)
        for row, limit in zip(rows, limits, strict=True):
            check_row(row, limit, tree)
            assert (row.tokens, row.finish) == (whole[:limit], LENGTH)


def test_the_limit_of_a_text_is_the_room_that_the_model_has():
    decode = DecodeConfig(extra_tokens=75, tokens_per_phone=6.0)
    assert token_limit(10, decode, MODEL) == 135
    for room in range(1, 8):
        assert token_limit(MODEL.max_length - 1 - room, decode, MODEL) == room
    for phones in (MODEL.max_length - 1, MODEL.max_length, 10 * MODEL.max_length):
        with pytest.raises(TooLong, match=f"{phones} phones.*max_length of {MODEL.max_length}.*split"):
            token_limit(phones, decode, MODEL)
    assert text_prompt([0, 5], 1, MODEL) == [MODEL.eos + 1, MODEL.eos + 6, MODEL.eos + 2]


@pytest.mark.parametrize("rule", [EXACT, Greedy()])
def test_the_repeat_guard_ends_at_the_same_token_with_and_without_drafts(stuck, rule):
    finishes, inside = set(), set()
    for seed in range(8):
        prompts = make_prompts([[i, i] for i in range(BATCH)], [60] * BATCH, range(BATCH), seed, DECODE)
        plain, fast = (speak(stuck, prompts, tree, rule) for tree in (ROOT, TREE))
        assert said(fast) == said(plain)
        for row in fast:
            check_row(row, 60, TREE)
            finishes.add(row.finish)
            runs = "".join("x" if a == b else " " for a, b in zip(row.tokens, row.tokens[1:], strict=False))
            assert ("x" * (REPEATS - 1) in runs) == (row.finish == REPEAT) and "x" * REPEATS not in runs
            if row.finish == REPEAT:
                assert runs.endswith("x" * (REPEATS - 1))
                inside.add(row.steps.count(row.passes - 1))
    assert REPEAT in finishes and (rule == Greedy() or len(inside) > 1)  # at the end of a block and inside one
