"""Shapes of trees: grown, read from files and written back; and every file that is none."""

from __future__ import annotations

import json
import random
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import methods
from paceline.errors import OptionError
from paceline.options import Speculation
from paceline.shape import TreeShape, best_first
from paceline.tree import Drawn, TokenTree
from tests.toys import trials

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]}


def written(folder: Path, value: object) -> Path:
    path = folder / "tree.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def valid(shape: TreeShape) -> None:
    """Parents first, siblings in the order of their ranks, no gap."""
    assert shape.parents[0] == -1
    for node in range(len(shape)):
        assert -1 <= shape.parents[node] < max(node, 1) or node == 0
        children = shape.children_of(node)
        assert [shape.ranks[child] for child in children] == list(range(len(children)))
    assert shape.width == max([len(shape.children_of(node)) for node in range(len(shape))] + [1])


@st.composite
def trees(draw: st.DrawFn) -> TreeShape:
    parents, ranks = [-1], [0]
    for _ in range(draw(st.integers(1, 63))):
        parent = draw(st.integers(0, len(parents) - 1))
        ranks.append(parents.count(parent))
        parents.append(parent)
    return TreeShape(tuple(parents), tuple(ranks))


@trials(60)
@given(shape=trees())
def test_what_is_written_is_read_back(shape: TreeShape, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("shapes")
    shape.write(folder / "tree.json")
    assert TreeShape.read(folder / "tree.json") == shape
    assert TreeShape.of(str(folder / "tree.json")) == shape
    assert TreeShape.parse({"parents": list(shape.parents), "ranks": list(shape.ranks)}) == shape
    assert TreeShape.parse(shape.paths()) == shape
    assert shape.depths() == [0, *(len(path) for path in shape.paths())]
    valid(shape)
    for nodes in (1, len(shape) // 2, len(shape)):
        valid(shape.head(nodes))


@trials(60)
@given(shape=trees(), seed=st.integers(0, 99))
def test_the_order_of_a_file_does_not_change_the_tree(shape: TreeShape, seed: int) -> None:
    """Shuffled, it is the same tree, again with parents and lower ranks first."""
    paths = shape.paths()
    random.Random(seed).shuffle(paths)
    found = TreeShape.parse(paths)
    valid(found)
    assert sorted(found.paths()) == sorted(shape.paths())
    order = [0, *random.Random(seed).sample(range(1, len(shape)), len(shape) - 1)]
    place = {node: i for i, node in enumerate(order)} | {-1: -1}
    lists = {"parents": [place[shape.parents[n]] for n in order], "ranks": [shape.ranks[n] for n in order]}
    valid(TreeShape.parse(lists))
    assert sorted(TreeShape.parse(lists).paths()) == sorted(shape.paths())


def test_a_file_keeps_its_order_where_it_can() -> None:
    """What stands first matters most, and stays when there is room for less."""
    shape = TreeShape.parse([[0], [0, 0], [1], [0, 0, 0], [1, 0]])
    assert shape.paths() == [[0], [0, 0], [1], [0, 0, 0], [1, 0]]
    assert shape.head(2).paths() == [[0], [0, 0]]
    assert TreeShape.parse([[0, 0], [1], [0]]).paths() == [[0], [0, 0], [1]]


def test_a_chain_is_a_shape_like_any_other() -> None:
    chain = TreeShape.chain(4)
    assert chain.paths() == [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    assert chain.is_chain
    assert chain == TreeShape.best([[0.5]], 4)
    assert not TreeShape.parse([[0], [1]]).is_chain
    assert len(TreeShape.chain(63)) == 64


@pytest.mark.parametrize("tree", ["auto", "none", 1, 8])
def test_what_is_no_file_has_no_shape(tree: str | int) -> None:
    assert TreeShape.of(tree) is None


# Growth.


def test_the_first_nodes_grown_are_the_best_tree_of_any_size() -> None:
    """Against every set of nodes that is a tree, of a whole tree of 12."""
    dice = random.Random(5)
    for _ in range(6):
        chances = [sorted((dice.random() / 2 for _ in range(3)), reverse=True) for _ in range(2)] + [[]]
        parents, ranks, survival = best_first(chances, 63)
        assert len(parents) == 13
        assert survival == sorted(survival, reverse=True)
        assert TreeShape(tuple(parents), tuple(ranks)).survival(chances[:2]) == survival
        for nodes in range(1, 6):
            sets = (kept for kept in combinations(range(1, 13), nodes) if all(parents[n] in (0, *kept) for n in kept))
            best = max(sum(survival[n] for n in kept) for kept in sets)
            assert sum(survival[1 : nodes + 1]) == pytest.approx(best)
            assert TreeShape.best(chances, nodes).parents == tuple(parents[: nodes + 1])


def test_chances_of_the_last_row_count_for_all_depths_below() -> None:
    parents, ranks, survival = best_first([[0.75, 0.25], [0.5]], 6)
    assert parents == [-1, 0, 1, 0, 2, 3, 4]
    assert ranks == [0, 0, 0, 1, 0, 0, 0]
    assert survival == [1.0, 0.75, 0.375, 0.25, 0.1875, 0.125, 0.09375]
    assert max(TreeShape.best([[0.9, 0.1], [0.9]], 63).depths()) > 20
    assert TreeShape.parse([[0], [1], [2]]).survival([[0.5, 0.2]]) == [1.0, 0.5, 0.2, 0.2]


def test_drawn_children_take_their_places() -> None:
    """How a drafter fills a shape: a node's children are drawn in the order of their ranks; where fewer are drawn, what
    hangs below the others is left out."""
    shape = TreeShape.parse([[0], [1], [1, 0], [0, 0], [0, 0, 0]])
    tree, place = TokenTree.root(7), {0: 0}
    for node in range(len(shape)):
        wanted = shape.children_of(node)
        if wanted and node in place:
            tokens = [10 * node + rank for rank in range(len(wanted))][: 1 if node == 0 else 9]
            place.update(zip(wanted, tree.grow(place[node], Drawn(tokens, [0.5] * len(tokens)), "test"), strict=False))
    tree.check(100)
    assert tree.tokens == [7, 0, 10, 40]


# Bad files.

BAD: list[tuple[Any, str]] = [
    ("", "no JSON"),
    ("[[0], ", "no JSON"),
    ("\x00", "no JSON"),
    ("[" * 100_000, "no JSON"),
    ("5", "holds no tree"),
    ("null", "holds no tree"),
    ({"parents": [-1, 0]}, "holds no tree"),
    ({**SMALL, "more": 1}, "holds no tree"),
    ([], "no node below its root"),
    ({"parents": [-1], "ranks": [0]}, "no node below its root"),
    ({"parents": [], "ranks": []}, "no node below its root"),
    ([[]], "where a path of ranks is due"),
    ([[0], 1], "where a path of ranks is due"),
    ([["0"]], "where a path of ranks is due"),
    ([[0], [0.5]], "where a path of ranks is due"),
    ([[True]], "where a path of ranks is due"),
    ([[-1]], "where a path of ranks is due"),
    ([[0], [0, 0], [0]], r"the path \[0\] twice"),
    ([[0], [1, 0]], r"\[1, 0\] but not its parent, \[1\]"),
    ([[0], [2]], "none of rank 1"),
    ([[1]], "none of rank 0"),
    ([[0], [0, 1]], "none of rank 0"),
    ([[n] for n in range(64)], "has 64 nodes.* 63 at most"),
    ({"parents": list(range(-1, 70)), "ranks": [0] * 71}, "has 70 nodes.* 63 at most"),
    ({"parents": [-1, 0], "ranks": [0]}, "not two lists of one length"),
    ({"parents": 5, "ranks": [0]}, "not two lists of one length"),
    ({"parents": [0, 0], "ranks": [0, 0]}, "whose parent is -1"),
    ({"parents": [None, 0], "ranks": [0, 0]}, "whose parent is -1"),
    ({"parents": [-1, 9], "ranks": [0, 0]}, "orphan: node 1 names the parent 9"),
    ({"parents": [-1, -1], "ranks": [0, 0]}, "orphan: node 1 names the parent -1"),
    ({"parents": [-1, "0"], "ranks": [0, 0]}, "orphan"),
    ({"parents": [-1, 0], "ranks": [0, -1]}, "the rank -1"),
    ({"parents": [-1, 0], "ranks": [0, None]}, "the rank None"),
    ({"parents": [-1, 0, 0], "ranks": [0, 0, 0]}, "two children of node 0 with rank 0"),
    ({"parents": [-1, 0, 0], "ranks": [0, 0, 2]}, "none of rank 1"),
    ({"parents": [-1, 1], "ranks": [0, 0]}, "cycle: node 1"),
    ({"parents": [-1, 0, 3, 2], "ranks": [0, 0, 0, 0]}, "cycle: node 2"),
    ({"parents": [-1, 0, 3, 4, 2, 1], "ranks": [0] * 6}, "cycle: node 2"),
]


@pytest.mark.parametrize(("value", "says"), BAD)
def test_a_file_that_holds_no_tree_is_refused_with_what_to_do(value: Any, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, value)
    with pytest.raises(OptionError, match=says) as caught:
        TreeShape.read(path)
    message = str(caught.value)
    assert repr(str(path)) in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("method", ["recycling", "draft_model", "medusa", "eagle", "eagle3"])
def test_methods_that_fill_a_file_take_one(method: str, tmp_path: Path) -> None:
    tree = str(written(tmp_path, SMALL))
    model = {} if method == "recycling" else {"model": "some/model"}
    methods.check(Speculation.parse({"method": method, "tree": tree, **model}))


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead", "grammar", "prediction", "cascade"])
def test_methods_that_would_not_look_at_a_file_refuse_it(method: str, tmp_path: Path) -> None:
    tree = str(written(tmp_path, SMALL))
    with pytest.raises(OptionError, match=f"{method!r} fills no tree of a file.*recycling"):
        methods.check(Speculation.parse({"method": method, "tree": tree}))


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_a_rule_for_chains_takes_a_chain_of_a_file(rule: str, tmp_path: Path) -> None:
    wanted = {"method": "draft_model", "model": "some/model", "rule": rule}
    with pytest.raises(OptionError, match="accepts chains, and the file"):
        methods.check(Speculation.parse({**wanted, "tree": str(written(tmp_path, SMALL))}))
    chain = str(written(tmp_path, TreeShape.chain(4).paths()))
    methods.check(Speculation.parse({**wanted, "tree": chain}))


def test_options_refuse_a_file_that_holds_no_tree(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="orphan"):
        Speculation.parse({"tree": str(written(tmp_path, {"parents": [-1, 9], "ranks": [0, 0]}))})
    with pytest.raises(OptionError, match="cannot be read"):
        Speculation.parse({"tree": "wide"})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="no JSON"):
        TreeShape.read(tmp_path / "binary.json")
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(OptionError, match="cannot be read"):
            TreeShape.of(str(path))
