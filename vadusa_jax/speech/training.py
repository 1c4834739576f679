"""Two stages make a codec from recorded sentences: first tokens <-> log-mel, then tokens -> waveform.

Stage 1 learns encoder and decoder on rows of whole sentences: L1 of the log-mel, and a CTC loss (Graves et al., 2006)
that makes a throw-away reader spell the phones of the transcript from the tokens alone, so that the few bits of a token
go to what is said. Stage 2 freezes both and learns the vocoder on short crops, half of them from recorded and half from
decoded log-mel, with a discriminator beside the spectral losses. (A decoder that learned along at the same rate lost in
minutes what stage 1 had taught it.)
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vadusa_jax.speech.codec import FsqCodec, new_codec
from vadusa_jax.speech.convnext import ConvNeXt
from vadusa_jax.speech.discriminator import Discriminator, deceiving_loss, judging_loss, matching_loss
from vadusa_jax.speech.fsq import CodecConfig, Fsq, log_mel, unit_size
from vadusa_jax.speech.recordings import Batch, Recording, crops, sentence_rows
from vadusa_jax.speech.rendered import RenderedCodec
from vadusa_jax.speech.renderer import Renderer, new_renderer
from vadusa_jax.speech.stage import CodecTraining, fit
from vadusa_jax.speech.vocoder import Vocoder, spectral_loss

FIRST_SHARE, SMALLER_STEPS = 0.2, 0.3  # where a codec is learned further


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
    recordings: Sequence[Recording],
    symbols: int,
    config: CodecConfig,
    training: CodecTraining,
    start: FsqCodec | None = None,
) -> tuple[FsqCodec, dict[str, float]]:
    """Stage 1: a codec without vocoder, and the figures of its training.

    With a codec to start from, whose sizes `config` has (its timbre may be new), that one is learned further: first
    what is new, beside the old encoder, then all of it with smaller steps. Its tokens wander, but for those of
    recordings that are `kept`. Its vocoder is the old one, for stage 2 to train further.
    """
    codec = new_codec(config, training.seed)
    reader = Reader(config, training, symbols, rngs=nnx.Rngs(training.seed + 1))
    if start is None:
        renderer, trained, figures = _train_decoder(
            codec.renderer, {"encoder": codec.encoder, "reader": reader}, {}, recordings, training
        )
        return FsqCodec(trained["encoder"], renderer), figures
    renderer = _grown(codec.renderer, start.renderer)
    first, then = _part(training, FIRST_SHARE), _part(training, 1.0 - FIRST_SHARE, SMALLER_STEPS)
    renderer, trained, _ = _train_decoder(renderer, {"reader": reader}, {"encoder": start.encoder}, recordings, first)
    modules = {"encoder": start.encoder, "reader": trained["reader"]}
    old = {"old": start.encoder} if any(recording.kept for recording in recordings) else {}
    renderer, trained, figures = _train_decoder(renderer, modules, old, recordings, then)
    return FsqCodec(trained["encoder"], dataclasses.replace(renderer, vocoder=start.renderer.vocoder)), figures


def _grown(new: Renderer, old: Renderer) -> Renderer:
    """The new renderer with the decoder of the old one, and its timbre if it has one; a new timbre changes nothing."""
    nnx.update(new.decoder, nnx.state(old.decoder))
    if old.timbre:
        nnx.update(new.timbre, nnx.state(old.timbre))
    elif new.timbre:
        for tint in new.decoder.tints:
            tint.kernel[...] = jnp.zeros_like(tint.kernel[...])
    return new


def _part(training: CodecTraining, share: float, rate: float = 1.0) -> CodecTraining:
    """A share of the time or steps of stage 1, at so much of the learning rates."""
    return dataclasses.replace(
        training,
        minutes_codec=share * training.minutes_codec,
        steps=training.steps and max(1, round(share * training.steps)),
        learning_rate=rate * training.learning_rate,
        adam_learning_rate=rate * training.adam_learning_rate,
    )


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
    loss = functools.partial(token_loss, renderer.config, training)
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


def token_loss(config: CodecConfig, training: CodecTraining, modules: dict[str, nnx.Module], batch: Batch):
    """L1 of the log-mel over what is sound, and the reader's CTC loss per phone where there is a reader.

    Beside an old encoder also how far kept rows are, before rounding, from the digits that it gives them.
    """
    mask_BT, mel_BFM = batch["mask_BT"], log_mel(config, batch["wave_BP"])
    digits_BTD, made_BFM = _coded(config, modules, batch, mel_BFM)
    mask_BF1 = jnp.repeat(mask_BT, config.stack, axis=1)[..., None]
    mel_loss = (jnp.abs(made_BFM - mel_BFM) * mask_BF1).sum() / (mask_BF1.sum() * config.mels)
    if "reader" not in modules:
        return mel_loss, {"mel": mel_loss}
    phones_BL, logits_BTS = batch["phones_BL"], modules["reader"](digits_BTD, mask_BT)
    unused_BL = (phones_BL == 0).astype(jnp.float32)
    phone_loss = optax.ctc_loss(logits_BTS, 1.0 - mask_BT, phones_BL, unused_BL).sum() / (1.0 - unused_BL).sum()
    loss, figures = mel_loss + training.phone_weight * phone_loss, {"mel": mel_loss, "phone": phone_loss}
    if "old" in modules:
        off_BTD = jnp.abs(modules["encoder"].squashed(mel_BFM, mask_BT) - modules["old"].squashed(mel_BFM, mask_BT))
        kept_BT = mask_BT * batch["kept_B"][:, None]
        figures["off"] = (off_BTD.mean(axis=-1) * kept_BT).sum() / jnp.maximum(kept_BT.sum(), 1.0)
        loss += training.keep_weight * figures["off"]
    return loss, figures


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
