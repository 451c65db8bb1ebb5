"""People who follow some of the shops: their feeds show the newest items of these, by `feed`.

A follower reads pages, now and then the whole feed to its end, and now and then unfollows a shop
and follows it again. No page may hold a post twice, out of order, or of a shop that is not
followed, and the whole feed must be what the site shows of these shops: all that was on the site
for some seconds, and nothing that was off it so long.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from examples.bazaar.adverts import Advert
from examples.bazaar.client import Client
from examples.bazaar.faults import Faults

FOLLOWERS: Final = 3
PER_PAGE: Final = 20
GRACE_S: Final = 10.0
"""The site's table and the feed are two systems.

Between its writes a handler may be killed and called again.
"""
_PAUSE_S: Final = 0.2
_WALK_SHARE: Final = 0.15
_UNFOLLOW_SHARE: Final = 0.1


@dataclass(slots=True)
class Followed(Faults):
    """What the followers saw until now."""

    pages: int = 0
    walks: int = 0
    """Complete feeds that were as the site has it."""
    unfollowed: int = 0
    """Sellers that were unfollowed and followed again."""


@dataclass(slots=True)
class Follows:
    """The sellers that a follower follows, as far as the answers show it."""

    certain: set[str]
    """Sellers whose last change, a follow, was acknowledged."""
    unknown: set[str] = field(default_factory=set)
    """Sellers whose last change failed.

    It may be done or not, also if the answer was 503: the commit's own reply may be lost. The next
    acknowledged change decides.
    """


@dataclass(frozen=True, slots=True)
class Walk:
    """A complete feed, and what was followed while it was read."""

    began_s: float
    path: str
    certain: frozenset[str]
    seen: frozenset[str]


def post_of(shop: str, item: str) -> str:
    """The id of an item's post."""
    return f"{shop}:{item}"


class Followers:
    """The followers, and what the site shows."""

    def __init__(self, api_url: str, token: str, shops: list[str]) -> None:
        self.followed = Followed()
        self._api_url, self._token, self._shops = api_url, token, shops
        self._shown: deque[tuple[float, frozenset[str]]] = deque()
        self._walked: list[Walk] = []

    def show(self, adverts: list[Advert]) -> None:
        """These are on the site now; whole feeds that were read before are compared with it."""
        now_s = time.monotonic()
        shown = frozenset(post_of(advert.shop, advert.item) for advert in adverts)
        self._shown.append((now_s, shown))
        for walk in self._walked:
            self._judge(walk)
        self._walked.clear()
        while len(self._shown) > 1 and now_s - self._shown[1][0] > 2 * GRACE_S:
            self._shown.popleft()

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(FOLLOWERS):
                group.create_task(self._read_always(number))

    async def _read_always(self, number: int) -> None:
        client, dice = Client(self._api_url, token=self._token), random.Random(number)
        path = f"/v1/feed/viewers/follower{number}"
        follows = Follows(set())
        try:
            while True:
                if follows.certain:
                    await self._act(client, path, follows, dice)
                else:
                    with self.followed.attempt("first follows"):
                        chosen = dice.sample(self._shops, max(1, len(self._shops) // 2))
                        await self._follow_first(client, path, follows, chosen)
                await asyncio.sleep(_PAUSE_S * dice.uniform(0.5, 1.5))
        finally:
            client.close()

    async def _act(self, client: Client, path: str, follows: Follows, dice: random.Random) -> None:
        share = dice.random()
        if follows.unknown:
            with self.followed.attempt("follows"):
                await self._follow(client, path, follows, min(follows.unknown))
        elif share < _UNFOLLOW_SHARE:
            with self.followed.attempt("unfollows"):
                shop = dice.choice(sorted(follows.certain))
                await self._unfollow(client, path, follows, shop)
                await self._page(client, path, follows)
                await self._follow(client, path, follows, shop)
                self.followed.unfollowed += 1
        elif share < _UNFOLLOW_SHARE + _WALK_SHARE:
            with self.followed.attempt("reads of complete feeds"):
                await self._walk(client, path, follows)
        else:
            with self.followed.attempt("reads of feeds"):
                await self._page(client, path, follows)

    async def _follow_first(
        self, client: Client, path: str, follows: Follows, shops: list[str]
    ) -> None:
        follows.unknown.update(shops)
        body = json.dumps(sorted(follows.unknown)).encode()
        headers = {"content-type": "application/json"}
        reply = await client.request(
            "POST", f"{path}/follows", body=body, headers=headers, is_repeatable=True
        )
        reply.require_done()
        follows.certain, follows.unknown = follows.unknown, set()

    async def _unfollow(self, client: Client, path: str, follows: Follows, shop: str) -> None:
        follows.certain.discard(shop)
        follows.unknown.add(shop)
        (await client.request("DELETE", f"{path}/follows/{shop}")).require_done()
        follows.unknown.discard(shop)

    async def _follow(self, client: Client, path: str, follows: Follows, shop: str) -> None:
        follows.unknown.add(shop)
        (await client.request("PUT", f"{path}/follows/{shop}")).require_done()
        follows.unknown.discard(shop)
        follows.certain.add(shop)

    async def _page(
        self, client: Client, path: str, follows: Follows, cursor: str | None = None
    ) -> tuple[list[str], str | None]:
        """The ids of a page's posts, checked, and the cursor of the next one."""
        more = "" if cursor is None else f"&cursor={cursor}"
        page: dict[str, Any] = await client.get_json(f"{path}?limit={PER_PAGE}{more}")
        posts = page["posts"]
        self.followed.pages += 1
        allowed = follows.certain | follows.unknown
        foreign = [post["id"] for post in posts if post["author"] not in allowed]
        if foreign:
            self._wrong(path, f"has {_named(foreign)} of sellers that are not followed")
        moments = [datetime.fromisoformat(post["at"]) for post in posts]
        if moments != sorted(moments, reverse=True):
            self._wrong(path, "has a page that is not in order")
        return [post["id"] for post in posts], page.get("next_cursor")

    async def _walk(self, client: Client, path: str, follows: Follows) -> None:
        """Read a complete feed, and compare it with the site."""
        began_s, certain = time.monotonic(), frozenset(follows.certain)
        seen, cursor = await self._page(client, path, follows)
        while cursor is not None:
            found, cursor = await self._page(client, path, follows, cursor)
            seen += found
        if len(seen) != len(set(seen)):
            self._wrong(path, "has a post twice")
        self._walked.append(Walk(began_s, path, certain, frozenset(seen)))

    def _judge(self, walk: Walk) -> None:
        """Compare a complete feed with what the site showed from some seconds before to now."""
        if walk.began_s - self._shown[0][0] < GRACE_S:
            return
        kept = [shown for _, shown in self._shown]
        always, ever = frozenset.intersection(*kept), frozenset.union(*kept)
        missing = {post for post in always - walk.seen if post.partition(":")[0] in walk.certain}
        extra = walk.seen - ever
        if missing or extra:
            lacking = _named(missing) if missing else "nothing"
            too_many = f"has {_named(extra)} too many" if extra else "nothing extra"
            self._wrong(walk.path, f"is missing {lacking}; {too_many}")
        else:
            self.followed.walks += 1

    def _wrong(self, path: str, text: str) -> None:
        self.followed.fault(f"wrong answer: feed of {path.rpartition('/')[2]} {text}")


def _named(posts: Collection[str]) -> str:
    """The number of posts, and the first three."""
    names = ", ".join(sorted(posts)[:3]) + (", ..." if len(posts) > 3 else "")
    return f"{len(posts)} post{'s' if len(posts) > 1 else ''} ({names})"
