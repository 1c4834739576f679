"""Compiles for a TPU without a TPU, and prints what the compiled program would cost there.

    python -m vadusa_jax.aot decode --topology v5e:2x2 --shape 150m
    python -m vadusa_jax.aot train --topology v5e:4x4 --config configs/libritts.py [--find_batch]
    python -m vadusa_jax.aot train --topology v5e:4x4,v5e:8x8,v5e:16x16 --config configs/libritts.py --rows 8

`decode` compiles one decode step for one chip of the topology (rows are spread over chips, each decodes its own), for
every tree size. `train` compiles the training step of a config for all chips of the topology. Both go through libtpu
(extra [aot]). The printed legend says how every figure is made.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import config_flags
from tqdm import tqdm

from vadusa_jax.config import SHAPES, Config, HeadsConfig, from_config_dict
from vadusa_jax.decode.fit import wide_tree
from vadusa_jax.evaluation import pods, tpu
from vadusa_jax.evaluation.report import Columns, markdown_table, write_csv, write_json
from vadusa_jax.evaluation.topology import NoTopology, find_chip, find_topology
from vadusa_jax.training.compiled import DoesNotFit, compile_train

DECODE_LEGEND = """\
Minimum: the weights that a step reads (backbone, LM head, draft heads in use) and the whole cache, once. Main memory: \
what the compiled step moves between the chip's memory and anything else, counted from the program. XLA's own bytes \
accessed also count what moves inside the chip: a weight when it is fetched, when its pieces are joined, and when it \
is used. Roofline: main memory over the chip's bandwidth, or operations over its peak.
Projected speed-up: the roofline time of one node over that of the tree, times the tokens per step that were measured \
on the demo voice with `exact` and as many nodes. Nothing ran on a TPU."""

TRAIN_LEGEND = """\
Figures are those of one chip. Memory: parameters, optimiser state, batch, intermediate values and code. TFLOP: matrix \
products of the compiled step, recomputation included. Main memory and links: what the compiled step moves; each turn \
of a loop counts. Collectives are sent in rings; an axis of the pod that is no ring has half the links. Roofline: the \
longest of compute, memory and links, as if they overlapped perfectly. Links, not hidden: their time over the longer \
of the other two, as if they did not overlap at all. MFU at most: 6 operations a weight and position and whole \
attention (PaLM), over the chip's peak for the roofline time. Nothing ran on a TPU."""

TOPOLOGY = flags.DEFINE_list("topology", ["v5e:2x2"], "Chips: v4, v5e, v5p or v6e, and how they are laid out.")
CONFIG = config_flags.DEFINE_config_file("config", None, "What is compiled; for `decode`, instead of --shape.")
SHAPE = flags.DEFINE_enum("shape", "150m", list(SHAPES), "Named model.")
NODES = flags.DEFINE_list("nodes", ["1", "16", "32", "64"], "Tree sizes; the first is what others compare with.")
BATCH = flags.DEFINE_integer("batch", 1, "Rows per chip.", lower_bound=1)
SLOTS = flags.DEFINE_integer("slots", 2048, "Cache slots of a row.", lower_bound=128)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights, cache and products.")
TOKENS = flags.DEFINE_list(
    "tokens_per_step",
    ["1:1.0", "8:2.59", "16:2.98", "64:3.65"],
    "NODES:TOKENS that a step commits.",
)
ROWS = flags.DEFINE_integer("rows", None, "Rows of the batch per chip; by default those of the config.", lower_bound=1)
FIND_BATCH = flags.DEFINE_bool("find_batch", False, "Find the most rows per chip that fit into its memory.")
JSON = flags.DEFINE_string("json", None, "File for the figures.")
CSV = flags.DEFINE_string("csv", None, "File for the rows of the table.")
flags.register_validator("nodes", lambda sizes: all(s.isdecimal() and int(s) for s in sizes), "must be numbers over 0")


def decode() -> None:
    """The table of decode steps."""
    config = from_config_dict(CONFIG.value) if CONFIG.value else None
    model, heads = (config.model, config.heads) if config else (SHAPES[SHAPE.value], HeadsConfig())
    reached = {int(nodes): float(tokens) for nodes, tokens in (pair.split(":") for pair in TOKENS.value)}
    rows = []
    for nodes in tqdm(list(map(int, NODES.value)), "compile", disable=None):
        tree = wide_tree(heads.count, nodes)
        step = tpu.Step(model, heads, tree, BATCH.value, SLOTS.value, jnp.dtype(DTYPE.value))
        row = tpu.step_row(TOPOLOGY.value[0], step)
        if nodes in reached:
            row["tokens_per_step"] = reached[nodes]
            row["projected_speedup"] = reached[nodes] * (rows[0] if rows else row)["roofline_us"] / row["roofline_us"]
        rows.append(row)
    _show(rows, tpu.COLUMNS, DECODE_LEGEND)


def train() -> None:
    """The table of training steps, one row a topology."""
    if CONFIG.value is None:
        raise app.UsageError("say what to train: --config")
    config = from_config_dict(CONFIG.value)
    table = [train_row(topology, config) for topology in tqdm(TOPOLOGY.value, "compile", disable=None)]
    _show(table, pods.COLUMNS, TRAIN_LEGEND)


def train_row(topology: str, config: Config) -> dict:
    """The figures of a topology, with as many rows per chip as the flags say."""
    devices, rows = find_topology(topology).devices, ROWS.value

    @functools.cache  # the search ends with rows that it has compiled
    def compiled(rows: int) -> jax.stages.Compiled:
        return compile_train(pods.with_rows(config, topology, rows), devices)

    def needs(rows: int) -> int | None:
        try:
            return pods.memory_bytes(compiled(rows))
        except DoesNotFit:
            return None

    if FIND_BATCH.value:
        rows = pods.largest_rows(needs, find_chip(topology).memory)
    if rows:
        return pods.train_row(topology, pods.with_rows(config, topology, rows), compiled(rows))
    return pods.train_row(topology, config, compile_train(config, devices))


def _show(rows: list[dict], columns: Columns, legend: str) -> None:
    if JSON.value:
        write_json(Path(JSON.value), rows)
    if CSV.value:
        write_csv(Path(CSV.value), rows)
    print(markdown_table(rows, columns), legend, sep="\n")


COMMANDS = {"decode": decode, "train": train}


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in COMMANDS:
        raise app.UsageError(f"say what to compile: {', '.join(COMMANDS)}")
    try:
        COMMANDS[argv[1]]()
    except (NoTopology, DoesNotFit) as error:
        raise SystemExit(f"aot: {error}") from error


if __name__ == "__main__":
    app.run(main)
