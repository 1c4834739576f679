"""Text -> phones -> ids, the same way in training and in synthesis.

Phones are the IPA of espeak-ng (American English), one symbol a character: letters, stress and length marks, the space
between words, and the marks , . ? ! that carry prosody.
"""

import dataclasses
import functools
import itertools
import json
import logging
import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

VOCABULARY = "vocabulary.json"  # a vocabulary saved in a folder
PAD, SEP = 0, 1
SPACE = " "  # the phone between words
VERSION = 1
_SPECIALS = ("<pad>", "<sep>")
_MARKS = ",.?!"
# All that espeak-ng en-us gives for English, and the rest of the IPA for loans that espeak reads in their own language.
_ENGLISH = (
    " !,.?abcdefghijklmnopqrstuvwxyzæçðøħŋœǀǁǂǃɐɑɒɓɔɕɖɗɘəɚɛɜɝɞɟɠɡɢɣɤɥɦɧɨɪɫɬɭɮɯɰɱɲɳɴɵɶɸɹɺɻɽɾʀʁʂʃʄʈʉʊʋʌʍʎʏʐʑʒʔʕʘʝʰʲʷ"  # noqa: RUF001
    "ˈˌːˑ\u0303\u0329θβχᵻ"
)
_ABBREVIATIONS = {"dr": "doctor", "mr": "mister", "mrs": "missus", "ms": "miz", "prof": "professor", "vs": "versus"}
_INITIALS = re.compile(r"\b(?:[A-Za-z]\.){2,}")  # U.S., a.m.
_ABBREVIATION = re.compile(rf"\b({'|'.join(_ABBREVIATIONS)})\.(?= \w)", re.IGNORECASE)
_SIGNS = "$£€%&@#+=/*°'-"
# Where a text may be cut: after a word that ends so.
_END = re.compile(r"[.?!\u2026]+[\"'\u2019\u201d)\]]*$")
_NO_END = re.compile(rf"\W*(?:(?:[A-Za-z]\.)+[A-Za-z]|[A-HJ-Z]|(?i:{'|'.join(_ABBREVIATIONS)}))\.$")  # p.m., J. Smith
_CLAUSE = re.compile(r"(?:[,;:)\]\u2012-\u2015-]|[,;:]['\"\u2019\u201d])$")
_SPACE, _COMMA, _WEAK, _STRONG = range(4)
SHORT = 12  # phones, about a second: a piece below this sounds better with its neighbour
_MARK = r"[?!]|(?<!\d)[,.]|[,.](?!\d)"  # between digits a point or comma is part of the number
_MARK_RUN = re.compile(rf"\s*(?:{_MARK})[{_MARKS}\s]*")


class UnspeakableText(ValueError):
    """The text holds nothing that can be read aloud in English; nothing may be decoded for it."""


@dataclasses.dataclass(frozen=True)
class Line:
    """What is said in one go: a text and its phones, so that nobody asks espeak for them twice."""

    text: str
    phones: str

    @classmethod
    def of(cls, text: str) -> "Line":
        """Raises UnspeakableText where `phonemize` does."""
        return cls(text, phonemize(text))


def normalize(text: str) -> str:
    """Plain text that the voice reads: Latin letters, digits, a few signs, single spaces and single marks.

    Other dashes, colons and brackets become commas or spaces, a run of marks becomes its strongest one, and a mark
    ends every text. What cannot be read in English (other scripts, emoji, control characters) is left out of a text
    that also holds readable words. Raises UnspeakableText if no Latin letter and no digit is left.
    """
    given = text
    text = unicodedata.normalize("NFKC", text).translate({0x2018: "'", 0x2019: "'", 0x2044: "/"})
    text = _INITIALS.sub(lambda m: m[0].upper().replace("A", "eh").replace(".", " "), text)  # "A M" would be "a M"
    text = re.sub(r"\s-+\s|--+|[\u2012-\u2015;()]|:(?!\d)", ", ", text)
    text = re.sub(r"(?<!\w)['-]+(?!\w)", " ", "".join(_plain(c) for c in text))
    if not re.search(r"[^\W_]", text):
        raise UnspeakableText(f"nothing in {given!r} can be read aloud in English; give Latin letters or digits")
    text = _MARK_RUN.sub(lambda m: f"{_strongest(m[0])} ", f"{text}.")
    text = " ".join(text.lstrip(_MARKS + " ").split())
    return _ABBREVIATION.sub(lambda m: _ABBREVIATIONS[m[1].lower()], text)


def _plain(character: str) -> str:
    if character.isascii():
        return character if character.isalnum() or character in _SIGNS + _MARKS + ":" else " "
    if character in _SIGNS or (character < "\u0100" and character.isalpha()):
        return character
    base = re.match(r"LATIN (SMALL|CAPITAL) LETTER (\w)\b", unicodedata.name(character, ""))
    return (base[2].lower() if base[1] == "SMALL" else base[2]) if base else " "


def _strongest(marks: str) -> str:
    # A final "." was added by normalize, so that a comma there gives way to it and a question mark does not.
    return next(mark for mark in "?!.," if mark in marks)


@functools.cache
def _espeak():
    import espeakng_loader
    from phonemizer.backend import EspeakBackend
    from phonemizer.backend.espeak.wrapper import EspeakWrapper

    EspeakWrapper.set_library(espeakng_loader.get_library_path())
    EspeakWrapper.set_data_path(espeakng_loader.get_data_path())  # without it espeak ends the process
    quiet = logging.getLogger("vadusa_jax.phonemizer")
    quiet.setLevel(logging.ERROR)
    return EspeakBackend(
        "en-us", with_stress=True, language_switch="remove-flags", punctuation_marks=_MARKS, logger=quiet
    )


def phonemize(text: str) -> str:
    """IPA phones of one utterance, with stress, spaces between words and the marks , . ? ! of `normalize`.

    Raises UnspeakableText for an empty text, marks or emoji alone, or a script other than Latin.
    """
    phones = ""
    # Each stretch between marks alone: espeak gives back one entry for it, so marks never shift.
    for piece in re.split(f"({_MARK})", normalize(text)):
        if piece and piece in _MARKS:
            phones += piece if phones and phones[-1] not in _MARKS else ""
        elif spoken := _speak(piece.strip()):
            phones += f" {spoken}" if phones else spoken
    if not phones:
        raise UnspeakableText(f"espeak-ng has no phones for {text!r}; give Latin letters or digits")
    return phones


def _speak(piece: str) -> str:
    if not piece:
        return ""
    entries = _espeak().phonemize([piece], strip=True)
    return " ".join(" ".join(entries).replace("_", "").split())


def split_sentences(text: str, limit: int) -> list[Line]:
    """The text as lines to be spoken one by one: its sentences, cut further where they have over `limit` phones.

    Only spaces are cut at, so the words of the lines are `text.split()`. A sentence ends with . ? ! or a line break,
    not after an abbreviation or an initial, and not before a small letter ('"Why?" he asked'). A sentence over the
    limit is halved near its middle, at such a mark before a small letter, or else at a comma, semicolon, colon or dash,
    or else at a space. A line below SHORT phones goes with the next one (the last: with the one before) if both fit.

    What has no phones alone ("...", an emoji) stays with its neighbour, so every line has some. Over the limit is only
    a word that has more phones by itself. Raises UnspeakableText where `phonemize` does, and ValueError for a limit
    below 1.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1 phone, got {limit}")
    words = list(re.finditer(r"\S+", text))
    gaps = [_gap(text, before, after) for before, after in itertools.pairwise(words)]

    @functools.cache
    def read(start: int, stop: int) -> Line:
        between = text[words[start].start() : words[stop - 1].end()]
        try:
            return Line.of(between)
        except UnspeakableText:
            return Line(between, "")

    bounds = [0, *(i + 1 for i, gap in enumerate(gaps) if gap == _STRONG), len(words)]
    spans = [s for start, stop in itertools.pairwise(bounds) for s in _halve(read, gaps, start, stop, limit)]
    joined = []
    for i, (start, stop) in enumerate(spans):
        if joined:
            before, here = len(read(*joined[-1]).phones), len(read(start, stop).phones)
            lonely = before < SHORT or (here < SHORT and i == len(spans) - 1)
            if not before or not here or (lonely and len(read(joined[-1][0], stop).phones) <= limit):
                start = joined.pop()[0]
        joined.append((start, stop))
    lines = [read(*span) for span in joined]
    if not any(line.phones for line in lines):
        phonemize(text)  # raises: there is nothing to say
    return lines


def _gap(text: str, before: re.Match, after: re.Match) -> int:
    """How good a place to cut the space between two words is."""
    goes_on = re.match(r"\W*[a-z]", after[0]) is not None
    between = text[before.end() : after.start()]
    if between.count("\n") > 1 or ("\n" in between and not goes_on):
        return _STRONG
    if _END.search(before[0]) and not _NO_END.match(before[0]):
        return _WEAK if goes_on else _STRONG
    return _COMMA if _CLAUSE.search(before[0]) or re.match(r"[(\[\u2012-\u2015]|-+$", after[0]) else _SPACE


def _halve(
    read: Callable[[int, int], Line], gaps: list[int], start: int, stop: int, limit: int
) -> list[tuple[int, int]]:
    """Spans of words that cover start .. stop, each within the limit or one word."""
    if stop - start < 2 or len(read(start, stop).phones) <= limit:
        return [(start, stop)] if stop > start else []
    reached = list(itertools.accumulate(len(read(i, i + 1).phones) for i in range(start, stop)))
    offset = {start + 1 + i: abs(done / max(reached[-1], 1) - 0.5) for i, done in enumerate(reached[:-1])}
    # In the middle half the kind of gap decides, and outside it the distance from the middle alone.
    cut = min(offset, key=lambda i: (-gaps[i - 1], offset[i]) if offset[i] <= 0.25 else (1, offset[i]))
    return _halve(read, gaps, start, cut, limit) + _halve(read, gaps, cut, stop, limit)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Phone symbols and their local ids: PAD 0, SEP 1, then the symbols in sorted order."""

    symbols: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.symbols[:2] != _SPECIALS or list(self.symbols[2:]) != sorted(set(self.symbols[2:])):
            raise ValueError(f"a vocabulary is {_SPECIALS} and then distinct sorted symbols, got {self.symbols}")

    def __len__(self) -> int:
        return len(self.symbols)

    @classmethod
    def english(cls) -> "Vocabulary":
        """Everything that `phonemize` can give; the ids are part of a checkpoint and never change."""
        return cls((*_SPECIALS, *sorted(_ENGLISH)))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {symbol: i for i, symbol in enumerate(self.symbols)}

    def encode(self, phones: str) -> list[int]:
        """Phones -> local ids; an unknown symbol is an error that names it."""
        unknown = sorted(set(phones) - set(self._ids))
        if unknown:
            raise ValueError(f"no id for the phones {unknown} in {phones!r}; this vocabulary has {len(self)} symbols")
        return [self._ids[phone] for phone in phones]

    def decode(self, ids: list[int]) -> str:
        """Local ids -> phones; PAD and SEP are left out."""
        return "".join(self.symbols[i] for i in ids if i >= len(_SPECIALS))

    def save(self, path: str | os.PathLike) -> None:
        """Writes JSON, whole or not at all."""
        aside = Path(f"{path}.aside")
        aside.write_text(json.dumps({"version": VERSION, "symbols": self.symbols}, indent=0) + "\n", encoding="utf-8")
        os.replace(aside, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Vocabulary":
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if stored.get("version") != VERSION:
            raise ValueError(f"{path} has vocabulary version {stored.get('version')}, this code reads {VERSION}")
        return cls(tuple(stored["symbols"]))
