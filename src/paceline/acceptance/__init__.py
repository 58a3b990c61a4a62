"""The rules of acceptance that need the drafter's probabilities, and the one lossy rule, as pure functions.

Each takes a tree, the target's row after every node, the row that every parent's children were drawn from, and coins;
it gives the accepted nodes and one more token. Averaged over the drafts and the coins the tokens of the first four
have exactly the target's distribution, provided that whether a drawn token is sent to verification depends on neither
that token nor anything worked out from it: it may not be dropped, moved before an earlier sibling, or cut off because
it is unlikely. What was known before the draw may decide anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.acceptance import block, ratio, recursive, traversal, typical
from paceline.acceptance.coins import Coins, Noise
from paceline.acceptance.rows import Row, Rows, probabilities
from paceline.acceptance.rule import Outcome, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RULES", "Coins", "Noise", "Outcome", "Row", "Rows", "Rule", "probabilities"]

RULES: Mapping[str, Rule] = {
    "ratio": Rule(ratio.accept, trees=False, sampled=True, lossless="distribution"),
    "block": Rule(block.accept, trees=False, sampled=True, lossless="distribution"),
    "recursive": Rule(recursive.accept, trees=True, sampled=True, lossless="distribution"),
    "traversal": Rule(traversal.accept, trees=True, sampled=True, lossless="distribution"),
    "typical": Rule(typical.accept, trees=True, sampled=False, lossless="none"),
}
