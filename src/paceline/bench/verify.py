"""Not one token may differ: the same requests with and without speculation, in every way that they can be run."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.bench.drafters import MixedDrafter, OracleDrafter
from paceline.options import Speculation
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.runner import Runner
    from paceline.drafters import Drafter
    from paceline.llm import LLM
    from paceline.prompts import Prompt
    from paceline.request import Sequence as Running

METHODS = ("plain", "ngram", "draft_layers", "self", "oracle")
BATCHES = (1, 8)
TEMPERATURES = (0.0, 0.8)
DRAWS = 4
ENOUGH = 500
FIRST_SEED = 20_000
_WRONG = 0.5
_SHOWN = 20


@dataclass(frozen=True)
class Combination:
    """One way to run a request.

    Attributes:
        method: "plain", "ngram", "draft_layers" (the target's own first layers), "self" (the target as its own
            drafter) or "oracle" (knows the answer, half of its tokens swapped for wrong ones).
        batch: how many requests run at a time.
        temperature: 0, or one at which tokens are drawn, with a seed.
    """

    method: str
    batch: int
    temperature: float


COMBINATIONS = tuple(Combination(*way) for way in itertools.product(METHODS, BATCHES, TEMPERATURES))


def deal(prompts: int, draws: int | None, seed: int = 0) -> list[list[Combination]]:
    """For each prompt the combinations that it is run in: all, or ``draws`` different ones by lot.

    The lots are dealt from shuffled decks of all combinations, so each comes as often as any other, give or take one.
    """
    if draws is None:
        return [list(COMBINATIONS)] * prompts
    lot = random.Random(seed)
    hands: list[list[Combination]] = []
    while len(hands) < prompts:
        deck = list(COMBINATIONS)
        lot.shuffle(deck)
        hands += [deck[at : at + draws] for at in range(0, len(deck) - draws + 1, draws)]
    return hands[:prompts]


class Verification:
    """Runs prompts in their combinations and compares every answer with the plain one.

    Args:
        llm: the model; it runs at least eight requests at a time.
        prompts: of which the first turn is asked.
        runner: keeps the cells.
        max_tokens: of each answer.
        draws: in how many combinations each prompt is run; None is all.
        drafts: how many tokens are drafted at a time.
        draft_layers: of the drafter made of the target's own first layers; half of them where it has no more.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        runner: Runner,
        *,
        max_tokens: int = 64,
        draws: int | None = None,
        drafts: int = 5,
        draft_layers: int = 6,
    ) -> None:
        layers = len(llm.loaded.spec.layers)
        self._llm = llm
        self._runner = runner
        self._max_tokens = max_tokens
        self._full = draws is not None
        self._drafts = drafts
        self._layers = {"draft_layers": draft_layers if layers > draft_layers else max(1, layers // 2), "self": layers}
        self._prompts = {prompt.id: self._ids(prompt) for prompt in prompts}
        self._seeds = {prompt.id: FIRST_SEED + place for place, prompt in enumerate(prompts)}
        hands = deal(len(prompts), draws)
        self._members = {
            way: [prompt.id for prompt, hand in zip(prompts, hands, strict=True) if way in hand] for way in COMBINATIONS
        }

    def report(self) -> dict[str, Any]:
        """Run what has not been run yet; the result as JSON has it.

        ``compared`` answers were compared and ``differing`` of them are not the plain ones; ``short`` counts the
        combinations whose drafts were accepted or rejected too rarely to prove anything, which matters where
        combinations are drawn by lot.
        """
        rows = [self._combination(way) for way in COMBINATIONS if self._members[way]]
        return {
            "compared": sum(row["prompts"] for row in rows),
            "differing": sum(row["differing"] for row in rows),
            "tokens": sum(row["tokens"] for row in rows),
            "short": sum(self._full and not row["counts"] for row in rows),
            "combinations": rows,
            "differences": [difference for row in rows for difference in row.pop("differences")][:_SHOWN],
            "environment": self._runner.environment,
            "settings": self._runner.settings,
        }

    def _combination(self, way: Combination) -> dict[str, Any]:
        row = self._row(way, mixed=False)
        if self._full and not row["counts"] and way.method in ("ngram", "draft_layers"):
            alone, row = row, self._row(way, mixed=True)
            row["alone"] = {key: alone[key] for key in ("differing", "tokens", "drafted", "accepted", "rejected")}
            row["prompts"] += alone["prompts"]
            row["differing"] += alone["differing"]
            row["differences"] = alone["differences"] + row["differences"]
        return row

    def _row(self, way: Combination, mixed: bool) -> dict[str, Any]:
        members = list(self._members[way])
        if way.batch > 1:
            random.Random(f"{way.method} {way.temperature}").shuffle(members)
        answers = [
            answer
            for at in range(0, len(members), way.batch)
            for answer in self._cell(way, members[at : at + way.batch], mixed)
        ]
        total = Counter[str]()
        for answer in answers:
            total.update({key: answer[key] for key in ("tokens", "drafted", "accepted", "judged")})
        return {
            "method": way.method,
            "batch": way.batch,
            "temperature": way.temperature,
            "mixed": mixed,
            "prompts": len(answers),
            "differing": sum(answer["difference"] is not None for answer in answers),
            **{key: total[key] for key in ("tokens", "drafted", "accepted", "judged")},
            "rejected": total["drafted"] - total["accepted"],
            "counts": _counts(way.method, total),
            "differences": [answer["difference"] for answer in answers if answer["difference"] is not None],
        }

    def _cell(self, way: Combination, members: Sequence[str], mixed: bool) -> list[dict[str, Any]]:
        name = {
            "method": way.method,
            "batch": way.batch,
            "temperature": way.temperature,
            "mixed": mixed,
            "prompts": list(members),
        }
        expected = {member: self._plain(member, way.temperature) for member in members}

        def take() -> dict[str, Any]:
            drafter = self._drafter(way, expected, mixed)
            running = self._run(members, way.temperature, drafter)
            return {
                "answers": [
                    _compare(name | {"prompt": member}, expected[member], sequence)
                    for member, sequence in zip(members, running, strict=True)
                ]
            }

        answers: list[dict[str, Any]] = self._runner.cell(name, take)["answers"]
        return answers

    def _plain(self, member: str, temperature: float) -> dict[str, Any]:
        """What plain decoding answers to this prompt alone."""

        def take() -> dict[str, Any]:
            (running,) = self._run([member], temperature, None)
            return _answer(running)

        return self._runner.cell({"plain": member, "temperature": temperature}, take)

    def _run(self, members: Sequence[str], temperature: float, drafter: Drafter | None) -> list[Running]:
        speculation = (
            Speculation.off()
            if drafter is None
            else Speculation(method="ngram", adaptive=False, num_speculative_tokens=self._drafts)
        )
        running: list[Running] = []
        try:
            for member in members:
                sampling = Sampling(temperature=temperature, seed=self._seeds[member], max_tokens=self._max_tokens)
                running += self._llm.submit(self._prompts[member], sampling, speculation=speculation, drafter=drafter)
            while any(sequence.finish_reason is None for sequence in running):
                self._llm.engine.step()
        finally:
            for sequence in running:
                self._llm.engine.cancel(sequence)
        return running

    def _drafter(self, way: Combination, expected: Mapping[str, dict[str, Any]], mixed: bool) -> Drafter | None:
        oracle = OracleDrafter(
            {tuple(self._prompts[member]): answer["ids"] for member, answer in expected.items()},
            self._llm.loaded.decoder.vocab_size,
            _WRONG,
        )
        if way.method == "plain":
            return None
        if way.method == "oracle":
            return oracle
        if way.method == "ngram":
            own = self._llm.roster.drafter(Speculation(method="ngram"))
        else:
            own = self._llm.roster.drafter(Speculation(draft_layers=self._layers[way.method]))
        return MixedDrafter(own, oracle) if mixed else own

    def _ids(self, prompt: Prompt) -> list[int]:
        return self._llm.chat_ids([{"role": "user", "content": prompt.turns[0]}])


def _answer(running: Running) -> dict[str, Any]:
    return {"ids": running.output, "text": running.text.text, "finish_reason": running.finish_reason}


def _compare(name: Mapping[str, Any], expected: Mapping[str, Any], running: Running) -> dict[str, Any]:
    """What a run did, and where its answer leaves the expected one, if it does."""
    answer, record = _answer(running), running.record
    return {
        "tokens": len(answer["ids"]),
        "drafted": record.drafted,
        "accepted": record.accepted,
        "judged": sum(record.reached),
        "difference": None
        if answer == expected
        else {
            **{key: value for key, value in name.items() if key != "prompts"},
            "place": first_difference(expected["ids"], answer["ids"]),
            "expected": expected,
            "found": answer,
        },
    }


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    """How many tokens two answers have in common before the first that differs."""
    pairs = enumerate(zip(expected, found, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(expected), len(found)))


def _counts(method: str, total: Counter[str]) -> bool:
    """Whether enough drafts were judged in both ways; of the target as its own drafter every one is accepted."""
    if method == "plain":
        return True
    if method == "self":
        return total["accepted"] >= ENOUGH and total["accepted"] == total["judged"]
    return total["accepted"] >= ENOUGH and total["drafted"] - total["accepted"] >= ENOUGH
