"""Bench: the arithmetic of its figures, and real runs on toy models that compile once and ask the device for little."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys import HEADS, MODEL, random_tree, toy_model

from vadusa_jax.config import SHAPES, Config, DecodeConfig, HeadsConfig, ModelConfig
from vadusa_jax.decode.accept import EXACT, Tolerance
from vadusa_jax.decode.prompts import make_prompts, make_settings
from vadusa_jax.decode.tree import ROOT, chain
from vadusa_jax.evaluation import plots, roofline, speed, speed_report, subjects
from vadusa_jax.evaluation.divergence import divergences
from vadusa_jax.evaluation.scores import device
from vadusa_jax.evaluation.speed import PeerRun, Run, project, queue_rows, speed_rows
from vadusa_jax.model.heads import SpeechLM

DECODE = DecodeConfig()
ONE = dataclasses.replace(MODEL, layers=1)
RUN = Run(
    prefill_s=1.0, decode_s=9.0, batches=2, tokens=20, row_steps=20, passes=18, live=1800.0,
    compilations=0, bare_s=0.4, bandwidth=1e6,
)  # fmt: skip


def toy_subject(trained: bool = True, model: ModelConfig = MODEL) -> subjects.Subject:
    """Five rows of different lengths; none may end before it has said half of its limit."""
    limits = [40, 25, 30, 40, 12]
    prompts = make_prompts([[21] * n for n in (3, 9, 5, 4, 7)], limits, range(5), 0, DECODE, [n // 2 for n in limits])
    subject = subjects.voice_subject("toy", toy_model(model=model), Config(model, HEADS), prompts, "float32")
    return dataclasses.replace(subject, trained=trained)


MODES = {
    "ar": make_settings(ROOT, EXACT, DECODE),
    "exact": make_settings(random_tree(0, nodes=8), EXACT, DECODE),
    "tolerance:3": make_settings(random_tree(0, nodes=8), Tolerance(3), DECODE),
}


# Arithmetic


def test_a_speedup_is_of_one_repetition():
    """A machine that halts for a while slows both sides of a ratio; ratios of medians would be 1 here."""
    ar = [dataclasses.replace(RUN, decode_s=s) for s in (9.0, 99.0, 9.0)]
    fast = [dataclasses.replace(RUN, decode_s=s) for s in (4.0, 49.0, 9.0)]
    row = speed.figures(fast, ar, toy_subject(), MODES["exact"])
    assert row["speedup_range"] == (1.0, 2.0) and row["speedup"] == 2.0
    assert row["step_ratio"] == pytest.approx(99 / 49)


def test_figures_of_made_up_runs():
    subject = toy_subject()
    row = speed.figures([RUN], [RUN], subject, MODES["ar"])
    assert row["prefill_ms"] == 500 and row["ms_per_step"] == 500  # 1 s over 2 batches, 9 s over 18 passes
    assert (row["tokens_per_s"], row["tokens_per_step"], row["speedup"]) == (2.0, 1.0, 1.0)
    moved = roofline.weight_bytes(subject.lm, 0) + 2 * MODEL.layers * MODEL.width * 4 * 100
    assert row["bytes_per_step"] == moved  # 1800 positions over 18 passes are 100
    assert row["bandwidth_share"] == pytest.approx(moved / 1e6 / 0.5)
    assert row["beyond_bare"] == pytest.approx(0.2)


def test_bytes_that_must_move():
    model = ModelConfig(speech_vocab=9, text_vocab=5, layers=3, width=8, attention_heads=2, ffn=16)
    block, head, lm_head = 4 * 64 + 3 * 8 * 16 + 2 * 8, 2 * (64 + 8) + 8 * 10, 8 * 10
    lm = toy_model(model=model, heads=HeadsConfig(count=4, layers=2))
    for used in (0, 1, 4):
        assert roofline.weight_bytes(lm, used) == 4 * (3 * block + 8 + lm_head + used * head)
    half = subjects.in_dtype(lm, model, HeadsConfig(count=4, layers=2), "bfloat16")
    assert roofline.weight_bytes(half, 4) == roofline.weight_bytes(lm, 4) // 2
    assert roofline.cache_bytes(model, 10, jnp.bfloat16) == 2 * 3 * 8 * 2 * 10


def test_only_untrained_models_are_projected_and_from_the_same_mode_nodes_and_batch():
    common = {"dtype": "float32", "shape": "demo", "trained": True}
    voice = [
        {"mode": "exact", "nodes": 8, "batch": 1, "tokens_per_step": 2.5, "step_ratio": 0.5} | common,
        {"mode": "exact", "nodes": 8, "batch": 8, "tokens_per_step": 2.4, "step_ratio": 0.5} | common,
    ]
    common |= {"shape": "25m", "trained": False}
    larger = [
        {"mode": mode, "nodes": nodes, "batch": batch, "step_ratio": 0.8, "step_ratio_range": (0.7, 0.9)} | common
        for mode, nodes, batch in [("exact", 8, 8), ("exact", 8, 2), ("exact", 16, 8), ("tolerance:3", 8, 8)]
    ]
    rows = project(larger + voice)
    assert [row.get("projected_speedup") for row in rows] == pytest.approx([1.92, 2.0, *[None] * 4])
    assert rows[0]["projected_speedup_range"] == pytest.approx((1.68, 2.16))
    assert "speedup" not in rows[0]


def test_untrained_drafts_have_no_tokens_per_second():
    row = speed.figures([RUN], [RUN], toy_subject(trained=False), MODES["exact"])
    assert "ms_per_step" in row and not {"speedup", "tokens_per_s", "tokens_per_step"} & set(row)


def test_turns_alternate():
    order = []
    results = speed.take_turns({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, repeats=3)
    assert order == list("ababab") and results == {"a": [1, 3, 5], "b": [2, 4, 6]}


# Real runs


@pytest.fixture(scope="module", autouse=True)
def hasty():
    """How exactly bandwidth and bare passes are measured does not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "STREAM_BYTES", 2**23)
        patch.setattr(speed, "BARE_S", 0.02)
        yield


@pytest.fixture(scope="module")
def measured():
    subject, untrained = toy_subject(model=ONE), toy_subject(trained=False, model=ONE)
    rows = [row for batch in (1, 2) for row in speed_rows(subject, MODES, batch, repeats=2)]
    rows += speed_rows(untrained, MODES, 1, repeats=2, peer=lambda _: PeerRun(10, 100.0))
    return project(rows), queue_rows(subject, "ar", MODES["ar"], (1, 2), repeats=2)


def test_exact_says_the_same_in_fewer_steps(measured):
    for ar, exact, tolerance in zip(*[iter(measured[0][:6])] * 3, strict=True):
        assert exact["tokens"] == ar["tokens"] and exact["steps"] < ar["steps"] == ar["tokens"]
        assert ar["speedup"] == ar["tokens_per_step"] == 1.0
        assert (ar["nodes"], exact["nodes"], tolerance["nodes"]) == (1, 8, 8)
        for row in (ar, exact, tolerance):
            assert row["prefill_ms"] > 0 and row["ms_per_step"] > 0 and row["bandwidth_share"] > 0
            assert row["ms_per_step_range"][0] <= row["ms_per_step"] <= row["ms_per_step_range"][1]


def test_nothing_is_compiled_in_steady_state(measured):
    rows, queues = measured
    assert [row["compilations"] for row in [*rows, *queues] if row["mode"] != speed.PEER] == [0] * (9 + 2)


def test_the_queue_asks_the_device_at_most_once_per_finished_row(measured):
    for row in measured[1]:
        assert 1 <= row["transfers"] <= row["texts"] == 5
        assert row["transfers_per_64_tokens"] == 64 * row["transfers"] / row["tokens"]
        assert row["tokens"] == measured[0][0]["tokens"]  # neither the queue nor the batch changes what is said


def test_another_implementation_is_a_row_of_its_own(measured):
    (row,) = [row for row in measured[0] if row["mode"] == speed.PEER]
    assert row["tokens"] == 50 and row["tokens_per_s"] == pytest.approx(0.1)
    assert row["speedup"] < 1 < row["ar_over_peer"]


def test_page_states_the_conditions_of_every_row(measured):
    rows, queues = measured
    page = speed_report.page(rows, queues, [], repeats=2)
    header, _, *lines = [line for line in page.split("\n\n")[0].splitlines() if line.startswith("|")]
    assert len(lines) == len(rows)
    for name in ("shape", "mode", "batch", "device", "dtype", "tokens", "speed-up over ar", "projected speed-up"):
        assert f"| {name} |" in header
    assert "recompilations while timed: 0" in page and device() in page
    json.dumps(speed_report.summary(rows, queues), allow_nan=False)


def test_plot_is_drawn(measured, tmp_path):
    plots.plot_speed(tmp_path / "speed.png", measured[0])
    assert plots.plt.imread(tmp_path / "speed.png").std() > 0.05


def test_counting_sees_compilation_and_fetching():
    with roofline.counting() as count:
        jax.device_get(jax.jit(lambda x: 3 * x)(np.arange(5)))
        jax.device_get(jnp.arange(2))
    assert count["compilations"] >= 1 and count["transfers"] == 2
    jax.device_get(jnp.arange(2))
    assert count["transfers"] == 2


def test_a_bare_pass_is_within_the_step():
    """The bare loop really runs the backbone in every turn: XLA counts the work of a loop's body once."""
    lm, tree = toy_model(), chain(3)
    cost = roofline._bare.compiled().lower(
        lm, jnp.asarray(tree.ancestor_TT), jnp.asarray(tree.depth_T), roofline._cache(MODEL, 2, 64, jnp.float32), 5
    ).compile().cost_analysis()  # fmt: skip
    per_token = roofline.weight_bytes(lm, 0) / 4 * 2  # a multiplication and an addition for each weight
    assert cost["flops"] > 2 * 4 * per_token
    assert roofline.measure_bare_s(lm, tree, 2, 64, 5) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_models_say_as_many_tokens_as_asked(monkeypatch, dtype):
    monkeypatch.setitem(SHAPES, "toy", dataclasses.replace(ONE, max_length=2048))
    subject = subjects.random_subject("toy", HEADS, DECODE, dtype, rows=2, tokens=9)
    ar, exact = speed_rows(subject, {"ar": MODES["ar"], "exact": MODES["exact"]}, 2, repeats=1)
    assert ar["tokens"] == exact["tokens"] == 18
    assert ar["dtype"] == dtype and subject.lm.backbone.lm_head.kernel[...].dtype == dtype
    assert len(set(np.asarray(subject.ragged.limit_B).tolist())) > 1


def test_shapes_are_as_large_as_their_names_say():
    for name, size in SHAPES.items():
        lm = nnx.eval_shape(lambda size=size: SpeechLM(size, HeadsConfig(count=1), rngs=nnx.Rngs(0)))
        parameters = sum(x.size for x in jax.tree.leaves(nnx.state(lm.backbone, nnx.Param)))
        assert parameters == pytest.approx(1e6 * int(name.removesuffix("m")), rel=0.15)


def test_transformers_says_as_many_tokens_as_we_do():
    pytest.importorskip("torch", reason="pip install -e .[bench]")
    pytest.importorskip("transformers", reason="pip install -e .[bench]")
    from vadusa_jax.evaluation.peer import transformers_peer

    peer = transformers_peer(MODEL, DECODE, "float32")
    run = peer(make_prompts([[21] * 5] * 2, [7, 7], range(2), 0, DECODE))
    assert run.tokens == 14 and run.wall_s > 0
    with pytest.raises(ValueError, match="one length and one limit"):
        peer(make_prompts([[21] * 5] * 2, [7, 8], range(2), 0, DECODE))


# divergence


def test_float32_never_diverges_and_bfloat16_only_where_two_tokens_are_level():
    prompts = make_prompts([[21] * n for n in range(1, 17, 2)], [120] * 8, range(8), 0, DECODE)
    gaps = {}
    for dtype in ("float32", "bfloat16"):
        lm = subjects.in_dtype(toy_model(), MODEL, HEADS, dtype)
        gaps[dtype] = [found.gap for found in divergences(lm, prompts, MODES["ar"], MODES["exact"], batch=8)]
    assert gaps["float32"] == []
    assert all(gap < 0.3 for gap in gaps["bfloat16"])  # logits of this toy are about 10, bfloat16 has 8 bits
