"""Speaks a few sentences with plain and with speculative decoding, and shows what that changes.

    python -m vadusa_jax.demo [--say "Any text." --say "Another."] [--out out/demo]
    python -m vadusa_jax.demo --say "Good morning." --modes exact --figure out/how.png

Writes one WAV per sentence and mode, `spectrograms.png`, `acceptance.png` and `results.json`; prints the table. With
`--figure` it only draws how decoding works: one pass of the first sentence in the last mode, draft tree and all.
"""

from pathlib import Path

from absl import app, flags, logging

from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.evaluation.clip_plots import plot_spectrograms, plot_step
from vadusa_jax.evaluation.clips import file_name, speak, split_speakable
from vadusa_jax.evaluation.metrics import Recogniser
from vadusa_jax.evaluation.plots import plot_acceptance
from vadusa_jax.evaluation.report import SUMMARY, markdown_table, write_json
from vadusa_jax.evaluation.scores import conditions, rows, score
from vadusa_jax.evaluation.steps import record_steps
from vadusa_jax.evaluation.testsets import Sentence, load_testset
from vadusa_jax.voice import DEMO_MODEL, MODEL_HELP, Voice

SAY = flags.DEFINE_multi_string("say", [], "Text to speak, once or more; five held-out sentences by default.")
MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), f"{MODEL_HELP}.")
OUT = flags.DEFINE_string("out", "out/demo", "Where the results go.")
MODES = flags.DEFINE_list("modes", ["ar", "exact", "tolerance:3"], "Modes to compare.")
NODES = flags.DEFINE_integer("nodes", 12, "Tree nodes of the modes that name none.", lower_bound=1)
FIGURE = flags.DEFINE_string("figure", None, "Only draw one pass of decoding, into this PNG.")
SEEDS = flags.DEFINE_integer("seeds", 1, "How often each sentence is spoken.", lower_bound=1)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    out, voice = Path(OUT.value), Voice.from_pretrained(MODEL.value)
    modes = {name: parse_mode(name, NODES.value, voice.config.decode) for name in MODES.value}
    sentences = [Sentence(f"say{i}", text) for i, text in enumerate(SAY.value, 1)] or load_testset("heldout")[:5]
    speakable, set_aside = split_speakable(voice, sentences)
    if set_aside:
        raise app.UsageError(f"--say: {set_aside[0][1]}")

    if FIGURE.value:
        (name, mode), text = list(modes.items())[-1], speakable[0].text
        clip = speak(voice, speakable[:1], {name: mode}, 1, out)[0]
        plot_step(Path(FIGURE.value), clip, record_steps(voice, text, mode))
        return

    ran = {name: conditions(voice, mode, batch=1) for name, mode in modes.items()}
    clips = speak(voice, speakable, modes, SEEDS.value, out)
    table = rows(score(clips, Recogniser()), ran)

    write_json(out / "results.json", table)
    plot_acceptance(out / "acceptance.png", table)
    plot_spectrograms(out / "spectrograms.png", clips[: len(modes)])
    print(markdown_table(table, SUMMARY))
    print("Listen:", *(f"{out / file_name(name) / 'seed0'}/*.wav" for name in modes))
    print(f"Look:   {out / 'spectrograms.png'} {out / 'acceptance.png'}\nRead:   {out / 'results.json'}")


if __name__ == "__main__":
    app.run(main)
