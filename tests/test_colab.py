"""The notebooks: clean in git, nothing but calls of the package, and each runs to its end without a screen."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty

import compiled
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from toys import toy_voice
from traitlets import Type

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
ALLOWED = {*sys.stdlib_module_names, "vadusa_jax", "configs", "jax", "numpy", "matplotlib", "IPython", "ipywidgets"}
SMALL = {  # what is set in the cell of settings
    "demo": {"TEXT": "Good morning.", "NODES": 4, "MODES": ["ar", "exact", "tolerance:3"], "TOLERANCES": [1, 3]},
    "ablation": {"MODES": "exact,tolerance:3", "NODES": "4", "HEADS": "1,2", "LIMIT": 2},
    "train_tiny": {"SENTENCES": 12, "STEPS": 4, "EVERY": 2, "WIDTH": 16, "LAYERS": 1, "NODES": 4, "TEXT": "Yes."},
}


class Channel(AsyncZMQSocketChannel):
    """Looks every second: now and then ZeroMQ does not tell of a reply, and the time limit would be waited out."""

    async def get_msg(self, timeout=None):
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            try:
                return await super().get_msg(timeout=max(0.0, min(1.0, end - time.monotonic())))
            except Empty:
                if time.monotonic() >= end:
                    raise


class Client(AsyncKernelClient):
    shell_channel_class = Type(Channel)
    iopub_channel_class = Type(Channel)


class Manager(AsyncKernelManager):
    client_factory = Type(Client)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_every_notebook_is_run_here():
    assert {path.stem for path in NOTEBOOKS} == set(SMALL)


def test_notebooks_are_kept_as_they_were_written(notebook):
    nbformat.validate(notebook)
    for cell in code(notebook):
        assert not cell.outputs and cell.execution_count is None
    assert set(notebook.metadata) <= {"kernelspec", "language_info", "colab"}


def test_the_first_cell_says_what_it_shows_how_long_it_takes_and_where_it_runs(notebook):
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert "Takes" in first.source and all(name in first.source for name in ("CPU", "GPU", "TPU"))


def test_cells_are_short_and_only_call_the_package(notebook):
    for cell in code(notebook):
        assert len(cell.source.splitlines()) <= 25
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= ALLOWED


def test_no_output_is_tracked():
    tracked = subprocess.run(["git", "ls-files", "colab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {Path(path).suffix for path in tracked.split()} <= {".ipynb"}


@pytest.fixture
def run(cache, tmp_path, monkeypatch):
    """Runs a notebook with other settings in an empty folder; returns it with its outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, value in compiled.environment(cache).items():
        monkeypatch.setenv(name, value)

    def execute(name, **settings):
        notebook = nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)
        (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        assert set(settings) <= set(re.findall(r"\w+", cell.source))  # no setting that the notebook does not have
        cell.source += "".join(f"\n{key} = {value!r}" for key, value in settings.items())
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=300, kernel_manager_class=Manager, resources=resources).execute()
        assert "Traceback" not in json.dumps(notebook)  # widgets show errors and go on
        return notebook

    return execute


def shown(notebook, kind):
    """How many outputs of a kind the cells left, those inside of widgets included."""
    return json.dumps(notebook).count(f'"{kind}":')


@pytest.mark.slow
def test_demo(run, tmp_path):
    done = run("demo", **SMALL["demo"], MODEL=str(toy_voice(tmp_path / "toy")), OUT=str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"ar", "spectrograms.png", "step.png"}
    assert shown(done, "text/html") >= 5  # a player for each mode and tolerance
    assert shown(done, "image/png") >= 2


@pytest.mark.slow
def test_ablation_draws_a_fresh_run_and_then_its_table_alone(run, tmp_path):
    settings = SMALL["ablation"] | {"MODELS": f"toy={toy_voice(tmp_path / 'toy')}"}
    run("ablation", **settings, OUT=str(tmp_path / "out"))
    done = run("ablation", CSV=str(tmp_path / "out" / "ablation.csv"), OUT=str(tmp_path / "again"))
    assert set(os.listdir(tmp_path / "again")) == {"heads.png", "tolerance.png", "tradeoff.png"}
    assert shown(done, "image/png") == 3 and "ground_truth" in json.dumps(done)


@pytest.mark.slow
def test_train_tiny(run, tmp_path):
    done = run("train_tiny", **SMALL["train_tiny"], OUT=str(tmp_path / "out"))
    lines = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "dev/head3/top1" in line] == [2, 4]
    assert {"curves.png", "trees.png"} <= set(os.listdir(tmp_path / "out"))
    assert shown(done, "text/html") >= 3 and shown(done, "image/png") >= 2
