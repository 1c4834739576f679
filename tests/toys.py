"""Small stand-ins that the tests share: a model of a few thousand parameters and random draft trees."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vadusa_jax.config import HeadsConfig, ModelConfig
from vadusa_jax.decode.tree import Tree
from vadusa_jax.model.heads import SpeechLM

MODEL = ModelConfig(speech_vocab=19, text_vocab=12, layers=2, width=32, attention_heads=4, ffn=48, max_length=256)
HEADS = HeadsConfig(count=4, layers=2)


def toy_model(seed: int = 0, dtype: jnp.dtype = jnp.float32, model: ModelConfig = MODEL) -> SpeechLM:
    """Random weights, large enough that the next token really depends on the whole context."""
    lm = SpeechLM(model, HEADS, dtype, rngs=nnx.Rngs(seed))
    keys = iter(jax.random.split(jax.random.key(seed), 1000))

    def louder(x: jax.Array) -> jax.Array:
        return x + 0.25 * jax.random.normal(next(keys), x.shape, x.dtype) if x.ndim > 1 else x

    params = jax.tree.map(louder, nnx.state(lm, nnx.Param))
    nnx.update(lm, jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), params))
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
