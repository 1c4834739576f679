"""Several processes on this machine train as one does: the loopback pod of launch/multihost_cpu.sh."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import compiled
import jax
import pytest
from toys import TINY, tiny_tokens

from vadusa_jax.config import MeshConfig
from vadusa_jax.data.batches import dev_batches, train_batches
from vadusa_jax.model.sharding import make_mesh
from vadusa_jax.training import hosts
from vadusa_jax.training.loop import train

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "launch" / "multihost_cpu.sh"
STEPS = 40  # the third is long over before a pod that is asked to end could take them all


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    data = tiny_tokens(tmp_path_factory.mktemp("data") / "tokens")
    return dataclasses.replace(
        TINY, data=data, train=dataclasses.replace(TINY.train, steps=STEPS, eval_every=10, checkpoint_every=10)
    )


def flags(config, folder: Path, *more: str) -> list[str]:
    """The command line that says `config`."""
    named = [
        f"--config.{room}.{name}={value}"
        for room in ("model", "heads", "data", "train")
        for name, value in dataclasses.asdict(getattr(config, room)).items()
    ]
    return ["--config=configs/tiny.py", f"--workdir={folder}", *named, *more]


@pytest.fixture
def pod(tmp_path, cache):
    """Starts launch/multihost_cpu.sh with the Python of the tests, or with another program in its place."""

    def start(*arguments, program: str = f'exec {sys.executable} "$@"', environment=()) -> subprocess.Popen:
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/usr/bin/env bash\n[[ ${{1:-}} == -c || ${{2:-}} == pip ]] && exit\n{program}\n")
        python.chmod(0o755)
        clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        return subprocess.Popen(
            ["bash", SCRIPT, *map(str, arguments)],
            env=clean | compiled.environment(cache) | {"VADUSA_VENV": str(tmp_path / "venv")} | dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss", line.get("dev/loss"))) for line in lines]


def assert_close(one: list, other: list) -> None:
    assert [step for step, _ in one] == [step for step, _ in other]
    assert [loss for _, loss in one] == pytest.approx([loss for _, loss in other], rel=1e-5)


@pytest.mark.slow
def test_a_pod_of_two_by_four_that_saves_on_sigterm_and_goes_on_trains_as_one_with_eight_and_as_one_device(
    config, pod, tmp_path, monkeypatch
):
    there, file = pod(*flags(config, tmp_path / "2x4")), tmp_path / "2x4" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    there.send_signal(signal.SIGTERM)
    output, _ = there.communicate(timeout=120)
    assert there.returncode == 143 and "asked to end: saved step" in output
    assert 3 <= losses(tmp_path / "2x4")[-1][0] < STEPS
    there = pod(*flags(config, tmp_path / "2x4", "--resume"))
    devices = jax.devices()
    for count in (8, 1):
        monkeypatch.setattr(jax, "devices", lambda count=count: devices[:count])
        batches = train_batches(config.data, config.model)
        train(config, tmp_path / f"1x{count}", batches, lambda: dev_batches(config.data, config.model), progress=False)
    output, _ = there.communicate(timeout=300)
    assert there.returncode == 0, output
    assert len(losses(tmp_path / "2x4")) == STEPS + 4
    assert_close(losses(tmp_path / "1x8"), losses(tmp_path / "1x1"))
    assert_close(losses(tmp_path / "2x4"), losses(tmp_path / "1x1"))
    assert output.count(f"trained to step {STEPS}") == 1  # only process 0 speaks


@pytest.mark.slow
def test_processes_with_different_settings_are_told_what_differs(config, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for number in range(2):
        us = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        us |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
        command = [sys.executable, "-m", "vadusa_jax.train"]
        command += flags(config, tmp_path / "run", f"--config.train.clip_norm={1 + number}")
        processes.append(
            subprocess.Popen(command, env=os.environ | us, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        )
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "train.clip_norm is 1.0 in process 0 and 2.0 in process 1" in error


def test_one_process_that_fails_ends_the_others_and_the_script(pod, tmp_path):
    program = f"echo $$ >>{tmp_path}/pids; ((JAX_PROCESS_ID == 1)) && exit 7; exec sleep 300"
    there = pod("--processes", 3, program=program, environment={"GRACE": "1"})
    output, _ = there.communicate(timeout=60)
    assert there.returncode == 7, output
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_the_dry_run_prints_one_command_for_each_process(pod):
    output, _ = pod("--processes", 3, "--devices", 2, "--dry-run", "--config", "configs/tiny.py").communicate()
    lines = output.splitlines()
    assert [f"JAX_PROCESS_ID={i} " in line for i, line in enumerate(lines)] == [True] * 3
    assert all("device_count=2" in line and line.endswith("--config configs/tiny.py ") for line in lines)


@pytest.mark.parametrize("arguments", [("--processes", "two"), ("--processes",), ("--devices", "0")])
def test_a_bad_count_is_named(pod, arguments):
    there = pod(*arguments)
    output, _ = there.communicate()
    assert there.returncode == 2 and arguments[0].strip("-").upper() in output.upper()


def test_an_environment_that_says_half_is_an_error_that_says_what_is_missing(monkeypatch):
    monkeypatch.setenv(hosts.COORDINATOR, "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"set JAX_NUM_PROCESSES and JAX_PROCESS_ID"), hosts.joined():
        pass


def test_rows_that_do_not_divide_are_a_named_error():
    mesh = make_mesh(MeshConfig())
    assert hosts.own_rows(mesh, 16) == range(16)
    with pytest.raises(ValueError, match=r"data\.batch_rows is 4: make it a multiple"):
        hosts.own_rows(mesh, 4)
