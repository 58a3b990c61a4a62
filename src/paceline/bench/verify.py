"""Not one token may differ: the same requests with and without speculation, in every way that they can be run."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

from paceline.bench.drafters import MixedDrafter, OracleDrafter, spoiled, variations
from paceline.bench.run import parse_method
from paceline.bench.ways import WAYS, combinations, deal
from paceline.options import Speculation
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.runner import Runner
    from paceline.bench.ways import Combination, Way
    from paceline.constraint import Constraint
    from paceline.drafters import Drafter
    from paceline.llm import LLM
    from paceline.prompts import Prompt
    from paceline.request import Sequence as Running
    from paceline.wishes import Wishes

ENOUGH = 500
FIRST_SEED = 20_000
_WRONG = 0.5
_SELDOM_WRONG = 0.25  # the share of wrong tokens of an oracle that helps out where too few drafts are accepted
_MISPREDICTED = 0.1
_SHOWN = 20


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
        ways: how drafts are made.
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
        ways: Sequence[Way] = WAYS,
    ) -> None:
        layers = len(llm.loaded.spec.layers)
        self._llm = llm
        self._vocab_size = llm.loaded.decoder.vocab_size
        self._runner = runner
        self._max_tokens = max_tokens
        self._full = draws is not None
        short = draft_layers if layers > draft_layers else max(1, layers // 2)
        common = {"adaptive": False, "num_speculative_tokens": drafts}
        self._speculation = {
            way.name: parse_method((way.options or "auto").format(short=short, layers=layers), common).speculation
            for way in ways
        }
        self._prompts = {prompt.id: self._ids(prompt) for prompt in prompts}
        self._seeds = {prompt.id: FIRST_SEED + place for place, prompt in enumerate(prompts)}
        whole = combinations(ways)
        hands = deal(whole, len(prompts), draws)
        self._members = {
            each: [prompt.id for prompt, hand in zip(prompts, hands, strict=True) if each in hand] for each in whole
        }

    def report(self) -> dict[str, Any]:
        """Run what has not been run yet; the result as JSON has it.

        ``compared`` answers were compared and ``differing`` of them are not the plain ones; ``short`` counts the
        combinations whose drafts were accepted or rejected too rarely to prove anything, which matters where
        combinations are drawn by lot.
        """
        rows = [self._combination(each) for each, members in self._members.items() if members]
        return {
            "full": self._full,
            "compared": sum(row["prompts"] for row in rows),
            "differing": sum(row["differing"] for row in rows),
            "tokens": sum(row["tokens"] for row in rows),
            "short": sum(self._full and not row["counts"] for row in rows),
            "combinations": rows,
            "differences": [difference for row in rows for difference in row.pop("differences")][:_SHOWN],
            "environment": self._runner.environment,
            "settings": self._runner.settings,
        }

    def _combination(self, each: Combination) -> dict[str, Any]:
        row = self._row(each)
        if self._full and not row["counts"] and each.way.judge == "both" and each.way.options is not None:
            alone, row = row, self._row(each, _WRONG if row["accepted"] >= ENOUGH else _SELDOM_WRONG)
            row["alone"] = {key: alone[key] for key in ("differing", "tokens", "drafted", "accepted", "rejected")}
            row["prompts"] += alone["prompts"]
            row["differing"] += alone["differing"]
            row["differences"] = alone["differences"] + row["differences"]
        return row

    def _row(self, each: Combination, wrong: float | None = None) -> dict[str, Any]:
        """What a combination did, the drafter alone or with the help of an oracle of so many wrong tokens."""
        members = list(self._members[each])
        if each.batch > 1:
            random.Random(f"{each.way.name} {each.temperature}").shuffle(members)
        answers = [
            answer
            for at in range(0, len(members), each.batch)
            for answer in self._cell(each, members[at : at + each.batch], wrong)
        ]
        total = Counter[str]()
        for answer in answers:
            total.update({key: answer[key] for key in ("tokens", "drafted", "accepted", "judged")})
        return {
            **_place(each, wrong),
            "prompts": len(answers),
            "differing": sum(answer["difference"] is not None for answer in answers),
            **{key: total[key] for key in ("tokens", "drafted", "accepted", "judged")},
            "rejected": total["drafted"] - total["accepted"],
            "counts": _counts(each.way, total),
            "differences": [answer["difference"] for answer in answers if answer["difference"] is not None],
        }

    def _cell(self, each: Combination, members: Sequence[str], wrong: float | None) -> list[dict[str, Any]]:
        name = {**_place(each, wrong), "prompts": list(members)}
        wishes = [self._wishes(each.way, member, each.temperature) for member in members]
        expected = [
            self._plain(member, each.temperature, own.get("constraint"))
            for member, own in zip(members, wishes, strict=True)
        ]

        def take() -> dict[str, Any]:
            self._llm.forget()  # so that a cell is the same whatever ran before it
            answers = {self._prompts[member]: answer["ids"] for member, answer in zip(members, expected, strict=True)}
            drafter = self._drafter(each.way, answers, wrong)
            speculation = self._speculation[each.way.name]
            running = self._run(members, each.temperature, speculation, wishes, drafter)
            return {
                "answers": [
                    _compare(name | {"prompt": member}, answer, sequence)
                    for member, answer, sequence in zip(members, expected, running, strict=True)
                ]
            }

        answers: list[dict[str, Any]] = self._runner.cell(name, take)["answers"]
        return answers

    def _plain(self, member: str, temperature: float, constraint: Constraint | None = None) -> dict[str, Any]:
        """What plain decoding answers to this prompt alone."""
        wishes: Wishes = {} if constraint is None else {"constraint": constraint}

        def take() -> dict[str, Any]:
            (running,) = self._run([member], temperature, Speculation.off(), [wishes])
            return _answer(running)

        return self._runner.cell({"plain": member, "temperature": temperature, **dict.fromkeys(wishes, True)}, take)

    def _wishes(self, way: Way, member: str, temperature: float) -> Wishes:
        """What a request of this way says besides; it is made from the free answer."""
        if way.request == "free":
            return {}
        answer = self._plain(member, temperature)["ids"]
        if way.request == "predicted":
            return {"prediction": spoiled(answer, self._vocab_size, _MISPREDICTED, 0, member)}
        return {"constraint": variations(answer, self._vocab_size, self._llm.tokenizer.eos_ids)}

    def _run(
        self,
        members: Sequence[str],
        temperature: float,
        speculation: Speculation,
        wishes: Sequence[Wishes],
        drafter: Drafter | None = None,
    ) -> list[Running]:
        """Run prompts to their ends, all at a time; ``drafter`` is one that ``speculation`` does not name."""
        running: list[Running] = []
        with self._llm.paused() as engine:
            for member, own in zip(members, wishes, strict=True):
                sampling = Sampling(temperature=temperature, seed=self._seeds[member], max_tokens=self._max_tokens)
                said: Wishes = {**own, "speculation": speculation}
                running += self._llm.submit(self._prompts[member], sampling, drafter=drafter, **said)
            while any(sequence.finish_reason is None for sequence in running):
                engine.step()
        return running

    def _drafter(
        self, way: Way, answers: Mapping[tuple[int, ...], Sequence[int]], wrong: float | None
    ) -> Drafter | None:
        """The oracle, or a drafter that it helps out; None for what the options alone say."""
        if way.options is None:
            return OracleDrafter(answers, self._vocab_size, _WRONG)
        if wrong is None:
            return None
        oracle = OracleDrafter(answers, self._vocab_size, wrong)
        return MixedDrafter(self._llm.roster.drafter(self._speculation[way.name]), oracle)

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._llm.chat_ids([{"role": "user", "content": prompt.turns[0]}]))


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


def _place(each: Combination, wrong: float | None) -> dict[str, Any]:
    return {"method": each.way.name, "batch": each.batch, "temperature": each.temperature, "mixed": wrong is not None}


def _counts(way: Way, total: Counter[str]) -> bool:
    """Whether enough drafts were judged, in both ways where both can be."""
    if way.judge == "none":
        return True
    if way.judge == "accepted":
        return total["accepted"] >= ENOUGH and total["accepted"] == total["judged"]
    return total["accepted"] >= ENOUGH and total["drafted"] - total["accepted"] >= ENOUGH
