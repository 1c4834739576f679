"""Training that is killed, terminated, fed with bad numbers or moved to other devices goes on as if nothing had been.

Killed runs are processes of their own, forked from one that has imported everything.
"""

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from toys import TINY, tiny_tokens

from vadusa_jax.config import Config, DataConfig
from vadusa_jax.data.batches import dev_batches, train_batches
from vadusa_jax.training.checkpoint import Checkpoints
from vadusa_jax.training.loop import begin, train
from vadusa_jax.training.step import make_model
from vadusa_jax.training.stopping import Notice, Preempted
from vadusa_jax.training.watch import TrainingDiverged

STEPS = 30
KILLS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    return tiny_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Runs of this file, whatever process they are in, compile what they share once."""
    folder = str(tmp_path_factory.mktemp("cache"))
    use_cache(folder)
    yield folder
    use_cache(None)


def use_cache(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0 if folder else 1)
    compilation_cache.reset_cache()  # it is opened once, and would serve the tests of other files too


def config_of(data: DataConfig, **changes) -> Config:
    return dataclasses.replace(TINY, data=data, train=dataclasses.replace(TINY.train, **changes))


def run(config: Config, folder: Path, resume: bool = True, wrap=lambda batches: batches) -> nnx.State:
    batches = wrap(train_batches(config.data, config.model))
    return train(config, folder, batches, lambda: dev_batches(config.data, config.model), resume, progress=False)


def figures(folder: Path) -> list[dict]:
    """What metrics.jsonl says but for speed; only whole lines."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(x) for x in (file.read_text() if file.exists() else "").splitlines(True) if x.endswith("\n")]
    return [{k: v for k, v in line.items() if k not in ("tokens_per_s", "data_wait", "mfu")} for line in lines]


def assert_same(a: nnx.State, b: nnx.State) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# kill -9


def child(config: Config, folder: Path, cache: str) -> None:
    """A whole run in a process of its own."""
    use_cache(cache)
    run(config, folder)


@pytest.mark.slow
def test_kill_9_at_ten_points_changes_no_bit(data, cache, tmp_path):
    config, rng = config_of(data, steps=STEPS, checkpoint_every=2, eval_every=10), np.random.default_rng(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vadusa_jax.training.loop"])

    def start(name: str) -> multiprocessing.Process:
        process = context.Process(target=child, args=(config, tmp_path / name, cache))
        process.start()
        return process

    whole = start("whole")
    whole.join(300)
    assert whole.exitcode == 0

    (tmp_path / "killed").mkdir()
    begun = []
    for last in sorted(rng.choice(np.arange(1, STEPS), KILLS, replace=False).tolist()):
        process = start("killed")
        while process.is_alive() and not any(line["step"] >= last for line in figures(tmp_path / "killed")):
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))  # anywhere in a step, a save or what is done in between
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        begun.append(process.exitcode)
    process = start("killed")
    process.join(300)
    assert process.exitcode == 0
    assert begun.count(-signal.SIGKILL) == KILLS
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
    a, b = (Checkpoints(tmp_path / name) for name in ("killed", "whole"))
    (_, _, params, state, _) = begin(config)
    (step, *arrays, position), (whole_step, *whole_arrays, whole_position) = (x.load(params, state) for x in (a, b))
    assert (step, position) == (whole_step, whole_position) and step == STEPS
    assert_same(arrays, whole_arrays)


# SIGTERM


class Terminated:
    """Batches that bring SIGTERM with number `step`."""

    def __init__(self, batches, step: int):
        self._batches, self._step = batches, step

    def __next__(self):
        self._step -= 1
        if self._step == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return next(self._batches)

    def __getattr__(self, name: str):
        return getattr(self._batches, name)


def test_sigterm_saves_the_step_at_hand_and_the_next_run_goes_on(data, tmp_path):
    config, before = config_of(data, checkpoint_every=100), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match=r"saved step \d of 6 in .*--resume"):
        run(config, tmp_path / "cut", wrap=lambda batches: Terminated(batches, 3))
    assert signal.getsignal(signal.SIGTERM) == before
    assert Checkpoints(tmp_path / "cut").latest_step in (3, 4)  # where it was noticed
    assert_same(run(config, tmp_path / "cut"), run(config, tmp_path / "whole"))
    assert figures(tmp_path / "cut") == figures(tmp_path / "whole")


def test_a_second_sigterm_kills_at_once():
    with Notice() as notice:
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.given and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# other devices


def test_a_checkpoint_goes_on_with_another_number_of_devices(data, tmp_path, monkeypatch):
    devices, config = jax.devices(), config_of(data, eval_every=100)

    def on(count: int, wrap=lambda batches: batches) -> None:
        monkeypatch.setattr(jax, "devices", lambda: devices[:count])
        run(config, tmp_path / "moved", wrap=wrap)

    for count in (8, 1):
        with pytest.raises(Preempted):
            on(count, lambda batches: Terminated(batches, 1))  # ends after two steps
    on(4)
    run(config, tmp_path / "whole")
    for moved, whole in zip(figures(tmp_path / "moved"), figures(tmp_path / "whole"), strict=True):
        loss = "loss" if "loss" in whole else "dev/loss"
        assert moved["step"] == whole["step"] and moved[loss] == pytest.approx(whole[loss], rel=1e-5)


# what is kept


def test_newest_checkpoints_are_kept_and_every_so_many_steps(data, tmp_path):
    run(config_of(data, checkpoint_every=1, keep=2, keep_every=3, steps=8), tmp_path)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [3, 6, 7, 8]


# numbers that are none


class Poisoned:
    """Batches of which the given ones hold a token that no model knows: its embedding is no number."""

    def __init__(self, batches, steps: range):
        self._batches, self._steps, self._step = batches, steps, 0

    def __next__(self):
        batch, self._step = next(self._batches), self._step + 1
        if self._step in self._steps:
            batch = batch | {"tokens_BT": np.where(batch["segments_BT"] > 0, 10**6, batch["tokens_BT"])}
        return batch

    def __getattr__(self, name: str):
        return getattr(self._batches, name)


def test_a_loss_that_is_no_number_names_its_batch_and_stops(data, tmp_path):
    names = train_batches(data, TINY.model).names(5)
    with pytest.raises(TrainingDiverged, match=rf"loss is nan .* at step 5; .*records {', '.join(names)}"):
        run(config_of(data), tmp_path, wrap=lambda batches: Poisoned(batches, range(5, 6)))
    assert Checkpoints(tmp_path).latest_step == 3
    last = figures(tmp_path)[-1]
    assert last["step"] == 5 and last["not_finite"]["records"] == names


def test_or_it_costs_one_update_which_is_counted(data, tmp_path):
    skip = config_of(data, on_nan="skip", checkpoint_every=1, keep=9)
    params = run(skip, tmp_path / "poisoned", wrap=lambda batches: Poisoned(batches, range(4, 7)))
    found = figures(tmp_path / "poisoned")
    assert [line["step"] for line in found if "not_finite" in line] == [4, 5, 6]
    with pytest.raises(Preempted):
        run(skip, tmp_path / "good", wrap=lambda batches: Terminated(batches, 3))
    step, third, _, _ = Checkpoints(tmp_path / "good").load(make_model(TINY)[1])
    assert step == 3
    assert_same(params, third)  # as after the last good step


def test_too_many_in_a_row_stop_the_run_all_the_same(data, tmp_path):
    skip = config_of(data, on_nan="skip", skips_in_a_row=2)
    with pytest.raises(TrainingDiverged, match="at step 5 after 2 skipped updates in a row"):
        run(skip, tmp_path, wrap=lambda batches: Poisoned(batches, range(4, 7)))
