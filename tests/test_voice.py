"""Laws of a voice: the folder is complete or named, text and seed decide what is said, bad text never decodes."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from toys import CODEC, lean, toy_codec, toy_voice

from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.decode.prompts import TooLong
from vadusa_jax.decode.tree import TreeError
from vadusa_jax.evaluation.clips import split_speakable
from vadusa_jax.evaluation.testsets import Sentence
from vadusa_jax.model.folder import save_lm
from vadusa_jax.speech import BadAudio
from vadusa_jax.text import Line, UnspeakableText
from vadusa_jax.voice import Voice
from vadusa_jax.weights import WeightsError

TEXTS = ["Good morning.", "Where is the station?", "It rains."]
EXACT = parse_mode("exact:nodes=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_voice(tmp_path_factory.mktemp("voice") / "toy")


@pytest.fixture(scope="module")
def voice(folder) -> Voice:
    loaded = Voice.load(folder)
    short = dataclasses.replace(loaded.config.decode, extra_tokens=40, tokens_per_phone=0.0)
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, decode=short))


# what is said


@pytest.fixture(scope="module")
def together(voice):
    return voice.speak(TEXTS, EXACT, seed=1)


def test_text_and_seed_decide_what_is_said_alone_and_in_a_batch(voice, together):
    for otherwise in (
        voice.speak(TEXTS[::-1], EXACT, seed=1, batch=1)[::-1],
        voice.speak(TEXTS, EXACT, 1, batch=1),
    ):
        for a, b in zip(together, otherwise, strict=True):
            assert (a.text, a.phones, a.finish, a.steps) == (b.text, b.phones, b.finish, b.steps)
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.block_of, b.block_of)
            np.testing.assert_allclose(a.wave, b.wave, atol=1e-5)


def test_exact_says_what_plain_decoding_says_and_another_seed_something_else(voice, together):
    plain, other = voice.speak(TEXTS, parse_mode("ar"), seed=1), voice.speak(TEXTS, EXACT, seed=2)
    for exact, ar, different in zip(together, plain, other, strict=True):
        np.testing.assert_array_equal(exact.tokens, ar.tokens)
        assert exact.finish == ar.finish and exact.steps <= ar.steps
        assert exact.tokens.tolist() != different.tokens.tolist()


def test_what_was_spoken_is_consistent(voice, together):
    for spoken in together:
        assert spoken.tokens.dtype == np.int32 and spoken.wave.dtype == np.float32
        assert len(spoken.wave) == len(spoken.tokens) * voice.codec.sample_rate / voice.codec.frame_rate
        assert len(spoken.block_of) == len(spoken.tokens) + (spoken.finish == "eos")
        assert spoken.block_of[0] == 0 and spoken.block_of[-1] == spoken.steps - 1
        assert len(spoken.block_of) <= 40 and (spoken.finish == "length") == (len(spoken.tokens) == 40)
        assert (spoken.tokens < voice.codec.vocab_size).all() and spoken.wall_s > 0


def test_an_immediate_eos_is_an_empty_result(folder):
    silent = Voice.load(folder)
    decode = dataclasses.replace(silent.config.decode, least_per_phone=0.0)
    silent = dataclasses.replace(silent, config=dataclasses.replace(silent.config, decode=decode))
    lean(silent.lm, silent.config.model.eos, 100.0)
    for spoken in silent.speak(TEXTS, EXACT):
        assert (spoken.finish, spoken.steps, spoken.block_of.tolist()) == ("eos", 1, [0])
        assert spoken.tokens.shape == spoken.wave.shape == (0,)


@pytest.mark.parametrize("text", ["", " ", "...", "🙂", "你好"])
def test_unspeakable_text_is_an_error_before_any_decoding(voice, text, monkeypatch):
    monkeypatch.setattr("vadusa_jax.voice.decode_each", lambda *_, **__: pytest.fail("something was decoded"))
    with pytest.raises(UnspeakableText):
        voice.speak(["Good morning.", text], EXACT, batch=1)


def test_a_text_that_leaves_no_room_for_speech_is_named(voice):
    with pytest.raises(TooLong, match=r"phones.*max_length of 512"):
        voice.speak(["A long way to go. " * 60], EXACT)


def test_what_cannot_be_spoken_is_set_aside_with_the_reason(voice):
    """Case 18, for a whole file: one bad line ends nothing."""
    texts = ["Hello there.", "...", "\N{GRINNING FACE}", "A long way to go. " * 60, "Good bye."]
    kept, set_aside = split_speakable(voice, [Sentence(str(i), text) for i, text in enumerate(texts)])
    assert [s.text for s in kept] == ["Hello there.", "Good bye."]
    assert [s.id for s, _ in set_aside] == ["1", "2", "3"]
    assert "letters" in set_aside[0][1] and "max_length of 512" in set_aside[2][1]


# speech prompts


@pytest.fixture(scope="module")
def speaker(voice) -> Voice:
    wave_P = 0.1 * np.random.default_rng(0).standard_normal(voice.codec.sample_rate).astype(np.float32)
    return voice.like(wave_P, "Here I am.", "me.wav")


def test_a_prompt_is_continued_and_never_heard(voice, speaker):
    plain, exact = (speaker.speak(TEXTS, parse_mode(mode), seed=1) for mode in ("ar", "exact:nodes=8"))
    for a, b, without in zip(plain, exact, voice.speak(TEXTS, EXACT, seed=1), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() != without.tokens.tolist()
        assert len(a.wave) == len(a.tokens) * voice.codec.sample_rate / voice.codec.frame_rate
        assert len(a.tokens) <= 40
    streamed = np.concatenate(list(speaker.stream(TEXTS[0], EXACT, seed=1)))
    np.testing.assert_allclose(streamed, exact[0].wave, atol=1e-4)


def test_a_prompt_that_is_too_long_is_named_with_its_seconds_and_the_limit(voice, speaker):
    """Case 17."""
    with pytest.raises(TooLong, match=r"me\.wav takes 7\.0 s, at most 6 s are allowed"):
        voice.like(np.ones(7 * voice.codec.sample_rate, np.float32), "Here I am.", "me.wav")
    with pytest.raises(TooLong, match=r"the speech prompt takes \d+ positions.*take a shorter prompt"):
        speaker.speak(["A long way to go. " * 60], EXACT)
    with pytest.raises(UnspeakableText):
        voice.like(np.ones(voice.codec.sample_rate, np.float32), "...")
    with pytest.raises(BadAudio):
        voice.like(np.zeros(0, np.float32), "Here I am.")


# folders


def test_a_voice_survives_saving(voice, folder, tmp_path):
    again = shutil.copytree(folder, tmp_path / "again")
    save_lm(again, voice.config, voice.lm)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert Voice.load(again).config == voice.config
    assert Voice.load(again).trees == voice.trees and Voice.load(again).vocabulary == voice.vocabulary


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json", "model.safetensors", "trees.json", "codec"])
def test_what_is_missing_is_named(folder, tmp_path, name):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (shutil.rmtree if (broken / name).is_dir() else type(broken).unlink)(broken / name)
    with pytest.raises(FileNotFoundError, match=f"has no {name}"):
        Voice.load(broken)


def test_parts_that_do_not_match_are_named(voice):
    codec = toy_codec(dataclasses.replace(CODEC, levels=(5, 5)))
    with pytest.raises(ValueError, match="codec has 25 tokens, the config says 20"):
        dataclasses.replace(voice, codec=codec)
    few = dataclasses.replace(voice.config, model=dataclasses.replace(voice.config.model, text_vocab=9))
    with pytest.raises(ValueError, match=f"vocabulary has {len(voice.vocabulary)} symbols, the config allows 9"):
        dataclasses.replace(voice, config=few)
    one_head = dataclasses.replace(voice.config, heads=dataclasses.replace(voice.config.heads, count=1))
    with pytest.raises(TreeError, match="draft heads, the model has 1"):
        dataclasses.replace(voice, config=one_head)


def test_weights_of_another_config_are_named_with_both_shapes(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    config["model"]["width"] = 64
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"parameter .* has shape .*32.*, the config asks .*64"):
        Voice.load(broken)


# streaming and long text

LONG = "Good morning, Dr. Smith. It is 3.14 miles to town! " * 3 + "Are you coming?"


def test_a_streamed_text_sounds_like_its_sentences_spoken_one_by_one(voice):
    pieces = voice.pieces(LONG)
    texts = [piece.text for piece in pieces]
    assert " ".join(texts).split() == LONG.split() and len(pieces) > 3
    whole_P = np.concatenate([one.wave for one in voice.speak(texts, EXACT, seed=3, batch=2)])
    waves = list(voice.stream(LONG, EXACT, seed=3))
    assert len(waves) > len(pieces)
    np.testing.assert_allclose(np.concatenate(waves), whole_P, atol=1e-4)
    sooner_P = np.concatenate(list(voice.stream(LONG, EXACT, seed=3, lookahead=0)))
    assert len(sooner_P) == len(whole_P)


def test_a_queue_of_texts_comes_back_in_order_whatever_is_finished_first(voice):
    texts = ["Yes.", "It is three and a half miles to town, I think.", "No.", "Good morning."] * 2
    order = [i for i, _ in voice.speak_each([Line.of(text) for text in texts], EXACT, batch=2)]
    assert sorted(order) == list(range(8))
    spoken = voice.speak(texts, EXACT, batch=2)
    assert [one.text for one in spoken] == texts
    alone = [voice.speak([text], EXACT)[0] for text in texts[:4]] * 2
    for one, other in zip(spoken, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.wave.tolist() == other.wave.tolist()


def test_what_a_mode_needs_and_the_voice_lacks_is_named(voice):
    for mode, lack in (("viterbi", "fit_tree"), ("ssd", "export with --draft")):
        with pytest.raises(ValueError, match=lack):
            voice.speak(["Good morning."], parse_mode(mode))
