"""Rankings: pages in an order that the application decides.

    newest `newest` posts below a fixed position --> handler(viewer, posts) --> pages of its result
    then the next window: the `newest` posts below the first window

New posts are above a window that is being read. Its first position and checksums of the returned
ids are in the cursor, so nothing is stored per viewer. The handler orders the window again for each
page, and the page has the first posts that were not returned yet. So no post is repeated or
omitted, even if the order changes between two pages.
"""

from __future__ import annotations

import asyncio
import base64
import re
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from headrace.feed.errors import InvalidRanking, RankingFailed, RankingUnknown
from headrace.feed.model import FeedId, PagePost, Position
from headrace.jobs.tasks.payloads import is_async
from headrace.kernel.logs import logger

TIMEOUT_S: Final = 5.0
WINDOW_MAX: Final = 200
"""Posts that a ranking orders at once."""
CHECKSUM_BYTES: Final = 4
_log: Final = logger(__name__)
_NAME: Final = re.compile(r"[a-z0-9_-]{1,32}")

Order: TypeAlias = Callable[
    [FeedId, list[PagePost]], Sequence[PagePost] | Awaitable[Sequence[PagePost]]
]
"""Return the given posts of a viewer, newest first, in another order; omitted ones are hidden."""


class Ranking(NamedTuple):
    """An order of the newest posts of a viewer."""

    name: str
    newest: int
    """Number of posts in a window."""
    order: Order

    async def rank(self, viewer: FeedId, posts: list[PagePost]) -> list[PagePost]:
        """The posts in the order of the handler, a plain one in a thread. Raises: RankingFailed."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                order: Callable[..., Any] = self.order
                found: Any
                if is_async(order):
                    found = await order(viewer, list(posts))
                else:
                    found = await asyncio.to_thread(order, viewer, list(posts))
        except TimeoutError:
            raise RankingFailed(self.name, f"did not end within {TIMEOUT_S:.0f} s") from None
        except (Exception, SystemExit) as error:
            _log.exception("ranking_raised", ranking=self.name)
            raise RankingFailed(self.name, f"raised {type(error).__name__}") from error
        if not isinstance(found, list | tuple):
            raise RankingFailed(self.name, f"returned a {type(found).__name__}")
        if len(set(found)) != len(found) or not set(found) <= set(posts):
            raise RankingFailed(self.name, "returned a post that it was not given, or one twice")
        return list(found)


class RankedPlace(NamedTuple):
    """Where a page of a ranking starts."""

    before: Position | None
    """Start of the window; None: the newest post."""
    returned: frozenset[int] = frozenset()
    """Checksums of the ids that earlier pages of the window had."""

    def remaining(self, ranked: Sequence[PagePost]) -> list[PagePost]:
        """The posts of the window that were not returned yet."""
        return [post for post in ranked if _checksum(post.id) not in self.returned]

    def after(self, posts: Sequence[PagePost]) -> RankedPlace:
        """The place in the same window after more posts were returned."""
        return self._replace(returned=self.returned | {_checksum(post.id) for post in posts})

    def to_position(self) -> list[int | str]:
        """The content of a cursor; the window has a start."""
        assert self.before is not None
        raw = b"".join(each.to_bytes(CHECKSUM_BYTES) for each in sorted(self.returned))
        return [*self.before, base64.b85encode(raw).decode()]


def place_of(position: tuple[int, str, str] | None) -> RankedPlace:
    """The place with this content of a signed cursor; without one the first place."""
    if position is None:
        return RankedPlace(None)
    score, post_id, returned = position
    raw = base64.b85decode(returned)
    parts = range(0, len(raw), CHECKSUM_BYTES)
    checksums = frozenset(int.from_bytes(raw[n : n + CHECKSUM_BYTES]) for n in parts)
    return RankedPlace(Position(score, post_id), checksums)


def _checksum(post_id: str) -> int:
    return zlib.crc32(post_id.encode())


class Rankings:
    """The rankings of an application, by name."""

    def __init__(self) -> None:
        self._rankings: dict[str, Ranking] = {}

    def define(self, name: str, order: Order, *, newest: int) -> None:
        """Add a ranking. Raises: InvalidRanking."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRanking(f"ranking {str(name)[:40]!r}: expected 1 to 32 of a-z 0-9 _ -")
        if name in self._rankings:
            raise InvalidRanking(f"ranking {name!r} is defined twice: use another name")
        if not isinstance(newest, int) or isinstance(newest, bool) or not 1 <= newest <= WINDOW_MAX:
            raise InvalidRanking(
                f"ranking {name!r}: newest is {str(newest)[:20]!r}, expected 1 to {WINDOW_MAX}"
            )
        self._rankings[name] = Ranking(name, newest, order)

    def find(self, name: object) -> Ranking:
        """A ranking by its name. Raises: RankingUnknown."""
        found = self._rankings.get(name) if isinstance(name, str) else None
        if found is None:
            raise RankingUnknown(name, self.names())
        return found

    def names(self) -> list[str]:
        """The names of all rankings."""
        return sorted(self._rankings)
