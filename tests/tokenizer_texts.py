"""Two hundred texts that tokenizers disagree on: digits, white space, code, emoji, scripts, contractions."""

from __future__ import annotations

import random

_WORDS = """
0 7 42 1234 2024 3.14159 1,000,000 0x1F 12:30 ½ ² ٣ ४२ Ⅷ
the The HELLO world's we'll I'M they'RE can't don’t camelCaseWord snake_case_name HTTPServer
naïve café Straße ÀÉÎ e\u0301 東京 こんにちは 안녕 привет مرحبا שלום हिन्दी ไทย
🙂 👍🏽 👩\u200d👩\u200d👧 🇩🇪 ❤️ 🦀🦀 ✈ © ™ ∑ → “quoted” … — ‰
def f(x): return x**2 if x!=0 else None; // # /* */ {}[]<>() && || := => ::
's 's! '' " `code` $x @user #tag a/b c:\\d e=mc^2 x->y ~/.rc !!! ... --flag <|im_start|>
"""
_PARTS = _WORDS.split()
_GAPS = ["", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n    ", "\u00a0", "\u3000"]
_WHOLE = [
    "",
    " ",
    "  leading and trailing  ",
    "\n",
    "\n\n\n",
    "\t\tindented\n\tcode",
    "a" * 50,
    "1" * 30,
    " " * 40 + "x",
    "for i in range(10):\n    print(f'{i:03d}', end=' ')\n",
    "<s>text</s> <unk> <0x41> ▁ ▁▁",
    "\x00\x01\x7f",
    "\u200b\ufeff\U0001f9ff",
]


def texts(count: int = 200) -> list[str]:
    """The same texts every time."""
    chance = random.Random(0)
    made = list(_WHOLE)
    while len(made) < count:
        words = [chance.choice(_PARTS) + chance.choice(_GAPS) for _ in range(chance.randint(1, 14))]
        made.append(chance.choice(_GAPS) + "".join(words))
    return made[:count]
