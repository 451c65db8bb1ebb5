"""The feed in PostgreSQL, by what it is about."""

from __future__ import annotations

from headrace.feed.store import changes, follows, posts

__all__ = ["changes", "follows", "posts"]
