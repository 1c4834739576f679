"""Laws of packing and resuming, on token records written to disk."""

import collections
import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vadusa_jax.config import DataConfig, ModelConfig
from vadusa_jax.data import batches, dataset
from vadusa_jax.decode.prompts import SpeechPrompt, text_prompt
from vadusa_jax.text import SEP, SPACE, Vocabulary

MODEL = ModelConfig(speech_vocab=50, text_vocab=128)
TEXT = MODEL.eos + 1


def records(count: int, seed: int, phones: tuple[int, int], speech: tuple[int, int]) -> list[dataset.TokenRecord]:
    rng = np.random.default_rng(seed)
    vocabulary = len(Vocabulary.english())
    return [
        dataset.TokenRecord(
            id=f"u{i:04d}",
            speaker="s",
            text="t",
            phones=rng.integers(2, vocabulary, rng.integers(*phones)).astype(np.int32),
            speech=rng.integers(0, MODEL.speech_vocab, rng.integers(*speech)).astype(np.int32),
        )
        for i in range(count)
    ]


TRAIN = records(61, 0, phones=(20, 90), speech=(60, 260))
DEV = records(13, 1, phones=(1, 40), speech=(0, 90))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    facts = dataset.CodecFacts(speech_vocab=MODEL.speech_vocab, frame_rate=50.0, sample_rate=16_000)
    dataset.write_dataset(folder, {"train": TRAIN, "dev": DEV}, Vocabulary.english(), facts)
    return DataConfig(dir=str(folder), row_length=512, batch_rows=2, packing_bins=16)


def whole(record: dataset.TokenRecord) -> tuple[int, ...]:
    return (*(record.phones + TEXT), SEP + TEXT, *record.speech, MODEL.eos)


def unpack(batch: dict[str, np.ndarray]) -> list[tuple[int, ...]]:
    """The sequences of a batch, row by row, each with its EOS; checks that all arrays agree on the way."""
    sequences = []
    for tokens, targets, mask, segments, positions in zip(
        *(batch[f"{name}_BT"] for name in ("tokens", "targets", "mask", "segments", "positions")), strict=True
    ):
        assert not mask[segments == 0].any()
        assert (np.diff(segments[segments > 0]) >= 0).all()
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert (np.diff(np.flatnonzero(here)) == 1).all()
            assert (positions[here] == np.arange(here.sum())).all()
            assert (tokens[here][1:] == targets[here][:-1]).all()
            assert (mask[here] == (targets[here] <= MODEL.eos)).all()
            sequences.append((*tokens[here], targets[here][-1]))
    return sequences


def take(iterator, steps: int) -> list[dict[str, np.ndarray]]:
    return [next(iterator) for _ in range(steps)]


def assert_equal(left: list[dict], right: list[dict]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_sequence_with_a_known_answer():
    record = {"id": "x", "phones": np.array([7, 8]), "speech": np.array([3, 4, 5])}
    got = batches.sequence(record, MODEL)
    assert got["tokens"].tolist() == [TEXT + 7, TEXT + 8, TEXT + SEP, 3, 4, 5]
    assert got["targets"].tolist() == [TEXT + 8, TEXT + SEP, 3, 4, 5, MODEL.eos]
    assert got["mask"].tolist() == [0, 0, 1, 1, 1, 1]


def test_a_record_longer_than_a_row_is_named_before_training(data):
    longest = max(TRAIN, key=lambda record: len(record.phones) + len(record.speech))
    with pytest.raises(ValueError, match=rf"{longest.id} takes \d+ positions and a row has 64.*row_length"):
        batches.train_batches(dataclasses.replace(data, row_length=64), MODEL)


def test_a_speech_prompt_is_laid_out_as_decoding_begins_with_it():
    before, after = ({"phones": np.array(p), "speech": np.array(s)} for p, s in (([7, 8], [3, 4, 5]), ([9], [6])))
    learned = batches.sequence(batches.prompted(before, after, space=2), MODEL)
    given = text_prompt([9], SEP, MODEL, SpeechPrompt((7, 8, 2), (3, 4, 5)))
    assert learned["tokens"].tolist() == [*given, 6]
    assert learned["mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_prompts_are_of_the_same_speaker_and_every_record_is_said_once(tmp_path):
    rng, facts = np.random.default_rng(5), dataset.CodecFacts(MODEL.speech_vocab, 50.0, 16_000)
    spoken = [
        dataclasses.replace(record, speaker=f"s{rng.integers(4)}")
        for record in records(80, 3, phones=(5, 40), speech=(20, 120))
    ]
    alone = dataclasses.replace(spoken[0], id="alone", speaker="alone")
    dataset.write_dataset(tmp_path / "tokens", {"train": [*spoken, alone]}, Vocabulary.english(), facts)
    data = DataConfig(dir=str(tmp_path / "tokens"), row_length=256, batch_rows=2, prompt_share=0.7)
    rows, by_id = batches.Rows(data, MODEL, "train", shuffle=True), {r.id: r for r in [*spoken, alone]}
    made = [[by_id[rows.name(n)] for n in rows.records(i)] for row in rows.plan for i in row.tolist()]
    assert sorted(parts[-1].id for parts in made) == sorted(by_id)
    pairs = [parts for parts in made if len(parts) == 2]
    assert 0.5 < len(pairs) / len(made) < 0.9
    assert all(before.speaker == after.speaker and before.id != after.id for before, after in pairs)
    space = Vocabulary.english().encode(SPACE)[0]

    def said(parts: list[dataset.TokenRecord]) -> tuple[int, ...]:
        phones = [int(p) + TEXT for i, part in enumerate(parts) for p in ([space] if i else []) + part.phones.tolist()]
        return (*phones, SEP + TEXT, *(int(token) for part in parts for token in part.speech), MODEL.eos)

    found = [sequence for row in rows.plan for sequence in unpack(rows.batch([row]))]
    assert sorted(found) == sorted(map(said, made))
    stream = batches.train_batches(data, MODEL)
    assert len(stream.names(1)) >= len(unpack(next(stream)))

    most = collections.Counter(record.speaker for record in spoken).most_common(1)[0][0]
    rows = batches.Rows(dataclasses.replace(data, usual_alone=True), MODEL, "train", shuffle=True)
    prompted = {rows.name(i): len(rows.records(i)) == 2 for row in rows.plan for i in row.tolist()}
    shares = {s: np.mean([prompted[r.id] for r in spoken if r.speaker == s]) for s in {r.speaker for r in spoken}}
    assert 0.4 < shares.pop(most) < 0.95 and set(shares.values()) == {1.0} and not prompted["alone"]

    bad = pairs[0][0].id  # a record that cannot be used costs those behind it their prompt, and no more
    damaged = [dataclasses.replace(r, speech=np.full_like(r.speech, 77)) if r.id == bad else r for r in by_id.values()]
    dataset.write_dataset(tmp_path / "damaged", {"train": damaged}, Vocabulary.english(), facts)
    rows = batches.Rows(dataclasses.replace(data, dir=str(tmp_path / "damaged")), MODEL, "train", shuffle=True)
    usable = [[part for part in parts if part.id != bad] for parts in made if parts[-1].id != bad]
    assert sorted(s for row in rows.plan for s in unpack(rows.batch([row]))) == sorted(map(said, usable))
    assert list(rows.corrupt) == [bad]


def test_unpacking_the_dev_rows_gives_back_every_sequence_once(data):
    found = list(batches.dev_batches(data, MODEL))
    assert sorted(s for batch in found for s in unpack(batch)) == sorted(map(whole, DEV))
    assert all(v.shape == (data.batch_rows, data.row_length) and v.dtype == np.int32 for b in found for v in b.values())


def test_every_epoch_holds_the_training_set_in_another_order(data):
    iterator, stream = batches.train_batches(data, MODEL), []
    while len(stream) < 4 * len(TRAIN):
        stream += unpack(next(iterator))
    first, second, third = (stream[i * len(TRAIN) : (i + 1) * len(TRAIN)] for i in range(3))
    assert sorted(first) == sorted(second) == sorted(third) == sorted(map(whole, TRAIN))
    assert first != second and second != third and first != third


@pytest.mark.parametrize("split", ["train", "dev"])
def test_processes_together_read_what_one_does(data, split):
    data = dataclasses.replace(data, batch_rows=6)

    def read(own: range | None = None) -> list[dict[str, np.ndarray]]:
        found = (
            batches.train_batches(data, MODEL, own) if split == "train" else batches.dev_batches(data, MODEL, own=own)
        )
        return list(itertools.islice(found, 30))

    alone, parts = read(), [read(range(start, start + 2)) for start in (0, 2, 4)]
    together = [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]} for step in zip(*parts, strict=True)
    ]
    assert_equal(alone, together)


def test_the_seed_decides_the_stream(data):
    other = dataclasses.replace(data, seed=1)
    same = [take(batches.train_batches(data, MODEL), 3) for _ in range(2)]
    assert_equal(*same)
    assert unpack(next(batches.train_batches(other, MODEL))) != unpack(same[0][0])


@pytest.fixture(scope="module")
def stream(data) -> tuple[list[dict], list[str]]:
    """Batches, and the state of the iterator before each of them, as JSON like in a checkpoint."""
    iterator, found, states = batches.train_batches(data, MODEL), [], []
    for _ in range(40):
        states.append(json.dumps(iterator.get_state()))
        found.append(next(iterator))
    return found, states


@settings(max_examples=15)
@given(step=st.integers(0, 36), consumed=st.integers(0, 3))
def test_resume_at_any_step_goes_on_with_the_same_batches(data, stream, step, consumed):
    found, states = stream
    iterator = batches.train_batches(data, MODEL)
    take(iterator, consumed)  # whatever it did before
    iterator.set_state(json.loads(states[step]))
    assert_equal(take(iterator, 4), found[step : step + 4])


def test_a_step_knows_the_names_of_its_records(data):
    iterator, texts = batches.train_batches(data, MODEL), {record.id: whole(record) for record in TRAIN}
    for step in range(1, 30):
        assert sorted(texts[name] for name in iterator.names(step)) == sorted(unpack(next(iterator)))


def test_a_corrupt_record_is_left_out_named_and_counted_and_nothing_else_moves(data, tmp_path, caplog):
    bad = dataclasses.replace(TRAIN[5], speech=np.where(np.arange(len(TRAIN[5].speech)) == 3, 77, TRAIN[5].speech))
    facts = dataset.CodecFacts(speech_vocab=MODEL.speech_vocab, frame_rate=50.0, sample_rate=16_000)
    splits = {"train": [*TRAIN[:5], bad, *TRAIN[6:]], "dev": DEV}
    dataset.write_dataset(tmp_path / "tokens", splits, Vocabulary.english(), facts)
    damaged = batches.train_batches(dataclasses.replace(data, dir=str(tmp_path / "tokens")), MODEL)
    good = batches.train_batches(data, MODEL)
    for _ in range(30):
        expected = [s for s in unpack(next(good)) if s != whole(TRAIN[5])]
        assert unpack(next(damaged)) == expected
    assert list(damaged.corrupt) == ["u0005"] and "77" in damaged.corrupt["u0005"] in caplog.text
    assert caplog.text.count("u0005 is left out") == 1


def test_damaged_files_end_in_an_error_that_says_what_and_where(data, tmp_path):
    shutil.copytree(data.dir, tmp_path / "tokens")
    file = next((tmp_path / "tokens").rglob("*train*.array_record*"))
    content = bytearray(file.read_bytes())
    content[100:20_000] = bytes(19_900)
    file.write_bytes(content)
    damaged = dataclasses.replace(data, dir=str(tmp_path / "tokens"))
    with pytest.raises(batches.CorruptData, match=r"of 61 records in .*tokens \(train\) are corrupt"):
        iterator = batches.train_batches(damaged, MODEL)
        take(iterator, 30)


def test_nine_of_ten_positions_hold_something(tmp_path):
    facts = dataset.CodecFacts(speech_vocab=MODEL.speech_vocab, frame_rate=50.0, sample_rate=16_000)
    like_the_demo_corpus = records(400, 2, phones=(20, 80), speech=(60, 210))
    dataset.write_dataset(tmp_path / "tokens", {"train": like_the_demo_corpus}, Vocabulary.english(), facts)
    iterator = batches.train_batches(DataConfig(dir=str(tmp_path / "tokens")), MODEL)
    shares = [batches.filled_share(batch) for batch in take(iterator, 24)]
    assert np.mean(shares) >= 0.90, f"only {np.mean(shares):.1%} of the positions are not padding"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(speech_vocab=51), r"model.speech_vocab is 51.*codec with 50"),
        (dict(text_vocab=16), r"model.text_vocab is 16.*has 1\d\d symbols"),
    ],
)
def test_a_model_that_does_not_fit_the_tokens_is_a_named_error(data, change, message):
    with pytest.raises(ValueError, match=message):
        batches.train_batches(data, dataclasses.replace(MODEL, **change))


def test_bad_places_and_counts_are_named_errors(data, tmp_path):
    with pytest.raises(FileNotFoundError, match="no token dataset in"):
        batches.train_batches(dataclasses.replace(data, dir=str(tmp_path)), MODEL)
    with pytest.raises(ValueError, match=r"no split 'test'; it has \['dev', 'train'\]"):
        batches.dev_batches(data, MODEL, split="test")


def test_the_speech_of_a_split_is_read_record_by_record_with_eos(data):
    found = list(batches.read_tokens(data.dir, MODEL, "train"))
    assert sorted(map(tuple, found)) == sorted((*record.speech, MODEL.eos) for record in TRAIN)
