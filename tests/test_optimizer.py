"""Laws of the update: what is learned when, by which rate, and what is averaged."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from toys import TINY, pack, same

from vadusa_jax.config import Config, TrainConfig
from vadusa_jax.training.optimizer import make_optimizer, schedule
from vadusa_jax.training.step import make_model, make_train_step


def learn(config: Config, steps: int = 4, params: nnx.State | None = None) -> tuple[list[nnx.State], tuple]:
    """The parameters before each step and after the last one, and the last optimiser state."""
    graph, fresh = make_model(config)
    params = fresh if params is None else params
    optimizer = make_optimizer(config.train)
    state, step, seen = optimizer.init(params), make_train_step(config, optimizer, graph), [jax.device_get(params)]
    for seed in range(steps):
        params, state, *_ = step(params, state, pack([[20, 28], [48], [30, 10]], seed))
        seen.append(jax.device_get(params))
    return seen, state


def mode(**train) -> Config:
    return dataclasses.replace(TINY, train=dataclasses.replace(TINY.train, **train))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_training_leaves_the_backbone_alone(optimizer):
    (before, *_, after), state = learn(mode(mode="frozen", optimizer=optimizer, ema=0.9))
    assert all(same(before["backbone"], after["backbone"])) and not any(same(before["heads"], after["heads"]))
    assert not any("backbone" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_finetuning_teaches_the_heads_first_and_then_both(optimizer):
    seen, _ = learn(mode(mode="finetune", heads_warmup_steps=2, heads_rate=4.0, steps=8, optimizer=optimizer), 5)
    backbone, heads = ([state[name] for state in seen] for name in ("backbone", "heads"))
    assert all(same(backbone[0], backbone[2])) and not any(same(heads[1], heads[2]))
    assert not any(same(backbone[3], backbone[5])) and not any(same(heads[3], heads[5]))


@pytest.mark.parametrize(("field", "value"), [("mode", "alone"), ("schedule", "linear"), ("optimizer", "sgd")])
def test_an_unknown_choice_is_named(field, value):
    with pytest.raises(ValueError, match=f"train.{field} must be .*got '{value}'"):
        make_optimizer(mode(**{field: value}).train)


def test_schedules_warm_up_and_fall():
    train = TrainConfig(steps=100, warmup_steps=10, decay_share=0.3)
    cosine, wsd = (schedule(dataclasses.replace(train, schedule=name), 2.0) for name in ("cosine", "wsd"))
    for rate in (cosine, wsd):
        assert rate(0) == 0 and rate(5) == pytest.approx(1.0) and rate(10) == pytest.approx(2.0)
        assert rate(100) == pytest.approx(0.02)
    assert cosine(50) < 2.0 and wsd(69) == 2.0 and wsd(85) == pytest.approx(1.01)
    late = schedule(train, 2.0, start=20)
    assert late(19) == 0 and late(20) == 0 and late(30) == pytest.approx(2.0) and late(100) == pytest.approx(0.02)


def test_the_average_follows_the_parameters():
    seen, state = learn(mode(ema=0.15))
    average = jax.tree.leaves(seen[0])
    for n, params in enumerate(seen[1:]):
        keep = min(0.15, (1 + n) / (10 + n))
        average = [keep * a + (1 - keep) * p for a, p in zip(average, jax.tree.leaves(params), strict=True)]
    for a, b in zip(jax.tree.leaves(state[-1].average), average, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_backbone_without_heads_trains():
    config = dataclasses.replace(TINY, heads=dataclasses.replace(TINY.heads, count=0))
    (before, *_, after), _ = learn(config, 2)
    assert list(before) == ["backbone"] and not any(same(before, after))
