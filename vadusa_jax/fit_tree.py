"""Fits draft trees to a model and to this machine.

    python -m vadusa_jax.fit_tree --model out/train --tokens out/tokens --batch 1,8

Speaks dev-set texts by plain decoding, measures for every acceptance rule which guesses of which head it would accept
along that speech, measures how long a step of every size takes here, and grows for every rule the tree with most
tokens per second. Then speaks with the chosen trees, to compare what was expected with what comes out. Writes into the
model's folder, unless `--out` says otherwise: `trees.json`, `trees.png` and `transitions.safetensors` (how often one
speech token follows another in the training split, for the mode `viterbi`).
"""

from collections.abc import Mapping
from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from vadusa_jax.data.batches import read_phones, read_tokens
from vadusa_jax.decode import transitions
from vadusa_jax.decode.accept import Greedy
from vadusa_jax.decode.fit import fit, fit_sizes, measure_hits, measure_step_s, realised, say_plainly, wide_tree
from vadusa_jax.decode.modes import parse_mode
from vadusa_jax.decode.prompts import take_rows, text_prompts
from vadusa_jax.decode.trees import TREES, FittedTree, Trees, machine
from vadusa_jax.evaluation.plots import plot_trees
from vadusa_jax.text import SEP
from vadusa_jax.training.checkpoint import load_model

_MODEL = flags.DEFINE_string("model", None, "Training run or voice folder.", required=True)
_TOKENS = flags.DEFINE_string("tokens", None, "Token dataset.", required=True)
_SPLIT = flags.DEFINE_string("split", "dev", "Split whose texts are spoken.")
_TEXTS = flags.DEFINE_integer("texts", 100, "How many texts are spoken.", lower_bound=1)
_NODES = flags.DEFINE_integer("nodes", 96, "Largest tree.", lower_bound=2)
_BATCH = flags.DEFINE_list("batch", ["1", "8"], "Sizes of the batches that trees are fitted to.")
_RULES = flags.DEFINE_list(
    "rules", ["greedy", "exact", "tolerance:2", "tolerance:3", "tolerance:5", "typical", "topk:5", "pcg"], "Rules."
)
_OUT = flags.DEFINE_string("out", None, "Folder to write into; the model's by default.")
flags.register_validator(
    "batch", lambda sizes: all(size.isdecimal() and int(size) for size in sizes), "must be numbers of at least 1"
)


def table(
    fitted: Mapping[str, FittedTree], step_s: Mapping[int, Mapping[int, float]], real: Mapping[tuple[str, int], float]
) -> str:
    """Tokens per step, expected and realised, and speed-up over one node: every rule, batch and size, as Markdown."""
    lines = [
        "| rule | batch | nodes | expected tokens per step | realised | ms per step | speed-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, f in fitted.items():
        for batch, seconds_of in step_s.items():
            for nodes, seconds in seconds_of.items():
                if nodes <= len(f.tree):
                    expected, came = f.expected_T[nodes - 1], real.get((name, nodes))
                    best = " (chosen)" if f.nodes[machine(batch)] == nodes else ""
                    lines.append(
                        f"| {name} | {batch} | {nodes}{best} | {expected:.2f} | {f'{came:.2f}' if came else '-'} | "
                        f"{1e3 * seconds:.2f} | {expected * seconds_of[1] / seconds:.2f} |"
                    )
    return "\n".join(lines)


def main(_) -> None:
    folder = Path(_MODEL.value)
    config, lm = load_model(folder)
    rules = [parse_mode(name, decode=config.decode).rule for name in _RULES.value]
    phones = read_phones(_TOKENS.value, config.model, _SPLIT.value)[: _TEXTS.value]
    prompts = text_prompts(phones, SEP, range(len(phones)), 0, config)
    wide = wide_tree(config.heads.count, _NODES.value)  # the time of a step depends on size and depth, not on the nodes
    sizes = [(batch, nodes) for batch in map(int, _BATCH.value) for nodes in fit_sizes(_NODES.value)]
    step_s: dict[int, dict[int, float]] = {batch: {} for batch, _ in sizes}
    for batch, nodes in tqdm(sizes, "step times", disable=None):
        step_s[batch][nodes] = measure_step_s(lm, wide.prune(nodes), config.decode, batch)

    fitted, real = {}, {}
    said = {greedy: say_plainly(lm, prompts, config.decode, greedy) for greedy in (False, True)}
    for rule in tqdm(rules, "acceptance", disable=None):
        hits_MKR = measure_hits(lm, prompts, said[isinstance(rule, Greedy)], config.decode, rule)
        fitted[rule.name] = fit(hits_MKR, _NODES.value, step_s)
    some = take_rows(prompts, slice(20))
    for rule in tqdm(rules, "speak", disable=None):
        for nodes in {*fitted[rule.name].nodes.values(), len(fitted[rule.name].tree)} - {1}:
            real[rule.name, nodes] = realised(lm, some, config.decode, rule, fitted[rule.name].tree.prune(nodes))

    out = Path(_OUT.value) if _OUT.value else folder
    out.mkdir(parents=True, exist_ok=True)
    Trees(fitted).save(out / TREES)
    plot_trees(out / "trees.png", fitted)
    following = read_tokens(_TOKENS.value, config.model, "train")
    transitions.save_transitions(out, transitions.count_transitions(following, config.model.output_vocab))
    print(table(fitted, step_s, real))
    print(f"Trees: {out / TREES}, drawn in trees.png")


if __name__ == "__main__":
    app.run(main)
