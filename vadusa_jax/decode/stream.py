"""Tokens as they are committed: one prompt, said in chunks."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from vadusa_jax.decode.draft import MEDUSA, Drafter
from vadusa_jax.decode.loop import Settings, advance, prefill
from vadusa_jax.decode.prompts import check_room, first_slots
from vadusa_jax.decode.state import EOS, FINISH, RUNNING, Prompts, grow
from vadusa_jax.model.heads import SpeechLM


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What was said since the chunk before."""

    tokens: np.ndarray  # int32 [n], without EOS
    finish: str  # "running", and for the last chunk why the row ended


def stream_tokens(
    model: SpeechLM,
    prompt: Prompts,
    *,
    settings: Settings,
    size: int,
    drafter: Drafter = MEDUSA,
) -> Iterator[Chunk]:
    """Decodes the only row of `prompt` and pauses whenever at least `size` more tokens are said.

    All chunks in a row are what `generate` says. The device is asked once per chunk.
    """
    check_room(prompt, model.backbone.config)
    slots, start, finish = first_slots(prompt, settings.tree), 0, RUNNING
    state = prefill(model, prompt, settings=settings, slots=slots, drafter=drafter)
    while finish == RUNNING:
        state = advance(model, prompt, state, 1, start + size, settings=settings, drafter=drafter)
        said_S, end, finish = jax.device_get((state.said_BS[0], state.count_B[0], state.finish_B[0]))
        if finish == RUNNING and end < start + size:  # nothing else stopped it: the slots are full
            state = grow(state)
            continue
        yield Chunk(said_S[start : end - (finish == EOS)], FINISH[finish])
        start = int(end)
