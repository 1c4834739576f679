"""What does each choice of decoding gain and cost? One row for every cell of a grid, in one table and three pictures.

    python -m vadusa_jax.ablate --limit 60 --out out/rules
    python -m vadusa_jax.ablate --heads 1,2,3,4,5,6 --modes exact,tolerance:2,tolerance:3,tolerance:5 --limit 60
    python -m vadusa_jax.ablate --models joint=out/joint,frozen=out/frozen --modes ar,tolerance:3 --nodes 8,16,64
    python -m vadusa_jax.ablate --models none@0=out/n0,none@1=out/n1,joint@0=out/j0,joint@1=out/j1 --modes ar,exact

Runs of one name are also taken together and compared with the first name. Writes `ablation.md`, its rows as CSV and
JSON, `heads.png`, `tolerance.png` and `tradeoff.png`. A finished cell is kept in `cells/`: a run that was killed goes
on with the next one, and a cell whose voice, sentences, seeds, batch, device or recogniser has changed is measured
anew. What a voice cannot speak is named in the report with the reason.
"""

import dataclasses
import json
import sys
from pathlib import Path

from absl import app, flags, logging

from vadusa_jax.evaluation import ablation, ablation_groups, ablation_plots, report
from vadusa_jax.evaluation.ablation import Study, Subject, fingerprint
from vadusa_jax.evaluation.ablation_groups import compare
from vadusa_jax.evaluation.ablation_report import SUMMARY, page, written
from vadusa_jax.evaluation.clips import split_speakable
from vadusa_jax.evaluation.grid import RULES, grid, obstacle, samplings
from vadusa_jax.evaluation.metrics import BUNDLED, OPINIONS, Recogniser
from vadusa_jax.evaluation.testsets import read_sentences
from vadusa_jax.model.folder import TRAINED
from vadusa_jax.training.checkpoint import load_model
from vadusa_jax.voice import DEMO_MODEL, Voice

PICTURES = {
    "heads.png": ablation_plots.plot_heads,
    "tolerance.png": ablation_plots.plot_tolerance,
    "tradeoff.png": ablation_plots.plot_tradeoff,
}

MODELS = flags.DEFINE_list("models", [f"demo={DEMO_MODEL}"], "Voices, as name=folder; NAME@RUN: runs of one name.")
DRAFT = flags.DEFINE_string("draft", None, "Training run or folder of a draft language model, for `ssd`, `:draft=D`.")
MODES = flags.DEFINE_list("modes", list(RULES), "Modes; by default one of every rule.")
NODES = flags.DEFINE_list("nodes", ["12"], "Tree sizes of the modes that name none.")
HEADS = flags.DEFINE_list("heads", [], "Only the first so many draft heads of the voice; all by default.")
TEMPERATURE = flags.DEFINE_list("temperature", [], "Temperatures; the voice's own by default, here and below.")
TOP_K = flags.DEFINE_list("top_k", [], "Numbers of likeliest tokens that are kept; 0: all.")
TOP_P = flags.DEFINE_list("top_p", [], "Probability that is kept; 1: all.")
WINDOW = flags.DEFINE_list("repeat_window", [], "Tokens that repetition-aware sampling looks back; 0: off.")
TEXTS = flags.DEFINE_string("texts", "heldout", "heldout, everyday, or a text file with one sentence a line.")
LIMIT = flags.DEFINE_integer("limit", None, "Only the first N sentences.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 1, "Every sentence is spoken with the seeds 0 to N-1.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch", 1, "Sentences decoded together.", lower_bound=1)
OUT = flags.DEFINE_string("out", "out/ablate", "Where the results go.")
WAVES = flags.DEFINE_bool("waves", False, "Also keep the WAVs.")
RECOGNISER = flags.DEFINE_string("recogniser", None, "Whisper model, name or folder; the bundled tiny.en by default.")
CPU_THREADS = flags.DEFINE_integer("cpu_threads", 2, "Clips transcribed at the same time.", lower_bound=1)
OPINION = flags.DEFINE_list("opinions", ["dnsmos"], "Predicted opinions: dnsmos, utmos, or none, which is far faster.")
flags.register_validator("opinions", lambda names: set(names) <= {*OPINIONS}, f"must be of {', '.join(OPINIONS)}")
flags.register_validator("models", lambda pairs: pairs and all("=" in p for p in pairs), "must be name=folder")
for _name in ("nodes", "heads"):
    flags.register_validator(
        _name, lambda values: all(v.isdecimal() and int(v) for v in values), "must be numbers of at least 1"
    )


def subject(name: str, folder: Path) -> Subject:
    """A voice with the draft model of the command line."""
    voice, folders = Voice.load(folder), [folder]
    if DRAFT.value:
        draft = Path(DRAFT.value)
        voice, folders = dataclasses.replace(voice, draft=load_model(draft)[1]), [folder, draft]
    trained = folder / TRAINED
    loss = json.loads(trained.read_text()).get("dev/lm/loss") if trained.exists() else None
    return Subject(name, voice, fingerprint(*folders), loss)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    out, models = Path(OUT.value), dict(pair.split("=", 1) for pair in MODELS.value)
    sentences, _ = read_sentences(TEXTS.value)
    heard_by, recogniser = RECOGNISER.value or BUNDLED, Recogniser(RECOGNISER.value, CPU_THREADS.value)
    changes = {
        "temperature": [float(v) for v in TEMPERATURE.value],
        "top_k": [int(v) for v in TOP_K.value],
        "top_p": [float(v) for v in TOP_P.value],
        "repeat_window": [int(v) for v in WINDOW.value],
    }
    facts = {
        "command": f"`python -m vadusa_jax.ablate {' '.join(sys.argv[1:])}`",
        "sentences": f"{len(sentences[: LIMIT.value])} of {TEXTS.value}",
        "seeds": f"0 to {SEEDS.value - 1}",
        "recogniser": heard_by,
    }
    table, left_out = [], []
    for name, folder in models.items():
        one = subject(name, Path(folder))
        cells = grid(
            MODES.value,
            [int(v) for v in NODES.value],
            [int(v) for v in HEADS.value] or [None],
            samplings(one.voice.config.decode, changes),
        )
        speakable, set_aside = split_speakable(one.voice, sentences[: LIMIT.value])
        if not speakable:
            raise app.UsageError(f"no sentence in {TEXTS.value} can be spoken by {name} ({len(set_aside)} cannot)")
        facts |= {f"not spoken by {name} ({sentence.id})": why for sentence, why in set_aside}
        left_out += [(name, cell, why) for cell in cells if (why := obstacle(one.voice, cell, BATCH.value))]
        waves = out / "wav" if WAVES.value else None
        study = Study(speakable, SEEDS.value, BATCH.value, recogniser, heard_by, OPINION.value, out / "cells", waves)
        table += [row for row in ablation.run(study, one, cells) if row not in table]  # recordings are all the same

    sums = [row.pop(ablation.SUMS, None) for row in table]
    runs = [(row, told) for row, told in zip(table, sums, strict=True) if told]
    grouped = compare(runs) if any("@" in name for name in models) else []
    if grouped:
        report.write_csv(out / "models.csv", grouped)
    report.write_json(out / "ablation.json", table)
    report.write_csv(out / "ablation.csv", table)
    pictures = [name for name, plot in PICTURES.items() if plot(out / name, table)]
    report.write_text(out / "ablation.md", page(facts, table, left_out, pictures, grouped))
    print(report.markdown_table(table, SUMMARY))
    if grouped:
        print(report.markdown_table(grouped, ablation_groups.COLUMNS))
    for name, cell, why in left_out:
        print(f"Left out: {name}, {written(cell)}: {why}")
    print(f"Report: {out / 'ablation.md'}, with {', '.join(pictures)} and the rows as CSV and JSON beside it")


if __name__ == "__main__":
    app.run(main)
