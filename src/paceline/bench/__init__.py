"""Measuring and verifying: one runner whose measurements can be stopped and continued, and what is measured with it."""
