"""The shape of a token tree, without its tokens: how many children each node has, and which nodes matter most."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import OptionError
from paceline.tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMS = '[[0], [1], [0, 0]], a list of paths of ranks, or {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]}'


def best_first(chances: Sequence[Sequence[float]], nodes: int) -> tuple[list[int], list[int], list[float]]:
    """Grow the tree with the highest sum of survivals for any number of nodes up to ``nodes``.

    The most likely node that can be added is added next, so the first n nodes are the best tree of n (Li et al. 2024,
    EAGLE-2, arXiv 2406.16858, section 4.2); ties go to the earlier parent, then to the lower rank.

    Args:
        chances: ``chances[d][r]`` is the chance that the child of rank r of a node at depth d is right, given that the
            node is and its earlier children are not what follows; the last row counts for all depths below, too. An
            empty last row ends the tree.
        nodes: how many to draft; there are fewer where the chances end.

    Returns:
        Parent, rank and survival of each node, the root first.
    """
    parents, ranks, survival, depths = [-1], [0], [1.0], [0]
    waiting: list[tuple[float, int, int]] = []
    while len(parents) <= nodes:
        newest = len(parents) - 1
        for rank, chance in enumerate(chances[min(depths[newest], len(chances) - 1)]):
            heappush(waiting, (-survival[newest] * chance, newest, rank))
        if not waiting:
            break
        negative, parent, rank = heappop(waiting)
        parents.append(parent)
        ranks.append(rank)
        survival.append(-negative)
        depths.append(depths[parent] + 1)
    return parents, ranks, survival


@dataclass(frozen=True)
class TreeShape:
    """A tree of at most 63 drafted nodes below the root, node 0; the nodes that matter most come first.

    A parent stands before its children and a child before those of a higher rank, so the first nodes are a tree again,
    and siblings stand in the order in which they are drawn.

    Attributes:
        parents: of each node; -1 for the root.
        ranks: which child of its parent a node is: 0 is the likeliest, or the first drawn. The root's counts for
            nothing.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def chain(cls, nodes: int) -> TreeShape:
        """Every node has one child."""
        return cls(tuple(range(-1, nodes)), (0,) * (nodes + 1))

    @classmethod
    def best(cls, chances: Sequence[Sequence[float]], nodes: int) -> TreeShape:
        """What :func:`best_first` grows."""
        parents, ranks, _ = best_first(chances, nodes)
        return cls(tuple(parents), tuple(ranks))

    @classmethod
    def of(cls, tree: str | int) -> TreeShape | None:
        """The shape that the option ``tree`` names, or none where it is "auto", "none" or a width; errors as in
        :meth:`read`."""
        return None if isinstance(tree, int) or tree in ("auto", "none") else cls.read(tree)

    @classmethod
    def read(cls, path: str | Path) -> TreeShape:
        """Read a shape from a JSON file: paths of ranks as in Medusa's choices, or parents and ranks, the root first.

        Nodes keep the order of the file, except that a node is moved behind its parent and its siblings of lower ranks.

        Raises:
            OptionError: the file cannot be read or holds no tree that can be verified; with what to do.
        """
        try:
            value = json.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise OptionError(
                f"tree names {str(path)!r}, which cannot be read ({error.strerror}); name a file, or use 'auto', "
                "'none' or a width."
            ) from None
        except (ValueError, RecursionError) as error:
            raise OptionError(f"the tree file {str(path)!r} is no JSON ({error}); write it as {_FORMS}.") from None
        try:
            return cls.parse(value)
        except OptionError as error:
            raise OptionError(f"the tree file {str(path)!r} {error}") from None

    @classmethod
    def parse(cls, value: object) -> TreeShape:
        """The shape that a value read from JSON describes.

        Raises:
            OptionError: it describes none; the message goes on after what the tree is called.
        """
        if isinstance(value, list):
            parents, ranks = _of_paths(value)
        elif isinstance(value, dict) and set(value) == {"parents", "ranks"}:
            parents, ranks = _of_lists(value["parents"], value["ranks"])
        else:
            raise OptionError(f"holds no tree; write it as {_FORMS}.")
        order = _ordered(parents, ranks)
        place = {node: i for i, node in enumerate(order)} | {-1: -1}
        return cls(tuple(place[parents[node]] for node in order), tuple(ranks[node] for node in order))

    def write(self, path: str | Path) -> None:
        """Write the paths of ranks, in order; :meth:`read` reads them back."""
        Path(path).write_text(json.dumps(self.paths()) + "\n", "utf-8")

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def width(self) -> int:
        """The most children of a node."""
        return max(self.ranks) + 1

    @property
    def is_chain(self) -> bool:
        return self == TreeShape.chain(len(self) - 1)

    def head(self, nodes: int) -> TreeShape:
        """The first ``nodes`` drafted nodes."""
        return TreeShape(self.parents[: nodes + 1], self.ranks[: nodes + 1])

    def children_of(self, node: int) -> list[int]:
        """The children of a node, by rank: as many are to be drawn, and the first drawn is the first of them."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def depths(self) -> list[int]:
        """How many nodes lie between the root and each node, itself counted."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parents[1:], 1):
            depths[node] = depths[parent] + 1
        return depths

    def survival(self, chances: Sequence[Sequence[float]]) -> list[float]:
        """The estimated chance of each node; ``chances`` as for :func:`best_first`.

        Ranks without a chance have that of the last one that has one.
        """
        survival, depths = [1.0] * len(self), self.depths()
        for node, parent in enumerate(self.parents[1:], 1):
            row = chances[min(depths[parent], len(chances) - 1)]
            survival[node] = survival[parent] * row[min(self.ranks[node], len(row) - 1)]
        return survival

    def paths(self) -> list[list[int]]:
        """For each drafted node the ranks on the way to it."""
        paths: list[list[int]] = [[]]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append([*paths[parent], rank])
        return paths[1:]


def _check_size(drafted: int) -> None:
    if drafted < 1:
        raise OptionError("has no node below its root; give it at least one, or use speculation=False to draft none.")
    if drafted >= MAX_NODES:
        raise OptionError(
            f"has {drafted} nodes below its root; a token tree has room for {MAX_NODES - 1} at most, so leave some out."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _of_paths(value: list[object]) -> tuple[list[int], list[int]]:
    """Parents and ranks from paths of ranks, in their order behind the root."""
    _check_size(len(value))
    node: dict[tuple[int, ...], int] = {(): 0}
    for entry in value:
        if not isinstance(entry, list) or not entry or not all(map(_is_count, entry)):
            raise OptionError(f"holds {entry!r} where a path of ranks is due; write it as {_FORMS}.")
        if tuple(entry) in node:
            raise OptionError(f"has the path {entry} twice; leave one of them out.")
        node[tuple(entry)] = len(node)
    parents, ranks = [-1], [0]
    for path in list(node)[1:]:
        if path[:-1] not in node:
            raise OptionError(f"has the path {list(path)} but not its parent, {list(path[:-1])}; add the parent.")
        parents.append(node[path[:-1]])
        ranks.append(path[-1])
    return parents, ranks


def _of_lists(parents: object, ranks: object) -> tuple[list[int], list[int]]:
    """Parents and ranks as they are, once each names a node and a place among siblings."""
    if not isinstance(parents, list) or not isinstance(ranks, list) or len(parents) != len(ranks):
        raise OptionError("has parents and ranks that are not two lists of one length; give both for each node.")
    _check_size(len(parents) - 1)
    if parents[0] != -1:
        raise OptionError(
            f"has a first node with the parent {parents[0]!r}; the first is the root, whose parent is -1."
        )
    for node, (parent, rank) in enumerate(zip(parents, ranks, strict=True)):
        if node and not (_is_count(parent) and parent < len(parents)):
            raise OptionError(
                f"has an orphan: node {node} names the parent {parent!r}; name one of 0 to {len(parents) - 1}."
            )
        if not _is_count(rank):
            raise OptionError(f"has a node {node} with the rank {rank!r}; ranks are whole numbers from 0.")
    return parents, ranks


def _ordered(parents: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The nodes in their order, but each behind its parent and its siblings of lower ranks.

    Raises:
        OptionError: siblings whose ranks are not 0, 1, 2 ..., or nodes that hang on each other and not on the root.
    """
    families: dict[int, dict[int, int]] = defaultdict(dict)
    for node, (parent, rank) in enumerate(zip(parents[1:], ranks[1:], strict=True), 1):
        if rank in families[parent]:
            raise OptionError(f"has two children of node {parent} with rank {rank}; give each child a rank of its own.")
        families[parent][rank] = node
    for parent, family in families.items():
        missing = next((rank for rank in range(len(family)) if rank not in family), None)
        if missing is not None:
            where = f"node {parent} has {len(family)} children and none of rank {missing}"
            raise OptionError(f"has a gap: {where}; ranks of siblings count from 0 without one.")
    order: list[int] = []
    ready = [0]
    while ready:
        node = heappop(ready)
        order.append(node)
        for after in (families[node].get(0), families[parents[node]].get(ranks[node] + 1) if node else None):
            if after is not None:
                heappush(ready, after)
    if len(order) < len(parents):
        lost = min(set(range(len(parents))) - set(order))
        raise OptionError(f"has a cycle: node {lost} does not hang on the root; let its parents lead there.")
    return order
