"""A toy engine for exact tests: a byte tokenizer, a table for a target, and drafters that mean well or ill."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from hypothesis import HealthCheck, settings
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.bounds import Bounds
from paceline.drafters import Needs, Outcome, View
from paceline.engine import Engine
from paceline.options import Speculation
from paceline.pages import PAGE, CacheGroup, PagePool, Slab
from paceline.request import Request, Sequence
from paceline.rules import LogitRules, bad_word_ids
from paceline.sampling import Sampling
from paceline.targets import Scores
from paceline.targets.toy import ToyTarget
from paceline.text import Detokenizer, Tokenizer
from paceline.tree import Drawn, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.batch import Batch
    from paceline.constraint import Constraint
    from paceline.drafters import Drafter
    from paceline.pacer import Pacer
    from paceline.targets import Target

EOS = 256
VOCAB = 257


def trials(examples: int) -> settings:
    """So many examples, the same ones in every run, however busy the machine is."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )


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


def drafts_that_change_nothing(
    drafter: Drafter, rule: Callable[[list[int]], Tensor], temperature: float, lag: int
) -> tuple[int, int]:
    """Three requests at once, again and again with more drafts, so that what the drafter learns is used: every answer
    is the plain one. Token 0 is one like any other.

    Returns:
        How many drafts were accepted, and how many not.
    """
    prompts = [[0], [5, 6, 7, 5, 6], [0, 0, 9] * 20]
    options: dict[str, Any] = {"temperature": temperature, "max_tokens": 50, "ignore_eos": True}
    expected = [alone(rule, prompt, seed=n, **options) for n, prompt in enumerate(prompts)]
    run = ToyRun(rule, lag=lag)
    accepted = missed = 0
    for budget in (1, 5, 63):
        speculation = {"num_speculative_tokens": budget}
        sequences = [
            run.add(prompt, drafter, seed=n, speculation=speculation, **options) for n, prompt in enumerate(prompts)
        ]
        run.finish(*sequences)
        for sequence, reference in zip(sequences, expected, strict=True):
            same(sequence, reference)
            accepted += sequence.record.accepted
            missed += sequence.record.drafted - sequence.record.accepted
    run.check_empty()
    return accepted, missed


def no_draw(
    rows: Tensor,
    paths: Seq[Seq[int]],
    count: int = 1,
    *,
    nodes: Seq[int] = (0,),
    ids: Tensor | None = None,
) -> list[Drawn]:
    """The draw of a view whose drafter draws nothing."""
    raise AssertionError("this drafter has no logits to draw from")


@dataclass
class ScriptedDrafter:
    """Proposes ``propose_next(tokens, budget)``, a chain, for each view; keeps what it observed."""

    rule: Callable[[Seq[int], int], list[int]]
    name: str = "scripted"
    needs: Needs = field(default_factory=Needs)
    observed: dict[int, list[int]] = field(default_factory=dict)

    def start(self, view: View, valid: int) -> None:
        self.observed[view.id] = list(view.tokens[:valid])

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


@dataclass
class TreeDrafter:
    """Proposes ``rule(tokens, budget)``, any tree at all; observes nothing."""

    rule: Callable[[Seq[int], int], TokenTree]
    name: str = "tree"
    needs: Needs = field(default_factory=Needs)
    known: set[int] = field(default_factory=set)

    def start(self, view: View, valid: int) -> None:
        self.known.add(view.id)

    def fork(self, parent: int, child: View) -> None:
        self.known.add(child.id)

    def rewind(self, sequence: int, length: int) -> None:
        assert sequence in self.known

    def release(self, sequence: int) -> None:
        self.known.discard(sequence)

    def length(self, sequence: int) -> int:
        return 0

    def observe(self, outcomes: Seq[Outcome]) -> None:
        assert all(outcome.id in self.known for outcome in outcomes)

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        return [self.rule(view.tokens, budget) for view, budget in zip(views, budgets, strict=True)]


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


def mix(answer: Seq[int], prompt_length: int, right: float, seed: int = 0) -> Callable[[Seq[int], int], list[int]]:
    """Knows the whole answer and says each token of it with probability ``right``, else another one."""
    dice = random.Random(seed)

    def rule(tokens: Seq[int], budget: int) -> list[int]:
        true = oracle(answer, prompt_length)(tokens, budget)
        return [token if dice.random() < right else (token + 1) % EOS for token in true]

    return rule


def random_tree(
    dice: random.Random,
    root: int,
    right: Seq[int],
    budget: int,
    *,
    width: int,
    depth: int,
    vocab: int,
    name: str = "tree",
) -> TokenTree:
    """A valid tree of at most ``budget`` drafted nodes in any order; now and then a child continues ``right``."""
    tree = TokenTree.root(root)
    depths = [0]
    for _ in range(budget):
        parent = dice.randrange(len(tree)) if dice.random() < 0.5 else len(tree) - 1
        taken = {tree.tokens[child] for child in tree.children(parent)}
        if depths[parent] == depth or len(taken) == width:
            continue
        on_path = depths[parent] < len(right) and [tree.tokens[n] for n in tree.path(parent)[1:]] == list(
            right[: depths[parent]]
        )
        token = right[depths[parent]] if on_path and dice.random() < 0.7 else dice.randrange(vocab)
        if token not in taken:
            tree.add(parent, token, tree.survival[parent] * dice.random(), name)
            depths.append(depths[parent] + 1)
    return tree


def path_rule(
    vocab: int, seed: int = 0, spread: float = 4.0, memory: int | None = None
) -> Callable[[list[int]], Tensor]:
    """Random logits that depend on every token of the path and its length, or on the last ``memory`` tokens alone."""
    rows = torch.randn(509, vocab, generator=torch.Generator().manual_seed(seed)) * spread

    def rule(path: list[int]) -> Tensor:
        key = seed if memory else len(path) + 1
        for token in path[-memory:] if memory else path:
            key = (key * 1_000_003 + token + 1) % (2**31 - 1)
        return rows[key % 509]

    return rule


class StrictTarget(ToyTarget):
    """A toy that also proves what a batch promises: positions, unmapped pages never touched, no row written twice."""

    def forward(self, batch: Batch, slabs: Seq[Slab], features: Seq[int] = ()) -> Scores:
        window, score, starts = self.groups[0].window, batch.score.tolist(), batch.starts.tolist()
        assert score == sorted(set(score))
        assert starts == sorted(set(starts))
        rows = [t.tolist() for t in (batch.storage, batch.context, batch.visible, batch.positions)]
        written: set[tuple[int, int]] = set()
        for segment, mapped in enumerate(batch.tables[0].tolist()):
            for row in range(starts[segment], starts[segment + 1]):
                storage, context, word, position = (values[row] for values in rows)
                bits = [context + bit for bit in range(64) if word >> bit & 1]
                assert position == context + len(bits) - 1 < self.max_positions
                assert storage == (bits or [context - 1])[-1]
                first = 0 if window is None else max(0, position + 1 - window)
                assert all(page >= 0 for page in mapped[first // PAGE : -(-context // PAGE)])
                assert all(mapped[place // PAGE] >= 0 for place in bits)
                place = (mapped[storage // PAGE], storage % PAGE)
                assert place not in written
                written.add(place)
        return super().forward(batch, slabs, features)


class PairTarget:
    """A toy with two cache groups, one with a window: rows are scored by what each of the two holds of their path."""

    def __init__(self, rule: Callable[[list[int]], Tensor], vocab_size: int, max_positions: int, window: int) -> None:
        self._local = StrictTarget(rule, vocab_size, max_positions, window)
        self._whole = StrictTarget(rule, vocab_size, max_positions)
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.groups: tuple[CacheGroup, ...] = (*self._whole.groups, *self._local.groups)

    def forward(self, batch: Batch, slabs: Seq[Slab], features: Seq[int] = ()) -> Scores:
        whole = self._whole.forward(batch, slabs[:1], features)
        local = self._local.forward(_second_table(batch), slabs[1:], features)
        return Scores(whole.logits + local.logits.roll(1, dims=1), whole.hidden, whole.features)


def _second_table(batch: Batch) -> Batch:
    fields = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return type(batch)(**{**fields, "tables": batch.tables[1:]})


class Clock:
    """A clock that stands still but for what is charged to it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Timed:
    """A target whose passes take ``cost(rows)`` seconds of the clock, and do what ``inner`` does."""

    inner: Target
    clock: Clock
    cost: Callable[[int], float]

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def max_positions(self) -> int:
        return self.inner.max_positions

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return self.inner.groups

    def forward(self, batch: Batch, slabs: Seq[Slab], features: Seq[int] = ()) -> Scores:
        self.clock.now += self.cost(batch.rows)
        return self.inner.forward(batch, slabs, features)


class ToyRun:
    """An engine on a toy target, with requests in bytes or ids."""

    def __init__(
        self,
        rule: Callable[[list[int]], Tensor],
        *,
        vocab: int = VOCAB,
        pages: int | tuple[int, ...] = 64,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 64,
        max_model_len: int = 256,
        window: int | None = None,
        lag: int = 0,
        pacer: Pacer | None = None,
        clock: Clock | None = None,
        target: Target | None = None,
        prefix_caching: bool = True,
        **bounds: Any,
    ) -> None:
        self.target = target or StrictTarget(rule, vocab, max_model_len, window)
        sizes = pages if isinstance(pages, tuple) else (pages,) * len(self.target.groups)
        self.pools = [PagePool(group, size) for group, size in zip(self.target.groups, sizes, strict=True)]
        self.pool = self.pools[0]
        self.max_model_len = max_model_len
        self.engine = Engine(
            self.target,
            self.pools,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            lag=lag,
            pacer=pacer,
            prefix_caching=prefix_caching,
            bounds=Bounds(**bounds),
            clock=clock or time.perf_counter,
        )

    def add(
        self,
        prompt: str | Seq[int],
        drafter: Drafter | None = None,
        *,
        speculation: dict[str, Any] | None = None,
        origins: bool = False,
        piece_limit: int = 64,
        choice: int = 0,
        eos: tuple[int, ...] = (EOS,),
        constraint: Constraint | None = None,
        prediction: Seq[int] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        leader: Sequence | None = None,
        **sampling: Any,
    ) -> Sequence:
        settings = Sampling(**{"temperature": 0.0, "seed": 0, "max_tokens": 32, **sampling})
        ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else list(prompt)
        length = self.max_model_len if settings.max_tokens is None else len(ids) + settings.max_tokens
        eos = tuple(token for token in eos if token < self.target.vocab_size)
        request = Request(
            prompt=tuple(ids),
            sampling=settings,
            seed=settings.seed or 0,
            choice=choice,
            stop_ids=frozenset({*(() if settings.ignore_eos else eos), *settings.stop_token_ids}),
            limit=min(length, self.max_model_len),
            speculation=Speculation.parse({"num_speculative_tokens": 5, "adaptive": False, **(speculation or {})}),
            piece_limit=piece_limit,
            origins=origins,
            prediction=tuple(prediction),
            constraint=constraint,
            priority=priority,
            cache_salt=cache_salt,
        )
        words = bad_word_ids(settings.bad_words, lambda text: TOKENIZER.encode(text, add_special_tokens=False))
        rules = LogitRules(settings, ids, self.target.vocab_size, eos, words, constraint)
        text = Detokenizer(
            TOKENIZER,
            stop=settings.stops,
            include_stop=settings.include_stop_str_in_output,
            min_tokens=settings.min_tokens,
        )
        return self.engine.add(request, rules, text, drafter, leader)

    def finish(self, *sequences: Sequence) -> None:
        """Step until the sequences are done, checking the cache after every step."""
        for _ in range(10_000):
            if all(sequence.finish_reason is not None for sequence in sequences):
                return
            self.engine.step()
            self.check()
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        """What must hold between any two steps."""
        self.engine.scheduler.check()
        for sequence in self.engine.scheduler.running:
            assert sequence.filled in (sequence.planned, len(sequence.tokens) - 1)
            assert sequence.delivered <= len(sequence.tokens) <= sequence.reach
            assert sequence.reach <= max(sequence.request.limit, sequence.prompt_length + 1)

    def check_empty(self) -> None:
        """Nothing of what came and went is left."""
        while not self.engine.idle:
            self.engine.step()
        assert [pool.free for pool in self.pools] == [pool.pages for pool in self.pools]
        self.engine.scheduler.check()
        gate = self.engine.scheduler.gate
        assert (gate._there, gate._tokens, len(gate._since)) == (0, 0, 0)
        assert not self.engine.pacer._states


def alone(
    rule: Callable[[list[int]], Tensor],
    prompt: str | Seq[int],
    *,
    window: int | None = None,
    vocab: int = VOCAB,
    target: Target | None = None,
    max_model_len: int = 256,
    **sampling: Any,
) -> Sequence:
    """The request by itself and without speculation, its prompt in one piece where it fits."""
    run = ToyRun(rule, window=window, vocab=vocab, target=target, max_model_len=max_model_len, max_batch_tokens=256)
    sequence = run.add(prompt, piece_limit=256, **sampling)
    run.finish(sequence)
    run.check_empty()
    return sequence


def same(sequence: Sequence, reference: Sequence) -> None:
    """The two answers are equal in all that a user sees."""
    assert sequence.output == reference.output
    assert sequence.text.text == reference.text.text
    assert sequence.finish_reason == reference.finish_reason
    assert sequence.text.token_offsets == reference.text.token_offsets
    assert sequence.logprobs == reference.logprobs
    assert sequence.prompt_logprobs == reference.prompt_logprobs
