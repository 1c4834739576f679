"""Ablation: which cells a grid has, what a voice cannot speak, and that an interruption changes no figure."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx
from toys import HEADS, toy_voice

from vadusa_jax.config import DecodeConfig, HeadsConfig
from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.decode.trees import Trees
from vadusa_jax.evaluation import ablation, ablation_plots, report
from vadusa_jax.evaluation.ablation import Study, Subject, fingerprint
from vadusa_jax.evaluation.ablation_groups import compare
from vadusa_jax.evaluation.ablation_report import COLUMNS, page
from vadusa_jax.evaluation.grid import RULES, Cell, grid, obstacle, samplings
from vadusa_jax.evaluation.testsets import Sentence
from vadusa_jax.model.folder import load_lm, save_lm
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.voice import DEMO_MODEL, Voice

DECODE = DecodeConfig()
CELLS = grid(["exact", "tolerance:3"], [4], [2, 4], [DECODE])
TIMES = ("wall_s", "rtf", "speedup", "reference_rtf")  # what a second run need not repeat


class Parrot:
    """A recogniser that always hears the same words, until its patience ends."""

    cpu_threads = 1

    def __init__(self, patience: int = 1000):
        self.patience = patience

    def transcribe(self, wave, sample_rate):
        self.patience -= 1
        if self.patience < 0:
            raise KeyboardInterrupt
        return "good morning"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_voice(tmp_path_factory.mktemp("voice") / "toy")


@pytest.fixture(scope="module")
def subject(folder):
    return Subject("toy", Voice.load(folder), fingerprint(folder))


@pytest.fixture(scope="module")
def sentences():
    recorded_P = np.random.default_rng(0).uniform(-0.1, 0.1, 8000).astype(np.float32)
    return [Sentence(id, text, recorded_P) for id, text in (("a", "Good morning."), ("b", "Tea, please."))]


@pytest.fixture(scope="module")
def study(sentences, tmp_path_factory):
    return Study(sentences, 1, 2, Parrot(), "a parrot", ["dnsmos"], tmp_path_factory.mktemp("cells"))


@pytest.fixture(scope="module")
def table(study, subject):
    return list(ablation.run(study, subject, CELLS))


def timeless(rows):
    return [{key: row[key] for key in row if not key.startswith(TIMES)} for row in rows]


# The grid


def test_every_cell_comes_once_after_its_plain_decoding():
    cells = grid(["greedy", *RULES, "exact:nodes=8"], [8, 16], [1, 2], [DECODE])
    assert len(set(cells)) == len(cells)
    for place, cell in enumerate(cells):
        assert cell.reference in cells[: place + 1]
        assert cell.reference.reference == cell.reference
    assert {cell.reference.mode for cell in cells if cell.mode.startswith("greedy")} == {"greedy_ar"}


@pytest.mark.parametrize(
    ("mode", "count"), [("ar", 1), ("ssd", 2), ("exact:draft=3", 2), ("viterbi", 3), ("exact:chain=2", 3), ("pcg", 5)]
)
def test_heads_and_nodes_vary_only_where_they_matter(mode, count):
    assert len(grid([mode], [8, 16], [1, 2], [DECODE])) == count


def test_a_tree_of_one_node_needs_no_heads():
    assert [(cell.mode, cell.heads) for cell in grid(["exact"], [1, 8], [1, 2], [DECODE])[1:]] == [
        *(("exact:nodes=1", None), ("exact:nodes=8", 1), ("exact:nodes=8", 2)),
    ]


def test_cells_that_differ_in_sampling_have_names_of_their_own():
    cells = grid(["ar"], [8], [None], samplings(DECODE, {"temperature": [0.5, 1.0], "repeat_window": [0, 10]}))
    assert len({cell.name for cell in cells}) == len(cells) == 4


def test_samplings_are_all_combinations():
    made = samplings(DECODE, {"temperature": [0.5, 1.0], "top_k": [0, 5, 25], "top_p": []})
    assert len(set(made)) == 6 and {one.top_p for one in made} == {DECODE.top_p}
    assert samplings(DECODE, {"temperature": []}) == [DECODE]
    with pytest.raises(ValueError, match="temperature must be above 0"):
        samplings(DECODE, {"temperature": [0.0]})


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (Cell("ssd", None, DECODE), "no draft model"),
        (Cell("viterbi", None, DECODE), "fit_tree"),
        (Cell("exact:nodes=4", HEADS.count + 1, DECODE), f"has {HEADS.count} draft heads"),
        (Cell("exact:nodes=999", None, DECODE), "the fitted tree has 8"),
        (Cell("pcg:nodes=4", None, dataclasses.replace(DECODE, repeat_window=10)), "repetition-aware"),
        (Cell("exact:nodes=4", 2, DECODE), None),
        (Cell("ar", None, DECODE), None),
    ],
)
def test_what_a_voice_cannot_speak_is_told(subject, cell, why):
    told = obstacle(subject.voice, cell, batch=1)
    assert told is why is None or why in told


def test_a_backbone_alone_says_one_token_a_step(folder, tmp_path):
    bare = shutil.copytree(folder, tmp_path / "bare")
    config, lm = load_lm(bare)
    none = dataclasses.replace(config, heads=HeadsConfig(count=0))
    backbone = SpeechLM(none.model, none.heads, rngs=nnx.Rngs(0))
    nnx.update(backbone.backbone, nnx.state(lm.backbone))
    save_lm(bare, none, backbone)
    Trees({}).save(bare / "trees.json")
    said, alone = (Voice.load(one).speak(["Good morning."], parse_mode("ar"), 0)[0] for one in (folder, bare))
    assert np.array_equal(said.tokens, alone.tokens) and alone.steps == len(alone.block_of)
    assert "0 draft heads" in obstacle(Voice.load(bare), Cell("exact:nodes=8", None, DECODE), batch=1)


# Cells


def test_one_row_a_cell_framed_by_recordings_and_codec(table, subject):
    assert [row["mode"] for row in table] == ["ground_truth", "codec", *(cell.mode for cell in CELLS)]
    assert [row.get("heads") for row in table[2:]] == [0, 2, 4, 2, 4]
    plain = table[2]
    for row in table[2:]:
        assert row["model"] == "toy" and row["reference"] == "ar" and row["training"] == "joint"
        assert row["speedup"] == pytest.approx(row["reference_rtf"] / row["rtf"])
        assert row["nodes"] == 1 + 3 * (row["mode"] != "ar")
        assert all(row[key] == plain[key] for key in ("batch", "device", "dtype"))
        for figure in ("wer", "cer", "dnsmos", "rtf", "tokens_per_step"):
            low, high = row[f"{figure}_interval"]
            assert low <= row[figure] + 1e-9 and row[figure] - 1e-9 <= high
    for row in table[3:5]:  # exact, with whatever heads
        assert row["identical_to_ar"] == 1 and row["tokens"] == plain["tokens"] and row["steps"] < plain["steps"]
        assert row["wer_over_ar"] == 0 and tuple(row["wer_over_ar_interval"]) == (0, 0)
    assert table[3]["steps"] >= table[4]["steps"]


def test_an_interrupted_run_gives_the_same_table(study, subject, table, tmp_path):
    torn = dataclasses.replace(study, folder=tmp_path, recogniser=Parrot(patience=4))
    with pytest.raises(KeyboardInterrupt):
        list(ablation.run(torn, subject, CELLS))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert 0 < len(kept) < 1 + len(CELLS) and all(path.suffix == ".json" for path in kept)
    whole = list(ablation.run(dataclasses.replace(torn, recogniser=Parrot()), subject, CELLS))
    assert timeless(whole) == timeless(table)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_finished_cells_are_neither_spoken_nor_heard_again(study, subject, table):
    mute = dataclasses.replace(subject, voice=dataclasses.replace(subject.voice, codec=_Mute(subject.voice.codec)))
    assert list(ablation.run(dataclasses.replace(study, recogniser=Parrot(0)), mute, CELLS)) == table


class _Mute:
    def __init__(self, codec):
        self.vocab_size = codec.vocab_size

    def decode(self, tokens):
        raise AssertionError("spoken again")


def test_a_changed_voice_makes_its_cells_stale(study, subject, folder, table, tmp_path):
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "card.md").write_text("A card changes no figure.")
    assert fingerprint(changed) == subject.fingerprint
    trees = json.loads((changed / "trees.json").read_text())
    for fitted in trees["trees"].values():
        fitted["tree"], fitted["expected_T"] = [[], [0], [1], [2]], fitted["expected_T"][:4]
    (changed / "trees.json").write_text(json.dumps(trees))
    before = set(study.folder.iterdir())
    other = Subject("toy", Voice.load(changed), fingerprint(changed))
    cells = [Cell("exact:nodes=4", None, DECODE)]
    *_, row = ablation.run(study, other, cells)
    assert len(set(study.folder.iterdir()) - before) == 2  # the references and the cell
    assert row["steps"] != table[4]["steps"] and row["tokens"] == table[4]["tokens"]


@pytest.mark.parametrize("change", [{"batch": 1}, {"seeds": 2}, {"heard_by": "another"}, {"sentences": []}])
def test_every_condition_is_part_of_a_cells_identity(study, subject, change):
    changed = dataclasses.replace(study, **change)
    assert ablation._identity(changed, subject, CELLS[0]) != ablation._identity(study, subject, CELLS[0])


def test_runs_of_a_name_are_taken_together_and_compared_with_the_first():
    def row(model, loss):
        return {"model": model, "mode": "ar", "dev_loss": loss, **{key: 0 for key in ablation_plots.SAMPLING}}

    told = [
        (row("none@0", 2.0), {"wer": ([1, 0], [10, 10]), "tokens_per_step": ([50, 50], [50, 50])}),
        (row("none@1", 2.1), {"wer": ([0, 1], [10, 10]), "tokens_per_step": ([50, 50], [50, 50])}),
        (row("joint@0", 1.9), {"wer": ([2, 2], [10, 10]), "tokens_per_step": ([50, 50], [25, 25])}),
    ]
    none, joint = compare(told)
    assert (none["runs"], none["dev_loss"], none["wer"], none["tokens_per_step"]) == (2, [2.0, 2.1], 0.05, 1.0)
    assert (joint["runs"], joint["wer"], joint["tokens_per_step"]) == (1, 0.2, 2.0)
    assert joint["wer_over_first"] == pytest.approx(0.15) and "wer_over_first" not in none
    np.testing.assert_allclose(joint["wer_over_first_interval"], (0.15, 0.15))
    text = page({}, [], [], [], [none, joint])
    assert "| none | 2 | 2.000, 2.100 | ar | 1.00 |" in text


def test_a_row_is_made_of_what_its_sentences_add_up_to(table):
    for row in table[2:]:
        (errors, words), (tokens, steps) = (np.sum(row[ablation.SUMS][key], axis=1) for key in ablation.RATES)
        assert (tokens, steps, errors / words) == (row["tokens"], row["steps"], pytest.approx(row["wer"]))


# Page and pictures


def test_page_names_conditions_and_what_was_left_out(table):
    header = report.markdown_table(table, COLUMNS).splitlines()[0]
    for name in ("mode", "batch", "device", "dtype", "tokens", "speed-up", "WER"):
        assert name in header
    text = page({"seeds": "0"}, table, [("toy", Cell("ssd", None, DECODE), "no draft model")], ["tradeoff.png"])
    assert "- toy, `ssd`: no draft model" in text and "![tradeoff.png](tradeoff.png)" in text


def test_pictures(table, tmp_path):
    for plot in (ablation_plots.plot_heads, ablation_plots.plot_tolerance, ablation_plots.plot_tradeoff):
        assert plot(tmp_path / "picture.png", table)
        assert ablation_plots.plt.imread(tmp_path / "picture.png").std() > 0.05
    assert not ablation_plots.plot_heads(tmp_path / "none.png", table[:4])
    assert not ablation_plots.plot_tolerance(tmp_path / "none.png", table[:4])
    assert not (tmp_path / "none.png").exists()


# The command


@pytest.mark.slow
def test_command_on_the_demo_voice_goes_on_where_it_was(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def run():
        arguments = f"--models demo={DEMO_MODEL} --modes tolerance:3,ssd --nodes 8 --limit 2 --out {tmp_path}"
        command = [sys.executable, "-m", "vadusa_jax.ablate", *arguments.split()]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    first = run()
    assert first.returncode == 0, first.stderr
    rows = json.loads((tmp_path / "ablation.json").read_text())
    truth, codec, plain, tolerance = rows
    assert truth["wer"] < 0.3 and codec["wer"] < 0.5 and plain["tokens_per_step"] == 1 < tolerance["tokens_per_step"]
    assert "Left out: demo, `ssd`" in first.stdout and "- demo, `ssd`" in (tmp_path / "ablation.md").read_text()
    again = run()
    assert again.returncode == 0 and json.loads((tmp_path / "ablation.json").read_text()) == rows
    assert len(list((tmp_path / "cells").iterdir())) == 3
