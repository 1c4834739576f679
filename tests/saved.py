"""Tiny random models of the kinds that the hub has, saved to disk, and speech for them: shared by tests."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers as hf


def noise(samples: int, seed: int = 0) -> np.ndarray:
    """Noise that swells and falls, so that its tokens differ."""
    swell = np.abs(np.sin(np.arange(samples) / 3000)) + 0.01
    return (0.3 * swell * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


@torch.no_grad()
def awaken(model: torch.nn.Module) -> None:
    """Untrained models say one token for everything; with louder weights they do not."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim > 1 and "decoder" not in name:
            parameter.mul_(1000 if "project_in" in name else 2)
    for name, buffer in model.named_buffers():
        if name.endswith(("embed", "embed_sum")):  # codebooks of zeros
            buffer.normal_()


def save_model(root: Path, kind: str, config: hf.PreTrainedConfig) -> Path:
    """A random model of this config, the same every time, in the folder `kind`."""
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config)
    awaken(model)
    model.save_pretrained(root / kind)
    return root / kind


def make_corpus(root: Path, count: int = 6) -> Path:
    for i in range(count):
        folder = root / "train" / "s" / "c"
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / f"s_c_{i}.wav", noise(16_000, seed=i), 16_000)
        (folder / f"s_c_{i}.normalized.txt").write_text("Hello there.")
    return root


def run(*args: object, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "vadusa_jax.train_codec", *map(str, args)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
