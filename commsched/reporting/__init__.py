"""Reporting: what traces say of a run: what communication costs, why, and what would help."""
