"""How fast a training step is here, beside what these devices could do."""

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from vadusa_jax.config import Config
from vadusa_jax.model.chips import peak_flops, token_flops
from vadusa_jax.training.loop import begin, to_mesh
from vadusa_jax.training.losses import Batch


class Speed(NamedTuple):
    """Of training steps one after the other, compilation left out; of all devices together."""

    step_s: list[float]
    peak: list[float]  # operations a second of a large matrix product, beside each step; empty where nobody knows
    tokens: int  # positions of a step
    model_flops: float  # operations of a step that MFU counts
    product_flops: float  # of all matrix products that a step runs: recomputation and optimiser included

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(self.step_s)

    def __str__(self) -> str:
        def share(flops: float) -> str:
            of = sorted(flops / s / peak for s, peak in zip(self.step_s, self.peak, strict=True))
            shown = f", {statistics.median(of):.0%} ({of[0]:.0%} to {of[-1]:.0%}) of the peak" if of else ""
            return f"{flops / 1e9:.1f} GFLOP{shown}"

        lines = [
            f"step     {1e3 * self.seconds:.0f} ms ({1e3 * min(self.step_s):.0f} to {1e3 * max(self.step_s):.0f})",
            f"speed    {self.tokens / self.seconds:,.0f} positions a second",
            *([f"peak     {statistics.median(self.peak) / 1e9:.0f} GFLOP a second"] if self.peak else []),
            f"model    {share(self.model_flops)} (MFU: 6 a weight and position, and whole attention)",
            f"products {share(self.product_flops)} (all that run: optimiser and recomputation included)",
        ]
        return "\n".join(lines)


def measure(config: Config, batches: Iterator[Batch], repeats: int = 5) -> Speed:
    """Times `repeats` training steps of `config`; nothing is kept."""
    mesh, _, params, state, train_step = begin(config)
    batch = to_mesh(next(batches), mesh)
    tokens = batch["tokens_BT"].size
    model_flops = tokens * token_flops(params, config.model, config.data.row_length)
    flops = product_flops(jax.make_jaxpr(train_step)(params, state, batch))
    step_s, peak = [], []
    for repeat in range(repeats + 1):
        best = peak_flops(jax.devices()[0])
        began = time.perf_counter()
        params, state, sums, _ = train_step(params, state, batch)
        jax.block_until_ready(sums)
        if repeat:  # the first one compiled
            step_s.append(time.perf_counter() - began)
            peak += [best * jax.device_count()] if best else []
        batch = to_mesh(next(batches), mesh)
    return Speed(step_s, peak, tokens, model_flops, flops)


def product_flops(program: Any) -> float:
    """Operations of all matrix products of a traced program, as often as loops of known length run them."""
    if isinstance(program, (tuple, list)):  # branches: the dearest
        return max(map(product_flops, program), default=0.0)
    if isinstance(program, ClosedJaxpr):
        program = program.jaxpr
    if not isinstance(program, Jaxpr):
        return 0.0
    total = 0.0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)
            continue
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "shard_map":  # shapes are those of one device
            times = math.prod(equation.params["mesh"].shape[axis] for axis in equation.params["newly_manual_axes"])
        total += times * sum(map(product_flops, equation.params.values()))
    return total
