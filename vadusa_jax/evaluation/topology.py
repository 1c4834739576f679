"""TPU pods as the compiler sees them, by names such as `v5e:4x4`: no TPU is needed."""

import math
import os

from jax.experimental import topologies

from vadusa_jax.model.chips import CHIPS, Chip


class NoTopology(RuntimeError):
    """The compiler for TPUs is missing, or does not know the topology."""


def find_chip(topology: str) -> Chip:
    """The chip of a topology such as `v5e:2x2`; raises NoTopology for an unknown one."""
    kind = topology.split(":")[0]
    if kind not in CHIPS:
        raise NoTopology(f"unknown chip {kind!r} in {topology!r}; known are {', '.join(CHIPS)}, as in v5e:2x2")
    return CHIPS[kind]


def find_topology(name: str) -> topologies.TopologyDescription:
    """The devices of a topology such as `v5e:2x2`; raises NoTopology with the reason."""
    find_chip(name)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise libtpu asks a metadata server that is not there
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody here touches a TPU: no need to take turns
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # libtpu's own error types differ between releases
        raise NoTopology(f"no topology {name!r}: {error}; libtpu comes with the extra [aot]") from error


def chip_count(topology: str) -> int:
    """Chips of `v5e:4x4`: 16."""
    return math.prod(_axes(topology))


def interconnect(topology: str) -> float:
    """Bytes a second that a chip can send to its neighbours: two links for an axis that is a ring, else one."""
    chip = find_chip(topology)
    return chip.link * sum(2 if n % chip.ring == 0 else 1 for n in _axes(topology) if n > 1)


def _axes(topology: str) -> list[int]:
    return [int(n) for n in topology.split(":")[1].split("x")]
