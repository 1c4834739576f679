"""Two stages make a codec from recorded sentences: first tokens <-> log-mel, then tokens -> waveform.

Stage 1 learns encoder and decoder on rows of whole sentences: L1 of the log-mel, and a CTC loss (Graves et al., 2006)
that makes a throw-away reader spell the phones of the transcript from the tokens alone, so that the few bits of a token
go to what is said. Stage 2 freezes both and learns the vocoder on short crops, half of them from recorded and half from
decoded log-mel. (A decoder that learned along at the same rate lost in minutes what stage 1 had taught it.)

A stage ends after its minutes, or after `steps` where they are given (then it repeats exactly); the learning rate falls
along a cosine of the share that is over.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from vadusa_jax.speech import features
from vadusa_jax.speech.codec import FsqCodec, new_codec
from vadusa_jax.speech.convnext import ConvNeXt
from vadusa_jax.speech.fsq import CodecConfig, Fsq
from vadusa_jax.speech.vocoder import Vocoder, spectral_loss

WARM_UP = 0.03  # share of a stage
LOG_EVERY = 20  # steps
POOL = 32  # sentences among which the one that fills a row best is chosen
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recording:
    """One spoken sentence and what it says, as ids 1 .. symbols - 1 (0 is CTC's blank)."""

    wave_P: np.ndarray
    phones: Sequence[int]


@dataclasses.dataclass(frozen=True)
class CodecTraining:
    """Choices of both stages."""

    minutes_codec: float = 12.0
    minutes_vocoder: float = 20.0
    steps: int | None = None  # of each stage, in place of minutes
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    row_seconds: float = 8.0  # stage 1: a row holds whole sentences, silence to the end
    rows: int = 2
    phone_weight: float = 0.1
    reader_width: int = 192
    reader_layers: int = 3
    crops: int = 8  # stage 2
    crop_tokens: int = 48
    margin_tokens: int = 16  # the reach of the decoder
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
    codec = dataclasses.replace(new_codec(config, training.seed), vocoder=None)
    reader = Reader(config, training, symbols, rngs=nnx.Rngs(training.seed + 1))
    loss = functools.partial(token_loss, config, training.phone_weight)
    batches = sentence_rows(recordings, config, training)
    modules = {"encoder": codec.encoder, "decoder": codec.decoder, "reader": reader}
    trained, figures = fit(modules, {}, loss, batches, training, training.minutes_codec, "tokens")
    return dataclasses.replace(codec, encoder=trained["encoder"], decoder=trained["decoder"]), figures


def train_vocoder(
    codec: FsqCodec, recordings: Sequence[Recording], training: CodecTraining
) -> tuple[FsqCodec, dict[str, float]]:
    """Stage 2: the same codec with a vocoder, which is trained further if the codec has one."""
    vocoder = codec.vocoder or Vocoder(codec.config, rngs=nnx.Rngs(training.seed + 2))
    loss = functools.partial(wave_loss, codec.config, training.margin_tokens)
    batches = crops(recordings, codec.config, training)
    fixed = {"encoder": codec.encoder, "decoder": codec.decoder}
    trained, figures = fit({"vocoder": vocoder}, fixed, loss, batches, training, training.minutes_vocoder, "vocoder")
    return dataclasses.replace(codec, vocoder=trained["vocoder"]), figures


def token_loss(config: CodecConfig, phone_weight: float, modules: dict[str, nnx.Module], batch: Batch):
    """L1 of the log-mel over what is sound, and the reader's CTC loss per phone."""
    wave_BP, mask_BT, phones_BL = batch["wave_BP"], batch["mask_BT"], batch["phones_BL"]
    mel_BFM = features.log_mel(wave_BP, config.sample_rate, config.n_fft, config.hop, config.mels)
    digits_BTD = modules["encoder"](mel_BFM, mask_BT)
    made_BFM = modules["decoder"](digits_BTD, mask_BT)
    mask_BF1 = jnp.repeat(mask_BT, config.stack, axis=1)[..., None]
    mel_loss = (jnp.abs(made_BFM - mel_BFM) * mask_BF1).sum() / (mask_BF1.sum() * config.mels)
    logits_BTS = modules["reader"](digits_BTD, mask_BT)
    unused_BL = (phones_BL == 0).astype(jnp.float32)
    phone_loss = optax.ctc_loss(logits_BTS, 1.0 - mask_BT, phones_BL, unused_BL).sum() / (1.0 - unused_BL).sum()
    return mel_loss + phone_weight * phone_loss, {"mel": mel_loss, "phone": phone_loss}


def wave_loss(config: CodecConfig, margin: int, modules: dict[str, nnx.Module], batch: Batch):
    """Spectral and log-mel distance of the waves made from recorded (first half) and decoded (second half) log-mel.

    Encoder and decoder also see `margin` tokens on either side of what is compared, as they do in whole sentences.
    """
    inner_T, inner_F = (slice(margin * n, -margin * n) for n in (1, config.stack))
    wave_BP = batch["wave_BP"][:, margin * config.token_samples : -margin * config.token_samples]
    mask_BT, half = batch["mask_BT"], len(wave_BP) // 2
    mask_BF = jnp.repeat(mask_BT[:, inner_T], config.stack, axis=1)
    mel_BFM = features.log_mel(batch["wave_BP"], config.sample_rate, config.n_fft, config.hop, config.mels)
    digits_HTD = modules["encoder"](mel_BFM[half:], mask_BT[half:])
    decoded_HFM = modules["decoder"](digits_HTD, mask_BT[half:])[:, inner_F]
    mel_BFM = mel_BFM[:, inner_F]
    made_BP = modules["vocoder"](jnp.concatenate([mel_BFM[:half], decoded_HFM]), mask_BF)
    heard_BFM = features.log_mel(made_BP, config.sample_rate, config.n_fft, config.hop, config.mels)
    mel_loss = jnp.abs(heard_BFM - mel_BFM).mean()
    loss = spectral_loss(made_BP, wave_BP)
    return loss + mel_loss, {"spectra": loss, "mel": mel_loss}


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
    optimizer = optax.chain(
        optax.clip_by_global_norm(training.clip_norm),
        optax.adamw(training.learning_rate, b2=0.98, weight_decay=training.weight_decay, mask=_matrices),
    )

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


def sentence_rows(recordings: Sequence[Recording], config: CodecConfig, training: CodecTraining) -> Iterator[Batch]:
    """Endless shuffled batches of rows that hold whole sentences one after another. Longer sentences are left out."""
    limit = int(training.row_seconds * config.sample_rate) // config.token_samples
    sizes = [-(-len(r.wave_P) // config.token_samples) for r in recordings]
    fitting = [i for i, size in enumerate(sizes) if size <= limit]
    if not fitting:
        raise ValueError(f"none of {len(recordings)} recordings is shorter than row_seconds {training.row_seconds}")
    label_limit = limit * 3 // 4
    rng, pool = np.random.default_rng(training.seed), []
    queue = _endless(fitting, rng)
    while True:
        wave_BP = np.zeros((training.rows, limit * config.token_samples), np.float32)
        mask_BT = np.zeros((training.rows, limit), np.float32)
        phones_BL = np.zeros((training.rows, label_limit), np.int32)
        for row in range(training.rows):
            at, spelled = 0, 0
            pool += [next(queue) for _ in range(POOL - len(pool))]
            while choice := [i for i in pool if sizes[i] <= limit - at]:
                best = choice[0] if at == 0 else max(choice, key=sizes.__getitem__)
                pool.remove(best)
                wave_P, phones = recordings[best].wave_P, recordings[best].phones[: label_limit - spelled]
                wave_BP[row, at * config.token_samples :][: len(wave_P)] = wave_P
                mask_BT[row, at : at + sizes[best]] = 1.0
                phones_BL[row, spelled : spelled + len(phones)] = phones
                at, spelled = at + sizes[best], spelled + len(phones)
        yield {"wave_BP": wave_BP, "mask_BT": mask_BT, "phones_BL": phones_BL}


def crops(recordings: Sequence[Recording], config: CodecConfig, training: CodecTraining) -> Iterator[Batch]:
    """Endless batches of crops with their margins, drawn evenly over all the sound; `mask_BT` is 0 outside of it."""
    size, margin, step = training.crop_tokens + 2 * training.margin_tokens, training.margin_tokens, config.token_samples
    counts = np.array([-(-len(r.wave_P) // step) for r in recordings])
    rng = np.random.default_rng(training.seed)
    while True:
        wave_BP = np.zeros((training.crops, size * step), np.float32)
        mask_BT = np.zeros((training.crops, size), np.float32)
        for row, i in enumerate(rng.choice(len(recordings), training.crops, p=counts / counts.sum())):
            start = int(rng.integers(-margin, max(counts[i] + margin - size, -margin) + 1))
            sound_P = recordings[i].wave_P[max(start, 0) * step :][: (size + min(start, 0)) * step]
            at = max(-start, 0)
            wave_BP[row, at * step :][: len(sound_P)] = sound_P
            mask_BT[row, at : counts[i] - start] = 1.0
        yield {"wave_BP": wave_BP, "mask_BT": mask_BT}


def _endless(items: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(items).tolist()


def _scale(progress: float) -> float:
    """Share of the learning rate at a share of the stage: a short ramp, then half a cosine."""
    return min(progress / WARM_UP, 1.0) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
