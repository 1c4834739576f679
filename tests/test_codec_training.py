"""Laws of training codecs: batches hold whole sentences or crops, tones are learned, tokens stay when they should."""

import dataclasses

import numpy as np
import pytest
from toys import THOUSAND, noise, toy_codec

from vadusa_jax.speech.recordings import BatchSizes, Recording, References, crops, sentence_rows
from vadusa_jax.speech.rendered import RenderedCodec, sizes_for
from vadusa_jax.speech.stage import CodecTraining
from vadusa_jax.speech.training import train_decoder, train_tokens, train_vocoder

RATE = THOUSAND.sample_rate


# batches


def recordings(count: int = 9) -> list[Recording]:
    return [Recording(noise(4000 + 700 * i, seed=i), [1 + i] * (i + 1)) for i in range(count)]


def test_rows_hold_whole_sentences_with_their_phones():
    training = BatchSizes(row_seconds=2.0, rows=3)
    sentences = {r.wave_P[:50].tobytes(): r for r in recordings()}
    batch = next(sentence_rows(recordings(), THOUSAND, training))
    for wave_P, mask_T, phones_L in zip(batch["wave_BP"], batch["mask_BT"], batch["phones_BL"], strict=True):
        at, spelled = 0, []
        while at < mask_T.sum():
            sentence = sentences[wave_P[at * 320 :][:50].tobytes()]
            assert (wave_P[at * 320 :][: len(sentence.wave_P)] == sentence.wave_P).all()
            at, spelled = at + -(-len(sentence.wave_P) // 320), spelled + list(sentence.phones)
        assert at == mask_T.sum() and (mask_T[:at] == 1).all() and not wave_P[at * 320 :].any()
        assert phones_L[: len(spelled)].tolist() == spelled and not phones_L[len(spelled) :].any()
        assert mask_T.mean() > 0.8


def test_crops_are_sound_where_the_mask_says_so_and_silence_elsewhere():
    batch = next(crops(recordings(), THOUSAND, BatchSizes(crop_tokens=20, margin_tokens=4)))
    assert batch["wave_BP"].shape == (8, 28 * 320) and batch["mask_BT"].shape == (8, 28)
    loud_BT = np.abs(batch["wave_BP"]).reshape(8, 28, 320).max(axis=-1) > 0
    assert (loud_BT == batch["mask_BT"]).all() and 0 < loud_BT.mean() < 1


def test_batches_repeat_by_seed():
    for batches in (sentence_rows, crops):
        first, second = (next(batches(recordings(), THOUSAND, BatchSizes(), seed=3)) for _ in range(2))
        assert all((first[key] == second[key]).all() for key in first)


def test_sentences_that_fit_no_row_are_an_error():
    with pytest.raises(ValueError, match=r"row_seconds 0\.1"):
        next(sentence_rows(recordings(), THOUSAND, BatchSizes(row_seconds=0.1)))


def test_references_are_of_the_same_speaker_and_not_the_sentence_itself():
    spoken = [
        dataclasses.replace(r, speaker="ab"[i % 2], wave_P=np.full(4000, i, np.float32))
        for i, r in enumerate(recordings())
    ]
    references, rng = References(spoken, THOUSAND, BatchSizes(reference_seconds=0.5)), np.random.default_rng(0)
    for i in [*range(9)] * 5:
        drawn = references.draw(i, rng)
        assert len(drawn) == 8000 and (drawn == drawn[0]).all() and drawn[0] != i and drawn[0] % 2 == i % 2


# what is learned


class Loudness:
    """A codec of one bit: whether there is sound."""

    frame_rate, vocab_size, sample_rate, receptive_field = 25.0, 2, 16_000, 0

    def encode(self, wave_P: np.ndarray) -> np.ndarray:
        frames = np.resize(wave_P, (-(-len(wave_P) // 640), 640))
        return (np.abs(frames).max(axis=1) > 0.01).astype(np.int32)


@pytest.mark.slow
def test_the_tokens_of_any_codec_become_audible():
    seconds = np.arange(RATE) / RATE
    beep = (0.3 * np.sin(2 * np.pi * 700 * seconds) * (seconds < 0.5)).astype(np.float32)
    inner = Loudness()
    sizes = sizes_for(inner, THOUSAND)
    assert (sizes.hop, sizes.stack, sizes.vocab, sizes.levels) == (160, 4, 2, ())
    training = CodecTraining(
        steps=150, batch=BatchSizes(row_seconds=1.0, rows=1, crops=2, crop_tokens=12, margin_tokens=4),
        judge_width=8, judge_layers=1,
    )  # fmt: skip
    tones = [Recording(beep, [1], tokens_T=inner.encode(beep))] * 2
    renderer, told = train_decoder(tones, sizes, training)
    codec, _ = train_vocoder(RenderedCodec(inner, renderer), tones, training)
    assert told["mel"] < 1.0
    made = codec.decode(codec.encode(beep))
    assert len(made) == RATE and np.abs(made[:7000]).mean() > 5 * np.abs(made[9000:]).mean()


@pytest.mark.slow
def test_a_codec_learns_another_speaker_and_keeps_the_tokens_of_one():
    codec = toy_codec(THOUSAND)
    seconds = np.arange(RATE) / RATE
    waves = [(level * np.sin(2 * np.pi * 500 * seconds)).astype(np.float32) for level in (0.02, 0.5)]
    spoken = [Recording(wave_P, [1], speaker) for wave_P, speaker in zip(waves, "ab", strict=True) for _ in "12"]
    training = CodecTraining(
        steps=60, batch=BatchSizes(row_seconds=1.0, rows=2, crops=2, crop_tokens=12, margin_tokens=4)
    )
    before_T, config, same = codec.encode(waves[1]), dataclasses.replace(codec.config, timbre=8), {}
    for keep in ("", "b"):
        learned = [dataclasses.replace(recording, kept=recording.speaker == keep) for recording in spoken]
        after, told = train_tokens(learned, 2, config, training, codec)
        assert (codec.encode(waves[1]) == before_T).all(), "the codec that was started from has changed"
        assert told["steps"] == 48 and ("off" in told) == bool(keep) and after.renderer.vocoder is not None
        quiet_P, loud_P = (after.like(wave_P).decode(before_T) for wave_P in waves)
        assert np.abs(quiet_P - loud_P).max() > 1e-3
        same[keep] = (after.encode(waves[1]) == before_T).mean()
    assert same["b"] > 0.9 > same[""], same


def test_a_codec_whose_tokens_are_no_whole_frames_is_named():
    inner = Loudness()
    inner.frame_rate = 33.3
    with pytest.raises(ValueError, match="not a whole number of frames"):
        sizes_for(inner, THOUSAND)


@pytest.mark.slow
def test_both_stages_learn_two_tones_and_the_second_leaves_the_tokens_alone():
    seconds, pitches = np.arange(RATE) / RATE, (300, 2000)
    waves = [(0.3 * np.sin(2 * np.pi * hz * seconds)).astype(np.float32) for hz in pitches]
    tones = [Recording(wave_P, [1 + i]) for i, wave_P in enumerate(waves)]
    training = CodecTraining(
        steps=401, batch=BatchSizes(row_seconds=1.0, rows=2, crops=4, crop_tokens=16, margin_tokens=4),
        reader_width=16, reader_layers=1, judge_width=16, judge_layers=1, deceiving_weight=0.02,
    )  # fmt: skip
    half, told = train_tokens(tones, 3, THOUSAND, training)
    assert half.renderer.vocoder is None and told["mel"] < 1.0  # a smoothed figure that starts near 4
    whole, _ = train_vocoder(half, tones, training)
    for tone, hz in zip(tones, pitches, strict=True):
        tokens_T = whole.encode(tone.wave_P)
        assert (tokens_T == half.encode(tone.wave_P)).all()
        spectrum = np.abs(np.fft.rfft(whole.decode(tokens_T)))
        assert abs(int(spectrum.argmax()) - hz) <= 60
