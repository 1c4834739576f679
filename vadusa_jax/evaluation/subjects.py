"""What speed is measured on: a voice that says real texts, or a model of a named size with random weights."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vadusa_jax.config import SHAPES, Config, DecodeConfig, HeadsConfig, ModelConfig
from vadusa_jax.decode.prompts import make_prompts
from vadusa_jax.decode.state import Prompts
from vadusa_jax.model.heads import SpeechLM

PROMPT = 160  # positions of a random prompt: about 60 phones and a speech prompt of 2 s
QUEUED = 24  # random rows of the queue
QUEUED_PROMPTS, QUEUED_TOKENS = (20, 80), (40, 160)  # shortest and longest: single words to short sentences
NO_LIMIT = 10**6


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and what it is given to say."""

    shape: str  # name in the table
    lm: SpeechLM
    prompts: Prompts  # the rows of one measurement
    ragged: Prompts  # rows of different lengths for the queue
    decode: DecodeConfig
    trained: bool  # only then do its accepted tokens mean anything

    @property
    def dtype(self) -> str:
        return jnp.dtype(self.lm.backbone.dtype).name


def voice_subject(name: str, lm: SpeechLM, config: Config, prompts: Prompts, dtype: str) -> Subject:
    """A trained model; `prompts` are real texts, whose lengths differ anyway."""
    lm = in_dtype(lm, config.model, config.heads, dtype)
    return Subject(name, lm, prompts, prompts, config.decode, trained=True)


def random_subject(shape: str, heads: HeadsConfig, decode: DecodeConfig, dtype: str, rows: int, tokens: int) -> Subject:
    """Random weights and random prompts; every row says exactly `tokens` tokens, the queue's say as many as drawn."""
    model, rng = SHAPES[shape], np.random.default_rng(0)
    decode = dataclasses.replace(decode, repeat_limit=NO_LIMIT)

    def prompts(lengths: Sequence[int], limits: Sequence[int]) -> Prompts:
        texts = [rng.integers(model.eos + 1, model.vocab, n).tolist() for n in lengths]
        return make_prompts(texts, limits, range(len(texts)), 0, decode, least=limits)  # EOS never comes

    ragged = prompts(*(rng.integers(low, high + 1, QUEUED) for low, high in (QUEUED_PROMPTS, QUEUED_TOKENS)))
    lm = in_dtype(SpeechLM(model, heads, rngs=nnx.Rngs(0)), model, heads, dtype)
    return Subject(shape, lm, prompts([PROMPT] * rows, [tokens] * rows), ragged, decode, trained=False)


def in_dtype(lm: SpeechLM, model: ModelConfig, heads: HeadsConfig, dtype: str) -> SpeechLM:
    """The same model that computes in `dtype` and keeps its parameters in it, so that a step moves no wider ones."""
    params = jax.tree.map(lambda x: x.astype(dtype), nnx.state(lm, nnx.Param))
    graph = nnx.graphdef(nnx.eval_shape(lambda: SpeechLM(model, heads, jnp.dtype(dtype), rngs=nnx.Rngs(0))))
    return nnx.merge(graph, params)
