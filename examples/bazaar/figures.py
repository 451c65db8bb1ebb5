"""The live lines and the summary, a room each: from the public API and what the visitors saw."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final

from examples.bazaar.adverts import Adverts
from examples.bazaar.buyers import Bought
from examples.bazaar.faults import Faults
from examples.bazaar.followers import Followed
from examples.bazaar.readers import Viewed
from examples.bazaar.sellers import Desk
from examples.bazaar.stage import Stage
from examples.bazaar.story import StoryProgress
from examples.bazaar.visitors import Seen

_AVERAGED_S: Final = 4.0
_MB: Final = 1e6


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

    def lines(self) -> list[str]:
        """One line a room."""
        age_s = time.monotonic() - self._began_s
        done, photos, requests, body_bytes, views, pages = self._rates.per_second()
        mb = body_bytes / _MB
        return [
            f"{age_s:5.0f} s  jobs   {done:.0f} done/s, {self._backlog()}",
            (
                f"         fetch  {photos:.0f} photos/s · {self._wrong(self._progress)}"
                f" · {self._items()} · photos: {self._outcomes()}"
            ),
            (
                f"         media  {requests:.0f} requests/s, {mb:.1f} MB/s"
                f" · {self._wrong(self._seen)} · {self._answers()}"
            ),
            (
                f"         views  {views:.0f} views/s, {self._pending} not yet flushed"
                f" · {self._wrong(self._viewed)} · {self._views()}"
            ),
            (
                f"         feed   {pages:.0f} pages/s · {self._wrong(self._followed)}"
                f" · {self._feeds()}"
            ),
            (
                f"         shop   {self._bought.pages} pages · {self._wrong(self._bought)}"
                f" · {self._buys()}"
            ),
        ]

    def summary(self) -> list[str]:
        """One line a room, over the whole time."""
        progress, seen = self._progress, self._seen
        calm = sum(shop.manner == "fast" for shop in self._stage.sellers)
        first = (
            "not finished" if progress.first_round_s is None else f"{progress.first_round_s:.1f} s"
        )
        shown = f"{self._shown} on the site in {self._files} files,"
        return [
            f"jobs   {self.jobs_done} done, {self._backlog()}",
            f"fetch  {self._wrong(progress)} · {self._items()}",
            f"       photos: {self._outcomes()}; {shown} {self._stored_bytes / _MB:.0f} MB",
            (
                f"       first round of {calm} fast shops {first}, then"
                f" {progress.changes_right} changed and {progress.repeats_right} unchanged"
                " catalogues imported, all correct"
            ),
            f"media  {self._wrong(seen)} · {self._answers()}; {seen.body_bytes / _MB:.0f} MB",
            (
                f"       {seen.photos_whole} photos reassembled from ranges, SHA-256 right,"
                f" {len(seen.keys)} different ones"
            ),
            (
                f"views  {self._wrong(self._viewed)} · {self._views()};"
                f" {self._viewed.lists} lists read, {self._viewed.unchanged} of them unchanged"
                " (304);"
                f" {self._viewed.others} views by other visitors"
            ),
            (
                f"feed   {self._wrong(self._followed)} · {self._followed.pages} pages read,"
                f" {self._feeds()}"
            ),
            f"shop   {self._wrong(self._bought)} · {self._bought.pages} pages, {self._buys()}",
        ]

    def _views(self) -> str:
        viewed = self._viewed
        return f"{viewed.views} views of {len(viewed.totals)} adverts, every total right"

    def _feeds(self) -> str:
        followed = self._followed
        return f"{followed.walks} complete feeds checked, {followed.unfollowed} unfollow checks"

    def _buys(self) -> str:
        bought = self._bought
        return (
            f"{bought.tracks} tracks played by {bought.ranges} ranges,"
            f" {bought.ways} visits item → follow → feed"
        )

    @staticmethod
    def _wrong(noted: Faults) -> str:
        return f"wrong: {noted.faults_count}"

    def _backlog(self) -> str:
        names = ("ready", "leased", "scheduled", "failed")
        counts = {name: sum(int(row[name]) for row in self._queues) for name in names}
        moderated = sum(int(row["ready"]) for row in self._queues if row["decisions"])
        texts = [f"{count} {name}" for name, count in counts.items()]
        texts[0] += f" ({moderated} for a person to decide)" if moderated else ""
        return ", ".join(texts)

    def _items(self) -> str:
        seen = self._done_lines
        return (
            f"{len(self._progress.shops_settled)}/{len(self._stage.sellers)} shops, imported items:"
            f" {seen['publish']} published, {seen['edit']} edited, {seen['unpublish']} unpublished"
        )

    def _outcomes(self) -> str:
        return (
            ", ".join(f"{n} {outcome}" for outcome, n in self._photos.most_common()) or "none yet"
        )

    def _answers(self) -> str:
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(self._seen.statuses.items()))
        return statuses or "no visits yet"
