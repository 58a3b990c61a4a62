"""Several drafters at once: one tree of theirs, each told what it declared, and no token changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.constraint import TokenAutomaton
from paceline.drafters import Needs, Outcome, View
from paceline.drafters.cascade import LOOKUPS, CascadeDrafter
from paceline.drafters.grammar import GrammarDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.recycling import RecyclingDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.tree import MAX_NODES, Dropping, TokenTree
from tests.toys import EOS, VOCAB, ScriptedDrafter, ToyRun, TreeDrafter, alone, mix, no_draw, path_rule, same, trials

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from paceline.constraint import Constraint
    from paceline.drafters import Drafter


ROOT = 7


def seen(number: int = 0, tokens: Seq[int] = (ROOT,)) -> View:
    return View(number, list(tokens), no_draw, dropping=Dropping())


def tree_of(name: str, *nodes: tuple[int, int, float]) -> TokenTree:
    """Nodes as (parent, token, survival)."""
    tree = TokenTree.root(ROOT)
    for parent, token, survival in nodes:
        tree.add(parent, token, survival, name)
    return tree


def fan(name: str, first: int, count: int, survival: float) -> TokenTree:
    return tree_of(name, *((0, first + place, survival) for place in range(count)))


def saying(tree: TokenTree, name: str = "tree") -> TreeDrafter:
    return TreeDrafter(lambda tokens, budget: tree, name)


def merged(*trees: TokenTree, learned: TokenTree | None = None) -> TokenTree:
    members = [saying(tree) for tree in trees]
    (tree,) = CascadeDrafter(members, None if learned is None else saying(learned)).propose([seen()], [63])
    tree.check(10**6)
    return tree


def branches(tree: TokenTree) -> dict[tuple[int, ...], tuple[float, str]]:
    """Each node by the tokens on its path."""
    paths = [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(len(tree))]
    return dict(zip(paths, zip(tree.survival, tree.origin, strict=True), strict=True))


def test_common_prefixes_are_one_and_belong_to_the_first() -> None:
    first = tree_of("a", (0, 1, 0.9), (1, 2, 0.5))
    second = tree_of("b", (0, 3, 0.6), (0, 1, 0.2), (2, 2, 0.1), (3, 4, 0.05), (2, 5, 0.15))
    assert branches(merged(first, second)) == {
        (): (1.0, "target"),
        (1,): (0.9, "a"),
        (1, 2): (0.5, "a"),
        (3,): (0.6, "b"),
        (1, 2, 4): (0.25, "b"),  # as likely after 2 as its drafter thinks
        (1, 5): (pytest.approx(0.675), "b"),
    }


def test_survival_never_rises_where_a_bold_drafter_goes_on_after_a_doubtful_one() -> None:
    doubtful, bold = tree_of("a", (0, 1, 0.1)), tree_of("b", (0, 1, 0.9), (1, 2, 0.8), (2, 3, 0.7))
    assert merged(doubtful, bold).survival == pytest.approx([1.0, 0.1, 0.1 * 8 / 9, 0.1 * 7 / 9])


def test_a_drafter_that_says_a_token_twice_says_it_once() -> None:
    twice = tree_of("b", (0, 1, 0.5), (0, 1, 0.4), (2, 2, 0.3))
    assert branches(merged(twice)) == {(): (1.0, "target"), (1,): (0.5, "b"), (1, 2): (pytest.approx(0.375), "b")}


def test_lookups_fill_a_tree_in_their_order_and_no_orphan_is_left() -> None:
    """A node for which there is no room takes those below it with it; what the tree has already costs no room."""
    full = tree_of("a", *((0, 100 + place, 0.9) for place in range(MAX_NODES - 2)))
    late = tree_of("b", (0, 1, 0.5), (0, 2, 0.4), (2, 3, 0.3), (0, 105, 0.2), (1, 4, 0.1))
    tree = merged(full, late)
    assert len(tree) == MAX_NODES
    assert set(branches(tree)) == {(), (1,), *((100 + place,) for place in range(MAX_NODES - 2))}


def test_a_learned_drafter_finds_room_where_lookups_have_filled_the_tree() -> None:
    lookup, learned = fan("a", 100, MAX_NODES - 1, 0.01), fan("b", 300, MAX_NODES - 1, 0.3)
    origins = merged(lookup, learned=learned).origin
    assert (origins.count("a"), origins.count("b")) == (MAX_NODES // 2 - 1, MAX_NODES // 2)
    few = merged(lookup, learned=fan("b", 300, 3, 0.3)).origin
    assert (few.count("a"), few.count("b")) == (MAX_NODES - 4, 3)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree, name = TokenTree.root(ROOT), draw(st.sampled_from("abc"))
    for _ in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(0, len(tree) - 1))
        token = draw(st.integers(0, 60))
        if token not in [tree.tokens[child] for child in tree.children(parent)]:
            tree.add(parent, token, tree.survival[parent] * draw(st.floats(0.0, 1.0)), name)
    return tree


@trials(60)
@given(lookups=st.lists(trees(), max_size=4), learned=st.none() | trees())
def test_whatever_is_merged_is_a_tree(lookups: list[TokenTree], learned: TokenTree | None) -> None:
    tree = merged(*lookups, learned=learned)
    known = branches(tree)
    assert len(tree) == len(known) <= MAX_NODES
    said = {path for other in (*lookups, *([] if learned is None else [learned])) for path in branches(other)} | {()}
    assert known.keys() <= said
    if len(tree) < MAX_NODES and (learned is None or max([0.0, *_first(lookups)]) < 0.5):
        assert known.keys() == said
    if lookups:
        assert known[()] == (1.0, "target")
        assert all(known[path][1] == origin for path, (_, origin) in branches(lookups[0]).items() if path in known)


def _first(lookups: Seq[TokenTree]) -> list[float]:
    """The chances of the tokens after the root, each from the first who says it."""
    first: dict[int, float] = {}
    for tree in lookups:
        for child in tree.children(0):
            first.setdefault(tree.tokens[child], tree.survival[child])
    return list(first.values())


@dataclass
class Asked(TreeDrafter):
    """Remembers what it was asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, views: Seq[View], budgets: Seq[int]) -> list[TokenTree]:
        self.asked += [(view.id, budget) for view, budget in zip(views, budgets, strict=True)]
        return super().propose(views, budgets)


def test_the_learned_member_is_asked_where_lookups_are_silent_or_weak() -> None:
    """Many unlikely tokens are no likely one."""
    said = {3: 0.5, 1: 0.0, 4: 0.9, 2: 0.49}

    def lookup(tokens: Seq[int], budget: int) -> TokenTree:
        chance = said[tokens[-1]]
        many = [(0, 50 + place, 0.1) for place in range(9)] if tokens[-1] == 2 else []
        tree = TokenTree.root(tokens[-1])
        for parent, token, survival in [(0, 40, chance), *many] if chance else []:
            tree.add(parent, token, survival, "lookup")
        return tree

    learned = Asked(lambda tokens, budget: TokenTree.chain(tokens[-1], [41], [0.3], "learned"))
    cascade = CascadeDrafter([TreeDrafter(lookup)], learned)
    proposed = cascade.propose([seen(number, [number]) for number in said], [9, 8, 7, 6])
    assert learned.asked == [(1, 8), (2, 6)]
    assert [tree.origin.count("learned") for tree in proposed] == [0, 1, 0, 1]
    assert [tree.tokens[0] for tree in proposed] == [*said]
    learned.asked.clear()
    cascade.propose([seen(3, [3])], [5])
    assert learned.asked == []


@dataclass
class Hearing(ScriptedDrafter):
    """Proposes nothing, and keeps the outcomes that it was told."""

    heard: list[Outcome] = field(default_factory=list)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        super().observe(outcomes)
        self.heard += outcomes


def quiet(name: str, **needs: Any) -> Hearing:
    return Hearing(lambda tokens, budget: [], name, Needs(**needs))


def test_it_declares_what_its_members_do() -> None:
    lookups = [quiet("a", top_k=3, cost="lookup"), quiet("b", features=(4, 0), cost="lookup")]
    assert CascadeDrafter(lookups).needs == Needs((0, 4), 3, "lookup", tuple(lookups))
    learned = quiet("c", features=(2, 4), top_k=1, cost="block")
    assert CascadeDrafter(lookups, learned).needs == Needs((0, 2, 4), 3, "block", (*lookups, learned))
    assert CascadeDrafter([]).needs == Needs(cost="lookup")


RULE = path_rule(VOCAB, seed=71)
PROMPT = list(b"in the slipstream of a rider")


@pytest.mark.parametrize("lag", [0, 1])
def test_each_member_hears_every_pass_and_gets_what_it_declared(lag: int) -> None:
    expected = alone(RULE, PROMPT, max_tokens=20)
    members = [quiet("none"), quiet("features", features=(1,)), quiet("both", features=(0, 2), top_k=2)]
    talker = ScriptedDrafter(mix(expected.output, len(PROMPT), 0.7), needs=Needs(top_k=5))
    members.append(quiet("top", top_k=4))
    cascade = CascadeDrafter([talker, *members[:2]], CascadeDrafter(members[2:]))
    run = ToyRun(RULE, lag=lag)
    sequence = run.add(PROMPT, cascade, max_tokens=20, piece_limit=9)
    while sequence.finish_reason is None:
        run.engine.step()
        counts = {len(member.heard) for member in members}
        assert len(counts) == 1
        assert sequence.finish_reason or cascade.length(sequence.id) == sequence.filled
    same(sequence, expected)
    for member in members:
        assert [t for outcome in member.heard for t in outcome.rows][: len(PROMPT) + 19] == expected.tokens[:-1]
        for outcome in member.heard:
            assert set(outcome.features) == set(member.needs.features)
            for layer, rows in outcome.features.items():
                assert rows.flatten().tolist() == [token + layer for token in outcome.rows]
            assert {len(ids) for _, ids in outcome.scored} <= {member.needs.top_k}
    tops = [(a.scored, b.scored) for a, b in zip(members[2].heard, members[3].heard, strict=True)]
    assert sum(len(few) for few, _ in tops) > 20
    for few, more in tops:
        assert [(path, ids[:2]) for path, ids in more] == list(few)
    assert not any(outcome.scored for outcome in members[0].heard)
    assert max(len(outcome.rows) for outcome in members[0].heard[4:]) > 2
    run.check_empty()
    assert not any(member.observed for member in members)


@dataclass
class Tracking(ScriptedDrafter):
    """Notes which calls reach it."""

    calls: list[str] = field(default_factory=list)

    def start(self, view: View, valid: int) -> None:
        self.calls.append("start")
        super().start(view, valid)

    def fork(self, parent: int, child: View) -> None:
        self.calls.append("fork")
        super().fork(parent, child)

    def rewind(self, sequence: int, length: int) -> None:
        self.calls.append("rewind")
        super().rewind(sequence, length)

    def release(self, sequence: int) -> None:
        self.calls.append("release")
        super().release(sequence)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            self.observed[outcome.id][outcome.start :] = outcome.rows


class Broken(Tracking):
    """Raises in one call, behind what it does."""

    def __init__(self, call: str, times: int = 99) -> None:
        super().__init__(lambda tokens, budget: [], "broken")
        self.left = times

        def breaking(done: Callable[..., Any], *given: Any) -> Any:
            answer = done(*given)
            self.left -= 1
            if self.left >= 0:
                raise RuntimeError(f"no {call} today")
            return answer

        setattr(self, call, partial(breaking, getattr(self, call)))


def test_every_member_is_started_forked_rewound_and_released() -> None:
    members = [Tracking(lambda tokens, budget: []) for _ in range(3)]
    cascade = CascadeDrafter(members[:2], members[2])
    cascade.start(seen(0), 0)
    cascade.fork(0, seen(1))
    cascade.rewind(1, 0)
    for _ in range(2):
        cascade.release(0)
        cascade.release(1)
    for member in members:
        assert member.calls == ["start", "fork", "rewind", *["release"] * 4]
        assert not member.observed


def test_it_covers_what_all_members_cover() -> None:
    members = [ScriptedDrafter(lambda tokens, budget: [], observed={0: [1] * n}) for n in (3, 1, 2)]
    assert CascadeDrafter(members[:2], members[2]).length(0) == 1
    assert CascadeDrafter([]).length(0) == 0


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("call", ["start", "propose", "observe", "release"])
def test_a_member_that_raises_costs_drafts_and_keeps_none_of_the_others_from_letting_go(
    call: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [alone(RULE, [*PROMPT, n]) for n in range(2)]
    broken = Broken(call)
    others = [Tracking(mix(expected[0].output, len(PROMPT) + 1, 0.8)) for _ in range(2)]
    members: list[Drafter] = [*others[:place], broken, *others[place:]]
    cascade = CascadeDrafter(members, quiet("learned"))
    run = ToyRun(RULE)
    sequences = [run.add([*PROMPT, n], cascade) for n in range(2)]
    run.finish(*sequences)
    run.check_empty()
    for sequence, reference in zip(sequences, expected, strict=True):
        same(sequence, reference)
        assert sequence.record.failed == (call == "start")
    assert [others[0].observed, others[1].observed, broken.observed] == [{}] * 3
    assert [member.calls.count("release") for member in others] == [2, 2]
    assert f"no {call} today" in caplog.text
    assert all("cascade failed" in record.getMessage() for record in caplog.records)


def test_a_member_that_fails_once_goes_on_with_the_others() -> None:
    expected = alone(RULE, PROMPT)
    talker = Tracking(mix(expected.output, len(PROMPT), 0.9))
    run = ToyRun(RULE)
    sequence = run.add(PROMPT, CascadeDrafter([Broken("propose", 1), talker]))
    run.finish(sequence)
    same(sequence, expected)
    assert talker.calls == ["start", "rewind", "release"]
    assert sequence.record.accepted > 15


FRUIT = TokenAutomaton.from_texts([list(b"apples and pears"), list(b"apples or plums"), list(b"apples")], EOS)


def everything(learned: Drafter | None = None, width: int = 8) -> CascadeDrafter:
    recycling = RecyclingDrafter(VOCAB, width=width)
    return CascadeDrafter([GrammarDrafter(), PredictionDrafter(), SuffixDrafter(), recycling], learned)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("adaptive", [False, True])
def test_not_one_token_differs(temperature: float, lag: int, adaptive: bool) -> None:
    """Eight at once, of every kind, each twice: the second time lookups know the answer."""
    rule = path_rule(VOCAB, seed=72, memory=2)
    prompts = [[*b"turn and turn about", n] for n in range(4)]
    kinds: list[tuple[list[int], dict[str, Any]]] = []
    for place, prompt in enumerate(prompts):
        constraint: Constraint | None = FRUIT if place == 1 else None
        settings = {"temperature": temperature, "seed": place, "max_tokens": 40, "constraint": constraint}
        kinds.append((prompt, settings))
    expected = [alone(rule, prompt, **settings) for prompt, settings in kinds]
    guess = mix(expected[3].output, len(prompts[3]), 0.6)
    cascade = everything(ScriptedDrafter(guess, "learned"))
    run = ToyRun(rule, lag=lag)
    speculation = {"num_speculative_tokens": 20, "adaptive": adaptive}
    sources: set[str] = set()
    for _ in range(2):
        predictions = [expected[0].output[4:30], (), (), ()]
        running = [
            run.add(prompt, cascade, speculation=speculation, prediction=predicted, **settings)
            for (prompt, settings), predicted in zip(kinds, predictions, strict=True)
            for _ in range(2)
        ]
        run.finish(*running)
        for place, sequence in enumerate(running):
            same(sequence, expected[place // 2])
            sources.update(sequence.sources)
    if not adaptive:
        assert {*LOOKUPS, "learned"} <= sources
    run.check_empty()


@pytest.mark.parametrize("width", [1, 2, 8])
def test_a_wheel_of_members_with_trees(width: int) -> None:
    """A cascade may ride in a cascade; trees of several members meet in one."""
    rule = path_rule(VOCAB, seed=73, memory=1)
    expected = alone(rule, PROMPT, max_tokens=60)
    inner = everything(width=width)
    answer = expected.output

    def fork(tokens: Seq[int], budget: int) -> TokenTree:
        done = len(tokens) - len(PROMPT)
        tree = TokenTree.root(tokens[-1])
        for token in answer[done : done + 1]:
            tree.add(0, (token + 1) % EOS, 0.3, "fork")
            tree.add(tree.add(0, token, 0.2, "fork"), 3, 0.1, "fork")
        return tree

    cascade = CascadeDrafter([inner, TreeDrafter(fork)], TreeDrafter(fork))
    run = ToyRun(rule)
    running = [run.add(PROMPT, cascade, max_tokens=60, speculation={"num_speculative_tokens": 12}) for _ in range(3)]
    run.finish(*running)
    for sequence in running:
        same(sequence, expected)
        assert sequence.record.accepted > 20
    run.check_empty()
