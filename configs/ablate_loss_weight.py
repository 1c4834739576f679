"""How much should the draft heads weigh in the loss? configs/libritts.py with another weight, at half the steps.

    for w in 0.05 0.2 1.0; do
        python -m vadusa_jax.train --config configs/ablate_loss_weight.py:$w --workdir out/weight_$w
    done

Look at the dev loss of the LM head, which the heads may help or harm, beside their own accuracies. Projected as for
configs/libritts.py: 36 minutes a run on a v5e-16.
"""

from ml_collections import ConfigDict

from configs import libritts


def get_config(weight: str = "0.2") -> ConfigDict:
    """Heads that weigh `weight`."""
    config = libritts.get_config()
    config.heads.loss_weight = float(weight)
    config.train.steps //= 2
    return config
