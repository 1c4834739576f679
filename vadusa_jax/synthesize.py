"""Text to speech.

    python -m vadusa_jax.synthesize --text "Good morning." --out out/speech
    python -m vadusa_jax.synthesize --text_file lines.txt --mode tolerance --tolerance 3 --out out/speech
    python -m vadusa_jax.synthesize --text "Good morning." --prompt me.wav --prompt_text "What I say there."

Writes one WAV per text (0000.wav, 0001.wav, ...) and `spoken.json`. A text is spoken sentence by sentence. In a file
every line is a text; blank lines are skipped, and lines that cannot be spoken are skipped, counted and named with the
reason. `--stream` speaks one text after the other and tells how soon each began.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
from absl import app, flags
from tqdm import tqdm

from vadusa_jax.decode.modes import HELP, Mode, parse_mode
from vadusa_jax.decode.prompts import TooLong, token_limit
from vadusa_jax.speech import read_audio
from vadusa_jax.text import Line, UnspeakableText
from vadusa_jax.voice import DEMO_MODEL, MODEL_HELP, Spoken, Voice

_TEXT = flags.DEFINE_multi_string("text", [], "Text to speak; may be given several times.")
_TEXT_FILE = flags.DEFINE_string("text_file", None, "File with one text a line.")
_MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), f"{MODEL_HELP}.")
_MODE = flags.DEFINE_string("mode", "tolerance", f"{HELP}. A bare `tolerance` takes --tolerance.")
_TOLERANCE = flags.DEFINE_integer("tolerance", 3, "Draws that a drafted token may match; 1 is exact.", lower_bound=1)
_NODES = flags.DEFINE_integer(
    "nodes", None, "Nodes of the draft tree; what was fastest here by default.", lower_bound=1
)
_HEADS = flags.DEFINE_integer("heads", None, "Use the first so many draft heads; all by default.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Overrides the model's own setting.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Overrides the model's own setting; 0: off.")
_TOP_P = flags.DEFINE_float("top_p", None, "Overrides the model's own setting; 1: off.")
_SEED = flags.DEFINE_integer("seed", 0, "Text and seed decide what is said.")
_BATCH = flags.DEFINE_integer("batch", 1, "Texts decoded together.", lower_bound=1)
_STREAM = flags.DEFINE_bool("stream", False, "Make sound while tokens are still being said; tells when it began.")
_LOOKAHEAD = flags.DEFINE_integer(
    "lookahead",
    None,
    "With --stream: tokens known before sound is made; fewer: sooner, less exact.",
    lower_bound=0,
)
_PROMPT = flags.DEFINE_string("prompt", None, "Recording of whoever is to speak, of a few seconds; any audio file.")
_PROMPT_TEXT = flags.DEFINE_string("prompt_text", None, "What is said in --prompt.")
_OUT = flags.DEFINE_string("out", "out/speech", "Folder for the WAVs.")


def main(_) -> None:
    voice, texts = with_settings(Voice.from_pretrained(_MODEL.value)), list(_TEXT.value)
    if bool(_PROMPT.value) != bool(_PROMPT_TEXT.value):
        raise app.UsageError("--prompt and --prompt_text go together: a recording, and what is said in it")
    if _PROMPT.value:
        wave_P = read_audio(_PROMPT.value, voice.codec.sample_rate)
        voice = voice.like(wave_P, _PROMPT_TEXT.value, _PROMPT.value)
    pieces = [voice.pieces(text) for text in texts]
    if _TEXT_FILE.value:
        skipped = []
        for line in filter(str.strip, Path(_TEXT_FILE.value).read_text(encoding="utf-8").splitlines()):
            try:
                pieces.append(speakable_pieces(voice, line))
                texts.append(line)
            except (UnspeakableText, TooLong) as error:
                skipped.append(f"{line[:60]!r}: {error}")
        print(f"{_TEXT_FILE.value}: {len(skipped)} lines skipped", *skipped, sep="\n  ")
    if not texts:
        raise app.UsageError("nothing to say: give --text or --text_file")
    name = f"tolerance:{_TOLERANCE.value}" if _MODE.value == "tolerance" else _MODE.value
    mode, out = parse_mode(name, _NODES.value, voice.config.decode), Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    spoken = speak_streaming(voice, pieces, mode) if _STREAM.value else speak_queued(voice, pieces, mode)
    records = [{}] * len(texts)
    for i, wave_P, facts in tqdm(spoken, "speak", total=len(texts), disable=None):
        path = out / f"{i:04d}.wav"
        soundfile.write(path, wave_P, voice.codec.sample_rate)
        seconds = len(wave_P) / voice.codec.sample_rate
        records[i] = {"wav": path.name, "text": texts[i], "pieces": len(pieces[i]), "seconds": seconds} | facts
    (out / "spoken.json").write_text(json.dumps(records, indent=2) + "\n")
    seconds, wall_s = (sum(r[key] for r in records) for key in ("seconds", "wall_s"))
    print(f"{len(records)} texts, {seconds:.1f} s of speech in {wall_s:.1f} s (compilation included): {out}")
    if _STREAM.value:
        print("First sound after", ", ".join(f"{r['first_s']:.2f}" for r in records), "s of the seconds of each text")


def speak_queued(voice: Voice, pieces: list[list[Line]], mode: Mode) -> Iterator[tuple[int, np.ndarray, dict]]:
    """Number, wave and facts of each text when all its pieces are spoken; pieces of all texts share the batches."""
    owner = [i for i, of_text in enumerate(pieces) for _ in of_text]
    spoken: list[Spoken | None] = [None] * len(owner)
    flat = [piece for of_text in pieces for piece in of_text]
    for n, one in voice.speak_each(flat, mode, _SEED.value, _BATCH.value, heads=_HEADS.value):
        spoken[n] = one
        own = [spoken[k] for k, i in enumerate(owner) if i == owner[n]]
        if all(own):
            facts = {
                **{"wall_s": sum(s.wall_s for s in own), "finish": [s.finish for s in own]},
                **{"tokens": sum(len(s.tokens) for s in own), "steps": sum(s.steps for s in own)},
            }
            yield owner[n], np.concatenate([s.wave for s in own]), facts


def speak_streaming(voice: Voice, pieces: list[list[Line]], mode: Mode) -> Iterator[tuple[int, np.ndarray, dict]]:
    """As `speak_queued`, one text after the other, with the time to the first sound of each."""
    for i, of_text in enumerate(pieces):
        began, first_s, waves = time.perf_counter(), 0.0, []
        for wave_P in voice.stream_each(of_text, mode, _SEED.value, _HEADS.value, _LOOKAHEAD.value):
            first_s = first_s or time.perf_counter() - began
            waves.append(wave_P)
        yield (
            i,
            np.concatenate([np.zeros(0, np.float32), *waves]),
            {
                "wall_s": time.perf_counter() - began,
                "first_s": first_s,
            },
        )


def speakable_pieces(voice: Voice, text: str) -> list[Line]:
    """The sentences of a text; raises UnspeakableText, or TooLong for a word longer than the model's room."""
    pieces = voice.pieces(text)
    for piece in pieces:
        token_limit(len(piece.phones), voice.config.decode, voice.config.model, voice.prompt)
    return pieces


def with_settings(voice: Voice) -> Voice:
    """The voice with the sampling settings given on the command line."""
    given = {"temperature": _TEMPERATURE.value, "top_k": _TOP_K.value, "top_p": _TOP_P.value}
    decode = dataclasses.replace(voice.config.decode, **{k: v for k, v in given.items() if v is not None})
    return dataclasses.replace(voice, config=dataclasses.replace(voice.config, decode=decode))


if __name__ == "__main__":
    app.run(main)
