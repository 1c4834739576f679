"""The loss of backbone and draft heads, and what is reported of each head."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from vadusa_jax.config import HeadsConfig, TrainConfig
from vadusa_jax.model.backbone import Packed
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.sharding import constrain

Batch = dict[str, jax.Array]
TRAIN_TOP = (1,)  # the same of training steps: more of them cost more passes over the logits
TOP = (1, 3, 5, 10)  # accuracies that are reported: is the target among a head's n best guesses?


def shifted_targets(batch: Batch, shift: int) -> tuple[jax.Array, jax.Array]:
    """Targets `[B, T]` of the head that looks `shift` tokens past the LM head, and their mask.

    The LM head has shift 0, draft head k shift k. A position counts if both its own next token and the one `shift`
    further on are speech tokens or EOS of the same segment: where decoding would ask the head.
    """
    if not shift:
        return batch["targets_BT"], batch["mask_BT"].astype(bool)

    def ahead(x_BT: jax.Array) -> jax.Array:
        shift_ = min(shift, x_BT.shape[1])
        return jnp.pad(x_BT[:, shift_:], ((0, 0), (0, shift_)))

    same_BT = ahead(batch["segments_BT"]) == batch["segments_BT"]
    return ahead(batch["targets_BT"]), (batch["mask_BT"] * ahead(batch["mask_BT"]) * same_BT).astype(bool)


def head_counts(batch: Batch, heads: int) -> jax.Array:
    """Positions `[1 + heads]` that count for the LM head and for each draft head: known before the model runs."""
    masks = [shifted_targets(batch, k)[1] for k in range(1 + heads)]
    return jnp.stack([jnp.sum(mask_BT).astype(jnp.float32) for mask_BT in masks])


def head_sums(
    logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, top: tuple[int, ...], z_loss: float = 0.0
) -> jax.Array:
    """Sums over the counted positions: how many there are, their cross entropy, and hits among the `top` guesses.

    With `z_loss` the cross entropy includes that many times the squared log-normaliser (PaLM, arXiv 2204.02311), which
    keeps the logits from drifting.
    """
    target_BT = jnp.where(mask_BT, targets_BT, 0)
    chosen_BT1 = jnp.take_along_axis(logits_BTV, target_BT[..., None], axis=-1)
    normaliser_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    ce_BT = normaliser_BT - chosen_BT1[..., 0]
    if z_loss:
        ce_BT += z_loss * normaliser_BT**2
    sums = [jnp.sum(mask_BT), jnp.sum(jnp.where(mask_BT, ce_BT, 0.0))]
    if top:
        rank_BT = jnp.sum(logits_BTV > chosen_BT1, axis=-1)
        sums += [jnp.sum(mask_BT & (rank_BT < n)) for n in top]
    return jnp.stack([s.astype(jnp.float32) for s in sums])


def loss_sums(lm: SpeechLM, batch: Batch, top: tuple[int, ...] = (), train: TrainConfig | None = None) -> jax.Array:
    """`head_sums` of the LM head and of every draft head on one packed batch: `[1 + K, 2 + len(top)]`.

    `train` says what is added to the loss and what the backward pass makes again: without it nothing. The logits of
    all heads are the largest arrays of all; with `train.loss_chunk` only those of so many positions exist at one time,
    whatever K is.
    """
    train = train or TrainConfig()
    tokens_BT, shifts = batch["tokens_BT"], range(1 + lm.head_count)
    h_BTD, _ = lm.backbone(tokens_BT, batch["positions_BT"], Packed(batch["segments_BT"]), remat=train.remat)

    def sums(h_BTD: jax.Array, ahead: list[jax.Array], targets: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        heads = lm.heads.each(h_BTD, lambda k: lm.backbone.embed(ahead[k])) if lm.heads else ()
        all_logits = itertools.chain([lm.backbone.logits(h_BTD)], heads)
        each = [
            head_sums(constrain(logits_BTV, "logits_BTV"), *target, top, train.z_loss)
            for logits_BTV, target in zip(all_logits, targets, strict=True)
        ]
        return jnp.stack(each)

    # Tokens roll round the end of a row: the positions where that shows are not counted.
    seen = (
        h_BTD,
        [jnp.roll(tokens_BT, -k, axis=1) for k in shifts],
        [shifted_targets(batch, k) for k in shifts],
    )
    if not train.loss_chunk:
        return sums(*seen)
    length, chunk = tokens_BT.shape[1], train.loss_chunk
    if length % chunk:
        raise ValueError(f"train.loss_chunk is {chunk}, which does not divide the {length} positions of a row")

    def add(total: jax.Array, part: tuple) -> tuple[jax.Array, None]:
        return total + jax.checkpoint(sums)(*part), None

    parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0), seen)
    return lax.scan(add, jnp.zeros((len(shifts), 2 + len(top))), parts)[0]


def joint_loss(sums: jax.Array, heads: HeadsConfig, counts: jax.Array | None = None) -> jax.Array:
    """CE_lm + loss_weight * sum_k decay^(k-1) CE_k (Medusa, arXiv 2401.10774, equation 1): means over positions.

    A head without a single counted position adds nothing (never a division by zero). Sums of a part of a batch, with
    the `counts` of the whole batch, give that part's share of the batch's loss: the shares add up to it exactly.
    """
    ce = sums[:, 1] / jnp.maximum(sums[:, 0] if counts is None else counts, 1.0)
    weights = heads.loss_weight * heads.decay ** jnp.arange(len(ce) - 1)
    return ce[0] + jnp.sum(weights * ce[1:])


def metrics(sums: jax.Array, top: tuple[int, ...] = ()) -> dict[str, float]:
    """Named figures of each head from its sums: `lm/loss`, `head1/loss`, `head1/top1`, ..."""
    named = {}
    for k, row in enumerate(jax.device_get(sums)):
        name, count = "lm" if k == 0 else f"head{k}", max(float(row[0]), 1.0)
        named[f"{name}/loss"] = float(row[1]) / count
        named |= {f"{name}/top{n}": float(hits) / count for n, hits in zip(top, row[2:], strict=True)}
    return named
