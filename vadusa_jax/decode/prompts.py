"""Phones to prompts: the batch that the decode loop takes, in a few padded shapes so that few are compiled."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vadusa_jax.config import Config, DecodeConfig, ModelConfig
from vadusa_jax.decode.accept import Rule
from vadusa_jax.decode.loop import Settings
from vadusa_jax.decode.sampling import RowSampling, Sampling, row_keys
from vadusa_jax.decode.state import Prompts
from vadusa_jax.decode.tree import Tree

PROMPT_BUCKET, LEAST_SLOTS = 64, 256


class TooLong(ValueError):
    """A text, or a speech prompt, that leaves no room for speech."""


@dataclasses.dataclass(frozen=True)
class SpeechPrompt:
    """What a speaker has said already: its phones, as ids in the vocabulary of text symbols with a space behind them,
    and its speech tokens. A text that follows is said in that voice (VALL-E, arXiv 2301.02111)."""

    phones: tuple[int, ...] = ()
    speech: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.phones) + len(self.speech)


NO_PROMPT = SpeechPrompt()


def make_settings(tree: Tree, rule: Rule, decode: DecodeConfig, coupled: bool = True) -> Settings:
    """What the decode loop compiles for a tree, a rule and a config."""
    repeats = max(1, math.ceil(decode.repeat_window * decode.repeat_ratio))
    return Settings(tree, rule, decode.repeat_limit, decode.repeat_window, repeats, coupled)


def text_prompt(
    phones: Sequence[int], separator: int, model: ModelConfig, prompt: SpeechPrompt = NO_PROMPT
) -> list[int]:
    """`[phones of the prompt] [phones] SEP [speech of the prompt]` in the model's vocabulary."""
    return [*(model.eos + 1 + symbol for symbol in (*prompt.phones, *phones, separator)), *prompt.speech]


def token_limit(phones: int, decode: DecodeConfig, model: ModelConfig, prompt: SpeechPrompt = NO_PROMPT) -> int:
    """Most tokens that a text of so many phones may say, EOS included; raises TooLong when there is room for none."""
    room = model.max_length - (len(prompt) + phones + 1)
    if room < 1:
        speech = f" and the speech prompt takes {len(prompt)} positions" if prompt else ""
        raise TooLong(
            f"the text has {phones} phones{speech}; with the separator the model's max_length of {model.max_length} "
            f"positions leaves no room for speech: split the text{', or take a shorter prompt' if prompt else ''}"
        )
    return min(room, decode.extra_tokens + int(decode.tokens_per_phone * phones))


def text_prompts(
    phones: Sequence[Sequence[int]],
    separator: int,
    row_numbers: Sequence[int],
    seed: int,
    config: Config,
    prompt: SpeechPrompt = NO_PROMPT,
) -> Prompts:
    """A batch of texts behind a speech prompt, each with the limits that its own length gives; raises TooLong."""
    limits = [token_limit(len(p), config.decode, config.model, prompt) for p in phones]
    least = [int(config.decode.least_per_phone * len(p)) for p in phones]
    tokens = [text_prompt(p, separator, config.model, prompt) for p in phones]
    return make_prompts(tokens, limits, row_numbers, seed, config.decode, least)


def make_prompts(
    tokens: Sequence[Sequence[int]],
    limits: Sequence[int],
    row_numbers: Sequence[int],
    seed: int,
    decode: DecodeConfig | Sequence[DecodeConfig],
    least: Sequence[int] | None = None,
) -> Prompts:
    """A batch from prompts of any lengths, with one config for all rows or one for each.

    A row's number and the seed decide its noise, wherever the row stands.
    """
    padded = bucket(max(len(t) for t in tokens), PROMPT_BUCKET)
    tokens_BP = np.zeros((len(tokens), padded), np.int32)
    for row, t in zip(tokens_BP, tokens, strict=True):
        row[: len(t)] = t
    each = [decode] * len(tokens) if isinstance(decode, DecodeConfig) else decode
    return Prompts(
        jnp.asarray(tokens_BP),
        jnp.asarray([len(t) for t in tokens], jnp.int32),
        jnp.asarray(np.zeros(len(tokens)) if least is None else least, jnp.int32),
        jnp.asarray(limits, jnp.int32),
        row_keys(seed, np.asarray(row_numbers, np.uint32)),
        RowSampling.of([Sampling(d.temperature, d.top_k, d.top_p) for d in each]),
    )


def take_rows(prompts: Prompts, rows: Sequence[int] | slice) -> Prompts:
    """Some rows of a batch; the padding stays, so that parts of one batch share their shapes."""
    rows = rows if isinstance(rows, slice) else np.asarray(rows)
    return jax.tree.map(lambda x: x[rows], prompts)


def first_slots(prompts: Prompts, tree: Tree) -> int:
    """Cache slots to begin with: a compiled size with room for the prompts and two paths of the tree."""
    return slots_bucket(prompts.tokens_BP.shape[1] + 2 * (tree.depth + 1))


def check_room(prompts: Prompts, model: ModelConfig) -> None:
    """Raises TooLong if a row may need a position that the model does not have."""
    longest = int(np.max(np.asarray(prompts.length_B + prompts.limit_B)))
    if longest > model.max_length:
        raise TooLong(f"a row may reach {longest} positions, the model has max_length {model.max_length}")


def slots_bucket(slots: int) -> int:
    """Cache slots rounded up to a compiled size: a power of two, as `grow` doubles them."""
    return max(LEAST_SLOTS, 1 << (slots - 1).bit_length())


def bucket(length: int, size: int) -> int:
    """`length` rounded up to a multiple of `size`."""
    return -(-length // size) * size
