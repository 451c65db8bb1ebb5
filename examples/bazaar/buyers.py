"""Simulated buyers that open the shop's pages like a browser and check the content.

A buyer opens the listing, an item, follows its seller, finds the item in the feed, unfollows again,
and plays a track by range as a player does: first its head, then its data piece by piece, which
must be the track's bytes.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from typing import Final

from examples.bazaar.client import Client, Reply, ServerFailedError
from examples.bazaar.faults import Faults
from examples.bazaar.tracks import TRACKS, Track

BUYERS: Final = 2
PIECE_BYTES: Final = 64 * 1024
_PAUSE_S: Final = 0.6
_ITEM: Final = re.compile(r'href="(/items/([^"/]+)/[^"]+)"')
_VIEWS: Final = re.compile(r'class="views">\s*<span[^>]*>([0-9,]+) view')
_PLAYER: Final = re.compile(r'<audio [^>]*src="([^"]+)"')


@dataclass(slots=True)
class Bought(Faults):
    """What the buyers saw until now."""

    pages: int = 0
    ways: int = 0
    """Whole ways from the listing to the feed and back."""
    tracks: int = 0
    ranges: int = 0
    """Requests for parts of tracks."""
    range_bytes: int = 0


class Buyers:
    """The buyers."""

    def __init__(self, shop_url: str, media_url: str) -> None:
        self.bought = Bought()
        self._shop_url, self._media_url = shop_url, media_url

    async def run(self) -> None:
        """Come and go until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(BUYERS):
                group.create_task(self._buy_always(random.Random(number)))

    async def _buy_always(self, dice: random.Random) -> None:
        shop, media = Client(self._shop_url), Client(self._media_url)
        try:
            tab = Tab(shop, self._shop_url, self.bought)
            while True:
                with self.bought.attempt("visits of an advert and its seller"):
                    await self._look_around(tab, dice)
                with self.bought.attempt("plays of tracks"):
                    await self._play(tab, media, dice.choice(TRACKS))
                await asyncio.sleep(_PAUSE_S)
        finally:
            shop.close()
            media.close()

    async def _look_around(self, tab: Tab, dice: random.Random) -> None:
        links = sorted(set(_ITEM.findall(await tab.get("/"))))
        if not links:
            return
        path, seller = dice.choice(links)
        before, after = await _views_of(tab, path), await _views_of(tab, path)
        if before is None or after is None:
            return
        if after <= before:
            self.bought.fault(f"{path}: {before} views, and {after} when opened again")
        await tab.change(f"/sellers/{seller}/follow")
        feed = await tab.get("/feed")
        if f"/sellers/{seller}" not in feed:
            self.bought.fault(f"/feed: {seller} is followed and not there")
        await tab.change(f"/sellers/{seller}/unfollow")
        if f"/sellers/{seller}" in await tab.get("/feed"):
            self.bought.fault(f"/feed: {seller} is no longer followed and there")
        self.bought.ways += 1

    async def _play(self, tab: Tab, media: Client, track: Track) -> None:
        found = _PLAYER.search(await tab.get(f"/tracks/{track.name}"))
        if found is None:
            self.bought.fault(f"/tracks/{track.name}: no player")
            return
        path = unescape(found[1]).removeprefix(self._media_url)
        received, size = b"", 1
        while len(received) < size:
            span = f"bytes={len(received)}-{len(received) + PIECE_BYTES - 1}"
            reply = await media.request("GET", path, headers={"Range": span})
            self.bought.ranges += 1
            self.bought.range_bytes += len(reply.body)
            if reply.status != 206 or reply.headers.get("content-type") != "audio/wav":
                self.bought.fault(f"{path} {span}: expected 206 of audio/wav, got {reply.status}")
                return
            size = int(reply.headers["content-range"].rpartition("/")[2])
            received += reply.body
        if received != await asyncio.to_thread(track.data):
            self.bought.fault(f"{path}: the ranges together are not the track")
        else:
            self.bought.tracks += 1


class Tab:
    """A browser's tab: keeps the shop's cookie, names its origin when it sends a form."""

    def __init__(self, client: Client, shop_url: str, bought: Bought) -> None:
        self._client, self._origin, self._bought = client, shop_url, bought
        self._cookie = ""

    async def get(self, path: str) -> str:
        """The text of a page. Raises: ServerFailedError."""
        return self.text(path, await self.ask("GET", path))

    async def change(self, path: str) -> None:
        """Send a form. Raises: ServerFailedError."""
        reply = await self.ask("POST", path, {"Origin": self._origin})
        if reply.status != 303:
            raise ServerFailedError(f"POST {path}: expected 303, got {reply.status}")

    async def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        """One exchange. Raises: ServerFailedError, when nobody answers."""
        # Without the tour, whose card names a seller on every page.
        cookies = "; ".join(filter(None, ("bazaar_tour=0", self._cookie)))
        reply = await self._client.request(
            method, path, headers={"Cookie": cookies, **(headers or {})}, is_repeatable=True
        )
        given = reply.headers.get("set-cookie")
        if given:
            self._cookie = given.partition(";")[0]
        self._bought.pages += 1
        return reply

    def text(self, path: str, reply: Reply) -> str:
        """The page in `reply`. Raises: ServerFailedError."""
        text = reply.body.decode()
        if reply.status != 200:
            raise ServerFailedError(f"GET {path}: expected 200, got {reply.status}: {reply.reason}")
        return text


async def _views_of(tab: Tab, path: str) -> int | None:
    """The views that an item's page shows once it was opened.

    None: it was sold since the listing was made, or its total is unknown for now.
    """
    reply = await tab.ask("GET", path)
    found = None if reply.status == 404 else _VIEWS.search(tab.text(path, reply))
    return int(found[1].replace(",", "")) if found else None
