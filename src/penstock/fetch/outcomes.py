"""Outcomes in plain words: what became of a photo, and who can do what about it.

The sentences are those of `texts/`, in the default language.
"""

from __future__ import annotations

from penstock.fetch.texts import Texts


def describe_outcome(outcome: str) -> str:
    """One sentence about `outcome`."""
    return Texts.load().outcome(outcome)


def is_bad(outcome: str) -> bool:
    """Whether the photo failed or was refused."""
    return outcome.startswith(("failed:", "refused:"))
