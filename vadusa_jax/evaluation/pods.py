"""The training step compiled for a TPU pod that is not there, through libtpu: does it fit, and what bounds its speed?

Times are roofline times: operations over the chips' peak, bytes over the bandwidth of their memory and of their
links. The step takes at least as long as the longest of the three, if they overlap perfectly.
"""

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx

from vadusa_jax.config import Config
from vadusa_jax.evaluation import hlo
from vadusa_jax.evaluation.report import Columns
from vadusa_jax.evaluation.topology import chip_count, find_chip, interconnect
from vadusa_jax.model.chips import token_flops
from vadusa_jax.model.heads import SpeechLM


def with_rows(config: Config, topology: str, rows_per_chip: int) -> Config:
    """`config` with so many rows of the batch on every chip of the topology."""
    batch = rows_per_chip * chip_count(topology)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_rows=batch))


def memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on each chip: parameters and optimiser state, the batch, what a step needs in between, and its code."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def train_row(topology: str, config: Config, compiled: jax.stages.Compiled) -> dict:
    """The figures of the training step of `config`, compiled for the topology; those of one chip."""
    chip, chips, program = find_chip(topology), chip_count(topology), hlo.read(compiled.as_text())
    flops, hbm = hlo.products(program), sum(hlo.memory_traffic(program))
    sent = hlo.collectives(program, chips)
    ici = sum(each for _, each in sent.values())
    times = {"compute_s": flops / chip.peak, "hbm_s": hbm / chip.bandwidth, "ici_s": ici / interconnect(topology)}
    tokens = config.data.batch_rows * config.data.row_length / chips
    params = nnx.state(nnx.eval_shape(lambda: SpeechLM(config.model, config.heads, rngs=nnx.Rngs(0))))
    model_flops = tokens * token_flops(params, config.model, config.data.row_length)
    roofline = max(times.values())
    return {
        "topology": topology,
        "chips": chips,
        "tokens": tokens,
        "dtype": config.train.dtype,
        "optimizer": config.train.optimizer,
        "state_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "memory_bytes": memory_bytes(compiled),
        "memory_share": memory_bytes(compiled) / chip.memory,
        "flops": flops,
        "hbm_bytes": hbm,
        "ici_bytes": ici,
        "collectives": {kind: {"count": count, "bytes": each} for kind, (count, each) in sent.items()},
        **times,
        "roofline_s": roofline,
        "tokens_per_s": chips * tokens / roofline,
        "model_flops": model_flops,
        "mfu_bound": model_flops / chip.peak / roofline,
        "ici_share": times["ici_s"] / max(times["compute_s"], times["hbm_s"]),
    }


def largest_rows(fits: Callable[[int], int | None], limit: int) -> int:
    """The most rows that fit; 0 if not one does.

    Args:
        fits: the bytes that so many rows need, or None if they do not fit. The compiler has the last word: it saves
            memory when it is short.
        limit: the chip's memory. What lies between two tries is guessed to be linear.
    """
    used, over = {0: 0}, None
    rows = 1
    while over is None or over - max(used) > 1:
        if (needs := fits(rows)) is None:
            over = rows
        else:
            used[rows] = needs
        *_, a, b = 0, *sorted(used)
        guess = 2 * b if len(used) < 3 else b + int((limit - used[b]) * (b - a) / max(used[b] - used[a], 1))
        rows = max(guess, b + 1) if over is None else min(max(guess, b + 1), over - 1)
    return max(used)


def _collectives(kinds: dict[str, dict]) -> str:
    return ", ".join(f"{each['count']} {kind} {each['bytes'] / 1e6:.0f} MB" for kind, each in kinds.items()) or "none"


COLUMNS: Columns = {
    "topology": ("topology", str),
    "tokens": ("tokens a chip", "{:.0f}".format),
    "memory_bytes": ("memory GB", lambda x: f"{x / 1e9:.1f}"),
    "memory_share": ("of the chip's %", lambda x: f"{100 * x:.0f}"),
    "flops": ("TFLOP", lambda x: f"{x / 1e12:.1f}"),
    "hbm_bytes": ("main memory GB", lambda x: f"{x / 1e9:.0f}"),
    "collectives": ("collectives, sent", _collectives),
    "compute_s": ("compute ms", lambda x: f"{1e3 * x:.1f}"),
    "hbm_s": ("memory ms", lambda x: f"{1e3 * x:.1f}"),
    "ici_s": ("links ms", lambda x: f"{1e3 * x:.1f}"),
    "ici_share": ("links, not hidden %", lambda x: f"{100 * x:.1f}"),
    "roofline_s": ("roofline ms", lambda x: f"{1e3 * x:.1f}"),
    "mfu_bound": ("MFU at most %", lambda x: f"{100 * x:.0f}"),
    "tokens_per_s": ("tokens a second", lambda x: f"{x:,.0f}"),
}
