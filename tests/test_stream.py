"""Laws of streamed sound: the stretches in a row are the whole, whatever the chunks, and a join cannot be heard."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import toy_codec

from vadusa_jax.evaluation.testsets import load_testset
from vadusa_jax.speech import features, load_codec, renderer
from vadusa_jax.speech.stream import FADE, render
from vadusa_jax.voice import DEMO_MODEL

TOY = toy_codec()
SHIPPED = load_codec(DEMO_MODEL / "codec")


@dataclasses.dataclass(frozen=True)
class Blur:
    """A codec of the protocol without weights: a token sounds as the mean of the tokens around it."""

    receptive_field: int = 3
    frame_rate: float = 100.0
    vocab_size: int = 20
    sample_rate: int = 8_000

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        reach, count = self.receptive_field, len(tokens_T)
        means = [tokens_T[max(0, t - reach) : t + reach + 1].mean() for t in range(count)]
        return np.repeat(np.asarray(means, np.float32), 80)


@pytest.fixture(scope="module")
def speech_T():
    """Tokens of eight seconds of the test set."""
    waves = itertools.islice((s.wave_P for s in load_testset("heldout")), 8)
    return SHIPPED.encode(np.concatenate(list(waves)))[:400]


def chunked(tokens_T: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(tokens_T, np.cumsum(sizes)[np.cumsum(sizes) < len(tokens_T)])


def said(codec, chunks, **settings) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.float32), *render(codec, chunks, **settings)])


def random_tokens(count: int, codec, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, codec.vocab_size, count).astype(np.int32)


SIZES = st.lists(st.integers(0, 40), max_size=12)


@pytest.mark.parametrize("codec", [TOY, Blur(), Blur(receptive_field=0)], ids=["toy", "blur", "local"])
@settings(max_examples=60)
@given(count=st.integers(0, 150), sizes=SIZES, first=st.integers(1, 9), growth=st.integers(1, 5))
def test_any_chunks_make_the_whole(codec, count, sizes, first, growth):
    tokens_T = random_tokens(count, codec)
    wave_P = said(codec, chunked(tokens_T, sizes), first=first, largest=first * growth)
    assert wave_P.dtype == np.float32
    np.testing.assert_allclose(wave_P, codec.decode(tokens_T) if count else np.zeros(0), atol=1e-4)


@settings(max_examples=8)
@given(count=st.integers(1, 400), sizes=SIZES)
def test_any_chunks_make_the_whole_with_the_shipped_codec(speech_T, count, sizes):
    whole_P = SHIPPED.decode(speech_T[:count])
    np.testing.assert_allclose(said(SHIPPED, chunked(speech_T[:count], sizes)), whole_P, atol=1e-4)


@settings(max_examples=60)
@given(count=st.integers(0, 150), sizes=SIZES, lookahead=st.integers(0, 9))
def test_chunks_never_change_a_sample_at_any_lookahead(count, sizes, lookahead):
    tokens_T = random_tokens(count, TOY)
    ways = [chunked(tokens_T, sizes), [tokens_T], list(tokens_T[:, None])]
    one, *others = [said(TOY, chunks, lookahead=lookahead) for chunks in ways]
    assert len(one) == 320 * count
    assert all(np.array_equal(one, other) for other in others)


def test_without_tokens_there_is_no_sound():
    assert not list(render(TOY, []))
    assert not list(render(TOY, [np.zeros(0, np.int32)] * 3))


@pytest.mark.parametrize("count", [1, 2])
def test_the_shortest_utterances_are_one_wave(count):
    (wave_P,) = render(TOY, list(random_tokens(count, TOY)[:, None]))
    np.testing.assert_allclose(wave_P, TOY.decode(random_tokens(count, TOY)), atol=1e-6)


@pytest.mark.parametrize("codec", [TOY, SHIPPED], ids=["toy", "shipped"])
def test_no_token_is_heard_beyond_the_receptive_field(codec):
    tokens_T, field, at = random_tokens(120, codec), codec.receptive_field, 60
    other_T = tokens_T.copy()
    other_T[at] = (tokens_T[at] + 7) % codec.vocab_size
    difference_T = np.abs(codec.decode(tokens_T) - codec.decode(other_T)).reshape(120, -1).max(axis=1)
    heard = np.flatnonzero(difference_T > 1e-6)
    assert at - field <= heard.min() < at < heard.max() <= at + field


def test_the_field_is_what_the_layers_reach():
    assert (TOY.receptive_field, SHIPPED.receptive_field) == (3 + 4, 12 + 16)


def test_little_lookahead_is_heard_only_around_the_joins(speech_T):
    """The joins of 400 tokens lie at 8, 24, 56, 120, 184, 248, 312 and 376."""
    whole_P, field = SHIPPED.decode(speech_T), SHIPPED.receptive_field
    joins = np.cumsum([8, 16, 32, *[64] * 5])
    near_T = (np.abs(np.arange(400)[:, None] - joins) <= field).any(axis=1)
    distances = []
    for lookahead in (0, 2, 4, 8, 16):
        wave_P = said(SHIPPED, [speech_T], lookahead=lookahead)
        error_T = np.abs(wave_P - whole_P).reshape(400, -1).max(axis=1)
        assert error_T[~near_T].max() < 1e-4
        made, wanted = (np.asarray(features.log_mel(w[None], 16_000)) for w in (wave_P, whole_P))
        distances.append(np.abs(made - wanted).mean())
    assert distances == sorted(distances, reverse=True)
    assert distances[0] < 0.05 and distances[3] < 0.002  # mean nats; the codec itself is 0.2 away from the recording


def test_a_wrong_guess_fades_out():
    codec, tokens_T = Blur(), np.repeat([0, 12], [4, 20])  # after 4 tokens nothing tells that it gets loud
    steps_P = np.abs(np.diff(said(codec, [tokens_T], lookahead=0, first=4, largest=20)))
    hard_P = np.abs(np.diff(codec.decode(tokens_T)))
    assert steps_P[4 * 80 - 1 : (4 + FADE) * 80 - 1].max() < 0.1 < hard_P.max()


def test_the_first_sound_waits_for_its_lookahead_and_no_more():
    taken = []
    tokens = (taken.append(t) or np.array([t]) for t in random_tokens(100, TOY))
    wave_P = next(render(TOY, tokens, lookahead=3, first=5))
    assert (len(taken), len(wave_P)) == (5 + 3, 5 * 320)


def test_nothing_is_compiled_after_the_first_long_utterance(speech_T):
    list(render(SHIPPED, [speech_T[:250]]))
    compiled = renderer._decode._cache_size()
    for count in (1, 40, 97, 250, 399):
        list(render(SHIPPED, chunked(speech_T[:count], [9] * 50)))
    assert renderer._decode._cache_size() == compiled


@pytest.mark.parametrize("sizes", [{"lookahead": -1}, {"first": 0}, {"first": 9, "largest": 8}])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="0 < first <= largest"):
        next(render(TOY, [np.zeros(50, np.int32)], **sizes))
