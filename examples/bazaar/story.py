"""What happens in the demo, and whether it happened as it should.

First every seller hands in a catalogue. Then, every few seconds, one seller hands in the next
version (one item changed, one gone) and another the same file again. What is right is computed
here from the catalogue and the site's own table; what happened is read from that table and from
the log of the sellers' hosts. The site must get exactly the changed, new and gone items, and no
photo that it has may be downloaded again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from examples.bazaar.adverts import Advert, Adverts
from examples.bazaar.catalogues import Shelf
from examples.bazaar.faults import Faults
from examples.bazaar.lock import DemoError
from examples.bazaar.sellers import Desk
from examples.bazaar.shops import Shop
from examples.bazaar.stage import CommandFailedError, Stage

CHANGE_EVERY_S: Final = 4.0
SETTLE_S: Final = 300.0
"""Longest time from a catalogue to the site.

A busy machine needs a minute for what else takes seconds.
"""
LEFT_OVER_S: Final = 60.0
AGAIN_S: Final = 2.0
Changes = set[tuple[str, str]]
"""(action, item) pairs."""


@dataclass(slots=True)
class StoryProgress(Faults):
    """What was seen until now."""

    shops_settled: set[str] = field(default_factory=set)
    first_round_s: float | None = None
    changes_right: int = 0
    repeats_right: int = 0


class Story:
    """Plays the rounds; `progress` has the results."""

    def __init__(self, stage: Stage, desk: Desk, adverts: Adverts) -> None:
        self.progress = StoryProgress()
        self._stage, self._desk, self._adverts = stage, desk, adverts
        self._ready: asyncio.Queue[Shop] = asyncio.Queue()
        self._calm_left = sum(shop.manner == "fast" for shop in stage.sellers)
        self._began_s = time.monotonic()
        self._shelf = Shelf(stage.folder / "catalogues", port=stage.ports.origins)
        self._turns = {shop.name: asyncio.Lock() for shop in stage.sellers}
        self._changing: set[str] = set()

    async def prepare(self, stop: asyncio.Event) -> None:
        """Make the customers, and let end what an earlier run left under way when it was killed.

        The leases of killed workers end after 30 s; only then can the first count be right.
        """
        for shop in self._stage.sellers:
            await self._desk.make_customer(shop)
        deadline, is_reported = time.monotonic() + LEFT_OVER_S, False
        while time.monotonic() < deadline and not stop.is_set():
            rows = [row for row in await self._desk.queues() if row["queue"].startswith("fetch.")]
            left = sum(int(row["ready"]) + int(row["leased"]) for row in rows)
            if not left:
                return
            if not is_reported:
                print(
                    f"an earlier run was interrupted: its open jobs ({left}) run first, for"
                    f" up to {LEFT_OVER_S:.0f} s\n",
                    flush=True,
                )
                is_reported = True
            await asyncio.sleep(0.2)

    async def run(self) -> None:
        """Play until cancelled."""
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for shop in self._stage.sellers:
                group.create_task(self._first_round(shop))
            group.create_task(self._change_always())

    def links_settled(self) -> set[str]:
        """`ITEM LINK` of all photos in catalogues whose run is over and that do not change now."""
        return {
            f"{ware.id} {link}"
            for shop in self._stage.sellers
            if shop.name in self.progress.shops_settled - self._changing
            for ware in self._shelf.wares(shop)
            for link in self._shelf.links(shop, ware)
        }

    def calm_shops(self) -> list[Shop]:
        """The fast shops whose first round is over."""
        settled = self.progress.shops_settled
        return [one for one in self._stage.sellers if one.manner == "fast" and one.name in settled]

    async def change_now(self, shop: Shop) -> None:
        """Let the shop hand in a next version with a new photo; returns once the site has it."""
        await self._change(shop, by_command=False, has_new_photo=True)

    async def _first_round(self, shop: Shop) -> None:
        while shop.name not in self.progress.shops_settled:
            async with self._turns[shop.name]:
                with self._attempt(shop.name):
                    await self._hand_in_first(shop)
            if shop.name not in self.progress.shops_settled:
                await asyncio.sleep(AGAIN_S)

    @contextlib.contextmanager
    def _attempt(self, title: str) -> Iterator[None]:
        """Note why a catalogue did not get to the site."""
        try:
            with self.progress.attempt("imports of catalogues"):
                yield
        except DemoError as error:
            self._fault(f"{title}: {error}")

    async def _hand_in_first(self, shop: Shop) -> None:
        file = self._shelf.write_present(shop)
        mark, expected = self._mark(), self._expected(shop)
        run = await self._desk.hand_in(shop, file)
        is_calm = shop.manner == "fast"
        if not await self._wait_settled(shop, run, deadline_s=SETTLE_S if is_calm else 600.0):
            self._fault(f"{shop.name}: not all of its items are on the site after {SETTLE_S:.0f} s")
            return
        self.progress.shops_settled.add(shop.name)
        self._check_photos(shop)
        if is_calm:
            self._compare(f"{shop.name}, first round", self._happened(shop, mark), expected)
            self._ready.put_nowait(shop)
            self._calm_left -= 1
            if self._calm_left == 0:
                self.progress.first_round_s = time.monotonic() - self._began_s

    def _check_photos(self, shop: Shop) -> None:
        links = {link for w in self._shelf.wares(shop) for link in self._shelf.links(shop, w)}
        good = {link for link in links if link.split("/")[3] not in ("gone", "page", "trap")}
        self._compare(f"{shop.name}, photos with a good copy", self._photos_held(shop), good)

    async def _change_always(self) -> None:
        # Shops whose first round is seen through, in a ring: the next one changes, another repeats.
        for number in count():
            changing = await self._ready.get()
            repeating = await self._ready.get()
            with self._attempt(f"{changing.name} or {repeating.name}"):
                await self._change(changing, by_command=number % 3 == 0)
                await self._repeat(repeating)
            for shop in (changing, repeating):
                self._ready.put_nowait(shop)
            await asyncio.sleep(CHANGE_EVERY_S)

    async def _change(self, shop: Shop, *, by_command: bool, has_new_photo: bool = False) -> None:
        async with self._turns[shop.name]:
            await self._hand_in_next(shop, by_command=by_command, has_new_photo=has_new_photo)

    async def _hand_in_next(self, shop: Shop, *, by_command: bool, has_new_photo: bool) -> None:
        held = self._photos_held(shop)
        mark, log_mark = self._mark(), self._log_size()
        self._changing.add(shop.name)
        file = self._shelf.write_next(shop, has_new_photo=has_new_photo)
        expected = self._expected(shop)
        new_links = {
            link for ware in self._shelf.wares(shop) for link in self._shelf.links(shop, ware)
        }
        hand_in = self._desk.hand_in_by_command if by_command else self._desk.hand_in
        title = f"{shop.name}, next version"
        try:
            run = await hand_in(shop, file)
        except CommandFailedError as error:
            self._fault(f"{title}: {error}")
            return
        if not await self._wait_settled(shop, run, deadline_s=SETTLE_S):
            self._fault(f"{title}: not on the site after {SETTLE_S:.0f} s")
            return
        self._changing.discard(shop.name)
        downloaded = self._downloaded(shop, log_mark)
        is_right = self._compare(title, self._happened(shop, mark), expected)
        is_right &= self._compare(f"{title}, downloads", set(downloaded), new_links - held)
        is_right &= self._compare(f"{title}, doubled", len(downloaded), len(set(downloaded)))
        self.progress.changes_right += is_right

    async def _repeat(self, shop: Shop) -> None:
        async with self._turns[shop.name]:
            await self._hand_in_again(shop)

    async def _hand_in_again(self, shop: Shop) -> None:
        mark, log_mark = self._mark(), self._log_size()
        # None, unless the last version was cut off, by an error that was noted then.
        expected = self._expected(shop)
        run = await self._desk.hand_in(shop, self._shelf.write_present(shop))
        title = f"{shop.name}, same catalogue again"
        if not await self._wait_settled(shop, run, deadline_s=SETTLE_S):
            self._fault(f"{title}: run {run} is not over after {SETTLE_S:.0f} s")
            return
        self._changing.discard(shop.name)
        is_right = self._compare(title, self._happened(shop, mark), expected)
        if not expected:
            is_right &= self._compare(f"{title}, downloads", self._downloaded(shop, log_mark), [])
        self.progress.repeats_right += is_right

    async def _wait_settled(self, shop: Shop, run: int, *, deadline_s: float) -> bool:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if self._desk.runs[run].state in ("held", "refused", "abandoned"):
                raise DemoError(f"{shop.name}: run {run} is {self._desk.runs[run].state}")
            if self._desk.runs[run].is_over and not self._expected(shop):
                return True
            await asyncio.sleep(0.1)
        return False

    def _expected(self, shop: Shop) -> Changes:
        """The changes that make the site's adverts equal to the catalogue."""
        shown = {advert.item: advert for advert in self._adverts.shown(shop.name)}
        wares = {ware.id: ware for ware in self._shelf.wares(shop)}
        changes = {("unpublish", item) for item in shown.keys() - wares.keys()}
        for item, ware in wares.items():
            wanted = (ware.title, float(ware.price), self._shelf.links(shop, ware))
            if item not in shown:
                changes.add(("publish", item))
            elif _facts(shown[item]) != wanted:
                changes.add(("edit", item))
        return changes

    def _photos_held(self, shop: Shop) -> set[str]:
        adverts = self._adverts.shown(shop.name)
        return {photo.url for advert in adverts for photo in advert.photos if photo.key}

    def _mark(self) -> int:
        return max((happening.id for happening in self._adverts.happened()), default=0)

    def _happened(self, shop: Shop, mark: int) -> Changes:
        happened = self._adverts.happened(after=mark)
        return {(one.action, one.item) for one in happened if one.shop == shop.name}

    def _log_size(self) -> int:
        return self._stage.origins_log.stat().st_size

    def _downloaded(self, shop: Shop, mark: int) -> list[str]:
        """The photos that the shop's host sent whole since `mark` bytes of the log."""
        origin = f"http://{shop.address}:{self._stage.ports.origins}"
        rows = self._log_rows(mark)
        return [
            f"{origin}{row['path']}"
            for row in rows
            if row["shop"] == shop.name and row["status"] == 200
        ]

    def _log_rows(self, mark: int) -> Iterator[dict[str, object]]:
        with self._stage.origins_log.open("rb") as log:
            log.seek(mark)
            yield from (json.loads(line) for line in log if line.endswith(b"\n"))

    def _compare(self, title: str, found: object, expected: object) -> bool:
        if found == expected:
            return True
        self._fault(f"{title}: expected {_shown(expected)}, got {_shown(found)}")
        return False

    def _fault(self, text: str) -> None:
        self.progress.fault(text)


def _facts(advert: Advert) -> tuple[str, float, list[str]]:
    return advert.title, float(advert.price), [photo.url for photo in advert.photos]


def _shown(value: object) -> str:
    if isinstance(value, set | Sequence) and not isinstance(value, str):
        rows = sorted(str(row) for row in value)
        return f"{len(rows)} ({', '.join(rows[:4])}{', ...' if len(rows) > 4 else ''})"
    return str(value)
