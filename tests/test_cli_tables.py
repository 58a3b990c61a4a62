"""Tables are read on a narrow screen and through pipes: nothing is cut, however large the figures."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.tables import beside, compared, perplexities, rewritten, show, simulated, stepped, verified

SPREAD = {"median": 1234.5, "low": 12.34, "high": 13.45}
FIGURES: dict[str, Any] = {
    "prompts": 480,
    "tokens": 123456,
    "differing": 0,
    "tau": 12.34,
    "tau_macro": 12.34,
    "accepted_by_position": [{"accepted": 99, "reached": 100}] * 40 + [{"accepted": 0, "reached": 0}],
    "tokens_per_second": SPREAD,
    "speedup": {**SPREAD, "median": 12.9},
    "interval": (11.22, 13.33),
    "end_to_end": SPREAD,
}
ENVIRONMENT = {"dtype": "bf16"}
PARTS = ("products", "attention", "small operators", "drafter", "sampling", "python")
STEP = {
    "context": 32768,
    "rows": 64,
    "seconds": 1.234567,
    "least": 1.234567,
    "floors": 12.34,
    "floors_by_round": (12.34, 13.45),
    "parts": dict.fromkeys(PARTS, 0.123456),
}
WAY = {"temperature": 0.8, "batch": 8, "mixed": True, "method": "recycling tree", "differing": 0, "counts": True}
COUNTS = dict.fromkeys(("prompts", "tokens", "accepted", "rejected"), 123456)
SIMULATED = {
    "drafts": "head, far",
    "device": "H200",
    "model": "70B fp8",
    "context": 131072,
    "users": 512,
    "length": 12,
    **dict.fromkeys(("best", "auto", "of_best"), 12.345),
    "auto_interval": [11.222, 13.344],
    "of_best_interval": [11.222, 13.344],
    "failed": ["0.95 of best", "0.97 of plain"],
}


@pytest.mark.parametrize(
    "tables",
    [
        compared({"methods": {"ngram:prompt_lookup_max=3," * 5: {"math_reasoning": FIGURES, "all": FIGURES}}}),
        rewritten(
            {
                "method": "ngram",
                "sets": {"copied": FIGURES, "rest": FIGURES, "all": FIGURES},
                "requests": [{"id": "rename HumanEval/163", "share": 1.0, "tokens": 256, "tau": 9.9, "speedup": 9.9}],
            }
        ),
        stepped(
            [
                {
                    "environment": ENVIRONMENT,
                    "steps": [STEP],
                    "floors": {"32768": 0.123456},
                    "bandwidth": {"product": 123.4e9},
                    "prefill": {"tokens": 1000, "seconds": 1.0},
                    "sampling": {"rate": 0.9, "seconds a verified row": 0.001},
                }
            ]
        ),
        [perplexities({"perplexity": {"bf16": {"answers": {"tokens": 123456, "perplexity": 12345.6}}},
                       "ratios": {"bf16": {"answers": 1.00412}}})],
        beside(
            {
                "works": {"decode": "decode: 128 tokens after 1000, without the first"},
                "figures": [
                    {
                        "work": "decode",
                        "peer": "transformers",
                        "seconds": {"median": 1.23456, "low": 1.234567, "high": 1.345678},
                        "speed": 1234.56,
                        "ratio": 12.345,
                        "interval": (11.223, 13.344),
                        "agrees": 127.0,
                    }
                ],
            }
        ),
        simulated({"cells": [SIMULATED], "left_out": [{**SIMULATED, "users": [64, 128, 256, 512]}]}),
        verified({"full": True, "combinations": [{**WAY, **COUNTS}]}),
    ],
)  # fmt: skip
def test_nothing_is_cut_in_80_columns(
    tables: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(*tables)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    for table in tables:
        for column in table.columns:
            for cell in column.cells:
                assert "".join(str(cell).split()) in "".join(out.split()) or len(str(cell)) > 20
