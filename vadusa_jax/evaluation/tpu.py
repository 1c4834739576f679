"""Decode steps compiled for a TPU that is not there, through libtpu, and what they would cost on it.

Times are roofline times: bytes over the chip's memory bandwidth or operations over its peak, whichever is longer.
"""

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from vadusa_jax.config import DecodeConfig, HeadsConfig, ModelConfig
from vadusa_jax.decode import loop
from vadusa_jax.decode.accept import EXACT
from vadusa_jax.decode.draft import head_drafter
from vadusa_jax.decode.prompts import make_prompts, make_settings
from vadusa_jax.decode.tree import Tree
from vadusa_jax.evaluation.report import Columns
from vadusa_jax.evaluation.roofline import cache_bytes, weight_bytes
from vadusa_jax.model.chips import CHIPS
from vadusa_jax.model.heads import SpeechLM

PROMPT = 64  # positions of the prompt that the state comes from; its length does not matter


class NoTopology(RuntimeError):
    """The compiler for TPUs is missing, or does not know the topology."""


def find_topology(name: str) -> topologies.TopologyDescription:
    """The devices of a topology such as `v5e:2x2`; raises NoTopology with the reason."""
    kind = name.split(":")[0]
    if kind not in CHIPS:
        raise NoTopology(f"unknown chip {kind!r} in {name!r}; known are {', '.join(CHIPS)}, as in v5e:2x2")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise libtpu asks a metadata server that is not there
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # libtpu's own error types differ between releases
        raise NoTopology(f"no topology {name!r}: {error}; libtpu comes with the extra [aot]") from error


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step to be compiled: its model, tree and batch; parameters and cache are of `dtype`."""

    model: ModelConfig
    heads: HeadsConfig
    tree: Tree
    batch: int
    slots: int
    dtype: jnp.dtype

    @property
    def lm(self) -> SpeechLM:
        """The model, described and not made."""
        graph, params = nnx.split(
            nnx.eval_shape(lambda: SpeechLM(self.model, self.heads, self.dtype, rngs=nnx.Rngs(0)))
        )
        return nnx.merge(graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self.dtype), params))


def compile_step(topology: topologies.TopologyDescription, step: Step) -> tuple[jax.stages.Compiled, float]:
    """The step compiled for one chip of the topology, and the seconds that it took.

    The state is given away, as the loop does.
    """
    place = functools.partial(_on, jax.sharding.SingleDeviceSharding(topology.devices[0]))
    lm, tree, batch, slots = step.lm, step.tree, step.batch, step.slots
    settings, drafter = make_settings(tree, EXACT, DecodeConfig()), head_drafter(lm)
    tokens = [[step.model.eos + 1] * PROMPT] * batch
    prompts = jax.eval_shape(lambda: make_prompts(tokens, [slots] * batch, range(batch), 0, DecodeConfig()))
    first = functools.partial(loop.prefill.__wrapped__, settings=settings, slots=slots, drafter=drafter)
    state = jax.tree.map(place, jax.eval_shape(first, lm, prompts))
    ready = jax.eval_shape(lambda lm: drafter.prepare(lm, tree) if tree.depth else None, lm)

    def run(lm: SpeechLM, prompts: loop.Prompts, ready, state: loop.State) -> loop.State:
        return loop.step(lm, prompts, settings, drafter, loop.rule_table(lm, settings), ready, state)

    began = time.perf_counter()
    lowered = jax.jit(run, donate_argnums=3).lower(*(jax.tree.map(place, x) for x in (lm, prompts, ready)), state)
    return lowered.compile(), time.perf_counter() - began


def _on(sharding: jax.sharding.Sharding, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def step_row(topology_name: str, step: Step) -> dict:
    """The figures of one compiled step beside what it cannot do without."""
    compiled, seconds = compile_step(find_topology(topology_name), step)
    chip, cost, memory = CHIPS[topology_name.split(":")[0]], compiled.cost_analysis(), compiled.memory_analysis()
    cached = step.batch * cache_bytes(step.model, step.slots, step.dtype)
    minimum = weight_bytes(step.lm, step.tree.depth) + cached
    hbm, flops = float(sum(memory_traffic(compiled.as_text()))), float(cost["flops"])
    return {
        "topology": topology_name,
        "nodes": len(step.tree),
        "batch": step.batch,
        "slots": step.slots,
        "dtype": jnp.dtype(step.dtype).name,
        "minimum_bytes": minimum,
        "hbm_bytes": hbm,
        "over_minimum": hbm / minimum,
        "xla_bytes": float(cost["bytes accessed"]),
        "xla_over_minimum": float(cost["bytes accessed"]) / minimum,
        "flops": flops,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "roofline_us": 1e6 * max(hbm / chip.bandwidth, flops / chip.peak),
        "minimum_us": 1e6 * minimum / chip.bandwidth,
        "compile_s": seconds,
    }


_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)")
_OPERAND = re.compile(r"%([\w.\-]+)")  # XLA writes /*index=5*/ before every fifth
_FREE = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant", "custom-call", "after-all", "while"}


def memory_traffic(hlo: str) -> Iterator[float]:
    """Bytes that each instruction of a compiled TPU program moves between the chip's main memory and anything else.

    XLA's own `bytes accessed` counts a weight when it is fetched into the fast on-chip memory, again when pieces of it
    are joined there and again when it is used. Here an operand or result counts if its layout lies in main memory: a
    fetch once, an update in place by what is written. Loop bodies count once.
    """
    for computation in re.split(r"\n(?=\S)", hlo):
        if computation.startswith(("%fused", "%region", "HloModule")) and "body" not in computation.split("(")[0]:
            continue
        arrays: dict[str, list[tuple[float, bool]]] = {}
        for line in computation.splitlines():
            if not (found := _LINE.match(line)):
                continue
            name, kind, op, arguments = found.groups()
            arrays[name] = [
                (_WIDTH.get(t, 4) * math.prod(int(d) for d in dims.split(",") if d), "S(" not in (layout or ""))
                for t, dims, layout in _ARRAY.findall(kind)
            ]
            given = [arrays.get(operand, []) for operand in _OPERAND.findall(arguments)]
            if op in _FREE or op.endswith("-done"):
                continue
            if op.endswith("-start"):  # operand, result, context: moved if one of the two is in main memory
                (whole, source), (moved, target) = arrays[name][:2]
                yield min(whole, moved) if source or target else 0.0
            elif op == "dynamic-update-slice":
                (size, main), (_, written) = given[1][0], arrays[name][0]
                yield float(size * (main + written))
            else:
                yield sum(size for each in (*given, arrays[name]) for size, main in each if main)


COLUMNS: Columns = {
    **{key: (key, str) for key in ("topology", "nodes", "batch", "slots", "dtype")},
    "minimum_bytes": ("minimum MB", lambda x: f"{x / 1e6:.0f}"),
    "hbm_bytes": ("main memory MB", lambda x: f"{x / 1e6:.0f}"),
    "over_minimum": ("over minimum", "{:.2f}".format),
    "xla_bytes": ("XLA bytes accessed MB", lambda x: f"{x / 1e6:.0f}"),
    "xla_over_minimum": ("over minimum", "{:.2f}".format),
    "flops": ("GFLOP", lambda x: f"{x / 1e9:.2f}"),
    "temporary_bytes": ("temporary MB", lambda x: f"{x / 1e6:.1f}"),
    "aliased_bytes": ("in place MB", lambda x: f"{x / 1e6:.1f}"),
    "roofline_us": ("roofline us", "{:.0f}".format),
    "minimum_us": ("minimum us", "{:.0f}".format),
    "tokens_per_step": ("tokens per step", "{:.2f}".format),
    "projected_speedup": ("projected speed-up", "{:.2f}".format),
}
