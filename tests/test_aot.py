"""Steps compiled for TPUs: what they move is counted right, the cache stays in place, nothing asks the host."""

import jax.numpy as jnp
import pytest
from toys import HEADS, MODEL, random_tree

from vadusa_jax.decode.tree import ROOT
from vadusa_jax.evaluation import chips, hlo, tpu

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


def test_what_is_not_known_is_named():
    with pytest.raises(chips.NoTopology, match=r"unknown chip 'v9' in 'v9:2x2'; known are v4, v5e, v5p, v6e"):
        chips.find_topology("v9:2x2")


@pytest.mark.slow
@pytest.mark.parametrize("tree", [ROOT, random_tree(0, 8)], ids=len)
def test_a_step_compiled_for_a_tpu_keeps_the_cache_in_place_and_asks_no_host(tree):
    pytest.importorskip("libtpu", reason="the compiler for TPUs comes with the extra [aot]")
    step = tpu.Step(MODEL, HEADS, tree, 2, 256, jnp.bfloat16)
    compiled, _ = tpu.compile_step(chips.find_topology("v5e:2x2"), step)
    text = compiled.as_text()
    assert not any(word in text for word in ("infeed", "outfeed", "host_transfer=true", "send(", "recv("))
    cache = 2 * MODEL.layers * 2 * 256 * MODEL.width * 2
    assert compiled.memory_analysis().alias_size_in_bytes >= cache
    row = tpu.step_row("v5e:2x2", step)
    assert 0 < row["minimum_bytes"] <= row["hbm_bytes"] and row["minimum_us"] <= row["roofline_us"]
    assert row["minimum_bytes"] > cache
