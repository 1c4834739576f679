"""Libriheavy, 50,000 hours, with the model of configs/libritts.py, on 64 TPU chips.

    ZONE=us-central1-a BUCKET=gs://mine CONFIG=configs/libriheavy.py ACCELERATOR_TYPE=v5litepod-64 \
        bash launch/tpu_train.sh

A step is 1,048,576 positions, about 11,000 steps an epoch; a chip has the same work and the same 7.2 GB as with
configs/libritts.py. Projected, not measured: at an assumed MFU of 50% a step takes 0.22 s, and the 40,000 steps
2.4 hours on a v5e-64. The learning rate stays level until the last fifth, so that a longer run can go on from there.
"""

from ml_collections import ConfigDict

from configs import libritts


def get_config() -> ConfigDict:
    """LibriTTS, with more data, larger steps and more of them."""
    config = libritts.get_config()
    config.data.update(dir="out/libriheavy/tokens", batch_rows=512)
    config.train.update(schedule="wsd", warmup_steps=2000, steps=40_000, eval_every=2000)
    return config
