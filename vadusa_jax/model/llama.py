"""LLaMA-shaped checkpoints of PyTorch as backbones: `LlamaForCausalLM` in a folder that `save_pretrained` wrote.

Read are `config.json` and safetensors, of any float type, in one file or several; pickled weights are not. LAYER and
WHOLE say what is called what. Matrices are transposed. The embedding and the LM head keep the rows that `Rows` names,
in our order; tied ones become two. Keys and values of grouped queries are repeated for every head that shares them:
that computes the same and needs a larger cache. Rotary positions pair the halves of a head in both, so nothing moves.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from safetensors import safe_open

from vadusa_jax.config import CONFIG, HeadsConfig, ModelConfig
from vadusa_jax.model.folder import WEIGHTS
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.weights import set_weights

INDEX = f"{WEIGHTS}.index.json"  # where there are several files: which of them has what
FILES = (CONFIG, INDEX, "model*.safetensors")
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Shapes: D width, F feed-forward width, C width of keys and values, R rows of the vocabulary.
WHOLE = {
    EMBEDDING: ("backbone.embedding", "RD"),
    "model.norm.weight": ("backbone.norm.scale", "D"),
    LM_HEAD: ("backbone.lm_head.kernel", "RD"),
}
LAYER = {  # behind `model.layers.I.`, and ours behind `backbone.blocks.I.`
    "input_layernorm.weight": ("attention_norm.scale", "D"),
    "self_attn.q_proj.weight": ("q.kernel", "DD"),
    "self_attn.k_proj.weight": ("k.kernel", "CD"),
    "self_attn.v_proj.weight": ("v.kernel", "CD"),
    "self_attn.o_proj.weight": ("out.kernel", "DD"),
    "post_attention_layernorm.weight": ("ffn_norm.scale", "D"),
    "mlp.gate_proj.weight": ("gate.kernel", "FD"),
    "mlp.up_proj.weight": ("up.kernel", "FD"),
    "mlp.down_proj.weight": ("down.kernel", "DF"),
}
UNUSED = ".rotary_emb.inv_freq"  # a table that older checkpoints hold


class NotLlama(ValueError):
    """A checkpoint that is not the backbone's kind of model, or not whole."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a checkpoint's vocabulary, in the order of our ids: speech tokens, EOS, text symbols."""

    speech: tuple[int, ...]
    eos: int
    text: tuple[int, ...]  # PAD, SEP and then the symbols, as in `text.Vocabulary`

    @property
    def scored(self) -> list[int]:
        """Rows that the LM head keeps."""
        return [*self.speech, self.eos]

    def check(self, count: int) -> None:
        """Raises NotLlama if a row is none of `count`, or a token is said in two rows."""
        if outside := [row for row in (*self.scored, *self.text) if not 0 <= row < count]:
            raise NotLlama(f"the vocabulary has the rows 0 to {count - 1}, not {outside[:5]}")
        if len(set(self.scored)) < len(self.scored):
            raise NotLlama("the rows of speech tokens and EOS are not distinct")


def load_llama(folder: Path, rows: Rows) -> tuple[ModelConfig, SpeechLM]:
    """The backbone in a folder, without draft heads, in float32: the same logits for `rows.scored`.

    Raises:
        NotLlama: the config asks for what the backbone does not compute, or a parameter is missing, left over or of
            another shape; it is named with both shapes.
    """
    facts = _facts(folder)
    model = ModelConfig(
        speech_vocab=len(rows.speech),
        text_vocab=len(rows.text),
        layers=facts["num_hidden_layers"],
        width=facts["hidden_size"],
        attention_heads=facts["num_attention_heads"],
        ffn=facts["intermediate_size"],
        max_length=facts["max_position_embeddings"],
        rope_theta=float(facts["rope_theta"]),
        norm_eps=float(facts["rms_norm_eps"]),
    )
    rows.check(facts["vocab_size"])
    lm = nnx.eval_shape(lambda: SpeechLM(model, HeadsConfig(count=0), rngs=nnx.Rngs(0)))
    repeats = model.attention_heads // facts["num_key_value_heads"]
    wanted = _names(model.layers)
    sizes = {"D": model.width, "F": model.ffn, "C": model.width // repeats, "R": facts["vocab_size"]}
    stored = _read(folder, facts["tie_word_embeddings"])
    here = {name: tuple(sizes[letter] for letter in shape) for name, (_, shape) in wanted.items()}
    there = {name: x.shape for name, x in stored.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise NotLlama(
                f"{folder}: parameter {name} has shape {there.get(name, 'none')}, the backbone of its {CONFIG} asks "
                f"{here.get(name, 'none')}{'; it has no biases' if name.endswith('.bias') else ''}"
            )

    def ours(name: str, x: np.ndarray) -> np.ndarray:
        if name == EMBEDDING:
            return x[[*rows.scored, *rows.text]]
        if name == LM_HEAD:
            return x[rows.scored].T
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            x_NHD = x.reshape(facts["num_key_value_heads"], -1, model.width)
            x = np.repeat(x_NHD, repeats, axis=0).reshape(-1, model.width)
        return x.T

    set_weights(lm, {wanted[name][0]: ours(name, x) for name, x in stored.items()}, folder)
    return model, lm


def _names(layers: int) -> dict[str, tuple[str, str]]:
    """Their name of every parameter, with ours and the letters of its shape."""
    each = range(layers)
    inner = {f"model.layers.{i}.{a}": (f"backbone.blocks.{i}.{b}", s) for i in each for a, (b, s) in LAYER.items()}
    return WHOLE | inner


def _facts(folder: Path) -> dict[str, Any]:
    """What `config.json` says and what it leaves to the defaults of LlamaConfig, if all of it can be computed here."""
    if not (folder / CONFIG).exists():
        raise NotLlama(f"{folder} has no {CONFIG}: not a folder that `save_pretrained` wrote")
    told = json.loads((folder / CONFIG).read_text())
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in needed if name not in told]:
        raise NotLlama(f"{folder / CONFIG} has no {', '.join(missing)}")
    rope = told.get("rope_parameters") or told.get("rope_scaling") or {}  # the first since transformers 5
    heads = told["num_attention_heads"]
    facts = {
        **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"},
        **{"rope_theta": rope.get("rope_theta", 10_000.0), "sliding_window": None},
        **told,
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "num_key_value_heads": told.get("num_key_value_heads") or heads,
        "head_dim": told.get("head_dim") or told["hidden_size"] // heads,
    }
    known = {"model_type": "llama", "hidden_act": "silu", "rope_type": "default", "partial_rotary_factor": 1.0}
    known |= {"head_dim": told["hidden_size"] / heads, "sliding_window": None}
    for name, value in known.items():
        if facts.get(name) != value:
            raise NotLlama(f"{folder / CONFIG}: {name} is {facts.get(name)!r}, only {value!r} can be computed here")
    if heads % facts["num_key_value_heads"]:
        raise NotLlama(f"{folder / CONFIG}: {heads} heads do not share {facts['num_key_value_heads']} keys evenly")
    return facts


def _read(folder: Path, tied: bool) -> dict[str, np.ndarray]:
    """All parameters of the checkpoint in float32."""
    files = {WEIGHTS}
    if (folder / INDEX).exists():
        files = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    stored = {}
    for file in sorted(files):
        if not (folder / file).exists():
            raise NotLlama(f"{folder} has no {file}: `save_pretrained` writes it; pickled weights are not read")
        with safe_open(folder / file, framework="flax") as weights:  # NumPy alone knows no bfloat16
            names = [name for name in weights.keys() if not name.endswith(UNUSED)]  # noqa: SIM118
            stored |= {name: np.asarray(weights.get_tensor(name), np.float32) for name in names}
    if tied and EMBEDDING in stored:
        stored.setdefault(LM_HEAD, stored[EMBEDDING])
    return stored
