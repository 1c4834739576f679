"""Small stand-ins that the tests share: a model of a few thousand parameters, random draft trees, a voice of both."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy import stats

from vadusa_jax.config import Config, DataConfig, DecodeConfig, HeadsConfig, ModelConfig, TrainConfig
from vadusa_jax.data.dataset import CodecFacts, TokenRecord, write_dataset
from vadusa_jax.decode.accept import EXACT, Greedy, Rule, Tolerance
from vadusa_jax.decode.draft import Drafter, head_drafter
from vadusa_jax.decode.loop import generate
from vadusa_jax.decode.prompts import make_settings
from vadusa_jax.decode.state import Prompts, State
from vadusa_jax.decode.tree import ROOT, Tree
from vadusa_jax.decode.trees import FittedTree, Trees
from vadusa_jax.model.folder import save_lm
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.speech.codec import FsqCodec, new_codec
from vadusa_jax.speech.fsq import CodecConfig
from vadusa_jax.text import Vocabulary
from vadusa_jax.training.optimizer import make_optimizer
from vadusa_jax.training.step import make_model, make_train_step

MODEL = ModelConfig(speech_vocab=19, text_vocab=12, layers=2, width=32, attention_heads=4, ffn=48, max_length=256)
HEADS = HeadsConfig(count=4, layers=2)
DECODE = DecodeConfig(temperature=0.9, top_k=12, top_p=0.97, repeat_limit=12)
TREE = Tree(((), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,), (0, 0, 0, 0), (0, 1, 0), (1, 0, 2), (0, 1, 0, 1)))
BATCH, SLOTS, REPEATS = 8, 256, 12  # the same everywhere: every other value is another compilation
ROW = 48  # tokens of a packed row
CODEC = CodecConfig(
    levels=(5, 4), encoder_width=8, encoder_layers=1, decoder_width=8, decoder_layers=1, refiner_layers=1,
    vocoder_width=8, vocoder_layers=1,
)  # fmt: skip
THOUSAND = CodecConfig(
    encoder_width=16, encoder_layers=2, decoder_width=16, decoder_layers=1, refiner_layers=1, vocoder_width=16,
    vocoder_layers=2,
)  # fmt: skip
TINY = Config(
    model=dataclasses.replace(MODEL, text_vocab=128, layers=1, width=16, attention_heads=2, ffn=16),
    heads=dataclasses.replace(HEADS, count=2, layers=1),
    data=DataConfig(row_length=64, batch_rows=8, packing_bins=4),
    train=TrainConfig(steps=6, warmup_steps=1, log_every=1, eval_every=3, checkpoint_every=3, keep=2),
)


def tiny_tokens(folder: Path, speech_vocab: int = MODEL.speech_vocab) -> DataConfig:
    """Random token records for a model like TINY, 40 to train with and 8 for the dev set."""
    rng, vocabulary = np.random.default_rng(0), Vocabulary.english()

    def records(count: int) -> list[TokenRecord]:
        phones = [rng.integers(2, len(vocabulary), rng.integers(2, 10)).astype(np.int32) for _ in range(count)]
        speech = [rng.integers(0, speech_vocab, rng.integers(4, 40)).astype(np.int32) for _ in range(count)]
        return [TokenRecord(f"u{i}", "s", "Tea", *pair) for i, pair in enumerate(zip(phones, speech, strict=True))]

    facts = CodecFacts(speech_vocab, 50.0, 16_000)
    write_dataset(folder, {"train": records(40), "dev": records(8)}, vocabulary, facts)
    return dataclasses.replace(TINY.data, dir=str(folder))


def toy_model(
    seed: int = 0, dtype: jnp.dtype = jnp.float32, model: ModelConfig = MODEL, heads: HeadsConfig = HEADS
) -> SpeechLM:
    """Random weights, large enough that the next token really depends on the whole context."""
    lm, rng = nnx.eval_shape(lambda: SpeechLM(model, heads, dtype, rngs=nnx.Rngs(0))), np.random.default_rng(seed)

    def loud(x: jax.ShapeDtypeStruct) -> jax.Array:
        value = 0.25 * rng.standard_normal(x.shape) if len(x.shape) > 1 else np.ones(x.shape)
        return jnp.asarray(value, jnp.promote_types(x.dtype, dtype))

    nnx.update(lm, jax.tree.map(loud, nnx.state(lm, nnx.Param)))
    return lm


def lean(lm: SpeechLM, token: int, by: float) -> SpeechLM:
    """Makes the model say `token` more (or less) often: its logit is raised by about `by` everywhere.

    Coordinate 0 of the hidden state is made the same everywhere, and only the logit of `token` looks at it.
    """
    backbone, heads = lm.backbone, lm.heads
    backbone.embedding[...] = backbone.embedding[...].at[:, 0].set(4.0)
    for block in backbone.blocks:
        for last in (block.out, block.down):
            last.kernel[...] = last.kernel[...].at[:, 0].set(0.0)
    heads.residual[...] = heads.residual[...].at[..., 0].set(0.0)
    backbone.lm_head.kernel[...] = backbone.lm_head.kernel[...].at[0].set(0.0).at[0, token].set(by / 3)
    heads.output[...] = heads.output[...].at[:, 0].set(0.0).at[:, 0, token].set(by / 3)
    return lm


def random_tree(seed: int, nodes: int, heads: int = HEADS.count, ranks: int = 5) -> Tree:
    """A tree whose nodes are added below random earlier nodes."""
    rng = np.random.default_rng(seed)
    paths = [()]
    for _ in range(20 * nodes):
        path = (*paths[rng.integers(len(paths))], int(rng.integers(ranks)))
        if len(paths) < nodes and len(path) <= heads and path not in paths:
            paths.append(path)
    return Tree(tuple(paths))


def toy_codec(config: CodecConfig = CODEC, seed: int = 0) -> FsqCodec:
    """An untrained codec as `new_codec` makes it, by NumPy: each shape of JAX's own random numbers is a compilation."""
    codec, rng = new_codec(config, None), np.random.default_rng(seed)
    ones = {"scale": 1.0, "gain": 0.2}

    def fresh(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        if len(x.shape) > 1:
            return jnp.asarray(x.shape[0] ** -0.5 * rng.standard_normal(x.shape), x.dtype)
        value = next((value for name, value in ones.items() if name in str(path)), 0.0)
        return jnp.asarray(np.full(x.shape, value), x.dtype)

    for part in (codec.encoder, codec.renderer.decoder, codec.renderer.vocoder, *filter(None, [codec.renderer.timbre])):
        nnx.update(part, jax.tree_util.tree_map_with_path(fresh, nnx.state(part, nnx.Param)))
    return codec


def noise(samples: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def toy_voice(folder: Path, seed: int = 0) -> Path:
    """A whole voice with random weights, as `export` leaves one: 20 speech tokens, a tree of 8 nodes for each rule."""
    vocabulary = Vocabulary.english()
    model = dataclasses.replace(MODEL, speech_vocab=20, text_vocab=len(vocabulary), max_length=512)
    save_lm(folder, Config(model, HEADS), lean(toy_model(seed, model=model), model.eos, -1.5))  # speaks about 2 s
    vocabulary.save(folder / "vocabulary.json")
    tree = random_tree(seed, nodes=8)
    fitted = FittedTree(tree, tuple(1.0 + 0.1 * t for t in range(8)), {}, ((0.5, 0.2),) * HEADS.count)
    Trees({rule.name: fitted for rule in (Greedy(), EXACT, Tolerance(3))}).save(folder / "trees.json")
    toy_codec(seed=seed).save(folder / "codec")
    return folder


@dataclasses.dataclass(frozen=True)
class Row:
    """What one row of a batch said."""

    tokens: tuple[int, ...]
    steps: tuple[int, ...]  # the pass that decided each token
    passes: int
    finish: int


def random_prompts(rng: np.random.Generator, rows: int = BATCH, longest: int = 60, limit: int = 40) -> list[list[int]]:
    return [rng.integers(0, MODEL.vocab, rng.integers(1, longest + 1)).tolist() for _ in range(rows)]


def speak(
    lm: SpeechLM,
    prompts: Prompts,
    tree: Tree = ROOT,
    rule: Rule = EXACT,
    slots: int = SLOTS,
    decode: DecodeConfig = DECODE,
    drafter: Drafter | None = None,
    coupled: bool = True,
) -> list[Row]:
    settings = make_settings(tree, rule, decode, coupled)
    state = generate(lm, prompts, settings=settings, slots=slots, drafter=drafter or head_drafter(lm))
    return rows_of(state)


def rows_of(state: State) -> list[Row]:
    """What each row of a state has said."""
    state = jax.device_get(dataclasses.replace(state, memory=None))
    rows = []
    for b, count in enumerate(state.count_B):
        assert not state.said_BS[b, count:].any()  # nothing is said after the end
        tokens, steps = state.said_BS[b, :count].tolist(), state.step_BS[b, :count].tolist()
        rows.append(Row(tuple(tokens), tuple(steps), int(state.passes_B[b]), int(state.finish_B[b])))
    return rows


def said(rows: list[Row]) -> list[tuple[tuple[int, ...], int]]:
    return [(row.tokens, row.finish) for row in rows]


def check_counts(token_M: np.ndarray, p_V: np.ndarray) -> None:
    """Tokens are distributed as p, and those without probability never come."""
    seen_V = np.bincount(token_M, minlength=len(p_V))
    assert not seen_V[p_V == 0].any()
    p_V = p_V.astype(np.float64) / p_V.sum(dtype=np.float64)
    assert stats.chisquare(seen_V[p_V > 0], len(token_M) * p_V[p_V > 0]).pvalue > 1e-3


def counting(rng: np.random.Generator, by: int, cycle: int, length: int = 32) -> dict[str, np.ndarray]:
    """Sequences that count in steps of `by` modulo `cycle`, with a slip at every twentieth token."""
    jumps_BT = np.where(rng.random((16, length + 1)) < 0.05, rng.integers(0, cycle, (16, length + 1)), by)
    said_BT = np.cumsum(jumps_BT, axis=1).astype(np.int32) % cycle
    ones_BT = np.ones((16, length), np.int32)
    positions_BT = np.broadcast_to(np.arange(length, dtype=np.int32), ones_BT.shape)
    batch = {"tokens_BT": said_BT[:, :-1], "targets_BT": said_BT[:, 1:], "mask_BT": ones_BT}
    return batch | {"segments_BT": ones_BT, "positions_BT": positions_BT}


@functools.cache
def learner() -> tuple:
    """How toys learn, compiled once: the graph of a model, its first parameters, the optimiser and the step."""
    config = Config(MODEL, HEADS, train=TrainConfig(steps=150, warmup_steps=10, optimizer="adamw", learning_rate=1e-2))
    graph, params = make_model(config)
    optimizer = make_optimizer(config.train)
    return graph, params, optimizer, make_train_step(config, optimizer, graph)


def learned(by: int, cycle: int) -> SpeechLM:
    """A toy that has learned to count: its drafts are accepted down to every depth."""
    graph, first, optimizer, step = learner()
    params, rng = jax.tree.map(jnp.copy, first), np.random.default_rng(0)
    state = optimizer.init(params)
    for _ in range(150):
        params, state, _, _ = step(params, state, counting(rng, by, cycle))
    return nnx.merge(graph, params)


def pack(rows: list[list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of rows of segments of the given lengths; the second half of every segment is speech."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), ROW)
    batch = {f"{name}_BT": np.zeros(shape, np.int32) for name in ("mask", "segments", "positions")}
    batch |= {
        f"{name}_BT": rng.integers(0, MODEL.output_vocab, shape).astype(np.int32) for name in ("tokens", "targets")
    }
    for b, lengths in enumerate(rows):
        start = 0
        for number, length in enumerate(lengths, start=1):
            here = (b, slice(start, start + length))
            batch["segments_BT"][here] = number
            batch["positions_BT"][here] = np.arange(length)
            batch["mask_BT"][here] = np.arange(length) >= length // 2
            start += length
    return batch


def same(a: nnx.State, b: nnx.State) -> list[bool]:
    """Which arrays of two states are equal to the last bit."""
    return [np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
