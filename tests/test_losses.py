"""Laws of the loss: what each head learns from, and that packing changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import HEADS, MODEL, ROW, pack, toy_model

from vadusa_jax.training.losses import head_sums, joint_loss, loss_sums, metrics, shifted_targets


@functools.partial(jax.jit, static_argnames="top")
def sums_and_gradient(lm, batch, top=()):
    def loss(lm):
        sums = loss_sums(lm, batch, top)
        return joint_loss(sums, HEADS), sums

    (value, sums), gradient = nnx.value_and_grad(loss, has_aux=True)(lm)
    return value, sums, gradient


@pytest.fixture(scope="module")
def lm():
    return toy_model()


# what each head learns


@settings(max_examples=20)
@given(st.integers(1, 6), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_head_k_learns_the_token_k_further_on_inside_its_own_segment(k, lengths):
    batch = pack([lengths])
    batch["targets_BT"] = np.arange(1, ROW + 1)[None]  # the answer at t is its own position, t + 1
    target_BT, mask_BT = shifted_targets(batch, k)
    for t in np.flatnonzero(mask_BT[0]):
        assert target_BT[0, t] == t + 1 + k
        assert batch["segments_BT"][0, t] == batch["segments_BT"][0, t + k] != 0
        assert batch["mask_BT"][0, t] and batch["mask_BT"][0, t + k]
    speech = [length - length // 2 for length in lengths]
    assert int(mask_BT.sum()) == sum(max(count - k, 0) for count in speech)


def test_a_head_that_knows_the_answer_has_no_loss_and_full_accuracy():
    batch = pack([[20, 9], [30]])
    for k in range(4):
        target_BT, mask_BT = shifted_targets(batch, k)
        knows = 50.0 * jax.nn.one_hot(target_BT, MODEL.output_vocab)
        count, loss, *hits = head_sums(knows, target_BT, mask_BT, (1, 3))
        assert loss < 1e-3 and hits == [count, count] and count > 0


def test_the_joint_loss_weighs_the_heads_by_powers_of_the_decay():
    sums = jnp.array([[2.0, 4.0], [1.0, 3.0], [4.0, 4.0], [0.0, 0.0], [2.0, 10.0]])
    assert float(joint_loss(sums, HEADS)) == pytest.approx(2 + 0.2 * (3 + 0.8 * 1 + 0.8**3 * 5))
    assert metrics(sums)["head4/loss"] == 5.0 and metrics(sums)["head3/loss"] == 0.0


def test_every_head_and_every_part_of_the_backbone_gets_gradient(lm):
    *_, gradient = sums_and_gradient(lm, pack([[20, 28], [48], [30, 10]]))
    for name, g in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.isfinite(g).all() and jnp.abs(g).max() > 0, jax.tree_util.keystr(name)
    for part, axis in (("output", 0), ("residual", 1), ("bias", 1)):
        g = np.moveaxis(np.asarray(gradient["heads"][part][...]), axis, 0)
        assert all(np.abs(g[k]).max() > 0 for k in range(HEADS.count)), part


@pytest.mark.parametrize(
    "rows", [[[], [], []], [[1] * 20] * 3, [[2, 3, 1], [], [3] * 9]], ids=["all masked", "of one token", "short"]
)
def test_segments_without_targets_give_finite_loss_and_gradients(lm, rows):
    value, sums, gradient = sums_and_gradient(lm, pack(rows))
    assert jnp.isfinite(value) and jnp.isfinite(sums).all()
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))
    if not any(rows):
        assert value == 0 and all((g == 0).all() for g in jax.tree.leaves(gradient))


def test_the_z_loss_pulls_the_normaliser_of_every_head_to_zero():
    logits_BTV = 3.0 + jnp.zeros((1, 2, 5))
    mask_BT = jnp.array([[True, False]])
    plain, more = (head_sums(logits_BTV, jnp.zeros((1, 2), int), mask_BT, (), z)[1] for z in (0.0, 0.1))
    assert float(more - plain) == pytest.approx(0.1 * (3 + np.log(5)) ** 2)


# packing


@settings(max_examples=5)
@given(st.integers(0, 10**6))
def test_a_packed_row_equals_its_sequences_alone(lm, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 17, 3).tolist()
    packed, alone = pack([lengths, [], []], seed), pack([[n] for n in lengths], seed)
    start = 0
    for b, length in enumerate(lengths):
        for name in ("tokens_BT", "targets_BT"):
            alone[name][b, :length] = packed[name][0, start : start + length]
        start += length
    value, sums, gradient = sums_and_gradient(lm, packed)
    value_alone, sums_alone, gradient_alone = sums_and_gradient(lm, alone)
    np.testing.assert_allclose(sums, sums_alone, rtol=1e-5)
    np.testing.assert_allclose(value, value_alone, rtol=1e-5)
    for g, g_alone in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_alone), strict=True):
        np.testing.assert_allclose(g, g_alone, rtol=1e-3, atol=1e-5)
