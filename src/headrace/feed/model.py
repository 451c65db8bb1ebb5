"""Values of the feed: ids, positions, posts, changes, and the JSON form of pages. No I/O.

A position is (score, post id). Newer positions are greater, and ids compare by bytes, as Python
compares their characters. A position stays valid after its post was deleted.
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
    InvalidKind,
    InvalidLimit,
    InvalidPost,
    TooManyAtOnce,
)
from headrace.kernel.errors import mismatch
from headrace.kernel.ids import USER_ID

FeedId: TypeAlias = int | str
"""External id of a viewer or author: a number from 1 to 2**63 - 1, or a text."""
POST_ID_MAX: Final = 64
REF_MAX: Final = 1_000
ID_MAX: Final = 2**63 - 1
PAGE_MAX: Final = 200
AT_ONCE_MAX: Final = 10_000
POSTS_PER_CALL_MAX: Final = 1_000
KINDS_MAX: Final = 16
"""Kinds in a filter."""
MUTES_BLOCKS_MAX: Final = 10_000
"""Limit of mutes per viewer, and of blocks."""
UNREAD_MAX: Final = 100
TICKS: Final = 2048
"""Ticks of a score per millisecond."""
SCORE_MAX: Final = 2**53 - 1
VERSION_SLOTS: Final = 65_521
"""Number of small hashes with versions of follow sets; a prime, since ids may have bit fields."""
BUCKET_MS: Final = 65_536
FINE_MS: Final = BUCKET_MS * 64
"""Width of a level 2 bucket; `floor` and `fine` are multiples of it."""
FINE_FOR_MS: Final = 4 * 86_400_000
"""How long buckets of levels 0 and 1 are kept; older ones only if many authors posted."""
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}")
_NUMERIC: Final = re.compile(r"[+-]?[0-9]+")
_FEED_ID: Final = (
    "a whole number from 1 to 2**63 - 1, or a text of 1 to 128 of A-Z a-z 0-9 . _ : @ ~ -"
    " that is not a number"
)
_POST_ID: Final = f"1 to {POST_ID_MAX} of A-Z a-z 0-9 . _ : @ ~ -"
_KIND: Final = re.compile(r"[a-z0-9_-]{1,16}")
_KIND_TEXT: Final = "1 to 16 of a-z 0-9 _ -"
KIND_MARK: Final = "\x1f"
"""Separates id and kind in the index; it sorts before every character of an id."""


class ChangeKind(IntEnum):
    """What a version belongs to."""

    FOLLOWS = 0
    POSTS = 1


class MuteOrBlock(StrEnum):
    """Mute: hide an author from a viewer. Block: hide both from each other."""

    MUTE = "mute"
    BLOCK = "block"


class Position(NamedTuple):
    """Position of a post in time order, older first."""

    score: int
    id: str


NEWEST: Final = Position(2**63 - 1, "")
OLDEST: Final = Position(-1, "")


class Post(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stored post."""

    id: str
    author: FeedId
    at: datetime
    """Its time in the feed; for a waiting post the moment it becomes visible."""
    is_waiting: bool = False
    ref: str | None = None
    kind: str | None = None


class NewPost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A post to add. `at` defaults to now; a later moment delays the post until then."""

    author: FeedId
    id: str
    at: datetime | None = None
    ref: str | None = None
    """Passed to handlers of its deletion."""
    kind: str | None = None
    """By which pages can be filtered: 1 to 16 of a-z 0-9 _ -."""


class PagePost(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A post on a page."""

    id: str
    author: FeedId
    at: datetime
    """Its time in the feed."""
    kind: str | None = None


class Page(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"next": "next_cursor"}
):
    """Posts, newest first, or as a ranking orders them; without `next_cursor` the last page.

    `newest` is the position of the first post, for `since` and the read marker. `is_slow`: read
    from PostgreSQL, because the index is unavailable or has no posts of that age.
    """

    posts: list[PagePost]
    next: str | None = None
    """Cursor of the next page; None: last page."""
    newest: str | None = None
    is_slow: bool = False


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """The last post that a viewer has read; all None: no marker."""

    position: str | None = None
    post: str | None = None
    at: datetime | None = None
    """The time of that post."""
    set_at: datetime | None = None


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """Number of posts newer than the marker."""

    count: int
    has_more: bool = False
    """Whether there are more than `count`."""


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a list of followers, followed, muted or blocked authors."""

    id: FeedId
    since_at: datetime


class People(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"next": "next_cursor"}
):
    """A page of such a list, latest first, with its total; without `next_cursor` it is the end."""

    people: list[Person]
    total: int
    next: str | None = None


class PostDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of handlers of deletions."""

    id: str
    author: FeedId
    ref: str | None = None


class FeedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A viewer or author whose index differs from PostgreSQL."""

    kind: str
    entity: FeedId
    missing: int
    extra: int


class FeedVerified(msgspec.Struct, frozen=True, kw_only=True):
    """Result of comparing the index with PostgreSQL."""

    viewers: int
    authors: int
    posts: int
    follows: int
    differences: list[FeedDifference]

    @property
    def is_equal(self) -> bool:
        """Whether no entity differs."""
        return not self.differences


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one shard of the index."""

    shard: int
    state: str
    """missing, building, recovering, ahead (may have posts that PostgreSQL lost) or ready."""
    floor_at: datetime | None = None
    """Older posts are read from PostgreSQL; None: the index has all."""
    newest_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Items of one version with their scores; a negative score removes."""

    kind: ChangeKind
    entity: int
    version: int
    items: Sequence[str]
    scores: Sequence[int]
    id: int = 0
    """Id in the outbox, if it was read from there."""

    @property
    def is_emptying(self) -> bool:
        """Whether the entity has no items from this version on: a viewer unfollowed everyone."""
        return not self.items


def score_of(moment: datetime) -> int:
    """The lowest score of a moment's millisecond."""
    return int(moment.timestamp() * 1000) * TICKS


def moment_of(score: int) -> datetime:
    """The moment of a score."""
    return datetime.fromtimestamp(score // TICKS / 1000, UTC)


def require_feed_id(what: str, value: object) -> FeedId:
    """Validate an id of a viewer or author; a number may be text. Raises: InvalidFeedId.

    Text that resembles a number (007, -5, 0) is refused, because as a text id it would be another
    entity.
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
    """Validate ids and drop duplicates, in order. Raises: InvalidFeedId, TooManyAtOnce."""
    listed = require_many(what, values)
    found = list(dict.fromkeys(require_feed_id(what, value) for value in listed))
    if len(found) > AT_ONCE_MAX:
        raise TooManyAtOnce(f"{what}s", len(found), AT_ONCE_MAX)
    return found


def require_post_ids(values: Iterable[object]) -> list[str]:
    """Validate post ids and drop duplicates. Raises: InvalidFeedId, TooManyAtOnce."""
    found = list(
        dict.fromkeys(_require_post_id(value) for value in require_many("post", values, _POST_ID))
    )
    if len(found) > POSTS_PER_CALL_MAX:
        raise TooManyAtOnce("posts", len(found), POSTS_PER_CALL_MAX)
    return found


def require_posts(posts: Iterable[object]) -> list[NewPost]:
    """Validate posts; return them with canonical authors.

    Raises: InvalidFeedId, InvalidPost, TooManyAtOnce.
    """
    found: dict[str, NewPost] = {}
    for post in require_many("post", posts, "a NewPost"):
        if not isinstance(post, NewPost):
            raise InvalidPost(f"{str(post)[:40]!r}: expected a NewPost; nothing was posted")
        _require_post_id(post.id)
        author = require_feed_id("author", post.author)
        if fault := _fault_of(post):
            raise InvalidPost(f"post {post.id!r}: {fault}; nothing was posted")
        if post.id in found:
            raise InvalidPost(f"post {post.id!r} appears twice; nothing was posted")
        found[post.id] = NewPost(
            author=author, id=post.id, at=post.at, ref=post.ref, kind=post.kind
        )
    if len(found) > POSTS_PER_CALL_MAX:
        raise TooManyAtOnce("posts", len(found), POSTS_PER_CALL_MAX)
    return list(found.values())


def require_limit(limit: object, limit_max: int = PAGE_MAX, *, what: str = "limit") -> int:
    """Validate a number of rows. Raises: InvalidLimit."""
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= limit_max:
        raise InvalidLimit(limit, limit_max, what=what)
    return limit


def require_since(author: object, at: object) -> datetime | None:
    """Validate the moment of a follow; None: now. Raises: InvalidFollow."""
    if at is None:
        return None
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise InvalidFollow(
            f"author {str(author)[:40]!r}: since {str(at)[:40]!r}, expected a moment with a time"
            " zone; nothing of this call was done"
        )
    return at


def require_many(what: str, values: object, expected: str = _FEED_ID) -> Iterable[Any]:
    """Validate a list, which bytes are not. Raises: InvalidFeedId."""
    if isinstance(values, Iterable) and not isinstance(values, bytes | bytearray | memoryview):
        return values
    raise InvalidFeedId(f"{what}s", values, f"a list, each of them {expected}")


def _fault_of(post: NewPost) -> str:
    """The error in `at`, `ref` or `kind`; empty: none."""
    return _fault_of_moment(post.at) or _fault_of_ref(post.ref) or _fault_of_kind(post.kind)


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
        return f"ref may have {REF_MAX} characters, without NUL and unpaired surrogates"
    return ""


def _fault_of_kind(kind: object) -> str:
    if kind is None or (isinstance(kind, str) and _KIND.fullmatch(kind)):
        return ""
    return f"kind is {str(kind)[:40]!r}, expected {_KIND_TEXT}"


def require_kinds(kinds: Iterable[str] | None) -> frozenset[str] | None:
    """Validate the kinds of a filter, also as `photo,video`; None: no filter.

    Raises: InvalidKind.
    """
    if kinds is None:
        return None
    try:
        listed = kinds.split(",") if isinstance(kinds, str) else list(kinds)
    except TypeError as error:
        raise InvalidKind(mismatch(f"a list of kinds, each {_KIND_TEXT}", kinds)) from error
    for kind in listed:
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise InvalidKind(f"kind {str(kind)[:40]!r}: expected {_KIND_TEXT}")
    if not 1 <= len(listed) <= KINDS_MAX:
        raise InvalidKind(f"{len(listed)} kinds: expected 1 to {KINDS_MAX}")
    return frozenset(listed)


def entry_of(post_id: str, kind: str | None) -> str:
    """A post as the index stores it. Entries are ordered like the ids."""
    return post_id if kind is None else f"{post_id}{KIND_MARK}{kind}"


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
