"""Where copying pays: rewriting a given text or function, twenty requests made by one fixed rule."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.bench.run import PLAIN, Comparison, Method, figures
from paceline.errors import OptionError
from paceline.prompts import Prompt
from paceline.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.runner import Runner
    from paceline.llm import LLM

EACH = 10
COPIED = 0.5
GRAM = 8
_PASSAGE = 800  # characters
_FUNCTION = re.compile(r"^def (\w+)\(", re.MULTILINE)
_LONG_WORD = re.compile(r"\b[a-z]{5,}\b")
_NEW_WORD = "paceline"


def rewriting_prompts(code: Sequence[Prompt], questions: Sequence[Prompt]) -> list[Prompt]:
    """The first ten functions of ``code``, each to be given back under another name, and the passages of the first
    ten rag questions, each to be repeated with one word replaced. None is left out.

    A function is the prompt as it stands; its last one is renamed from ``name`` to ``new_name``. A passage is the
    whole sentences within the first 800 characters; the word is its most frequent one of five small letters or more,
    the first of them where several are as frequent.

    Raises:
        OptionError: there are fewer than ten of a kind.
    """
    functions = [prompt for prompt in code if _FUNCTION.search(prompt.turns[0])][:EACH]
    passages = [prompt for prompt in questions if prompt.category == "rag"][:EACH]
    for found, kind in ((functions, "functions in the file of code"), (passages, "rag questions")):
        if len(found) < EACH:
            raise OptionError(f"{EACH} {kind} are needed, and there are {len(found)}: give another file.")
    return [*map(_rename, functions), *map(_repeat, passages)]


def _rename(prompt: Prompt) -> Prompt:
    code = prompt.turns[0].strip()
    name = _FUNCTION.findall(code)[-1]
    text = (
        f"Rename the function `{name}` to `new_{name}` in the following code. Give back the whole code with no other "
        f"change.\n\n```python\n{code}\n```"
    )
    return Prompt(f"rename {prompt.id}", "rename", (text,))


def _repeat(prompt: Prompt) -> Prompt:
    passage = prompt.turns[0][:_PASSAGE]
    sentences = re.match(r".*[.!?](?=\s)", passage, re.DOTALL)
    passage = (sentences[0] if sentences else passage).strip()
    words = Counter(_LONG_WORD.findall(passage))
    word = max(words, key=lambda word: words[word]) if words else passage.split()[0]
    text = (
        f'Repeat the following text word for word with one change: replace every "{word}" by "{_NEW_WORD}".\n\n'
        f"{passage}"
    )
    return Prompt(f"repeat {prompt.id}", "repeat", (text,))


def copied_share(prompt: Sequence[int], output: Sequence[int], gram: int = GRAM) -> float:
    """The share of the output's n-grams of token ids that stand in the prompt; 0 where it is shorter than one."""
    known = {tuple(prompt[at : at + gram]) for at in range(len(prompt) - gram + 1)}
    grams = [tuple(output[at : at + gram]) for at in range(len(output) - gram + 1)]
    return sum(piece in known for piece in grams) / len(grams) if grams else 0.0


class Rewriting:
    """A method against plain decoding on the twenty requests, those that copy apart from the rest."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        method: Method,
        runner: Runner,
        *,
        max_tokens: int,
        repeats: int,
    ) -> None:
        self._llm = llm
        self._prompts = prompts
        self._method = method
        self._runner = runner
        self._max_tokens = max_tokens
        self._comparison = Comparison(llm, prompts, [method], runner, max_tokens=max_tokens, repeats=repeats)

    def report(self) -> dict[str, Any]:
        """Take what is missing; figures for the requests whose plain answer is at least half copied, for the rest,
        and for all, and the share and speed-up of each."""
        shares = {prompt.id: self._share(prompt) for prompt in self._prompts}
        whole = self._comparison.report()
        plain, fast = (self._comparison.cells(name) for name in (PLAIN, self._method.name))
        sets = {
            "copied": [name for name, share in shares.items() if share >= COPIED],
            "rest": [name for name, share in shares.items() if share < COPIED],
            "all": list(shares),
        }
        return {
            **{key: whole[key] for key in ("environment", "settings")},
            "method": self._method.name,
            "sets": {name: figures(plain, fast, members) for name, members in sets.items() if members},
            "requests": [
                {"id": name, "share": share, **self._one(figures(plain, fast, [name]))}
                for name, share in shares.items()
            ],
        }

    @staticmethod
    def _one(found: dict[str, Any]) -> dict[str, Any]:
        speedup = found["speedup"]["median"] if "speedup" in found else None
        return {"tokens": found["tokens"], "tau": found["tau"], "speedup": speedup}

    def _share(self, prompt: Prompt) -> float:
        ids = self._llm.chat_ids([{"role": "user", "content": prompt.turns[0]}])
        share: float = self._runner.cell({"share": prompt.id}, partial(self._plain_share, ids))["share"]
        return share

    def _plain_share(self, ids: list[int]) -> dict[str, Any]:
        sampling = Sampling(temperature=0.0, max_tokens=self._max_tokens)
        answer = self._llm.generate(ids, sampling, speculation=False)
        return {"share": copied_share(ids, answer.token_ids)}
