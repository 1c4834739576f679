"""The demo model: 5 M parameters of backbone, 2 M of draft heads, an hour on two CPU cores.

Half of the sentences of who speaks most are learned behind another one, and all of the others' behind one of their own,
so that the voice goes on from a prompt and is always the same without one.

    bash launch/demo_train.sh --minutes 90

or this stage alone:

    python -m vadusa_jax.train --config configs/demo.py --workdir out/demo_train/train

Expect a dev loss of the LM head near 2.1 nats (see the model card in vadusa_jax/assets/demo).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Values that differ from the defaults in vadusa_jax/config.py are set here; all others can be overridden too."""
    import dataclasses

    from vadusa_jax.config import Config

    config = ConfigDict(dataclasses.asdict(Config()))
    config.train.steps = 5000
    config.data.row_length = 1024
    config.data.batch_rows = 2
    config.data.prompt_share = 0.5
    config.data.usual_alone = True
    return config
