"""The loss of backbone and draft heads, and what is reported of each head."""

import jax
import jax.numpy as jnp

from vadusa_jax.config import HeadsConfig
from vadusa_jax.model.heads import SpeechLM

Batch = dict[str, jax.Array]
TRAIN_TOP = (1,)  # the same of training steps: more of them cost more passes over the logits
TOP = (1, 3, 5, 10)  # accuracies that are reported: is the target among a head's n best guesses?


def packed_mask(segments_BT: jax.Array) -> jax.Array:
    """Causal attention inside segments `[B, T, T]`; padding (segment 0) sees only earlier padding and itself."""
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return same_BTT & jnp.tril(jnp.ones(same_BTT.shape[1:], bool))


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


def head_sums(logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, top: tuple[int, ...]) -> jax.Array:
    """Sums over the counted positions: how many there are, their cross entropy, and hits among the `top` guesses."""
    target_BT = jnp.where(mask_BT, targets_BT, 0)
    chosen_BT1 = jnp.take_along_axis(logits_BTV, target_BT[..., None], axis=-1)
    ce_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT1[..., 0]
    sums = [jnp.sum(mask_BT), jnp.sum(jnp.where(mask_BT, ce_BT, 0.0))]
    if top:
        rank_BT = jnp.sum(logits_BTV > chosen_BT1, axis=-1)
        sums += [jnp.sum(mask_BT & (rank_BT < n)) for n in top]
    return jnp.stack([s.astype(jnp.float32) for s in sums])


def loss_sums(lm: SpeechLM, batch: Batch, top: tuple[int, ...] = ()) -> jax.Array:
    """`head_sums` of the LM head and of every draft head on one packed batch: `[1 + K, 2 + len(top)]`."""
    h_BTD, _ = lm.backbone(batch["tokens_BT"], batch["positions_BT"], packed_mask(batch["segments_BT"]))
    sums = [head_sums(lm.backbone.logits(h_BTD), *shifted_targets(batch, 0), top)]
    heads = lm.heads.each(h_BTD, lambda k: lm.backbone.embed(jnp.roll(batch["tokens_BT"], -k, axis=1)))
    for k, logits_BTV in enumerate(heads, start=1):  # positions whose tokens rolled round are not counted
        sums.append(head_sums(logits_BTV, *shifted_targets(batch, k), top))
    return jnp.stack(sums)


def joint_loss(sums: jax.Array, heads: HeadsConfig) -> jax.Array:
    """CE_lm + loss_weight * sum_k decay^(k-1) CE_k (Medusa, arXiv 2401.10774, equation 1): means over positions.

    A head without a single counted position adds nothing (never a division by zero).
    """
    ce = sums[:, 1] / jnp.maximum(sums[:, 0], 1.0)
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
