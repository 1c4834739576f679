"""Laws of the draft tree: geometry is the ancestor closure, growth is optimal, what does not fit has a name."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import random_tree

from vadusa_jax.decode.accept import EXACT, Greedy, Tolerance
from vadusa_jax.decode.fit import wide_tree
from vadusa_jax.decode.modes import Mode, parse_mode
from vadusa_jax.decode.tree import ROOT, Tree, TreeError, grow
from vadusa_jax.decode.trees import FittedTree, Trees, machine

random_trees = st.builds(random_tree, seed=st.integers(0, 10**6), nodes=st.integers(1, 40))


def accepted(tree: Tree, hits_MKR: np.ndarray) -> float:
    """Tokens a step commits on average: one, and one for every node of the deepest path that is right throughout."""
    alive_M = [
        np.all([hits_MKR[:, k, r] for k, r in enumerate(path)] or [np.ones(len(hits_MKR), bool)], axis=0) * len(path)
        for path in tree.paths
    ]
    return 1 + float(np.max(alive_M, axis=0).mean())


def one_right(seed: int, positions: int, heads: int, ranks: int) -> np.ndarray:
    """Hits `[M, K, R]` where at most one guess of a head is right: the exact and greedy rules."""
    rng = np.random.default_rng(seed)
    right_MK = rng.choice(ranks + 1, (positions, heads), p=rng.dirichlet(np.ones(ranks + 1)))
    return right_MK[..., None] == np.arange(ranks)


# geometry


@given(random_trees)
def test_a_node_is_one_deeper_than_its_parent_and_comes_after_it(tree):
    assert tree.depth_T[0] == 0 and tree.parent_T[0] == 0
    for i in range(1, len(tree)):
        assert tree.parent_T[i] < i
        assert tree.depth_T[i] == tree.depth_T[tree.parent_T[i]] + 1
        assert tree.paths[i] == (*tree.paths[tree.parent_T[i]], tree.rank_T[i])


@given(random_trees)
def test_the_mask_is_the_ancestor_closure(tree):
    reach_TT = np.eye(len(tree), dtype=bool)
    for i in range(len(tree)):  # parents come first, so theirs are complete
        reach_TT[i] |= reach_TT[tree.parent_T[i]]
    np.testing.assert_array_equal(tree.ancestor_TT, reach_TT)
    np.testing.assert_array_equal(tree.ancestor_TT.sum(axis=1), tree.depth_T + 1)


@given(random_trees)
def test_path_walks_from_the_root_to_the_node_by_parents(tree):
    for i, path_J in enumerate(tree.path_TJ):
        assert path_J[0] == 0 and (path_J[tree.depth_T[i] :] == i).all()
        assert (tree.parent_T[path_J[1 : tree.depth_T[i] + 1]] == path_J[: tree.depth_T[i]]).all()


@given(random_trees, st.integers(1, 40), st.integers(0, 5))
def test_pruning_keeps_a_tree(tree, nodes, heads):
    pruned = tree.prune(nodes, heads)
    assert pruned.paths == tuple(p for p in tree.paths if len(p) <= heads)[:nodes]
    pruned.check(heads, vocab=5)
    assert tree.prune() == tree and hash(tree.prune()) == hash(tree)


@given(st.integers(1, 8), st.integers(1, 70))
def test_the_wide_tree_has_the_size_and_heads_asked_for(heads, nodes):
    tree = wide_tree(heads, nodes)
    assert len(tree) == nodes and tree.depth == min(heads, nodes - 1)


# growth


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_growth_is_nested_monotone_and_equals_what_its_prefixes_accept(seed, heads, ranks, several_right):
    rng = np.random.default_rng(seed)
    hits_MKR = rng.random((60, heads, ranks)) < 0.4 if several_right else one_right(seed, 60, heads, ranks)
    tree, expected_T = grow(hits_MKR, 24)
    tree.check(heads, ranks)
    assert len(tree) == len(expected_T) <= 24
    assert (np.diff(expected_T) >= 0).all()
    np.testing.assert_allclose(expected_T, [accepted(tree.prune(t), hits_MKR) for t in range(1, len(tree) + 1)])
    assert grow(hits_MKR, 9)[0] == tree.prune(9)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([(2, 3), (3, 2), (1, 4)]))
def test_growth_is_optimal_where_one_guess_is_right(seed, shape):
    heads, ranks = shape
    hits_MKR = one_right(seed, 40, heads, ranks)
    _, expected_T = grow(hits_MKR, 6)
    paths = [p for d in range(1, heads + 1) for p in itertools.product(range(ranks), repeat=d)]
    for nodes, expected in enumerate(expected_T, start=1):
        chosen = (set(c) for c in itertools.combinations(paths, nodes - 1))
        trees = (c for c in chosen if all(p[:-1] in c or len(p) == 1 for p in c))
        best = max(accepted(Tree(((), *sorted(c, key=len))), hits_MKR) for c in trees)
        assert expected == pytest.approx(best)


# what does not fit


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        (((), (0, 1)), r"\(0, 1\)"),
        (((), (0,), (0,)), r"\(0,\)"),
        (((), (-1,)), r"\(-1,\)"),
        (((0,), ()), r"\(0,\)"),
        ((), "root"),
    ],
)
def test_a_broken_tree_is_an_error_that_names_the_node(paths, named):
    with pytest.raises(TreeError, match=named):
        Tree(paths)


@given(random_trees.filter(lambda tree: tree.depth > 0))
def test_a_tree_beyond_the_heads_or_the_vocabulary_is_named(tree):
    tree.check(tree.depth, tree.ranks)
    with pytest.raises(TreeError, match=f"draft heads, the model has {tree.depth - 1}"):
        tree.check(tree.depth - 1, tree.ranks)
    if tree.ranks > 1:
        with pytest.raises(TreeError, match=f"vocabulary of {tree.ranks - 1} tokens"):
            tree.check(tree.depth, tree.ranks - 1)


# fitted trees


def fitted(seed: int, nodes: int = 12) -> FittedTree:
    tree, expected_T = grow(one_right(seed, 50, 3, 4), nodes)
    return FittedTree(tree, tuple(expected_T.tolist()), {machine(1): 5, machine(8): 3}, ((0.5, 0.25), (0.4, 0.2)))


def test_trees_survive_saving(tmp_path):
    trees = Trees({"greedy": fitted(0), "tolerance:1": fitted(1), "tolerance:3": fitted(2)})
    trees.save(tmp_path / "trees.json")
    assert Trees.load(tmp_path / "trees.json") == trees
    assert [path.name for path in tmp_path.iterdir()] == ["trees.json"]


def test_the_tree_of_a_mode():
    trees = Trees({"tolerance:1": fitted(1), "tolerance:3": fitted(2)})
    one, three = trees.by_rule["tolerance:1"].tree, trees.by_rule["tolerance:3"].tree
    assert trees.choose(parse_mode("ar")) == trees.choose(parse_mode("greedy_ar")) == ROOT
    assert trees.choose(Mode(EXACT)) == one.prune(5)  # what was fastest on this device
    assert trees.choose(Mode(EXACT), batch=7) == one.prune(3)  # at the batch nearest to the one asked for
    assert trees.choose(parse_mode("exact:chain=2")) == Tree(((), (0,), (0, 0)))
    assert trees.choose(Mode(EXACT, nodes=9)) == one.prune(9)
    assert trees.choose(Mode(Tolerance(7), nodes=9), heads=1) == three.prune(9, heads=1)  # the nearest rule
    with pytest.raises(TreeError, match="no tree was fitted for greedy"):
        trees.choose(Mode(Greedy()))
    with pytest.raises(TreeError, match="asked for 13 nodes, the fitted tree has 12"):
        trees.choose(Mode(EXACT, nodes=13))
    with pytest.raises(TreeError, match="draft heads, the model has 1"):
        trees.check(heads=1, vocab=100)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda text: text[: len(text) // 2], "trees.json"),
        (lambda text: json.dumps(json.loads(text) | {"version": 99}), "version 99"),
        (lambda text: json.dumps({"version": 1}), "trees.json"),
        (lambda text: json.dumps([1]), "trees.json"),
        (lambda text: text.replace('"tree": [[]', '"tree": [[], [7, 7]'), r"\(7, 7\)"),
    ],
)
def test_a_broken_file_of_trees_is_named(tmp_path, damage, named):
    path = tmp_path / "trees.json"
    Trees({"greedy": fitted(0)}).save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(TreeError, match=named):
        Trees.load(path)
