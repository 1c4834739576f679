"""The fitted trees of a model: one per acceptance rule, and how many of its nodes pay on which device."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from vadusa_jax.decode.accept import Rule, Tolerance
from vadusa_jax.decode.modes import Mode
from vadusa_jax.decode.tree import Tree, TreeError

VERSION = 1


@dataclasses.dataclass(frozen=True)
class FittedTree:
    """A tree in order of growth, so that its first T nodes are the tree of size T."""

    tree: Tree
    expected_T: tuple[float, ...]  # tokens that a step is expected to commit with the first T nodes
    nodes: Mapping[str, int]  # device kind -> tree size that gave most tokens per second there
    accuracy_KR: tuple[tuple[float, ...], ...]  # how often the r-th guess of head k would be accepted


@dataclasses.dataclass(frozen=True)
class Trees:
    """All fitted trees of a model by the name of their rule."""

    by_rule: Mapping[str, FittedTree]

    def choose(self, mode: Mode, heads: int | None = None) -> Tree:
        """The tree for a mode on this device, using no more than the first `heads` heads."""
        if mode.nodes == 1:
            return Tree()
        fitted = self._fitted(mode.rule)
        nodes = mode.nodes or fitted.nodes.get(device_kind()) or len(fitted.tree)
        if nodes > len(fitted.tree):
            raise TreeError(f"asked for {nodes} nodes, the fitted tree has {len(fitted.tree)}: run fit_tree with more")
        return fitted.tree.prune(nodes, heads)

    def _fitted(self, rule: Rule) -> FittedTree:
        if rule.name in self.by_rule:
            return self.by_rule[rule.name]
        draws = [int(name.split(":")[1]) for name in self.by_rule if name.startswith("tolerance:")]
        if not isinstance(rule, Tolerance) or not draws:
            raise TreeError(f"no tree was fitted for {rule.name}; there are {sorted(self.by_rule)}: run fit_tree")
        nearest = min(draws, key=lambda n: (abs(n - rule.draws), n))
        return self.by_rule[f"tolerance:{nearest}"]

    def check(self, heads: int, vocab: int) -> None:
        """Raises TreeError when a tree does not fit the model."""
        for fitted in self.by_rule.values():
            fitted.tree.check(heads, vocab)

    def save(self, path: Path) -> None:
        """Writes JSON, whole or not at all."""
        trees = {name: dataclasses.asdict(fitted) for name, fitted in self.by_rule.items()}
        for name, fitted in self.by_rule.items():
            trees[name]["tree"] = fitted.tree.paths
        aside = path.with_suffix(".partial")
        aside.write_text(json.dumps({"version": VERSION, "trees": trees}) + "\n")
        os.replace(aside, path)

    @classmethod
    def load(cls, path: Path) -> "Trees":
        """Reads what `save` wrote; a broken file or tree is a TreeError that names the file or the node."""
        try:
            stored = json.loads(Path(path).read_text())
            if stored["version"] != VERSION:
                raise TreeError(
                    f"{path} has version {stored['version']}, this code reads {VERSION}: run fit_tree again"
                )
            by_rule = {}
            for name, t in stored["trees"].items():
                tree = Tree(tuple(tuple(path) for path in t["tree"]))
                accuracy = tuple(map(tuple, t["accuracy_KR"]))
                by_rule[name] = FittedTree(tree, tuple(t["expected_T"]), t["nodes"], accuracy)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TreeError(f"{path} does not hold fitted trees ({error!r}): run fit_tree again") from error
        return cls(by_rule)


def device_kind() -> str:
    """The device that decoding runs on, as fitted trees name it."""
    return jax.devices()[0].device_kind.lower()
