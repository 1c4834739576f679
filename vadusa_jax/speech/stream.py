"""Speech tokens -> sound while they are still being said: overlapping windows around any codec.

A stretch of tokens is decoded together with the tokens around it that its sound depends on (`Codec.receptive_field`),
and only its own sound is kept. So the stretches in a row are the waveform of the whole utterance.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from vadusa_jax.speech.codec import Codec, plain

FIRST = 8  # tokens of the first stretch
FADE = 1  # tokens over which a stretch takes over from the one before, where the two can differ


def render(
    codec: Codec, chunks: Iterable[np.ndarray], lookahead: int | None = None, first: int = FIRST, largest: int = 64
) -> Iterator[np.ndarray]:
    """Chunks of int tokens [n] of one utterance (any n, without EOS) -> float32 waves that follow each other.

    Together they have exactly the samples of `codec.decode` of all tokens. Stretches are cut by the number of tokens
    alone, so the chunks never change the sound. Each is twice as long as the one before, which keeps a listener
    supplied when tokens come at least twice as fast as they are played; no chunks give no waves.

    Args:
        lookahead: tokens after a stretch that must be known before it is given out. By default all that can matter:
            the wave is then that of the whole, to float rounding. With fewer, sound comes sooner, the last known token
            stands for the unknown ones, and stretches are cross-faded: the wave differs near the joins.
        first: tokens of the first stretch. Tokens here are those of the sound: acoustic BPE units count as what they
            stand for.
        largest: tokens of the largest stretch; the larger, the less is decoded twice.

    Raises ValueError for sizes that are none, and what `codec.decode` raises.
    """
    codec, chunks = plain(codec, chunks)
    field, hop = codec.receptive_field, round(codec.sample_rate / codec.frame_rate)
    lookahead = field if lookahead is None else min(lookahead, field)
    if lookahead < 0 or not 0 < first <= largest:
        raise ValueError(f"need lookahead >= 0 and 0 < first <= largest, got {lookahead}, {first} and {largest}")
    fade = FADE if lookahead < field else 0
    size, past = first, 0  # of the next stretch, and of the tokens before it in `seen_T`
    seen_T, tail_P = np.zeros(0, np.int32), np.zeros(0, np.float32)
    for chunk_T in chunks:
        seen_T = np.concatenate([seen_T, np.asarray(chunk_T, np.int32)])
        while len(seen_T) >= past + size + lookahead:
            window_T = np.pad(seen_T[: past + size + lookahead], (0, field - lookahead), mode="edge")
            wave_P = codec.decode(window_T)[past * hop :]
            yield _fade(tail_P, wave_P[: size * hop])
            tail_P = wave_P[size * hop : (size + fade) * hop]
            dropped = max(0, past + size - field)
            seen_T, past, size = seen_T[dropped:], past + size - dropped, min(2 * size, largest)
    if len(seen_T) > past:  # here the utterance really ends
        yield _fade(tail_P, codec.decode(seen_T)[past * hop :])


def _fade(tail_P: np.ndarray, wave_P: np.ndarray) -> np.ndarray:
    """`wave_P`, whose start comes out of what the stretch before it expected there."""
    count = min(len(tail_P), len(wave_P))
    share_P = (np.arange(count, dtype=np.float32) + 0.5) / max(count, 1)
    return np.concatenate([wave_P[:count] * share_P + tail_P[:count] * (1 - share_P), wave_P[count:]])
