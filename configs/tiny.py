"""A model of a few thousand parameters for the tests: seconds on one core, learns next to nothing.

python -m vadusa_jax.train --config configs/tiny.py --config.data.dir out/tokens --workdir out/tiny
"""

from ml_collections import ConfigDict

from configs import demo


def get_config() -> ConfigDict:
    """The demo config, shrunk."""
    config = demo.get_config()
    config.model.update(layers=2, width=32, attention_heads=2, ffn=64)
    config.heads.count = 3
    config.train.update(steps=20, warmup_steps=2, log_every=5, eval_every=10, checkpoint_every=10)
    return config
