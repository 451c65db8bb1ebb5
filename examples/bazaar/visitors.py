"""Visitors of the site: they look at photos through `media`, by range, and check what they get.

Each visit takes one photo of a shown advert in three ranges (first bytes, middle, the rest), puts
them together and compares the SHA-256 with the one in the advert. Now and then a visitor requests
with an ETag (304), past the end (416) or for the whole photo (200). A visit pauses, so that the
figures show a living site and not a load test of a shared machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from examples.bazaar.adverts import Advert, Photo
from examples.bazaar.client import Client, Reply
from examples.bazaar.faults import Faults

VISITORS: Final = 6
_PAUSE_S: Final = 0.08


@dataclass(slots=True)
class Seen(Faults):
    """What the visitors got until now."""

    statuses: Counter[int] = field(default_factory=Counter)
    body_bytes: int = 0
    photos_whole: int = 0
    keys: set[str] = field(default_factory=set)

    def count(self, reply: Reply) -> Reply:
        """Count one answer."""
        self.statuses[reply.status] += 1
        self.body_bytes += len(reply.body)
        return reply


class Crowd:
    """The visitors, and the photos they may look at."""

    def __init__(self, media_url: str) -> None:
        self.seen = Seen()
        self._media_url = media_url
        self._photos: list[Photo] = []

    def show(self, adverts: list[Advert]) -> None:
        """Visit the photos of these adverts."""
        self._photos = [photo for advert in adverts for photo in advert.photos if photo.key]

    async def run(self) -> None:
        """Visit until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(VISITORS):
                group.create_task(self._visit_always(random.Random(number)))

    async def _visit_always(self, dice: random.Random) -> None:
        client = Client(self._media_url)
        try:
            while True:
                await asyncio.sleep(_PAUSE_S * dice.uniform(0.5, 1.5))
                if self._photos:
                    await self._visit(client, dice.choice(self._photos), dice)
        finally:
            client.close()

    async def _visit(self, client: Client, photo: Photo, dice: random.Random) -> None:
        with self.seen.attempt("reads of photos"):
            etag = await self._look(client, photo, dice)
            if dice.random() < 0.25:
                await self._ask_again(client, photo, etag)

    async def _look(self, client: Client, photo: Photo, dice: random.Random) -> str:
        size = photo.size_bytes
        cut, path = dice.randint(2, size - 2), f"/m/{photo.key}"
        first = dice.randint(0, cut - 2)
        parts, etag = [], ""
        for span in (f"0-{first}", f"{first + 1}-{cut - 1}", f"{cut}-"):
            reply = self.seen.count(
                await client.request("GET", path, headers={"Range": f"bytes={span}"})
            )
            begin, _, end = span.partition("-")
            expected = f"bytes {begin}-{end or size - 1}/{size}"
            if reply.status != 206 or reply.headers.get("content-range") != expected:
                self.seen.fault(f"{path} {span}: expected 206 with {expected}, got {reply.status}")
                return ""
            parts.append(reply.body)
            etag = reply.headers.get("etag", "")
        if hashlib.sha256(b"".join(parts)).hexdigest() != photo.sha256:
            self.seen.fault(f"{path}: the ranges together are not the bytes of {photo.sha256}")
        else:
            self.seen.photos_whole += 1
            self.seen.keys.add(photo.key)
        return etag

    async def _ask_again(self, client: Client, photo: Photo, etag: str) -> None:
        path = f"/m/{photo.key}"
        past_end = f"bytes={photo.size_bytes}-"
        for headers, expected in (
            ({"If-None-Match": etag}, 304),
            ({"Range": past_end}, 416),
            ({}, 200),
        ):
            reply = self.seen.count(await client.request("GET", path, headers=headers))
            if reply.status != expected:
                self.seen.fault(f"{path} with {headers}: expected {expected}, got {reply.status}")
            elif expected == 200 and hashlib.sha256(reply.body).hexdigest() != photo.sha256:
                self.seen.fault(f"{path}: the whole body is not the bytes of {photo.sha256}")
