"""Laws of training: what each head learns from, and that packing, devices and interruptions change nothing."""

import dataclasses
import functools
import json
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import CODEC, HEADS, MODEL, TINY, tiny_tokens, toy_model

from vadusa_jax.config import Config, DataConfig, TrainConfig
from vadusa_jax.data.batches import dev_batches, read_texts, train_batches
from vadusa_jax.speech.codec import new_codec
from vadusa_jax.text import VOCABULARY, Vocabulary
from vadusa_jax.training.checkpoint import CheckpointError, Checkpoints, first_parameters, load_trained
from vadusa_jax.training.loop import TrainingDiverged, train
from vadusa_jax.training.losses import head_sums, joint_loss, loss_sums, metrics, shifted_targets
from vadusa_jax.training.optimizer import make_optimizer, schedule
from vadusa_jax.training.step import make_model, make_train_step
from vadusa_jax.training.watch import token_flops
from vadusa_jax.voice import sample_writer
from vadusa_jax.weights import WeightsError, load_weights, save_weights

ROW = 48


def pack(rows: list[list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of rows of segments of the given lengths; the second half of every segment is speech."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), ROW)
    batch = {f"{name}_BT": np.zeros(shape, np.int32) for name in ("mask", "segments", "positions")}
    batch |= {
        f"{name}_BT": rng.integers(0, MODEL.output_vocab, shape).astype(np.int32) for name in ("tokens", "targets")
    }
    for b, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, start=1):
            here = (b, slice(start, start + length))
            batch["segments_BT"][here] = number
            batch["positions_BT"][here] = np.arange(length)
            batch["mask_BT"][here] = np.arange(length) >= length // 2
            start += length
    return batch


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


# what is learned when


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


def same(a: nnx.State, b: nnx.State) -> list[bool]:
    return [np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]


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


def test_the_z_loss_pulls_the_normaliser_of_every_head_to_zero():
    logits_BTV = 3.0 + jnp.zeros((1, 2, 5))
    mask_BT = jnp.array([[True, False]])
    plain, more = (head_sums(logits_BTV, jnp.zeros((1, 2), int), mask_BT, (), z)[1] for z in (0.0, 0.1))
    assert float(more - plain) == pytest.approx(0.1 * (3 + np.log(5)) ** 2)


# runs


class Interrupted(Exception):
    """What a preempted machine would do."""


class Cut:
    """Batches that end in an exception after `count` of them."""

    def __init__(self, batches, count: int, then=None):
        self._batches, self._left, self._then = batches, count, then

    def __next__(self):
        if not self._left:
            if self._then is None:
                raise Interrupted
            self._then()
        self._left -= 1
        return next(self._batches)

    def __getattr__(self, name: str):
        return getattr(self._batches, name)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    return tiny_tokens(tmp_path_factory.mktemp("data") / "tokens")


def run(
    data: DataConfig, folder: Path, resume: bool = False, wrap=lambda batches: batches, init=None, **changes
) -> nnx.State:
    config = dataclasses.replace(TINY, data=data, train=dataclasses.replace(TINY.train, **changes))
    batches = wrap(train_batches(data, config.model))
    return train(config, folder, batches, lambda: dev_batches(data, config.model), resume, False, init)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> tuple[Path, nnx.State]:
    """One uninterrupted run, in which checkpoints of steps 3 and 6 are kept."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    folder.mkdir()
    return folder, run(data, folder)


def figures(folder: Path) -> dict[tuple[int, bool], dict[str, float]]:
    """Figures by step and kind, each of them written once. Speed is no result."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {}
    for line in lines:
        key = (line["step"], "dev/loss" in line)
        assert key not in found
        found[key] = {name: x for name, x in line.items() if name not in ("tokens_per_s", "data_wait", "mfu")}
    return found


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(data, whole, tmp_path):
    with pytest.raises(Interrupted):
        run(data, tmp_path, wrap=lambda batches: Cut(batches, 5))
    params = run(data, tmp_path, resume=True)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert figures(tmp_path) == figures(whole[0])
    assert set(figures(tmp_path)) == {(step, False) for step in range(1, 7)} | {(3, True), (6, True)}
    config, lm = load_trained(tmp_path)
    assert config.train == TINY.train
    for a, b in zip(jax.tree.leaves(nnx.state(lm, nnx.Param)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_starts_from_the_parameters_it_is_given(data, whole, tmp_path):
    given = first_parameters(whole[0], TINY)
    params = run(data, tmp_path, init=given, steps=1, learning_rate=0.0, adam_learning_rate=0.0)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("heads", [{"count": 3}, {"kind": "hydra"}, {"layers": 2}])
def test_new_heads_on_a_trained_backbone_start_from_its_lm_head(whole, heads):
    config = dataclasses.replace(TINY, heads=dataclasses.replace(TINY.heads, **heads))
    params = first_parameters(whole[0], config)
    assert all(same(params["backbone"], whole[1]["backbone"]))
    for output_DV in params["heads"]["output"][...]:
        np.testing.assert_array_equal(output_DV, whole[1]["backbone"]["lm_head"]["kernel"][...])
    assert not np.any(params["heads"]["residual"][...])


def test_heads_are_added_to_a_backbone_that_has_none(data, tmp_path):
    bare = dataclasses.replace(TINY, heads=dataclasses.replace(TINY.heads, count=0))
    config = dataclasses.replace(bare, data=data, train=dataclasses.replace(TINY.train, steps=1, ema=0.5))
    params = train(config, tmp_path, train_batches(data, config.model), lambda: dev_batches(data, config.model))
    assert params["backbone"]["norm"]["scale"][...].shape == (16,)
    assert first_parameters(tmp_path, TINY)["heads"]["output"][...].shape[0] == TINY.heads.count


def test_the_average_is_what_a_run_leaves(data, tmp_path):
    params = run(data, tmp_path, ema=0.99)
    _, lm = load_trained(tmp_path)
    kept = nnx.state(lm, nnx.Param)
    assert not any(same(kept, params))
    checkpoints = Checkpoints(tmp_path)
    assert all(same(checkpoints.load(params)[1], params))


def test_parameters_of_another_config_are_no_start(whole):
    wide = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, width=32))
    with pytest.raises(CheckpointError, match=r"does not fit the config: model\.width is 16, not 32"):
        first_parameters(whole[0], wide)


def test_a_second_run_in_the_same_folder_is_refused(data, whole):
    before = sorted(path.name for path in (whole[0] / "checkpoints").iterdir())
    with pytest.raises(FileExistsError, match="at step 6: pass --resume"):
        run(data, whole[0])
    assert sorted(path.name for path in (whole[0] / "checkpoints").iterdir()) == before


def test_a_failed_save_stops_the_run_and_leaves_the_last_good_step(data, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / "checkpoints" / "3").exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # saves are asynchronous: step 3 is to be the last good one
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))

    try:  # from the fifth batch on no file may grow past 2 kB, as on a full disk: the save of step 6 fails
        with pytest.raises(Exception, match=r"(?i)file too large|error writing|failed|no space"):
            run(
                data,
                tmp_path,
                wrap=lambda b: Cut(b, 4, fill_the_disk),
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest_step == 3
    step, params, _, _ = checkpoints.load(make_model(TINY)[1])
    assert step == 3 and all(np.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_loss_that_is_no_number_stops_the_run_and_is_never_saved(data, tmp_path, log_every):
    with pytest.raises(TrainingDiverged, match="at step"):
        run(data, tmp_path, optimizer="adamw", learning_rate=1e38, checkpoint_every=1, log_every=log_every)
    checkpoints = Checkpoints(tmp_path)
    if checkpoints.latest_step is not None:
        _, params, _, _ = checkpoints.load(make_model(TINY)[1])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_every_evaluation_can_be_heard_and_a_few_steps_seen(tmp_path):
    config = dataclasses.replace(
        TINY,
        data=tiny_tokens(tmp_path / "tokens", speech_vocab=20),
        model=dataclasses.replace(TINY.model, speech_vocab=20, max_length=512),
    )
    vocabulary = Vocabulary.load(tmp_path / "tokens" / VOCABULARY)
    texts = read_texts(config.data.dir, config.model, "dev")[:4]
    listen = sample_writer(config, texts, vocabulary, new_codec(CODEC, seed=0), tmp_path / "samples")
    batches = train_batches(config.data, config.model)
    dev = functools.partial(dev_batches, config.data, config.model)
    train(config, tmp_path / "run", batches, dev, progress=False, listen=listen, profile=1)
    names = [f"000000{step}-{i}.wav" for step in (3, 6) for i in range(4)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == names
    waves = [soundfile.read(tmp_path / "samples" / name) for name in names]
    assert all(rate == CODEC.sample_rate and np.isfinite(wave_P).all() for wave_P, rate in waves)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "run" / "events").iterdir())
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"loss", "head1/top1", "lm/top1", "tokens_per_s", "mfu", "data_wait", "skipped"} <= line.keys()
    assert 0 < line["mfu"] < 1 and 0 <= line["data_wait"] <= 1


def test_the_operations_of_a_token_are_six_for_each_weight_and_attention():
    model = dataclasses.replace(TINY.model, layers=2, width=8, ffn=12, speech_vocab=9)
    _, params = make_model(dataclasses.replace(TINY, model=model, heads=HEADS))
    layer, head = 4 * 8 * 8 + 3 * 8 * 12, HEADS.layers * 8 * 8 + 8 * 10
    weights = 2 * layer + 8 * 10 + HEADS.count * head
    assert token_flops(params, model, row_length=64) == 6 * weights + 12 * 2 * 8 * 64


# configs that do not match


@pytest.mark.parametrize(
    ("room", "change", "parameter", "shapes"),
    [
        ("model", {"width": 32}, "backbone.blocks.0", ["(32,)", "(16,)"]),
        ("heads", {"count": 3}, "heads.bias", ["(1, 3, 16)", "(1, 2, 16)"]),
        ("heads", {"layers": 2}, "heads.bias", ["(2, 2, 16)", "(1, 2, 16)"]),
        ("model", {"layers": 2}, "backbone.blocks.1", []),
    ],
)
def test_another_config_is_refused_by_checkpoints_and_weights(whole, tmp_path, room, change, parameter, shapes):
    other = dataclasses.replace(TINY, **{room: dataclasses.replace(getattr(TINY, room), **change)})
    graph, params = make_model(other)
    with pytest.raises(CheckpointError, match=f"parameter {parameter}".replace(".", "/")) as by_checkpoint:
        Checkpoints(whole[0]).load(params)
    save_weights(nnx.merge(*make_model(TINY)), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"parameter {parameter}") as by_weights:
        load_weights(nnx.merge(graph, params), tmp_path / "model.safetensors")
    for shape in shapes:
        assert shape in str(by_checkpoint.value) and shape in str(by_weights.value)


def test_a_smaller_model_is_refused_as_a_larger_one_is(whole, tmp_path):
    deeper = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, layers=2))
    graph, params = make_model(deeper)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, params, {"count": jnp.zeros(())}, {})
    checkpoints.close()
    with pytest.raises(CheckpointError, match="parameter backbone/blocks/1"):
        Checkpoints(tmp_path).load(make_model(TINY)[1])
    save_weights(nnx.merge(graph, params), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"parameter backbone.blocks.1"):
        load_weights(nnx.merge(*make_model(TINY)), tmp_path / "model.safetensors")
