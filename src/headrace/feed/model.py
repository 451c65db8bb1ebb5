"""The feed as values: ids, places in a feed, posts, changes of the index. No I/O.

A place is (score, id of a post): newer is greater, and ids are compared by their bytes, which for the characters they
may have is how Python compares them. It stays a place when its post is gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from headrace.feed.errors import (
    InvalidFeedId,
    InvalidFollow,
    InvalidLimit,
    InvalidPost,
    TooManyAtOnce,
)
from headrace.kernel.ids import USER_ID

FeedId: TypeAlias = int | str
"""A viewer or author as its owner names it: a number from 1 to 2**63 - 1, or a name."""
POST_ID_MAX: Final = 64
REF_MAX: Final = 1_000
ID_MAX: Final = 2**63 - 1
PAGE_MAX: Final = 200
AT_ONCE_MAX: Final = 10_000
POSTS_PER_CALL_MAX: Final = 1_000
BARS_MAX: Final = 10_000
"""So many authors a viewer may mute, and so many he may block."""
UNREAD_MAX: Final = 100
TICKS: Final = 2048
SCORE_MAX: Final = 2**53 - 1
VERSION_SLOTS: Final = 65_521
"""Versions of follow sets are kept in so many small hashes; a prime, since ids may be made of bit fields."""
BUCKET_MS: Final = 65_536
FINE_MS: Final = BUCKET_MS * 64
"""The width of a bucket of level 2; `floor` and `fine` are multiples of it."""
FINE_FOR_MS: Final = 4 * 86_400_000
"""How long buckets of levels 0 and 1 are kept; older ones are kept only where many authors posted."""
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}")
_NUMERIC: Final = re.compile(r"[+-]?[0-9]+")
_FEED_ID: Final = "a whole number from 1 to 2**63 - 1, or a name: 1 to 128 of A-Z a-z 0-9 . _ : @ ~ - that are no number"
_POST_ID: Final = f"1 to {POST_ID_MAX} of A-Z a-z 0-9 . _ : @ ~ -"


class Kind(IntEnum):
    """What a version is of."""

    FOLLOWS = 0
    POSTS = 1


class Bar(StrEnum):
    """Why a viewer does not see an author: he muted him, or one of the two blocked the other."""

    MUTE = "mute"
    BLOCK = "block"


class Place(NamedTuple):
    """Where a post stands; compared as pages are ordered, from old to new."""

    score: int
    id: str


NEWEST: Final = Place(2**63 - 1, "")
OLDEST: Final = Place(-1, "")


class Post(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A post as it is kept."""

    id: str
    author: FeedId
    at: datetime
    """Its moment in the feed; of one that waits, when it is to be shown."""
    is_waiting: bool = False
    ref: str | None = None


class NewPost(msgspec.Struct, frozen=True, kw_only=True):
    """A post to add. `at`: its moment, now if left out; a later one is shown then."""

    author: FeedId
    id: str
    at: datetime | None = None
    ref: str | None = None


class PagePost(NamedTuple):
    """A post on a page."""

    id: str
    author: FeedId
    score: int

    @property
    def at(self) -> datetime:
        """Its moment in the feed."""
        return moment_of(self.score)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Posts, newest first. A page that is not full is the last one."""

    posts: list[PagePost]
    next: str | None = None
    """The cursor of the page after it; None: there is none."""
    newest: str | None = None
    """The place of its first post, for `since` and the read marker; None: it has no posts."""
    is_slow: bool = False
    """Whether it was read from PostgreSQL."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where a viewer has read; all None: nothing yet."""

    place: str | None = None
    post: str | None = None
    at: datetime | None = None
    """The moment of that post."""
    set_at: datetime | None = None


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """How many posts are newer than the marker."""

    count: int
    has_more: bool = False
    """Whether there are more than so many."""


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a list of followers, followed, muted or blocked."""

    id: FeedId
    since_at: datetime


class People(msgspec.Struct, frozen=True, kw_only=True):
    """A part of such a list, latest first."""

    people: list[Person]
    total: int
    next: str | None = None


class PostDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What handlers of deletions are given."""

    id: str
    author: FeedId
    ref: str | None = None


class Differs(msgspec.Struct, frozen=True, kw_only=True):
    """A viewer or author whose index is not its truth."""

    kind: str
    entity: FeedId
    missing: int
    extra: int


class FeedVerified(msgspec.Struct, frozen=True, kw_only=True):
    """How index and truth compare."""

    viewers: int
    authors: int
    posts: int
    follows: int
    differences: list[Differs]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """How one shard of the index stands."""

    shard: int
    state: str
    """missing, building or ready."""
    floor_at: datetime | None = None
    """Older posts are read from PostgreSQL; None: all are here."""
    newest_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What a version changes: items with their scores; a score below 0 removes."""

    kind: Kind
    entity: int
    version: int
    items: Sequence[str]
    scores: Sequence[int]
    id: int = 0
    """Of its row in the outbox, where it was read from there."""
    is_whole: bool = False
    """Whether these are all items there are at that version, rather than what changed."""


def score_of(moment: datetime) -> int:
    """The least score of a moment's millisecond."""
    return int(moment.timestamp() * 1000) * TICKS


def moment_of(score: int) -> datetime:
    """The moment that a score tells."""
    return datetime.fromtimestamp(score // TICKS / 1000, UTC)


def require_feed_id(what: str, value: object) -> FeedId:
    """A viewer's or author's id; a number may be written as text. Raises: InvalidFeedId.

    Text that only looks like such a number (007, -5, 0) is refused: as a name it would be somebody else.
    """
    if isinstance(value, str):
        if _NUMBER.fullmatch(value):
            if int(value) <= ID_MAX:
                return int(value)
        elif USER_ID.fullmatch(value) and not _NUMERIC.fullmatch(value):
            return value
    elif isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= ID_MAX:
        return value
    raise InvalidFeedId(what, value, _FEED_ID)


def require_feed_ids(what: str, values: Iterable[object]) -> list[FeedId]:
    """Ids without doubles, in order. Raises: InvalidFeedId, TooManyAtOnce."""
    listed = require_many(what, values)
    found = list(dict.fromkeys(require_feed_id(what, value) for value in listed))
    if len(found) > AT_ONCE_MAX:
        raise TooManyAtOnce(f"{what}s", len(found), AT_ONCE_MAX)
    return found


def require_post_ids(values: Iterable[object]) -> list[str]:
    """Ids of posts without doubles. Raises: InvalidFeedId, TooManyAtOnce."""
    found = list(
        dict.fromkeys(_require_post_id(value) for value in require_many("post", values, _POST_ID))
    )
    if len(found) > POSTS_PER_CALL_MAX:
        raise TooManyAtOnce("posts", len(found), POSTS_PER_CALL_MAX)
    return found


def require_posts(posts: Iterable[object]) -> list[NewPost]:
    """Posts that may be added, with canonical authors. Raises: InvalidFeedId, InvalidPost, TooManyAtOnce."""
    found: dict[str, NewPost] = {}
    for post in require_many("post", posts, "a NewPost"):
        if not isinstance(post, NewPost):
            raise InvalidPost(f"{str(post)[:40]!r}: expected a NewPost; nothing was posted")
        _require_post_id(post.id)
        author = require_feed_id("author", post.author)
        if fault := _fault_of(post):
            raise InvalidPost(f"post {post.id!r}: {fault}; nothing was posted")
        if post.id in found:
            raise InvalidPost(f"post {post.id!r} is there twice; nothing was posted")
        found[post.id] = NewPost(author=author, id=post.id, at=post.at, ref=post.ref)
    if len(found) > POSTS_PER_CALL_MAX:
        raise TooManyAtOnce("posts", len(found), POSTS_PER_CALL_MAX)
    return list(found.values())


def require_limit(limit: object, limit_max: int = PAGE_MAX, *, what: str = "limit") -> int:
    """How many lines a page is to have. Raises: InvalidLimit."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= limit_max:
        raise InvalidLimit(limit, limit_max, what=what)
    return limit


def require_since(author: object, at: object) -> datetime | None:
    """Since when an author is followed; None: now. Raises: InvalidFollow."""
    if at is None:
        return None
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise InvalidFollow(
            f"author {str(author)[:40]!r}: since {str(at)[:40]!r}, expected a moment with its time zone; nothing"
            " of this call was done"
        )
    return at


def require_many(what: str, values: object, expected: str = _FEED_ID) -> Iterable[Any]:
    """Several values: no bytes, whose parts would be numbers, nor a single thing. Raises: InvalidFeedId."""
    if isinstance(values, Iterable) and not isinstance(values, bytes | bytearray | memoryview):
        return values
    raise InvalidFeedId(f"{what}s", values, f"a list, each of them {expected}")


def _fault_of(post: NewPost) -> str:
    """What is wrong with moment or note; empty for nothing."""
    return _fault_of_moment(post.at) or _fault_of_ref(post.ref)


def _fault_of_moment(at: object) -> str:
    if at is None:
        return ""
    if not isinstance(at, datetime):
        return f"at is {str(at)[:40]!r}, expected a moment"
    if at.tzinfo is None:
        return "at needs a time zone"
    return "" if 0 <= score_of(at) <= SCORE_MAX else "at is before 1970 or after 2109"


def _fault_of_ref(ref: object) -> str:
    if ref is None:
        return ""
    if not isinstance(ref, str):
        return f"ref is {str(ref)[:40]!r}, expected text"
    if len(ref) > REF_MAX or "\0" in ref or not _is_text(ref):
        return f"ref may have {REF_MAX} characters, none of them NUL or half of one"
    return ""


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_post_id(value: object) -> str:
    if isinstance(value, str) and len(value) <= POST_ID_MAX and USER_ID.fullmatch(value):
        return value
    raise InvalidFeedId("post", value, _POST_ID)
