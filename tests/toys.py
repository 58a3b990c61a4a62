"""A toy engine for exact tests: a byte tokenizer, a table for a target, and drafters that mean well or ill."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.drafters import Needs, Outcome, View
from paceline.engine import Engine
from paceline.options import Speculation
from paceline.pages import PagePool, PageTable
from paceline.request import Request, Sequence
from paceline.rules import LogitRules, bad_word_ids
from paceline.sampling import Sampling
from paceline.targets.toy import ToyTarget
from paceline.text import Detokenizer, Tokenizer
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import Drafter

EOS = 256
VOCAB = 257


def byte_tokenizer() -> Tokenizer:
    """One token a byte, id = byte, and an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: _byte_of()[letter])
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, eos_ids=(EOS,))


def _byte_of() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + place): byte for place, byte in enumerate(rest)})
    return letters


TOKENIZER = byte_tokenizer()


@dataclass
class ScriptedDrafter:
    """Proposes ``propose_next(tokens, budget)``, a chain, for each view; keeps what it observed."""

    rule: Callable[[Seq[int], int], list[int]]
    name: str = "scripted"
    needs: Needs = field(default_factory=Needs)
    observed: dict[int, list[int]] = field(default_factory=dict)

    def start(self, view: View, valid: int) -> None:
        self.observed[view.id] = []

    def fork(self, parent: int, child: View) -> None:
        self.observed[child.id] = list(self.observed[parent])

    def rewind(self, sequence: int, length: int) -> None:
        del self.observed[sequence][length:]

    def release(self, sequence: int) -> None:
        self.observed.pop(sequence, None)

    def length(self, sequence: int) -> int:
        return len(self.observed[sequence])

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            rows = self.observed[outcome.id]
            assert outcome.start == len(rows), "rows are observed once, in order"
            rows += outcome.rows

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        trees = []
        for view, budget in zip(views, budgets, strict=True):
            drafts = self.rule(view.tokens, budget)
            survival = [0.9**d for d in range(1, len(drafts) + 1)]
            trees.append(TokenTree.chain(view.tokens[-1], drafts, survival, self.name))
        return trees


def oracle(answer: Seq[int], prompt_length: int) -> Callable[[Seq[int], int], list[int]]:
    """Knows the whole answer."""

    def rule(tokens: Seq[int], budget: int) -> list[int]:
        done = len(tokens) - prompt_length
        return list(answer[done : done + budget])

    return rule


def wrong(answer: Seq[int], prompt_length: int) -> Callable[[Seq[int], int], list[int]]:
    """Knows the whole answer and says something else."""
    right = oracle(answer, prompt_length)
    return lambda tokens, budget: [(token + 1) % EOS for token in right(tokens, budget)]


class ToyRun:
    """An engine on a toy target, with requests in bytes."""

    def __init__(
        self,
        rule: Callable[[list[int]], Tensor],
        *,
        vocab: int = VOCAB,
        pages: int = 64,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 64,
        max_model_len: int = 256,
        window: int | None = None,
        lag: int = 0,
    ) -> None:
        self.target = ToyTarget(rule, vocab, max_model_len, window)
        self.pool = PagePool(self.target.groups[0], pages)
        self.max_model_len = max_model_len
        self.engine = Engine(
            self.target,
            [self.pool],
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            lag=lag,
        )

    def add(
        self,
        prompt: str | Seq[int],
        drafter: Drafter | None = None,
        *,
        speculation: dict[str, Any] | None = None,
        origins: bool = False,
        piece_limit: int = 64,
        **sampling: Any,
    ) -> Sequence:
        settings = Sampling(**{"temperature": 0.0, "seed": 0, "max_tokens": 32, **sampling})
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else list(prompt)
        length = self.max_model_len if settings.max_tokens is None else len(ids) + settings.max_tokens
        eos = set() if settings.ignore_eos else set(TOKENIZER.eos_ids)
        spec = {"num_speculative_tokens": 5, "adaptive": False, **(speculation or {})}
        request = Request(
            prompt=tuple(ids),
            sampling=settings,
            seed=settings.seed or 0,
            choice=0,
            stop_ids=frozenset({*eos, *settings.stop_token_ids}),
            limit=min(length, self.max_model_len),
            speculation=Speculation.parse(spec),
            piece_limit=piece_limit,
            origins=origins,
        )
        words = bad_word_ids(settings.bad_words, lambda text: TOKENIZER.encode(text, add_special_tokens=False))
        rules = LogitRules(settings, ids, self.target.vocab_size, TOKENIZER.eos_ids, words)
        text = Detokenizer(
            TOKENIZER,
            stop=settings.stops,
            include_stop=settings.include_stop_str_in_output,
            min_tokens=settings.min_tokens,
        )
        return self.engine.add(request, rules, text, drafter)

    def finish(self, *sequences: Sequence) -> None:
        """Step until the sequences are done, checking the cache after every step."""
        for _ in range(10_000):
            if all(sequence.finish_reason is not None for sequence in sequences):
                return
            self.engine.step()
            self.check()
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        running = self.engine.scheduler.running
        self.pool.check([table for sequence in running for table in sequence.tables])
        for sequence in running:
            assert sequence.filled in (sequence.planned, len(sequence.tokens) - 1)


def tables_of(sequences: Seq[Sequence]) -> list[PageTable]:
    return [table for sequence in sequences for table in sequence.tables]
