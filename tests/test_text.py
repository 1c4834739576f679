# ruff: noqa: RUF001
"""Laws of text: whatever comes in, marks never shift, every phone has an id, and the unspeakable is a typed error."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vadusa_jax.text import PAD, SEP, UnspeakableText, Vocabulary, normalize, phonemize

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
