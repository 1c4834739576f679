"""Codecs and features with public weights, through `transformers` (extra `[codecs]`), from a hub name or a folder.

PUBLISHED tells what is known of each kind; `--model` of `python -m vadusa_jax.train_codec hub` (codecs) and `kmeans`
(features) takes a kind, any other hub name, or a folder that `save_pretrained` wrote. A loaded model is saved whole
with its codec, so that nothing is fetched when it is used.

Audio longer than WINDOW_S is cut into windows of equal length that overlap by what matters around a token, and run as
batches; a convolutional model gives the tokens of the whole, the others nearly so.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoModel, SeamlessM4TFeatureExtractor

from vadusa_jax.speech.codec import codec_folder
from vadusa_jax.speech.features import check_wave, resample

WINDOW_S = 30.0
WINDOW_BATCH = 4  # windows run at once
MODEL = "model"  # folder of the weights inside a codec's folder


@dataclasses.dataclass(frozen=True)
class Published:
    """The weights that a kind is best known by, with the facts that their authors state."""

    hub_name: str
    licence: str  # of the weights
    sample_rate: int  # of the sound that comes out, or of what goes in where none does
    frame_rate: float
    vocab_size: int = 0  # of one codebook; 0: features, whose vocabulary k-means decides
    codebooks: int = 0
    reach_s: float = 1.0  # seconds on each side of a token that it depends on, or nearly so


PUBLISHED = {
    "encodec": Published("facebook/encodec_24khz", "MIT (code); none stated for weights", 24_000, 75.0, 1024, 32),
    "dac": Published("descript/dac_16khz", "MIT", 16_000, 50.0, 1024, 12, reach_s=0.5),
    "mimi": Published("kyutai/mimi", "CC-BY-4.0", 24_000, 12.5, 2048, 32, reach_s=2.0),
    "wavtokenizer": Published("swiss-ai/wavtokenizer-large-unify-40token", "MIT", 24_000, 40.0, 4096, 1),
    "xcodec2": Published("HKUSTAudio/xcodec2-hf", "CC-BY-NC-4.0", 16_000, 50.0, 65_536, 1),
    "neucodec": Published("neuphonic/neucodec", "Apache-2.0", 24_000, 50.0, 65_536, 1),
    "hubert": Published("facebook/hubert-base-ls960", "Apache-2.0", 16_000, 50.0, reach_s=2.0),
    "wav2vec2": Published("facebook/wav2vec2-base", "Apache-2.0", 16_000, 50.0, reach_s=2.0),
    "wavlm": Published("microsoft/wavlm-base-plus", "CC-BY-SA-3.0", 16_000, 50.0, reach_s=2.0),
}


@dataclasses.dataclass(frozen=True)
class HubCodec:
    """A neural codec. The protocol's tokens are those of its first codebook; `encode_all` gives `codebooks` of them."""

    model: torch.nn.Module
    codebooks: int = 1

    def __post_init__(self):
        config = self.model.config
        if getattr(config, "audio_channels", 1) != 1 or getattr(config, "normalize", False):
            raise ValueError(f"{config.model_type} with {config.audio_channels} channels: only mono models are read")
        if not 1 <= self.codebooks <= _codebooks(config):
            raise ValueError(f"this {config.model_type} has {_codebooks(config)} codebooks, not {self.codebooks}")

    @property
    def frame_rate(self) -> float:
        return self._input_rate / self._hop

    @property
    def vocab_size(self) -> int:
        config = self.model.config
        levels = getattr(config, "quantization_levels", None)
        return int(np.prod(levels)) if levels else config.codebook_size

    @property
    def sample_rate(self) -> int:
        return getattr(self.model.config, "output_sampling_rate", None) or self.model.config.sampling_rate

    @property
    def receptive_field(self) -> int:
        return round(PUBLISHED[self.model.config.model_type].reach_s * self.frame_rate)

    @property
    def _input_rate(self) -> int:
        return getattr(self.model.config, "input_sampling_rate", None) or self.model.config.sampling_rate

    @property
    def _hop(self) -> int:
        config = self.model.config
        names = ("encoder_hop_length", "frame_size", "hop_length")
        return next(int(getattr(config, name)) for name in names if hasattr(config, name))

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        """Float32 mono wave [P] -> int32 tokens [T] of the first codebook; raises BadAudio."""
        return self._encode(wave_P, 1)[0]

    def encode_all(self, wave_P: np.ndarray) -> np.ndarray:
        """Float32 mono wave [P] -> int32 tokens [codebooks, T]; raises BadAudio."""
        return self._encode(wave_P, self.codebooks)

    def _encode(self, wave_P: np.ndarray, codebooks: int) -> np.ndarray:
        wave_P = check_wave(wave_P, self.sample_rate, self.sample_rate, shortest=1 / self.frame_rate)
        count = -(-len(wave_P) * self._input_rate // (self.sample_rate * self._hop))
        wave_P = resample(wave_P, self.sample_rate, self._input_rate)
        wave_P = _fit(wave_P, count * self._hop)
        window = round(WINDOW_S * self.frame_rate)
        return in_windows(lambda x_BP: self.codes(x_BP, codebooks), wave_P, self._hop, window, self.receptive_field)

    def decode(self, tokens_T: np.ndarray) -> np.ndarray:
        """Tokens [T] of the first codebook -> float32 wave, as well as that codebook alone can tell it."""
        return self.decode_all(np.asarray(tokens_T)[None])

    def like(self, wave_P: np.ndarray) -> "HubCodec":
        return self

    def decode_all(self, tokens_QT: np.ndarray) -> np.ndarray:
        """Tokens [Q, T] of the first Q codebooks, any Q -> float32 wave [T * sample_rate / frame_rate]."""
        tokens_QT = np.asarray(tokens_QT, np.int64)
        if tokens_QT.ndim != 2 or not 1 <= len(tokens_QT) <= _codebooks(self.model.config):
            raise ValueError(f"expected tokens [Q, T] of 1 to {self.codebooks} codebooks, got {tokens_QT.shape}")
        if tokens_QT.size and not 0 <= tokens_QT.min() <= tokens_QT.max() < self.vocab_size:
            raise ValueError(f"tokens {tokens_QT.min()}..{tokens_QT.max()} are not all in 0..{self.vocab_size - 1}")
        samples = round(tokens_QT.shape[1] * self.sample_rate / self.frame_rate)
        return _fit(self.waves(tokens_QT[None])[0], samples) if samples else np.zeros(0, np.float32)

    @torch.inference_mode()
    def codes(self, wave_BP: np.ndarray, codebooks: int) -> np.ndarray:
        """Waves [B, T * hop] at the encoder's rate -> int32 tokens [B, codebooks, T]."""
        model, wave_B1P, count = self.model, torch.from_numpy(wave_BP)[:, None], wave_BP.shape[1] // self._hop
        match model.config.model_type:
            case "encodec":
                known = model.quantizer.get_num_quantizers_for_bandwidth
                enough = next(b for b in sorted(model.config.target_bandwidths) if known(b) >= codebooks)
                tokens_BQT = model.encode(wave_B1P, bandwidth=enough).audio_codes[0]
            case "dac":
                tokens_BQT = model.encode(wave_B1P, n_quantizers=codebooks).audio_codes
            case "mimi":
                tokens_BQT = model.encode(wave_B1P, num_quantizers=codebooks).audio_codes
            case "xcodec2":
                padded_BP = np.pad(wave_BP, ((0, 0), (self._hop // 2, self._hop // 2)))
                tokens_BQT = model.encode(wave_B1P, input_features=_filter_bank(padded_BP)).audio_codes
            case "neucodec":  # its filter bank falls one token short of the wave
                wave_BP = np.pad(wave_BP, ((0, 0), (0, self._hop)))
                wave_B1P = torch.from_numpy(wave_BP)[:, None]
                tokens_BQT = model.encode(wave_B1P, input_features=_filter_bank(wave_BP)).audio_codes
            case _:
                tokens_BQT = model.encode(wave_B1P).audio_codes
        return tokens_BQT[:, :codebooks, :count].to(torch.int32).numpy()

    @torch.inference_mode()
    def waves(self, tokens_BQT: np.ndarray) -> np.ndarray:
        """Tokens [B, Q, T] -> float32 waves [B, P], P as the model makes it."""
        tokens_BQT = torch.from_numpy(tokens_BQT)
        if self.model.config.model_type == "encodec":
            wave = self.model.decode(tokens_BQT[None], [None]).audio_values
        else:
            wave = self.model.decode(audio_codes=tokens_BQT).audio_values
        return wave.reshape(len(tokens_BQT), -1).numpy()

    def save(self, folder: str | Path) -> None:
        """Writes `codec.json` and the model."""
        with codec_folder(folder, "hub", {"codebooks": self.codebooks}) as fresh:
            self.model.save_pretrained(fresh / MODEL)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> "HubCodec":
        return cls(read_model(folder / MODEL), **config)

    @classmethod
    def fetch(cls, name: str, codebooks: int) -> "HubCodec":
        """The codec of a kind, a hub name or a folder; ValueError for what is no codec."""
        return cls(read_model(name, codecs=True), codebooks)


@dataclasses.dataclass(frozen=True)
class HubFeatures:
    """The hidden states of one layer of a self-supervised model: HuBERT, wav2vec 2.0 or WavLM.

    Frames are centred on their 20 ms; layer 0 is what goes into the first layer.
    """

    model: torch.nn.Module
    layer: int
    normalize: bool  # to zero mean and unit variance, as the model was trained

    def __post_init__(self):
        if not 0 <= self.layer <= self.model.config.num_hidden_layers:
            raise ValueError(f"layer {self.layer} of a model with {self.model.config.num_hidden_layers} layers")

    @property
    def frame_rate(self) -> float:
        return self.sample_rate / self._hop

    @property
    def sample_rate(self) -> int:
        return 16_000  # of all models of this kind; their configs do not tell

    @property
    def reach(self) -> int:
        return round(PUBLISHED[self.model.config.model_type].reach_s * self.frame_rate)

    @property
    def _hop(self) -> int:
        return int(np.prod(self.model.config.conv_stride))

    def extract(self, wave_P: np.ndarray) -> np.ndarray:
        """Float32 mono wave [P] -> float32 frames [ceil(P / 320), D]; raises BadAudio."""
        wave_P = check_wave(wave_P, self.sample_rate, self.sample_rate, shortest=1 / self.frame_rate)
        if self.normalize:
            wave_P = (wave_P - wave_P.mean()) / np.sqrt(wave_P.var() + 1e-7)
        wave_P = _fit(wave_P, -(-len(wave_P) // self._hop) * self._hop)
        window = round(WINDOW_S * self.frame_rate)
        return in_windows(self.states, wave_P, self._hop, window, self.reach).T

    @torch.inference_mode()
    def states(self, wave_BP: np.ndarray) -> np.ndarray:
        """Waves [B, T * hop] -> hidden states [B, D, T]."""
        reach = 1  # samples that one frame sees
        for kernel, stride in zip(
            self.model.config.conv_kernel[::-1], self.model.config.conv_stride[::-1], strict=True
        ):
            reach = (reach - 1) * stride + kernel
        left = (reach - self._hop) // 2
        padded_BP = np.pad(wave_BP, ((0, 0), (left, reach - self._hop - left)))
        states = self.model(torch.from_numpy(padded_BP), output_hidden_states=True).hidden_states
        return states[self.layer].transpose(1, 2).numpy()

    def save(self, folder: Path) -> dict[str, Any]:
        self.model.save_pretrained(folder / MODEL)
        return {"layer": self.layer, "normalize": self.normalize}

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> "HubFeatures":
        return cls(read_model(folder / MODEL), **config)

    @classmethod
    def fetch(cls, name: str, layer: int) -> "HubFeatures":
        """A layer of a kind, a hub name or a folder; the layers above are dropped. ValueError for what has none."""
        model = read_model(name, codecs=False)
        name = PUBLISHED[name].hub_name if name in PUBLISHED else name
        features = cls(model, layer, bool(AutoFeatureExtractor.from_pretrained(name).do_normalize))
        # One layer more than is read: some models put a norm behind the last, which inner layers do not have.
        model.encoder.layers = model.encoder.layers[: layer + 1]
        model.config.num_hidden_layers = len(model.encoder.layers)
        return features


def read_model(name: str | Path, codecs: bool | None = None) -> torch.nn.Module:
    """A model by kind, hub name or folder, ready to run; ValueError when it is not of PUBLISHED, or not a codec."""
    name = PUBLISHED[name].hub_name if name in PUBLISHED else name
    model = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
    kind = model.config.model_type
    if kind not in PUBLISHED or codecs not in (None, PUBLISHED[kind].vocab_size > 0):
        known = [k for k, facts in PUBLISHED.items() if codecs in (None, facts.vocab_size > 0)]
        raise ValueError(f"{name} is a model of kind {kind!r}, here {known} can be used")
    return model


def in_windows(
    run: Callable[[np.ndarray], np.ndarray], wave_P: np.ndarray, hop: int, window: int, context: int
) -> np.ndarray:
    """`run` on a wave of any length: [B, n * hop] -> [B, ..., n], joined to [..., T].

    Windows have `window` frames each, all the same, and every frame comes from a window that shows `context` frames on
    each side of it (or the end of the wave).
    """
    count = len(wave_P) // hop
    if count <= window:
        return run(wave_P[None])[0]
    starts = [*range(0, count - window, max(window - 2 * context, 1)), count - window]
    cuts = [0, *(start + context for start in starts[1:]), count]
    parts = []
    for i in range(0, len(starts), WINDOW_BATCH):
        some = starts[i : i + WINDOW_BATCH]
        made = run(np.stack([wave_P[start * hop : (start + window) * hop] for start in some]))
        parts += [x[..., cuts[j] - starts[j] : cuts[j + 1] - starts[j]] for j, x in enumerate(made, start=i)]
    return np.concatenate(parts, axis=-1)


def _codebooks(config: Any) -> int:
    names = ("num_quantizers", "n_codebooks")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1)


def _fit(wave_P: np.ndarray, samples: int) -> np.ndarray:
    return np.pad(wave_P[:samples], (0, max(samples - len(wave_P), 0)))


def _filter_bank(wave_BP: np.ndarray) -> torch.Tensor:
    """What the semantic encoder of X-Codec 2 and NeuCodec hears: Kaldi's filter bank, two frames of 10 ms in one.

    Their own feature extractors compute the same with torchaudio, whose wheels want CUDA.
    """
    extractor = SeamlessM4TFeatureExtractor(feature_size=80, num_mel_bins=80, sampling_rate=16_000, stride=2)
    return extractor(list(wave_BP), sampling_rate=16_000, return_tensors="pt")["input_features"]
