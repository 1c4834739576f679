#!/usr/bin/env python3
"""A Google Cloud in a folder, for the tests of the launch scripts: this file is `gcloud`, `gcsfuse` and the workers'
Python, by the name it is called with.

`gcloud` knows the flags of the real one (cloud.google.com/sdk/gcloud/reference/compute/tpus) and refuses others. A
TPU has two workers, each a home folder in which `ssh` really runs its commands. The folder $CLOUD holds `state` (of
the TPU), `calls`, `bucket`, `workers` and `plan`: what becomes of each run of training, a line a run: `good`, `bad`,
or `preempted`.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CLOUD = Path(os.environ["CLOUD"])
WORKERS = {"0": CLOUD / "workers" / "0", "1": CLOUD / "workers" / "1"}
WIDE = {"--project": 1, "--quiet": 0, "--format": 1, "--zone": 1}
MACHINE = {
    **dict.fromkeys(["--accelerator-type", "--topology", "--type", "--data-disk", "--boot-disk", "--description"], 1),
    **dict.fromkeys(["--labels", "--metadata", "--metadata-from-file", "--network", "--range", "--scopes"], 1),
    **dict.fromkeys(["--service-account", "--subnetwork", "--tags"], 1),
    **dict.fromkeys(["--async", "--internal-ips", "--reserved", "--shielded-secure-boot", "--spot"], 0),
}
SSH = {
    **dict.fromkeys(["--dry-run", "--force-key-file-overwrite", "--internal-ip", "--plain"], 0),
    **dict.fromkeys(["--ssh-key-file", "--strict-host-key-checking", "--worker", "--ssh-key-expiration"], 1),
    "--ssh-key-expire-after": 1,
}
FLAGS = {  # 1: takes a value
    "tpu-vm create": {**MACHINE, "--version": 1, "--preemptible": 0, "--queue-count": 1},
    "tpu-vm describe": {},
    "tpu-vm delete": {"--async": 0},
    "tpu-vm ssh": {**SSH, "--command": 1, "--output-directory": 1, "--ssh-flag": 1},
    "tpu-vm scp": {**SSH, "--recurse": 0, "--compress": 0, "--scp-flag": 1},
    "queued-resources create": {
        **MACHINE,
        **dict.fromkeys(["--runtime-version", "--node-id", "--node-count", "--node-prefix"], 1),
        **dict.fromkeys(["--valid-after-duration", "--valid-after-time", "--valid-until-duration"], 1),
        **{"--valid-until-time": 1, "--guaranteed": 0},
    },
    "queued-resources describe": {},
    "queued-resources delete": {"--async": 0, "--force": 0},
}
NEEDED = {
    "tpu-vm create": {"--version"},
    "queued-resources create": {"--runtime-version", "--accelerator-type", "--node-id"},
}


def parse(arguments: list[str], known: dict[str, int]) -> tuple[list[str], dict[str, str]]:
    """Positional arguments and flags; an unknown flag ends the program as the real one does."""
    names, flags, rest = [], {}, iter(arguments)
    for argument in rest:
        flag, given, value = argument.partition("=")
        if not argument.startswith("--"):
            names.append(argument)
        elif flag not in known or (given and not known[flag]):
            sys.exit(f"ERROR: (gcloud) unrecognized arguments: {argument}")
        else:
            flags[flag] = value if given or not known[flag] else next(rest)
    return names, flags


def state(new: str | None = None) -> str:
    """Of the TPU; sets it first if `new` is given."""
    if new:
        (CLOUD / "state").write_text(new)
    return (CLOUD / "state").read_text()


def shut_down() -> None:
    """All processes of the workers end, and their disks are gone."""
    for pid in CLOUD.glob("workers/*/vadusa_jax/out/tpu/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)
    shutil.rmtree(CLOUD / "workers", ignore_errors=True)


def ssh(worker: str, command: str) -> int:
    """Runs the command in the worker's home; 255, as the real one, if the TPU goes away meanwhile."""
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=WORKERS[worker], env=os.environ | {"HOME": WORKERS[worker]}, start_new_session=True
    )
    while process.poll() is None and state() == "READY":
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        return 255
    return process.returncode


def gcloud(arguments: list[str]) -> int:
    """One command."""
    with (CLOUD / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    if arguments[:2] != ["compute", "tpus"] or " ".join(arguments[2:4]) not in FLAGS:
        sys.exit(f"ERROR: (gcloud) Invalid choice: {arguments}")
    verb = " ".join(arguments[2:4])
    names, flags = parse(arguments[4:], WIDE | FLAGS[verb])
    if missing := (NEEDED.get(verb, set()) | {"--zone", "--quiet"}) - set(flags):
        sys.exit(f"ERROR: (gcloud.{verb}) argument {missing}: Must be specified.")
    workers = WORKERS if flags.get("--worker") == "all" else [flags.get("--worker", "0")]
    if verb.endswith(" describe"):
        asked = state() if verb.startswith("tpu-vm") else {"READY": "ACTIVE", "PREEMPTED": "SUSPENDED"}.get(state())
        if state() == "NONE" or not asked:
            sys.exit("ERROR: (gcloud) NOT_FOUND: Resource was not found")
        print(asked)
    elif verb.endswith(" create"):
        if state() != "NONE":
            sys.exit("ERROR: (gcloud) ALREADY_EXISTS")
        for home in WORKERS.values():
            home.mkdir(parents=True)
        state("READY")
    elif verb.endswith(" delete"):
        shut_down()
        state("NONE")
    elif state() != "READY":
        return 255
    elif verb == "tpu-vm scp":
        source, target = names
        for worker in workers:
            shutil.copy(source, WORKERS[worker] / target.split(":")[1])
    else:
        for status in [ssh(worker, flags["--command"]) for worker in workers]:
            if status:
                return status
    return 0


def python(arguments: list[str]) -> int:
    """The workers' Python: makes virtual environments of itself and trains as planned."""
    if arguments[:2] == ["-m", "venv"]:
        (Path(arguments[-1]) / "bin").mkdir(parents=True)
        shutil.copy(__file__, Path(arguments[-1]) / "bin" / "python")
    elif arguments[:2] == ["-m", "vadusa_jax.train"]:
        worker = Path(os.environ["HOME"]).name
        assert Path("out/tokens/records").exists() and (Path("out/bucket") / "tokens").exists()
        with (CLOUD / f"trained.{worker}").open("a+") as trained:
            trained.seek(0)
            run = len(trained.readlines())
            trained.write(json.dumps(arguments[2:]) + "\n")
        plan = (CLOUD / "plan").read_text().split()[run]
        print(f"worker {worker}, run {run}: {plan}", flush=True)
        if plan == "preempted":
            time.sleep(0.3)
            state("PREEMPTED")
            time.sleep(60)
        return plan != "good"
    return 0


def gcsfuse(arguments: list[str]) -> int:
    """Puts the bucket in the place of the mount point."""
    place = Path(arguments[-1])
    if not place.is_symlink():
        place.rmdir()
        place.symlink_to(CLOUD / "bucket")
    return arguments[-2] != "mine"


if __name__ == "__main__":
    sys.exit({"gcloud": gcloud, "gcsfuse": gcsfuse}.get(Path(sys.argv[0]).name, python)(sys.argv[1:]))
