"""Phones to prompts: the batch that the decode loop takes, in a few padded shapes so that few are compiled."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from vadusa_jax.config import Config, DecodeConfig, ModelConfig
from vadusa_jax.decode.loop import Prompts, slots_needed
from vadusa_jax.decode.sampling import Sampling, row_keys
from vadusa_jax.decode.tree import Tree

PROMPT_BUCKET, SLOTS_BUCKET = 64, 256


class TooLong(ValueError):
    """A text that leaves no room for speech."""


def make_sampling(decode: DecodeConfig) -> Sampling:
    """The sampling settings of a config."""
    return Sampling(decode.temperature, decode.top_k, decode.top_p)


def text_prompt(phones: Sequence[int], separator: int, model: ModelConfig) -> list[int]:
    """`[phones] SEP` in the model's vocabulary, from ids in the vocabulary of text symbols."""
    return [model.eos + 1 + symbol for symbol in (*phones, separator)]


def token_limit(phones: int, decode: DecodeConfig, model: ModelConfig) -> int:
    """Most tokens that a text of so many phones may say, EOS included; raises TooLong when there is room for none."""
    room = model.max_length - (phones + 1)
    if room < 1:
        raise TooLong(
            f"the text has {phones} phones; with the separator the model's max_length of {model.max_length} positions "
            "leaves no room for speech: split the text"
        )
    return min(room, decode.extra_tokens + int(decode.tokens_per_phone * phones))


def text_prompts(
    phones: Sequence[Sequence[int]], separator: int, row_numbers: Sequence[int], seed: int, config: Config
) -> Prompts:
    """A batch of texts, each with the limit that its length gives; raises TooLong."""
    limits = [token_limit(len(p), config.decode, config.model) for p in phones]
    return make_prompts([text_prompt(p, separator, config.model) for p in phones], limits, row_numbers, seed)


def make_prompts(
    tokens: Sequence[Sequence[int]], limits: Sequence[int], row_numbers: Sequence[int], seed: int
) -> Prompts:
    """A batch from prompts of any lengths. A row's number and the seed decide its noise, wherever the row stands."""
    padded = bucket(max(len(t) for t in tokens), PROMPT_BUCKET)
    tokens_BP = np.zeros((len(tokens), padded), np.int32)
    for row, t in zip(tokens_BP, tokens, strict=True):
        row[: len(t)] = t
    lengths = [len(t) for t in tokens]
    return Prompts(
        jnp.asarray(tokens_BP),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(limits, jnp.int32),
        row_keys(seed, np.asarray(row_numbers, np.uint32)),
    )


def slots_for(prompts: Prompts, tree: Tree) -> int:
    """Cache slots, of a compiled size, that are enough for every row with this tree."""
    return slots_bucket(max(slots_needed(int(n), 0, tree) for n in np.asarray(prompts.length_B + prompts.limit_B)))


def slots_bucket(slots: int) -> int:
    """Cache slots rounded up to a compiled size."""
    return bucket(slots, SLOTS_BUCKET)


def bucket(length: int, size: int) -> int:
    """`length` rounded up to a multiple of `size`."""
    return -(-length // size) * size
