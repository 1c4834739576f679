"""A voice: the folder that holds everything needed to speak, and text to waveform in one call.

config.json  vocabulary.json  model.safetensors  trees.json  codec/  card.md
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from vadusa_jax.config import Config, from_dict, to_json
from vadusa_jax.decode.loop import FINISH, Settings, generate, slots_needed
from vadusa_jax.decode.modes import Mode
from vadusa_jax.decode.prompts import make_prompts, make_sampling, slots_bucket, text_prompt, token_limit
from vadusa_jax.decode.trees import Trees
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.weights import load_weights, save_weights
from vadusa_jax.speech import Codec, load_codec
from vadusa_jax.text import SEP, Vocabulary, phonemize

DEMO_MODEL = Path(__file__).parent / "assets" / "demo"


@dataclasses.dataclass(frozen=True)
class Spoken:
    """One spoken text."""

    text: str
    phones: str
    tokens: np.ndarray  # int32 [n] speech tokens, without EOS
    wave: np.ndarray  # float32 [P]; empty when the model said nothing
    sample_rate: int
    finish: str  # why it ended: "eos", "length" or "repeat"
    steps: int  # backbone passes, prefill included
    block_of: np.ndarray  # int32: the pass that decided each token, EOS included if it was said
    wall_s: float  # seconds from text to wave; texts of one batch share it evenly


@dataclasses.dataclass(frozen=True)
class Voice:
    """A language model with its vocabulary, trees and codec."""

    config: Config
    lm: SpeechLM
    vocabulary: Vocabulary
    trees: Trees
    codec: Codec

    def __post_init__(self):
        model = self.config.model
        if self.codec.vocab_size != model.speech_vocab:
            raise ValueError(f"the codec has {self.codec.vocab_size} tokens, the config says {model.speech_vocab}")
        if len(self.vocabulary) > model.text_vocab:
            raise ValueError(f"the vocabulary has {len(self.vocabulary)} symbols, the config allows {model.text_vocab}")
        self.trees.check(self.config.heads.count, model.output_vocab)

    @classmethod
    def load(cls, folder: str | Path) -> "Voice":
        """Reads a voice's folder; what is missing or does not match is an error that names it."""
        folder = Path(folder)
        for name in ("config.json", "vocabulary.json", "model.safetensors", "trees.json", "codec"):
            if not (folder / name).exists():
                raise FileNotFoundError(
                    f"{folder} has no {name}: not a voice; `python -m vadusa_jax.export` makes one of a training run"
                )
        config, lm = load_lm(folder)
        return cls(
            config,
            lm,
            Vocabulary.load(folder / "vocabulary.json"),
            Trees.load(folder / "trees.json"),
            load_codec(folder / "codec"),
        )

    def speak(
        self, texts: Sequence[str], mode: Mode, seed: int = 0, batch: int | None = None, heads: int | None = None
    ) -> list[Spoken]:
        """Speaks the texts, `batch` at a time (default: all at once), in their order.

        Text and seed decide what is said: the same in every batch and beside any other texts.

        Raises:
            UnspeakableText: a text without anything to pronounce; before any decoding.
            TooLong: a text that leaves no room for speech in the model's positions.
        """
        phones = [phonemize(text) for text in texts]
        batch = batch or len(texts)
        spoken = []
        for i in range(0, len(texts), batch):
            spoken += self._speak_batch(texts[i : i + batch], phones[i : i + batch], mode, seed, heads)
        return spoken

    def _speak_batch(
        self, texts: Sequence[str], phones: Sequence[str], mode: Mode, seed: int, heads: int | None
    ) -> list[Spoken]:
        began = time.perf_counter()
        decode, model = self.config.decode, self.config.model
        symbols = [self.vocabulary.encode(p) for p in phones]
        limits = [token_limit(len(s), decode, model) for s in symbols]
        numbers = [zlib.crc32(text.encode()) for text in texts]
        prompts = make_prompts([text_prompt(s, SEP, model) for s in symbols], limits, numbers, seed)
        tree = self.trees.choose(mode, heads)
        needed = max(slots_needed(len(s) + 1, limit, tree) for s, limit in zip(symbols, limits, strict=True))
        settings = Settings(tree, mode.rule, make_sampling(decode), decode.repeat_limit, mode.coupled)
        state = jax.device_get(_said(generate(self.lm, prompts, settings=settings, slots=slots_bucket(needed))))
        rows = []
        for b in range(len(texts)):
            said = state["said"][b, : state["count"][b]].astype(np.int32)
            finish = FINISH[state["finish"][b]]
            tokens = said[:-1] if finish == "eos" else said
            rows.append((tokens, self.codec.decode(tokens), finish, b))
        wall_s = (time.perf_counter() - began) / len(texts)
        return [
            Spoken(
                texts[b],
                phones[b],
                tokens,
                wave,
                self.codec.sample_rate,
                finish,
                int(state["passes"][b]),
                state["step"][b, : state["count"][b]].astype(np.int32),
                wall_s,
            )
            for tokens, wave, finish, b in rows
        ]


def _said(state) -> dict[str, jax.Array]:
    """What the host needs of a final state: everything but the cache."""
    return {
        "said": state.said_BS,
        "step": state.step_BS,
        "count": state.count_B,
        "passes": state.passes_B,
        "finish": state.finish_B,
    }


def load_lm(folder: Path) -> tuple[Config, SpeechLM]:
    """The config and the language model of a voice's folder."""
    config = from_dict(Config, json.loads((folder / "config.json").read_text()))
    lm = SpeechLM(config.model, config.heads, rngs=nnx.Rngs(0))
    load_weights(lm, folder / "model.safetensors")
    return config, lm


def save_lm(folder: Path, config: Config, lm: SpeechLM) -> None:
    """Writes `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(to_json(config))
    save_weights(lm, folder / "model.safetensors")
