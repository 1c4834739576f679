"""Metrics: errors and their intervals, marks of real speech, acceptance."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import MODEL, random_tree, toy_model

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import EXACT
from vadusa_jax.decode.loop import generate
from vadusa_jax.decode.prompts import first_slots, make_prompts, make_settings
from vadusa_jax.decode.state import FINISH
from vadusa_jax.evaluation import metrics
from vadusa_jax.evaluation.clips import Clip
from vadusa_jax.evaluation.intervals import difference_interval, interval, pooled, ratio_interval
from vadusa_jax.evaluation.metrics import Errors, count_errors
from vadusa_jax.evaluation.scores import rows, score
from vadusa_jax.evaluation.testsets import load_testset

RATE = 16_000


# Words


def test_spelling_that_sounds_alike_is_no_error():
    assert count_errors("Doctor Smith's colour, please!", "Dr. Smith's color please").word_errors == 0


@given(st.lists(st.sampled_from(["a", "cat", "sat", "down"])), st.lists(st.sampled_from(["a", "cat", "sat"])))
def test_errors_are_bounded_and_vanish_only_for_equal_words(reference, heard):
    errors = count_errors(" ".join(reference), " ".join(heard))
    longer, shorter = max(len(reference), len(heard)), min(len(reference), len(heard))
    assert longer - shorter <= errors.word_errors <= longer
    assert (errors.word_errors == 0) == (reference == heard)


def test_error_rate_is_pooled_over_words_not_averaged_over_sentences():
    total = Errors(words=9, word_errors=0) + Errors(words=1, word_errors=1)
    assert total.wer == 0.1


def test_interval_is_seeded_holds_the_estimate_and_shrinks_with_data():
    rng = np.random.default_rng(0)

    def sample(n):
        return rng.poisson(1.0, n), np.full(n, 10)

    small, large = sample(30), sample(3000)
    low, high = interval(small)
    assert (low, high) == interval(small)
    assert low < pooled(small) < high
    assert np.diff(interval(large)) < np.diff((low, high)) / 5
    assert interval((small[0][:1], small[1][:1])) is None


def test_paired_comparison_cancels_what_two_systems_share():
    errors, words = np.random.default_rng(0).poisson(3.0, 50), np.full(50, 10)
    base = (errors, words)
    assert difference_interval(base, base) == (0.0, 0.0)
    np.testing.assert_allclose(difference_interval((errors + 1, words), base), (0.1, 0.1))
    np.testing.assert_allclose(ratio_interval((2 * errors, words), base), (2.0, 2.0))


# Real speech


@pytest.fixture(scope="module")
def recogniser():
    return metrics.Recogniser(cpu_threads=1)


def test_recogniser_understands_the_shipped_recordings(recogniser):
    heard = score([Clip(s, "truth", 0, s.wave_P, s.sample_rate) for s in load_testset("everyday")[:6]], recogniser)
    assert sum((one.errors for one in heard), Errors()).wer < 0.2
    assert all(one.dnsmos > 2 for one in heard)


def test_the_mark_is_the_one_of_the_library():
    from speechmos import dnsmos as predictor

    sentence = load_testset("everyday")[0]
    assert metrics.dnsmos(sentence.wave_P, RATE) == pytest.approx(predictor.run(sentence.wave_P, RATE)["ovrl_mos"])


def test_recogniser_does_not_loop_on_a_bad_clip(recogniser):
    noise_P = np.random.default_rng(0).uniform(-0.3, 0.3, 2 * RATE).astype(np.float32)
    assert len(recogniser.transcribe(noise_P, RATE).split()) < 50
    assert metrics.dnsmos(noise_P, RATE) < 2


def test_no_audio_is_no_words_and_the_lowest_mark(recogniser):
    assert recogniser.transcribe(np.zeros(0, np.float32), RATE) == ""
    assert metrics.dnsmos(np.zeros(0, np.float32), RATE) == metrics.MOS_FLOOR


class Loudness:
    """Stands for the class that the package `utmos` has: ten marks of a [1, P] tensor."""

    def calculate_wav(self, wave, rate):
        assert wave.shape[0] == 1 and rate == RATE
        return np.full(10, 1.0 + 4 * float(wave.abs().max()))


def test_utmos_marks_where_its_package_is_installed(recogniser, monkeypatch):
    clips = [Clip(s, "truth", 0, s.wave_P, s.sample_rate) for s in load_testset("everyday")[:2]]
    monkeypatch.setitem(sys.modules, "utmos", None)
    metrics.utmos_model.cache_clear()
    with pytest.raises(ImportError, match="pip install utmos"):
        score(clips, recogniser, opinions=["dnsmos", "utmos"])
    monkeypatch.setitem(sys.modules, "utmos", types.SimpleNamespace(Score=Loudness))
    (row,) = rows(score(clips, recogniser, opinions=["dnsmos", "utmos"]), {})
    peaks = [np.abs(clip.wave_P).max() for clip in clips]
    assert row["utmos"] == pytest.approx(1 + 4 * np.mean(peaks)) and row["utmos"] != row["dnsmos"]
    assert "utmos" not in rows(score(clips, recogniser), {})[0]
    assert metrics.utmos(np.zeros(0, np.float32), RATE) == metrics.MOS_FLOOR
    metrics.utmos_model.cache_clear()


@pytest.mark.parametrize(
    ("wave_P", "rate", "message"),
    [
        (np.zeros(RATE), 22_050, "22050 Hz"),
        (np.full(RATE, np.nan), RATE, "finite"),
        (np.zeros((2, RATE)), RATE, "mono"),
    ],
)
def test_bad_audio_is_named(recogniser, wave_P, rate, message):
    with pytest.raises(ValueError, match=message):
        recogniser.transcribe(wave_P, rate)
    with pytest.raises(ValueError, match=message):
        metrics.dnsmos(wave_P, rate)


# Acceptance


@given(st.lists(st.integers(1, 7), min_size=1), st.data())
def test_acceptance_counts_nothing_past_the_end(sizes, data):
    """Case 13: a pass may commit tokens past EOS; only those up to EOS, itself included, count."""
    end = data.draw(st.integers(sum(sizes[:-1]) + 1, sum(sizes)), label="tokens up to EOS")
    block_of = np.repeat(np.arange(len(sizes)), sizes)[:end]
    kept = metrics.blocks(block_of, len(sizes))
    assert metrics.tokens_per_step(kept) == end / len(sizes)
    histogram = metrics.acceptance_histogram(kept)
    assert sum(int(size) * count for size, count in histogram.items()) == end
    assert sum(histogram.values()) == len(sizes)


@pytest.mark.parametrize("block_of", [[0, 2, 1], [0, 1, 3], [-1, 0, 1]])
def test_blocks_out_of_order_or_range_are_an_error(block_of):
    with pytest.raises(ValueError, match="blocks must rise"):
        metrics.blocks(np.array(block_of), steps=3)


def test_acceptance_of_the_decode_loop_is_committed_tokens_over_passes():
    """Case 13 on the loop itself: rows that end inside a block count up to their EOS."""
    model, tree = toy_model(), random_tree(0, nodes=16)
    prompts = make_prompts([[MODEL.output_vocab] * 3] * 12, [60] * 12, range(12), 0, DecodeConfig())
    settings = make_settings(tree, EXACT, DecodeConfig())
    state = generate(model, prompts, settings=settings, slots=first_slots(prompts, tree))
    assert "eos" in [FINISH[code] for code in state.finish_B]
    for said_S, step_S, count, passes in zip(state.said_BS, state.step_BS, state.count_B, state.passes_B, strict=True):
        block_sizes = metrics.blocks(np.asarray(step_S[:count]), int(passes))
        assert metrics.tokens_per_step(block_sizes) == pytest.approx(int(count) / int(passes))
        assert min(block_sizes) >= 1 and block_sizes[0] == 1
        assert MODEL.eos not in said_S[: count - 1]
