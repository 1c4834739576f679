"""Decode steps compiled for a TPU that is not there, through libtpu, and what they would cost on it.

Times are roofline times: bytes over the chip's memory bandwidth or operations over its peak, whichever is longer.
"""

import dataclasses
import functools
import time

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
from vadusa_jax.evaluation import hlo
from vadusa_jax.evaluation.report import Columns
from vadusa_jax.evaluation.roofline import cache_bytes, weight_bytes
from vadusa_jax.evaluation.topology import find_chip, find_topology
from vadusa_jax.model.heads import SpeechLM

PROMPT = 64  # positions of the prompt that the state comes from; its length does not matter


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
    chip, cost, memory = find_chip(topology_name), compiled.cost_analysis(), compiled.memory_analysis()
    cached = step.batch * cache_bytes(step.model, step.slots, step.dtype)
    minimum = weight_bytes(step.lm, step.tree.depth) + cached
    hbm, flops = sum(hlo.memory_traffic(hlo.read(compiled.as_text()))), float(cost["flops"])
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
