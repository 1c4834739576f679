"""Laws of training runs: interruptions change nothing, what is started where, and what a run leaves behind."""

import dataclasses
import functools
import json
import resource
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
from flax import nnx
from toys import CODEC, HEADS, TINY, same, tiny_tokens, toy_codec

from vadusa_jax.config import DataConfig
from vadusa_jax.data.batches import dev_batches, read_texts, train_batches
from vadusa_jax.model.chips import token_flops
from vadusa_jax.text import VOCABULARY, Vocabulary
from vadusa_jax.training.checkpoint import Checkpoints, first_parameters, load_trained
from vadusa_jax.training.loop import TrainingDiverged, train
from vadusa_jax.training.step import make_model
from vadusa_jax.voice import sample_writer

pytestmark = pytest.mark.usefixtures("compiled_once")  # most of these runs take the same steps


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
    listen = sample_writer(config, texts, vocabulary, toy_codec(), tmp_path / "samples")
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
    params = nnx.eval_shape(lambda: make_model(dataclasses.replace(TINY, model=model, heads=HEADS))[1])
    layer, head = 4 * 8 * 8 + 3 * 8 * 12, HEADS.layers * 8 * 8 + 8 * 10
    weights = 2 * layer + 8 * 10 + HEADS.count * head
    assert token_flops(params, model, row_length=64) == 6 * weights + 12 * 2 * 8 * 64
