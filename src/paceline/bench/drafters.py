"""Drafters that serve measuring and verifying alone: an oracle, a mixture with it, and one that is never right."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from paceline.constraint import TokenAutomaton
from paceline.drafters import Needs
from paceline.tree import MAX_NODES, TokenTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.drafters import Drafter, Outcome, View

_SURVIVAL = 0.8
_LOTS = 64
_APART = 8  # tokens from one place where a constrained answer may vary to the next


def chance(*key: object) -> float:
    """A number in [0, 1) that is a fixed function of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big") / 2**48


def spoiled(answer: Sequence[int], vocab_size: int, wrong: float, seed: int, key: object) -> list[int]:
    """An answer with some of its tokens swapped for others.

    Args:
        vocab_size: the others are ids below it.
        wrong: the share of wrong tokens, 0 to 1; which ones is a fixed function of ``seed``, ``key`` and their place.
    """
    return [
        token if chance(seed, "wrong", key, place) >= wrong else _other(token, vocab_size, seed, place)
        for place, token in enumerate(answer)
    ]


def _other(token: int, vocab_size: int, seed: int, place: int) -> int:
    return (token + 1 + int(chance(seed, "instead", place) * (vocab_size - 1))) % vocab_size


def variations(answer: Sequence[int], vocab_size: int, eos: Sequence[int]) -> TokenAutomaton:
    """The language of an answer, and of the same with one token in eight swapped for another, one at a time."""
    text = [token for token in answer if token not in eos]
    texts = [text]
    for place in range(0, len(text), _APART):
        other = _other(text[place], vocab_size, 0, place)
        if other not in eos:
            texts.append([*text[:place], other, *text[place + 1 :]])
    return TokenAutomaton.from_texts(texts, eos)


def _fading(root: int, drafts: Sequence[int], origin: str) -> TokenTree:
    """The drafts one after another below the root, each somewhat less likely to survive than the one before."""
    survival = [_SURVIVAL**depth for depth in range(1, len(drafts) + 1)]
    return TokenTree.chain(root, list(drafts), survival, origin)


class _Stateless:
    """The part of the protocol that a drafter without a state of its own leaves empty."""

    needs = Needs()

    def start(self, view: View, valid: int) -> None:
        """Nothing is kept."""

    def fork(self, parent: int, child: View) -> None:
        """Nothing is kept."""

    def rewind(self, sequence: int, length: int) -> None:
        """Nothing is kept."""

    def release(self, sequence: int) -> None:
        """Nothing is kept."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing is learned."""

    def length(self, sequence: int) -> int:
        return 0


class OracleDrafter(_Stateless):
    """Knows the answer to every prompt, and says something else for a share of the tokens.

    Args:
        answers: the answer's ids, by the prompt's ids.
        vocab_size: ids below it may be proposed.
        wrong: the share of wrong tokens, 0 to 1; which ones is a fixed function of ``seed`` and their place.
    """

    name = "oracle"

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], vocab_size: int, wrong: float = 0.5, seed: int = 0
    ) -> None:
        self._answers = {
            prompt: spoiled(answer, vocab_size, wrong, seed, prompt[-8:]) for prompt, answer in answers.items()
        }
        self._prompts: dict[int, tuple[int, ...]] = {}

    def start(self, view: View, valid: int) -> None:
        self._prompts[view.id] = tuple(view.tokens)

    def fork(self, parent: int, child: View) -> None:
        self._prompts[child.id] = self._prompts[parent]

    def release(self, sequence: int) -> None:
        self._prompts.pop(sequence, None)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: View, budget: int) -> TokenTree:
        prompt = self._prompts[view.id]
        done = len(view.tokens) - len(prompt)
        known = self._answers.get(prompt, [])[done : done + budget]
        return _fading(view.tokens[-1], known, self.name)


class MixedDrafter:
    """A drafter half of whose proposals are swapped for another's.

    The inner drafter proposes every time, so that it does the same work and keeps the same state as on its own.
    """

    def __init__(self, inner: Drafter, other: Drafter) -> None:
        self.name = inner.name
        self.needs = inner.needs
        self._inner = inner
        self._other = other

    def start(self, view: View, valid: int) -> None:
        self._inner.start(view, valid)
        self._other.start(view, valid)

    def fork(self, parent: int, child: View) -> None:
        self._inner.fork(parent, child)
        self._other.fork(parent, child)

    def rewind(self, sequence: int, length: int) -> None:
        self._inner.rewind(sequence, length)
        self._other.rewind(sequence, length)

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)
        self._other.release(sequence)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        both = zip(views, self._inner.propose(views, budgets), self._other.propose(views, budgets), strict=True)
        return [other if chance("swap", len(view.tokens)) < 0.5 else own for view, own, other in both]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe(outcomes)
        self._other.observe(outcomes)

    def length(self, sequence: int) -> int:
        return self._inner.length(sequence)


class BlindDrafter(_Stateless):
    """A chain of as many tokens as it may propose, taken by lot: a step of a known number of rows."""

    name = "blind"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._lots = random.Random(seed).choices(range(vocab_size), k=MAX_NODES * _LOTS)

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[TokenTree]:
        return [self._chain(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _chain(self, view: View, budget: int) -> TokenTree:
        at = len(view.tokens) % _LOTS * MAX_NODES
        return _fading(view.tokens[-1], self._lots[at : at + budget], self.name)
