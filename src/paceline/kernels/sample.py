"""The draw of a token in C, where the library is there; else the torch form, which is its specification."""

from __future__ import annotations

from paceline.draw import argmax, draw, logprobs

__all__ = ["argmax", "draw", "logprobs"]
