"""Training checkpoints: parameters, optimiser state, step and data position in one Orbax step, complete or absent.

A run's folder also holds `config.json` and `vocabulary.json`: what the parameters mean.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from orbax.checkpoint import v1 as ocp

from vadusa_jax.config import Config, load_config
from vadusa_jax.model.folder import WEIGHTS, load_lm
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.sharding import array_name


class CheckpointError(ValueError):
    """A checkpoint that does not fit what it is loaded into."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and those of every `keep_every` steps, unless it is 0.

    With `clean` what a killed run left half written is removed: only for the run that goes on.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_every: int = 0, clean: bool = False):
        policies = ocp.training.preservation_policies
        kept = [policies.LatestN(keep), *([policies.EveryNSteps(keep_every)] if keep_every else [])]
        self._orbax = ocp.training.Checkpointer(
            (Path(folder) / "checkpoints").absolute(),
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=clean,
        )

    @property
    def latest_step(self) -> int | None:
        """The last complete step, or None."""
        return None if self._orbax.latest is None else self._orbax.latest.step

    def save(self, step: int, params: Any, optimizer_state: Any, data_state: dict[str, Any]) -> None:
        """Starts saving; a failure of the previous save is raised here, or by `close`."""
        arrays = {"params": _arrays(params), "optimizer": _arrays(optimizer_state)}
        # Without `force` a save is left out silently while another one is under way.
        self._orbax.save_checkpointables_async(step, arrays, force=True, custom_metadata={"data": data_state})

    def load(self, params: Any, optimizer_state: Any | None = None) -> tuple[int, Any, Any, dict[str, Any]]:
        """The newest step as `(step, params, optimizer_state, data_state)`, placed like the given arrays.

        Raises:
            CheckpointError: a parameter is missing, left over or of another shape; it is named with both shapes.
        """
        step = self.latest_step
        if step is None:
            raise CheckpointError(f"no complete checkpoint in {self._orbax.directory}")
        saved = self._orbax.checkpointables_metadata(step)
        there, here = _shapes(saved.metadata["params"]), _shapes(_arrays(params))
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise CheckpointError(
                    f"parameter {name} has shape {here.get(name, 'none')} here and {there.get(name, 'none')} in "
                    f"{self._orbax.directory}: the checkpoint was made with another config"
                )
        wanted = {"params": jax.tree.map(_abstract, _arrays(params))}
        if optimizer_state is not None:
            wanted["optimizer"] = jax.tree.map(_abstract, _arrays(optimizer_state))
        loaded = self._orbax.load_checkpointables(step, wanted)
        params = _like(params, loaded["params"])
        if optimizer_state is not None:
            optimizer_state = _like(optimizer_state, loaded["optimizer"])
        return step, params, optimizer_state, saved.custom_metadata["data"]

    def load_average(self, params: Any) -> Any:
        """`params` with those replaced that the newest step holds an average of (`train.ema`)."""
        there = self._orbax.checkpointables_metadata(self.latest_step).metadata["optimizer"]
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in there.items()}
        held = self._orbax.load_checkpointables(self.latest_step, {"optimizer": wanted})["optimizer"]
        averages = {name.split("average/")[1]: x for name, x in held.items() if "average/" in name}
        return _like(params, _arrays(params) | averages)

    def close(self) -> None:
        """Waits for the save under way; raises if it failed."""
        self._orbax.close()


def load_trained(folder: Path) -> tuple[Config, SpeechLM]:
    """The config and the newest model of a training run: the averaged parameters, if it keeps an average."""
    config = load_config(folder)
    lm = SpeechLM(config.model, config.heads, rngs=nnx.Rngs(0))
    checkpoints = Checkpoints(folder, config.train.keep)
    _, params, _, _ = checkpoints.load(nnx.state(lm, nnx.Param))
    if config.train.ema:
        params = checkpoints.load_average(params)
    checkpoints.close()
    nnx.update(lm, params)
    return config, lm


def load_model(folder: Path) -> tuple[Config, SpeechLM]:
    """The config and the model of a voice's folder, or the newest of a training run."""
    return load_lm(folder) if (folder / WEIGHTS).exists() else load_trained(folder)


def first_parameters(folder: Path, config: Config) -> nnx.State:
    """The parameters in `folder` to start a run of `config` from.

    The backbone is taken as it is. So are the draft heads, if there are as many of the same kind and depth; otherwise,
    or if there are none, new ones start as copies of the LM head (Medusa-1, arXiv 2401.10774).

    Raises:
        CheckpointError: the backbone does not fit the config; the fields that differ are named.
    """
    found, lm = load_model(folder)
    there, here = (dataclasses.asdict(c.model) for c in (found, config))
    if differing := [f"model.{name} is {there[name]}, not {here[name]}" for name in here if there[name] != here[name]]:
        raise CheckpointError(f"{folder} does not fit the config: {'; '.join(differing)}")
    if any(getattr(found.heads, name) != getattr(config.heads, name) for name in ("kind", "count", "layers")):
        trained, lm = lm, SpeechLM(config.model, config.heads, rngs=nnx.Rngs(config.train.seed))
        nnx.update(lm.backbone, nnx.state(trained.backbone, nnx.Param))
        lm.copy_lm_head()
    return nnx.state(lm, nnx.Param)


def _arrays(tree: Any) -> dict[str, jax.Array]:
    # Flat names rather than library containers: the files then do not depend on how a library nests its state.
    return {array_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _like(tree: Any, arrays: dict[str, jax.Array]) -> Any:
    names = list(_arrays(tree))
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in names])


def _shapes(arrays: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in arrays.items()}


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
