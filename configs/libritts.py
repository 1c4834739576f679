"""LibriTTS with a model of VALL-E's size: 156 M parameters of backbone, 12 M of heads, on 16 TPU chips.

    ZONE=us-central1-a BUCKET=gs://mine CONFIG=configs/libritts.py bash launch/tpu_train.sh

or on devices at hand:

    python -m vadusa_jax.train --config configs/libritts.py --config.data.dir out/tokens --workdir out/train

A step is 262,144 positions, about 500 steps an epoch (585 hours at 50 speech tokens a second, and their phones).
Compiled for v5e:4x4 (`python -m vadusa_jax.aot train --topology v5e:4x4 --config configs/libritts.py`) it takes 7.2 of
the 17.2 GB of a chip. Projected, not measured: 21.4 TFLOP of model a chip and step take 0.22 s at an assumed MFU of 50%
(the roofline allows 0.11 s), so the 20,000 steps take 1.2 hours on a v5e-16.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Values that differ from the defaults in vadusa_jax/config.py."""
    import dataclasses

    from vadusa_jax.config import SHAPES, Config

    config = ConfigDict(dataclasses.asdict(Config(model=SHAPES["150m"])))
    config.data.update(dir="out/libritts/tokens", row_length=2048, batch_rows=128, packing_bins=256)
    # AdamW: Muon would orthogonalise the same matrices on every chip, 4.3 TFLOP a step beside 21.4 of the model.
    config.train.update(optimizer="adamw", learning_rate=5e-4, warmup_steps=1000, steps=20_000, dtype="bfloat16")
    config.train.update(remat="dots", loss_chunk=512, eval_every=1000, checkpoint_every=500, log_every=50)
    return config
