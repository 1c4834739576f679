"""Parameters of any module as safetensors: float16 on disk unless told otherwise, float32 in memory."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file


class WeightsError(ValueError):
    """A weights file that does not belong to the model it is loaded into."""


def save_weights(module: nnx.Module, path: Path, dtype: type[np.floating] = np.float16) -> None:
    """Writes all parameters as `dtype`, whole or not at all."""
    cast = {name: np.asarray(x, dtype) for name, x in _named(module).items()}
    if bad := [name for name, x in cast.items() if not np.isfinite(x).all()]:
        raise WeightsError(f"parameters {bad} do not fit into {dtype.__name__}")
    aside = path.with_suffix(".partial")
    save_file(cast, aside)
    os.replace(aside, path)


def load_weights(module: nnx.Module, path: Path) -> None:
    """As `set_weights`, from a file."""
    set_weights(module, load_file(path), path)


def set_weights(module: nnx.Module, stored: Mapping[str, np.ndarray], path: Path) -> None:
    """Fills the module, which may be of shapes alone, with all its parameters by name.

    Raises WeightsError naming `path`, the parameter and both shapes when they do not match.
    """
    wanted = _named(module)
    for name in sorted(stored.keys() ^ wanted.keys()):
        raise WeightsError(f"{path}: parameter {name} is {'missing' if name in wanted else 'unknown to the config'}")
    for name, x in wanted.items():
        if stored[name].shape != x.shape:
            raise WeightsError(f"{path}: parameter {name} has shape {stored[name].shape}, the config asks {x.shape}")
    params = nnx.state(module, nnx.Param)
    leaves = [jnp.asarray(stored[name], x.dtype) for name, x in wanted.items()]
    nnx.update(module, jax.tree.unflatten(jax.tree.structure(params), leaves))


def _named(module: nnx.Module) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module, nnx.Param))
    return {
        ".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path if _named_key(k)): x for path, x in leaves
    }


def _named_key(key: object) -> bool:
    return getattr(key, "name", None) != "value"
