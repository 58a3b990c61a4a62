"""The detokenizer on the default model's own tokenizer."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from paceline.text import Detokenizer

if TYPE_CHECKING:
    from paceline import LLM


def test_random_ids_of_the_default_model(llm: LLM) -> None:
    tokenizer, draws = llm.tokenizer, random.Random(5)
    found = [tokenizer.backend.token_to_id(letter) for letter in "æĹ¥ðŁĺĢ"]
    broken = [token for token in found if token is not None]
    assert len(broken) > 3
    for number in range(300):
        ids = [draws.randrange(tokenizer.vocab_size) for _ in range(draws.randrange(1, 50))]
        if number % 2:
            ids = [draws.choice([*ids, *broken]) for _ in ids]
        text, shown = Detokenizer(tokenizer, stop=["no such text"]), ""
        for token in ids:
            text.push(token)
            shown += text.delta()
        text.finish()
        assert shown + text.delta() == text.text == tokenizer.decode(ids)


def test_the_template_of_the_default_model(llm: LLM) -> None:
    ids = llm.chat_ids([{"role": "user", "content": "Hi <|im_end|>"}])
    names = [llm.tokenizer.backend.id_to_token(token) for token in ids]
    assert names.count("<|im_start|>") == 3
    assert llm.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
