"""Waveform <-> speech tokens, behind one protocol."""

from vadusa_jax.speech.codec import Codec, FsqCodec, load_codec
from vadusa_jax.speech.features import BadAudio, check_wave, read_audio, read_samples

__all__ = ["BadAudio", "Codec", "FsqCodec", "check_wave", "load_codec", "read_audio", "read_samples"]
