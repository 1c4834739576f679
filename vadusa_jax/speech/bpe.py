"""Acoustic BPE: byte-pair encoding of speech tokens (arXiv 2310.14580).

Tokens that often follow each other become one unit, so that a language model decodes fewer steps for the same speech.
Each token is written as one character, and the `tokenizers` library does the rest. Units 0 .. V-1 are the V tokens
themselves, so that anything the codec says can be said in units, and back without loss.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from vadusa_jax.speech.codec import INNER, Codec, codec_folder, load_codec

FIRST_CHARACTER = 0x10000  # of token 0; from here on every code point is one character, without surrogates
FILE = "units.json"


@dataclasses.dataclass(frozen=True)
class Units:
    """A vocabulary of units and how they are made of tokens."""

    tokenizer: Tokenizer

    @functools.cached_property
    def tokens_of(self) -> list[np.ndarray]:
        """The tokens of each unit."""
        names = (self.tokenizer.id_to_token(unit) for unit in range(self.tokenizer.get_vocab_size()))
        return [_from_text(name) for name in names]

    def encode(self, tokens_T: np.ndarray) -> np.ndarray:
        """Int tokens [T] -> int32 units [U], U <= T; ValueError for a token that the vocabulary does not have."""
        units_U = np.array(self.tokenizer.encode(_to_text(tokens_T)).ids, np.int32)
        if sum(len(self.tokens_of[unit]) for unit in units_U) != len(tokens_T):  # `tokenizers` drops what it lacks
            raise ValueError(f"tokens up to {max(tokens_T)}: the units were made for a smaller vocabulary")
        return units_U

    def decode(self, units_U: np.ndarray) -> np.ndarray:
        """Units [U] -> int32 tokens [T]."""
        units_U = np.asarray(units_U, np.int32)
        if units_U.size and not 0 <= units_U.min() <= units_U.max() < len(self.tokens_of):
            raise ValueError(f"units {units_U.min()}..{units_U.max()} are not all in 0..{len(self.tokens_of) - 1}")
        return np.concatenate([np.zeros(0, np.int32), *(self.tokens_of[unit] for unit in units_U)])


def train_units(streams: Iterable[np.ndarray], tokens: int, vocab_size: int, longest: int = 16) -> Units:
    """Units of the token streams [T] of a corpus, one stream an utterance.

    Args:
        streams: tokens 0 .. `tokens` - 1.
        tokens: vocabulary of the codec.
        vocab_size: units, the single tokens included; fewer are made where no pair comes twice.
        longest: tokens of the longest unit: a long silence would otherwise become units of many seconds.
    """
    if vocab_size < tokens:
        raise ValueError(f"{vocab_size} units cannot hold the {tokens} tokens of the codec")
    tokenizer = Tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=list(_to_text(range(tokens))),
        limit_alphabet=tokens,
        max_token_length=longest,
    )
    tokenizer.train_from_iterator(map(_to_text, streams), trainer)
    return Units(tokenizer)


@dataclasses.dataclass(frozen=True)
class BpeCodec:
    """Any codec, heard and spoken in units. Its `frame_rate` is an average over the speech that they were made of."""

    inner: Codec
    units: Units
    tokens_per_unit: float

    @property
    def frame_rate(self) -> float:
        return self.inner.frame_rate / self.tokens_per_unit

    @property
    def vocab_size(self) -> int:
        return len(self.units.tokens_of)

    @property
    def sample_rate(self) -> int:
        return self.inner.sample_rate

    @property
    def receptive_field(self) -> int:
        return math.ceil(self.inner.receptive_field / self.tokens_per_unit)  # on average: `stream` counts exactly

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        return self.units.encode(self.inner.encode(wave_P))

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        return self.inner.decode(self.units.decode(tokens_T))

    def like(self, wave_P: np.ndarray) -> "BpeCodec":
        return dataclasses.replace(self, inner=self.inner.like(wave_P))

    def save(self, folder: str | Path) -> None:
        """Writes `codec.json`, the units and the folder of the inner codec."""
        with codec_folder(folder, "bpe", {"tokens_per_unit": self.tokens_per_unit}) as fresh:
            self.units.tokenizer.save(str(fresh / FILE))
            self.inner.save(fresh / INNER)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> "BpeCodec":
        return cls(load_codec(folder / INNER), Units(Tokenizer.from_file(str(folder / FILE))), **config)


def _to_text(tokens: Iterable[int]) -> str:
    return "".join(chr(FIRST_CHARACTER + int(token)) for token in tokens)


def _from_text(text: str) -> np.ndarray:
    return np.array([ord(character) - FIRST_CHARACTER for character in text], np.int32)
