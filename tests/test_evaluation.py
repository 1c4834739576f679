"""Evaluation: errors, intervals, acceptance, timing, test sets and reports, on real speech where it matters."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from toys import MODEL, random_tree, toy_model

from vadusa_jax.config import DecodeConfig
from vadusa_jax.decode.accept import EXACT
from vadusa_jax.decode.loop import generate
from vadusa_jax.decode.prompts import first_slots, make_prompts, make_settings
from vadusa_jax.decode.state import FINISH
from vadusa_jax.evaluation import metrics, plots, report
from vadusa_jax.evaluation.clips import (
    Clip,
    file_name,
    reference_clips,
    save_wave,
    speak,
    timed,
)
from vadusa_jax.evaluation.metrics import Errors, count_errors, wer_interval
from vadusa_jax.evaluation.scores import KEYS, Scored, rows, score
from vadusa_jax.evaluation.testsets import NAMES, ROOT, Sentence, load_testset, read_sentences, save_testset

RATE = 16_000


@dataclasses.dataclass(frozen=True)
class Mode:
    block: int  # tokens a pass commits


@dataclasses.dataclass(frozen=True)
class Spoken:
    text: str
    tokens: np.ndarray
    wave: np.ndarray
    sample_rate: int
    finish: str
    steps: int
    block_of: np.ndarray


class ToneVoice:
    """Says three tokens of 20 ms a character, as a tone that depends on text and seed and never on the mode."""

    def speak(self, texts, mode, seed):
        return [self._say(text, mode, seed) for text in texts]

    def _say(self, text, mode, seed):
        tokens = np.frombuffer(text.encode().ljust(1) * 3, np.uint8) + seed
        block_of = np.concatenate([[0], 1 + np.arange(len(tokens)) // mode.block])
        wave = 0.1 * np.sin(np.repeat(tokens, 320) * np.arange(320 * len(tokens)) / 2000).astype(np.float32)
        return Spoken(text, tokens, wave, RATE, "eos", int(block_of[-1]) + 1, block_of)


class RoundCodec:
    sample_rate = RATE

    def encode(self, wave):
        return np.round(wave * 1000).astype(np.int32)

    def decode(self, tokens):
        return (tokens / 1000).astype(np.float32)


class Parrot:
    """A recogniser that always hears the same words."""

    cpu_threads = 2

    def transcribe(self, wave, sample_rate):
        return "the same words"


MODES = {"ar": Mode(1), "exact": Mode(3), "tolerance:3": Mode(4)}
RAN = {name: {"nodes": 8, "batch": 2, "device": "toy", "dtype": "float32"} for name in MODES}


# Words


def test_spelling_that_sounds_alike_is_no_error():
    assert count_errors("Doctor Smith's colour, please!", "Dr. Smith's color please").word_errors == 0


@given(st.lists(st.sampled_from(["a", "cat", "sat", "down"])), st.lists(st.sampled_from(["a", "cat", "sat"])))
def test_errors_are_bounded_and_vanish_only_for_equal_words(reference, heard):
    errors = count_errors(" ".join(reference), " ".join(heard))
    longer, shorter = max(len(reference), len(heard)), min(len(reference), len(heard))
    assert longer - shorter <= errors.word_errors <= longer
    assert (errors.word_errors == 0) == (reference == heard)


def test_error_rate_is_pooled_over_words_not_averaged_over_sentences():
    total = Errors(words=9, word_errors=0) + Errors(words=1, word_errors=1)
    assert total.wer == 0.1


def test_interval_is_seeded_holds_the_estimate_and_shrinks_with_data():
    rng = np.random.default_rng(0)

    def sample(n):
        return [Errors(words=10, word_errors=int(e)) for e in rng.poisson(1.0, n)]

    small, large = sample(30), sample(3000)
    low, high = wer_interval(small)
    assert (low, high) == wer_interval(small)
    assert low < sum(small, Errors()).wer < high
    assert np.diff(wer_interval(large)) < np.diff((low, high)) / 5
    assert wer_interval(small[:1]) is None


def test_paired_difference_cancels_what_two_systems_share():
    rng = np.random.default_rng(0)
    base = [Errors(words=10, word_errors=int(e)) for e in rng.poisson(3.0, 50)]
    worse = [dataclasses.replace(e, word_errors=e.word_errors + 1) for e in base]
    assert wer_interval(base, base) == (0.0, 0.0)
    np.testing.assert_allclose(wer_interval(worse, base), (0.1, 0.1))


# Real speech


@pytest.fixture(scope="module")
def recogniser():
    return metrics.Recogniser(cpu_threads=1)


def test_recogniser_understands_the_shipped_recordings(recogniser):
    heard = score([Clip(s, "truth", 0, s.wave_P, s.sample_rate) for s in load_testset("everyday")[:6]], recogniser)
    assert sum((one.errors for one in heard), Errors()).wer < 0.2
    assert all(one.dnsmos > 2 for one in heard)


def test_recogniser_does_not_loop_on_a_bad_clip(recogniser):
    noise_P = np.random.default_rng(0).uniform(-0.3, 0.3, 2 * RATE).astype(np.float32)
    assert len(recogniser.transcribe(noise_P, RATE).split()) < 50
    assert metrics.dnsmos(noise_P, RATE) < 2


def test_no_audio_is_no_words_and_the_lowest_mark(recogniser):
    assert recogniser.transcribe(np.zeros(0, np.float32), RATE) == ""
    assert metrics.dnsmos(np.zeros(0, np.float32), RATE) == metrics.MOS_FLOOR


@pytest.mark.parametrize(
    ("wave_P", "rate", "message"),
    [
        (np.zeros(RATE), 22_050, "22050 Hz"),
        (np.full(RATE, np.nan), RATE, "finite"),
        (np.zeros((2, RATE)), RATE, "mono"),
    ],
)
def test_bad_audio_is_named(recogniser, wave_P, rate, message):
    with pytest.raises(ValueError, match=message):
        recogniser.transcribe(wave_P, rate)
    with pytest.raises(ValueError, match=message):
        metrics.dnsmos(wave_P, rate)


# Acceptance


@given(st.lists(st.integers(1, 7), min_size=1), st.data())
def test_acceptance_counts_nothing_past_the_end(sizes, data):
    """Case 13: a pass may commit tokens past EOS; only those up to EOS, itself included, count."""
    end = data.draw(st.integers(sum(sizes[:-1]) + 1, sum(sizes)), label="tokens up to EOS")
    block_of = np.repeat(np.arange(len(sizes)), sizes)[:end]
    kept = metrics.blocks(block_of, len(sizes))
    assert metrics.tokens_per_step(kept) == end / len(sizes)
    histogram = metrics.acceptance_histogram(kept)
    assert sum(int(size) * count for size, count in histogram.items()) == end
    assert sum(histogram.values()) == len(sizes)


@pytest.mark.parametrize("block_of", [[0, 2, 1], [0, 1, 3], [-1, 0, 1]])
def test_blocks_out_of_order_or_range_are_an_error(block_of):
    with pytest.raises(ValueError, match="blocks must rise"):
        metrics.blocks(np.array(block_of), steps=3)


def test_acceptance_of_the_decode_loop_is_committed_tokens_over_passes():
    """Case 13 on the loop itself: rows that end inside a block count up to their EOS."""
    model, tree = toy_model(), random_tree(0, nodes=16)
    prompts = make_prompts([[MODEL.output_vocab] * 3] * 12, [60] * 12, range(12), 0, DecodeConfig())
    settings = make_settings(tree, EXACT, DecodeConfig())
    state = generate(model, prompts, settings=settings, slots=first_slots(prompts, tree))
    assert "eos" in [FINISH[code] for code in state.finish_B]
    for said_S, step_S, count, passes in zip(state.said_BS, state.step_BS, state.count_B, state.passes_B, strict=True):
        block_sizes = metrics.blocks(np.asarray(step_S[:count]), int(passes))
        assert metrics.tokens_per_step(block_sizes) == pytest.approx(int(count) / int(passes))
        assert min(block_sizes) >= 1 and block_sizes[0] == 1
        assert MODEL.eos not in said_S[: count - 1]


# Time and files


def test_compilation_is_not_timed():
    calls = []

    @jax.jit
    def double(x):
        return 2 * x

    def call():
        calls.append(None)
        return double(jnp.arange(7))

    for expected in (2, 3):  # twice when it compiles, once from then on
        timed(call)
        assert len(calls) == expected


def test_waves_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "b.wav"
    save_wave(path, np.array([0.5, -2.0], np.float32), RATE)
    wave_P, rate = soundfile.read(path)
    assert rate == RATE
    np.testing.assert_allclose(wave_P, [0.5, -1.0], atol=1e-4)
    with pytest.raises(TypeError):
        save_wave(path, None, RATE)
    assert list(path.parent.glob("*.wav")) == [path]
    np.testing.assert_allclose(soundfile.read(path)[0], wave_P)


# Test sets


def test_text_file_counts_blank_lines_and_keeps_line_numbers(tmp_path):
    (tmp_path / "texts.txt").write_text("First.\n\n  \nSecond.\n")
    sentences, blank = read_sentences(str(tmp_path / "texts.txt"))
    assert [(s.id, s.text) for s in sentences] == [("line0001", "First."), ("line0004", "Second.")]
    assert blank == 2
    with pytest.raises(FileNotFoundError, match="heldout, everyday"):
        read_sentences(str(tmp_path / "nothing.txt"))


@pytest.fixture
def corpus_split(tmp_path):
    chapter = tmp_path / "split" / "7" / "1"
    chapter.mkdir(parents=True)
    for i in range(3):
        wave = np.random.default_rng(i).integers(-9000, 9000, RATE, np.int16)
        soundfile.write(chapter / f"7_1_{i}.wav", wave, RATE)
        (chapter / f"7_1_{i}.normalized.txt").write_text(f"Sentence {i}.")
    return tmp_path / "split"


def test_test_set_keeps_every_sample(tmp_path, corpus_split):
    assert save_testset(corpus_split, tmp_path / "toy") == 3
    for sentence in load_testset("toy", tmp_path):
        wave_P, rate = soundfile.read(corpus_split / "7" / "1" / f"{sentence.id}.wav", dtype="float32")
        np.testing.assert_array_equal(sentence.wave_P, wave_P)
        assert (sentence.sample_rate, sentence.text) == (rate, f"Sentence {sentence.id[-1]}.")


def test_incomplete_split_leaves_the_old_set(tmp_path, corpus_split):
    save_testset(corpus_split, tmp_path / "toy")
    (corpus_split / "7" / "1" / "7_1_1.normalized.txt").unlink()
    with pytest.raises(ValueError, match="no complete test set"):
        save_testset(corpus_split, tmp_path / "toy")
    assert len(load_testset("toy", tmp_path)) == 3


def test_shipped_sets():
    sets = {name: load_testset(name) for name in NAMES}
    assert {name: len(sentences) for name, sentences in sets.items()} == {"heldout": 100, "everyday": 40}
    everything = [sentence for sentences in sets.values() for sentence in sentences]
    assert len({sentence.text for sentence in everything}) == 140
    assert all(s.sample_rate == RATE and len(s.wave_P) > RATE / 2 for s in everything)
    assert sum(path.stat().st_size for path in ROOT.rglob("*.*")) < 12e6


# Rows, tables, pictures


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("wav")
    recorded = np.random.default_rng(0).uniform(-0.1, 0.1, RATE).astype(np.float32)
    sentences = [Sentence("a", "the same words", recorded), Sentence("b", "never the same words | again", recorded)]
    clips = reference_clips(sentences, RoundCodec(), out)
    clips += speak(ToneVoice(), sentences, MODES, seeds=2, out=out, batch=2)
    scored = score(clips, Parrot())
    return out, clips, scored, rows(scored, RAN)


def test_every_mode_is_one_row_framed_by_truth_and_codec(measured):
    _, _, _, table = measured
    assert [row["mode"] for row in table] == ["ground_truth", "codec", *MODES]
    assert all(set(KEYS) <= set(row) for row in table)
    ar, exact, tolerance = table[2:]
    assert ar["speedup"] == ar["identical_to_ar"] == exact["identical_to_ar"] == 1.0
    assert ar["tokens"] == exact["tokens"] == tolerance["tokens"]
    assert ar["steps"] == ar["tokens"] and ar["tokens_per_step"] == 1 < exact["tokens_per_step"] < 3
    assert ar["finish_reasons"] == {"eos": 4}
    assert (ar["utterances"], ar["seeds"], ar["batch"]) == (2, 2, 2)
    assert ar["wer"] == pytest.approx(2 / 8)
    assert ar["wer_over_truth"] == 0 and exact["wer_over_ar_interval"] == (0, 0)


def test_every_wave_is_on_disk(measured):
    out, clips, _, _ = measured
    for clip in clips[4:]:
        path = out / file_name(clip.mode) / f"seed{clip.seed}" / f"{clip.sentence.id}.wav"
        np.testing.assert_allclose(soundfile.read(path)[0], clip.wave_P, atol=1e-4)


def test_a_run_without_ar_has_no_speedup(measured):
    _, _, scored, _ = measured
    (row,) = rows([one for one in scored if one.clip.mode == "exact"], RAN)
    assert row["speedup"] is None and row["identical_to_ar"] is None
    assert row["rtf"] > 0


def test_speed_table_states_its_conditions(measured):
    """Case 21: no speed-up without batch, device, dtype, tokens and mode."""
    *_, table = measured
    for columns in (report.SPEED, report.SUMMARY):
        assert {"mode", "batch", "device", "dtype", "tokens", "speedup"} <= set(columns)
        header, rule, *lines = report.markdown_table(table, columns).splitlines()
        assert len(lines) == len(table)
        assert header.count("|") == rule.count("|") == len(columns) + 1


def test_report_files(measured, tmp_path):
    *_, scored, table = measured
    utterances = report.utterance_rows(scored)
    assert utterances[0]["wer"] == max(row["wer"] for row in utterances)
    report.write_json(tmp_path / "metrics.json", table)
    assert [row["mode"] for row in json.loads((tmp_path / "metrics.json").read_text())] == [r["mode"] for r in table]
    report.write_csv(tmp_path / "metrics.csv", table)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 1 + len(table)
    page = report.report("A title", {"sentences": 2}, table, utterances)
    assert "words \\| again" in page and "- sentences: 2" in page


def test_pictures_are_drawn_even_of_nothing(measured, tmp_path):
    _, clips, _, table = measured
    nothing = Spoken("", np.zeros(0, int), np.zeros(0, np.float32), RATE, "eos", 1, np.zeros(1, int))
    empty = Clip(Sentence("c", "x"), "ar", 0, nothing.wave, RATE, nothing)
    plots.plot_acceptance(tmp_path / "acceptance.png", table)
    plots.plot_spectrograms(tmp_path / "spectrograms.png", [*clips[4:6], empty])
    for name in ("acceptance.png", "spectrograms.png"):
        assert plots.plt.imread(tmp_path / name).std() > 0.05
    assert len(list(tmp_path.iterdir())) == 2


def test_identity_is_measured_per_sentence_and_seed():
    def spoken(tokens):
        return Spoken("", np.array(tokens), np.zeros(320, np.float32), RATE, "eos", 2, np.array([0, 1, 1]))

    scored = [
        Scored(Clip(Sentence(id, "x"), mode, seed, np.zeros(320), RATE, spoken(tokens), 0.1), "", Errors(1, 1), 1.0)
        for mode, id, seed, tokens in [
            *[("ar", "a", 0, [1, 2]), ("ar", "a", 1, [3, 4]), ("ar", "b", 0, [5, 6]), ("ar", "b", 1, [7, 8])],
            *[
                ("exact", "b", 1, [7, 8]),
                ("exact", "a", 0, [1, 2]),
                ("exact", "a", 1, [3, 9]),
                ("exact", "b", 0, [5, 6]),
            ],
        ]
    ]
    assert rows(scored, RAN)[1]["identical_to_ar"] == 0.75
