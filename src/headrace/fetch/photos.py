"""The photo task: one link is asked, checked, stored, and becomes an outcome under its lease.

    state of the link -> asking (`asking`: limits, download, image check, bytes stored) -> ONE transaction
    under the lease: photo row, link, need, count

Each photo is a job of its own, refilled as calls end: a host that hangs holds one place, never the
others of a batch (in batches of 50 the photos beside a hanging host waited for it). What is read and
written in PostgreSQL is gathered over a few milliseconds, so many photos share a transaction (`ledger`).

Bytes are stored before their row, so a stored row always has its bytes; a crash in between leaves bytes
that the next try finds or writes again. The transaction locks the lease: a worker that lost it writes
nothing, and a repeated job finds its need decided. Temporary failures go back to the queue with backoff
and become an outcome only when the tries are used up; a link that failed the last time has one. When our own engines are down, jobs are snoozed,
which uses up no try; while the object store is, before any request is made (`outages`).
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from headrace.fetch.asking import Asked, Asking, Back
from headrace.fetch.ledger import Ledger
from headrace.fetch.model import PHOTO_RETRIES, is_temporary
from headrace.fetch.store.photos import Decision
from headrace.jobs import JobInHand, Snooze
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import Backoff

RETRY: Final = Backoff(first_s=5, max_s=300)


class PhotoJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: a photo of an item of a run."""

    run: int
    customer: str
    item: str
    url: str


class Photos:
    """Handles the photo queue."""

    def __init__(self, ledger: Ledger, asking: Asking) -> None:
        self._ledger = ledger
        self._asking = asking
        self._answers: dict[tuple[str, str], asyncio.Future[Asked | Back]] = {}

    async def handle(self, job: JobInHand[PhotoJob]) -> None:
        """Decide one photo, or send it to another try."""
        try:
            await self._handle(job)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _handle(self, job: JobInHand[PhotoJob]) -> None:
        photo_job = job.payload
        self._asking.expect(photo_job.customer, photo_job.url)
        state = await self._ledger.state(
            photo_job.run, photo_job.customer, photo_job.item, photo_job.url
        )
        if state["decided"] is not None or not state["is_needed"]:
            return
        if state["link_run_id"] == photo_job.run:
            # Another item of this run has the same link: asked once is enough.
            outcome = "known" if state["outcome"] in ("stored", "unchanged") else state["outcome"]
            decision = _decision(photo_job, outcome, touches_link=False)
            await self._ledger.record(job.lease_id, decision)
            return
        link = (photo_job.customer, photo_job.url)
        retries = 0 if state["failures"] else PHOTO_RETRIES
        present = self._answers.get(link)
        if present is not None:
            await self._settle(job, await asyncio.shield(present), retries)
            return
        # Whoever wants the same link until its outcome is written shares the answer.
        answer = self._answers[link] = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(await self._asking.ask(job, *link, state))
            await self._settle(job, answer.result(), retries)
        except Unavailable as error:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()
            raise
        finally:
            answer.cancel()
            del self._answers[link]

    async def _settle(self, job: JobInHand[PhotoJob], answer: Asked | Back, retries: int) -> None:
        """Write the outcome, or mark the job for another try."""
        if isinstance(answer, Back):
            answer.apply(job)
            return
        if is_temporary(answer.outcome) and job.attempt <= retries:
            delay_s = max(answer.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            job.retry(delay_s, f"{answer.outcome}: {answer.text}")
            return
        decision = _decision(job.payload, answer.outcome, answer)
        await self._ledger.record(job.lease_id, decision)


def _decision(
    payload: PhotoJob, outcome: str, answer: Asked | None = None, *, touches_link: bool = True
) -> Decision:
    return Decision(
        payload.run,
        payload.customer,
        payload.item,
        payload.url,
        outcome,
        answer.photo if answer else None,
        answer.etag if answer else None,
        answer.last_modified if answer else None,
        touches_link,
    )
