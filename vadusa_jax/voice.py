"""A voice: the folder that holds everything needed to speak, and text to waveform in one call.

config.json  vocabulary.json  model.safetensors  trees.json  codec/  card.md, and where there are any
transitions.safetensors (for Viterbi), draft/ (a small language model) and nar/ (fills in a codec's other codebooks).
"""

import dataclasses
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile

from vadusa_jax.config import CONFIG, Config, DecodeConfig
from vadusa_jax.decode import transitions
from vadusa_jax.decode.draft import Drafter, DraftLM, Viterbi, head_drafter
from vadusa_jax.decode.loop import Settings
from vadusa_jax.decode.modes import Mode, parse_mode
from vadusa_jax.decode.prompts import NO_PROMPT, SpeechPrompt, TooLong, make_settings, text_prompts, token_limit
from vadusa_jax.decode.queue import decode_each
from vadusa_jax.decode.state import Prompts
from vadusa_jax.decode.stream import stream_tokens
from vadusa_jax.decode.trees import TREES, Trees
from vadusa_jax.hub import fetch
from vadusa_jax.model.folder import WEIGHTS, load_lm
from vadusa_jax.model.heads import SpeechLM
from vadusa_jax.model.nar import Nar, fill, load_nar
from vadusa_jax.speech import Codec, load_codec, stream
from vadusa_jax.text import SEP, SPACE, VOCABULARY, Line, UnspeakableText, Vocabulary, phonemize, split_sentences

CODEC, DRAFT, NAR = "codec", "draft", "nar"  # folders in a voice's folder
DEMO_MODEL = Path(__file__).parent / "assets" / "demo"
MODEL_HELP = "Voice: a folder, or OWNER/NAME on the Hugging Face Hub"


@dataclasses.dataclass(frozen=True)
class Spoken:
    """One spoken text."""

    text: str
    phones: str
    tokens: np.ndarray  # int32 [n] speech tokens, without EOS
    wave: np.ndarray  # float32 [P]; empty when the model said nothing
    sample_rate: int
    finish: str  # why it ended: "eos", "length" or "repeat"
    steps: int  # backbone passes, prefill included
    block_of: np.ndarray  # int32: the pass that decided each token, EOS included if it was said
    wall_s: float  # seconds since the text that was finished before it; in all, those from phones to waves


@dataclasses.dataclass(frozen=True)
class Voice:
    """A language model with its vocabulary, trees and codec."""

    config: Config
    lm: SpeechLM
    vocabulary: Vocabulary
    trees: Trees
    codec: Codec
    log_transition_VV: np.ndarray | None = None  # of neighbouring speech tokens, for Viterbi
    draft: SpeechLM | None = None  # a small language model that drafts for this one
    nar: Nar | None = None  # fills in the other codebooks of a codec with several
    prompt: SpeechPrompt = NO_PROMPT  # what was said before, by whoever is to speak

    def __post_init__(self):
        model = self.config.model
        if self.codec.vocab_size != model.speech_vocab:
            raise ValueError(f"the codec has {self.codec.vocab_size} tokens, the config says {model.speech_vocab}")
        if len(self.vocabulary) > model.text_vocab:
            raise ValueError(f"the vocabulary has {len(self.vocabulary)} symbols, the config allows {model.text_vocab}")
        self.trees.check(self.config.heads.count, model.output_vocab)

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, revision: str | None = None) -> "Voice":
        """The voice in a folder, or else in a repository on the Hugging Face Hub (extra `[hub]`).

        `revision` is a branch, tag or commit of the repository. Raises HubError if there is neither, and as `load`.
        """
        return cls.load(fetch(path_or_name, revision))

    @classmethod
    def load(cls, folder: str | Path) -> "Voice":
        """Reads a voice's folder; what is missing or does not match is an error that names it."""
        folder = Path(folder)
        for name in (CONFIG, VOCABULARY, WEIGHTS, TREES, CODEC):
            if not (folder / name).exists():
                raise FileNotFoundError(
                    f"{folder} has no {name}: not a voice; `python -m vadusa_jax.export` makes one of a training run"
                )
        config, lm = load_lm(folder)
        return cls(
            config,
            lm,
            Vocabulary.load(folder / VOCABULARY),
            Trees.load(folder / TREES),
            load_codec(folder / CODEC),
            transitions.load_transitions(folder),
            load_lm(folder / DRAFT)[1] if (folder / DRAFT).exists() else None,
            load_nar(folder / NAR) if (folder / NAR).exists() else None,
        )

    def like(self, wave_P: np.ndarray, text: str, name: str = "the prompt") -> "Voice":
        """This voice as whoever says `text` in a mono wave at the codec's rate: it goes on from there, in that timbre.

        What is spoken afterwards never holds the prompt itself. How far a voice follows depends on what it was trained
        on (`data.prompt_share`).

        Raises BadAudio, UnspeakableText, TooLong beyond `decode.prompt_seconds`, and ValueError for a voice with a
        stage for more codebooks.
        """
        seconds, most = len(wave_P) / self.codec.sample_rate, self.config.decode.prompt_seconds
        if seconds > most:
            raise TooLong(f"{name} takes {seconds:.1f} s, at most {most:g} s are allowed: cut it, and its text with it")
        if self.nar:
            raise ValueError("a voice with several codebooks takes no speech prompt")
        phones = self.vocabulary.encode(phonemize(text) + SPACE)
        speech = self.codec.encode(wave_P).tolist()
        return dataclasses.replace(
            self, codec=self.codec.like(wave_P), prompt=SpeechPrompt(tuple(phones), tuple(speech))
        )

    def speak(
        self, texts: Sequence[str], mode: Mode, seed: int = 0, batch: int | None = None, heads: int | None = None
    ) -> list[Spoken]:
        """Speaks the texts, `batch` at a time (default: all at once), and gives them back in their order.

        Text and seed decide what is said: the same in every batch and beside any other texts.

        Raises:
            UnspeakableText: a text without anything to pronounce; before any decoding.
            TooLong: a text that leaves no room for speech in the model's positions.
        """
        spoken = self.speak_each([Line.of(text) for text in texts], mode, seed, batch, heads)
        return [one for _, one in sorted(spoken, key=lambda pair: pair[0])]

    def speak_each(
        self, lines: Sequence[Line], mode: Mode, seed: int = 0, batch: int | None = None, heads: int | None = None
    ) -> Iterator[tuple[int, Spoken]]:
        """As `speak`, but every line with its number as soon as it is spoken."""
        began = time.perf_counter()
        if not lines:
            return
        batch, prompts = batch or len(lines), self.prompts(lines, seed)
        settings, drafter = self.settings(mode, heads, batch), self.drafter(mode)
        for i, said in decode_each(self.lm, prompts, settings=settings, batch=batch, drafter=drafter):
            tokens = said.tokens[:-1] if said.finish == "eos" else said.tokens
            wave = self.sound(lines[i].phones, tokens)
            now = time.perf_counter()
            yield (
                i,
                Spoken(
                    text=lines[i].text,
                    phones=lines[i].phones,
                    tokens=tokens,
                    wave=wave,
                    sample_rate=self.codec.sample_rate,
                    finish=said.finish,
                    steps=said.steps,
                    block_of=said.step_of,
                    wall_s=now - began,
                ),
            )
            began = time.perf_counter()

    def stream(
        self, text: str, mode: Mode, seed: int = 0, heads: int | None = None, lookahead: int | None = None
    ) -> Iterator[np.ndarray]:
        """Speaks a text of any length as float32 waves that follow each other, the first of them soon.

        With the default `lookahead` they are, to float rounding, the waves of `speak` for the text's `pieces`; with
        fewer tokens than `codec.receptive_field` sound comes sooner and differs near the joins (`speech.stream`).

        Raises what `speak` raises, at the piece that it concerns, and ValueError if the voice has a stage for more
        codebooks, which needs whole utterances.
        """
        yield from self.stream_each(self.pieces(text), mode, seed, heads, lookahead)

    def stream_each(
        self, lines: Iterable[Line], mode: Mode, seed: int = 0, heads: int | None = None, lookahead: int | None = None
    ) -> Iterator[np.ndarray]:
        """As `stream`, of the pieces of a text."""
        if self.nar:
            raise ValueError("a voice with several codebooks speaks whole utterances: it does not stream")
        settings, drafter = self.settings(mode, heads), self.drafter(mode)
        for line in lines:
            prompt = self.prompts([line], seed)
            field = self.codec.receptive_field
            size = stream.FIRST + (field if lookahead is None else min(lookahead, field))
            chunks = stream_tokens(self.lm, prompt, settings=settings, size=size, drafter=drafter)
            yield from stream.render(self.codec, (chunk.tokens for chunk in chunks), lookahead)

    def sound(self, phones: str, tokens: np.ndarray) -> np.ndarray:
        """The wave of speech tokens, all codebooks of them where there is a stage that fills them in."""
        if self.nar is None or not len(tokens):
            return self.codec.decode(tokens)
        return self.codec.decode_all(*fill(self.nar, [np.array(self.vocabulary.encode(phones))], [tokens]))

    def pieces(self, text: str) -> list[Line]:
        """The sentences of a text, none with more phones than the model has room for; nothing is dropped.

        Raises UnspeakableText if nothing in it can be pronounced.
        """
        decode, positions = self.config.decode, self.config.model.max_length
        room = int((positions - len(self.prompt) - 1 - decode.extra_tokens) / (1 + decode.tokens_per_phone))
        return split_sentences(text, max(1, min(decode.phones_per_piece, room)))

    def complaint(self, text: str) -> str | None:
        """Why the text cannot be spoken (nothing to pronounce, too long), or None."""
        try:
            token_limit(len(phonemize(text)), self.config.decode, self.config.model, self.prompt)
        except (UnspeakableText, TooLong) as error:
            return str(error)
        return None

    def prompts(self, lines: Sequence[Line], seed: int) -> Prompts:
        """The lines as one batch for the decode loop; a text's own bytes number its row."""
        numbers = [zlib.crc32(line.text.encode()) for line in lines]
        phones = [self.vocabulary.encode(line.phones) for line in lines]
        return text_prompts(phones, SEP, numbers, seed, self.config, self.prompt)

    def settings(
        self, mode: Mode, heads: int | None = None, batch: int = 1, decode: DecodeConfig | None = None
    ) -> Settings:
        """What the decode loop compiles for a mode on this device; `decode` is of another model with these trees."""
        if mode.drafter == "viterbi" and not mode.chain:
            mode = dataclasses.replace(mode, chain=self.config.heads.count)
        tree = self.trees.choose(mode, batch, heads)
        return make_settings(tree, mode.rule, decode or self.config.decode, mode.coupled)

    def drafter(self, mode: Mode) -> Drafter:
        """Who drafts in a mode; ValueError if this voice lacks what it takes."""
        if mode.drafter == "viterbi":
            if self.log_transition_VV is None:
                raise ValueError(f"this voice has no {transitions.FILE}: `python -m vadusa_jax.fit_tree` writes it")
            return Viterbi(self.log_transition_VV)
        if mode.drafter == "lm":
            if self.draft is None:
                raise ValueError("this voice has no draft model: train a small one and export with --draft")
            return DraftLM(self.draft.backbone)
        return head_drafter(self.lm)


def sample_writer(
    config: Config, texts: Sequence[str], vocabulary: Vocabulary, codec: Codec, folder: Path
) -> Callable[[int, SpeechLM], None]:
    """Writes the texts as a model in training speaks them: `folder`/0000250-0.wav is the first, at step 250."""
    folder.mkdir(parents=True, exist_ok=True)

    def speak(step: int, lm: SpeechLM) -> None:
        spoken = Voice(config, lm, vocabulary, Trees({}), codec).speak(texts, parse_mode("ar"))
        for i, one in enumerate(spoken):
            soundfile.write(folder / f"{step:07d}-{i}.wav", one.wave, one.sample_rate)

    return speak
