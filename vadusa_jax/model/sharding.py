"""The device mesh and where each array lives on it."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vadusa_jax.config import MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices`, by default all of all processes."""
    devices = np.array(jax.devices() if devices is None else devices)
    data = len(devices) if config.data == -1 else config.data
    if data != len(devices):
        raise ValueError(f"mesh.data={data} does not match the {len(devices)} devices; use -1 to take all of them")
    return Mesh(devices.reshape(data), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    """Parameters and optimiser state: one copy on each device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Batches: rows split over the data axis."""
    return NamedSharding(mesh, PartitionSpec("data"))
