"""Measures decoding speed, mode beside mode in one run: milliseconds and tokens a step, tokens a second, speed-up.

    python -m vadusa_jax.bench --modes ar,exact,tolerance:3 --batch 1,8 --json out/bench.json

Speaks held-out sentences to tokens; the codec is left out, and so is compilation. The modes take turns in every
repetition, so that a busy machine slows them all alike; figures are medians over the repetitions, with their range.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from tqdm import tqdm

from vadusa_jax.decode.loop import Prompts, Settings, generate
from vadusa_jax.decode.modes import Mode, parse_mode
from vadusa_jax.decode.prompts import slots_for
from vadusa_jax.evaluation.report import SPEED, Columns, markdown_table, write_json
from vadusa_jax.evaluation.scores import AR, conditions
from vadusa_jax.evaluation.testsets import load_testset
from vadusa_jax.text import phonemize
from vadusa_jax.voice import DEMO_MODEL, Voice

_MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), "Voice folder.")
_MODES = flags.DEFINE_list(
    "modes",
    ["ar", *(f"{rule}:nodes={nodes}" for rule in ("exact", "tolerance:3") for nodes in (4, 8, 16, 64))],
    "Modes to compare; speed-up is over ar.",
)
_BATCH = flags.DEFINE_list("batch", ["1", "8"], "Sizes of the batches.")
_TEXTS = flags.DEFINE_integer("texts", 5, "Held-out sentences, rounded up to whole batches.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed repetitions.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "File for the rows, with the range of every figure.")
flags.register_validator(
    "batch", lambda sizes: all(size.isdecimal() and int(size) for size in sizes), "must be numbers of at least 1"
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One repetition of one mode: all texts, batch after batch."""

    wall_s: float
    tokens: int  # EOS included
    row_steps: int  # backbone passes that each row took part in, summed over the rows
    passes: int  # backbone passes of the device; like row_steps, the prefill is one


def split(prompts: Prompts, batch: int) -> list[Prompts]:
    """Batches of one padded shape, so that each mode compiles once."""
    return [jax.tree.map(lambda x, i=i: x[i : i + batch], prompts) for i in range(0, len(prompts.length_B), batch)]


def run_once(voice: Voice, batches: Sequence[Prompts], settings: Settings, slots: int) -> Run:
    """Decodes all batches and waits for the last token."""
    began = time.perf_counter()
    states = [jax.block_until_ready(generate(voice.lm, p, settings=settings, slots=slots)) for p in batches]
    return Run(
        wall_s=time.perf_counter() - began,
        tokens=sum(int(s.count_B.sum()) for s in states),
        row_steps=sum(int(s.passes_B.sum()) for s in states),
        passes=sum(int(s.passes_B.max()) for s in states),
    )


def bench(voice: Voice, modes: dict[str, Mode], texts: Sequence[str], batch: int, repeats: int) -> list[dict]:
    """One row of figures per mode."""
    prompts = voice.prompts(texts, [phonemize(text) for text in texts], seed=0)
    batches, settings = split(prompts, batch), {name: voice.settings(mode) for name, mode in modes.items()}
    slots = max(slots_for(prompts, s.tree) for s in settings.values())  # the same for all modes
    runs: dict[str, list[Run]] = {name: [] for name in modes}
    turns = [(repeat, name) for repeat in range(repeats + 1) for name in modes]
    for repeat, name in tqdm(turns, f"batch {batch}", disable=None):
        run = run_once(voice, batches, settings[name], slots)
        if repeat:  # the first one compiled
            runs[name].append(run)
    facts = {"texts": len(texts), "repeats": repeats}
    return [
        {"mode": name} | conditions(voice, mode, batch) | facts | figures(runs[name], runs.get(AR))
        for name, mode in modes.items()
    ]


def figures(runs: Sequence[Run], ar: Sequence[Run] | None) -> dict:
    """Medians over the repetitions, each with its (lowest, highest); `speedup` compares runs of one repetition."""
    each = {
        "ms_per_step": [1e3 * run.wall_s / run.passes for run in runs],
        "tokens_per_s": [run.tokens / run.wall_s for run in runs],
    }
    if ar:
        each["speedup"] = [
            rate * plain.wall_s / plain.tokens for rate, plain in zip(each["tokens_per_s"], ar, strict=True)
        ]
    row = {"tokens": runs[0].tokens, "steps": runs[0].row_steps, "tokens_per_step": runs[0].tokens / runs[0].row_steps}
    for key, values in each.items():
        row |= {key: float(np.median(values)), f"{key}_range": (min(values), max(values))}
    return row


def _two(value: float) -> str:
    return f"{value:.2f}"


def _range(value: Sequence[float]) -> str:
    return " to ".join(map(_two, value))


COLUMNS: Columns = {key: SPEED[key] for key in ("mode", "nodes", "batch", "device", "dtype", "tokens")} | {
    "ms_per_step": ("ms per step", _two),
    "ms_per_step_range": ("range", _range),
    "tokens_per_step": SPEED["tokens_per_step"],
    "tokens_per_s": ("tokens per s", lambda value: f"{value:.0f}"),
    "speedup": SPEED["speedup"],
    "speedup_range": ("range", _range),
}


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    modes = {name: parse_mode(name) for name in _MODES.value}
    voice, rows = Voice.load(_MODEL.value), []
    texts = [sentence.text for sentence in load_testset("heldout")]
    for batch in map(int, _BATCH.value):
        whole = itertools.islice(itertools.cycle(texts), -(-_TEXTS.value // batch) * batch)
        rows += bench(voice, modes, list(whole), batch, _REPEATS.value)
    if _JSON.value:
        write_json(Path(_JSON.value), rows)
    print(markdown_table(rows, COLUMNS))
    print(f"Medians and ranges of {_REPEATS.value} repetitions; tokens include EOS, and the prefill is a step")


if __name__ == "__main__":
    app.run(main)
