"""The non-autoregressive stage of VALL-E (arXiv 2301.02111, section 4.2.2), for codecs with several codebooks.

The backbone says the first codebook. Then, for j = 2 .. Q, this model predicts codebook j of all frames at once, from
the phones, a speech prompt whose codebooks are all known, and the sum of the embeddings of the frames' lower
codebooks. Attention goes both ways; an embedding added everywhere tells which codebook is asked for.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vadusa_jax.config import from_dict
from vadusa_jax.model.backbone import Block, Masked, rotation
from vadusa_jax.model.products import lookup
from vadusa_jax.weights import load_weights, save_weights

PADDING, TEXT, PROMPT, TARGET = range(4)  # what a position of a row holds
BUCKET = 128  # positions; rows are padded to a multiple, so that few shapes are ever compiled
WEIGHTS, CONFIG = "nar.safetensors", "nar.json"

Rows = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class NarConfig:
    """Sizes of the stage; layers are those of the backbone."""

    codebooks: int = 8  # Q
    codebook_size: int = 1024
    text_vocab: int = 128
    layers: int = 6
    width: int = 256
    attention_heads: int = 4
    ffn: int = 704
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


class Nar(nnx.Module):
    """Predicts codebook `stage` (1 .. Q-1, counted from 0) of the target frames."""

    def __init__(self, config: NarConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        if config.codebooks < 2:
            raise ValueError(f"{config.codebooks} codebook: there is nothing to fill in")

        def table(count: int) -> nnx.Embed:
            return nnx.Embed(count, config.width, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)

        self.config, self.dtype = config, dtype
        self.text, self.stages = table(config.text_vocab), table(config.codebooks)
        self.codes = nnx.List([table(config.codebook_size) for _ in range(config.codebooks)])
        self.blocks = nnx.List([Block(config, dtype, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        shape = (config.codebooks, config.width, config.codebook_size)
        self.output = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), shape))

    def __call__(self, phones_BT: jax.Array, codes_BQT: jax.Array, kind_BT: jax.Array, stage_B: jax.Array) -> jax.Array:
        """Logits `[B, T, codebook_size]` of codebook `stage` at every position, in float32 or wider.

        Codebooks of target frames that are not below `stage` are not looked at, whatever they hold.
        """
        config = self.config
        known_BTQ = (kind_BT == PROMPT)[..., None] | (jnp.arange(config.codebooks) < stage_B[:, None])[:, None]
        speech_BTD = sum(
            lookup(table.embedding[...], codes_BQT[:, q]) * known_BTQ[:, :, q, None]
            for q, table in enumerate(self.codes)
        )
        text_BTD = lookup(self.text.embedding[...], phones_BT)
        stage_B1D = lookup(self.stages.embedding[...], stage_B[:, None])
        h_BTD = (jnp.where((kind_BT == TEXT)[..., None], text_BTD, speech_BTD) + stage_B1D).astype(self.dtype)
        length = kind_BT.shape[1]
        # Padding sees itself as well: a row of nothing else has something to attend to.
        mask_BTT = (kind_BT > PADDING)[:, None] | jnp.eye(length, dtype=bool)[None]
        positions_BT = jnp.arange(length)[None]
        by = rotation(positions_BT, config.width // config.attention_heads // 2, config.rope_theta, h_BTD.dtype)
        for block in self.blocks:
            h_BTD, _ = block(h_BTD, by, Masked(mask_BTT, None, None))
        logits_BTV = jnp.einsum("BTD,BDV->BTV", self.norm(h_BTD), self.output[...][stage_B].astype(self.dtype))
        return logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))


def make_rows(
    phones: Sequence[np.ndarray], codes: Sequence[np.ndarray], prompts: Sequence[int], length: int, codebooks: int
) -> Rows:
    """Utterances as padded rows: phones, then frames, the first `prompts` of which are the prompt.

    Args:
        phones: ids in the text vocabulary.
        codes: `[q, T]` each, with q <= `codebooks`; what is missing is zero.
    """
    rows = {name: np.zeros((len(phones), length), np.int32) for name in ("phones_BT", "kind_BT")}
    rows["codes_BQT"] = np.zeros((len(phones), codebooks, length), np.int32)
    for i, (ids, codes_QT, prompt) in enumerate(zip(phones, codes, prompts, strict=True)):
        at, end = len(ids), len(ids) + codes_QT.shape[1]
        if end > length:
            raise ValueError(f"utterance {i} takes {end} positions, a row has {length}")
        rows["phones_BT"][i, :at] = ids
        rows["codes_BQT"][i, : len(codes_QT), at:end] = codes_QT
        rows["kind_BT"][i, :end] = [TEXT] * at + [PROMPT] * prompt + [TARGET] * (end - at - prompt)
    return rows


def fill(
    nar: Nar,
    phones: Sequence[np.ndarray],
    first: Sequence[np.ndarray],
    prompts: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """All codebooks `[Q, T]` of utterances whose first codebook `[T]` is known, each the most likely given the lower.

    Args:
        phones: those of the prompt's text and of the utterance's, one after the other.
        first: the first codebook of each utterance, without its prompt.
        prompts: all codebooks `[Q, prompt]` of the speech before each utterance; none by default.
    """
    books = nar.config.codebooks
    prompts = prompts or [np.zeros((books, 0), np.int32)] * len(first)
    codes = [
        np.concatenate([prompt_QT, np.pad(tokens_T[None], ((0, books - 1), (0, 0)))], axis=1)
        for prompt_QT, tokens_T in zip(prompts, first, strict=True)
    ]
    longest = max((len(p) + c.shape[1] for p, c in zip(phones, codes, strict=True)), default=0)
    length = max(-(-longest // BUCKET), 1) * BUCKET
    rows = make_rows(phones, codes, [p.shape[1] for p in prompts], length, books)
    filled_BQT = np.asarray(_fill(*nnx.split(nar), rows))
    starts = [len(p) + c.shape[1] - len(f) for p, c, f in zip(phones, codes, first, strict=True)]
    return [x[:, at : at + len(f)] for x, at, f in zip(filled_BQT, starts, first, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def _fill(graph: nnx.GraphDef, state: nnx.State, rows: Rows) -> jax.Array:
    nar, codes_BQT, target_BT = nnx.merge(graph, state), rows["codes_BQT"], rows["kind_BT"] == TARGET
    for stage in range(1, nar.config.codebooks):
        stage_B = jnp.full(len(codes_BQT), stage)
        best_BT = jnp.argmax(nar(rows["phones_BT"], codes_BQT, rows["kind_BT"], stage_B), axis=-1)
        codes_BQT = codes_BQT.at[:, stage].set(jnp.where(target_BT, best_BT, codes_BQT[:, stage]))
    return codes_BQT


def save_nar(folder: Path, nar: Nar) -> None:
    """Writes the stage's config and weights; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(dataclasses.asdict(nar.config), indent=2) + "\n")
    save_weights(nar, folder / WEIGHTS)


def load_nar(folder: Path) -> Nar:
    """What `save_nar` wrote; any mismatch is an error that names the parameter and both shapes."""
    config = from_dict(NarConfig, json.loads((folder / CONFIG).read_text()))
    nar = nnx.eval_shape(lambda: Nar(config, rngs=nnx.Rngs(0)))  # shapes: the file has the rest
    load_weights(nar, folder / WEIGHTS)
    return nar
