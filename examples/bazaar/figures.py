"""The live lines and the summary, a room each: from the public API and what the visitors saw."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from examples.bazaar.adverts import Advert, Happening
from examples.bazaar.buyers import Bought
from examples.bazaar.followers import Followed
from examples.bazaar.readers import Viewed
from examples.bazaar.sellers import Desk
from examples.bazaar.stage import Stage
from examples.bazaar.story import StoryProgress
from examples.bazaar.visitors import Seen

_AVERAGED_S: Final = 4.0
_READ_WITHIN_S: Final = 5.0
"""Figures of the API that are older are marked: they could not be read since."""
_MB: Final = 1e6
_UNPROCESSED: Final = ("known", "waiting")
"""Outcomes of photos that no worker processed; the console's rates are without them, too."""
_NAMES: Final = {
    "unchanged": "requested and unchanged",
    "known": "known (not requested)",
    "waiting": "failed before (not requested)",
}
"""How outcomes of photos are shown that differ only in whether there was a request.

Some imports skip a link that failed in an earlier one: the ledger counts its photos as failed.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts that only grow, at one moment."""

    at_s: float
    counts: tuple[int, ...]


class Rates:
    """Growth a second, over the last four seconds or since the last sample if that is longer."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    @property
    def last(self) -> Sample | None:
        """The last sample."""
        return self._samples[-1] if self._samples else None

    def add(self, sample: Sample) -> None:
        """Add a sample, and drop those that are too old. The last two always stay."""
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at_s - self._samples[0].at_s > _AVERAGED_S:
            self._samples.popleft()

    def per_second(self) -> tuple[float, ...]:
        """The rate of each count; 0 before the second sample, empty before the first."""
        if not self._samples:
            return ()
        first, last = self._samples[0], self._samples[-1]
        took_s = max(last.at_s - first.at_s, 1e-3)
        pairs = zip(first.counts, last.counts, strict=True)
        return tuple(max(0, after - before) / took_s for before, after in pairs)


class Figures:
    """Reads figures once a second; `lines` has the current state, `summary` the result."""

    def __init__(
        self,
        *,
        stage: Stage,
        desk: Desk,
        happened: Callable[[], list[Happening]],
        shown: Callable[[], list[Advert]],
        progress: StoryProgress,
        seen: Seen,
        viewed: Viewed,
        views: Callable[[], int],
        followed: Followed,
        bought: Bought,
    ) -> None:
        """`happened`: to adverts in this run; `views`: those of all visitors that were counted."""
        self._stage, self._desk, self._views_counted = stage, desk, views
        self._happened, self._adverts_shown = happened, shown
        self._progress, self._seen, self._viewed, self._followed = progress, seen, viewed, followed
        self._bought = bought
        self._began_s = self._read_s = time.monotonic()
        self._rates, self._visitor_rates = Rates(), Rates()
        """Of jobs and photos, from the API; of requests, bytes, views and pages."""
        self._queues: list[dict[str, Any]] = []
        self._done_lines: Counter[str] = Counter()
        self._photos: Counter[str] = Counter()
        self._stored_bytes = self._files = self._shown = self._pending = 0

    async def gather(self) -> None:
        """Read the site's table and the API. Raises: ServerFailedError."""
        self._done_lines = Counter(one.action for one in self._happened())
        photos = [photo for one in self._adverts_shown() for photo in one.photos if photo.key]
        sizes = {photo.key: photo.size_bytes for photo in photos}
        self._stored_bytes, self._files, self._shown = sum(sizes.values()), len(sizes), len(photos)
        await self._desk.look()
        queues, done = await self._desk.queues(), await self._desk.jobs_done()
        self._pending = await self._desk.views_pending()
        self._queues = queues
        self._photos = Counter()
        for run in self._desk.runs.values():
            self._photos.update(run.photos_by_outcome)
        self._read_s = time.monotonic()
        processed = sum(n for one, n in self._photos.items() if one not in _UNPROCESSED)
        self._rates.add(Sample(self._read_s, (done, processed)))

    def _visitors_per_second(self) -> tuple[float, ...]:
        """Requests and bytes of photos and tracks, views, pages. They need no answer of the API."""
        seen, bought = self._seen, self._bought
        requests = sum(seen.statuses.values()) + bought.ranges
        body_bytes = seen.body_bytes + bought.range_bytes
        counts = (requests, body_bytes, self._views_counted(), self._followed.pages)
        self._visitor_rates.add(Sample(time.monotonic(), counts))
        return self._visitor_rates.per_second()

    @property
    def jobs_done(self) -> int:
        """Jobs finished since `headrace up` started."""
        return self._rates.last.counts[0] if self._rates.last else 0

    def lines(self, checks: list[str]) -> list[str]:
        """One line a room, and `checks`: whether all answers were right until now."""
        now_s = time.monotonic()
        requests, body_bytes, views, pages = self._visitors_per_second()
        done, photos = self._rates.per_second() or (0.0, 0.0)
        jobs, stored, pending = (f"{done:.0f}", f"{photos:.0f}", f"{self._pending}")
        backlog = self._backlog()
        if (unread_s := now_s - self._read_s) > _READ_WITHIN_S:
            jobs, stored, pending = "-", "-", "-"
            backlog = f"not readable for {unread_s:.0f} s"
        rows = {
            "jobs": f"{jobs} done/s · {backlog}",
            "fetch": f"{stored} photos/s · {self._items()}",
            "media": f"{requests:.0f} requests/s, {body_bytes / _MB:.1f} MB/s · {self._ranges()}",
            "views": f"{views:.0f} views/s of adverts · {self._views_counted()} counted,"
            f" {pending} not yet in PostgreSQL",
            "feed": f"{pages:.0f} pages/s · {self._feeds()}",
            "site": f"{self._bought.pages} pages · {self._buys()}",
            "checks": checks[0],
        }
        texts = [f"{room:<7}{text}" for room, text in rows.items()]
        texts += [f"{'':7}{text}" for text in checks[1:]]
        age_s = now_s - self._began_s
        return [f"{age_s:4.0f} s {texts[0]}", *(f"       {text}" for text in texts[1:])]

    def summary(self, checks: list[str]) -> list[str]:
        """One line a room and more, over the whole time, and `checks`."""
        progress, seen = self._progress, self._seen
        fast = sum(shop.manner == "fast" for shop in self._stage.sellers)
        first = (
            "not finished" if progress.first_round_s is None else f"{progress.first_round_s:.1f} s"
        )
        shown = f"{self._shown} photos on the site in {self._files} different files,"
        return [
            f"jobs   {self.jobs_done} done, {self._backlog()}",
            f"fetch  catalogues imported: {self._items()}",
            f"       photos of these catalogues: {self._outcomes()}",
            f"       {shown} {self._stored_bytes / _MB:.0f} MB",
            (
                f"       first catalogues of the {fast} fast sellers: {first}; then"
                f" {progress.changes_right} changed and {progress.repeats_right} unchanged"
                " catalogues"
            ),
            (
                f"media  {self._ranges()}, {len(seen.keys)} different ones;"
                f" {seen.body_bytes / _MB:.0f} MB"
            ),
            f"       responses to requests of photos by status: {self._answers()}",
            f"views  {self._views_counted()} views of adverts counted",
            (
                f"       totals of {self._viewed.lists} lists of adverts read, each twice:"
                f" {self._viewed.unchanged} unchanged the second time (304)"
            ),
            f"feed   {self._followed.pages} pages read, {self._feeds()}",
            f"site   {self._bought.pages} pages, {self._buys()}",
            f"checks {checks[0]}",
            *(f"       {text}" for text in checks[1:]),
        ]

    def _ranges(self) -> str:
        return f"{self._seen.photos_whole} photos read in byte ranges"

    def _feeds(self) -> str:
        followed = self._followed
        return f"{followed.walks} whole feeds and {followed.unfollowed} unfollows checked"

    def _buys(self) -> str:
        bought = self._bought
        return f"{bought.tracks} tracks played, {bought.ways} visits to the feed"

    def _backlog(self) -> str:
        """Jobs by state; those that wait for a person are counted apart."""
        ready, people, leased, failed = 0, 0, 0, 0
        for row in self._queues:
            leased, failed = leased + int(row["leased"]), failed + int(row["failed"])
            if row["decisions"]:
                people += int(row["ready"])
            else:
                ready += int(row["ready"])
        moderation = f", {people} to review" if people else ""
        return f"{leased} in progress, {ready} waiting, {failed} failed{moderation}"

    def _items(self) -> str:
        seen = self._done_lines
        return (
            f"{len(self._progress.shops_settled)}/{len(self._stage.sellers)} sellers ·"
            f" {seen['publish']} new items, {seen['edit']} changed, {seen['unpublish']} gone"
        )

    def _outcomes(self) -> str:
        found = self._photos.most_common()
        return (
            ", ".join(f"{n} {_NAMES.get(outcome, outcome)}" for outcome, n in found) or "none yet"
        )

    def _answers(self) -> str:
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self._seen.statuses.items()))
        if self._seen.statuses[416]:
            statuses += " (visitors request ranges past the end on purpose)"
        return statuses or "no visits yet"
