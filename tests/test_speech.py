"""Laws of the speech room: spectra are exact, tokens are a bijection, padding changes nothing, bad input has a name."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal
from toys import THOUSAND, noise, toy_codec

from vadusa_jax.speech import BadAudio, features, load_codec, read_audio
from vadusa_jax.speech.convnext import shifted_sum
from vadusa_jax.speech.fsq import Fsq
from vadusa_jax.speech.renderer import BUCKET


@pytest.fixture(scope="module")
def codec():
    return toy_codec(THOUSAND)


# features


@pytest.mark.parametrize(("n_fft", "hop"), [(1024, 160), (640, 160), (512, 128), (256, 64)])
def test_stft_is_the_windowed_transform_of_centred_frames(n_fft, hop):
    wave_P = noise(4000)
    count, left = len(wave_P) // hop, (n_fft - hop) // 2
    padded = np.pad(wave_P[: count * hop].astype(np.float64), (left, n_fft))
    window = signal.get_window("hann", n_fft)
    wanted = np.stack([np.fft.rfft(window * padded[t * hop :][:n_fft]) for t in range(count)])
    np.testing.assert_allclose(features.stft(wave_P[None], n_fft, hop)[0], wanted, atol=2e-5)


def test_istft_inverts_stft_up_to_both_ends():
    wave_P = noise(3200)
    np.testing.assert_allclose(features.istft(features.stft(wave_P[None], 640, 160), 160)[0], wave_P, atol=1e-6)


def test_istft_agrees_with_scipy_on_any_spectrum():
    spectrum_BTF = features.stft(noise(3200)[None], 640, 160) * np.random.default_rng(1).uniform(size=(1, 20, 321))
    transform = signal.ShortTimeFFT(signal.get_window("hann", 640), 160, THOUSAND.sample_rate, phase_shift=None)
    wanted = transform.istft(np.asarray(spectrum_BTF[0], np.complex128).T)
    later = 80 - 160 * transform.p_min  # samples from the centre of its first frame to the centre of ours
    made = features.istft(spectrum_BTF, 160)[0]
    np.testing.assert_allclose(made[640:2400], wanted[640 - later : 2400 - later], atol=1e-5)


def test_istft_leaves_masked_frames_out():
    spectrum_BTF = features.stft(noise(3200)[None], 640, 160)
    mask_BT = (jnp.arange(20) < 12).astype(jnp.float32)[None]
    masked, alone = features.istft(spectrum_BTF, 160, mask_BT), features.istft(spectrum_BTF[:, :12], 160)
    np.testing.assert_allclose(masked[:, : 12 * 160], alone, atol=1e-6)


def test_magnitude_of_a_sine_is_its_amplitude():
    wave_P = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(THOUSAND.sample_rate) / THOUSAND.sample_rate)
    assert features.magnitude(wave_P[None], 1024, 160)[0, 50].max() == pytest.approx(0.5, rel=1e-3)
    assert int(features.magnitude(wave_P[None], 1024, 160)[0, 50].argmax()) == 64


def test_mel_bands_are_means_over_bins_and_cover_all_of_them():
    filters = features.mel_filters(THOUSAND.sample_rate, 1024, 80)
    np.testing.assert_allclose(filters.sum(axis=0), 1.0, rtol=1e-5)
    assert (filters[1:-1].sum(axis=1) > 0).all()


def test_log_mel_of_silence_is_the_floor_and_has_finite_gradients():
    silence = jnp.zeros((1, 3200))
    np.testing.assert_allclose(features.log_mel(silence, THOUSAND.sample_rate), np.log(features.MEL_FLOOR), rtol=1e-5)
    assert jnp.isfinite(jax.grad(lambda wave: features.log_mel(wave, THOUSAND.sample_rate).sum())(silence)).all()


def test_appended_silence_changes_no_frame_that_ends_before_it():
    wave_P = noise(3200)
    longer = features.log_mel(np.pad(wave_P, (0, 1600))[None], THOUSAND.sample_rate)
    np.testing.assert_allclose(longer[:, :20], features.log_mel(wave_P[None], THOUSAND.sample_rate), atol=1e-4)


# audio


@pytest.mark.parametrize(
    ("wave", "fault"),
    [
        (np.zeros(0), "no samples"),
        (np.full(4000, np.nan), "4000 samples are NaN"),
        (np.array([0.0] * 4000 + [np.inf]), "1 samples are NaN"),
        (np.zeros(319), "at least 0.02 s"),
        (np.zeros((2, 2, 2)), r"shape \(2, 2, 2\)"),
    ],
)
def test_bad_audio_is_named(codec, wave, fault):
    with pytest.raises(BadAudio, match=fault):
        features.check_wave(wave, THOUSAND.sample_rate, THOUSAND.sample_rate)
    if wave.ndim == 1:
        with pytest.raises(BadAudio, match=fault):
            codec.encode(wave)


def test_stereo_and_other_rates_are_fixed(tmp_path):
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100)
    soundfile.write(tmp_path / "tone.wav", np.stack([tone, np.zeros_like(tone)], axis=1), 44_100)
    wave_P = read_audio(tmp_path / "tone.wav", THOUSAND.sample_rate)
    assert wave_P.shape == (THOUSAND.sample_rate,) and wave_P.dtype == np.float32
    wanted = 0.25 * np.sin(2 * np.pi * 440 * np.arange(THOUSAND.sample_rate) / THOUSAND.sample_rate)
    np.testing.assert_allclose(wave_P[500:-500], wanted[500:-500], atol=2e-3)


@pytest.mark.parametrize("content", [None, b"", b"this is not audio"])
def test_unreadable_files_are_named(tmp_path, content):
    path = tmp_path / "broken.wav"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadAudio, match=r"broken\.wav"):
        read_audio(path, THOUSAND.sample_rate)


# quantiser


@settings(max_examples=10)  # every example compiles
@given(levels=st.lists(st.integers(2, 9), min_size=1, max_size=4).map(tuple))
def test_tokens_and_digits_are_a_bijection(levels):
    fsq = Fsq(levels)
    tokens = np.arange(fsq.vocab_size)
    digits = np.asarray(fsq.digits(tokens))
    assert (np.asarray(fsq.tokens(digits)) == tokens).all()
    assert len(np.unique(digits, axis=0)) == fsq.vocab_size
    assert (digits >= 0).all() and (digits <= np.array(levels)[None] - 1).all()


@given(z=st.lists(st.floats(-50, 50), min_size=4, max_size=4))
def test_rounding_reaches_only_valid_digits_and_passes_gradients(z):
    fsq, z_D = Fsq((8, 5, 5, 5)), jnp.asarray(z, jnp.float32)
    digits = fsq.round(fsq.squash(z_D))
    assert 0 <= int(fsq.tokens(digits)) < 1000
    np.testing.assert_allclose(digits, np.round(digits), atol=1e-5)
    assert (jnp.abs(fsq.centre(digits)) <= 1 + 1e-5).all()
    assert (jax.grad(lambda z: fsq.round(fsq.squash(z)).sum())(z_D) >= 0).all()


def test_every_code_can_be_reached():
    fsq = Fsq((8, 5, 5, 5))
    digits = fsq.round(fsq.squash(jax.random.logistic(jax.random.key(0), (20_000, 4))))
    assert len(np.unique(fsq.tokens(digits))) == 1000


def test_shifted_sum_is_the_grouped_convolution(key):
    h_BTC, taps_KC = jax.random.normal(key, (2, 30, 8)), jax.random.normal(key, (7, 8))
    wanted = jax.lax.conv_general_dilated(
        h_BTC, taps_KC[:, None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
    )
    np.testing.assert_allclose(shifted_sum(h_BTC, taps_KC), wanted, atol=1e-5)


# codec


@settings(max_examples=10)
@given(samples=st.integers(320, 3 * BUCKET * 320))
def test_lengths_are_exact(codec, samples):
    tokens_T = codec.encode(noise(samples))
    assert tokens_T.dtype == np.int32 and len(tokens_T) == -(-samples // 320)
    wave_P = codec.decode(tokens_T)
    assert wave_P.dtype == np.float32 and len(wave_P) == len(tokens_T) * codec.sample_rate / codec.frame_rate


def test_limits_of_the_protocol(codec):
    assert (codec.frame_rate, codec.sample_rate, codec.vocab_size) == (50.0, 16_000, 1000)
    assert codec.decode(np.zeros(0, np.int32)).shape == (0,)


def test_padding_to_a_longer_bucket_changes_nothing(codec, monkeypatch):
    wave_P = noise(320 * 100 + 7)
    tokens_T = codec.encode(wave_P)
    sound_P = codec.decode(tokens_T)
    monkeypatch.setattr("vadusa_jax.speech.renderer.BUCKET", 101)  # no padding at all
    assert (codec.encode(wave_P) == tokens_T).all()
    np.testing.assert_allclose(codec.decode(tokens_T), sound_P, atol=1e-5)
    monkeypatch.setattr("vadusa_jax.speech.renderer.BUCKET", 1000)
    assert (codec.encode(wave_P) == tokens_T).all()
    np.testing.assert_allclose(codec.decode(tokens_T), sound_P, atol=1e-5)


@pytest.mark.parametrize("tokens", [[-1, 3], [5, 1000]])
def test_foreign_tokens_are_refused(codec, tokens):
    with pytest.raises(ValueError, match=r"not all in 0\.\.999"):
        codec.decode(np.array(tokens))


def test_saving_and_loading_keeps_tokens_and_sound(codec, tmp_path):
    codec.save(tmp_path / "codec")
    once = load_codec(tmp_path / "codec")
    once.save(tmp_path / "codec")  # over itself; float16 now loses nothing more
    twice = load_codec(tmp_path / "codec")
    wave_P = noise(20_000)
    tokens_T = once.encode(wave_P)
    assert (twice.encode(wave_P) == tokens_T).all()
    assert (twice.decode(tokens_T) == once.decode(tokens_T)).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codec"]
    names = sorted(path.name for path in (tmp_path / "codec").iterdir())
    assert names == ["codec.json", "decoder.safetensors", "encoder.safetensors", "vocoder.safetensors"]


def test_a_codec_without_vocoder_encodes_and_says_why_it_cannot_decode(codec, tmp_path):
    dataclasses.replace(codec, renderer=dataclasses.replace(codec.renderer, vocoder=None)).save(tmp_path / "codec")
    half = load_codec(tmp_path / "codec")
    tokens_T = half.encode(noise(3200))
    with pytest.raises(ValueError, match="before its vocoder was trained"):
        half.decode(tokens_T)


def test_a_codec_that_does_not_match_its_config_is_refused(codec, tmp_path):
    codec.save(tmp_path / "codec")
    path = tmp_path / "codec" / "codec.json"
    facts = json.loads(path.read_text())

    path.write_text(json.dumps(facts | {"config": facts["config"] | {"encoder_width": 24}}))
    with pytest.raises(ValueError, match=r"encoder\.safetensors: parameter body\.\S+ has shape \(.*16.*24"):
        load_codec(tmp_path / "codec")
    path.write_text(json.dumps(facts | {"config": facts["config"] | {"vocoder_layers": 3}}))
    with pytest.raises(ValueError, match=r"vocoder\.safetensors: parameter body\.blocks\.2\.\S+ is missing"):
        load_codec(tmp_path / "codec")
    path.write_text(json.dumps(facts | {"version": 99}))
    with pytest.raises(ValueError, match="version 99"):
        load_codec(tmp_path / "codec")
    with pytest.raises(ValueError, match=r"no codec\.json"):
        load_codec(tmp_path)


# timbre


def test_the_timbre_is_of_the_reference_and_moves_the_sound_alone(tmp_path):
    codec = toy_codec(dataclasses.replace(THOUSAND, timbre=8, timbre_width=16, timbre_layers=1))
    tokens_T, reference_P = codec.encode(noise(9000)), noise(5000, seed=1)
    other = codec.like(reference_P)
    assert (other.encode(noise(9000)) == tokens_T).all()
    assert np.abs(other.decode(tokens_T) - codec.decode(tokens_T)).max() > 1e-3
    timbre_E = other.renderer.timbre_E
    assert np.square(timbre_E).mean() == pytest.approx(1.0, rel=1e-3)
    longer_P = np.concatenate([reference_P, np.zeros(0, np.float32)])
    np.testing.assert_allclose(codec.like(longer_P).renderer.timbre_E, timbre_E, atol=1e-5)
    codec.save(tmp_path / "codec")
    again = load_codec(tmp_path / "codec").like(reference_P)
    np.testing.assert_allclose(again.decode(tokens_T), other.decode(tokens_T), atol=2e-2)
    with pytest.raises(BadAudio):
        codec.like(np.zeros(3, np.float32))


def test_a_codec_of_one_speaker_is_like_itself(codec):
    assert codec.like(noise(4000)).renderer is codec.renderer
