"""Many short answers of a tiny target, and whether they are drawn from what it says."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING

import torch

from tests.decoders import Cache, piece
from tests.toys import ToyRun, path_rule

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.drafters import Drafter
    from paceline.request import Sequence
    from paceline.targets.decoder import Decoder

PROMPT = [1, 0, 3, 2, 2]
LENGTH = 3
_FAR = 6.0  # standard deviations; with right answers one run in a billion is that far off


def emitted_under(rule: str, target: Decoder, drafter: Drafter, count: int) -> list[Sequence]:
    """Answers of ``LENGTH`` tokens at temperature 1 to one prompt, each with a seed of its own, many at once."""
    run = ToyRun(path_rule(1), target=target, vocab=target.vocab_size, pages=512, max_num_seqs=50, max_model_len=64)
    speculation = {"num_speculative_tokens": 4, "rule": rule}
    sequences = [
        run.add(PROMPT, drafter, eos=(), max_tokens=LENGTH, temperature=1.0, seed=seed, speculation=speculation)
        for seed in range(count)
    ]
    run.finish(*sequences)
    return sequences


def assert_drawn_from(target: Decoder, sequences: Seq[Sequence]) -> None:
    """By chi-square over all answers that there are: about 30 of 1,500 in the wrong place would show."""
    counts = Counter(tuple(sequence.output) for sequence in sequences)
    found, cells = 0.0, 0
    for answer in product(range(target.vocab_size), repeat=LENGTH):
        chances = Cache(target).run(piece(0, [*PROMPT, *answer])).logits.softmax(1)
        rows = chances[len(PROMPT) - 1 : -1]
        expected = float(rows[torch.arange(LENGTH), list(answer)].prod()) * len(sequences)
        found += (counts[answer] - expected) ** 2 / expected
        cells += 1
    free = cells - 1
    assert (found - free) / (2 * free) ** 0.5 < _FAR
