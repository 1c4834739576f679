"""How many draft heads? configs/libritts.py with another number of them, at half the steps.

    for n in 2 4 6 8; do python -m vadusa_jax.train --config configs/ablate_heads.py:$n --workdir out/heads_$n; done

TRAIN=1 in launch/ablate_heads.sh trains them one after another, makes voices and compares these. Projected as for
configs/libritts.py: 36 minutes a run on a v5e-16, about 1.2% more or less for every head.
"""

from ml_collections import ConfigDict

from configs import libritts


def get_config(count: str = "6") -> ConfigDict:
    """`count` heads."""
    config = libritts.get_config()
    config.heads.count = int(count)
    config.train.steps //= 2
    return config
