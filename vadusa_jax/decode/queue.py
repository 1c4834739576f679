"""Any number of prompts through a batch of fixed size: as rows finish, the next prompts take their places."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from vadusa_jax.decode.draft import MEDUSA, Drafter
from vadusa_jax.decode.loop import Settings, advance, prefill
from vadusa_jax.decode.prompts import check_room, first_slots, take_rows
from vadusa_jax.decode.state import FINISH, RUNNING, Prompts, State, grow, put_row
from vadusa_jax.model.heads import SpeechLM


@dataclasses.dataclass(frozen=True)
class Said:
    """What one row said."""

    tokens: np.ndarray  # int32 [n], EOS included if it was said
    step_of: np.ndarray  # int32 [n]: the backbone pass that decided each token; 0 is the prefill
    steps: int  # backbone passes, prefill included
    finish: str  # why it ended: one of FINISH but "running"


def decode_all(
    model: SpeechLM,
    prompts: Prompts,
    *,
    settings: Settings,
    batch: int,
    drafter: Drafter = MEDUSA,
) -> list[Said]:
    """Decodes all rows of `prompts`, at most `batch` at a time, and gives them back in their order.

    What a row says does not depend on its place or its company. Nothing is compiled after the first rows: the
    batch keeps its shape (until a row is longer than any before: then its slots double), and a finished row waits,
    frozen, until the host notices (once per finished row).
    """
    done = dict(decode_each(model, prompts, settings=settings, batch=batch, drafter=drafter))
    return [done[i] for i in range(len(done))]


def decode_each(
    model: SpeechLM,
    prompts: Prompts,
    *,
    settings: Settings,
    batch: int,
    drafter: Drafter = MEDUSA,
) -> Iterator[tuple[int, Said]]:
    """As `decode_all`, but every row with its number as soon as it is finished."""
    total = len(prompts.length_B)
    check_room(prompts, model.backbone.config)
    number = list(range(min(batch, total)))  # which prompt is in each row of the batch; None: no more are waiting
    waiting = iter(range(len(number), total))
    rows = take_rows(prompts, number)
    state = prefill(model, rows, settings=settings, slots=first_slots(rows, settings.tree), drafter=drafter)
    while any(n is not None for n in number):
        running = sum(n is not None for n in number)
        state = advance(model, rows, state, running, settings=settings, drafter=drafter)
        finished = [(b, said) for b, said in _finished(state) if number[b] is not None]
        if not finished:  # nothing else stopped it: the slots are full
            state = grow(state)
        for b, said in finished:
            yield number[b], said
            number[b] = next(waiting, None)
            if number[b] is not None:
                one = take_rows(prompts, [number[b]])
                rows = put_row(rows, b, one)
                slots = state.said_BS.shape[1]
                state = put_row(state, b, prefill(model, one, settings=settings, slots=slots, drafter=drafter))


def _finished(state: State) -> list[tuple[int, Said]]:
    """The finished rows; one transfer from the device."""
    host = jax.device_get((state.said_BS, state.step_BS, state.count_B, state.passes_B, state.finish_B))
    return [
        (b, Said(said[:count].copy(), step[:count].copy(), int(passes), FINISH[finish]))
        for b, (said, step, count, passes, finish) in enumerate(zip(*host, strict=True))
        if finish != RUNNING
    ]
