"""Every config can be loaded, means what it says, and tells how to use it."""

import importlib
from pathlib import Path

import pytest

from configs import ablate_heads, ablate_loss_weight, ablate_mode, libriheavy, libritts
from vadusa_jax.config import SHAPES, from_config_dict

CONFIGS = sorted(path.stem for path in (Path(__file__).parent.parent / "configs").glob("*.py"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_whole_and_tells_its_command(name):
    module = importlib.import_module(f"configs.{name}")
    config = from_config_dict(module.get_config())
    assert f"configs/{name}.py" in module.__doc__
    assert config.data.row_length <= config.model.max_length
    assert config.data.row_length % max(config.train.loss_chunk, 1) == 0


@pytest.mark.parametrize(("module", "chips"), [(libritts, 16), (libriheavy, 64)])
def test_the_large_configs_give_a_chip_16k_positions(module, chips):
    config = from_config_dict(module.get_config())
    assert config.model == SHAPES["150m"] and config.train.dtype == "bfloat16"
    assert config.data.batch_rows * config.data.row_length == chips * 16_384


def test_ablations_change_what_they_name():
    assert ablate_heads.get_config("2").heads.count == 2
    assert ablate_loss_weight.get_config("0.05").heads.loss_weight == 0.05
    for mode in ("joint", "frozen", "finetune"):
        train = ablate_mode.get_config(mode).train
        assert train.mode == mode and train.heads_warmup_steps < train.steps
