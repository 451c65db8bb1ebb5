"""Asking one host for one photo: may it be asked now and here, what came, what that says of the host.

    paused? -> in a class that is long enough? -> a turn by robots.txt -> download -> check, store -> note

What hinders asking is no outcome: the job goes back, to the next class, for a while, or as it came, with the
start that its lane counted where nothing was sent. A timeout in a class that is not the longest sends
the job to the next one and costs no try. A host that says when to come again (Retry-After) is left alone
until then by all photos of the customer, instead of being asked by each in turn.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from headrace.fetch.download import Download, Downloader
from headrace.fetch.hop import Bounds, Known
from headrace.fetch.images import NotAPhoto
from headrace.fetch.keeping import Keeping
from headrace.fetch.places import JAMMED_S
from headrace.fetch.robots import Robots
from headrace.fetch.routing import Classes, TimeClass, host_of
from headrace.fetch.share import Share
from headrace.fetch.speeds import Speeds
from headrace.fetch.starts import NotStarted, Starts
from headrace.fetch.store.photos import NewPhoto
from headrace.jobs import JobContext
from headrace.jobs.errors import LaneExhausted

RATE_LIMITED_S: Final = 10.0
"""A host that answers 429 without a Retry-After is left alone for so long."""
LATE_JOBS_MAX: Final = 10_000
LATE_MAX: Final = 3
LATE_S: Final = 0.25


@dataclass(slots=True)
class Asked:
    """What asking for one link gave."""

    outcome: str
    text: str
    photo: NewPhoto | None = None
    etag: str | None = None
    last_modified: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Back:
    """Nothing was decided: the job goes to `queue`, or back for `after_s`; 0: as it came."""

    after_s: float = 0.0
    queue: str | None = None

    def apply(self, job: JobContext[Any]) -> None:
        """Say so of the job."""
        if self.queue is not None and self.queue != job.queue:
            job.send_to(self.queue)
        elif self.after_s > 0:
            job.snooze(self.after_s)
        else:
            job.unstart()


class Asking:
    """Asks hosts for photos, within their limits and those of the customers."""

    def __init__(
        self,
        downloader: Downloader,
        keeping: Keeping,
        speeds: Speeds,
        robots: Robots,
        *,
        share: Share,
        photo_max_bytes: int,
    ) -> None:
        self._downloader = downloader
        self._keeping = keeping
        self._speeds = speeds
        self._robots = robots
        self._share = share
        self._photo_max_bytes = photo_max_bytes
        self._late: OrderedDict[int, int] = OrderedDict()
        """How often a job came back late."""

    @property
    def _classes(self) -> Classes:
        return self._speeds.classes

    def expect(self, customer: str, url: str) -> None:
        """Begin to read what is known of the host, beside what else is read of the photo."""
        self._speeds.expect(customer, host_of(url))

    async def ask(self, job: JobContext[Any], customer: str, url: str, link: Any) -> Asked | Back:
        """Ask for `url`, whose link's row is `link`. Raises: Unavailable of our own engines only."""
        await self._keeping.require_up()
        self._share.refresh_soon()
        here = self._classes.of_queue(job.queue)
        host = host_of(url)
        known = await self._speeds.look(customer, host)
        if known.pause_s > 0:
            return Back(after_s=known.pause_s * (1 + random.random() / 10))
        start = self._speeds.starting(known)
        if start.time_s > here.time_s:
            return Back(queue=start.queue)
        found = await self._download(job, url, host, link)
        if isinstance(found, Back):
            return found
        asked = await self._kept(found, link["sha256"])
        self._note(customer, host, found, asked, here=here)
        following = self._classes.after(here)
        if found.outcome == "failed:timeout" and following is not None:
            return Back(queue=following.queue)
        return asked

    async def _download(
        self, job: JobContext[Any], url: str, host: str, link: Any
    ) -> Download | Back:
        is_often_late = self._late.get(job.id, 0) >= LATE_MAX
        starts = Starts(job.lane, job.start_before_s, may_return=not is_often_late)
        try:
            away_s = await self._robots.stay_away_s(url, host, starts)
            if away_s > 0:
                return Back(after_s=away_s)
            return await self._downloader.download(
                url,
                Known(link["etag"], link["last_modified"]) if link["sha256"] else Known(),
                bounds=Bounds(self._classes.of_queue(job.queue).time_s, self._photo_max_bytes),
                starts=starts,
            )
        except NotStarted as late:
            return await self._later(job, starts, late.after_s)
        except LaneExhausted as refused:
            return Back(refused.retry_after_s or RATE_LIMITED_S)

    async def _later(self, job: JobContext[Any], starts: Starts, after_s: float) -> Back:
        """Send a job back whose start was over before anything was sent.

        Only who comes back at once gives the start back, too, so a short wait is spent here; where this
        process was too slow, too: claimed anew at once it would make the others late.
        """
        if after_s == 0:
            self._note_late(job.id)
            after_s = LATE_S * (0.5 + random.random() / 2)
        if starts.sent or after_s > JAMMED_S:
            return Back(after_s)
        await asyncio.sleep(after_s)
        return Back()

    async def _kept(self, found: Download, last_sha256: str | None) -> Asked:
        """Check and store what came."""
        if found.body is None:
            return Asked(found.outcome, found.text, retry_after_s=found.retry_after_s)
        with found.body:
            try:
                photo = await self._keeping.keep(found)
            except NotAPhoto as refused:
                return Asked(refused.outcome, refused.text)
        outcome = "unchanged" if photo.sha256 == last_sha256 else "stored"
        return Asked(outcome, found.text, photo, found.etag, found.last_modified)

    def _note(
        self, customer: str, host: str, found: Download, asked: Asked, *, here: TimeClass
    ) -> None:
        self._speeds.note(
            customer,
            host,
            outcome=asked.outcome,
            requests=found.requests,
            took_s=found.took_s,
            needed_s=self._classes.needed(found.outcome, found.took_s, here),
            pause_s=pause_s(asked),
        )

    def _note_late(self, job_id: int) -> None:
        """After LATE_MAX times it pays for a start that comes too late, so that it gets on under load, too."""
        self._late[job_id] = self._late.get(job_id, 0) + 1
        if len(self._late) > LATE_JOBS_MAX:
            self._late.popitem(last=False)


def pause_s(asked: Asked) -> float:
    """For how long an answer asks all photos of the customer to leave the host alone."""
    if asked.outcome == "failed:rate_limited":
        return asked.retry_after_s or RATE_LIMITED_S
    if asked.outcome == "failed:http_503":
        return asked.retry_after_s or 0.0
    return 0.0
