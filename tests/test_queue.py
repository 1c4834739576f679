"""Laws of batches: rows refill, pause, differ in their settings and end early, and never feel each other."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import BATCH, DECODE, MODEL, SLOTS, lean, random_prompts, random_tree, rows_of, said, speak, toy_model

from vadusa_jax.decode.accept import EXACT, Tolerance
from vadusa_jax.decode.draft import MEDUSA, DraftLM
from vadusa_jax.decode.loop import advance, prefill
from vadusa_jax.decode.prompts import TooLong, make_prompts, make_settings, take_rows
from vadusa_jax.decode.queue import decode_all, decode_each
from vadusa_jax.decode.state import FINISH, RUNNING, put_row
from vadusa_jax.decode.stream import stream_tokens
from vadusa_jax.decode.tree import ROOT, chain
from vadusa_jax.model.heads import SpeechLM

TREE = random_tree(7, 12)
ONE = dataclasses.replace(MODEL, layers=1)  # sampling does not see the layers


@pytest.fixture(scope="module")
def lm() -> SpeechLM:
    return lean(toy_model(5), MODEL.eos, 1.0)  # ends often, so that rows are refilled


def many(seed: int, rows: int = 11):
    rng = np.random.default_rng(seed)
    return make_prompts(random_prompts(rng, rows), rng.integers(1, 40, rows), rng.integers(0, 99, rows), seed, DECODE)


@pytest.mark.parametrize("tree", [ROOT, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize("batch", [1, 4, 50])
def test_a_queue_of_any_length_equals_each_text_alone_in_order(lm, tree, batch):
    prompts, settings = many(0), make_settings(tree, EXACT, DECODE)
    spoken = decode_all(lm, prompts, settings=settings, batch=batch)
    assert len(spoken) == 11
    for i, one in enumerate(spoken):
        (alone,) = speak(lm, take_rows(prompts, [i]), tree)
        assert one.tokens.tolist() == list(alone.tokens) and one.step_of.tolist() == list(alone.steps)
        assert (one.steps, one.finish) == (alone.passes, FINISH[alone.finish])


def test_a_queue_compiles_nothing_once_it_runs_and_asks_the_device_once_per_row(lm, monkeypatch):
    settings = make_settings(TREE, EXACT, DECODE)
    decode_all(lm, many(0), settings=settings, batch=4)
    compiled = [f.compiled()._cache_size() for f in (prefill, advance, put_row)]
    asked, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: asked.append(1) or get(x))
    spoken = decode_all(lm, many(1, rows=31), settings=settings, batch=4)
    assert [f.compiled()._cache_size() for f in (prefill, advance, put_row)] == compiled
    assert len(asked) <= len(spoken) == 31


def test_a_row_that_could_leave_the_models_positions_is_refused(lm):
    settings = make_settings(TREE, EXACT, DECODE)
    endless = make_prompts([[20, 21]], [MODEL.max_length], [0], 0, DECODE)
    with pytest.raises(TooLong, match=f"reach {MODEL.max_length + 2} positions, the model has max_length"):
        next(stream_tokens(lm, endless, settings=settings, size=8))


def test_rows_that_are_finished_first_come_first(lm):
    order = [i for i, _ in decode_each(lm, many(2), settings=make_settings(TREE, EXACT, DECODE), batch=4)]
    assert sorted(order) == list(range(11)) and order != sorted(order)


def test_a_draft_models_memory_moves_with_its_row(lm):
    drafter, settings = DraftLM(toy_model(3).backbone), make_settings(chain(3), EXACT, DECODE)
    drafted = decode_all(lm, many(3), settings=settings, batch=4, drafter=drafter)
    plain = decode_all(lm, many(3), settings=make_settings(ROOT, EXACT, DECODE), batch=4)
    assert [one.tokens.tolist() for one in drafted] == [one.tokens.tolist() for one in plain]


@pytest.mark.parametrize("tree", [ROOT, TREE], ids=["plain", "tree"])
def test_decoding_that_pauses_says_the_same(tree):
    lm, settings = toy_model(), make_settings(tree, EXACT, DECODE)
    prompts = make_prompts(random_prompts(np.random.default_rng(0)), [40] * BATCH, range(BATCH), 0, DECODE)
    whole = speak(lm, prompts, tree)
    state, counts = prefill(lm, prompts, settings=settings, slots=SLOTS, drafter=MEDUSA), [0]
    while (np.asarray(state.finish_B) == RUNNING).any():
        state = advance(lm, prompts, state, 1, counts[-1] + 7, settings=settings)
        counts.append(int(np.asarray(state.count_B)[np.asarray(state.finish_B) == RUNNING].max(initial=0)))
    assert rows_of(state) == whole and len(counts) > 3
    assert max(np.diff(counts)) <= 7 + tree.depth + 1


# streaming


@pytest.mark.parametrize("tree", [ROOT, TREE], ids=["plain", "tree"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_stream_of_chunks_is_what_is_said_at_once_and_nothing_follows_eos(lm, tree, size):
    settings, finishes = make_settings(tree, EXACT, DECODE), set()
    for i in range(8):
        prompt = take_rows(many(4), [i])
        (whole,) = speak(lm, prompt, tree)
        chunks = list(stream_tokens(lm, prompt, settings=settings, size=size))
        tokens = np.concatenate([chunk.tokens for chunk in chunks]).tolist()
        assert tokens == [token for token in whole.tokens if token != MODEL.eos]
        assert [chunk.finish for chunk in chunks] == ["running"] * (len(chunks) - 1) + [FINISH[whole.finish]]
        assert all(size <= len(chunk.tokens) <= size + tree.depth for chunk in chunks[:-1])
        finishes.add(chunks[-1].finish)
    assert finishes == {"eos", "length"}


# settings of a row


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_rows_with_settings_of_their_own_equal_each_alone(seed):
    lm, rng = toy_model(model=ONE), np.random.default_rng(seed)
    each = [
        dataclasses.replace(DECODE, temperature=t, top_k=k, top_p=p)
        for t, k, p in [(0.9, 12, 0.97), (0.5, 0, 1.0), (1.3, 3, 1.0), (0.8, 0, 0.6)]
    ]
    tokens = random_prompts(rng, 4)
    together = speak(lm, make_prompts(tokens, [40] * 4, range(4), seed, each), TREE)
    assert said(together) == said(speak(lm, make_prompts(tokens, [40] * 4, range(4), seed, each)))
    for i in range(4):
        assert speak(lm, make_prompts([tokens[i]], [40], [i], seed, each[i]), TREE) == [together[i]]


def test_no_row_ends_before_its_least_tokens():
    lm, least = lean(toy_model(5), MODEL.eos, 100.0), [0, 1, 2, 5, 11, 17, 39, 40]
    prompts = make_prompts([[20, 21]] * BATCH, [40] * BATCH, range(BATCH), 0, DECODE, least)
    plain, fast = speak(lm, prompts), speak(lm, prompts, TREE)
    assert said(plain) == said(fast)
    assert [len(row.tokens) for row in plain] == [n + 1 for n in least[:-1]] + [40]
    assert [row.tokens[-1] == MODEL.eos for row in plain] == [True] * 7 + [False]


# repetition-aware sampling


RAS = dataclasses.replace(DECODE, top_k=2, temperature=0.6, repeat_window=6, repeat_ratio=0.3, repeat_limit=40)


@settings(max_examples=4)
@given(st.integers(0, 10**6))
def test_repetition_aware_sampling_per_path_equals_plain_decoding(seed):
    lm = toy_model(model=ONE)
    prompts = make_prompts(random_prompts(np.random.default_rng(seed)), [40] * BATCH, range(BATCH), seed, RAS)
    plain = said(speak(lm, prompts, decode=RAS))
    for tree in (TREE, chain(4)):
        assert said(speak(lm, prompts, tree, decode=RAS)) == plain
    assert said(speak(lm, prompts, decode=DECODE)) != plain
    assert speak(lm, prompts, TREE, Tolerance(3), decode=RAS)


def test_a_frequent_token_is_drawn_again_without_itself():
    """A model that always says token 3: with a window of 6 and at most 2 in it, no more than 2 of any 7 are 3."""
    lm = lean(toy_model(), 3, 100.0)
    prompts = make_prompts([[20, 21]] * BATCH, [40] * BATCH, range(BATCH), 0, RAS)
    for row in speak(lm, prompts, decode=RAS):
        is_three = np.array(row.tokens) == 3
        assert is_three[:2].all() and max(np.convolve(is_three, np.ones(7), "valid")) <= 2 and is_three[7:].any()
