"""Kinds of outcomes."""

from __future__ import annotations


def is_bad(outcome: str) -> bool:
    """Whether the photo failed or was refused."""
    return outcome.startswith(("failed:", "refused:"))
