"""A codec whose sound is made by a renderer of ours: semantic tokens become audible, in the timbre of a reference.

The role that CTX-vec2wav (arXiv 2306.07547) has for such tokens: what is said comes from the tokens, who says it from
the reference.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from vadusa_jax import config as configs
from vadusa_jax.speech.codec import INNER, Codec, codec_folder, load_codec
from vadusa_jax.speech.fsq import CodecConfig
from vadusa_jax.speech.renderer import Renderer, new_renderer


@dataclasses.dataclass(frozen=True)
class RenderedCodec:
    """Another codec's tokens, made audible by a renderer that was trained on them: HuBERT's k-means centres, say."""

    inner: Codec
    renderer: Renderer

    @property
    def frame_rate(self) -> float:
        return self.inner.frame_rate

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def sample_rate(self) -> int:
        return self.inner.sample_rate

    @property
    def receptive_field(self) -> int:
        return self.renderer.receptive_field

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        return self.inner.encode(wave_P)

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        return self.renderer.decode(tokens_T)

    def like(self, wave_P: np.ndarray) -> "RenderedCodec":
        return dataclasses.replace(self, renderer=self.renderer.like(wave_P))

    def save(self, folder: str | Path) -> None:
        """Writes `codec.json`, the folder of the inner codec and one float16 safetensors file per part."""
        with codec_folder(folder, "rendered", dataclasses.asdict(self.renderer.config)) as fresh:
            self.inner.save(fresh / INNER)
            self.renderer.save(fresh)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> "RenderedCodec":
        renderer = new_renderer(configs.from_dict(CodecConfig, config), seed=None)
        return cls(load_codec(folder / INNER), renderer.loaded(folder))


def sizes_for(codec: Codec, sizes: CodecConfig) -> CodecConfig:
    """`sizes` with the vocabulary and the rates of a codec; frames of about 10 ms that a token is a multiple of.

    Raises ValueError for a codec whose tokens are no whole number of samples, such as acoustic BPE: give its inner one.
    """
    samples = codec.sample_rate / codec.frame_rate
    stack = next((n for n in range(1, 65) if samples % n == 0 and samples / n <= codec.sample_rate / 80), None)
    if stack is None:
        raise ValueError(f"a token of this codec is {samples:.2f} samples, which are not a whole number of frames")
    hop, n_fft = int(samples) // stack, 2 ** round(math.log2(codec.sample_rate / 16))
    return dataclasses.replace(
        sizes, sample_rate=codec.sample_rate, hop=hop, stack=stack, n_fft=n_fft, vocoder_fft=4 * hop, levels=(),
        vocab=codec.vocab_size,
    )  # fmt: skip
