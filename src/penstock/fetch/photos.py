"""The photo task: a batch of links is asked at once, and becomes outcomes in one transaction.

    state of links -> downloads -> image check -> bytes stored -> ONE transaction under the lease:
    photo rows, links, needs, counts

Bytes are stored before their row, so a stored row always has its bytes; a crash in between leaves bytes
that the next try finds or writes again. The transaction locks the batch's lease: a worker that lost it
writes nothing, and a repeated batch finds its needs decided. Temporary failures go back to the queue
with backoff and become an outcome only when the tries are used up. When our own engines are down, the
jobs are snoozed, which uses up no try.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.engines.blobs import Blobs
from penstock.engines.postgres import Postgres
from penstock.fetch import store
from penstock.fetch.download import SPOOL_BYTES, Download, Downloader, Known
from penstock.fetch.images import NotAPhoto, inspect_image
from penstock.fetch.model import (
    PHOTO_RETRIES,
    PHOTOS_DECIDED,
    is_temporary,
    photo_key,
)
from penstock.fetch.store import Decision, NewPhoto
from penstock.jobs import Batch, JobInHand, Jobs, Snooze
from penstock.kernel import metrics
from penstock.kernel.backoff import Backoff
from penstock.kernel.crash import crash_point
from penstock.kernel.errors import Unavailable

PHOTOS_OF_BATCH: Final = 50
LARGE_AT_ONCE: Final = 4
"""Bodies over 1 MiB held in memory at once, while they are checked and stored."""
RETRY: Final = Backoff(first_s=5, max_s=300)


class PhotoJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: a photo of an item of a run."""

    run: int
    customer: str
    item: str
    url: str


@dataclass(slots=True)
class _Asked:
    """What asking for one link gave."""

    outcome: str
    text: str
    photo: NewPhoto | None = None
    etag: str | None = None
    last_modified: str | None = None
    retry_after_s: float | None = None


class Photos:
    """Handles the photo queue."""

    def __init__(
        self, postgres: Postgres, blobs: Blobs, jobs: Jobs, downloader: Downloader
    ) -> None:
        self._postgres = postgres
        self._blobs = blobs
        self._jobs = jobs
        self._downloader = downloader
        self._large: asyncio.Semaphore | None = None

    async def handle(self, batch: Batch[PhotoJob]) -> None:
        """Decide every photo of `batch`, or send it to another try."""
        try:
            await self._handle(batch)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _handle(self, batch: Batch[PhotoJob]) -> None:
        keys = [(j.payload.run, j.payload.customer, j.payload.item, j.payload.url) for j in batch]
        states = await store.photo_states(self._postgres, keys)
        decisions: list[Decision] = []
        waiting: dict[tuple[str, str], list[JobInHand[PhotoJob]]] = {}
        links: dict[tuple[str, str], Any] = {}
        for job, state in zip(batch, states, strict=True):
            payload = job.payload
            if state["decided"] is not None or not state["is_needed"]:
                job.done()
            elif state["link_run_id"] == payload.run:
                # Another item of this run has the same link: asked once is enough.
                outcome = (
                    "known" if state["outcome"] in ("stored", "unchanged") else state["outcome"]
                )
                decisions.append(_decision(payload, outcome, touches_link=False))
            else:
                link = (payload.customer, payload.url)
                waiting.setdefault(link, []).append(job)
                links[link] = state
        asked = await self._ask_all([(link[1], links[link]) for link in waiting])
        photos: list[NewPhoto] = []
        for jobs, answer in zip(waiting.values(), asked, strict=True):
            decided = _decide(jobs, answer)
            decisions.extend(decided)
            if decided and answer.photo is not None:
                photos.append(answer.photo)
        await self._write(batch.lease_id, photos, decisions)

    async def _ask_all(self, links: list[tuple[str, Any]]) -> list[_Asked]:
        """Ask every link at once; when our own engines fail for one, nobody else is asked on."""
        tasks = [asyncio.create_task(self._ask(url, link)) for url, link in links]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _write(
        self, lease_id: int, photos: list[NewPhoto], decisions: list[Decision]
    ) -> None:
        if not decisions:
            return
        crash_point("fetch.stored_before_row")
        async with self._postgres.transaction() as tx:
            await self._jobs.lock_lease(tx, lease_id)
            if photos:
                await store.insert_photos(tx, photos)
            await store.decide(tx, decisions)
        for decision in decisions:
            outcome = decision.outcome
            metrics.bound(PHOTOS_DECIDED, "fetch_photos_total", outcome=outcome).inc()

    async def _ask(self, url: str, link: Any) -> _Asked:
        """Download, check and store one link. Raises: Unavailable of our own engines only."""
        known = Known(link["etag"], link["last_modified"]) if link["sha256"] else Known()
        found = await self._downloader.download(url, known)
        if found.body is None:
            return _Asked(found.outcome, found.text, retry_after_s=found.retry_after_s)
        with found.body:
            if found.size_bytes <= SPOOL_BYTES:
                return await self._keep(found, link["sha256"])
            if self._large is None:
                self._large = asyncio.Semaphore(LARGE_AT_ONCE)
            async with self._large:
                return await self._keep(found, link["sha256"])

    async def _keep(self, found: Download, last_sha256: str | None) -> _Asked:
        """Check the body and store its bytes, unless this content is stored already."""
        assert found.body is not None
        assert found.sha256 is not None
        found.body.seek(0)
        data = found.body.read()
        try:
            image = inspect_image(data)
        except NotAPhoto as refused:
            return _Asked(refused.outcome, refused.text)
        key = photo_key(found.sha256, image.format)
        if not await store.is_photo_known(self._postgres, found.sha256):
            await self._blobs.put(key, data)
        photo = NewPhoto(found.sha256, key, image.format, len(data), image.width, image.height)
        outcome = "unchanged" if found.sha256 == last_sha256 else "stored"
        return _Asked(outcome, found.text, photo, found.etag, found.last_modified)


def _decide(jobs: list[JobInHand[PhotoJob]], answer: _Asked) -> list[Decision]:
    """The decisions of the jobs of one link; those that get another try are marked so."""
    decisions = []
    for job in jobs:
        if is_temporary(answer.outcome) and job.attempt <= PHOTO_RETRIES:
            delay_s = max(answer.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            job.retry(delay_s, f"{answer.outcome}: {answer.text}")
        else:
            decisions.append(_decision(job.payload, answer.outcome, answer))
    return decisions


def _decision(
    payload: PhotoJob, outcome: str, answer: _Asked | None = None, *, touches_link: bool = True
) -> Decision:
    return Decision(
        payload.run,
        payload.customer,
        payload.item,
        payload.url,
        outcome,
        answer.photo.sha256 if answer and answer.photo else None,
        answer.etag if answer else None,
        answer.last_modified if answer else None,
        touches_link,
    )
