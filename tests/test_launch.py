"""The launch scripts: they say how to use them, and the training pipeline runs each stage when it must, and only then.

The pipeline runs with a stand-in for Python that writes down its arguments and makes the folder that it is asked for.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
STAGES = ["corpus", "codec", "tokens", "train", "trees", "voice", "evaluate"]

STAND_IN = """#!/usr/bin/env bash
set -eu
[[ ${1:-} == -c || ${2:-} == pip ]] && exit
echo "$*" >>"$LOG"
[[ ${FAIL:-none} == "${2#vadusa_jax.}" ]] && exit 3
while (($#)); do
    case $1 in --out | --workdir) mkdir -p "$2"; echo done >>"$2/file" ;; esac
    shift
done
exit 0
"""


def bash(*arguments, **environment):
    return subprocess.run(
        ["bash", *map(str, arguments)],
        env=os.environ | {key: str(value) for key, value in environment.items()},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_clean(script):
    assert bash("-n", script).returncode == 0
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "-x", "-P", ROOT / "launch", script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.read_text().startswith("#!")], ids=lambda path: path.name)
def test_usage_needs_no_environment(script, tmp_path):
    ran = bash(script, "--help", VADUSA_VENV=tmp_path / "none")
    assert ran.returncode == 0 and f"bash launch/{script.name}" in ran.stdout
    assert not (tmp_path / "none").exists()


def test_without_a_working_python_the_error_names_what_was_tried(tmp_path):
    ran = bash(ROOT / "launch" / "demo.sh", VADUSA_VENV=tmp_path / "none", PYTHON="/nonexistent/python")
    assert ran.returncode != 0
    assert "3.11" in ran.stderr and "/nonexistent/python" in ran.stderr


@pytest.fixture
def pipeline(tmp_path):
    """Runs demo_train.sh; returns the modules that ran, and the finished process."""
    python, log = tmp_path / "venv" / "bin" / "python", tmp_path / "log"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments, **environment):
        log.write_text("")
        ran = bash(
            ROOT / "launch" / "demo_train.sh",
            *("--out", tmp_path / "out", *arguments),
            VADUSA_VENV=tmp_path / "venv",
            LOG=log,
            **environment,
        )
        return [line.split()[1].removeprefix("vadusa_jax.") for line in log.read_text().splitlines()], ran

    return run


def test_dry_run_prints_every_stage_and_does_nothing(pipeline, tmp_path):
    modules, ran = pipeline("--dry-run", "--minutes", 30)
    assert ran.returncode == 0 and modules == []
    assert [line.split(":")[0] for line in ran.stdout.splitlines()] == STAGES
    assert not (tmp_path / "out").exists()


def figures(*arguments):
    """What readme_figures.sh would run: a command by its name."""
    ran = bash(ROOT / "launch" / "readme_figures.sh", "--dry-run", *arguments)
    assert ran.returncode == 0, ran.stderr
    return dict(line.split(": ", 1) for line in ran.stdout.splitlines())


def test_the_readme_names_the_command_of_every_figure():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "").split())
    assert [name for name, command in figures().items() if command not in readme] == []
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme):
        made = picture in " ".join(figures().values()) or Path(picture).stem in figures()
        assert made and (ROOT / picture).stat().st_size < 150_000


def test_tables_of_the_readme_are_those_of_the_files():
    ran = subprocess.run(
        [sys.executable, ROOT / "launch" / "readme_tables.py", "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = (ROOT / "vadusa_jax" / "assets" / "figures").glob("*.csv")
    assert sorted(re.findall(r"<!-- (\w+)\.csv -->", readme)) == sorted(file.stem for file in files)


def test_single_figures_can_be_asked_for():
    assert list(figures("how", "decode")) == ["how", "decode"]
    ran = bash(ROOT / "launch" / "readme_figures.sh", "--dry-run", "hwo")
    assert ran.returncode == 2 and "hwo" in ran.stderr and "heldout" in ran.stderr


def check_flags(commands):
    """Every flag of every printed command is one that its entry point defines, and none that it needs is missing."""
    for line in commands:
        module = re.search(r"-m vadusa_jax\.(\w+)", line)[1]
        source = (ROOT / "vadusa_jax" / f"{module}.py").read_text(encoding="utf-8")
        defined = set(re.findall(r"""DEFINE_\w+\(\s*"(\w+)\"""", source))
        required = set(re.findall(r"""DEFINE_\w+\(\s*"(\w+)\"[^)]*required=True""", source))
        given = set(re.findall(r" --(\w+)", line))
        assert required <= given <= defined, line


def test_every_flag_is_one_that_its_entry_point_defines(pipeline):
    _, ran = pipeline("--dry-run")
    check_flags([*ran.stdout.splitlines(), *figures().values()])


def test_a_voice_to_start_from_reaches_its_codec_and_its_model(pipeline):
    _, ran = pipeline("--dry-run", "--init", "out/voice", "--hours_each", 0.5)
    check_flags(ran.stdout.splitlines())
    stages = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert "--hours_each 0.5" in stages["corpus"]
    assert "--init out/voice/codec --keep joe" in stages["codec"] and "--init out/voice" in stages["train"]


@pytest.mark.parametrize(
    ("script", "environment", "modules"),
    [
        ("ablate_tolerance", {"DRAFT": "out/draft"}, ["ablate", "ablate"]),
        ("ablate_heads", {"MODELS": "a=out/a,b=out/b"}, ["ablate"]),
        (
            "ablate_heads",
            {"TRAIN": 1, "HEADS": "2 4", "DATA": "out/tokens", "CODEC": "out/codec", "TRAIN_FLAGS": "--minutes 9"},
            ["train", "fit_tree", "export"] * 2 + ["ablate"],
        ),
        (
            "ablate_training",
            {"RUNS": "0 1", "WEIGHTS": "0.2", "DATA": "out/tokens", "CODEC": "out/codec"},
            (["train", "export"] + ["train", "fit_tree", "export"] * 2) * 2 + ["ablate"],
        ),
        (
            "ablate_tokens",
            {"CORPUS": "out/corpus", "CODECS": "fsq=out/codec kmeans=out/sound", "UNITS": "512"},
            ["prepare", "train", "fit_tree", "export"] * 3 + ["ablate"],
        ),
    ],
)
def test_ablations_print_their_commands(script, environment, modules, tmp_path):
    path, out = ROOT / "launch" / f"{script}.sh", tmp_path / "out"
    ran = bash(path, "--dry-run", "--cpu_threads=1", OUT=out, VADUSA_VENV=tmp_path / "none", **environment)
    assert ran.returncode == 0 and not out.exists(), ran.stderr
    assert re.findall(r"-m vadusa_jax\.(\w+)", ran.stdout) == modules
    check_flags(ran.stdout.splitlines())


@pytest.mark.parametrize("environment", [{"HEADS": "many"}, {"NODES": "0"}, {"TRAIN": "1", "DATA": ""}])
def test_an_ablation_names_a_bad_setting(environment, tmp_path):
    ran = bash(ROOT / "launch" / "ablate_heads.sh", "--dry-run", VADUSA_VENV=tmp_path / "none", **environment)
    assert ran.returncode == 2 and next(iter(environment)) in ran.stderr


def test_finished_stages_are_skipped(pipeline):
    modules, ran = pipeline()
    assert ran.returncode == 0 and len(modules) == len(STAGES), ran.stderr
    modules, ran = pipeline()
    assert modules == [] and ran.stdout.count("up to date") == len(STAGES)


def test_a_lost_output_is_made_again_with_all_that_follows_from_it(pipeline, tmp_path):
    pipeline()
    shutil.rmtree(tmp_path / "out" / "tokens")
    modules, _ = pipeline()
    assert modules == ["prepare", "train", "fit_tree", "export", "evaluate"]


def test_a_changed_setting_runs_what_depends_on_it(pipeline):
    pipeline("--minutes", 30)
    modules, _ = pipeline("--minutes", 60)
    assert "train" in modules and modules.count("prepare") == 1  # the tokens; the corpus stays


def test_a_failed_stage_stops_the_run_and_is_tried_again(pipeline, tmp_path):
    modules, ran = pipeline(FAIL="train")
    assert ran.returncode == 3 and modules[-1] == "train"
    assert not (tmp_path / "out" / "voice").exists()
    modules, ran = pipeline()
    assert ran.returncode == 0 and modules[0] == "train"


def test_interrupted_training_goes_on_but_never_from_other_inputs(pipeline, tmp_path):
    pipeline(FAIL="train")
    checkpoint = tmp_path / "out" / "train" / "checkpoint"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    pipeline(FAIL="train")
    assert checkpoint.exists()
    shutil.rmtree(tmp_path / "out" / "corpus")
    pipeline(FAIL="train")
    assert not checkpoint.exists()


@pytest.mark.parametrize("arguments", [("--minutes", "soon"), ("--minutes",), ("--hour", "1")])
def test_a_bad_argument_is_named_before_anything_runs(pipeline, arguments):
    modules, ran = pipeline(*arguments)
    assert ran.returncode == 2 and arguments[0] in ran.stderr
    assert modules == []
