"""The fitted trees of a model: one per acceptance rule, and how many of its nodes pay on which device."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax

from vadusa_jax.decode.accept import Greedy, Rule, Tolerance
from vadusa_jax.decode.modes import Mode
from vadusa_jax.decode.tree import Tree, TreeError, chain

TREES = "trees.json"  # the trees saved in a folder
VERSION = 2


@dataclasses.dataclass(frozen=True)
class FittedTree:
    """A tree in order of growth, so that its first T nodes are the tree of size T."""

    tree: Tree
    expected_T: tuple[float, ...]  # tokens that a step is expected to commit with the first T nodes
    nodes: Mapping[str, int]  # `machine(batch)` -> tree size that gave most tokens per second there
    accuracy_KR: tuple[tuple[float, ...], ...]  # how often the r-th guess of head k would be accepted


@dataclasses.dataclass(frozen=True)
class Trees:
    """All fitted trees of a model by the name of their rule."""

    by_rule: Mapping[str, FittedTree]

    def choose(self, mode: Mode, batch: int = 1, heads: int | None = None) -> Tree:
        """The tree for a mode on this device at this size of batch, using no more than the first `heads` heads.

        Where the mode names no size it is what `fit_tree` found fastest here (1, plain decoding, where drafts would
        lose), at the nearest size of batch that was measured; on a device that was never measured, the whole tree.
        """
        if mode.chain:
            return chain(min(mode.chain, heads or mode.chain))
        if mode.nodes == 1:
            return Tree()
        fitted = self._fitted(mode.rule)
        nodes = mode.nodes or _nearest(fitted.nodes, batch) or len(fitted.tree)
        if nodes > len(fitted.tree):
            raise TreeError(f"asked for {nodes} nodes, the fitted tree has {len(fitted.tree)}: run fit_tree with more")
        return fitted.tree.prune(nodes, heads)

    def _fitted(self, rule: Rule) -> FittedTree:
        """The tree of the rule, or of its nearest kin: the same rule with other settings, or a tolerance."""
        if rule.name in self.by_rule:
            return self.by_rule[rule.name]
        kin = [name for name in self.by_rule if name.split(":")[0] == rule.name.split(":")[0]]
        kin = kin or [name for name in self.by_rule if name.startswith("tolerance:") and not isinstance(rule, Greedy)]
        if not kin:
            raise TreeError(f"no tree was fitted for {rule.name}; there are {sorted(self.by_rule)}: run fit_tree")
        if isinstance(rule, Tolerance):
            kin.sort(key=lambda name: abs(int(name.split(":")[1]) - rule.draws))
        return self.by_rule[kin[0]]

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


def machine(batch: int) -> str:
    """The device that decoding runs on and the size of its batch, as fitted trees name it."""
    return f"{jax.devices()[0].device_kind.lower()}, batch {batch}"


def _nearest(nodes: Mapping[str, int], batch: int) -> int | None:
    """The size that was found on this device at the measured batch nearest to this one."""
    kind, _, _ = machine(batch).rpartition(" ")
    measured = {int(name.rpartition(" ")[2]): size for name, size in nodes.items() if name.startswith(kind)}
    return measured[min(measured, key=lambda b: abs(b - batch))] if measured else None
