"""Drafting heads: their networks, and the readers and writers of their published formats."""
