"""Why a viewer sees a post or not, decided from what the truth says of the two and from what his page tells. No I/O.

All that keeps the post away is told, since ending one of two reasons changes nothing. Index and truth may differ for as
long as it takes the sweep; that is a reason of its own, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import msgspec

from headrace.feed.model import FeedId, moment_of

_UNKNOWN: Final = "there is no such post: it was never posted, or it was deleted"
_BEHIND: Final = (
    "the index is behind the truth: the sweep brings what is missing within moments; if this stays so,"
    " `headrace feed verify` shows what differs and `headrace feed rebuild` mends it"
)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that keeps a post from a viewer, or brings it to him."""

    code: str
    """followed, unknown, waits, not_followed, muted, blocked, blocked_by_author, index_behind."""
    text: str
    at: datetime | None = None
    """Since when; of a post that waits, until when."""


class PostWhy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a viewer's pages show a post, and everything that decides it."""

    viewer: FeedId
    post: str
    is_shown: bool
    reasons: list[Reason]
    author: FeedId | None = None
    at: datetime | None = None
    """Its moment in the feed."""
    is_slow: bool = False
    """Whether pages read it from PostgreSQL: it is older than the index, or the index is not there."""


def why_shown(
    viewer: FeedId, post: str, facts: Any, *, author: FeedId | None, page: tuple[bool, bool]
) -> PostWhy:
    """The answer; `facts` as `store.posts.why` gives them, `page`: whether one shows it, and whether that is slow."""
    is_shown, is_slow = page
    if facts is None:
        unknown = Reason(code="unknown", text=_UNKNOWN)
        return PostWhy(viewer=viewer, post=post, is_shown=False, reasons=[unknown])
    reasons = list(_in_the_way(facts, viewer, author))
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
    """Whether a page shows what the truth would not, or does not show what it would."""
    is_free = next(_in_the_way(facts, "", None), None) is None
    return is_free != is_shown


def _in_the_way(facts: Any, viewer: FeedId, author: FeedId | None) -> Iterator[Reason]:
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
