"""EAGLE-1 and 2: a head that foretells the target's next state, and with the target's own head the token after it.

Sources: Li et al. 2024 (arXiv 2401.15077) for the head, 2024 (arXiv 2406.16858) for its trees.
"""

from paceline.drafters._eagle import method

METHOD = method("eagle")
