"""The shape of the house: arrows between rooms point downward, few things lie at the top level, no drawers."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vadusa_jax"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FLOORS = {  # a file is in the room with the longest matching name; a module that is in no room is an entry point
    **{"config": 0, "text": 0, "weights": 0, "hub": 0, "decode.tree": 0},
    **{"speech": 1, "model": 1},
    **{"data": 2, "decode": 2},
    **{"training": 3, "evaluation": 3, "voice": 3},
}
ENTRY_POINT = 4
TOP_LEVEL = {
    *("setup.py", "vadusa_jax", "configs", "launch", "tests", "colab", "README.md"),
    *("LICENSE", ".gitignore", ".ci", "pyproject.toml"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def room(module: str) -> str:
    inside = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return max(inside, key=len, default=module)


def floor(module: str) -> int:
    return FLOORS.get(room(module), ENTRY_POINT)


def imports(source: Path) -> list[str]:
    """Absolute names of all that a file imports, at the top or inside a function."""
    names = []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("source", SOURCES, ids=module_name)
def test_imports_point_only_to_a_lower_floor(source):
    importer = module_name(source)
    for name in imports(source):
        if name.startswith("vadusa_jax."):
            imported = name.removeprefix("vadusa_jax.")
            assert room(imported) == room(importer) or floor(imported) < floor(importer), (
                f"{importer} (floor {floor(importer)}) imports {imported} (floor {floor(imported)})"
            )


@pytest.mark.parametrize("source", SOURCES, ids=module_name)
def test_no_pickles(source):
    assert not {"pickle", "dill", "cloudpickle", "joblib", "shelve"} & {name.split(".")[0] for name in imports(source)}
    assert "allow_pickle=True" not in source.read_text(encoding="utf-8")


@pytest.mark.parametrize("source", SOURCES, ids=module_name)
def test_no_drawers_and_no_long_files(source):
    assert source.stem not in {"util", "utils", "helper", "helpers", "common", "misc"}
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 300


def test_top_level_holds_only_what_was_agreed():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {path.split("/")[0] for path in tracked.splitlines()} <= TOP_LEVEL
