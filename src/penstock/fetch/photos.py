"""The photo task: one link is asked, checked, stored, and becomes an outcome under its lease.

    state of the link -> download -> image check -> bytes stored -> ONE transaction under the lease:
    photo row, link, need, count

Each photo is a job of its own, refilled as calls end: a host that hangs holds one place, never the
others of a batch (in batches of 50 the photos beside a hanging host waited for it). What is read and
written in PostgreSQL is gathered over a few milliseconds, so many photos still share a transaction.

Bytes are stored before their row, so a stored row always has its bytes; a crash in between leaves bytes
that the next try finds or writes again. The transaction locks the lease: a worker that lost it writes
nothing, and a repeated job finds its need decided. Temporary failures go back to the queue with backoff
and become an outcome only when the tries are used up. When our own engines are down, jobs are snoozed,
which uses up no try; while the object store is, before any request is made (`outages`).
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
from penstock.fetch.gathering import Gathering
from penstock.fetch.images import NotAPhoto, inspect_image
from penstock.fetch.model import (
    PHOTO_RETRIES,
    PHOTOS_DECIDED,
    is_temporary,
    photo_key,
)
from penstock.fetch.outages import StoreWatch
from penstock.fetch.store import Decision, NewPhoto
from penstock.jobs import JobInHand, Jobs, Snooze
from penstock.kernel import metrics
from penstock.kernel.backoff import Backoff
from penstock.kernel.crash import crash_point
from penstock.kernel.errors import PenstockError, Unavailable

PHOTOS_AT_ONCE: Final = 200
"""Downloads under way in a worker; a silent host costs a place and 8 KB for as long as it is awaited."""
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


@dataclass(frozen=True, slots=True)
class _Write:
    """A decision to record under a lease, with the photo it found."""

    lease_id: int
    decision: Decision
    photo: NewPhoto | None = None


class Photos:
    """Handles the photo queue."""

    def __init__(
        self, postgres: Postgres, blobs: Blobs, jobs: Jobs, downloader: Downloader
    ) -> None:
        self._postgres = postgres
        self._store = StoreWatch(blobs)
        self._jobs = jobs
        self._downloader = downloader
        self._large: asyncio.Semaphore | None = None
        self._states: Gathering[tuple[int, str, str, str], Any] = Gathering(self._read_states)
        self._known: Gathering[str, bool] = Gathering(self._read_known)
        self._writes: Gathering[_Write, None] = Gathering(self._write_all)
        self._asking: dict[tuple[str, str], asyncio.Future[_Asked]] = {}

    async def handle(self, job: JobInHand[PhotoJob]) -> None:
        """Decide one photo, or send it to another try."""
        try:
            await self._handle(job)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _handle(self, job: JobInHand[PhotoJob]) -> None:
        photo_job = job.payload
        key = (photo_job.run, photo_job.customer, photo_job.item, photo_job.url)
        state = await self._states.ask(key)
        if state["decided"] is not None or not state["is_needed"]:
            return
        if state["link_run_id"] == photo_job.run:
            # Another item of this run has the same link: asked once is enough.
            outcome = "known" if state["outcome"] in ("stored", "unchanged") else state["outcome"]
            decision = _decision(photo_job, outcome, touches_link=False)
            await self._writes.ask(_Write(job.lease_id, decision))
            return
        link = (photo_job.customer, photo_job.url)
        present = self._asking.get(link)
        if present is not None:
            await self._settle(job, await asyncio.shield(present))
            return
        await self._store.require_up()
        # Whoever wants the same link until its outcome is written shares the answer.
        answer = self._asking[link] = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(await self._ask(photo_job.url, state))
            await self._settle(job, answer.result())
        finally:
            answer.cancel()
            del self._asking[link]

    async def _settle(self, job: JobInHand[PhotoJob], answer: _Asked) -> None:
        """Write the outcome, or mark the job for another try."""
        if is_temporary(answer.outcome) and job.attempt <= PHOTO_RETRIES:
            delay_s = max(answer.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            job.retry(delay_s, f"{answer.outcome}: {answer.text}")
            return
        decision = _decision(job.payload, answer.outcome, answer)
        await self._writes.ask(_Write(job.lease_id, decision, answer.photo))

    async def _read_states(self, keys: list[tuple[int, str, str, str]]) -> list[Any]:
        return await store.photo_states(self._postgres, keys)

    async def _read_known(self, hashes: list[str]) -> list[bool]:
        known = await store.known_photos(self._postgres, hashes)
        return [sha256 in known for sha256 in hashes]

    async def _write_all(self, writes: list[_Write]) -> list[Exception | None]:
        """One transaction a lease: those of a lease that was lost are refused, the others written."""
        by_lease: dict[int, list[_Write]] = {}
        for write in writes:
            by_lease.setdefault(write.lease_id, []).append(write)
        refused: dict[int, Exception] = {}
        for lease_id, its_writes in by_lease.items():
            try:
                await self._write(lease_id, its_writes)
            except PenstockError as error:
                refused[lease_id] = error
        return [refused.get(write.lease_id) for write in writes]

    async def _write(self, lease_id: int, writes: list[_Write]) -> None:
        crash_point("fetch.stored_before_row")
        photos = [write.photo for write in writes if write.photo is not None]
        async with self._postgres.transaction() as tx:
            await self._jobs.lock_lease(tx, lease_id)
            if photos:
                await store.insert_photos(tx, photos)
            await store.decide(tx, [write.decision for write in writes])
        for write in writes:
            outcome = write.decision.outcome
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
        if not await self._known.ask(found.sha256):
            await self._store.put(key, data)
        photo = NewPhoto(found.sha256, key, image.format, len(data), image.width, image.height)
        outcome = "unchanged" if found.sha256 == last_sha256 else "stored"
        return _Asked(outcome, found.text, photo, found.etag, found.last_modified)


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
