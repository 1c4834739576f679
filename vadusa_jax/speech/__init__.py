"""Waveform <-> speech tokens, behind one protocol."""

from vadusa_jax.speech.codec import Codec, FsqCodec, load_codec
from vadusa_jax.speech.features import BadAudio, read_audio

__all__ = ["BadAudio", "Codec", "FsqCodec", "load_codec", "read_audio"]
