"""Waveforms and their spectra: reading audio, log-mel features, magnitudes and the inverse STFT.

Every transform uses "same" framing: P samples give exactly P // hop frames, frame t is centred on the middle of hop t,
and what lies outside the wave is silence. So a wave and its features have one length, and silence appended to a wave
never changes the frames that do not touch it.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import soundfile
from scipy.signal import resample_poly

SHORTEST_SECONDS = 0.02  # one token at 50 Hz
TOLERANCE_SECONDS = 0.01  # that a stretch may end after its file: manifests round
MEL_FLOOR = 1e-4  # amplitude, -80 dBFS: what is quieter is silence


class BadAudio(ValueError):
    """Audio that cannot be used; the message names the fault, the limit and the way out."""


def check_wave(
    wave: np.ndarray, rate: int, sample_rate: int, name: str = "wave", shortest: float = SHORTEST_SECONDS
) -> np.ndarray:
    """Float mono `wave_P` at `sample_rate` from a float wave [P] or [P, channels] at `rate`.

    Fixed here: several channels are averaged, another rate is resampled (polyphase), samples beyond +-1 are kept.
    Raises BadAudio: no samples, NaN or infinite samples, or less than `shortest` seconds (one token)
    of sound.
    """
    wave = np.asarray(wave, np.float32)
    if wave.ndim not in (1, 2):
        raise BadAudio(f"{name}: expected samples [P] or [P, channels], got shape {wave.shape}")
    if wave.size == 0:
        raise BadAudio(f"{name}: no samples")
    if not np.isfinite(wave).all():
        raise BadAudio(f"{name}: {np.count_nonzero(~np.isfinite(wave))} samples are NaN or infinite; repair or drop it")
    wave_P = resample(wave.mean(axis=1) if wave.ndim == 2 else wave, rate, sample_rate)
    if len(wave_P) < round(shortest * sample_rate):
        raise BadAudio(f"{name}: {len(wave_P) / sample_rate:.4f} s of sound, at least {shortest:.4g} s are needed")
    return wave_P


def resample(wave_P: np.ndarray, rate: int, sample_rate: int) -> np.ndarray:
    """A float wave at another rate (polyphase, float32); itself where there is nothing to do."""
    if rate == sample_rate or not wave_P.size:
        return wave_P
    return resample_poly(wave_P, sample_rate, rate).astype(np.float32)


def read_samples(path: str | Path, start: float = 0.0, seconds: float | None = None) -> tuple[np.ndarray, int]:
    """Float32 samples [P] or [P, channels] of a stretch of any file soundfile knows, and their rate.

    Raises BadAudio that names the file: it cannot be read, or it ends before its header or `seconds` say.
    """
    try:
        with soundfile.SoundFile(path) as file:
            rate, first = file.samplerate, round(start * file.samplerate)
            wanted = file.frames - first if seconds is None else round(seconds * rate)
            # libsndfile reads what is left of a WAV and tells the sizes; a stream's header holds the largest number.
            declared = re.search(r"^data : (\d+) \(should be (\d+)\)", file.extra_info, re.MULTILINE)
            file.seek(min(first, file.frames))
            wave = file.read(wanted, dtype="float32")
    except (soundfile.SoundFileError, OSError, ValueError, MemoryError) as error:
        raise BadAudio(f"{path}: not readable as audio ({error})") from error
    if len(wave) < wanted - TOLERANCE_SECONDS * rate:
        raise BadAudio(f"{path}: truncated, {len(wave)} samples from {start} s on where {wanted} should be")
    if declared and seconds is None and int(declared[2]) < int(declared[1]) < 0x7FFFF000:
        raise BadAudio(f"{path}: truncated, {declared[2]} bytes of sound where the header says {declared[1]}")
    return wave, rate


def read_audio(path: str | Path, sample_rate: int) -> np.ndarray:
    """Reads any file soundfile knows as mono `wave_P` at `sample_rate`; raises BadAudio that names the file."""
    return check_wave(*read_samples(path), sample_rate, str(path))


@functools.lru_cache
def hann(size: int) -> np.ndarray:
    """The periodic Hann window."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)).astype(np.float32)


@functools.lru_cache
def mel_filters(sample_rate: int, n_fft: int, mels: int) -> np.ndarray:
    """Triangular filters [n_fft // 2 + 1, mels], equally spaced on the Slaney mel scale from 0 Hz to Nyquist.

    Each filter sums to one, so that a band is the weighted mean of the amplitudes under it.
    """
    knee_hz, knee_mel, log_step = 1000.0, 15.0, np.log(6.4) / 27.0  # linear below 1 kHz, logarithmic above

    def to_mel(hz: float) -> float:
        return hz * knee_mel / knee_hz if hz < knee_hz else knee_mel + np.log(hz / knee_hz) / log_step

    mel = np.linspace(0.0, to_mel(sample_rate / 2), mels + 2)
    hz = np.where(mel < knee_mel, mel * knee_hz / knee_mel, knee_hz * np.exp(log_step * (mel - knee_mel)))
    bins = np.linspace(0.0, sample_rate / 2, n_fft // 2 + 1)
    rising = (bins[:, None] - hz[None, :-2]) / np.diff(hz)[None, :-1]
    falling = (hz[None, 2:] - bins[:, None]) / np.diff(hz)[None, 1:]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    return (filters / np.maximum(filters.sum(axis=0, keepdims=True), 1e-8)).astype(np.float32)


def frames(wave_BP: jax.Array, size: int, hop: int) -> jax.Array:
    """Overlapping frames [B, P // hop, size]; frame t is centred on the middle of hop t, silence outside."""
    count = wave_BP.shape[1] // hop
    blocks = -(-size // hop)
    left = (size - hop) // 2
    right = (count - 1 + blocks) * hop - left - count * hop
    padded = jnp.pad(wave_BP[:, : count * hop], ((0, 0), (left, right)))
    hops = padded.reshape(len(wave_BP), count + blocks - 1, hop)
    return jnp.concatenate([hops[:, i : i + count] for i in range(blocks)], axis=-1)[..., :size]


def stft(wave_BP: jax.Array, n_fft: int, hop: int) -> jax.Array:
    """Complex spectrum [B, P // hop, n_fft // 2 + 1] under a Hann window, unscaled."""
    return jnp.fft.rfft(frames(wave_BP, n_fft, hop) * hann(n_fft)[None, None])


def istft(spectrum_BTF: jax.Array, hop: int, mask_BT: jax.Array | None = None) -> jax.Array:
    """The wave [B, T * hop] whose `stft` is nearest to the spectrum (Griffin and Lim, 1984, equation 6).

    `n_fft` must be a multiple of `hop`. Frames where `mask_BT` is 0 count as outside the wave.
    """
    n_fft = 2 * (spectrum_BTF.shape[-1] - 1)
    batch, count = spectrum_BTF.shape[:2]
    mask_BT1 = jnp.ones((batch, count, 1)) if mask_BT is None else mask_BT[..., None]
    window = jnp.asarray(hann(n_fft))[None, None]
    sound = _overlap_add(jnp.fft.irfft(spectrum_BTF) * window * mask_BT1, hop)
    cover = _overlap_add(jnp.square(window) * mask_BT1, hop)
    return sound / jnp.maximum(cover, 1e-6)


def _overlap_add(frames_BTN: jax.Array, hop: int) -> jax.Array:
    batch, count, size = frames_BTN.shape
    blocks = size // hop
    parts = frames_BTN.reshape(batch, count, blocks, hop)
    total = sum(jnp.pad(parts[:, :, i], ((0, 0), (i, blocks - 1 - i), (0, 0))) for i in range(blocks))
    left = (size - hop) // 2
    return total.reshape(batch, -1)[:, left : left + count * hop]


def magnitude(wave_BP: jax.Array, n_fft: int, hop: int) -> jax.Array:
    """Linear spectrum [B, P // hop, n_fft // 2 + 1]: a full-scale sine reads 1 at its bin. Smooth at silence."""
    spectrum = stft(wave_BP, n_fft, hop)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    return jnp.sqrt(power + 1e-12) * (4.0 / n_fft)


def log_mel(wave_BP: jax.Array, sample_rate: int, n_fft: int = 1024, hop: int = 160, mels: int = 80) -> jax.Array:
    """Natural logarithm of the mel amplitudes [B, P // hop, mels], floored at -80 dBFS."""
    mel_BTM = magnitude(wave_BP, n_fft, hop) @ mel_filters(sample_rate, n_fft, mels)
    return jnp.log(jnp.maximum(mel_BTM, MEL_FLOOR))
