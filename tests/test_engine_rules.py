"""Tier 1 of the rules: whole answers of the engine, drafted by a table that draws, against the target's own table.

Under the rules that need the drafter's probabilities answers have exactly the target's distribution, and drafts and
drafters that break this are caught.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.acceptance import Noise
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.noise import gumbels, noise_key
from paceline.options import Speculation
from paceline.pages import PagePool
from paceline.request import Request
from paceline.rules import LogitRules
from paceline.sampling import Sampling
from paceline.shape import TreeShape
from paceline.targets.toy import ToyTarget
from paceline.text import Detokenizer
from paceline.tree import Drawn, TokenTree
from tests.test_acceptance_noise import shares_its_number_with_the_coin
from tests.test_engine_coupled import fits
from tests.toys import TOKENIZER, Clock, Timed, ToyRun, TreeDrafter, path_rule

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from paceline.drafters import Drafter, View
    from paceline.request import Sequence

VOCAB, COUNT = 4, 3
PROMPT = [0, 1, 0]
TARGET, DRAFT = path_rule(VOCAB, seed=111, spread=0.7), path_rule(VOCAB, seed=112, spread=1.0)
CHAIN, TREE = TreeShape.chain(3), TreeShape.parse([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
SHAPES = {"ratio": CHAIN, "block": CHAIN, "recursive": TREE, "traversal": TREE}
SEEDS = 2000
WRONG_SEEDS = 600


def any_draft(drawn: Drawn) -> Drawn:
    return drawn


@dataclass
class TableDrafter(TreeDrafter):
    """Fills a shape with draws from a table; ``change`` does something to what was drawn below each node."""

    rule: Any = None
    table: Callable[[list[int]], Tensor] = DRAFT
    shape: TreeShape = TREE
    change: Callable[[Drawn], Drawn] = any_draft
    name: str = "table"
    calls: int = 0

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        self.calls += 1
        return [self.tree(view, self.shape.head(budget)) for view, budget in zip(views, budgets, strict=True)]

    def tree(self, view: View, shape: TreeShape) -> TokenTree:
        tree, place = TokenTree.root(view.tokens[-1]), {0: 0}
        for node in range(len(shape)):
            wanted = shape.children_of(node)
            if wanted and node in place:
                above = place[node]
                path = [tree.tokens[n] for n in tree.path(above)[1:]]
                drawn = view.draw(self.table([*view.tokens, *path])[None], [path], len(wanted), nodes=[above])[0]
                place.update(zip(wanted, tree.grow(above, self.change(drawn), self.name), strict=False))
        return tree


def arena(**engine: Any) -> ToyRun:
    settings: dict[str, Any] = {"pages": 600, "max_num_seqs": 256, "max_batch_tokens": 1024, "max_model_len": 32}
    return ToyRun(TARGET, **{"target": ToyTarget(TARGET, VOCAB, 32), "vocab": VOCAB, **settings, **engine})


def add(run: ToyRun, speculation: Speculation, drafter: Drafter | None, seed: int | None, **options: Any) -> Sequence:
    """What ``ToyRun.add`` does, with a speculation that is read once for thousands of requests."""
    choice, limit = options.pop("choice", 0), options.pop("max_tokens", 12)
    settings = Sampling(**{"temperature": 1.0, "seed": seed, "max_tokens": limit, "ignore_eos": True, **options})
    request = Request(
        prompt=tuple(PROMPT),
        sampling=settings,
        seed=seed or 0,
        choice=choice,
        stop_ids=frozenset(),
        limit=len(PROMPT) + limit,
        speculation=speculation,
        piece_limit=64,
    )
    return run.engine.add(request, LogitRules(settings, PROMPT, VOCAB), Detokenizer(TOKENIZER), drafter)


def speculate(rule: str, **options: Any) -> Speculation:
    return Speculation.parse({"rule": rule, "num_speculative_tokens": 6, "adaptive": False, **options})


def answers(
    rule: str, drafter: Drafter | None, seeds: int, *, steps: int | None = None, **options: Any
) -> list[Sequence]:
    """Requests with seeds 0, 1 ..., stopped after ``COUNT`` tokens, or after so many steps beyond the prompt's."""
    run, speculation = arena(), speculate(rule)
    sequences = [add(run, speculation, drafter, seed, **options) for seed in range(seeds)]
    while not run.engine.idle:
        for sequence in run.engine.step():
            done = sequence.record.steps if steps else len(sequence.output)
            if done >= (steps or COUNT):
                run.engine.cancel(sequence)
    run.check_empty()
    return sequences


def counted(sequences: Seq[Sequence]) -> Counter[tuple[int, ...]]:
    assert all(sequence.error is None for sequence in sequences)
    return Counter(tuple(sequence.output[:COUNT]) for sequence in sequences)


def row_of(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> list[float]:
    """Probabilities, the plain way."""
    row = torch.softmax(logits.double() / temperature, 0).tolist()
    mass, kept = 0.0, [0.0] * len(row)
    for token in sorted(range(len(row)), key=lambda t: -row[t]):
        kept[token] = row[token]
        mass += row[token]
        if mass >= top_p:
            break
    return [share / mass for share in kept]


def joint(count: int = COUNT, frequency_penalty: float = 0.0, **filters: float) -> dict[tuple[int, ...], float]:
    """The target's probability of every answer of ``count`` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for answer, probability in found.items():
            uses = torch.tensor([float(answer.count(token)) for token in range(VOCAB)])
            row = row_of(TARGET([*PROMPT, *answer]) - frequency_penalty * uses, **filters)
            longer.update({(*answer, t): probability * share for t, share in enumerate(row) if share})
        found = longer
    return found


# What the tests can find.


def chi_square_tail(freedom: int, limit: float) -> float:
    """P(chi-square > limit)."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(limit / 2).double()))


def power(requests: int, cells: int, distance: float) -> float:
    """The least chance that ``fits`` says no where answers are ``distance`` in total variation off.

    The statistic is then noncentral: a mixture of chi-squares whose freedom grows by two a Poisson step. Its parameter
    is n sum d^2 / p, which is at least n (sum |d|)^2 = 4 n TV^2 whatever the cells (Cauchy and Schwarz).
    """
    freedom = cells - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.29 * math.sqrt(2 / (9 * freedom))) ** 3
    half = 2 * requests * distance**2
    weights = (math.exp(j * math.log(half) - half - math.lgamma(j + 1)) for j in range(int(4 * half) + 60))
    return sum(weight * chi_square_tail(freedom + 2 * j, limit) for j, weight in enumerate(weights))


def test_the_stated_power() -> None:
    """Size 5e-4 over the 64 answers of 3 tokens out of 4. With 2,000 requests a total variation of 0.10 is found in at
    least 95 of 100 cases, with 20,000 one of 0.031; with 600, which look for wrong variants, 0.19.

    What is too rare to be a cell of its own makes one together: with 2,000 requests that is one answer of the 64.
    """
    assert chi_square_tail(63, 63 * (1 - 2 / 567 + 3.29 * math.sqrt(2 / 567)) ** 3) == pytest.approx(5e-4, rel=0.05)
    for requests, distance in ((SEEDS, 0.10), (20_000, 0.031), (WRONG_SEEDS, 0.19)):
        assert power(requests, VOCAB**COUNT, distance) > 0.95
        assert power(requests, VOCAB**COUNT, 0.8 * distance) < 0.95
    rare = [share for share in joint().values() if share * SEEDS < 5]
    assert len(rare) == 1
    assert 0.0005 < sum(rare) < 0.001


# Distributions.


def drafting(rule: str, change: Callable[[Drawn], Drawn] = any_draft) -> TableDrafter:
    return TableDrafter(shape=SHAPES.get(rule, TREE), change=change)


@pytest.mark.parametrize("rule", SHAPES)
def test_answers_have_the_targets_distribution(rule: str) -> None:
    sequences = answers(rule, drafting(rule), SEEDS)
    assert fits(counted(sequences), joint())
    depths = [sum(s.record.accepted_at[d] for s in sequences if len(s.record.accepted_at) > d) for d in range(2)]
    assert min(depths) > SEEDS / 20
    assert sum(s.record.drafted - s.record.accepted for s in sequences) > SEEDS / 2


FILTERS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.7}


@pytest.mark.parametrize("rule", SHAPES)
def test_answers_have_the_targets_distribution_after_the_requests_rules(rule: str) -> None:
    """The penalty counts drafted tokens, and top-p leaves other tokens out of the rows of target and drafter."""
    counts = counted(answers(rule, drafting(rule), SEEDS // 2, **FILTERS))
    assert fits(counts, joint(**FILTERS))
    for name in FILTERS:
        assert not fits(counts, joint(**{key: value for key, value in FILTERS.items() if key != name}))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, FILTERS], ids=["raw", "filters"])
@pytest.mark.parametrize("rule", SHAPES)
def test_answers_have_the_targets_distribution_closely(rule: str, options: dict[str, Any]) -> None:
    assert fits(counted(answers(rule, drafting(rule), 20_000, **options)), joint(**options))


@pytest.mark.parametrize(("rule", "tree"), [("block", 1), ("recursive", 2), ("traversal", TREE)])
def test_answers_drafted_by_a_draft_model_have_the_targets_distribution(rule: str, tree: int | TreeShape) -> None:
    model = ToyTarget(DRAFT, VOCAB, 32)
    drafter = DraftModelDrafter(model, [PagePool(group, 1200) for group in model.groups], 32, tree=tree)
    sequences = answers(rule, drafter, WRONG_SEEDS)
    assert fits(counted(sequences), joint())
    assert sum(s.record.accepted for s in sequences) > WRONG_SEEDS / 2


def takes_the_likeliest_and_reports_what_it_would_have_drawn_from(drawn: Drawn) -> Drawn:
    q = drawn.q
    assert q is not None
    tokens = sorted(q.nonzero()[0].tolist(), key=lambda token: -q[token])[: len(drawn.tokens)]
    return replace(drawn, tokens=tokens)


def drops_weak_tokens(drawn: Drawn) -> Drawn:
    assert drawn.q is not None
    tokens = [token for token in drawn.tokens if drawn.q[token] >= 0.25]
    return replace(drawn, tokens=tokens, chances=drawn.chances[: len(tokens)])


def sorts_siblings(drawn: Drawn) -> Drawn:
    q = drawn.q
    assert q is not None
    return replace(drawn, tokens=sorted(drawn.tokens, key=lambda token: -q[token]))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        *((takes_the_likeliest_and_reports_what_it_would_have_drawn_from, rule) for rule in SHAPES),
        *((drops_weak_tokens, rule) for rule in SHAPES),
        *((sorts_siblings, rule) for rule in ("recursive", "traversal")),
    ],
)
def test_a_wrong_draft_is_caught(change: Callable[[Drawn], Drawn], rule: str) -> None:
    assert not fits(counted(answers(rule, drafting(rule, change), WRONG_SEEDS)), joint())


@pytest.mark.parametrize("rule", SHAPES)
def test_coins_from_the_noise_of_draws_are_caught(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "children", shares_its_number_with_the_coin)
    assert not fits(counted(answers(rule, drafting(rule), 1000)), joint())


@pytest.mark.parametrize("change", [takes_the_likeliest_and_reports_what_it_would_have_drawn_from, drops_weak_tokens])
def test_what_is_wrong_under_those_rules_is_right_under_coupled(change: Callable[[Drawn], Drawn]) -> None:
    """Whatever is done to drafts, the tokens are those of plain decoding."""

    def changed(drawn: Drawn) -> Drawn:
        shares = torch.tensor([0.1, 0.4, 0.2, 0.3]).numpy()
        return replace(change(replace(drawn, q=shares)), q=None)

    drafted = answers("coupled", drafting("coupled", changed), 60)
    plain = answers("coupled", None, 60)
    assert [s.output[:COUNT] for s in drafted] == [s.output[:COUNT] for s in plain]
    assert sum(s.record.accepted for s in drafted) > 20


# Acceptance.


def within(found: int, of: int, chance: float) -> bool:
    """Four standard deviations of a binomial, and one for its steps."""
    return abs(found - of * chance) <= 4 * math.sqrt(of * chance * (1 - chance)) + 1


def test_acceptance_of_a_chain_under_ratio_is_the_overlap_of_the_rows() -> None:
    """At each place, once reached, the sum of min(p, q); the first token is drawn from the prompt's row."""
    sequences = answers("ratio", drafting("ratio"), 1500, steps=1)
    accepted = [sum(s.record.accepted_at[d] for s in sequences if len(s.record.accepted_at) > d) for d in range(3)]
    reached = [sum(s.record.reached[d] for s in sequences if len(s.record.reached) > d) for d in range(3)]
    prefixes: dict[tuple[int, ...], float] = {(token,): share for token, share in enumerate(row_of(TARGET(PROMPT)))}
    arrived = 1.0
    for depth in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, weight in prefixes.items():
            rows = (row_of(table([*PROMPT, *prefix])) for table in (TARGET, DRAFT))
            for token, (p, q) in enumerate(zip(*rows, strict=True)):
                longer[(*prefix, token)] = weight * min(p, q)
        prefixes, before, arrived = longer, arrived, sum(longer.values())
        assert within(accepted[depth], reached[depth], arrived / before)
        assert within(accepted[depth], 1500, arrived)
        assert depth or not within(accepted[depth], 1500, arrived * 0.85)


def test_acceptance_of_a_chain_under_coupled_is_what_the_noise_says() -> None:
    """With the same noise for both tables each request accepts as many drafts as their choices agree, one for one."""

    def choice(table: Callable[[list[int]], Tensor], seed: int, answer: list[int]) -> int:
        noise = gumbels(noise_key(seed), len(PROMPT) + len(answer), torch.arange(VOCAB))
        return int((torch.log_softmax(table([*PROMPT, *answer]).double(), 0) + noise).argmax())

    drafter = TableDrafter(shape=CHAIN)
    for seed, sequence in enumerate(answers("coupled", drafter, 300, steps=1)):
        answer = [choice(TARGET, seed, [])]
        while len(answer) < 4 and (token := choice(TARGET, seed, answer)) == choice(DRAFT, seed, answer):
            answer.append(token)
        assert sequence.record.accepted == len(answer) - 1
        assert sequence.output[: len(answer)] == answer


# What a rule promises.

ALL = ["coupled", *SHAPES, "typical"]


def long_answer(rule: str, drafter: Drafter | None, seed: int | None = 5, lag: int = 0, **options: Any) -> Sequence:
    run = arena(lag=lag)
    spoken = speculate(rule, **options.pop("speculation", {}))
    sequence = add(run, spoken, drafter, seed, max_tokens=24, **options)
    run.finish(sequence)
    run.check_empty()
    return sequence


def plain(seed: int = 5, **options: Any) -> Sequence:
    return long_answer("coupled", None, seed, speculation={"enabled": False}, **options)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("rule", ALL)
def test_greedy_tokens_are_those_of_plain_decoding(rule: str, lag: int) -> None:
    half_right = TableDrafter(shape=SHAPES.get(rule, TREE), table=lambda path: (TARGET, DRAFT)[sum(path) % 2](path))
    sequence = long_answer(rule, half_right, temperature=0.0, lag=lag)
    assert sequence.output == plain(temperature=0.0).output
    assert 0 < sequence.record.accepted < sequence.record.drafted


@pytest.mark.parametrize("rule", ALL)
def test_the_record_says_what_the_rule_guarantees(rule: str) -> None:
    says = {"coupled": "bits", "typical": "none"}.get(rule, "distribution")
    assert long_answer(rule, drafting(rule)).record.lossless == says


@pytest.mark.parametrize("options", [{"enabled": False}, {"num_speculative_tokens": 0}])
@pytest.mark.parametrize("rule", ALL)
def test_plain_decoding_knows_no_rule(rule: str, options: dict[str, Any]) -> None:
    sequence = long_answer(rule, None, speculation=options)
    assert sequence.output == plain().output
    assert sequence.record.lossless == "bits"
    assert sequence.record.steps == 23


def test_typical_accepts_more_than_coupled_and_is_lossy() -> None:
    counts, accepted = {}, {}
    for rule in ("coupled", "typical"):
        sequences = answers(rule, drafting(rule), WRONG_SEEDS, temperature=0.5)
        counts[rule] = counted(sequences)
        accepted[rule] = sum(s.record.accepted for s in sequences) / sum(s.record.steps for s in sequences)
    assert accepted["typical"] > 1.2 * accepted["coupled"]
    assert fits(counts["coupled"], joint(temperature=0.5))
    assert not fits(counts["typical"], joint(temperature=0.5))


# Seeds.


@pytest.mark.parametrize("rule", ALL)
def test_a_seed_gives_the_same_answer_whatever_is_measured(rule: str) -> None:
    """A pass that costs nothing for each row, or much: under rules whose tokens depend on the drafts, a pacer that
    may choose must not, where the seed is given."""
    found = []
    for cost in (lambda rows: 1.0, lambda rows: rows**2 / 10):
        clock = Clock()
        run = arena(target=Timed(ToyTarget(TARGET, VOCAB, 32), clock, cost), clock=clock)
        sequence = add(run, speculate(rule, adaptive=True), drafting(rule), 7, max_tokens=28)
        run.finish(sequence)
        found.append(sequence)
    assert found[0].output == found[1].output
    same_drafts = found[0].record.drafted == found[1].record.drafted
    assert same_drafts == (rule != "coupled")
    assert found[0].request.paced == (rule == "coupled")


@pytest.mark.parametrize("rule", SHAPES)
def test_without_a_seed_the_pacer_may_choose(rule: str) -> None:
    assert long_answer(rule, drafting(rule), None, speculation={"adaptive": True}).request.paced
    assert not long_answer(rule, drafting(rule), None).request.paced


@pytest.mark.parametrize("rule", ALL)
def test_choices_differ_and_each_comes_again(rule: str) -> None:
    first, again = ([long_answer(rule, drafting(rule), choice=n).output for n in range(4)] for _ in range(2))
    assert first == again
    assert len(set(map(tuple, first))) == 4


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_of_different_rules_do_not_disturb_each_other(lag: int) -> None:
    """All in one batch, two of each rule and some that draft nothing: each answer is the one that it has alone."""
    run = arena(lag=lag, max_batch_tokens=8)
    drafters = {rule: drafting(rule) for rule in ALL}
    wanted = [(rule, seed) for seed in (1, 2) for rule in [*ALL, "off"]]
    sequences = [
        add(run, speculate("coupled" if rule == "off" else rule), drafters.get(rule), seed, max_tokens=24)
        for rule, seed in wanted
    ]
    run.finish(*sequences)
    run.check_empty()
    for (rule, seed), sequence in zip(wanted, sequences, strict=True):
        bits = rule in ("coupled", "off")
        assert sequence.output == (plain(seed) if bits else long_answer(rule, drafting(rule), seed, lag)).output
        assert sequence.record.accepted > 0 or rule == "off"
