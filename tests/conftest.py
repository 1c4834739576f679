"""Runs before any test module: a fixed number of devices, tests that hypothesis repeats alike, and shared fixtures."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import compiled
import jax
import pytest
from hypothesis import settings

# Files that take a minute or more begin first, so that all workers of `--dist loadfile` end at about the same time.
LONG = (
    *("end_to_end", "draft", "multihost", "decode", "interruption", "aot", "bench", "training", "queue", "parallel"),
    "colab",
)

settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files that hold the most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """Where the processes of this session, workers of pytest and programs that tests start, keep what they compiled."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def compiled_once(cache) -> Iterator[None]:
    """Tests of the module compile through `cache`: for those that make the same step anew, run by run."""
    compiled.read_from(cache)
    yield
    compiled.read_from(None)
