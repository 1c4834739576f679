"""Measures a model: words understood, predicted quality, acceptance and speed, mode beside mode in one run.

    python -m vadusa_jax.evaluate --model M --texts heldout --modes ar,exact,tolerance:3 --seeds 3 --out out/evaluate

Writes the WAVs, `report.md` with its pictures, `metrics.json` and `metrics.csv` (one row per mode), and
`utterances.csv` (one row per WAV, worst first). A test set's recordings and their resynthesis frame the modes. With
`--prompts` every sentence is said in the voice of one of the speakers of a corpus, in turn, and `speakers.csv` tells
how alike the voices are.
"""

import sys
from pathlib import Path

from absl import app, flags, logging

from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.evaluation import clip_plots, plots, report
from vadusa_jax.evaluation.clips import reference_clips, speak, split_speakable
from vadusa_jax.evaluation.metrics import BUNDLED, OPINIONS, Recogniser, SpeakerEncoder, WavLMSpeaker, utmos_model
from vadusa_jax.evaluation.scores import conditions, rows, score
from vadusa_jax.evaluation.speakers import likeness, read_speakers
from vadusa_jax.evaluation.testsets import read_sentences
from vadusa_jax.voice import DEMO_MODEL, MODEL_HELP, Voice

MODEL = flags.DEFINE_string("model", str(DEMO_MODEL), f"{MODEL_HELP}.")
TEXTS = flags.DEFINE_string("texts", "heldout", "heldout, everyday, or a text file with one sentence a line.")
MODES = flags.DEFINE_list("modes", ["ar", "exact", "tolerance:3"], "Modes, such as exact:nodes=16.")
NODES = flags.DEFINE_integer(
    "nodes", None, "Tree nodes of the modes that name none; what was fastest here by default.", lower_bound=1
)
SEEDS = flags.DEFINE_integer("seeds", 3, "Every sentence is spoken with the seeds 0 to N-1.", lower_bound=1)
BATCH = flags.DEFINE_integer("batch", 1, "Sentences decoded together.", lower_bound=1)
LIMIT = flags.DEFINE_integer("limit", None, "Only the first N sentences.", lower_bound=1)
PROMPTS = flags.DEFINE_string("prompts", None, "Corpus with prompts: one recording of each speaker, and its text.")
SPEAKER_MODEL = flags.DEFINE_string(
    "speaker_model", None, "WavLM with an x-vector head, hub name or folder, for --prompts; Resemblyzer by default."
)
OPINION = flags.DEFINE_list("opinions", ["dnsmos"], "Predicted opinions: dnsmos, utmos (see README), or none.")
flags.register_validator("opinions", lambda names: set(names) <= {*OPINIONS}, f"must be of {', '.join(OPINIONS)}")
OUT = flags.DEFINE_string("out", "out/evaluate", "Where the results go.")
RECOGNISER = flags.DEFINE_string("recogniser", None, "Whisper model, name or folder; the bundled tiny.en by default.")
CPU_THREADS = flags.DEFINE_integer("cpu_threads", 2, "Clips transcribed at the same time.", lower_bound=1)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    out, voice = Path(OUT.value), Voice.from_pretrained(MODEL.value)
    modes = {name: parse_mode(name, NODES.value, voice.config.decode) for name in MODES.value}
    sentences, blank = read_sentences(TEXTS.value)
    # What may be missing is missed before anything is spoken.
    recogniser = Recogniser(RECOGNISER.value, CPU_THREADS.value)
    if "utmos" in OPINION.value:
        utmos_model()
    speakers = read_speakers(voice, Path(PROMPTS.value)) if PROMPTS.value else []
    if speakers:
        embed = WavLMSpeaker(SPEAKER_MODEL.value) if SPEAKER_MODEL.value else SpeakerEncoder()
    longest = max((speaker.voice for speaker in speakers), key=lambda one: len(one.prompt), default=voice)
    speakable, set_aside = split_speakable(longest, sentences[: LIMIT.value])
    if not speakable:
        raise app.UsageError(f"no sentence in {TEXTS.value} can be spoken ({blank} blank, {len(set_aside)} others)")
    ran = {name: conditions(voice, mode, BATCH.value) for name, mode in modes.items()}

    clips = reference_clips(speakable, voice.codec, out / "wav")
    for n, (as_speaker, name) in enumerate([(s.voice, s.name) for s in speakers] or [(voice, "")]):
        own = speakable[n :: max(1, len(speakers))]
        clips += speak(as_speaker, own, modes, SEEDS.value, out / "wav", BATCH.value, name)
    scored = score(clips, recogniser, opinions=OPINION.value)
    table, utterances = rows(scored, ran), report.utterance_rows(scored)
    report.write_json(out / "metrics.json", table)
    report.write_csv(out / "metrics.csv", table)
    report.write_csv(out / "utterances.csv", utterances)
    alike = likeness(clips, speakers, embed) if speakers else []
    if alike:
        report.write_csv(out / "speakers.csv", alike)
    plots.plot_acceptance(out / "acceptance.png", table)
    first = next(clip for clip in clips if clip.spoken)
    same = [c for c in clips if c.spoken and (c.sentence.id, c.seed) == (first.sentence.id, first.seed)]
    clip_plots.plot_spectrograms(out / "spectrograms.png", same)
    facts = {
        "command": f"`python -m vadusa_jax.evaluate {' '.join(sys.argv[1:])}`",
        "sentences": f"{len(speakable)} spoken, {blank} blank lines and {len(set_aside)} others skipped",
        "recogniser": RECOGNISER.value or BUNDLED,
    }
    facts |= {f"not spoken ({sentence.id})": why for sentence, why in set_aside}
    report.write_text(out / "report.md", report.report("Evaluation", facts, table, utterances, alike))
    print(report.markdown_table(table, report.SUMMARY))
    if alike:
        print(report.markdown_table(alike, report.SPEAKERS))
    print(f"Report: {out / 'report.md'}, with its pictures and tables beside it\nWAVs:   {out / 'wav'}/MODE/seedN/")


if __name__ == "__main__":
    app.run(main)
