"""What one sees of a run: the progress line, `metrics.jsonl`, TensorBoard events, and a profile if asked for.

Figures are the same in every process, for the sums that they come from are; only process 0 shows and writes them.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

from vadusa_jax.config import Config, ModelConfig
from vadusa_jax.model.chips import peak_flops
from vadusa_jax.training.hosts import is_first
from vadusa_jax.training.losses import TRAIN_TOP, Batch, joint_loss, metrics

_WARM = 3  # steps before a profile begins
_SHOWN = ("dev/loss", "dev/lm/loss", "dev/lm/top1", *(f"dev/head{k}/top1" for k in range(1, 7)))


class TrainingDiverged(RuntimeError):
    """The loss or a parameter is not a number any more."""


class Sent(NamedTuple):
    """A training step that was sent to the devices: looked at when the next one is on its way."""

    step: int
    sums: jax.Array  # [1 + K, 2 + len(TRAIN_TOP)]
    norm: jax.Array
    tokens: int
    stop: jax.Array | bool  # whether any process was asked to end


def token_flops(params: nnx.State, model: ModelConfig, row_length: int) -> float:
    """Operations of a training step for one token: 6 for each weight of a matrix product, 12 L D T for attention.

    The count of PaLM (arXiv 2204.02311, appendix B): forward and backward, without what is computed twice to save
    memory, and with whole [T, T] attention. The embedding table is looked up and not multiplied with.
    """
    weights = sum(
        x.size
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if x.ndim > 1 and not any(name in jax.tree_util.keystr(path) for name in ("embedding", "bias"))
    )
    return 6.0 * weights + 12.0 * model.layers * model.width * row_length


class Watch:
    """Takes account of steps and writes what there is to know of them.

    Args:
        folder: receives `metrics.jsonl` and `events/`; what stands there of steps after `start` is dropped.
        config: the run.
        params: for their number.
        start: steps done before.
        skipped: updates left out before.
        progress: show a progress line.
        profile: so many steps are traced for TensorBoard and Perfetto into `profile/`, once all is compiled.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        params: nnx.State,
        start: int,
        skipped: int,
        progress: bool = True,
        profile: int = 0,
    ):
        if config.train.on_nan not in ("stop", "skip"):
            raise ValueError(f"train.on_nan must be 'stop' or 'skip', got {config.train.on_nan!r}")
        self._config, self._skipped, self._in_a_row = config, skipped, 0
        self._flops, self._peak = token_flops(params, config.model, config.data.row_length), None
        self._file = self._events = None
        self._fetched, self._profile = 0, range(_WARM, _WARM + profile) if is_first() else range(0)
        self._profile_folder, self._tracing = folder / "profile", False
        self._bar = tqdm(
            **{"total": config.train.steps, "initial": start, "unit": "step", "mininterval": 5},
            disable=not (progress and is_first()),
        )
        if is_first():
            if peak := peak_flops(jax.devices()[0]):
                self._peak = peak * jax.device_count()
            forget_after(folder / "metrics.jsonl", start)
            self._file = (folder / "metrics.jsonl").open("a")
            self._events = SummaryWriter(str(folder / "events"), purge_step=start + 1)
        self.restart()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_) -> None:
        self._trace(False)
        self._bar.close()
        if self._file:
            self._file.close()
            self._events.close()

    def restart(self) -> None:
        """Starts the clock anew: what was done between two steps is no part of their speed."""
        self._began, self._tokens, self._waited_s = time.monotonic(), 0, 0.0

    def fetch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time until it is there is what training waits for data."""
        self._trace(self._fetched in self._profile)
        self._fetched += 1
        began = time.monotonic()
        batch = next(batches)
        self._waited_s += time.monotonic() - began
        return batch

    def _trace(self, on: bool) -> None:
        if on and not self._tracing:
            jax.profiler.start_trace(str(self._profile_folder))
        if self._tracing and not on:
            jax.profiler.stop_trace()
            self._bar.write(f"profile of {len(self._profile)} steps: {self._profile_folder}")
        self._tracing = on

    def settle(self, sent: Sent, names: Callable[[int], list[str]]) -> bool:
        """Takes account of a finished step; every `log_every` steps its figures are written.

        Args:
            sent: the step.
            names: the records in the batch of a step.

        Returns:
            Whether the run is asked to end.
        """
        train, sums, norm = self._config.train, np.asarray(jax.device_get(sent.sums)), float(sent.norm)
        loss = float(joint_loss(sums, self._config.heads))
        self._bar.update()
        self._tokens += sent.tokens
        if math.isfinite(loss) and math.isfinite(norm):
            self._in_a_row = 0
            if sent.step % train.log_every == 0 or sent.step == train.steps:
                self._figures(sent.step, loss, norm, sums)
        else:
            self._not_finite(sent.step, loss, norm, names(sent.step))
        return bool(sent.stop)

    def _figures(self, step: int, loss: float, norm: float, sums: np.ndarray) -> None:
        seconds = time.monotonic() - self._began
        speed = {"tokens_per_s": self._tokens / seconds, "data_wait": self._waited_s / seconds}
        if self._peak:
            speed["mfu"] = speed["tokens_per_s"] * self._flops / self._peak
        heads = metrics(sums, TRAIN_TOP)
        self.write(step, {"loss": loss, "grad_norm": norm, "skipped": self._skipped} | speed | heads)
        line = {"loss": f"{loss:.3f}", "top1": "/".join(f"{v:.2f}"[1:] for k, v in heads.items() if "top1" in k)}
        line |= {"tok/s": f"{speed['tokens_per_s']:.0f}", "wait": f"{speed['data_wait']:.0%}"}
        line |= {"mfu": f"{speed['mfu']:.0%}"} if self._peak else {}
        self._bar.set_postfix(line, refresh=False)
        self.restart()

    def _not_finite(self, step: int, loss: float, norm: float, names: list[str]) -> None:
        train = self._config.train
        self._skipped, self._in_a_row = self._skipped + 1, self._in_a_row + 1
        what = f"loss is {loss} and the gradient's norm {norm} at step {step}"
        if self._file:  # all names here, for the message has no room
            self._line({"step": step, "not_finite": {"loss": str(loss), "grad_norm": str(norm), "records": names}})
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more, see metrics.jsonl" if len(names) > 20 else "")
        if train.on_nan == "stop" or self._in_a_row >= train.skips_in_a_row:
            rest = f" after {self._in_a_row} skipped updates in a row" if train.on_nan == "skip" else ""
            raise TrainingDiverged(f"{what}{rest}; the last checkpoint is intact; its batch holds the records {shown}")
        self._bar.write(f"{what}: its update is skipped, the {self._skipped}. of this run; records {shown}")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one line of figures."""
        if not self._file:
            return
        self._line({"step": step} | {name: round(value, 6) for name, value in values.items()})
        for name, value in values.items():
            self._events.add_scalar(name if "/" in name else f"train/{name}", value, step)
        if "dev/lm/loss" in values:
            self._bar.write(f"step {step}: " + ", ".join(f"{k} {values[k]:.3f}" for k in _SHOWN if k in values))

    def _line(self, values: dict) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


def forget_after(file: Path, step: int) -> None:
    """Drops lines of later steps, and one that was cut short: the run does these steps again."""
    kept = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    aside = file.with_name(file.name + ".partial")
    aside.write_text("".join(kept))
    aside.replace(file)
