"""Every choice of a run as a frozen dataclass; each default is written here once and nowhere else.

Configs are `ml_collections` files in `configs/`; an entry point turns one into a `Config` with `from_config_dict`
and nothing below ever sees a ConfigDict. A `Config` is saved as JSON with every checkpoint.

Shape letters used in names all over the project (`h_BTD` is an array [B, T, D]):
    B batch rows              T positions of a sequence, or nodes of a draft tree
    D model width             N attention heads        H width of one attention head
    F feed-forward width      S slots of the KV cache  V speech vocabulary + 1 (EOS)
    K draft heads             R ranks kept per draft head
    P waveform samples        M mel bands              C channels of a convolution
    G heads of all rows, BxN  J positions of a path through the tree
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

CONFIG = "config.json"  # a config saved in a folder


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The decoder-only backbone: pre-norm RMSNorm, rotary positions, SwiGLU, no biases."""

    speech_vocab: int = 1000  # speech tokens, ids 0 .. speech_vocab-1; EOS follows
    text_vocab: int = 128  # phones and specials, ids after EOS
    layers: int = 6
    width: int = 256
    attention_heads: int = 4
    ffn: int = 704
    max_length: int = 2048  # positions; anything longer is an error, never a clamped gather
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6  # of RMSNorm: added to the mean square

    @property
    def eos(self) -> int:
        """Id of EOS: the last id that the LM head and the draft heads score."""
        return self.speech_vocab

    @property
    def output_vocab(self) -> int:
        """V: speech tokens and EOS."""
        return self.speech_vocab + 1

    @property
    def vocab(self) -> int:
        """Rows of the embedding table."""
        return self.output_vocab + self.text_vocab


SHAPES = {  # sizes that speed is measured at; "150m" is about the size of VALL-E (arXiv 2301.02111)
    "25m": ModelConfig(layers=12, width=384, attention_heads=6, ffn=1024),
    "150m": ModelConfig(layers=12, width=1024, attention_heads=16, ffn=2816),
}


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Draft heads and their loss: CE_lm + loss_weight * sum_k decay^(k-1) CE_k."""

    kind: str = "medusa"  # "medusa": heads that guess independently; "hydra": each sees what was drafted before it
    count: int = 6  # 0: a backbone alone
    layers: int = 1
    loss_weight: float = 0.2
    decay: float = 0.8


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How speech tokens are chosen and when a sentence is given up."""

    temperature: float = 0.8
    top_k: int = 25  # 0: off
    top_p: float = 1.0  # 1: off
    repeat_window: int = 0  # repetition-aware sampling looks back so many tokens; 0: off
    repeat_ratio: float = 0.1  # and draws a token again that makes up at least this share of them
    least_per_phone: float = 0.5  # a text of n phones says at least least_per_phone * n tokens before EOS
    extra_tokens: int = 75  # and at most extra_tokens + tokens_per_phone * n; then it ends: `length`
    tokens_per_phone: float = 6.0
    phones_per_piece: int = 200  # long text is cut at sentence ends; a longer sentence is cut inside
    prompt_seconds: float = 6.0  # of a speech prompt, at most: what was trained on
    repeat_limit: int = 100  # one token this often in a row ends with `repeat`
    typical_eps: float = 0.09  # typical acceptance (arXiv 2401.10774)
    typical_alpha: float = 0.3
    pcg_threshold: float = 0.5  # cosine above which two speech tokens are alike (arXiv 2511.13732)
    ssd_beta: float = 0.0  # added to the chance of a draft model's token (arXiv 2505.15380); 0: lossless


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where token records are and how they become batches."""

    dir: str = "out/demo_train/tokens"
    row_length: int = 512  # positions of one packed row
    batch_rows: int = 8  # rows per step, over all devices
    packing_bins: int = 64  # rows that are open at a time while records are packed
    prompt_share: float = 0.0  # of the training records that follow another one of the same speaker, as after a prompt
    usual_alone: bool = False  # True: a share above 0 is that of who speaks most, and all others follow one, so that
    # without a prompt the voice is always that of the usual speaker, as is the codec's without a reference
    corrupt_share: float = 0.01  # of a split; more corrupt records than that are an error
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What is trained, optimiser, schedule and cadence of the training loop."""

    mode: str = "joint"  # "joint": all from the start; "frozen": heads alone (Medusa-1); "finetune": Medusa-2
    heads_warmup_steps: int = 0  # finetune: the heads learn alone for so many steps
    heads_rate: float = 1.0  # finetune: learning rates of the heads are so many times the backbone's
    optimizer: str = "muon"  # "muon" (matrices by Muon, the rest by Adam) or "adamw"
    learning_rate: float = 1e-2
    adam_learning_rate: float = 2e-3  # embeddings, norms and biases under Muon
    weight_decay: float = 0.01
    schedule: str = "cosine"  # after the warm-up: "cosine" all the way down, or "wsd" (level, then down)
    warmup_steps: int = 100
    decay_share: float = 0.2  # wsd: the last share of the steps, over which the rate falls
    steps: int = 4000
    clip_norm: float = 1.0
    z_loss: float = 0.0  # weight of the squared log-normaliser of every head; 0: off
    ema: float = 0.0  # decay of the averaged parameters that are kept and loaded; 0: no average
    accumulate: int = 1  # a step adds up the gradients of so many parts of its batch, one after the other
    loss_chunk: int = 0  # logits of so many positions of a row at a time, made again backward; 0: of all, kept
    remat: str = "none"  # made again backward: "none", "dots" (all but matrix products) or "blocks" (everything)
    dtype: str = "float32"  # compute type; parameters and reductions stay float32
    seed: int = 0
    log_every: int = 20
    eval_every: int = 250
    checkpoint_every: int = 250
    keep: int = 2  # newest checkpoints that are kept
    keep_every: int = 0  # and those of every so many steps; 0: none
    on_nan: str = "stop"  # a loss that is no number ends the run ("stop") or costs one update ("skip")
    skips_in_a_row: int = 10  # updates left out one after another that end the run all the same


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis; data=-1 takes what the others leave. Batch rows are split over data and fsdp."""

    data: int = -1  # copies of the parameters
    fsdp: int = 1  # each copy's parameters and optimiser state are spread over so many devices
    tensor: int = 1  # and every matrix product over so many


@dataclasses.dataclass(frozen=True)
class Config:
    """One whole run."""

    model: ModelConfig = ModelConfig()
    heads: HeadsConfig = HeadsConfig()
    decode: DecodeConfig = DecodeConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Builds the dataclass `cls` from nested dicts; an unknown or mistyped field is an error that names it."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    types_ = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {unknown}; it has {sorted(fields)}")
    made = {}
    for name, value in values.items():
        kind = types_[name]
        if dataclasses.is_dataclass(kind):
            value = from_dict(kind, dict(value))
        elif kind is float and type(value) is int:
            value = float(value)
        elif not isinstance(kind, types.GenericAlias) and type(value) is not kind:
            raise ValueError(f"{cls.__name__}.{name} must be {kind.__name__}, got {value!r}")
        made[name] = value
    return cls(**made)


def from_config_dict(config: Any) -> Config:
    """Turns an `ml_collections.ConfigDict` into a `Config`."""
    return from_dict(Config, config.to_dict())


def save_config(folder: Path, config: Config) -> None:
    """Writes `config.json` as stable, readable JSON, whole or not at all; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{CONFIG}.partial"
    aside.write_text(json.dumps(dataclasses.asdict(config), indent=2, sort_keys=True) + "\n")
    aside.replace(folder / CONFIG)


def load_config(folder: Path) -> Config:
    """Reads what `save_config` wrote."""
    return from_dict(Config, json.loads((folder / CONFIG).read_text()))
