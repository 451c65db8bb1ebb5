"""The live lines and the summary, a room each: from the public API and what the visitors saw."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from examples.bazaar.adverts import Adverts
from examples.bazaar.buyers import Bought
from examples.bazaar.followers import Followed
from examples.bazaar.readers import Viewed
from examples.bazaar.sellers import Desk
from examples.bazaar.stage import Stage
from examples.bazaar.story import StoryProgress
from examples.bazaar.visitors import Seen

_AVERAGED_S: Final = 4.0
_MB: Final = 1e6
_NAMES: Final = {"unchanged": "requested and unchanged", "known": "known (not requested)"}
"""How outcomes of photos are shown that differ only in whether there was a request."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything that only grows, at one moment."""

    at_s: float
    jobs_done: int
    photos: int
    requests: int
    body_bytes: int
    views: int
    pages: int


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
        """Jobs, photos, requests, bytes of bodies, views and pages a second."""
        if len(self._samples) < 2:
            return (0.0,) * 6
        first, last = self._samples[0], self._samples[-1]
        took_s = last.at_s - first.at_s
        pairs = (
            (first.jobs_done, last.jobs_done),
            (first.photos, last.photos),
            (first.requests, last.requests),
            (first.body_bytes, last.body_bytes),
            (first.views, last.views),
            (first.pages, last.pages),
        )
        return tuple(max(0.0, after - before) / took_s for before, after in pairs)


class Figures:
    """Reads figures once a second; `lines` has the current state, `summary` the result."""

    def __init__(
        self,
        *,
        stage: Stage,
        desk: Desk,
        adverts: Adverts,
        progress: StoryProgress,
        seen: Seen,
        viewed: Viewed,
        followed: Followed,
        bought: Bought,
    ) -> None:
        self._stage, self._desk, self._adverts = stage, desk, adverts
        self._progress, self._seen, self._viewed, self._followed = progress, seen, viewed, followed
        self._bought = bought
        self._began_s = time.monotonic()
        self._rates = Rates()
        self._queues: list[dict[str, Any]] = []
        self._done_lines: Counter[str] = Counter()
        self._photos: Counter[str] = Counter()
        self._stored_bytes = self._files = self._shown = self._pending = 0

    async def gather(self) -> None:
        """Ask the API and the site's table. Raises: ServerFailedError."""
        await self._desk.look()
        self._queues = await self._desk.queues()
        done = await self._desk.jobs_done()
        self._pending = await self._desk.views_pending()
        self._photos = Counter()
        for run in self._desk.runs.values():
            self._photos.update(run.photos_by_outcome)
        self._done_lines = Counter(one.action for one in self._adverts.happened())
        photos = [photo for advert in self._adverts.shown() for photo in advert.photos if photo.key]
        sizes = {photo.key: photo.size_bytes for photo in photos}
        self._stored_bytes, self._files, self._shown = sum(sizes.values()), len(sizes), len(photos)
        self._rates.add(
            Sample(
                at_s=time.monotonic(),
                jobs_done=done,
                photos=sum(self._photos.values()),
                requests=sum(self._seen.statuses.values()),
                body_bytes=self._seen.body_bytes,
                views=self._viewed.views,
                pages=self._followed.pages,
            )
        )

    @property
    def jobs_done(self) -> int:
        """Jobs finished since `headrace up` started."""
        return self._rates.last.jobs_done if self._rates.last else 0

    def lines(self, checks: str) -> list[str]:
        """One line a room, and `checks`: whether all answers were right until now."""
        age_s = time.monotonic() - self._began_s
        done, photos, requests, body_bytes, views, pages = self._rates.per_second()
        mb = body_bytes / _MB
        rows = {
            "jobs": f"{done:.0f} done/s · {self._backlog()}",
            "fetch": f"{photos:.0f} photos/s · {self._items()}",
            "media": f"{requests:.0f} requests/s, {mb:.1f} MB/s · {self._ranges()}",
            "views": (
                f"{views:.0f} views/s · {self._views()}, {self._pending} not yet in PostgreSQL"
            ),
            "feed": f"{pages:.0f} pages/s · {self._feeds()}",
            "site": f"{self._bought.pages} pages · {self._buys()}",
            "checks": checks,
        }
        texts = [f"{room:<7}{text}" for room, text in rows.items()]
        return [f"{age_s:5.0f} s  {texts[0]}", *(f"         {text}" for text in texts[1:])]

    def summary(self, checks: str) -> list[str]:
        """One line a room and more, over the whole time, and `checks`."""
        progress, seen = self._progress, self._seen
        fast = sum(shop.manner == "fast" for shop in self._stage.sellers)
        first = (
            "not finished" if progress.first_round_s is None else f"{progress.first_round_s:.1f} s"
        )
        shown = f"{self._shown} on the site in {self._files} files,"
        return [
            f"jobs   {self.jobs_done} done, {self._backlog()}",
            f"fetch  {self._items()}",
            f"       photos: {self._outcomes()}; {shown} {self._stored_bytes / _MB:.0f} MB",
            (
                f"       first catalogues of the {fast} fast sellers: {first}; then"
                f" {progress.changes_right} changed and {progress.repeats_right} unchanged"
                " catalogues"
            ),
            (
                f"media  {self._ranges()}, {len(seen.keys)} different ones;"
                f" {seen.body_bytes / _MB:.0f} MB"
            ),
            f"       responses by status: {self._answers()}",
            f"views  {self._views()}; {self._viewed.others} more counted by the pages of the site",
            (
                f"       {self._viewed.lists} lists read, {self._viewed.unchanged} of them"
                " unchanged (304)"
            ),
            f"feed   {self._followed.pages} pages read, {self._feeds()}",
            f"site   {self._bought.pages} pages, {self._buys()}",
            f"checks {checks}",
        ]

    def _ranges(self) -> str:
        return f"{self._seen.photos_whole} photos put together from byte ranges"

    def _views(self) -> str:
        viewed = self._viewed
        return f"{viewed.views} views of {len(viewed.totals)} adverts"

    def _feeds(self) -> str:
        followed = self._followed
        return f"{followed.walks} whole feeds and {followed.unfollowed} unfollows checked"

    def _buys(self) -> str:
        bought = self._bought
        return f"{bought.tracks} tracks played, {bought.ways} visits from an advert to the feed"

    def _backlog(self) -> str:
        """Jobs by state; those that wait for a person are counted apart."""
        ready, people, leased, failed = 0, 0, 0, 0
        for row in self._queues:
            leased, failed = leased + int(row["leased"]), failed + int(row["failed"])
            if row["decisions"]:
                people += int(row["ready"])
            else:
                ready += int(row["ready"])
        moderation = f", {people} photos for moderators" if people else ""
        return f"{leased} in progress, {ready} waiting, {failed} failed{moderation}"

    def _items(self) -> str:
        seen = self._done_lines
        return (
            f"{len(self._progress.shops_settled)} of {len(self._stage.sellers)} sellers imported ·"
            f" {seen['publish']} new items, {seen['edit']} changed, {seen['unpublish']} gone"
        )

    def _outcomes(self) -> str:
        found = self._photos.most_common()
        return (
            ", ".join(f"{n} {_NAMES.get(outcome, outcome)}" for outcome, n in found) or "none yet"
        )

    def _answers(self) -> str:
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self._seen.statuses.items()))
        return statuses or "no visits yet"
