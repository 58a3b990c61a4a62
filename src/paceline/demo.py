"""``python -m paceline.demo``: one request where drafting pays, and one where it does not."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paceline.cli import main as paceline
from paceline.cli.paint import Painter
from paceline.prompts import read_prompts


@dataclass(frozen=True)
class Scene:
    """A request, and what it shows.

    Attributes:
        title: the line above it.
        prompt: the id of one of the shipped prompts.
        tokens: the longest answer.
        lesson: the line below it.
    """

    title: str
    prompt: str
    tokens: int
    lesson: str


SCENES = (
    Scene(
        "Rewriting code: most of the answer stands in the request.",
        "73",
        256,
        "Drafts copied from the request cost almost nothing, and the model confirms several of them in one step. So "
        "small a model does not always do what it is asked, and speculation leaves that, too, as it is.",
    ),
    Scene(
        "Free prose: nothing to copy from.",
        "2",
        128,
        "Drafts seldom come true here, so few are made: the same text at about the speed of plain decoding.",
    ),
)


def main() -> int:
    """Run both requests with and without speculation; returns 1 unless their texts were the same."""
    prompts = {prompt.id: prompt for prompt in read_prompts()}
    coloured = Painter().coloured
    for place, scene in enumerate(SCENES):
        text = prompts[scene.prompt].turns[0]
        hint = " (coloured: drafted and accepted)" if coloured else ""
        print(f"\n=== {scene.title}\n\n{text}\n\n--- the answer{hint}\n", flush=True)
        options = ["--chat", "--compare", "--method", "ngram", "--temperature", "0", "--max-tokens", str(scene.tokens)]
        code = paceline(["generate", *options, *["--quiet"] * bool(place), "--", text])
        if code:
            return code
        print(f"\n{scene.lesson}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
