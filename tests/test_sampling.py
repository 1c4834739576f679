"""Laws of sampling: noise belongs to a position, draws follow the distribution, drafts share the target's noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from toys import check_counts

from vadusa_jax.decode.accept import EXACT, Greedy, Position, Tolerance, draw
from vadusa_jax.decode.draft import rank_drafts
from vadusa_jax.decode.sampling import Sampling, keyed_noise, row_keys

V = 12
seeds = st.integers(0, 2**31 - 1)


@functools.partial(jax.jit, static_argnames="draws")
def noise(key_B: jax.Array, position_BJ: jax.Array, draws: int = 4) -> jax.Array:
    return keyed_noise(key_B, position_BJ, draws, V, jnp.float32)


def random_logits(seed: int, *shape: int) -> np.ndarray:
    return 2 * np.random.default_rng(seed).standard_normal((*shape, V)).astype(np.float32)


# noise (always the same shapes, so that they are compiled once)


@settings(max_examples=15)
@given(
    seeds,
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=10, max_size=10)), min_size=4, max_size=4
    ),
)
def test_noise_belongs_to_the_sequence_and_the_position_whatever_the_layout(seed, layout):
    noise_BJXV = noise(row_keys(seed, np.arange(4)), np.tile(np.arange(10), (4, 1)))
    rows, position_BJ = np.array([row for row, _ in layout]), np.array([positions for _, positions in layout])
    np.testing.assert_array_equal(noise(row_keys(seed, rows), position_BJ), noise_BJXV[rows[:, None], position_BJ])


def test_noise_is_what_jax_draws():
    def one(key: jax.Array, position: int, draw: int) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, position), draw), (V,), jnp.float32)

    keys_B, position_BJ = row_keys(5, np.arange(4)), np.arange(40).reshape(4, 10)
    by_jax = jax.vmap(jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None)), (0, 0, None))
    np.testing.assert_allclose(noise(keys_B, position_BJ), by_jax(keys_B, position_BJ, jnp.arange(4)), rtol=1e-6)


def test_more_draws_leave_the_first_ones_as_they_are():
    keys_B, position_BJ = row_keys(0, np.arange(4)), np.arange(40).reshape(4, 10)
    np.testing.assert_array_equal(noise(keys_B, position_BJ, 1), noise(keys_B, position_BJ)[:, :, :1])


def test_noise_differs_between_seeds_rows_positions_and_draws():
    drawn = [noise(row_keys(seed, np.arange(4)), np.arange(40).reshape(4, 10)).ravel() for seed in (0, 1)]
    assert len(np.unique(drawn)) > 0.999 * np.size(drawn)


# distribution


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=7), Sampling(1.3, top_k=9, top_p=0.8)])
def test_keyed_draws_follow_the_filtered_distribution(sampling):
    log_p_V = sampling.log_probs(jnp.asarray(random_logits(3)) / 2)
    noise_MXV = noise(row_keys(0, np.arange(4)), np.arange(20_000).reshape(4, -1)).reshape(-1, 4, V)
    drawn_MA = np.asarray(draw(Position(jnp.broadcast_to(log_p_V, (len(noise_MXV), V)), noise_MXV), 4))
    p_V = np.exp(np.asarray(log_p_V, np.float64))
    p_V /= p_V.sum()
    for a in range(4):
        check_counts(drawn_MA[:, a], p_V)
    pairs_VV = np.outer(p_V, p_V).ravel()
    check_counts(drawn_MA[:, 0] * V + drawn_MA[:, 1], pairs_VV)  # draws of one position are independent,
    check_counts(drawn_MA[:-1:2, 0] * V + drawn_MA[1::2, 0], pairs_VV)  # and so are neighbouring positions


@settings(max_examples=12)
@given(seeds, st.sampled_from([0.5, 1.7]), st.sampled_from([0, 1, 7, V + 3]), st.sampled_from([0.05, 0.8, 0.97, 1.0]))
def test_filters_keep_what_a_plain_reading_keeps(seed, temperature, top_k, top_p):
    logits_JV = random_logits(seed, 20)
    log_p_JV = Sampling(temperature, top_k, top_p).log_probs(jnp.asarray(logits_JV))
    for logits_V, log_p_V in zip(logits_JV, log_p_JV, strict=True):
        p_V = special.softmax(logits_V.astype(np.float64) / temperature)
        likeliest = np.argsort(-p_V)[: top_k or V]
        mass_before = np.cumsum(p_V[likeliest]) - p_V[likeliest]
        kept = likeliest[mass_before < top_p * p_V[likeliest].sum()]
        wanted_V = np.zeros(V)
        wanted_V[kept] = p_V[kept] / p_V[kept].sum()
        np.testing.assert_allclose(np.exp(log_p_V), wanted_V, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


# rules and drafts


def positions(seed: int, draws: int) -> tuple[jax.Array, jax.Array]:
    """log_p `[J, V]` of 40 positions and their noise `[J, X, V]`."""
    log_p_JV = Sampling(0.8, top_k=9).log_probs(jnp.asarray(random_logits(seed, 40)))
    return log_p_JV, noise(row_keys(seed, np.arange(4)), np.arange(40).reshape(4, 10)).reshape(40, 4, V)[:, :draws]


@settings(max_examples=10)
@given(seeds)
def test_a_larger_tolerance_allows_more_and_says_the_same_unaided(seed):
    log_p_JV, noise_JXV = positions(seed, 4)
    most_JA = draw(Position(log_p_JV, noise_JXV), 4)
    for draws in range(1, 4):
        np.testing.assert_array_equal(draw(Position(log_p_JV, noise_JXV[:, :draws]), draws), most_JA[:, :draws])


def test_no_tolerance_below_one():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Tolerance(0)


@settings(max_examples=10)
@given(seeds, st.sampled_from([1, 2, 4]))
def test_a_head_that_is_right_guesses_exactly_the_draws(seed, draws):
    log_p_JV, noise_JXV = positions(seed, draws)
    drawn_JA = np.asarray(draw(Position(log_p_JV, noise_JXV), draws))
    guess_JR = np.asarray(rank_drafts(log_p_JV, noise_JXV, V))
    for log_p_V, drawn_A, guess_R in zip(np.asarray(log_p_JV), drawn_JA, guess_JR, strict=True):
        winners = set(drawn_A.tolist())
        assert set(guess_R[: len(winners)].tolist()) == winners
        assert (np.diff(log_p_V[guess_R[: len(winners)]]) <= 0).all()  # the likelier draw first
    if draws == 1:
        np.testing.assert_array_equal(guess_JR[:, :1], drawn_JA)


def test_a_rare_draw_is_guessed_first_however_narrowly_it_wins():
    log_p_V = jnp.log(jnp.array([0.99, 1e-4, *[(0.01 - 1e-4) / (V - 2)] * (V - 2)]))
    noise_XV = jnp.zeros((1, V)).at[0, 1].set(log_p_V[0] - log_p_V[1] + 1e-4)
    assert draw(Position(log_p_V, noise_XV), 1).tolist() == [1]
    assert rank_drafts(log_p_V, noise_XV, 3).tolist()[:2] == [1, 0]


@settings(max_examples=10)
@given(seeds)
def test_without_noise_a_head_guesses_its_likeliest_tokens(seed):
    log_q_JV, noise_JXV = positions(seed, 0)
    guess_JR = rank_drafts(log_q_JV, noise_JXV, 6)
    np.testing.assert_array_equal(guess_JR, np.argsort(-np.asarray(log_q_JV), axis=-1, stable=True)[:, :6])
    np.testing.assert_array_equal(Greedy().say(Position(log_q_JV, noise_JXV), None), guess_JR[:, 0])


def test_the_rules_have_the_names_that_trees_are_stored_under():
    assert [rule.name for rule in (Greedy(), EXACT, Tolerance(3))] == ["greedy", "tolerance:1", "tolerance:3"]
