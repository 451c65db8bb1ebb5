"""People who open adverts: each opening is counted by `views`, lists of adverts show the totals.

No two readers share an advert, so the next total must be one more than the last.
Every answer and every list is compared with that. Totals may be higher only by what the site's own
pages counted meanwhile, which the site notes. If a response is lost, it is unknown whether the view
was counted; then the next total is taken as it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from examples.bazaar.adverts import Advert
from examples.bazaar.client import Client, Reply
from examples.bazaar.faults import Faults

READERS: Final = 4
PER_LIST: Final = 20
_PAUSE_S: Final = 0.05
_LIST_SHARE: Final = 0.2


@dataclass(slots=True)
class Viewed(Faults):
    """What the readers saw until now."""

    views: int = 0
    sent: int = 0
    """Views that were sent, answered or not."""
    accepted: int = 0
    """Views that were answered: none of these may be lost."""
    refused: int = 0
    """Views that were answered with an error, or not at all."""
    lists: int = 0
    unchanged: int = 0
    """Lists that were answered with 304."""
    others: int = 0
    """Views that were counted for somebody else."""
    totals: dict[str, int] = field(default_factory=dict)


class Readers:
    """The readers, and the adverts they may open."""

    def __init__(self, api_url: str, token: str, *, opened: Callable[[], int] = lambda: 0) -> None:
        """`opened`: how many adverts were opened on the site's pages until now."""
        self.viewed = Viewed()
        self._opened = opened
        self._api_url, self._token = api_url, token
        self._adverts: list[list[str]] = [[] for _ in range(READERS)]

    def show(self, adverts: list[Advert]) -> None:
        """Open these from the next round on."""
        shares: list[list[str]] = [[] for _ in range(READERS)]
        for advert in adverts:
            name = f"{advert.shop}:{advert.item}"
            shares[crc32(name.encode()) % READERS].append(name)
        self._adverts = shares

    async def run(self) -> None:
        """Read until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(READERS):
                group.create_task(self._read_always(number))

    async def _read_always(self, number: int) -> None:
        client, dice = Client(self._api_url, token=self._token), random.Random(number)
        try:
            while True:
                await asyncio.sleep(_PAUSE_S * dice.uniform(0.5, 1.5))
                names = self._adverts[number]
                if not names:
                    continue
                if dice.random() < _LIST_SHARE:
                    await self._list(client, dice.sample(names, min(PER_LIST, len(names))))
                else:
                    # Some adverts are looked at far more often than others.
                    place = int(len(names) * dice.random() ** 3)
                    await self._open(client, names[place], f"reader{number}")
        finally:
            client.close()

    async def _open(self, client: Client, name: str, reader: str) -> None:
        known = self.viewed.totals.pop(name, None)
        path = f"/v1/views/items/{name}?viewer={reader}&class=human"
        self.viewed.sent += 1
        answer: dict[str, Any] | None = None
        with self.viewed.attempt("hits"):
            # If the connection ends first, it is counted or not: the next total shows which.
            answer = (await client.request("POST", path)).json()
        if answer is None:
            self.viewed.refused += 1
            return
        self.viewed.accepted += 1
        total = answer["total"]
        if total is None:
            return
        if known is not None and not await self._is_right(total - known - 1):
            self.viewed.fault(f"{name}: expected {known + 1} views, got {total}")
        self.viewed.totals[name] = total
        self.viewed.views += 1

    async def _list(self, client: Client, names: list[str]) -> None:
        path = f"/v1/views?ids={','.join(names)}"
        with self.viewed.attempt("reads of totals"):
            reply = await client.request("GET", path)
            reply.require_done()
            again = await client.request(
                "GET", path, headers={"If-None-Match": reply.headers["etag"]}
            )
            await self._check_list(path, reply, again)

    async def _check_list(self, path: str, reply: Reply, again: Reply) -> None:
        """Compare a list with the expected totals, and the same request with its ETag."""
        # A stale total, while Valkey is away, lacks the views of the last seconds.
        totals = {row["id"]: row["total"] for row in reply.json() if not row.get("stale")}
        for name, total in totals.items():
            known = self.viewed.totals.get(name)
            if known is None or total == known:
                continue
            if not await self._is_right(total - known):
                self.viewed.fault(f"{name}: expected {known} views in a list, got {total}")
            self.viewed.totals[name] = total
        if again.status == 200 and again.json() == reply.json():
            self.viewed.fault(f"{path}: nothing changed, expected 304, got {again.status}")
        self.viewed.lists += 1
        self.viewed.unchanged += again.status == 304

    async def _is_right(self, others: int) -> bool:
        """Whether so many views may be somebody else's, besides those found before."""
        self.viewed.others += max(0, others)
        if others <= 0:
            return others == 0
        return self.viewed.others <= await asyncio.to_thread(self._opened)
