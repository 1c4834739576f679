"""A language model in a folder: `config.json` and `model.safetensors`."""

from pathlib import Path

import numpy as np
from flax import nnx

from vadusa_jax.config import Config, load_config, save_config
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.weights import load_weights, save_weights

WEIGHTS = "model.safetensors"
TRAINED = "training.json"  # the last figures that training measured on the dev set, where they are known


def load_lm(folder: Path) -> tuple[Config, SpeechLM]:
    """The config and the language model in a folder."""
    config = load_config(folder)
    lm = nnx.eval_shape(lambda: SpeechLM(config.model, config.heads, rngs=nnx.Rngs(0)))  # shapes: the file has the rest
    load_weights(lm, folder / WEIGHTS)
    return config, lm


def save_lm(folder: Path, config: Config, lm: SpeechLM, dtype: type[np.floating] = np.float16) -> None:
    """Writes `config.json` and `model.safetensors`."""
    save_config(folder, config)
    save_weights(lm, folder / WEIGHTS, dtype)
