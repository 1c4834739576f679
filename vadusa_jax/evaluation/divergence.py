"""Where drafts changed what was said, and how narrowly the token there had won.

In float32 nothing may change. In bfloat16 a pass over a tree rounds otherwise than a pass over one token, and where two
tokens are nearly level the other one may win: the top-2 gap tells such a place from a mistake.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.decode.loop import Prompts, Settings, target
from vadusa_jax.decode.prompts import take_rows
from vadusa_jax.decode.queue import decode_all
from vadusa_jax.model.heads import SpeechLM


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token of a row that differs from plain decoding."""

    row: int
    at: int  # number of the token among those said
    gap: float  # between the two best scores (log p plus noise, in nats) there


def divergences(lm: SpeechLM, prompts: Prompts, plain: Settings, fast: Settings, batch: int) -> list[Divergence]:
    """Decodes all rows both ways; one entry for each row that differs. Both settings must be of the exact rule."""
    found = []
    both = (decode_all(lm, prompts, settings=settings, batch=batch) for settings in (plain, fast))
    for row, (one, other) in enumerate(zip(*both, strict=True)):
        length = min(len(one.tokens), len(other.tokens))
        differ = np.flatnonzero(one.tokens[:length] != other.tokens[:length])
        if len(differ) or len(one.tokens) != len(other.tokens):
            at = int(differ[0]) if len(differ) else length
            found.append(Divergence(row, at, _gap(lm, take_rows(prompts, [row]), one.tokens[:at], plain)))
    return found


def _gap(lm: SpeechLM, prompt: Prompts, said: np.ndarray, settings: Settings) -> float:
    length = int(prompt.length_B[0])
    tokens_1T = jnp.concatenate([prompt.tokens_BP[:, :length], jnp.asarray(said, jnp.int32)[None]], axis=1)
    count = tokens_1T.shape[1]
    h_1TD, _ = lm.backbone(tokens_1T, jnp.arange(count)[None], jnp.tril(jnp.ones((1, count, count), bool)))
    recent = np.full(settings.repeat_window, -1)
    if tail := min(len(said), settings.repeat_window):
        recent[-tail:] = said[-tail:]
    at = target(lm, prompt, h_1TD[:, -1:], jnp.array([[count]]), jnp.asarray(recent)[None, None], settings)
    best, _ = jax.lax.top_k(at.log_p[0, 0] + at.noise[0, 0, 0], 2)
    return float(best[0] - best[1])
