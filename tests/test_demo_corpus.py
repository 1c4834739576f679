"""The demo corpus: splits never overlap, texts follow the seed, audio is whole and level."""

import collections

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from vadusa_jax.data import demo_corpus, demo_voices, sentences
from vadusa_jax.data.corpora import LibriTTS
from vadusa_jax.text import phonemize


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    return sentences.demo_texts(train=11_000, seed=0)


def test_no_sentence_is_in_two_places(texts):
    every = [text.lower() for split in texts.values() for text in split]
    assert len(set(every)) == len(every)
    assert {split: len(found) for split, found in texts.items()} == {
        "heldout": 100, "everyday": 40, "dev": 100, "train": 11_000,
    }  # fmt: skip


def test_more_training_text_only_appends(texts):
    fewer, other = sentences.demo_texts(train=50, seed=0), sentences.demo_texts(train=50, seed=1)
    assert fewer["train"] == texts["train"][:50]
    assert {s: t for s, t in fewer.items() if s != "train"} == {s: t for s, t in texts.items() if s != "train"}
    assert other["train"] != fewer["train"] and other["everyday"] == fewer["everyday"]


def test_a_further_speaker_has_texts_of_its_own(texts):
    other, another = (sentences.demo_texts(500, speaker=name) for name in ("slt", "rms"))
    assert {split: len(found) for split, found in other.items()} == {"dev": 20, "train": 500}
    tests = {text.lower() for split in ("heldout", "everyday", "dev") for text in texts[split]}
    assert not tests & {text.lower() for found in (other, another) for split in found.values() for text in split}
    assert other["train"] != another["train"]


def test_speakers_are_found_or_named(monkeypatch):
    monkeypatch.setattr(demo_voices.shutil, "which", lambda name: name if name == "flite" else None)
    assert demo_voices.find_speakers() == ["slt", "rms", "awb", "kal"] and demo_voices.find_speakers([]) == []
    with pytest.raises(FileNotFoundError, match="apt-get install espeak-ng"):
        demo_voices.find_speakers(["slt", "klatt"])
    with pytest.raises(ValueError, match=r"no speakers.*nobody"):
        demo_voices.find_speakers(["nobody"])


def test_frequent_words_are_heard_often_and_evenly(texts):
    heard = collections.Counter(w.strip(".,?!").lower() for text in texts["train"] for w in text.split())
    counts = np.array([heard[word] for word in sentences.vocabulary()])
    assert len(counts) == 8000
    assert np.mean(counts >= 2) > 0.95


def test_every_sentence_can_be_read_and_is_short(texts):
    limits = sentences.TextLimits()
    for text in (*texts["heldout"], *texts["everyday"], *texts["dev"], *texts["train"][:300]):
        assert phonemize(text) and len(text.split()) <= limits.words and len(text) <= limits.letters
        assert "{" not in text and text[0].isupper() and text[-1] in ".?!"


@given(
    lead=st.integers(0, 8000),
    tail=st.integers(0, 8000),
    gain=st.floats(0.001, 1.0),
    speech=st.integers(4000, 16_000),
    seed=st.integers(0, 99),
)
def test_trimming_leaves_the_margin_and_one_level(lead, tail, gain, speech, seed):
    settings = demo_corpus.Levels()
    sound = gain * np.random.default_rng(seed).uniform(-1, 1, speech)
    wave = demo_corpus.trim_and_level(np.pad(sound, (lead, tail)), settings)
    margin = round(settings.margin_s * demo_corpus.SAMPLE_RATE)
    assert abs(len(wave) - speech - 2 * margin) <= 2 * 160
    assert np.abs(wave[: margin - 160]).max() == 0 and wave.dtype == np.float32
    assert np.abs(wave).max() <= settings.peak + 1e-6
    assert np.sqrt(np.mean(wave**2)) == pytest.approx(settings.rms, rel=0.01)


def test_silence_alone_comes_back_empty():
    settings = demo_corpus.Levels()
    assert not len(demo_corpus.trim_and_level(np.zeros(5000), settings))
    assert not len(demo_corpus.trim_and_level(np.zeros(0), settings))


@pytest.mark.slow
def test_the_demo_corpus_is_spoken_whole_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    pytest.importorskip("piper")
    few = {"heldout": 1, "everyday": 2, "dev": 1, "train": 40}
    whole = sentences.demo_texts(train=40)
    monkeypatch.setattr(sentences, "demo_texts", lambda train, seed, speaker: {s: whole[s][:n] for s, n in few.items()})
    seconds = demo_corpus.make_demo_corpus(tmp_path, hours=2 / 3600, workers=1)
    assert seconds["train"] >= 2
    found = list(LibriTTS(tmp_path / "everyday"))
    assert [u.text.strip() for u in found] == whole["everyday"][:2]
    for utterance in found:
        info = soundfile.info(utterance.audio.path)
        assert (info.samplerate, info.channels, info.subtype) == (16_000, 1, "PCM_16")
        assert 0.8 < info.duration < 7.5
    kept, lost = (utterance.audio.path for utterance in found)
    before = kept.stat().st_mtime_ns
    lost.unlink()
    assert demo_corpus.make_demo_corpus(tmp_path, hours=2 / 3600, workers=1)["dev"] == pytest.approx(seconds["dev"])
    assert kept.stat().st_mtime_ns == before and lost.exists()
    assert not list(tmp_path.rglob("*.aside"))
