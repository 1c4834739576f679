"""Where drafts changed what was said, and how narrowly the token there had won.

In float32 nothing may change. In bfloat16 a pass over a tree rounds otherwise than a pass over one token, and where two
tokens are nearly level the other one may win: the top-2 gap tells such a place from a mistake.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.decode.fit import positions_along
from vadusa_jax.decode.loop import Settings
from vadusa_jax.decode.prompts import take_rows
from vadusa_jax.decode.queue import decode_all
from vadusa_jax.decode.state import Prompts
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
    tokens_T = jnp.concatenate([prompt.tokens_BP[0, : int(prompt.length_B[0])], jnp.asarray(said, jnp.int32)])
    _, at = positions_along(lm, prompt, tokens_T, settings)
    best, _ = jax.lax.top_k(at.log_p[0, -1] + at.noise[0, -1, 0], 2)
    return float(best[0] - best[1])
