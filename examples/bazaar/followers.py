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
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from examples.bazaar.adverts import Advert
from examples.bazaar.client import Client, ServerFailedError
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
    """Whole feeds that were as the site has it."""
    unfollowed: int = 0


def post_of(shop: str, item: str) -> str:
    """The id of an item's post."""
    return f"{shop}:{item}"


class Followers:
    """The followers, and what the site shows."""

    def __init__(self, api_url: str, token: str, shops: list[str]) -> None:
        self.followed = Followed()
        self._api_url, self._token, self._shops = api_url, token, shops
        self._shown: deque[tuple[float, frozenset[str]]] = deque()
        self._walked: list[tuple[float, str, set[str], set[str]]] = []

    def show(self, adverts: list[Advert]) -> None:
        """These are on the site now; whole feeds that were read before are compared with it."""
        now_s = time.monotonic()
        shown = frozenset(post_of(advert.shop, advert.item) for advert in adverts)
        self._shown.append((now_s, shown))
        for walk in self._walked:
            self._judge(*walk)
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
        shops = set(dice.sample(self._shops, max(1, len(self._shops) // 2)))
        try:
            body = json.dumps(sorted(shops)).encode()
            headers = {"content-type": "application/json"}
            reply = await client.request(
                "POST", f"{path}/follows", body=body, headers=headers, is_repeatable=True
            )
            reply.json()
            while True:
                await asyncio.sleep(_PAUSE_S * dice.uniform(0.5, 1.5))
                try:
                    await self._act(client, path, shops, dice)
                except ServerFailedError as error:
                    self.followed.fault(str(error))
        finally:
            client.close()

    async def _act(self, client: Client, path: str, shops: set[str], dice: random.Random) -> None:
        share = dice.random()
        if share < _UNFOLLOW_SHARE:
            shop = dice.choice(sorted(shops))
            await client.request("DELETE", f"{path}/follows/{shop}")
            await self._page(client, path, shops - {shop})
            await client.request("PUT", f"{path}/follows/{shop}")
            self.followed.unfollowed += 1
        elif share < _UNFOLLOW_SHARE + _WALK_SHARE:
            await self._walk(client, path, shops)
        else:
            await self._page(client, path, shops)

    async def _page(
        self, client: Client, path: str, shops: set[str], cursor: str | None = None
    ) -> tuple[list[str], str | None]:
        """The ids of a page's posts, checked, and the cursor of the next one."""
        more = "" if cursor is None else f"&cursor={cursor}"
        page: dict[str, Any] = await client.get_json(f"{path}?limit={PER_PAGE}{more}")
        posts = page["posts"]
        self.followed.pages += 1
        foreign = [post["id"] for post in posts if post["author"] not in shops]
        if foreign:
            self.followed.fault(f"{path}: {foreign[:3]} are of shops that are not followed")
        moments = [datetime.fromisoformat(post["at"]) for post in posts]
        if moments != sorted(moments, reverse=True):
            self.followed.fault(f"{path}: a page is not in order")
        return [post["id"] for post in posts], page.get("next_cursor")

    async def _walk(self, client: Client, path: str, shops: set[str]) -> None:
        """Read a whole feed, and compare it with the site."""
        began_s = time.monotonic()
        seen, cursor = await self._page(client, path, shops)
        while cursor is not None:
            found, cursor = await self._page(client, path, shops, cursor)
            seen += found
        if len(seen) != len(set(seen)):
            self.followed.fault(f"{path}: a post is there twice")
        self._walked.append((began_s, path, shops, set(seen)))

    def _judge(self, began_s: float, path: str, shops: set[str], seen: set[str]) -> None:
        """Compare a whole feed with what the site showed from some seconds before to just now."""
        if began_s - self._shown[0][0] < GRACE_S:
            return
        kept = [shown for _, shown in self._shown]
        always, ever = frozenset.intersection(*kept), frozenset.union(*kept)
        missing = {post for post in always - seen if post.partition(":")[0] in shops}
        extra = seen - ever
        if missing or extra:
            self.followed.fault(
                f"{path}: lacks {sorted(missing)[:3]}, has {sorted(extra)[:3]} too many"
            )
        else:
            self.followed.walks += 1
