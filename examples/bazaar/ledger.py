"""The ledger: what was handed to Headrace against its results, line by line.

The left side never comes from Headrace: errands from the site's own table, views from the readers
and the shop's pages, photo links from the sellers' catalogue files, posts from the adverts on the
site. A number is read before and after Headrace's answer where it moves, in the order that cannot
hide a loss. A difference is open at first. It counts as lost or doubled once three readings show
it, all of them after the last outage or break and its recovery. A view can be lost only if it was
answered before the oldest view that is not yet in PostgreSQL.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from examples.bazaar.adverts import Adverts
from examples.bazaar.client import Client, ServerFailedError
from examples.bazaar.errands import QUEUES
from examples.bazaar.faults import Faults
from examples.bazaar.followers import post_of
from examples.bazaar.readers import Viewed
from examples.bazaar.records import Records
from examples.bazaar.sellers import Desk
from examples.bazaar.stage import Stage
from examples.bazaar.story import Story

from headrace.kernel.terminal import pluralize

EVERY_S: Final = 2.0
SLOW_EVERY: Final = 4
"""Every so many rounds all feeds and catalogues are read, too."""
READINGS: Final = 3
IDS_A_CALL: Final = 150
PAPER: Final = "ledger"
LINES: Final = ("jobs", "views", "photos", "posts")
WRONG: Final = "wrong"
"""The paper with the wrong answers that were found until now."""
OPEN: Final = ("ready", "scheduled", "leased")
DELIVERIES: Final = ("fetch.item", "fetch.publish")
"""The queues on the way from a catalogue to the site's handler of items."""
POSTS_MAX: Final = 100
ANSWERED_KEPT: Final = 300
READ_WITHIN_S: Final = 10.0
"""Older lines are marked with their age."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `sent` is what our own record expects; each is done, open, failed or lost."""

    name: str
    sent: int
    done: int
    failed: int = 0
    lost: int = 0
    allowed: int = 0
    """Lost ones that the promises allow: views that were not yet flushed."""
    doubled: int = 0
    """In addition to `sent`."""
    note: str = ""
    is_state: bool = False
    """It compares what is on the site now; else it counts since the run began and only grows."""

    @property
    def waiting(self) -> int:
        """Open ones."""
        return self.sent - self.done - self.failed - self.lost

    @property
    def is_right(self) -> bool:
        """Whether nothing is doubled, and nothing is lost but what is allowed."""
        return self.lost <= self.allowed and not self.doubled


def line_of(
    name: str,
    *,
    sent: int,
    done: int,
    failed: int = 0,
    lost: int = 0,
    allowed: int = 0,
    doubled: int = 0,
    note: str = "",
    is_state: bool = False,
) -> Line:
    """A line whose columns add up, although its figures were read one after the other.

    What was done after `sent` was read counts at the next reading.
    """
    lost = min(lost, sent)
    done = min(done, sent - lost)
    failed = min(failed, sent - lost - done)
    return Line(name, sent, done, failed, lost, min(allowed, lost), doubled, note, is_state)


class Ledger:
    """Reads all sides again and again; `lines` has the last result."""

    def __init__(
        self,
        stage: Stage,
        desk: Desk,
        *,
        story: Story,
        adverts: Adverts,
        records: Records,
        viewed: Viewed,
        noted: Faults,
    ) -> None:
        """`noted` receives readings that fail."""
        self.lines: dict[str, Line] = {}
        self._desk, self._story, self._adverts = desk, story, adverts
        self._records, self._viewed, self._noted = records, viewed, noted
        self._client = Client(stage.api_url, token=stage.token())
        self._counted_before = self._done_before = 0
        self._opened_before = self._answered_before = 0
        self._given_up = 0
        self._differences: dict[str, deque[int]] = {}
        self._verdicts: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._read_s = time.monotonic()
        self._answered: deque[tuple[float, int]] = deque(maxlen=ANSWERED_KEPT)
        """When it was read, and how many views were answered until then."""
        self._shown: deque[frozenset[str]] = deque(maxlen=READINGS)
        self._writing = asyncio.Lock()

    async def begin(self) -> None:
        """Note what was counted before. Raises: ServerFailedError."""
        self._done_before = (await asyncio.to_thread(self._records.errands)).done
        self._opened_before = self._adverts.opened()
        self._answered_before = self._adverts.opened(is_counted=True)
        self._counted_before = await self._counted() or 0

    async def run(self) -> None:
        """Read until cancelled."""
        number = 0
        while True:
            # If one fails, the page shows how old the last ledger is.
            with self._noted.attempt("readings of the ledger"):
                await self.gather(is_whole=number % SLOW_EVERY == 0)
                number += 1
            await asyncio.sleep(EVERY_S)

    async def gather(self, *, is_whole: bool = True) -> None:
        """Bring the lines up to date. Raises: ServerFailedError."""
        try:
            await self._gather(is_whole=is_whole)
        except ServerFailedError:
            self._differences.clear()
            raise

    async def _gather(self, *, is_whole: bool) -> None:
        await self._gather_jobs()
        await self._gather_views()
        if is_whole:
            await asyncio.to_thread(self._records.fold)
            await asyncio.to_thread(self._gather_photos)
            await self._gather_posts()
        await self._put_paper()
        self._read_s = time.monotonic()

    async def _put_paper(self) -> None:
        async with self._writing:
            rows = [
                asdict(line) | {"waiting": line.waiting, "is_right": line.is_right}
                for line in self.lines.values()
            ]
            paper = {"lines": rows, "open": self.open}
            await asyncio.to_thread(self._records.put_paper, PAPER, paper)

    @property
    def summary(self) -> list[str]:
        """All lines in a few words, one row or more."""
        lines = self.lines.values()
        sent, lost = sum(one.sent for one in lines), sum(one.lost for one in lines)
        doubled, allowed = sum(one.doubled for one in lines), sum(one.allowed for one in lines)
        age_s = time.monotonic() - self._read_s
        age = f" (read {age_s:.0f} s ago)" if age_s > READ_WITHIN_S else ""
        compared = f"{sent} compared{age}"
        rows = [f"ledger: {compared}, {lost} lost, {doubled} doubled"]
        if allowed:
            permitted = f"{pluralize(allowed, 'view')} that Empty Valkey may lose"
            rows = [
                f"ledger: {compared}",
                f"{lost - allowed} lost besides {permitted}, {doubled} doubled",
            ]
        return [*rows, *(f"not judged yet: {text}" for text in self.open)]

    @property
    def faults(self) -> dict[str, str]:
        """By name, lines that are not right."""
        found = [line for line in self.lines.values() if not line.is_right]
        return {
            line.name: f"{line.name}: {line.lost - line.allowed} lost, {line.doubled} doubled"
            for line in found
        }

    @property
    def open(self) -> list[str]:
        """Differences that are not judged: something was broken shortly before."""
        texts = []
        for name, n in self._open.items():
            things, _, fault = name.rpartition(" ")
            thing = things.removesuffix("s") if n == 1 else things
            texts.append(f"{n} {thing} {fault.replace('lost', 'missing')}")
        return texts

    @property
    def accepted_views(self) -> int:
        """Views of this run that were answered, so none may be lost."""
        answered = self._adverts.opened(is_counted=True) - self._answered_before
        return self._viewed.accepted + answered

    async def give_up_views(self, at_most: int, *, timeout_s: float) -> int | None:
        """Take views off our record that an emptied Valkey may lose; returns how many were lost.

        These are hits that were not yet flushed to PostgreSQL (docs/promises.md). More than
        `at_most` stay on the record, and show as lost. The readers forget the totals that they
        received before, which may include lost views. None: no complete totals within `timeout_s`.
        """
        counted: int | None = None

        async def is_counted() -> bool:
            nonlocal counted
            counted = await self._counted()
            return counted is not None

        if not await wait_until(is_counted, timeout_s=timeout_s) or counted is None:
            return None
        accepted = self.accepted_views - self._given_up
        given_up = min(at_most, max(0, accepted - (counted - self._counted_before)))
        self._given_up += given_up
        self._viewed.totals.clear()
        self._open.pop("views lost", None)
        if (line := self.lines.get("views")) is not None:
            lost, allowed = line.lost + given_up, line.allowed + given_up
            self.lines["views"] = line_of(**asdict(line) | {"lost": lost, "allowed": allowed})
            await self._put_paper()
        return given_up

    async def _gather_jobs(self) -> None:
        before = await asyncio.to_thread(self._records.errands)
        rows = [row for row in await self._desk.queues() if row["queue"] in QUEUES]
        waiting = sum(int(row[name]) for row in rows for name in OPEN)
        failed = sum(int(row["failed"]) for row in rows)
        now = await asyncio.to_thread(self._records.errands)
        note = (
            f"{now.repeated} interrupted by a crash and run again; each minute, mails that failed"
            " at least a minute ago are retried"
        )
        self.lines["jobs"] = line_of(
            "jobs",
            # Those that an earlier run left open are sent at the start of this one.
            sent=before.accepted - self._done_before,
            done=now.done - self._done_before,
            failed=failed,
            lost=self._lasting("jobs lost", before.accepted - now.done - waiting - failed),
            doubled=now.doubled,
            note=note,
        )

    async def _gather_views(self) -> None:
        self._answered.append((time.time(), self.accepted_views))
        flushed = self._answered_before_at(await self._flushed_at())
        total = await self._counted()
        if total is None:
            return
        counted = total - self._counted_before
        opened = self._adverts.opened() - self._opened_before
        sent = self._viewed.sent + opened
        refused = self._viewed.refused
        notes = [f"failed: {refused} (refused with an error)"] if refused else []
        if self._given_up:
            notes.append(
                f"{self._given_up} of the lost had not reached PostgreSQL when Valkey was emptied:"
                " the one loss that Headrace permits"
            )
        lost = self._lasting("views lost", flushed - self._given_up - counted)
        self.lines["views"] = line_of(
            "views",
            sent=sent,
            done=counted,
            failed=refused,
            lost=lost + self._given_up,
            allowed=self._given_up,
            doubled=self._lasting("views doubled", counted - sent),
            note="; ".join(notes),
        )

    async def wait_flushed(self, *, timeout_s: float) -> bool:
        """Wait until all views that were answered before this call are in PostgreSQL."""
        now = time.time()

        async def is_flushed() -> bool:
            return await self._flushed_at() > now

        return await wait_until(is_flushed, timeout_s=timeout_s)

    async def _flushed_at(self) -> float:
        """All views that were answered before this moment are in PostgreSQL.

        Until then a total may lack them: one that Valkey does not hold is read from PostgreSQL.
        Raises: ServerFailedError.
        """
        now = time.time()
        shards = await self._client.get_json("/v1/views/lag")
        return now - max((one["oldest_s"] for one in shards if one["pending"]), default=0.0)

    def _answered_before_at(self, at: float) -> int:
        """How many views were surely answered before; 0: unknown."""
        return max((views for read_at, views in self._answered if read_at <= at), default=0)

    async def _counted(self) -> int | None:
        """The sum of all adverts' totals; None: some are unknown for now."""
        posts = [post_of(*one) for one in await asyncio.to_thread(self._adverts.ever_shown)]
        total = 0
        for first in range(0, len(posts), IDS_A_CALL):
            ids = ",".join(posts[first : first + IDS_A_CALL])
            for row in await self._client.get_json(f"/v1/views?ids={ids}"):
                if row["total"] is None or row.get("stale"):
                    return None
                total += int(row["total"])
        return total

    def _gather_photos(self) -> None:
        """Links in the catalogues of shops whose last run is over, against the site's photos."""
        expected = self._story.links_settled()
        found: Counter[str] = Counter()
        stored = failed = 0
        for advert in self._adverts.shown():
            for photo in advert.photos:
                link = f"{advert.item} {photo.url}"
                found[link] += 1
                stored += link in expected and bool(photo.key)
                failed += link in expected and not photo.key
        lost = len(expected - found.keys())
        self.lines["photos"] = line_of(
            "photos",
            sent=len(expected),
            done=stored,
            failed=failed,
            lost=self._lasting("photos lost", lost),
            doubled=self._lasting("photos doubled", sum(n - 1 for n in found.values())),
            note="failed ones have their reason on the advert's page",
            is_state=True,
        )

    async def _gather_posts(self) -> None:
        shown = await asyncio.to_thread(self._adverts.shown)
        self._shown.append(frozenset(post_of(one.shop, one.item) for one in shown))
        always = frozenset.intersection(*self._shown)
        ever = frozenset.union(*self._shown)
        posts: Counter[str] = Counter()
        for seller in sorted({one.shop for one in shown}):
            path = f"/v1/feed/authors/{seller}/posts?limit={POSTS_MAX}"
            posts.update(post["id"] for post in (await self._client.get_json(path))["posts"])
        doubled = sum(n - 1 for n in posts.values()) + len(posts.keys() - ever)
        # A handler of an item may have been cut off between the site's table and the feed.
        rows = [row for row in await self._desk.queues() if row["queue"] in DELIVERIES]
        open_jobs = sum(int(row[name]) for row in rows for name in OPEN)
        missing = len(always - posts.keys())
        self.lines["posts"] = line_of(
            "posts",
            sent=len(self._shown[-1]),
            done=len(self._shown[-1] & posts.keys()),
            lost=self._lasting("posts lost", missing - open_jobs),
            doubled=self._lasting("posts doubled", doubled),
            note="one for each advert on the site, none for removed ones",
            is_state=True,
        )

    def _lasting(self, name: str, difference: int) -> int:
        """The difference that each of the last readings showed.

        While something is broken, and shortly after it, the verdict of before remains.
        """
        verdict = self._verdicts.get(name, 0)
        seen = self._differences.setdefault(name, deque(maxlen=READINGS))
        was_open = self._open.pop(name, None) is not None
        if is_calm := Faults.is_calm():
            seen.append(max(0, difference))
        else:
            seen.clear()
        if len(seen) == READINGS:
            verdict = self._verdicts[name] = min(seen)
        if len(seen) < READINGS and difference > verdict and (was_open or not is_calm):
            self._open[name] = difference - verdict
        return verdict


async def wait_until(is_so: Callable[[], Any], *, timeout_s: float, every_s: float = 0.1) -> bool:
    """Wait for a condition, sync or async; a server that does not answer is not it."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            found = is_so()
            if await found if asyncio.iscoroutine(found) else found:
                return True
        except (ServerFailedError, OSError):
            pass
        await asyncio.sleep(every_s)
    return False
