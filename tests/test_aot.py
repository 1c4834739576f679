"""Steps compiled for TPUs: what they move is counted right, the cache stays in place, nothing asks the host."""

import jax
import jax.numpy as jnp
import pytest
from toys import HEADS, MODEL, random_tree

from configs import libritts
from vadusa_jax.config import Config, DataConfig, from_config_dict
from vadusa_jax.decode.tree import ROOT
from vadusa_jax.evaluation import hlo, pods, topology, tpu
from vadusa_jax.training.compiled import compile_train
from vadusa_jax.training.step import make_model

HLO = """\
HloModule step

%body.1 (arg: f32[8]) -> f32[8] {
  %arg = f32[8]{0} parameter(0)
  ROOT %twice = f32[8]{0} add(%arg, %arg)
}

%fused_computation.2 (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %e = f32[1000]{0} exponential(%p)
}

ENTRY %main (w: bf16[1000,10]) -> f32[10] {
  %w = bf16[1000,10]{1,0} parameter(0)
  %x = f32[1000]{0:S(1)} parameter(1)
  %cache = f32[500]{0} parameter(2)
  %new = f32[5]{0} parameter(3)
  %at = s32[]{:S(6)} constant(7)
  %fetch = (bf16[1000,10]{1,0}, bf16[1000,10]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%w), metadata={op_name="w"}
  %fetched = bf16[1000,10]{1,0:S(1)} copy-done(%fetch)
  %product = f32[10]{0:S(1)} fusion(%x, %fetched), kind=kOutput, calls=%fused_computation.2
  %written = f32[500]{0} dynamic-update-slice(%cache, %new, %at), metadata={op_name="c"}
  %loop = f32[8]{0} while(%new), condition=%cond, body=%body.1
  %kept = f32[500]{0} dynamic-update-slice(%written, %x, %at)
  %six = f32[10]{0:S(1)} fusion(%x, %x, %x, %x, %x, /*index=5*/%new), kind=kLoop, calls=%fused_computation.2
  ROOT %out = f32[10]{0} copy(%product)
}
"""


def test_a_fetch_counts_once_an_update_by_its_size_and_fast_memory_not_at_all():
    counted = [x for x in hlo.memory_traffic(hlo.read(HLO))]
    assert counted == [3 * 8 * 4, 1000 * 10 * 2, 2 * 5 * 4, 1000 * 4, 5 * 4, 10 * 4]


LOOP = """\
HloModule step

%fused_computation.3 (a: bf16[4,8,16], b: bf16[4,16,2]) -> bf16[4,8,2] {
  %a = bf16[4,8,16]{2,1,0} parameter(0)
  %b = bf16[4,16,2]{2,1,0} parameter(1)
  ROOT %c = bf16[4,8,2]{2,1,0} convolution(%a, %b), window={size=4}, dim_labels=0bf_0io->0bf
}

%turns (arg: bf16[4,8,16]) -> pred[] {
  %arg = bf16[4,8,16]{2,1,0} parameter(0)
  %end = s32[]{:T(128)} constant(3)
  ROOT %less = pred[] compare(%count, %end), direction=LT
}

%turn (arg: bf16[4,8,16]) -> bf16[4,8,2] {
  %arg = bf16[4,8,16]{2,1,0} parameter(0)
  %w = bf16[4,16,2]{2,1,0} constant(1)
  ROOT %p = bf16[4,8,2]{2,1,0} fusion(%arg, %w), kind=kOutput, calls=%fused_computation.3
}

ENTRY %main (x: bf16[4,8,16], g: f32[100]) -> f32[100] {
  %x = bf16[4,8,16]{2,1,0} parameter(0)
  %g = f32[100]{0} parameter(1)
  %q = bf16[2,3,256,64]{3,2,1,0} bitcast(%x)
  %splash_mha_fwd.1 = bf16[2,3,256,64]{3,2,1,0} custom-call(%x, %x, %q), target="tpu_custom_call", settings={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="attention"}
  %loop = bf16[4,8,2]{2,1,0} while(%x), condition=%turns, body=%turn
  %part = f32[25]{0} reduce-scatter(%g), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %start = (f32[25]{0}, f32[100]{0}) all-gather-start(%part), replica_groups=[2,4]<=[8], dimensions={0}
  %all = f32[100]{0} all-gather-done(%start)
  %sum = f32[100]{0} all-reduce(%all), replica_groups=mesh['a'=4,'b'=2] {'b'}, to_apply=%add
  ROOT %next = f32[100]{0} collective-permute(%sum), source_target_pairs={{0,1},{1,0}}
}
"""


def test_products_count_as_often_as_their_loop_turns_and_kernels_by_their_tiles():
    program = hlo.read(LOOP)
    kernel = 2 * 2 * 2 * 3 * 64 * (256**2 * 3 / 4)  # three of four tiles
    assert hlo.products(program) == pytest.approx(3 * 2 * 4 * 8 * 16 * 2 + kernel)
    moved = 2 * (4 * 8 * 16 + 4 * 16 * 2 + 4 * 8 * 2)
    assert sum(hlo.memory_traffic(program)) >= 3 * moved and 3.0 * moved in hlo.memory_traffic(program)


def test_collectives_are_counted_by_kind_with_what_a_device_sends():
    assert hlo.collectives(hlo.read(LOOP), 8) == {
        "reduce-scatter": (1, 400 * 3 / 4),
        "all-gather": (1, 100 * 3),
        "all-reduce": (1, 400 * 2 * 1 / 2),
        "collective-permute": (1, 400),
    }


def test_an_axis_that_is_no_ring_has_half_the_links():
    assert topology.interconnect("v5e:4x4") == 2 * 45e9 and topology.interconnect("v5e:16x16") == 4 * 45e9
    assert topology.interconnect("v5p:2x2x1") == 2 * 90e9 and topology.chip_count("v5p:2x2x1") == 4


def test_what_is_not_known_is_named():
    with pytest.raises(topology.NoTopology, match=r"unknown chip 'v9' in 'v9:2x2'; known are v4, v5e, v5p, v6e"):
        topology.find_topology("v9:2x2")


@pytest.mark.slow
@pytest.mark.parametrize("tree", [ROOT, random_tree(0, 8)], ids=len)
def test_a_step_compiled_for_a_tpu_keeps_the_cache_in_place_and_asks_no_host(tree, monkeypatch):
    pytest.importorskip("libtpu", reason="the compiler for TPUs comes with the extra [aot]")
    step = tpu.Step(MODEL, HEADS, tree, 2, 256, jnp.bfloat16)
    compiled, seconds = tpu.compile_step(topology.find_topology("v5e:2x2"), step)
    text = compiled.as_text()
    assert not any(word in text for word in ("infeed", "outfeed", "host_transfer=true", "send(", "recv("))
    cache = 2 * MODEL.layers * 2 * 256 * MODEL.width * 2
    assert compiled.memory_analysis().alias_size_in_bytes >= cache
    monkeypatch.setattr(tpu, "compile_step", lambda *_: (compiled, seconds))  # once is enough
    row = tpu.step_row("v5e:2x2", step)
    assert 0 < row["minimum_bytes"] <= row["hbm_bytes"] and row["minimum_us"] <= row["roofline_us"]
    assert row["minimum_bytes"] > cache


def train_row(name, config):
    return pods.train_row(name, config, compile_train(config, topology.find_topology(name).devices))


@pytest.mark.parametrize("most", [0, 1, 2, 7, 8, 100])
def test_the_largest_batch_is_found_whether_memory_is_linear_or_not(most):
    for bend in (0, 5):
        needs = {rows: 300 + 100 * rows - bend * rows for rows in range(2 * most + 400)}
        tries = []

        def fits(rows, needs=needs, tries=tries):
            tries.append(rows)
            return needs[rows] if rows <= most else None

        assert pods.largest_rows(fits, needs[most]) == most and len(tries) < 12 + most // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:4x4", "v5p:2x2x2", "v6e:4x4"])  # v4:2x2x1 is sold as v4-8
def test_a_training_step_compiles_for_a_pod_and_is_accounted_for(name):
    pytest.importorskip("libtpu", reason="the compiler for TPUs comes with the extra [aot]")
    config = pods.with_rows(Config(model=MODEL, heads=HEADS, data=DataConfig(row_length=256)), name, 2)
    row = train_row(name, config)
    parameters = 4 * sum(x.size for x in jax.tree.leaves(make_model(config)[1]))
    assert 2 * parameters < row["state_bytes"] < row["memory_bytes"] < topology.find_chip(name).memory
    assert row["flops"] > 0.5 * row["model_flops"] and 0 < row["mfu_bound"] < 1
    n = row["chips"]
    sent = row["collectives"]["all-reduce"]["bytes"]
    assert parameters * 2 * (n - 1) / n <= sent < 1.3 * parameters * 2 * (n - 1) / n  # every gradient once


@pytest.mark.slow
def test_libritts_fits_a_v5e_with_16k_tokens_a_chip():
    pytest.importorskip("libtpu", reason="the compiler for TPUs comes with the extra [aot]")
    config = from_config_dict(libritts.get_config())
    row = train_row("v5e:4x4", pods.with_rows(config, "v5e:4x4", 16_384 // config.data.row_length))
    assert row["tokens"] >= 16_000 and row["memory_share"] < 1
    gradients = 4 * sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: make_model(config)[1])))
    assert row["collectives"]["all-reduce"]["bytes"] < 2 * gradients  # each once, though heads run in chunks
