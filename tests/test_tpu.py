"""Training on a Cloud TPU: the launch scripts against a Google Cloud in a folder (cloud.py), preemptions included."""

import json
import os
import shutil
from pathlib import Path

import pytest
from test_launch import ROOT, bash

LAUNCH = ROOT / "launch"
TRAIN, CREATE, DELETE = (LAUNCH / f"tpu_{name}.sh" for name in ("train", "create", "delete"))


@pytest.fixture
def cloud(tmp_path):
    """Runs a launch script in a fresh cloud; returns the calls of gcloud and the finished process."""
    (tmp_path / "bucket" / "tokens").mkdir(parents=True)
    (tmp_path / "bucket" / "tokens" / "records").touch()
    (tmp_path / "state").write_text("NONE")
    for name in ("bin/gcloud", "bin/gcsfuse", "bin/python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / "cloud.py", tmp_path / name)
        (tmp_path / name).chmod(0o755)

    settings = {
        **{
            "CLOUD": tmp_path,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": tmp_path / "bin" / "python",
        },
        **{"ZONE": "us-central1-a", "PROJECT": "my project", "TPU_NAME": tmp_path.name},
        **{"BUCKET": "gs://mine", "PAUSE": 0},
    }

    def run(script, *arguments, plan="good", **environment):
        (tmp_path / "plan").write_text(plan)
        (tmp_path / "calls").write_text("")
        ran = bash(script, *arguments, **settings | environment)
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()], ran

    yield run
    run(DELETE)
    for path in (ROOT / "out").glob(f"{tmp_path.name}.*"):
        path.unlink()


def trained(folder: Path, worker: int) -> list[list[str]]:
    return [json.loads(line) for line in (folder / f"trained.{worker}").read_text().splitlines()]


def verbs(calls: list[list[str]]) -> list[str]:
    return [call[3] for call in calls if call[3] != "describe"]


@pytest.mark.parametrize("queued", [0, 1])
def test_training_starts_on_all_workers_and_is_followed_to_its_end(cloud, tmp_path, queued):
    flags = ["--config.train.steps=7", "--note", "two words, a 'quote', $HOME and *"]
    calls, ran = cloud(TRAIN, *flags, QUEUED=queued)
    assert ran.returncode == 0, ran.stderr
    assert verbs(calls) == ["create", "scp", "ssh", "ssh"] and "worker 0, run 0: good" in ran.stdout
    assert calls[-3][2] == "tpu-vm" and all("--project=my project" in call for call in calls)
    for worker in (0, 1):
        (once,) = trained(tmp_path, worker)
        assert once[-3:] == flags and "--resume" in once and f"out/bucket/{tmp_path.name}" in once


def test_a_preempted_tpu_is_replaced_and_training_goes_on(cloud, tmp_path):
    calls, ran = cloud(TRAIN, plan="preempted good")
    assert ran.returncode == 0, ran.stderr
    assert verbs(calls) == ["create", "scp", "ssh", "ssh", "delete", "create", "scp", "ssh", "ssh"]
    assert len(trained(tmp_path, 0)) == 2 and all("--resume" in run for run in trained(tmp_path, 0))


def test_training_that_fails_by_itself_is_tried_again_and_then_told_with_its_log(cloud, tmp_path):
    calls, ran = cloud(TRAIN, plan="bad bad bad bad", RETRIES=2)
    assert ran.returncode == 1 and len(trained(tmp_path, 0)) == 3
    assert "run 2: bad" in ran.stderr and verbs(calls) == ["create", "scp", "ssh", "ssh"]
    calls, ran = cloud(TRAIN, plan="bad bad bad bad good", RETRIES=2)  # mended, say, and started again
    assert ran.returncode == 0 and "create" not in verbs(calls)


def test_a_dry_run_prints_commands_that_gcloud_knows_and_runs_none(cloud, tmp_path):
    calls, ran = cloud(TRAIN, "--dry-run", "--note", "two words", SETUP="mount 'my share' /mnt")
    assert ran.returncode == 0 and calls == [], ran.stderr
    lines = ran.stdout.replace("\\\n", "").splitlines()
    assert [line.split()[4] for line in lines if line.startswith("gcloud")] == ["create", "scp", "ssh", "ssh"]
    for line in lines:
        _, again = cloud("-c", line)
        assert "unrecognized" not in again.stderr and "Must be" not in again.stderr, again.stderr


def test_the_stand_in_refuses_what_gcloud_does_not_know(cloud, tmp_path):
    calls, ran = cloud(CREATE, CREATE_FLAGS="--network=mine --colour=red")
    assert ran.returncode != 0 and "--colour=red" in ran.stderr and len(calls) == 3
    assert (tmp_path / "state").read_text() == "NONE"


@pytest.mark.parametrize("wrong", [{"ZONE": ""}, {"BUCKET": ""}, {"CONFIG": "configs/none.py"}])
def test_what_is_missing_is_named_before_anything_runs(cloud, wrong):
    calls, ran = cloud(TRAIN, **wrong)
    (name,) = wrong
    assert ran.returncode != 0 and calls == [] and (name in ran.stderr or wrong[name] in ran.stderr)


def test_create_waits_for_what_is_on_its_way_and_delete_leaves_nothing(cloud, tmp_path):
    calls, ran = cloud(CREATE, ACCELERATOR_TYPE="v6e-16", SPOT=0, QUEUED=0)
    (made,) = [call for call in calls if call[3] == "create"]
    assert ran.returncode == 0 and "--version=v2-alpha-tpuv6e" in made and "--spot" not in made
    calls, ran = cloud(CREATE)
    assert ran.returncode == 0 and verbs(calls) == []
    _, ran = cloud(DELETE)
    assert ran.returncode == 0 and (tmp_path / "state").read_text() == "NONE"
