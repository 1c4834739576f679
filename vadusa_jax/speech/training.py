"""Two stages make a codec from recorded sentences: first tokens <-> log-mel, then tokens -> waveform.

Stage 1 learns encoder and decoder on rows of whole sentences: L1 of the log-mel, and a CTC loss (Graves et al., 2006)
that makes a throw-away reader spell the phones of the transcript from the tokens alone, so that the few bits of a token
go to what is said. Stage 2 freezes both and learns the vocoder on short crops, half of them from recorded and half from
decoded log-mel, with a discriminator beside the spectral losses. (A decoder that learned along at the same rate lost in
minutes what stage 1 had taught it.)

A stage ends after its minutes, or after `steps` where they are given (then it repeats exactly); the learning rate falls
along a cosine of the share that is over.
"""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx
from tqdm import tqdm

from vadusa_jax.speech.codec import FsqCodec, new_codec
from vadusa_jax.speech.convnext import ConvNeXt
from vadusa_jax.speech.discriminator import Discriminator, deceiving_loss, judging_loss, matching_loss
from vadusa_jax.speech.fsq import CodecConfig, Fsq, log_mel, unit_size
from vadusa_jax.speech.recordings import Batch, BatchSizes, Recording, crops, sentence_rows
from vadusa_jax.speech.rendered import RenderedCodec
from vadusa_jax.speech.renderer import Renderer, new_renderer
from vadusa_jax.speech.vocoder import Vocoder, spectral_loss

WARM_UP = 0.03  # share of a stage
LOG_EVERY = 20  # steps


@dataclasses.dataclass(frozen=True)
class CodecTraining:
    """Choices of both stages."""

    minutes_codec: float = 12.0
    minutes_vocoder: float = 20.0
    steps: int | None = None  # of each stage, in place of minutes
    optimizer: str = "muon"  # "muon" (matrices by Muon, the rest by Adam) or "adamw"
    learning_rate: float = 2e-2  # of Muon
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    batch: BatchSizes = dataclasses.field(default_factory=BatchSizes)
    phone_weight: float = 0.2
    reader_width: int = 192
    reader_layers: int = 3
    deceiving_weight: float = 0.05  # stage 2: of the discriminator's losses
    matching_weight: float = 0.5
    judge_width: int = 128
    judge_layers: int = 3
    seed: int = 0


class Reader(nnx.Module):
    """Digits -> log-odds of phones [B, T, symbols]; only ever used in training."""

    def __init__(self, config: CodecConfig, training: CodecTraining, symbols: int, *, rngs: nnx.Rngs):
        self.fsq = Fsq(config.levels)
        self.body = ConvNeXt(
            len(config.levels), symbols, training.reader_width, training.reader_layers,
            config.kernel, config.expansion, rngs,
        )  # fmt: skip

    def __call__(self, digits_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
        return self.body(self.fsq.centre(digits_BTD), mask_BT)


def train_tokens(
    recordings: Sequence[Recording], symbols: int, config: CodecConfig, training: CodecTraining
) -> tuple[FsqCodec, dict[str, float]]:
    """Stage 1: a codec without vocoder, and the figures of its training."""
    codec = new_codec(config, training.seed)
    reader = Reader(config, training, symbols, rngs=nnx.Rngs(training.seed + 1))
    modules = {"encoder": codec.encoder, "reader": reader}
    renderer, trained, figures = _train_decoder(codec.renderer, modules, {}, recordings, training)
    return FsqCodec(trained["encoder"], renderer), figures


def train_timbre(
    codec: FsqCodec, timbre: int, recordings: Sequence[Recording], training: CodecTraining
) -> tuple[FsqCodec, dict[str, float]]:
    """A codec with the same tokens whose decoder, trained further, takes a timbre of so many numbers; and the figures.

    Its vocoder is the old one, for stage 2 to train further. ValueError if the codec has a timbre already.
    """
    if codec.config.timbre:
        raise ValueError(f"this codec has a timbre of {codec.config.timbre} numbers already")
    renderer = new_renderer(dataclasses.replace(codec.config, timbre=timbre), training.seed)
    nnx.update(renderer.decoder, nnx.state(codec.renderer.decoder))
    for tint in renderer.decoder.tints:  # at first a timbre changes nothing
        tint.kernel[...] = jnp.zeros_like(tint.kernel[...])
    renderer, _, figures = _train_decoder(renderer, {}, {"encoder": codec.encoder}, recordings, training)
    return FsqCodec(codec.encoder, dataclasses.replace(renderer, vocoder=codec.renderer.vocoder)), figures


def train_decoder(
    recordings: Sequence[Recording], config: CodecConfig, training: CodecTraining
) -> tuple[Renderer, dict[str, float]]:
    """Stage 1 for another codec, whose tokens the recordings have: a renderer without vocoder, and the figures."""
    renderer, _, figures = _train_decoder(new_renderer(config, training.seed), {}, {}, recordings, training)
    return renderer, figures


def _train_decoder(
    renderer: Renderer,
    modules: dict[str, nnx.Module],
    fixed: dict[str, nnx.Module],
    recordings: Sequence[Recording],
    training: CodecTraining,
) -> tuple[Renderer, dict[str, nnx.Module], dict[str, float]]:
    batches = sentence_rows(recordings, renderer.config, training.batch, training.seed)
    loss = functools.partial(token_loss, renderer.config, training.phone_weight)
    modules = modules | {"decoder": renderer.decoder} | ({"timbre": renderer.timbre} if renderer.timbre else {})
    trained, figures = fit(modules, fixed, loss, batches, training, training.minutes_codec, "tokens")
    renderer = dataclasses.replace(renderer, decoder=trained["decoder"], timbre=trained.get("timbre"), vocoder=None)
    if renderer.timbre:
        renderer.timbre.usual[...] = usual_timbre(renderer, recordings)
    return renderer, trained, figures


def usual_timbre(renderer: Renderer, recordings: Sequence[Recording], most: int = 50) -> jax.Array:
    """The mean timbre [E] of whoever speaks most in the recordings."""
    speaker, _ = collections.Counter(recording.speaker for recording in recordings).most_common(1)[0]
    waves = [recording.wave_P for recording in recordings if recording.speaker == speaker][:most]
    return unit_size(jnp.mean(jnp.stack([renderer.timbre_of(wave_P) for wave_P in waves]), axis=0))


def train_vocoder(
    codec: FsqCodec | RenderedCodec, recordings: Sequence[Recording], training: CodecTraining
) -> tuple[FsqCodec | RenderedCodec, dict[str, float]]:
    """Stage 2: the same codec with a vocoder, which is trained further if the codec has one."""
    renderer, rngs = codec.renderer, nnx.Rngs(training.seed + 2)
    vocoder = renderer.vocoder or Vocoder(renderer.config, rngs=rngs)
    judge = Discriminator(training.judge_width, training.judge_layers, renderer.config.kernel, rngs=rngs)
    loss = functools.partial(wave_loss, renderer.config, training)
    batches = crops(recordings, renderer.config, training.batch, training.seed)
    fixed = {"decoder": renderer.decoder}
    fixed |= {"timbre": renderer.timbre} if renderer.timbre else {}
    fixed |= {"encoder": codec.encoder} if isinstance(codec, FsqCodec) else {}
    modules = {"vocoder": vocoder, "judge": judge}
    trained, figures = fit(modules, fixed, loss, batches, training, training.minutes_vocoder, "vocoder")
    return dataclasses.replace(codec, renderer=dataclasses.replace(renderer, vocoder=trained["vocoder"])), figures


def token_loss(config: CodecConfig, phone_weight: float, modules: dict[str, nnx.Module], batch: Batch):
    """L1 of the log-mel over what is sound, and the reader's CTC loss per phone where there is a reader."""
    mask_BT, mel_BFM = batch["mask_BT"], log_mel(config, batch["wave_BP"])
    digits_BTD, made_BFM = _coded(config, modules, batch, mel_BFM)
    mask_BF1 = jnp.repeat(mask_BT, config.stack, axis=1)[..., None]
    mel_loss = (jnp.abs(made_BFM - mel_BFM) * mask_BF1).sum() / (mask_BF1.sum() * config.mels)
    if "reader" not in modules:
        return mel_loss, {"mel": mel_loss}
    phones_BL, logits_BTS = batch["phones_BL"], modules["reader"](digits_BTD, mask_BT)
    unused_BL = (phones_BL == 0).astype(jnp.float32)
    phone_loss = optax.ctc_loss(logits_BTS, 1.0 - mask_BT, phones_BL, unused_BL).sum() / (1.0 - unused_BL).sum()
    return mel_loss + phone_weight * phone_loss, {"mel": mel_loss, "phone": phone_loss}


def _coded(
    config: CodecConfig, modules: dict[str, nnx.Module], batch: Batch, mel_BFM: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """Digits [B, T, D] of our own codec (None of another), and the log-mel [B, F, M] decoded from the tokens."""
    decoder, timbre_BE, digits_BTD = modules["decoder"], None, None
    if "timbre" in modules:
        reference_BFM = log_mel(config, batch["reference_BP"])
        timbre_BE = modules["timbre"](reference_BFM, jnp.ones(reference_BFM.shape[:2]))
    if "encoder" in modules:
        digits_BTD = modules["encoder"](mel_BFM, batch["mask_BT"])
        x_BTD = Fsq(config.levels).centre(digits_BTD)
    else:
        x_BTD = decoder.embed(batch["tokens_BT"])
    return digits_BTD, decoder(x_BTD, batch["mask_BT"], timbre_BE)


def wave_loss(config: CodecConfig, training: CodecTraining, modules: dict[str, nnx.Module], batch: Batch):
    """Distance of the waves made from recorded (first half) and decoded (second half) log-mel, and the judge's losses.

    The distance is that of spectra and log-mel. Encoder and decoder also see `margin_tokens` on either side of what is
    compared, as they do in whole sentences. The judge learns from its own loss alone, and the vocoder from the others.
    """
    margin = training.batch.margin_tokens
    inner_T, inner_F = (slice(margin * n, -margin * n) for n in (1, config.stack))
    wave_BP = batch["wave_BP"][:, margin * config.token_samples : -margin * config.token_samples]
    mel_BFM, half = log_mel(config, batch["wave_BP"]), len(wave_BP) // 2
    mask_BF = jnp.repeat(batch["mask_BT"][:, inner_T], config.stack, axis=1)
    _, decoded_HFM = _coded(config, modules, {name: x[half:] for name, x in batch.items()}, mel_BFM[half:])
    heard_BFM = jnp.concatenate([mel_BFM[:half], decoded_HFM])[:, inner_F]
    made_BP = modules["vocoder"](heard_BFM, mask_BF)
    mel_loss = jnp.abs(log_mel(config, made_BP) - mel_BFM[:, inner_F]).mean()
    loss = spectral_loss(made_BP, wave_BP)

    judge, recorded = modules["judge"], modules["judge"](wave_BP)
    judging = judging_loss(judge(jax.lax.stop_gradient(made_BP)), recorded)
    graph, params = nnx.split(judge)
    made = nnx.merge(graph, jax.lax.stop_gradient(params))(made_BP)
    matching = matching_loss(made, recorded)
    total = loss + mel_loss + judging
    total += training.deceiving_weight * deceiving_loss(made) + training.matching_weight * matching
    return total, {"spectra": loss, "mel": mel_loss, "judging": judging, "matching": matching}


def fit(
    modules: dict[str, nnx.Module],
    fixed: dict[str, nnx.Module],
    loss: Callable,
    batches: Iterator[Batch],
    training: CodecTraining,
    minutes: float,
    name: str,
) -> tuple[dict[str, nnx.Module], dict[str, float]]:
    """Trains `modules` (which see the `fixed` ones beside them) until the stage is over, compilation not counted."""
    graph, params = nnx.split(modules)
    fixed_graph, fixed_params = nnx.split(fixed)
    optimizer = optax.chain(optax.clip_by_global_norm(training.clip_norm), _rule(training))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, moments, fixed_params, batch, scale):
        def objective(params):
            return loss(nnx.merge(graph, params) | nnx.merge(fixed_graph, fixed_params), batch)

        gradients, figures = jax.grad(objective, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, jax.tree.map(lambda u: scale * u, updates)), moments, figures

    moments, running, steps, seconds = optimizer.init(params), {}, 0, 60.0 * minutes
    start = time.monotonic()

    def progress() -> float:
        return steps / training.steps if training.steps else (time.monotonic() - start) / seconds

    with tqdm(total=100, desc=name, unit="%", mininterval=5) as bar:
        while (over := progress()) < 1.0:
            params, moments, figures = step(params, moments, fixed_params, next(batches), _scale(over))
            if steps == 0:
                jax.block_until_ready(params)
                start = time.monotonic()
            steps += 1
            if steps % LOG_EVERY == 1:
                figures = {key: float(value) for key, value in figures.items()}
                running = {key: 0.7 * running.get(key, value) + 0.3 * value for key, value in figures.items()}
                bar.update(min(int(100 * progress()), 100) - bar.n)
                bar.set_postfix({"step": steps} | {key: f"{value:.3f}" for key, value in running.items()})
        jax.block_until_ready(params)
        bar.update(100 - bar.n)
    return nnx.merge(graph, params), running | {"steps": steps, "step_ms": 1e3 * (time.monotonic() - start) / steps}


def _scale(progress: float) -> float:
    """Share of the learning rate at a share of the stage: a short ramp, then half a cosine."""
    return min(progress / WARM_UP, 1.0) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _rule(training: CodecTraining) -> optax.GradientTransformation:
    if training.optimizer == "muon":
        return optax.contrib.muon(
            training.learning_rate,
            weight_decay=training.weight_decay,
            adam_learning_rate=training.adam_learning_rate,
            adam_b2=0.98,
            muon_weight_dimension_numbers=_kernels,
        )
    if training.optimizer == "adamw":
        rate, decay = training.adam_learning_rate, training.weight_decay
        return optax.adamw(rate, b2=0.98, weight_decay=decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    raise ValueError(f"optimizer must be 'muon' or 'adamw', got {training.optimizer!r}")


def _kernels(params: nnx.State) -> nnx.State:
    """What Muon orthogonalises: the kernels of linear layers."""

    def numbers(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        kernel = any(getattr(key, "key", getattr(key, "name", None)) == "kernel" for key in path)
        return optax.contrib.MuonDimensionNumbers() if kernel and x.ndim == 2 else None

    return jax.tree_util.tree_map_with_path(numbers, params)
