"""Words that a filter offers, as pairs of value and label."""

from __future__ import annotations

from collections.abc import Iterable


def same(words: Iterable[str]) -> list[tuple[str, str]]:
    """Each word as its own label."""
    return [(str(word), str(word)) for word in words]
