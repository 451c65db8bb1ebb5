"""The verbs of the feed, by what they are about. `Feed` is the door to all of them."""

from __future__ import annotations

from headrace.feed.service.feed import Feed
from headrace.feed.service.watching import Watch

__all__ = ["Feed", "Watch"]
