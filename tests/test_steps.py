"""Decoding looked at pass by pass: what is recorded is what the voice says, and every part of it can be drawn."""

import itertools

import numpy as np
import pytest
from toys import toy_voice

from vadusa_jax.data.splits import find_splits
from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.evaluation import clip_plots, plots
from vadusa_jax.evaluation.clips import Clip
from vadusa_jax.evaluation.metrics import blocks
from vadusa_jax.evaluation.steps import record_steps
from vadusa_jax.evaluation.testsets import Sentence, as_corpus, load_testset
from vadusa_jax.voice import Voice

pytestmark = pytest.mark.usefixtures("compiled_once")
TEXT = "Good morning."


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    return Voice.load(toy_voice(tmp_path_factory.mktemp("voice") / "toy"))


@pytest.fixture(scope="module")
def recorded(voice):
    """What the voice says in a mode, and its passes."""
    modes = {name: parse_mode(name) for name in ("ar", "tolerance:3")}
    return {name: (voice.speak([TEXT], mode)[0], record_steps(voice, TEXT, mode)) for name, mode in modes.items()}


@pytest.mark.parametrize("mode", ["ar", "tolerance:3"])
def test_the_passes_say_what_the_voice_says(recorded, mode):
    spoken, steps = recorded[mode]
    assert [len(step.block) for step in steps] == blocks(spoken.block_of, spoken.steps)[1:].tolist()
    said = np.concatenate([steps[0].token_T[:1], *(step.block for step in steps)])
    np.testing.assert_array_equal(said[: len(spoken.tokens)], spoken.tokens)
    for before, after in itertools.pairwise(steps):
        assert after.token_T[0] == before.block[-1]


def test_what_stands_was_drafted(recorded):
    _, steps = recorded["tolerance:3"]
    for step in steps:
        assert len(step.token_T) == len(step.tree) == 8 and len(step.path) == len(step.block)
        np.testing.assert_array_equal(step.token_T[list(step.path[1:])], step.block[:-1])
        assert all(step.tree.parent_T[i] == parent for parent, i in itertools.pairwise(step.path))
    assert max(len(step.path) for step in steps) > 1
    assert {len(step.token_T) for step in recorded["ar"][1]} == {1}


def test_a_pass_is_drawn_beside_the_sound_of_its_own_sentence_only(recorded, tmp_path):
    clips = {
        mode: Clip(Sentence("a", TEXT), mode, 0, spoken.wave, spoken.sample_rate, spoken)
        for mode, (spoken, _) in recorded.items()
    }
    for mode, (_, steps) in recorded.items():
        clip_plots.plot_step(tmp_path / f"{mode}.png", clips[mode], steps)
        assert plots.plt.imread(tmp_path / f"{mode}.png").std() > 0.05
    clip_plots.plot_step(tmp_path / "last.png", clips["ar"], recorded["ar"][1], len(recorded["ar"][1]))
    with pytest.raises(ValueError, match="another mode"):
        clip_plots.plot_step(tmp_path / "none.png", clips["ar"], recorded["tolerance:3"][1])
    assert not (tmp_path / "none.png").exists()


def test_training_is_drawn_as_far_as_it_went(tmp_path):
    rows = [{"step": 1, "lm/loss": 3.0, "lm/top1": 0.1, "head1/loss": 3.0, "head1/top1": 0.1, "mfu": 0.5}]
    rows.append({"step": 2, "dev/lm/loss": 2.9, "dev/lm/top1": 0.2, "dev/head1/loss": 3.0, "dev/head1/top1": 0.1})
    rows.append({"step": 3, "not_finite": {"loss": "nan"}})
    plots.plot_training(tmp_path / "curves.png", rows)
    assert plots.plt.imread(tmp_path / "curves.png").std() > 0.05


def test_a_test_set_becomes_a_corpus(tmp_path):
    assert as_corpus("everyday", tmp_path / "corpus", limit=3) == 3
    (corpus,) = find_splits(str(tmp_path / "corpus"), [])["train"]
    for utterance, sentence in zip(corpus, load_testset("everyday"), strict=False):
        assert (utterance.key, utterance.text) == (sentence.id, sentence.text)
        wave_P, rate = utterance.audio.read()
        assert rate == sentence.sample_rate
        np.testing.assert_array_equal(np.asarray(wave_P).reshape(-1), sentence.wave_P)
    assert len(list(corpus)) == 3
