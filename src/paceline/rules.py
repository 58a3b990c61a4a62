"""The rules of a request that change single logits before a token is drawn."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from paceline.constraint import Constraint, Guard, TokenAutomaton
from paceline.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.sampling import Sampling


class Counts:
    """How often each token is in the output, and where a constraint is after it: a function of the committed tokens.

    A sequence keeps one and commits to it what was accepted; drafts never enter it.
    """

    def __init__(self, output_ids: Sequence[int] = (), guard: Guard | None = None) -> None:
        self.output: Counter[int] = Counter()
        self.state = None if guard is None else guard.initial()
        self._guard = guard
        self.commit(output_ids)

    def commit(self, tokens: Sequence[int]) -> None:
        """
        Raises:
            RequestError: the constraint failed; nothing is committed then.
        """
        if self._guard is not None:
            self.state = self._guard.follow(self.state, tokens)
        self.output.update(tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counts) and (self.output, self.state) == (other.output, other.state)

    __hash__ = None  # type: ignore[assignment]


class LogitRules:
    """Everything of a request that changes single logits: a pure function of the committed tokens and a path.

    Bias comes first, then penalties (vLLM's order), then what is forbidden: ids that are not allowed, words
    that would be completed, ids that end the output before ``min_tokens``, and what the constraint does not allow.

    Args:
        sampling: the request's settings.
        prompt_ids: its prompt.
        vocab_size: how many ids may be emitted; a longer row is cut, for its rest is padding.
        eos_ids: the model's end-of-text ids.
        bad_words: the ids of the words that are never completed; :func:`bad_word_ids` makes them.
        constraint: what the output must satisfy.

    Raises:
        RequestError: an id is out of range, the rules leave no token, or the constraint is none, or comes with
            ``ignore_eos``.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.words = tuple(tuple(word) for word in bad_words if word)
        eos = () if sampling.ignore_eos else eos_ids
        self.stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        self.penalized = (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )
        self._check()
        self.guard = self._guarded(constraint)
        # Those who wait are many, and their prompts long: ids are noted where they are looked at.
        self.seen = frozenset(prompt_ids if sampling.repetition_penalty != 1.0 else ())
        self.prompt = torch.tensor(sorted(i for i in self.seen if i < vocab_size), dtype=torch.int64)
        self.bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self.forbidden = self._forbidden()

    @property
    def trivial(self) -> bool:
        """No row is ever changed."""
        changes = self.penalized or self.words or self.sampling.min_tokens or self.sampling.logit_bias
        return not changes and self.sampling.allowed_token_ids is None and self.guard is None

    def counts(self, output_ids: Sequence[int] = ()) -> Counts:
        """The counts after ``output_ids``, for a sequence to keep."""
        return Counts(output_ids, self.guard)

    def apply(
        self, row: Tensor, output_ids: Sequence[int], path: Sequence[int] = (), counts: Counts | None = None
    ) -> Tensor:
        """The logits of the token that follows ``output_ids`` and ``path``.

        Args:
            row: float32 [at least vocab_size], raw logits; left as it is.
            output_ids: the committed tokens after the prompt.
            path: the drafted tokens between them and the row's token.
            counts: the sequence's counts of exactly ``output_ids``; worked out anew where left out.

        Returns:
            float32 [vocab_size]: a new tensor, or a view of ``row`` where nothing changes.
        """
        row = row[: self.vocab_size]
        if self.trivial:
            return row
        row = row.clone()
        if self.sampling.logit_bias:
            row[self.bias_ids] += self.bias
        if counts is None and (self.penalized or self.guard is not None):
            counts = self.counts(output_ids)
        if counts is not None and self.penalized:
            self._penalize(row, counts, path)
        self._forbid(row, output_ids, path)
        if counts is not None and self.guard is not None:
            self.guard.mask(row, self.guard.follow(counts.state, path))
        return row

    def _penalize(self, row: Tensor, counts: Counts, path: Sequence[int]) -> None:
        output = counts.output + Counter(path) if path else counts.output
        repetition = self.sampling.repetition_penalty
        if repetition != 1.0:
            new = torch.tensor([i for i in output if i not in self.seen], dtype=torch.int64)
            ids = torch.cat([self.prompt, new])
            seen = row[ids]
            row[ids] = torch.where(seen > 0, seen / repetition, seen * repetition)
        if output and (self.sampling.presence_penalty or self.sampling.frequency_penalty):
            ids = torch.tensor(list(output), dtype=torch.int64)
            times = torch.tensor(list(output.values()), dtype=torch.float32)
            row[ids] -= times * self.sampling.frequency_penalty
            row[ids] -= self.sampling.presence_penalty

    def _forbid(self, row: Tensor, output_ids: Sequence[int], path: Sequence[int]) -> None:
        if self.forbidden is not None:
            row[self.forbidden] = -torch.inf
        banned = [word[-1] for word in self.words if len(word) > 1 and self._ends(word[:-1], output_ids, path)]
        if len(output_ids) + len(path) < self.sampling.min_tokens:
            banned.extend(i for i in self.stop_ids if i < self.vocab_size)
        if banned:
            row[torch.tensor(banned, dtype=torch.int64)] = -torch.inf

    @staticmethod
    def _ends(start: Sequence[int], output_ids: Sequence[int], path: Sequence[int]) -> bool:
        """Whether the output and the path end with ``start``."""
        need = max(0, len(start) - len(path))
        if need > len(output_ids):
            return False
        tail = (*output_ids[len(output_ids) - need :], *path[max(0, len(path) - len(start)) :])
        return tail == tuple(start)

    def _guarded(self, constraint: Constraint | None) -> Guard | None:
        if constraint is None:
            return None
        if not isinstance(constraint, Constraint):
            raise RequestError(
                f"a constraint has the methods initial, advance, allowed and forced, unlike {constraint!r}."
            )
        if self.sampling.ignore_eos:
            raise RequestError("constraint and ignore_eos exclude each other: a constraint says where the output ends.")
        if isinstance(constraint, TokenAutomaton) and constraint.highest >= self.vocab_size:
            raise RequestError(
                f"the constraint allows token {constraint.highest}, but the model has {self.vocab_size} ids, up to "
                f"{self.vocab_size - 1}: make it with this model's tokenizer."
            )
        return Guard(constraint, self.stop_ids)

    def _forbidden(self) -> Tensor | None:
        """bool [vocab_size]: what no row may emit."""
        single = [word[0] for word in self.words if len(word) == 1]
        allowed = self.sampling.allowed_token_ids
        if allowed is None and not single:
            return None
        mask = torch.full((self.vocab_size,), allowed is not None)
        if allowed is not None:
            mask[torch.tensor(allowed, dtype=torch.int64)] = False
        if single:
            mask[torch.tensor(single, dtype=torch.int64)] = True
        if mask.all():
            raise RequestError("allowed_token_ids and bad_words leave no token; allow more or ban fewer.")
        left = set((~mask).nonzero()[:, 0].tolist())
        if self.sampling.min_tokens and left <= self.stop_ids:
            raise RequestError("min_tokens forbids all tokens that are allowed; allow more, or lower it.")
        return mask

    def _check(self) -> None:
        named = {
            "logit_bias": self.sampling.logit_bias,
            "stop_token_ids": self.sampling.stop_token_ids,
            "allowed_token_ids": self.sampling.allowed_token_ids or (),
        }
        for name, ids in named.items():
            for i in ids:
                if i >= self.vocab_size:
                    raise RequestError(f"{name} names token {i}, but the model's ids end at {self.vocab_size - 1}.")


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """The ids of each word, as it stands after a space and as it stands without one (as vLLM encodes them).

    Args:
        words: what ``Sampling.bad_words`` holds.
        encode: text to ids, without special tokens.
    """
    forms = [tuple(encode(lead + word.lstrip(" "))) for word in words for lead in ("", " ")]
    return [form for form in dict.fromkeys(forms) if form]
