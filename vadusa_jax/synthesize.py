"""Text to speech.

    python -m vadusa_jax.synthesize --text "Good morning." --out out/speech
    python -m vadusa_jax.synthesize --text_file lines.txt --mode tolerance --tolerance 3 --out out/speech

Writes one WAV per text (0000.wav, 0001.wav, ...) and `spoken.json`. In a file every line is a text; blank lines are
skipped, and lines that cannot be spoken are skipped, counted and named with the reason.
"""

import dataclasses
import json
from pathlib import Path

import soundfile
from absl import app, flags
from tqdm import tqdm

from vadusa_jax.decode.modes import HELP, parse_mode
from vadusa_jax.voice import DEMO_MODEL, Voice

_TEXT = flags.DEFINE_multi_string("text", [], "Text to speak; may be given several times.")
_TEXT_FILE = flags.DEFINE_string("text_file", None, "File with one text a line.")
_MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), "Voice folder.")
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
_OUT = flags.DEFINE_string("out", "out/speech", "Folder for the WAVs.")


def main(_) -> None:
    voice, texts = with_settings(Voice.load(_MODEL.value)), list(_TEXT.value)
    if _TEXT_FILE.value:
        lines = Path(_TEXT_FILE.value).read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if line.strip()]
        complaints = [voice.complaint(line) for line in lines]
        texts += [line for line, why in zip(lines, complaints, strict=True) if not why]
        skipped = [f"{line[:60]!r}: {why}" for line, why in zip(lines, complaints, strict=True) if why]
        print(f"{_TEXT_FILE.value}: {len(skipped)} lines skipped", *skipped, sep="\n  ")
    if not texts:
        raise app.UsageError("nothing to say: give --text or --text_file")
    name = f"tolerance:{_TOLERANCE.value}" if _MODE.value == "tolerance" else _MODE.value
    mode, out = parse_mode(name, _NODES.value, voice.config.decode), Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    records = [{}] * len(texts)
    each = voice.speak_each(texts, mode, _SEED.value, _BATCH.value, heads=_HEADS.value)
    for i, spoken in tqdm(each, "speak", total=len(texts), disable=None):  # in the order in which they are finished
        path = out / f"{i:04d}.wav"
        soundfile.write(path, spoken.wave, spoken.sample_rate)
        seconds = len(spoken.wave) / spoken.sample_rate
        records[i] = {
            **{"wav": path.name, "text": spoken.text, "seconds": seconds, "wall_s": spoken.wall_s},
            **{"finish": spoken.finish, "tokens": len(spoken.tokens), "steps": spoken.steps},
        }
    (out / "spoken.json").write_text(json.dumps(records, indent=2) + "\n")
    seconds, wall_s = (sum(r[key] for r in records) for key in ("seconds", "wall_s"))
    print(f"{len(records)} texts, {seconds:.1f} s of speech in {wall_s:.1f} s (compilation included): {out}")


def with_settings(voice: Voice) -> Voice:
    """The voice with the sampling settings given on the command line."""
    given = {"temperature": _TEMPERATURE.value, "top_k": _TOP_K.value, "top_p": _TOP_P.value}
    decode = dataclasses.replace(voice.config.decode, **{k: v for k, v in given.items() if v is not None})
    return dataclasses.replace(voice, config=dataclasses.replace(voice.config, decode=decode))


if __name__ == "__main__":
    app.run(main)
