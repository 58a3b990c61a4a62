"""Methods side by side, by the protocol of Spec-Bench (Xia et al. 2024, arXiv 2401.07851): chat template, all turns,
the target's own greedy answers as history, the methods in turn on every question."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from paceline import methods
from paceline.bench.stats import Spread, ratio_interval
from paceline.errors import OptionError
from paceline.options import Speculation
from paceline.record import add_up
from paceline.sampling import Sampling
from paceline.targets.hub import known

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.bench.runner import Runner
    from paceline.llm import LLM
    from paceline.prompts import Prompt

    Cells = Mapping[str, Sequence[dict[str, Any]]]

PLAIN = "plain"
ALL = "all"
_WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: in cells and tables. A model on this machine is called by its file's or folder's name and a digest: so
            that a cell counts for the weights that it was taken with, and wherever they lie.
        speculation: its options.
    """

    name: str
    speculation: Speculation


def parse_method(text: str, common: Mapping[str, Any]) -> Method:
    """``plain``, a method's name, options, or both, as in ``draft_layers=6`` and ``ngram:prompt_lookup_max=3``.

    Args:
        common: options that hold for every method which does not name them itself.

    Raises:
        OptionError: an unknown method or option.
    """
    name, _, written = text.partition(":")
    if "=" in name:
        name, written = "", text
    if name == PLAIN:
        if written:
            raise OptionError(f"plain decoding has no options: {text!r}.")
        return Method(PLAIN, Speculation.off())
    options: dict[str, Any] = dict(common)
    for part in filter(None, written.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"an option of a method is written name=value, not {part!r}.")
        options[key.strip().replace("-", "_")] = _value(value.strip())
        if key.strip() == "model":
            text = text.replace(part, f"model={_weights(value.strip())}")
    if name:
        options["method"] = name
    speculation = Speculation.parse(options)
    methods.check(speculation)
    return Method(text, speculation)


def _weights(model: str) -> str:
    """What a model is called: one on this machine by its name and a digest, in the place of where it lies."""
    if known(model) is not None or not Path(model).expanduser().exists():
        return model
    path = Path(model).expanduser().resolve()
    digest = hashlib.sha256()
    for part in sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]:
        with part.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"{path.name}@{digest.hexdigest()[:8]}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Comparison:
    """Runs every method on every question, repeatedly, and works out who was how much faster.

    Args:
        llm: the model; whatever it learned is forgotten before every cell.
        prompts: the questions.
        methods: compared with plain decoding, which is always measured too.
        runner: keeps the cells.
        max_tokens: of each turn.
        repeats: how often each cell is taken.
        sampling: temperature, top_p and the like of the measured answers; greedy where left out.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        methods: Sequence[Method],
        runner: Runner,
        *,
        max_tokens: int = 128,
        repeats: int = 3,
        sampling: Sampling | None = None,
    ) -> None:
        given = (sampling or Sampling(temperature=0.0)).replace(max_tokens=max_tokens)
        self._sampling = given if given.seed is not None else given.replace(seed=0)
        self._llm = llm
        self._prompts = prompts
        self._methods = [Method(PLAIN, Speculation.off()), *(m for m in methods if m.name != PLAIN)]
        self._runner = runner
        self._max_tokens = max_tokens
        self._repeats = repeats
        self._cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
        if len({method.name for method in self._methods}) < len(self._methods):
            raise OptionError("a method is named twice; give each once.")

    def report(self) -> dict[str, Any]:
        """Take what is missing; the result as JSON has it: for each method its figures by category."""
        self._take()
        groups: dict[str, list[str]] = {}
        for prompt in self._prompts:
            groups.setdefault(prompt.group, []).append(prompt.id)
        if len(groups) > 1:
            groups[ALL] = [prompt.id for prompt in self._prompts]
        plain = self.cells(PLAIN)
        return {
            "environment": self._runner.environment,
            "settings": self._runner.settings,
            "prompts": len(self._prompts),
            "methods": {
                method.name: {
                    group: figures(plain, self.cells(method.name), members) for group, members in groups.items()
                }
                for method in self._methods
            },
        }

    def cells(self, method: str) -> Cells:
        """What was measured of a method: for each prompt its cells, one a repeat."""
        return self._cells[method]

    def _take(self) -> None:
        self._cells = {method.name: {prompt.id: [] for prompt in self._prompts} for method in self._methods}
        turns = {prompt.id: self._turns(prompt) for prompt in self._prompts}
        names = [
            (prompt, method, repeat)
            for repeat in range(self._repeats)
            for place, prompt in enumerate(self._prompts)
            for method in rotated(self._methods, place + repeat)
        ]
        if not all(self._runner.has(_name(*name)) for name in names):
            self._warm_up(next(iter(turns.values()))[0])
        for prompt, method, repeat in names:
            take = partial(self._measure, turns[prompt.id], method)
            cell = self._runner.cell(_name(prompt, method, repeat), take)
            self._cells[method.name][prompt.id].append(cell)

    def _turns(self, prompt: Prompt) -> list[list[int]]:
        """The ids of each turn's prompt; what the model said before is its own greedy answer."""
        messages: list[dict[str, str]] = []
        turns = []
        for place, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            ids = self._llm.chat_ids(messages)
            turns.append(ids)
            if place + 1 < len(prompt.turns):
                name = {"history": prompt.id, "turn": place}
                answer = self._runner.cell(name, partial(self._greedy, ids))
                messages.append({"role": "assistant", "content": answer["text"]})
        return turns

    def _greedy(self, ids: list[int]) -> dict[str, Any]:
        sampling = Sampling(temperature=0.0, max_tokens=self._max_tokens)
        return {"text": self._llm.generate(ids, sampling, speculation=False).text}

    def _warm_up(self, ids: list[int]) -> None:
        """Every method runs once unmeasured, so that none pays for reading the weights from disk."""
        for method in self._methods:
            sampling = self._sampling.replace(max_tokens=_WARM_UP_TOKENS)
            self._llm.generate(ids, sampling, speculation=method.speculation)

    def _measure(self, turns: Sequence[list[int]], method: Method) -> dict[str, Any]:
        self._llm.forget()
        if method.speculation.enabled:
            self._llm.roster.drafter(method.speculation)  # made anew, but not while the clock runs
        return {"turns": [timed(self._llm, ids, self._sampling, method.speculation) for ids in turns]}


def timed(llm: LLM, ids: list[int], sampling: Sampling, speculation: Speculation) -> dict[str, Any]:
    """One streamed answer with its times in seconds and its record, as a cell keeps it."""
    started = time.perf_counter()
    times, completion = [], None
    for chunk in llm.stream(ids, sampling, speculation=speculation):
        times.append(time.perf_counter())
        completion = chunk.completion
    assert completion is not None
    record = completion.record
    return {
        "prompt_tokens": len(ids),
        "tokens": len(completion.token_ids),
        "digest": hashlib.sha256(repr(completion.token_ids).encode()).hexdigest()[:16],
        "first_seconds": times[0] - started,
        "decode_seconds": times[-1] - times[0],
        "seconds": time.perf_counter() - started,
        "record": record.as_dict(),
    }


def figures(plain: Cells, other: Cells, members: Sequence[str]) -> dict[str, Any]:
    """What a method did on some prompts, beside plain decoding.

    Args:
        plain, other: for each prompt its cells, one a repeat.
        members: the prompts counted.

    Returns:
        ``tokens_per_second`` and ``speedup`` (sum of plain decode seconds / sum of the method's) and ``end_to_end``
        (the same for whole answers), each with median and spread over repeats; ``interval``, 95 % for the speed-up,
        prompts drawn again; tau over all steps together (micro) and as a mean over prompts (macro); and whether the
        tokens are plain decoding's.
    """
    repeats = range(len(plain[members[0]]))
    turns = [turn for member in members for cell in other[member] for turn in cell["turns"]]
    records = [turn["record"] for turn in turns]
    total = add_up(records)
    fast, slow = _seconds(other, members, "decode_seconds"), _seconds(plain, members, "decode_seconds")
    late, whole = _seconds(other, members, "seconds"), _seconds(plain, members, "seconds")
    tokens = [[sum(t["tokens"] - 1 for t in other[m][r]["turns"]) for m in members] for r in repeats]
    decoded = [place for place in range(len(members)) if fast[0][place] > 0 and slow[0][place] > 0]
    shown: dict[str, Any] = {
        "prompts": len(members),
        "tokens": sum(turn["tokens"] for turn in turns) // len(repeats),
        "differing": sum(_digests(plain[m]) != _digests(other[m]) for m in members),
        "tau": total["mean_accepted_length"],
        "tau_macro": _tau_macro(other, members),
        **{key: total[key] for key in ("accepted_by_position", "steps", "drafted", "accepted")},
        "seconds": {part: spent / len(repeats) for part, spent in total["seconds"].items()},
    }
    if decoded:
        shown["tokens_per_second"] = Spread.of([sum(tokens[r]) / sum(fast[r]) for r in repeats]).as_dict()
        shown["speedup"] = Spread.of([sum(slow[r]) / sum(fast[r]) for r in repeats]).as_dict()
        shown["interval"] = ratio_interval(
            [median(slow[r][place] for r in repeats) for place in decoded],
            [median(fast[r][place] for r in repeats) for place in decoded],
        )
    shown["end_to_end"] = Spread.of([sum(whole[r]) / sum(late[r]) for r in repeats]).as_dict()
    return shown


def _name(prompt: Prompt, method: Method, repeat: int) -> dict[str, Any]:
    return {"prompt": prompt.id, "category": prompt.category, "method": method.name, "repeat": repeat}


def rotated(methods: Sequence[Method], by: int) -> Iterator[Method]:
    """The methods in turn, each as often the first as any other."""
    return (methods[(place + by) % len(methods)] for place in range(len(methods)))


def _seconds(cells: Cells, members: Sequence[str], key: str) -> list[list[float]]:
    """For each repeat the seconds of every prompt, its turns together."""
    repeats = range(len(cells[members[0]]))
    return [[sum(turn[key] for turn in cells[member][repeat]["turns"]) for member in members] for repeat in repeats]


def _digests(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[turn["digest"] for turn in cell["turns"]] for cell in cells]


def _tau_macro(cells: Cells, members: Sequence[str]) -> float | None:
    turns = ([turn for cell in cells[member] for turn in cell["turns"]] for member in members)
    each = [add_up([turn["record"] for turn in own])["mean_accepted_length"] for own in turns]
    known = [tau for tau in each if tau is not None]
    return fmean(known) if known else None
