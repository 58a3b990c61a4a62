"""What a pass did to a sequence, as drafters are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.drafters import Outcome
from paceline.kernels import sample

if TYPE_CHECKING:
    from paceline.plan import Piece
    from paceline.request import Sequence
    from paceline.targets import Scores
    from paceline.tree import TokenTree
    from paceline.verify import Verdict


def features(sequence: Sequence) -> tuple[int, ...]:
    """The layers whose input the sequence's drafter wants."""
    return sequence.drafter.needs.features if sequence.drafter else ()


def of_tree(sequence: Sequence, tree: TokenTree, verdict: Verdict, scores: Scores, row: int) -> Outcome:
    rows = [row + node for node in verdict.path]
    return Outcome(
        id=sequence.id,
        start=sequence.filled - len(rows),
        rows=[tree.tokens[node] for node in verdict.path],
        accepted=len(rows) - 1,
        token=verdict.tokens[-1],
        features={layer: scores.features[layer][rows] for layer in features(sequence)},
        scored=_scored(sequence, tree, scores, row),
    )


def of_piece(piece: Piece, scores: Scores, row: int) -> Outcome:
    sequence, end = piece.sequence, piece.start + piece.rows
    return Outcome(
        id=sequence.id,
        start=piece.start,
        rows=sequence.tokens[piece.start : end],
        accepted=0,
        token=sequence.tokens[end] if end < len(sequence.tokens) else None,
        features={layer: scores.features[layer][row : row + piece.rows] for layer in features(sequence)},
    )


def _scored(sequence: Sequence, tree: TokenTree, scores: Scores, row: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """Each scored row's path below the root and its best ids, where the drafter declares top-k."""
    top = sequence.drafter.needs.top_k if sequence.drafter else 0
    if not top:
        return []
    best: list[list[int]] = sample.top(scores.logits[row : row + len(tree)], top).tolist()
    return [(tuple(tree.tokens[n] for n in tree.path(node)[1:]), best[node]) for node in range(len(tree))]
