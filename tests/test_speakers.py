"""Speaker prompts in a measurement: who can be a prompt, and how alike what is spoken is to each of them."""

import numpy as np
import pytest
import soundfile
from toys import toy_voice

from vadusa_jax.evaluation import report
from vadusa_jax.evaluation.clips import Clip
from vadusa_jax.evaluation.metrics import SpeakerEncoder, WavLMSpeaker
from vadusa_jax.evaluation.speakers import RECORDED, Speaker, likeness, read_speakers
from vadusa_jax.evaluation.testsets import Sentence, load_testset
from vadusa_jax.voice import Voice

RATE = 16_000


def pitch(wave_P: np.ndarray, rate: int) -> np.ndarray:
    """An embedding that tells tones apart."""
    spectrum = np.abs(np.fft.rfft(wave_P, rate))
    return spectrum[:4000].reshape(40, 100).max(axis=1)


def tone(hz: float, seconds: float = 2.0) -> np.ndarray:
    return 0.1 * np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE).astype(np.float32)


def clip(mode: str, speaker: str, wave_P: np.ndarray) -> Clip:
    return Clip(Sentence("x", "words"), mode, 0, wave_P, RATE, speaker=speaker)


def test_a_clip_is_compared_with_its_own_prompt_and_with_those_of_the_others():
    speakers = [Speaker(str(hz), tone(hz), tone(hz, 3.0), RATE, None) for hz in (350, 950, 2050)]
    clips = [clip("good", "350", tone(360)), clip("good", "2050", tone(2040))]
    clips += [clip("bad", "950", tone(350)), clip("bad", "950", np.zeros(0, np.float32)), clip("ar", "", tone(350))]
    rows = {row["mode"]: row for row in likeness(clips, speakers, pitch)}
    assert list(rows) == [RECORDED, "good", "bad"]
    assert rows[RECORDED]["pairs"] == rows["good"]["pairs"] == 1.0 and rows["good"]["clips"] == 2
    assert rows["good"]["own"] > 0.9 > 0.5 > rows["good"]["others"]
    assert rows["bad"]["pairs"] == 0.25  # the silent clip is like nobody, the other one is more like one of two
    table = report.markdown_table(rows.values(), report.SPEAKERS)
    assert "| good | 3 | 2 |" in table and "100.0" in table


@pytest.fixture(scope="module")
def voice(tmp_path_factory) -> Voice:
    return Voice.load(toy_voice(tmp_path_factory.mktemp("voice") / "toy"))


def test_prompts_are_recordings_of_a_fitting_length_that_have_a_text(voice, tmp_path):
    rate = voice.codec.sample_rate
    for name, seconds, text in (
        ("a/1/long", 9.0, "Too long."), ("a/1/right", 3.0, "Good morning."), ("a/1/second", 2.0, "Good evening."),
        ("b/1/short", 0.5, "No."), ("b/1/silent", 2.0, "..."), ("b/1/right", 2.0, "Where is the station?"),
        ("c/1/short", 0.5, "No."),
    ):  # fmt: skip
        path = tmp_path / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, tone(440, seconds)[:: RATE // rate], rate)
        path.with_suffix(".normalized.txt").write_text(text)
    first, second = read_speakers(voice, tmp_path)
    assert (first.name, second.name) == ("a", "b")
    assert len(first.prompt_P) == 3 * rate and len(first.other_P) == 2 * rate and second.other_P is None
    assert len(first.voice.prompt.speech) == 3 * voice.codec.frame_rate
    with pytest.raises(ValueError, match="prompts of 1 speakers, of a: at least two"):
        (tmp_path / "b").rename(tmp_path.parent / "elsewhere")
        (tmp_path / "c").rename(tmp_path.parent / "there")
        read_speakers(voice, tmp_path)
    with pytest.raises(FileNotFoundError, match="is no corpus"):
        read_speakers(voice, tmp_path / "nothing")


@pytest.mark.slow
def test_the_speaker_encoder_knows_one_speaker_from_another():
    pytest.importorskip("resemblyzer")
    embed, (one, two, *_) = SpeakerEncoder(), load_testset("heldout")
    faster_P = one.wave_P[::2]  # an octave higher: somebody else
    vectors = [embed(wave_P, RATE) for wave_P in (one.wave_P, two.wave_P, faster_P)]
    assert all(np.linalg.norm(v) == pytest.approx(1.0, abs=1e-3) for v in vectors)
    assert vectors[0] @ vectors[1] > 0.75 > vectors[0] @ vectors[2]
    assert embed(np.zeros(RATE, np.float32), RATE).shape == (256,)  # nothing but silence


@pytest.mark.slow
def test_wavlm_knows_speakers_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.WavLMConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, conv_dim=(16,) * 7,
        tdnn_dim=(24, 24, 32), tdnn_kernel=(5, 3, 1), tdnn_dilation=(1, 2, 1), xvector_output_dim=20,
    )  # fmt: skip
    transformers.WavLMForXVector(config).save_pretrained(tmp_path)
    transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(tmp_path)
    embed, (one, *_) = WavLMSpeaker(tmp_path), load_testset("heldout")
    vector = embed(one.wave_P, RATE)
    assert vector.shape == (20,) and np.isfinite(vector).all()
    slow_P = np.repeat(one.wave_P, 2)  # as if at 32 kHz: brought to 16 kHz it is nearly the same wave
    cosine = vector @ embed(slow_P, 2 * RATE) / np.linalg.norm(vector) / np.linalg.norm(embed(slow_P, 2 * RATE))
    assert cosine > 0.99
