"""Heads and backbone together, or heads on a finished backbone? The three training modes, at half the steps.

    python -m vadusa_jax.train --config configs/ablate_mode.py:joint --workdir out/joint
    python -m vadusa_jax.train --config configs/ablate_mode.py:frozen --init out/backbone --workdir out/frozen
    python -m vadusa_jax.train --config configs/ablate_mode.py:finetune --init out/backbone --workdir out/finetune

`frozen` is Medusa-1, `finetune` Medusa-2: the heads learn alone for the first tenth, then four times as fast as the
backbone. out/backbone is any run of the same model. `python -m vadusa_jax.ablate --models joint=...,frozen=...`
compares the voices that fit_tree and export make of them. Projected as for configs/libritts.py: 36 minutes a run on a
v5e-16 for `joint` and `finetune`; `frozen` needs no backward pass through the backbone, about 40% of that.
"""

from ml_collections import ConfigDict

from configs import libritts


def get_config(mode: str = "joint") -> ConfigDict:
    """Training in `mode`."""
    config = libritts.get_config()
    config.train.update(mode=mode, steps=config.train.steps // 2)
    if mode == "finetune":
        config.train.update(heads_warmup_steps=config.train.steps // 10, heads_rate=4.0)
    return config
