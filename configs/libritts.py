"""LibriTTS."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Values that differ from the defaults in vadusa_jax/config.py."""
    import dataclasses

    from vadusa_jax.config import SHAPES, Config

    config = ConfigDict(dataclasses.asdict(Config(model=SHAPES["150m"])))
    config.data.update(dir="out/libritts/tokens", row_length=2048, batch_rows=128, packing_bins=256)
    config.train.update(optimizer="adamw", learning_rate=5e-4, dtype="bfloat16", warmup_steps=2000, steps=60_000)
    return config
