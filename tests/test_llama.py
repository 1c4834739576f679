"""Laws of converted checkpoints: the logits and the speech of PyTorch, and heads learn on a backbone that stays.

The checkpoint has grouped queries, an epsilon and a rotary base of its own, and its vocabulary is shuffled.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file
from toys import DECODE, HEADS, TINY, TREE, same, speak, tiny_tokens
from transformers import LlamaConfig, LlamaForCausalLM

from vadusa_jax.config import ModelConfig
from vadusa_jax.data.batches import dev_batches, train_batches
from vadusa_jax.decode.accept import Greedy
from vadusa_jax.decode.prompts import make_prompts
from vadusa_jax.decode.tree import ROOT
from vadusa_jax.model.folder import load_lm
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.llama import NotLlama, Rows, load_llama
from vadusa_jax.training.checkpoint import first_parameters
from vadusa_jax.training.loop import train

ROWS = Rows(speech=tuple(range(100, 119)), eos=7, text=(3, 5, *range(120, 246)))
CONFIG = LlamaConfig(
    **{"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    **{"bos_token_id": None, "eos_token_id": 7, "pad_token_id": 0, "initializer_range": 0.3},
)
OURS = np.array([*ROWS.scored, *ROWS.text])  # their row of each of our ids


def checkpoint(folder: Path, dtype: torch.dtype = torch.float32, **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**(CONFIG.to_dict() | changes))).to(dtype).eval()
    with torch.no_grad():
        for name, x in lm.named_parameters():
            if "norm" in name:
                x.normal_(1.0, 0.3)
    lm.save_pretrained(folder)
    return lm


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, checkpoint(folder)


@pytest.fixture(scope="module")
def backbone(theirs, tmp_path_factory) -> tuple[Path, str]:
    """The folder that the command leaves, and what it prints."""
    out = tmp_path_factory.mktemp("backbone") / "out"
    flags = ["--speech", "100:119", "--eos", "7", "--text", "3,5,120:246", "--out", str(out)]
    command = [sys.executable, "-m", "vadusa_jax.convert", "--llama", str(theirs[0]), *flags]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return out, ran.stdout


def difference(theirs: LlamaForCausalLM, ours: SpeechLM) -> float:
    """Largest absolute difference of logits, on random tokens."""
    tokens_BT = np.random.default_rng(0).integers(0, len(OURS), (3, 50))
    with torch.inference_mode():
        logits_BTR = theirs(torch.as_tensor(OURS[tokens_BT])).logits.float().numpy()
    mask_BTT = jnp.broadcast_to(jnp.tril(jnp.ones((50, 50), bool)), (3, 50, 50))
    h_BTD, _ = ours.backbone(jnp.asarray(tokens_BT), jnp.broadcast_to(jnp.arange(50), (3, 50)), mask_BTT)
    return float(np.abs(np.asarray(ours.backbone.logits(h_BTD)) - logits_BTR[..., ROWS.scored]).max())


def test_logits_are_those_of_the_checkpoint(theirs, backbone):
    config, lm = load_lm(backbone[0])
    print("largest difference:", apart := difference(theirs[1], lm))
    assert apart <= 1e-4
    assert config.model == ModelConfig(
        **{"speech_vocab": 19, "text_vocab": 128, "layers": 2, "width": 32, "attention_heads": 4, "ffn": 48},
        **{"max_length": 256, "rope_theta": 5000.0, "norm_eps": 1e-3},
    )
    for name, value in dataclasses.asdict(config.model).items():
        assert f"--config.model.{name}={value}" in backbone[1]


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_other_shapes_and_types_have_their_logits_too(tmp_path, changes):
    checkpoint(tmp_path, **changes)
    # Read again: casting the model itself also rounds its rotary table.
    lm = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert difference(lm, load_llama(tmp_path, ROWS)[1]) <= 1e-4


def test_several_files_are_read_as_one(theirs, tmp_path):
    theirs[1].save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert difference(theirs[1], load_llama(tmp_path, ROWS)[1]) <= 1e-4
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(NotLlama, match=r"has no model-.*safetensors.*pickled weights are not read"):
        load_llama(tmp_path, ROWS)


@pytest.fixture(scope="module")
def trained(backbone, tmp_path_factory) -> tuple[SpeechLM, SpeechLM, SpeechLM]:
    """The converted model; with draft heads as they begin; and after a short training of them alone."""
    found, converted = load_lm(backbone[0])
    folder = tmp_path_factory.mktemp("frozen")
    config = dataclasses.replace(
        TINY,
        model=found.model,
        heads=dataclasses.replace(HEADS, layers=1),
        data=tiny_tokens(folder / "tokens", found.model.speech_vocab),
        train=dataclasses.replace(TINY.train, mode="frozen", steps=3),
    )
    first = first_parameters(backbone[0], config)
    lm = nnx.eval_shape(lambda: SpeechLM(config.model, config.heads, rngs=nnx.Rngs(0)))
    graph = nnx.graphdef(lm)
    begun = nnx.merge(graph, jax.tree.map(jnp.copy, first))  # training gives its arrays away
    batches = train_batches(config.data, config.model)
    params = train(config, folder, batches, lambda: dev_batches(config.data, config.model), progress=False, init=first)
    return converted, begun, nnx.merge(graph, params)


def test_heads_begin_as_copies_and_learn_on_a_fixed_backbone(trained):
    converted, begun, after = (nnx.state(lm, nnx.Param) for lm in trained)
    assert all(same(converted["backbone"], begun["backbone"])) and all(same(converted["backbone"], after["backbone"]))
    for output_DV in begun["heads"]["output"][...]:
        np.testing.assert_array_equal(output_DV, converted["backbone"]["lm_head"]["kernel"][...])
    assert not any(same(begun["heads"], after["heads"]))


@pytest.mark.parametrize("tree", [ROOT, TREE], ids=["plain", "tree"])
def test_greedy_decoding_says_what_the_checkpoint_says(theirs, trained, tree):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, len(OURS), n).tolist() for n in (1, 9, 30)]
    decode = dataclasses.replace(DECODE, repeat_limit=1000)
    rows = speak(trained[2], make_prompts(prompts, [40] * 3, range(3), 0, decode), tree, Greedy(), decode=decode)
    suppressed = sorted(set(range(CONFIG.vocab_size)) - set(ROWS.scored))
    for prompt, row in zip(prompts, rows, strict=True):
        given = torch.as_tensor(OURS[prompt])[None]
        said = theirs[1].generate(given, do_sample=False, max_new_tokens=40, suppress_tokens=suppressed)
        assert OURS[list(row.tokens)].tolist() == said[0, len(prompt) :].tolist()
    assert tree is ROOT or sum(row.passes for row in rows) < sum(len(row.tokens) for row in rows)


def change_config(folder: Path, **changes) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2', only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'llama3', only 'default'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"head_dim": 16}, "head_dim is 16, only 8"),
        ({"num_key_value_heads": 3}, "4 heads do not share 3 keys evenly"),
        ({"num_hidden_layers": 3}, r"parameter model.layers.2.input_layernorm.weight has shape none.* asks \(32,\)"),
        ({"num_hidden_layers": 1}, r"parameter model.layers.1.input_layernorm.weight has shape \(32,\).* asks none"),
        ({"intermediate_size": 64}, r"mlp.down_proj.weight has shape \(32, 48\).* asks \(32, 64\)"),
        ({"num_key_value_heads": 4}, r"self_attn.k_proj.weight has shape \(16, 32\).* asks \(32, 32\)"),
    ],
)
def test_what_does_not_fit_the_backbone_is_named(theirs, tmp_path, changes, message):
    folder = shutil.copytree(theirs[0], tmp_path / "llama")
    change_config(folder, **changes)
    with pytest.raises(NotLlama, match=message):
        load_llama(folder, ROWS)


def test_parameters_too_many_or_too_few_are_named(theirs, tmp_path):
    folder = shutil.copytree(theirs[0], tmp_path / "llama")
    stored, table = load_file(folder / "model.safetensors"), {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    for extra, message in (
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, r"q_proj.bias has shape \(32,\).*it has no biases"),
        ({"model.layers.1.mlp.gate_proj.weight": None}, r"gate_proj.weight has shape none.* asks \(48, 32\)"),
        ({"lm_head.weight": None}, r"lm_head.weight has shape none.* asks \(260, 32\)"),
    ):
        kept = {name: x for name, x in (stored | extra).items() if x is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(NotLlama, match=message):
            load_llama(folder, ROWS)
    save_file(stored | {name: torch.zeros(4) for name in table}, folder / "model.safetensors")  # as LLaMA 1 had it
    load_llama(folder, ROWS)


@pytest.mark.parametrize(
    ("rows", "message"),
    [({"eos": 260}, r"rows 0 to 259, not \[260\]"), ({"text": (-1, 3)}, r"not \[-1\]"), ({"eos": 100}, "not distinct")],
)
def test_rows_that_do_not_exist_are_named(theirs, rows, message):
    with pytest.raises(NotLlama, match=message):
        load_llama(theirs[0], dataclasses.replace(ROWS, **rows))


def test_pickled_weights_are_not_read(theirs, tmp_path):
    shutil.copy(theirs[0] / "config.json", tmp_path)
    torch.save(theirs[1].state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(NotLlama, match=r"has no model.safetensors.*pickled weights are not read"):
        load_llama(tmp_path, ROWS)
