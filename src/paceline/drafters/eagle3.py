"""EAGLE-3 and 3.1: a head that reads three of the target's states at once, and has a small vocabulary of its own.

Source: Li et al. 2025 (arXiv 2503.01840); for 3.1, arXiv 2605.09992. Trees are those of EAGLE-2.
"""

from paceline.drafters._eagle import method

METHOD = method("eagle3")
