"""Evaluation: timing, test sets, and the tables and pictures of a measurement."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soundfile

from vadusa_jax.evaluation import clip_plots, plots, report
from vadusa_jax.evaluation.clips import Clip, file_name, reference_clips, save_wave, speak, timed
from vadusa_jax.evaluation.metrics import Errors
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


class TwoBooks:
    """A codec of two codebooks at half the recordings' rate: coarse steps, and what they leave."""

    sample_rate, codebooks = RATE // 2, 2

    def encode_all(self, wave_P):
        coarse_P = np.round(wave_P * 10)
        return np.stack([coarse_P, np.round(1000 * (wave_P - coarse_P / 10))]).astype(np.int32)

    def decode_all(self, tokens_QT):
        return (tokens_QT[0] / 10 + tokens_QT[1] / 1000).astype(np.float32)


def test_codecs_of_another_rate_and_of_several_codebooks_are_measured():
    wave_P = 0.1 * np.sin(np.arange(RATE) / 20).astype(np.float32)
    truth, again = reference_clips([Sentence("a", "the same words", wave_P)], TwoBooks())
    assert len(again.wave_P) == RATE // 2 and again.audio_s == truth.audio_s == 1.0
    np.testing.assert_allclose(again.wave_P[100:-100], wave_P[::2][100:-100], atol=2e-3)
    heard = []

    class Listener(Parrot):
        def transcribe(self, wave, sample_rate):
            heard.append((len(wave), sample_rate))
            return super().transcribe(wave, sample_rate)

    score([truth, again], Listener())
    assert heard == [(RATE, RATE)] * 2


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
    for row, read in zip(table, report.read_csv(tmp_path / "metrics.csv"), strict=True):
        assert read == {key: row.get(key) for key in read} and set(row) <= set(read)
    page = report.report("A title", {"sentences": 2}, table, utterances)
    assert "words \\| again" in page and "- sentences: 2" in page


def test_pictures_are_drawn_even_of_nothing(measured, tmp_path):
    _, clips, _, table = measured
    nothing = Spoken("", np.zeros(0, int), np.zeros(0, np.float32), RATE, "eos", 1, np.zeros(1, int))
    empty = Clip(Sentence("c", "x"), "ar", 0, nothing.wave, RATE, nothing)
    plots.plot_acceptance(tmp_path / "acceptance.png", table)
    clip_plots.plot_spectrograms(tmp_path / "spectrograms.png", [*clips[4:6], empty])
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
