"""Why a viewer's pages show a post or not, decided from stored facts and the viewer's page. No I/O.

All reasons that hide the post are returned, because removing one of two does not show it. Index and
PostgreSQL may differ until the next sweep; that is a reason of its own, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.feed.model import FeedId, moment_of

_UNKNOWN: Final = "the post does not exist: it was never posted, or it was deleted"
_BEHIND: Final = (
    "the index is behind PostgreSQL: the sweep adds missing changes within seconds;"
    " if this persists, list differences with `headrace feed verify` and fix them with"
    " `headrace feed rebuild`"
)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fact that hides a post from a viewer, or shows it."""

    code: str
    """followed, unknown, waits, not_followed, muted, blocked, blocked_by_author, index_behind."""
    text: str
    at: datetime | None = None
    """The beginning of the state; for a waiting post its end."""


class PostWhy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a viewer's pages show a post, and all reasons."""

    viewer: FeedId
    post: str
    is_shown: bool
    reasons: list[Reason]
    author: FeedId | None = None
    at: datetime | None = None
    """Its time in the feed."""
    is_slow: bool = False
    """Whether pages read it from PostgreSQL: older than the index, or no index."""


def why_shown(
    viewer: FeedId, post: str, facts: Any, *, author: FeedId | None, page: tuple[bool, bool]
) -> PostWhy:
    """Decide from the `facts` of `store.why_post`; `page`: whether it has the post, and is slow."""
    is_shown, is_slow = page
    if facts is None:
        unknown = Reason(code="unknown", text=_UNKNOWN)
        return PostWhy(viewer=viewer, post=post, is_shown=False, reasons=[unknown])
    reasons = list(_hiding(facts, viewer, author))
    if is_behind(facts, is_shown=is_shown):
        reasons.append(Reason(code="index_behind", text=_BEHIND))
    if not reasons:
        text = f"{viewer} follows {author}, and neither has muted or blocked the other"
        reasons = [Reason(code="followed", text=text, at=facts["followed_at"])]
    return PostWhy(
        viewer=viewer,
        post=post,
        is_shown=is_shown,
        reasons=reasons,
        author=author,
        at=facts["visible_at"] if facts["state"] else moment_of(facts["score"]),
        is_slow=is_slow,
    )


def is_behind(facts: Any, *, is_shown: bool) -> bool:
    """Whether the page and PostgreSQL disagree about the post."""
    is_free = next(_hiding(facts, "", None), None) is None
    return is_free != is_shown


def _hiding(facts: Any, viewer: FeedId, author: FeedId | None) -> Iterator[Reason]:
    if facts["state"]:
        until_at = facts["visible_at"]
        text = f"the post waits until {until_at:%Y-%m-%d %H:%M:%S} UTC"
        yield Reason(code="waits", text=text, at=until_at)
    if facts["followed_at"] is None:
        yield Reason(code="not_followed", text=f"{viewer} does not follow {author}")
    if facts["muted_at"] is not None:
        yield Reason(code="muted", text=f"{viewer} has muted {author}", at=facts["muted_at"])
    if facts["blocked_at"] is not None:
        yield Reason(code="blocked", text=f"{viewer} has blocked {author}", at=facts["blocked_at"])
    if facts["blocked_by_at"] is not None:
        text = f"{author} has blocked {viewer}"
        yield Reason(code="blocked_by_author", text=text, at=facts["blocked_by_at"])
