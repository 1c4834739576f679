"""Laws of acoustic BPE: no token is lost, units are fewer, streams sound the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import CODEC

from vadusa_jax.data import units as unit_data
from vadusa_jax.data.dataset import CodecFacts, TokenRecord, open_dataset, write_dataset
from vadusa_jax.speech import load_codec, stream
from vadusa_jax.speech.bpe import BpeCodec, train_units
from vadusa_jax.speech.codec import new_codec
from vadusa_jax.text import Vocabulary

TOKENS = 20  # of the toy codec


def spoken(seed: int, words: int = 60) -> np.ndarray:
    """A stream of recurring "words" of tokens, and noise between."""
    rng, lexicon = np.random.default_rng(seed), np.random.default_rng(0).integers(0, TOKENS, (8, 4))
    parts = [[*lexicon[rng.integers(8)], rng.integers(TOKENS)] for _ in range(words)]
    return np.concatenate(parts).astype(np.int32)


UNITS = train_units(map(spoken, range(20)), TOKENS, vocab_size=64)


@given(st.lists(st.integers(0, TOKENS - 1), max_size=200))
def test_any_tokens_come_back(tokens):
    units_U = UNITS.encode(np.array(tokens, np.int32))
    assert units_U.dtype == np.int32 and len(units_U) <= len(tokens)
    assert UNITS.decode(units_U).tolist() == tokens


@given(st.lists(st.integers(0, 63), max_size=50))
def test_any_units_are_tokens(units):
    tokens_T = UNITS.decode(np.array(units, np.int32))
    assert UNITS.decode(UNITS.encode(tokens_T)).tolist() == tokens_T.tolist()


def test_single_tokens_are_the_first_units_and_recurring_speech_is_shorter():
    assert [u.tolist() for u in UNITS.tokens_of[:TOKENS]] == [[token] for token in range(TOKENS)]
    assert len(UNITS.tokens_of) == 64 and max(map(len, UNITS.tokens_of)) <= 16
    fresh = spoken(99)
    assert len(UNITS.encode(fresh)) < 0.5 * len(fresh)


def test_a_whole_large_vocabulary_has_characters():
    units = train_units([np.arange(65_536), *[np.array([65_535, 65_533])] * 2], 65_536, 65_537)
    tokens_T = np.array([65_535, 65_533, 7, 55_296, 65_535, 65_533], np.int32)
    units_U = units.encode(tokens_T)
    assert len(units_U) == 4 and (units.decode(units_U) == tokens_T).all()


def test_longest_unit_and_foreign_tokens():
    silence = train_units([np.zeros(500, np.int32)] * 2, 2, 40, longest=5)
    assert max(map(len, silence.tokens_of)) == 4  # they double
    with pytest.raises(ValueError, match="made for a smaller vocabulary"):
        UNITS.encode(np.array([3, 20]))
    with pytest.raises(ValueError, match=r"units 3\.\.64 are not all in 0\.\.63"):
        UNITS.decode(np.array([3, 64]))
    with pytest.raises(ValueError, match="10 units cannot hold the 20 tokens"):
        train_units([], TOKENS, 10)


@pytest.fixture(scope="module")
def codec() -> BpeCodec:
    return BpeCodec(new_codec(CODEC, 0), UNITS, tokens_per_unit=2.5)


def test_the_codec_speaks_units(codec, tmp_path):
    wave_P = (0.1 * np.random.default_rng(0).standard_normal(20_000)).astype(np.float32)
    assert (codec.units.decode(codec.encode(wave_P)) == codec.inner.encode(wave_P)).all()
    assert (codec.vocab_size, codec.sample_rate) == (64, 16_000)
    assert codec.frame_rate == codec.inner.frame_rate / 2.5
    codec.save(tmp_path / "codec")
    again, once = load_codec(tmp_path / "codec"), codec.encode(wave_P)
    assert again.tokens_per_unit == 2.5 and (again.units.decode(once) == codec.units.decode(once)).all()
    assert np.abs(again.decode(once) - codec.decode(once)).max() < 1e-2  # weights lie in float16


def test_a_stream_of_units_is_the_whole(codec):
    units_U = UNITS.encode(spoken(5, words=15))
    for chunk in (1, 7, len(units_U)):
        chunks = [units_U[i : i + chunk] for i in range(0, len(units_U), chunk)]
        np.testing.assert_allclose(np.concatenate([*stream.render(codec, chunks)]), codec.decode(units_U), atol=1e-5)


def test_a_token_dataset_becomes_one_of_units(codec, tmp_path):
    codec.inner.save(tmp_path / "codec")
    vocabulary, phones = Vocabulary.english(), np.array([1, 2], np.int32)
    records = [TokenRecord(f"a{i}", "s", "hé", phones, spoken(i)) for i in range(20)]
    splits, facts = {"train": records, "dev": records[:3]}, CodecFacts(TOKENS, 50.0, 16_000)
    write_dataset(tmp_path / "tokens", splits, vocabulary, facts)
    report = unit_data.to_units(tmp_path / "tokens", tmp_path / "codec", 64, tmp_path / "units")
    made, kept_vocabulary, new_facts = open_dataset(tmp_path / "units")
    spoken_units = load_codec(tmp_path / "units" / "codec")
    assert kept_vocabulary == vocabulary and new_facts.speech_vocab == spoken_units.vocab_size == 64
    assert report["train"]["units_per_token"] == pytest.approx(new_facts.frame_rate / 50.0)
    for record, plain in zip(made["dev"], open_dataset(tmp_path / "tokens")[0]["dev"], strict=True):
        assert (spoken_units.units.decode(record["speech"]) == plain["speech"]).all()
        assert (record["id"], record["text"]) == (plain["id"], plain["text"])
    with pytest.raises(ValueError, match=r"has 20 tokens, those of .* have 64"):
        unit_data.to_units(tmp_path / "units", tmp_path / "codec", 64, tmp_path / "again")
