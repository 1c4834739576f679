"""Several processes as one run: who takes part, whose rows are whose, and what all must agree on.

The processes of a Cloud TPU pod find each other. Elsewhere the environment says who takes part, in every process:

    JAX_COORDINATOR_ADDRESS=host:port  where process 0 listens
    JAX_NUM_PROCESSES=2  JAX_PROCESS_ID=0
"""

import contextlib
import functools
import glob
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vadusa_jax.model.sharding import rows

COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_LETTERS = 2**16  # of the settings that are compared


class Disagreement(ValueError):
    """The processes of one run were started with different settings."""


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Makes this process a part of its run, before JAX looks for devices.

    An error inside ends the process at once: JAX would wait for the others, and they for this one.
    """
    given = {name: os.environ[name] for name in (COORDINATOR, PROCESSES, PROCESS) if os.environ.get(name)}
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from `stopping`
    if not given and not _on_tpu():
        yield
        return
    if given and len(given) < 3:
        missing = sorted({COORDINATOR, PROCESSES, PROCESS} - set(given))
        raise ValueError(f"{' and '.join(given)} say that this is one process of several: set {' and '.join(missing)}")
    if given:
        jax.distributed.initialize(given[COORDINATOR], int(given[PROCESSES]), int(given[PROCESS]))
    else:
        jax.distributed.initialize()
    try:
        yield
    except Exception:
        if jax.process_count() == 1:
            raise
        print(f"process {jax.process_index()} of {jax.process_count()}:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _on_tpu() -> bool:
    # Asking JAX would start a backend; libtpu alone is also installed where programs are only compiled for TPUs.
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    wanted = os.environ.get("JAX_PLATFORMS", "tpu").split(",")
    return bool(chips) and "tpu" in wanted and importlib.util.find_spec("libtpu") is not None


def is_first() -> bool:
    """Whether this is the process that logs and writes."""
    return jax.process_index() == 0


def own_rows(mesh: Mesh, batch_rows: int) -> range:
    """The rows of a global batch that live on this process's devices."""
    try:
        where = rows(mesh).addressable_devices_indices_map((batch_rows, 1))
    except ValueError as error:
        raise ValueError(
            f"data.batch_rows is {batch_rows}: make it a multiple of the devices that share the rows of a batch "
            f"(mesh {dict(mesh.shape)})"
        ) from error
    numbers = sorted({b for index in where.values() for b in range(*index[0].indices(batch_rows))})
    own = range(numbers[0], numbers[-1] + 1)
    if len(own) != len(numbers):
        raise ValueError(f"the rows of process {jax.process_index()} do not lie together: {numbers}")
    return own


def require_agreement(settings: dict[str, Any]) -> None:
    """Raises Disagreement in every process, naming the settings that differ, unless all have the same."""
    if jax.process_count() == 1:
        return
    text = json.dumps(settings, sort_keys=True).encode()
    padded = np.frombuffer(text.ljust(_LETTERS), np.uint8)
    first, *others = (json.loads(bytes(x)) for x in multihost_utils.process_allgather(padded))
    differing = [
        f"{name} is {first.get(name)!r} in process 0 and {other.get(name)!r} in process {number}"
        for number, other in enumerate(others, start=1)
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
    if differing:
        raise Disagreement("the processes of this run disagree: " + "; ".join(differing))


def total(count: int) -> int:
    """The sum of a count over all processes; every process must ask."""
    return count if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.array(count)).sum())


def whole(tree: Any) -> Any:
    """All of every array as NumPy, whichever devices have parts of it; every process must ask."""
    return jax.device_get(tree) if jax.process_count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


def anywhere(flag: bool, mesh: Mesh) -> jax.Array | bool:
    """Whether the flag is up in any process: sent off like a training step, and as well read a step later."""
    if jax.process_count() == 1:
        return flag
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return _any(mesh)(jax.make_array_from_process_local_data(spread, np.full(len(mesh.local_devices), flag)))


@functools.cache
def _any(mesh: Mesh):
    return jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))
