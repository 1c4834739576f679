"""Fits draft trees to a model and to this machine: measures acceptance and step times, chooses tree and size.

    python -m vadusa_jax.fit_tree --model out/train --tokens out/tokens [--out trees.json]

`--model` is a training run or a voice's folder; the trees go to `trees.json` in it unless `--out` says otherwise.
"""

from pathlib import Path

from absl import app, flags
from tqdm import tqdm

from vadusa_jax.data.batches import read_phones
from vadusa_jax.decode.accept import EXACT, Greedy, Rule, Tolerance
from vadusa_jax.decode.fit import fit, fit_sizes, measure_hits, measure_step_s, say_plainly, wide_tree
from vadusa_jax.decode.prompts import text_prompts
from vadusa_jax.decode.trees import FittedTree, Trees, device_kind
from vadusa_jax.text import SEP
from vadusa_jax.training.checkpoint import load_model

_MODEL = flags.DEFINE_string("model", None, "Training run or voice folder.", required=True)
_TOKENS = flags.DEFINE_string("tokens", None, "Token dataset.", required=True)
_SPLIT = flags.DEFINE_string("split", "dev", "Split whose texts are spoken.")
_TEXTS = flags.DEFINE_integer("texts", 100, "How many texts are spoken.", lower_bound=1)
_NODES = flags.DEFINE_integer("nodes", 64, "Largest tree.", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "Where the trees go.")

RULES: tuple[Rule, ...] = (Greedy(), EXACT, Tolerance(2), Tolerance(3), Tolerance(5))


def table(fitted: dict[str, FittedTree], step_s: dict[int, float]) -> str:
    """Expected tokens per step and speed-up over one node, for every rule and measured size, as Markdown."""
    lines = ["| rule | nodes | tokens per step | ms per step | speed-up |", "|---|---|---|---|---|"]
    for name, f in fitted.items():
        for nodes, seconds in step_s.items():
            if nodes <= len(f.expected_T):
                gain = f.expected_T[nodes - 1] * step_s[1] / seconds
                best = " (chosen)" if f.nodes[device_kind()] == nodes else ""
                lines.append(
                    f"| {name} | {nodes}{best} | {f.expected_T[nodes - 1]:.2f} | {1e3 * seconds:.2f} | {gain:.2f} |"
                )
    return "\n".join(lines)


def main(_) -> None:
    folder = Path(_MODEL.value)
    config, lm = load_model(folder)
    phones = read_phones(_TOKENS.value, config.model, _SPLIT.value)[: _TEXTS.value]
    prompts = text_prompts(phones, SEP, range(len(phones)), 0, config)
    wide = wide_tree(config.heads.count, _NODES.value)  # the time of a step depends on size and depth, not on the nodes
    step_s = {
        t: measure_step_s(lm, wide.prune(t), config.decode)
        for t in tqdm(fit_sizes(_NODES.value), "step times", disable=None)
    }
    fitted = {}
    said = {greedy: say_plainly(lm, prompts, config.decode, greedy) for greedy in (False, True)}
    for rule in tqdm(RULES, "acceptance", disable=None):
        hits_MKR = measure_hits(lm, prompts, said[isinstance(rule, Greedy)], config.decode, rule)
        fitted[rule.name] = fit(hits_MKR, _NODES.value, step_s)
    out = Path(_OUT.value) if _OUT.value else folder / "trees.json"
    Trees(fitted).save(out)
    print(table(fitted, step_s))
    print(f"Trees: {out}")


if __name__ == "__main__":
    app.run(main)
