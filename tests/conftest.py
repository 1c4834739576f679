"""Runs before any test module: a fixed number of devices, tests that hypothesis repeats alike, and a key."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from hypothesis import settings

settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
