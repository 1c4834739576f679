"""The draft tree: which combinations of the heads' guesses are verified in one backbone pass. NumPy only.

A node is named by its path of ranks: `(2, 0)` is the best guess of head 2 below the third-best guess of head 1. The
root, `()`, is the token that the backbone has already chosen. Nodes are stored in the order in which they were grown,
so every prefix of a tree is a tree: the best one of its size.
"""

import dataclasses
import functools

import numpy as np


class TreeError(ValueError):
    """A tree that cannot be used with this model."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static draft tree of T nodes; hashable, so that compiled functions may depend on it."""

    paths: tuple[tuple[int, ...], ...] = ((),)  # one rank path per node; the root comes first

    def __post_init__(self):
        seen = set()
        for path in self.paths:
            if path and path[:-1] not in seen:
                raise TreeError(f"node {path} comes before its parent or its parent {path[:-1]} is missing")
            if path in seen:
                raise TreeError(f"node {path} is in the tree twice")
            if any(rank < 0 for rank in path):
                raise TreeError(f"node {path} has a negative rank")
            seen.add(path)
        if () not in seen:
            raise TreeError("a tree needs its root, the empty path ()")

    def __len__(self) -> int:
        return len(self.paths)

    @functools.cached_property
    def depth_T(self) -> np.ndarray:
        """Depth of each node; the root has 0, and a node of depth d is a guess of head d."""
        return np.array([len(path) for path in self.paths], np.int32)

    @functools.cached_property
    def rank_T(self) -> np.ndarray:
        """Rank of each node among its head's guesses (0 for the root, which is no guess)."""
        return np.array([path[-1] if path else 0 for path in self.paths], np.int32)

    @functools.cached_property
    def parent_T(self) -> np.ndarray:
        """Index of each node's parent; the root is its own."""
        index = {path: i for i, path in enumerate(self.paths)}
        return np.array([index[path[:-1]] for path in self.paths], np.int32)

    @functools.cached_property
    def sibling_T(self) -> np.ndarray:
        """Number of each node among its parent's children (0 for the root)."""
        return np.array([np.sum(self.parent_T[1:i] == self.parent_T[i]) for i in range(len(self))], np.int32)

    @functools.cached_property
    def child_TC(self) -> np.ndarray:
        """Children of each node in order, padded with the root; C is the most that a node has, at least 1."""
        child_TC = np.zeros((len(self), int(self.sibling_T.max()) + 1), np.int32)
        child_TC[self.parent_T[1:], self.sibling_T[1:]] = np.arange(1, len(self))
        return child_TC

    @functools.cached_property
    def path_TJ(self) -> np.ndarray:
        """Nodes from the root to each node, in order, padded with the node itself; J = depth + 1."""
        index = {path: i for i, path in enumerate(self.paths)}
        return np.array(
            [[index[path[: min(j, len(path))]] for j in range(self.depth + 1)] for path in self.paths], np.int32
        )

    @functools.cached_property
    def ancestor_TT(self) -> np.ndarray:
        """Attention mask: `[i, j]` is true where j is i or lies on the way from the root to i."""
        mask_TT = np.zeros((len(self), len(self)), bool)
        mask_TT[np.arange(len(self))[:, None], self.path_TJ] = True
        return mask_TT

    @property
    def depth(self) -> int:
        """Depth of the deepest node: how many heads are used."""
        return max(len(path) for path in self.paths)

    @property
    def ranks(self) -> int:
        """R: how many guesses of a head are used at most."""
        return int(self.rank_T.max()) + 1

    def prune(self, nodes: int | None = None, heads: int | None = None) -> "Tree":
        """The first `nodes` nodes of those that need no more than `heads` heads."""
        paths = [path for path in self.paths if heads is None or len(path) <= heads]
        return Tree(tuple(paths[:nodes]))

    def check(self, heads: int, vocab: int) -> None:
        """Raises TreeError when the tree asks for heads or ranks that the model does not have."""
        for path in self.paths:
            if len(path) > heads:
                raise TreeError(f"node {path} needs {len(path)} draft heads, the model has {heads}")
            if any(rank >= vocab for rank in path):
                raise TreeError(f"node {path} has a rank beyond the vocabulary of {vocab} tokens")


ROOT = Tree()  # no guesses at all: plain autoregressive decoding


def chain(depth: int) -> Tree:
    """Only the best guess of each of the first `depth` heads."""
    return Tree(tuple((0,) * d for d in range(depth + 1)))


def grow(hits_MKR: np.ndarray, nodes: int) -> tuple[Tree, np.ndarray]:
    """Grows a tree greedily from measured head accuracies.

    Args:
        hits_MKR: for each of M observed positions, whether the r-th guess of head k would have been accepted.
        nodes: T, the root included.

    Returns:
        The tree, and for each prefix of it the tokens that a step is expected to commit (`expected_T[0]` is 1).

    At each turn the node is added that lets most positions accept one token more. Counting whole paths instead of
    multiplying the heads' accuracies keeps what the product loses: that easy positions are easy for all heads. Where
    exactly one guess is right, the result is the best tree of every size (the gain of a node is the frequency of its
    path, and no path is more frequent than its parent's).
    """
    observed, heads, ranks = hits_MKR.shape
    paths: list[tuple[int, ...]] = [()]
    best_M = np.zeros(observed, np.int32)  # depth accepted so far at each position
    candidates = [(r,) for r in range(ranks)]
    alive_CM = [hits_MKR[:, 0, r] for r in range(ranks)]
    expected = [1.0]
    while len(paths) < nodes and candidates:
        gains = [np.count_nonzero(a & (best_M < len(p))) for p, a in zip(candidates, alive_CM, strict=True)]
        i = int(np.argmax(gains))
        path, alive_M = candidates.pop(i), alive_CM.pop(i)
        paths.append(path)
        best_M = np.where(alive_M, np.maximum(best_M, len(path)), best_M)
        expected.append(1.0 + float(best_M.mean()))
        if len(path) < heads:
            candidates += [(*path, r) for r in range(ranks)]
            alive_CM += [alive_M & hits_MKR[:, len(path), r] for r in range(ranks)]
    return Tree(tuple(paths)), np.array(expected)
