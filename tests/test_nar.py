"""Laws of the non-autoregressive stage: it sees what it may, padding and neighbours change nothing, and it learns."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
from flax import nnx
from toys import MODEL, toy_voice

from vadusa_jax.config import TrainConfig
from vadusa_jax.model import nar as nar_room
from vadusa_jax.model.nar import PADDING, PROMPT, TARGET, TEXT, Nar, NarConfig, fill, load_nar, make_rows, save_nar
from vadusa_jax.text import Vocabulary
from vadusa_jax.training import nar as training
from vadusa_jax.training.nar import nar_batches, nar_sums, train_nar
from vadusa_jax.training.stopping import Preempted
from vadusa_jax.voice import Voice

CONFIG = NarConfig(
    codebooks=3, codebook_size=8, text_vocab=MODEL.text_vocab, layers=2, width=32, attention_heads=4, ffn=48
)


def utterance(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Phones and codes: each codebook follows from those below it, and the second from the first phone as well."""
    rng = np.random.default_rng(seed)
    phones, first = rng.integers(0, 2, rng.integers(2, 6)), rng.integers(0, 8, rng.integers(6, 20))
    second = (3 * first + 4 * phones[0]) % 8
    return phones, np.stack([first, second, (first + second) % 8]).astype(np.int32)


@pytest.fixture(scope="module")
def nar() -> Nar:
    """An untrained stage, loud enough to have opinions."""
    nar, rng = Nar(CONFIG, rngs=nnx.Rngs(0)), np.random.default_rng(0)

    def louder(x: jax.Array) -> jax.Array:
        return jax.numpy.asarray(x + 0.25 * rng.standard_normal(x.shape).astype(np.float32)) if x.ndim > 1 else x

    nnx.update(nar, jax.tree.map(louder, nnx.state(nar, nnx.Param)))
    return nar


LOGITS = nnx.jit(lambda nar, rows, stage_B: nar(rows["phones_BT"], rows["codes_BQT"], rows["kind_BT"], stage_B))


def test_rows_hold_phones_then_prompt_then_target():
    phones, codes = np.array([5, 6]), np.arange(12).reshape(3, 4)
    rows = make_rows([phones], [codes], [1], 8, 3)
    assert rows["kind_BT"].tolist() == [[TEXT, TEXT, PROMPT, TARGET, TARGET, TARGET, PADDING, PADDING]]
    assert rows["phones_BT"][0, :2].tolist() == [5, 6] and (rows["codes_BQT"][0, :, 2:6] == codes).all()
    with pytest.raises(ValueError, match="utterance 0 takes 6 positions, a row has 5"):
        make_rows([phones], [codes], [1], 5, 3)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_sees_phones_prompt_and_lower_codebooks_and_nothing_else(nar, stage):
    phones, codes = utterance(1)
    rows = make_rows([phones], [codes], [2], 32, 3)
    at, end = len(phones), len(phones) + codes.shape[1]

    def logits(**changed):
        return np.asarray(LOGITS(nar, rows | changed, np.array([stage])))[0, at:end]

    def other(name, *where):
        x = rows[name].copy()
        x[where] = (x[where] + 1) % 8
        return {name: x}

    base = logits()
    for same in (
        other("codes_BQT", 0, slice(stage, 3), slice(at + 2, end)),
        other("codes_BQT", 0, slice(None), slice(end, None)),
        other("phones_BT", 0, slice(end, None)),
    ):
        np.testing.assert_allclose(logits(**same), base, atol=1e-5)
    for differs in (
        other("phones_BT", 0, 0),
        other("codes_BQT", 0, 2, at),  # all of the prompt
        *(other("codes_BQT", 0, q, end - 1) for q in range(stage)),
    ):
        assert np.abs(logits(**differs) - base)[0].max() > 1e-4  # both ways: the first frame sees the last


def test_filling_is_the_same_alone_in_a_batch_and_with_more_padding(nar, monkeypatch):
    utterances = [utterance(seed) for seed in range(3)]
    phones, first = [p for p, _ in utterances], [codes[0] for _, codes in utterances]
    together = fill(nar, phones, first)
    for p, f, filled_QT in zip(phones, first, together, strict=True):
        assert filled_QT.shape == (3, len(f)) and (filled_QT[0] == f).all() and filled_QT.max() < 8
        assert (fill(nar, [p], [f])[0] == filled_QT).all()
    monkeypatch.setattr(nar_room, "BUCKET", 40)
    assert all((a == b).all() for a, b in zip(fill(nar, phones, first), together, strict=True))
    assert len({x.tobytes() for x in together[0]}) == 3


def test_a_prompt_is_heard_and_does_not_come_back(nar):
    (phones, codes), prompt = utterance(0), utterance(7)[1]
    plain, prompted = fill(nar, [phones], [codes[0]])[0], fill(nar, [phones], [codes[0]], [prompt])[0]
    assert prompted.shape == plain.shape and (prompted[0] == codes[0]).all() and (prompted != plain).any()


def test_it_learns_a_residual_codec_and_goes_on_where_it_was_asked_to_end(tmp_path, monkeypatch):
    spoken = [utterance(seed) for seed in range(600)]
    train = TrainConfig(steps=800, warmup_steps=20, log_every=50)
    whole, _ = train_nar(spoken, CONFIG, train, tmp_path / "whole", rows=16, length=32)

    def asked_to_end(*args):
        for i, batch in enumerate(nar_batches(*args)):
            if i == 123:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch, pytest.raises(Preempted, match="saved step 124 of 800"):
        patch.setattr(training, "nar_batches", asked_to_end)
        train_nar(spoken, CONFIG, train, tmp_path / "nar", rows=16, length=32)
    nar, figures = train_nar(spoken, CONFIG, train, tmp_path / "nar", rows=16, length=32)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *(nnx.state(x, nnx.Param) for x in (whole, nar)))))
    assert figures["top1"] > 0.9  # over the last steps
    save_nar(tmp_path / "nar", nar)
    again = load_nar(tmp_path / "nar")
    fresh = [utterance(seed) for seed in range(1000, 1010)]
    filled = fill(again, [p for p, _ in fresh], [codes[0] for _, codes in fresh])
    right = np.concatenate([(a == codes)[1:].ravel() for a, (_, codes) in zip(filled, fresh, strict=True)])
    assert right.mean() > 0.95


def test_batches_repeat_by_seed_and_ask_for_every_higher_codebook():
    spoken = [utterance(seed) for seed in range(20)]
    all_of_them, later = nar_batches(spoken, CONFIG, 32, 32, seed=3), nar_batches(spoken, CONFIG, 32, 32, 3, start=1)
    first, one, two = next(all_of_them), next(all_of_them), next(later)
    assert all((one[name] == two[name]).all() for name in one)
    assert (first["codes_BQT"] != one["codes_BQT"]).any()
    assert set(one["stage_B"].tolist()) == {1, 2}
    with pytest.raises(ValueError, match="none of 20 utterances fits into 3"):
        next(nar_batches(spoken, CONFIG, 2, 3, seed=0))


def test_a_batch_of_padding_has_a_finite_loss(nar):
    rows = {name: np.zeros_like(x) for name, x in make_rows(*map(list, zip(utterance(0))), [0], 32, 3).items()}
    sums = nnx.jit(nar_sums)(nar, rows | {"stage_B": np.array([1])})
    assert np.isfinite(sums).all() and float(sums[0]) == 0


def test_one_codebook_is_refused():
    with pytest.raises(ValueError, match="nothing to fill in"):
        Nar(dataclasses.replace(CONFIG, codebooks=1), rngs=nnx.Rngs(0))


@dataclasses.dataclass(frozen=True)
class Residual:
    """A codec of three codebooks whose sound is its codes."""

    vocab_size: int = 20
    frame_rate: float = 50.0
    sample_rate: int = 16_000
    receptive_field: int = 0

    def decode_all(self, codes_QT: np.ndarray) -> np.ndarray:
        return codes_QT.T.ravel().astype(np.float32)


def test_a_voice_fills_in_before_it_sounds(tmp_path):
    config = dataclasses.replace(CONFIG, layers=1, codebook_size=20, text_vocab=len(Vocabulary.english()))
    save_nar(tmp_path / "voice" / "nar", Nar(config, rngs=nnx.Rngs(0)))
    voice = dataclasses.replace(Voice.load(toy_voice(tmp_path / "voice")), codec=Residual())
    tokens = np.array([3, 1, 4, 1, 5], np.int32)
    wave = voice.sound("ab", tokens)
    assert (wave.reshape(-1, 3)[:, 0] == tokens).all()
    with pytest.raises(ValueError, match="does not stream"):
        next(voice.stream("One.", None))
