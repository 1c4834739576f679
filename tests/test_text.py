# ruff: noqa: RUF001
"""Laws of text: whatever comes in, marks never shift, every phone has an id, and the unspeakable is a typed error."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vadusa_jax.evaluation.testsets import load_testset
from vadusa_jax.text import PAD, SEP, UnspeakableText, Vocabulary, normalize, phonemize, split_sentences

ENGLISH = Vocabulary.english()
MARKS = ",.?!"
WORDS = st.sampled_from(
    ["hello", "world", "cat", "don't", "7", "3.50", "12,000", "naïve", "Smith", "U.S.", "a.m.", "e-mail", "it's"]
)
PUNCTUATION = st.text(MARKS + ";:-—…()\"'[]{}*_~`|\\/<> \t\n", max_size=6)


def marks(text: str) -> str:
    return re.sub(f"[^{MARKS}]", "", text)


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "...", "?!", "-", "$", "_", "🙂", "🙂🎉!", "你好", "привет", "שלום", "\x00"]
)
def test_unspeakable_text_is_a_typed_error_that_names_it(text):
    with pytest.raises(UnspeakableText, match=re.escape(repr(text))):
        phonemize(text)


@given(st.text(max_size=60))
@example("a\x00b")
@example("[[h@l'oU]]")
@example("<speak>hi</speak>")
@example("‮abc")
def test_any_text_at_all_has_phones_with_ids_or_is_unspeakable(text):
    try:
        phones = phonemize(text)
    except UnspeakableText:
        return
    assert ENGLISH.decode(ENGLISH.encode(phones)) == phones
    assert re.search(r"\w", phones) and phones[0] not in MARKS + " " and phones[-1] in MARKS
    assert not re.search(rf"[{MARKS}]{{2}}| {{2}}| [{MARKS}]", phones)


@settings(max_examples=300)
@given(st.lists(st.tuples(WORDS, PUNCTUATION), min_size=1, max_size=6), PUNCTUATION)
def test_fuzzed_punctuation_never_shifts_a_mark(parts, before):
    text = before + "".join(f"{word}{gap or ' '}" for word, gap in parts)
    phones, plain = phonemize(text), normalize(text)
    spoken_marks = marks(re.sub(r"(?<=\d)[.,](?=\d)", "", plain))  # 3.50 keeps its point to itself
    assert marks(phones) == spoken_marks
    stretches = [s for s in re.split(rf"[{MARKS}]", phones) if s.strip()]
    assert len(stretches) == len(spoken_marks)


@settings(max_examples=200)
@given(st.text(alphabet=st.characters(max_codepoint=0x24F, exclude_categories=("Cs",)), max_size=40))
def test_normalising_twice_changes_nothing(text):
    try:
        once = normalize(text)
    except UnspeakableText:
        return
    assert normalize(once) == once


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("He paid Dr. Smith.", "He paid doctor Smith"),
        ("Wait... what?!?", "Wait. what?"),
        ("“Hello” — she said (twice); then: nothing", "Hello, she said, twice, then, nothing."),
        ("don’t", "don't."),
        ("It's 10:30!", "it's 10:30!"),
        ("hello 🙂 你好 world", "hello world."),
        ("Hello,world", "hello, world."),
        ("CAFÉ!!", "café!"),
    ],
)
def test_ways_to_write_the_same_thing_sound_the_same(text, same_as):
    assert phonemize(text) == phonemize(same_as)


def test_known_phones():
    assert phonemize("Hello, my world!") == "həlˈoʊ, maɪ wˈɜːld!"
    assert phonemize("It costs $3.50") == "ɪt kˈɔsts dˈɑːlɚ θɹˈiː pɔɪnt fˈaɪv zˈiəɹoʊ."


def test_long_text_stays_one_utterance():
    sentence = "the quick brown fox, it jumps. "
    assert phonemize(sentence * 100).count(phonemize("fox,")[:-1]) == 100


# Sentences


@settings(max_examples=200)
@given(st.text(max_size=80), st.integers(1, 60))
@example("\x1c.\x1f a", 1)
def test_pieces_have_the_words_of_the_text_and_each_can_be_spoken(text, limit):
    try:
        phonemize(text)
    except UnspeakableText:
        with pytest.raises(UnspeakableText):
            split_sentences(text, limit)
        return
    lines = split_sentences(text, limit)
    assert [word for line in lines for word in line.text.split()] == text.split()
    assert all(line.phones and line.phones == phonemize(line.text) for line in lines)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(WORDS, st.sampled_from(["", ".", ",", "?", "!", ";", " —", "\n"])), min_size=1),
    st.integers(1, 60),
)
def test_only_a_word_by_itself_exceeds_the_limit(parts, limit):
    text = " ".join(word + mark for word, mark in parts)
    lines = split_sentences(text, limit)
    assert [word for line in lines for word in line.text.split()] == text.split()
    for line in lines:
        assert len(line.phones) <= limit or len([w for w in line.text.split() if w != "—"]) == 1


@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        ("It is late. Why are you here? Go home now!", 99, ["It is late.", "Why are you here?", "Go home now!"]),
        ("Dr. Smith of the U.S. Army paid $3.14 at 5 p.m. on Monday.", 200, None),
        ("J. R. R. Tolkien wrote a long book.", 99, None),
        ('"Why did you do it?" he asked.', 99, None),
        ("“It rained all day.” She closed the window.", 99, ["“It rained all day.”", "She closed the window."]),
        ("Chapter One Hundred\n\nit was dark\nand stormy", 99, ["Chapter One Hundred", "it was dark\nand stormy"]),
        ("Yes. No! I will come tomorrow.", 99, ["Yes. No! I will come tomorrow."]),
        ("I will come tomorrow. Yes.", 99, None),
        ("... We came home. 🙂 ?! Then we slept. ...", 99, ["... We came home. 🙂 ?!", "Then we slept. ..."]),
        ("I will wait, he will not wait at all", 30, ["I will wait,", "he will not wait at all"]),
        ("no, the quick brown fox jumps", 28, ["no, the quick brown", "fox jumps"]),  # a comma far from the middle
        ("hello supercalifragilistic hello", 9, ["hello", "supercalifragilistic", "hello"]),
    ],
)
def test_where_a_text_is_cut(text, limit, pieces):
    assert [line.text for line in split_sentences(text, limit)] == (pieces or [text])


@pytest.mark.parametrize("name", ["heldout", "everyday"])
def test_sentences_of_a_paragraph_are_said_as_in_the_paragraph(name):
    sentences = [sentence.text for sentence in load_testset(name)]
    text = " ".join(sentences)
    lines = split_sentences(text, 200)
    assert [line.text for line in lines] == sentences
    assert " ".join(line.phones for line in lines) == phonemize(text)


def test_a_limit_below_one_phone_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        split_sentences("hello", 0)


def test_ids_are_stable():
    assert len(ENGLISH) <= 128 and ENGLISH.symbols[PAD] == "<pad>" and ENGLISH.symbols[SEP] == "<sep>"
    assert ENGLISH.encode(" !,.?a") == [2, 3, 4, 5, 6, 7]
    assert ENGLISH.encode("ˈoʊ") == [111, 21, 95]


def test_an_unknown_symbol_is_named():
    with pytest.raises(ValueError, match="'5'"):
        ENGLISH.encode("a5")


def test_a_vocabulary_survives_its_file_and_a_foreign_version_does_not(tmp_path):
    ENGLISH.save(tmp_path / "v.json")
    assert Vocabulary.load(tmp_path / "v.json") == ENGLISH
    stored = json.loads((tmp_path / "v.json").read_text()) | {"version": 99}
    (tmp_path / "v.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="version 99"):
        Vocabulary.load(tmp_path / "v.json")


@pytest.mark.parametrize("symbols", [("a",), ("<pad>", "<sep>", "b", "a"), ("<pad>", "<sep>", "a", "a")])
def test_a_vocabulary_out_of_order_is_an_error(symbols):
    with pytest.raises(ValueError, match="distinct sorted"):
        Vocabulary(symbols)
