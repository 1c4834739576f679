"""The speed table: modes of decoding beside plain decoding, in one run, on a trained voice and on larger models.

    python -m vadusa_jax.bench
    python -m vadusa_jax.bench --batch 1,8 --queue --stream --json out/bench.json --plot out/bench.png
    python -m vadusa_jax.bench --shapes demo,150m --dtypes bfloat16 --modes ar,exact:nodes=4,exact:nodes=64

`demo` is the voice of `--model` on held-out sentences: real speed-ups. The other shapes have random weights: their step
times are real and their speed-ups projections. The codec is left out, and so is compilation. The printed legend says
how every figure is made. The first of these takes about three minutes on two cores, mostly to compile.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags, logging
from tqdm import tqdm

from vadusa_jax.config import SHAPES
from vadusa_jax.decode.accept import EXACT
from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.decode.prompts import make_settings
from vadusa_jax.decode.tree import ROOT
from vadusa_jax.evaluation.report import write_csv, write_json
from vadusa_jax.evaluation.scores import AR
from vadusa_jax.evaluation.speed import PEER, project, queue_rows, speed_rows
from vadusa_jax.evaluation.speed_report import bars, page, summary
from vadusa_jax.evaluation.streaming import stream_rows, text_of
from vadusa_jax.evaluation.subjects import Subject, random_subject, voice_subject
from vadusa_jax.evaluation.testsets import load_testset
from vadusa_jax.text import Line
from vadusa_jax.voice import DEMO_MODEL, MODEL_HELP, Voice

VOICE = "demo"
DTYPES = ("float32", "bfloat16")
_MODES = [AR, *(f"{rule}:nodes={nodes}" for rule in ("exact", "tolerance:3") for nodes in (8, 16))]

MODEL = flags.DEFINE_string(
    "model", str(DEMO_MODEL), f"{MODEL_HELP}. Its weights are `demo`, its trees are used for all."
)
SHAPES_ = flags.DEFINE_list(
    "shapes", [VOICE, "25m"], f"Models: {VOICE} (the voice), {', '.join(SHAPES)} (random weights)."
)
MODES = flags.DEFINE_list(
    "modes", _MODES, "Modes; without :nodes=, as many as were fastest on this device when the trees were fitted."
)
BATCH = flags.DEFINE_list("batch", ["1"], "Rows decoded together; ragged rows compare with the first of these.")
DTYPE = flags.DEFINE_list("dtypes", ["float32"], f"Compute types, also of the stored weights: {', '.join(DTYPES)}.")
TEXTS = flags.DEFINE_integer("texts", 4, "Sentences for the voice, rounded up to whole batches.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 48, "Tokens that each row of a random model says.", lower_bound=8)
REPEATS = flags.DEFINE_integer("repeats", 3, "Timed repetitions.", lower_bound=1)
QUEUE = flags.DEFINE_bool("queue", False, "Also time ragged rows through the queue, in plain decoding.")
STREAM = flags.DEFINE_bool("stream", False, "Also time streaming, with the voice and the modes that name no nodes.")
PEERS = flags.DEFINE_enum("peer", None, [PEER], "Also time this implementation (extra [bench]) on the random models.")
JSON = flags.DEFINE_string("json", None, "File for all figures with their ranges.")
CSV = flags.DEFINE_string("csv", None, "File for the rows of the table.")
PLOT = flags.DEFINE_string("plot", None, "PNG of speed-up and step time against nodes (extra [eval]).")
flags.register_validator(
    "batch", lambda sizes: all(size.isdecimal() and int(size) for size in sizes), "must be numbers of at least 1"
)
flags.register_validator(
    "shapes", lambda names: set(names) <= {VOICE, *SHAPES}, f"must be of {VOICE}, {', '.join(SHAPES)}"
)
flags.register_validator("dtypes", lambda names: set(names) <= set(DTYPES), f"must be of {', '.join(DTYPES)}")


def subject_of(voice: Voice, shape: str, dtype: str, batch: int) -> Subject:
    """The model of a shape with the rows for one batch size."""
    if shape != VOICE:
        return random_subject(shape, voice.config.heads, voice.config.decode, dtype, batch, TOKENS.value)
    sentences = itertools.cycle(sentence.text for sentence in load_testset("heldout"))
    texts = list(itertools.islice(sentences, -(-TEXTS.value // batch) * batch))
    prompts = voice.prompts([Line.of(text) for text in texts], seed=0)
    return voice_subject(Path(MODEL.value).name, voice.lm, voice.config, prompts, dtype)


def conditions() -> Iterator[tuple[str, str, int]]:
    """Shape, dtype and batch of each part of the table."""
    return itertools.product(SHAPES_.value, DTYPE.value, map(int, BATCH.value))


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    voice, rows, queues = Voice.from_pretrained(MODEL.value), [], []
    modes = {name: parse_mode(name, decode=voice.config.decode) for name in MODES.value}
    if others := [name for name, mode in modes.items() if mode.drafter != "heads"]:
        raise app.UsageError(f"--modes: {', '.join(others)} does not draft with heads; `evaluate` times it")
    batches = [int(size) for size in BATCH.value]
    repeats, parts = REPEATS.value, list(conditions())
    bar = tqdm(total=len(parts) * len(modes) * (repeats + 1), desc="bench", disable=None)
    for shape, dtype, batch in parts:
        bar.set_description(f"{shape} {dtype} batch {batch}")
        subject, peer = subject_of(voice, shape, dtype, batch), None
        if PEERS.value and not subject.trained:
            from vadusa_jax.evaluation.peer import transformers_peer

            peer = transformers_peer(SHAPES[shape], subject.decode, dtype)
        settings = {name: voice.settings(mode, batch=batch, decode=subject.decode) for name, mode in modes.items()}
        rows += speed_rows(subject, settings, batch, repeats, bar.update, peer)
        if QUEUE.value and batch == batches[-1]:
            plain = make_settings(ROOT, EXACT, subject.decode)
            queues += queue_rows(subject, AR, plain, batches, repeats)
    bar.close()
    streams = []
    if STREAM.value and VOICE in SHAPES_.value:
        some = {name: mode for name, mode in modes.items() if mode.nodes in (None, 1)}
        text = text_of(voice, [sentence.text for sentence in load_testset("heldout")], parse_mode(AR))
        streams = stream_rows(voice, some, text, repeats)
    rows = project(rows)
    if JSON.value:
        everything = {"summary": summary(rows, queues), "bars": bars(rows, queues), "rows": rows, "queues": queues}
        everything["streams"] = streams
        write_json(Path(JSON.value), everything)
    if CSV.value:
        write_csv(Path(CSV.value), rows)
    if PLOT.value:
        from vadusa_jax.evaluation.plots import plot_speed

        plot_speed(Path(PLOT.value), rows)
    print(page(rows, queues, streams, repeats))


if __name__ == "__main__":
    app.run(main)
