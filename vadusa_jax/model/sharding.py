"""The device mesh, and where each array lives on it: one table for parameters, one for activations.

Three axes: `data` holds copies of the parameters, `fsdp` spreads each copy (a layer's matrices come together when it
runs), `tensor` splits the matrix products themselves. Batch rows are split over data and fsdp.

A dimension must divide by the devices it is spread over; anything else is an error, since an array that stays whole
without a word may not fit. The vocabularies (V is the codec's size plus EOS) hardly ever divide, so parameters are
stored split along the width instead; logits are computed split over V, where XLA fills up the last part.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vadusa_jax.config import Config, MeshConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# By the end of the parameter's path. A spec speaks of the last dimensions; stacked ones before them stay whole.
PARAMETERS = {
    "backbone/embedding": P(None, ("fsdp", "tensor")),
    "q/kernel": P("fsdp", "tensor"),
    "k/kernel": P("fsdp", "tensor"),
    "v/kernel": P("fsdp", "tensor"),
    "out/kernel": P("tensor", "fsdp"),
    "gate/kernel": P("fsdp", "tensor"),
    "up/kernel": P("fsdp", "tensor"),
    "down/kernel": P("tensor", "fsdp"),
    "norm/scale": P(None),
    "lm_head/kernel": P("fsdp", None),
    "heads/residual": P("fsdp", "tensor"),
    "heads/context": P("fsdp", "tensor"),
    "heads/bias": P(None),
    "heads/output": P("fsdp", None),
}
ACTIVATIONS = {
    "hidden_BTD": P(ROWS, None, None),
    "heads_BTNH": P(ROWS, None, "tensor", None),
    "inner_BTF": P(ROWS, None, "tensor"),
    "logits_BTV": P(ROWS, None, "tensor"),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices`, by default all of all processes."""
    devices, rest = jax.devices() if devices is None else devices, config.fsdp * config.tensor
    data = max(len(devices) // rest, 1) if config.data == -1 else config.data
    if data * rest != len(devices):
        raise ValueError(
            f"mesh.data={config.data}, fsdp={config.fsdp}, tensor={config.tensor} do not make up the {len(devices)} "
            "devices: their product must; data=-1 takes what the others leave"
        )
    return Mesh(np.array(devices).reshape(data, config.fsdp, config.tensor), AXES)


def check_fit(config: Config, mesh: Mesh) -> None:
    """Raises ValueError, with the way out, if rows or attention heads do not divide by the devices."""
    rows, parts, tensor = config.data.batch_rows, _devices(mesh, ROWS), mesh.shape["tensor"]
    if rows % (parts * config.train.accumulate):
        raise ValueError(
            f"data.batch_rows is {rows}, which does not divide by the {parts} devices that share the rows times "
            f"train.accumulate={config.train.accumulate}: make data.batch_rows a multiple of "
            f"{parts * config.train.accumulate}, or use fewer devices"
        )
    if config.model.attention_heads % tensor:
        raise ValueError(
            f"model.attention_heads is {config.model.attention_heads}, which does not divide by mesh.tensor={tensor}"
        )


def rows(mesh: Mesh) -> NamedSharding:
    """Batches: rows split over the data and fsdp axes."""
    return NamedSharding(mesh, P(ROWS))


def spec_of(name: str) -> P | None:
    """The row of PARAMETERS for a parameter, or for what an optimiser holds of it; None if there is none."""
    for end, spec in PARAMETERS.items():
        if name.endswith(end):
            return spec
    return None


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Where each array of a tree lives: parameters, and what mirrors them under the same name, by the table.

    Everything else (counts of steps) has a copy on each device.

    Raises:
        ValueError: a dimension does not divide by the devices it is spread over.
    """

    def place(path: tuple, x: Any) -> NamedSharding:
        name = array_name(path)
        spec = spec_of(name) or P()
        spec = P(*[None] * (x.ndim - len(spec)), *spec)
        for size, axes in zip(x.shape, spec, strict=True):
            if size % (parts := _devices(mesh, axes)):
                raise ValueError(f"{name} {x.shape}: {size} does not divide by the {parts} devices of {axes}")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(place, tree)


def array_name(path: tuple) -> str:
    """A path in a tree as `backbone/blocks/0/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def constrain(x: jax.Array, name: str) -> jax.Array:
    """Asks for the placement of ACTIVATIONS where a mesh is in use (`jax.sharding.use_abstract_mesh`), else nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, ACTIVATIONS[name])


def _devices(mesh: Mesh, axes: str | tuple[str, ...] | None) -> int:
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
