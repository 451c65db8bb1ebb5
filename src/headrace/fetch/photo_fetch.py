"""The photo job: check the limits, fetch one photo, store it, record its outcome under the lease.

    link state -> host paused? -> timeout class long enough? -> robots.txt -> download -> check
    -> store bytes -> ONE transaction under the lease: photo row, link, required photo, count

Each photo is a job of its own, so a host that hangs occupies one job of a worker and delays no
other photo. Reads and writes of PostgreSQL are batched over a few milliseconds
(`store/outcomes.py`).

Bytes are stored before their row, so a stored row always has its bytes. After a crash in between,
the next attempt finds or rewrites them. The transaction locks the lease: a worker that lost it
writes nothing, and a repeated job finds its photo decided.

A condition that prevents a request is not an outcome: the job returns to the queue of the next
timeout class, to its own queue after a delay, or to its own queue with its unused rate-limit token.
A timeout in a class that is not the longest moves the job to the next one and costs no attempt.
After a Retry-After, all photos of the customer leave the host alone until then, also photos that a
redirect leads there. Temporary failures are retried with backoff; a link that failed last time
gets one attempt. While our own engines are down, jobs are snoozed, which costs no attempt.

**Storing.** The format is checked and a sample decoded. Bytes are stored durably under their hash
before any row refers to them. A content that is already recorded is neither decoded nor written
again. Large bodies are read into memory a few at a time; the downloads of a worker bound the
others.

A photo whose bytes cannot be stored is a wasted request to a seller's host. After a failed put,
the circuit breaker writes a probe object before the next photo. While the probe fails, no photo is
requested: for 5 s, then longer, up to 60 s. A put that fails for its own reasons costs the other
photos one probe and no wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from headrace.engines.blobs import Blobs, BlobsDown
from headrace.engines.postgres import Postgres
from headrace.fetch.curl import HELD_BYTES_MAX, Bounds, Validators
from headrace.fetch.decoding.client import Decoder
from headrace.fetch.download import Download, Downloader
from headrace.fetch.host_stats import Classes, HostStats, TimeClass, host_of
from headrace.fetch.images import NotAPhoto, inspect_image
from headrace.fetch.limits import (
    UNRESPONSIVE_S,
    HostPaused,
    HostQuota,
    RateTokens,
    TokenDebts,
    TokenExpired,
)
from headrace.fetch.model import PHOTO_RETRIES, photo_key
from headrace.fetch.outcomes import ATTEMPTS, FIRST_BYTE, is_temporary
from headrace.fetch.robots import Robots
from headrace.fetch.sql import SQL
from headrace.fetch.store.outcomes import Decision, NewPhoto, OutcomeStore
from headrace.fetch.study import attempt_of
from headrace.jobs import JobContext, Snooze
from headrace.jobs.errors import LaneExhausted
from headrace.kernel import metrics, spans
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

LARGE_AT_ONCE: Final = 4
"""Bodies over 1 MiB in memory at once while they are checked and stored."""
PROBE_KEY: Final = "headrace-probe/photos"
PROBE_BYTES: Final = 256 * 1024
"""Size of a photo: a full disk still accepts an empty file."""
PROBE_BACKOFF: Final = Backoff(first_s=5, max_s=60)
_LOG: Final = logger(__name__)


class BlobWriter:
    """Checks bodies and stores their bytes."""

    def __init__(self, postgres: Postgres, blobs: Blobs, *, decode_share: float) -> None:
        self._postgres = postgres
        self.breaker = StoreBreaker(blobs)
        self._decoder = Decoder(decode_share)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._known: Batcher[str, bool] = Batcher(self._read_known)

    async def write(self, found: Download) -> NewPhoto:
        """Check a downloaded body and store its bytes.

        Raises: NotAPhoto, BlobsDown, DecoderDown.
        """
        if found.size_bytes <= HELD_BYTES_MAX:
            return await self._write(found)
        async with self._large:
            return await self._write(found)

    async def close(self) -> None:
        """Stop the decoder process."""
        await self._decoder.close()

    async def _write(self, found: Download) -> NewPhoto:
        assert found.body is not None
        assert found.sha256 is not None
        data = found.body.read()
        image = inspect_image(data)
        key = photo_key(found.sha256, image.format)
        photo_hash = None
        if not await self._known.submit(found.sha256):
            photo_hash = await self._decoder.check(data, image)
            await self.breaker.put(key, data)
        size = image.width, image.height
        return NewPhoto(found.sha256, key, image.format, len(data), *size, photo_hash)

    async def _read_known(self, hashes: list[str]) -> list[bool]:
        rows = await self._postgres.all(SQL.known_photos, hashes=hashes)
        known = {row["sha256"] for row in rows}
        return [sha256 in known for sha256 in hashes]


class StoreBreaker:
    """Circuit breaker of the object store: a failed put is followed by probes."""

    def __init__(self, blobs: Blobs, probe_backoff: Backoff = PROBE_BACKOFF) -> None:
        self._blobs = blobs
        self._probe_backoff = probe_backoff
        self._is_suspect = False
        self._closed_until_s = 0.0
        self._probes_failed = 0
        self._probing = asyncio.Lock()

    async def put(self, key: str, data: bytes) -> None:
        """Store `data`. Raises: BlobsDown."""
        try:
            await self._blobs.put(key, data)
        except BlobsDown:
            self._is_suspect = True
            raise

    async def require_up(self) -> None:
        """Return if the store accepts writes, as far as known. Raises: BlobsDown with the wait."""
        if not self._is_suspect:
            return
        async with self._probing:
            left_s = self._closed_until_s - time.monotonic()
            if left_s <= 0:
                left_s = await self._probe()
        if left_s > 0:
            raise BlobsDown(
                f"the object store failed the last probe write: next probe in {left_s:.1f} s",
                retry_after_s=left_s,
            )

    async def _probe(self) -> float:
        """Write the probe object; return the seconds until the next probe, 0 on success."""
        if not self._is_suspect:
            # The probe of another photo, for which this one waited, succeeded.
            return 0.0
        try:
            await self._blobs.put(PROBE_KEY, bytes(PROBE_BYTES))
        except BlobsDown as error:
            self._probes_failed += 1
            wait_s = self._probe_backoff.delay_s(self._probes_failed)
            self._closed_until_s = time.monotonic() + wait_s
            _LOG.warning("object_store_down", wait_s=round(wait_s, 1), error=error.text)
            return wait_s
        self._is_suspect = False
        self._probes_failed = 0
        return 0.0


ATTEMPTS_NAME: Final = "fetch_attempts_total"
RETRY: Final = Backoff(first_s=5, max_s=300)
RATE_LIMITED_S: Final = 10.0
"""Pause of a host that responds 429 without a Retry-After."""
LATE_JOBS_MAX: Final = 10_000
LATE_MAX: Final = 3
"""A job whose token expired so often in this process uses its next one in any case."""
LATE_S: Final = 0.25


class PhotoJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload: a photo of an item of a run."""

    run: int
    customer: str
    item: str
    url: str


class PhotoTask:
    """Handler of the photo queues."""

    def __init__(self, store: OutcomeStore, fetcher: PhotoFetcher) -> None:
        self._store = store
        self._fetcher = fetcher
        self._in_flight: dict[tuple[str, str], asyncio.Future[Fetched | Requeue]] = {}

    async def handle(self, job: JobContext[PhotoJob]) -> None:
        """Decide one photo, or requeue its job."""
        try:
            await self._handle(job)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _handle(self, job: JobContext[PhotoJob]) -> None:
        photo_job = job.payload
        self._fetcher.prefetch(photo_job.customer, photo_job.url)
        state = await self._store.state(
            photo_job.run, photo_job.customer, photo_job.item, photo_job.url
        )
        if state["decided"] is not None or not state["is_needed"]:
            return
        if state["link_run_id"] == photo_job.run:
            # Another item of this run has the same link: one request is enough.
            outcome = "known" if state["outcome"] in ("stored", "unchanged") else state["outcome"]
            decision = _decision(photo_job, outcome, touches_link=False)
            await self._store.record(job.lease_id, decision)
            return
        link = (photo_job.customer, photo_job.url)
        retries = 0 if state["failures"] else PHOTO_RETRIES
        shared = self._in_flight.get(link)
        if shared is not None:
            await self._settle(job, await asyncio.shield(shared), retries)
            return
        # Single-flight: jobs of the same link share one request until its outcome is written.
        future = self._in_flight[link] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(await self._fetch(job, link, state))
            await self._settle(job, future.result(), retries)
        except Unavailable as error:
            if not future.done():
                future.set_exception(error)
                future.exception()
            raise
        finally:
            future.cancel()
            del self._in_flight[link]

    async def _fetch(
        self, job: JobContext[PhotoJob], link: tuple[str, str], state: Any
    ) -> Fetched | Requeue:
        """Fetch a photo, as a span."""
        attributes = {
            "server.address": host_of(link[1]),
            "headrace.customer": link[0],
            "headrace.item": job.payload.item,
        }
        with spans.inside("fetch.photo", "CLIENT", attributes) as span:
            found = await self._fetcher.fetch(job, *link, state)
            if span is not None:
                outcome = "requeued" if isinstance(found, Requeue) else found.outcome
                span.note({"headrace.photo.outcome": outcome})
                if outcome.startswith(("failed:", "refused:")):
                    span.fail(outcome)
        return found

    async def _settle(
        self, job: JobContext[PhotoJob], found: Fetched | Requeue, retries: int
    ) -> None:
        """Record the outcome, or requeue the job."""
        if isinstance(found, Requeue):
            found.apply(job)
            return
        if is_temporary(found.outcome) and job.attempt <= retries:
            delay_s = max(found.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            job.retry(delay_s, f"{found.outcome}: {found.text}")
            return
        decision = _decision(job.payload, found.outcome, found)
        await self._store.record(job.lease_id, decision)


def _decision(
    payload: PhotoJob, outcome: str, found: Fetched | None = None, *, touches_link: bool = True
) -> Decision:
    return Decision(
        payload.run,
        payload.customer,
        payload.item,
        payload.url,
        outcome,
        found.photo if found else None,
        found.etag if found else None,
        found.last_modified if found else None,
        touches_link,
    )


def _count_attempt(here: TimeClass, found: Download) -> None:
    """Count a download in the metrics, if a request was sent."""
    if found.requests:
        metrics.bound(ATTEMPTS, ATTEMPTS_NAME, timeout_class=here.name).inc()
    if found.steps and found.steps[-1].first_byte_s:
        FIRST_BYTE.observe(found.steps[-1].first_byte_s)


@dataclass(slots=True)
class Fetched:
    """Outcome of one request for a link."""

    outcome: str
    text: str
    photo: NewPhoto | None = None
    etag: str | None = None
    last_modified: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Requeue:
    """No outcome yet: move the job to `queue`, or retry it after `after_s`.

    0: retry at once, with the unused token.
    """

    after_s: float = 0.0
    queue: str | None = None

    def apply(self, job: JobContext[Any]) -> None:
        """Apply this to the job."""
        if self.queue is not None and self.queue != job.queue:
            job.send_to(self.queue)
        elif self.after_s > 0:
            job.snooze(self.after_s)
        else:
            job.unstart()


class PhotoFetcher:
    """Fetches photos within the limits of hosts and customers."""

    def __init__(
        self,
        downloader: Downloader,
        blob_writer: BlobWriter,
        host_stats: HostStats,
        robots: Robots,
        *,
        quota: HostQuota,
        photo_max_bytes: int,
    ) -> None:
        self._downloader = downloader
        self._blob_writer = blob_writer
        self._host_stats = host_stats
        self._robots = robots
        self._quota = quota
        self._photo_max_bytes = photo_max_bytes
        self._debts = TokenDebts()
        names = [found.name for found in (*self._classes.listed, *self._classes.former)]
        metrics.allow_values(ATTEMPTS_NAME, timeout_class=names)
        self._late_count: OrderedDict[int, int] = OrderedDict()
        """How often the token of a job expired before it was used."""

    @property
    def _classes(self) -> Classes:
        return self._host_stats.classes

    async def close(self) -> None:
        """Drop the outstanding tokens of lanes."""
        await self._debts.close()

    def prefetch(self, customer: str, url: str) -> None:
        """Start to read the host statistics, concurrently with the state of the photo."""
        self._host_stats.prefetch(customer, host_of(url))

    async def fetch(
        self, job: JobContext[Any], customer: str, url: str, link: Any
    ) -> Fetched | Requeue:
        """Fetch `url`, whose link row is `link`. Raises: Unavailable, for our own engines only."""
        await self._blob_writer.breaker.require_up()
        await self._quota.refresh()
        here = self._classes.of_queue(job.queue)
        host = host_of(url)
        known = await self._host_stats.get(customer, host)
        if known.pause_s > 0:
            return _after_pause(known.pause_s)
        start = self._host_stats.first_class(known)
        if start.time_s > here.time_s:
            return Requeue(queue=start.queue)
        connections = self._quota.share(job.queue, is_first=start == here)
        bounds = Bounds(here.time_s, self._photo_max_bytes, connections=connections)
        found = await self._download(job, customer, url, link=link, bounds=bounds)
        if isinstance(found, Requeue):
            return found
        _count_attempt(here, found)
        fetched = await self._stored(found, link["sha256"])
        following = self._classes.after(here) if found.outcome == "failed:timeout" else None
        has_body = found.outcome == "received"
        attempt = attempt_of(
            here, fetched.outcome, found.took_s, has_body=has_body, is_moved=following is not None
        )
        self._host_stats.count_attempt(attempt)
        self._record(customer, host, found, fetched, here=here)
        return fetched if following is None else Requeue(queue=following.queue)

    async def _download(
        self, job: JobContext[Any], customer: str, url: str, *, link: Any, bounds: Bounds
    ) -> Download | Requeue:
        is_often_late = self._late_count.get(job.id, 0) >= LATE_MAX
        tokens = RateTokens(
            job.lane, job.start_before_s, may_return=not is_often_late, debts=self._debts
        )
        try:
            wait_s = await self._robots.wait_s(url, host_of(url), tokens)
            if wait_s > 0:
                return Requeue(after_s=wait_s)
            return await self._downloader.download(
                url,
                Validators(link["etag"], link["last_modified"]) if link["sha256"] else Validators(),
                bounds=bounds,
                tokens=tokens,
                pause_s=partial(self._pause_s, customer),
            )
        except TokenExpired as expired:
            return await self._requeue(job, tokens, expired.after_s)
        except LaneExhausted as refused:
            return Requeue(refused.retry_after_s or RATE_LIMITED_S)
        except HostPaused as paused:
            return _after_pause(paused.after_s)

    async def _pause_s(self, customer: str, host: str) -> float:
        """Remaining pause of a host."""
        return (await self._host_stats.get(customer, host)).pause_s

    async def _requeue(self, job: JobContext[Any], tokens: RateTokens, after_s: float) -> Requeue:
        """Requeue a job whose token expired before a request was sent.

        A token is returned only with a job that returns at once, so a short wait is spent here. So
        is the wait after this process was too slow: claimed again at once, the job would delay the
        others.
        """
        if after_s == 0:
            self._count_late(job.id)
            after_s = LATE_S * (0.5 + random.random() / 2)
        if tokens.sent or after_s > UNRESPONSIVE_S:
            return Requeue(after_s)
        await asyncio.sleep(after_s)
        return Requeue()

    async def _stored(self, found: Download, last_sha256: str | None) -> Fetched:
        """Check and store a received body."""
        if found.body is None:
            return Fetched(found.outcome, found.text, retry_after_s=found.retry_after_s)
        with found.body:
            try:
                photo = await self._blob_writer.write(found)
            except NotAPhoto as refused:
                return Fetched(refused.outcome, refused.text)
        outcome = "unchanged" if photo.sha256 == last_sha256 else "stored"
        return Fetched(outcome, found.text, photo, found.etag, found.last_modified)

    def _record(
        self, customer: str, host: str, found: Download, fetched: Fetched, *, here: TimeClass
    ) -> None:
        self._host_stats.record(
            customer,
            host,
            outcome=fetched.outcome,
            requests=found.requests,
            took_s=found.took_s,
            needed_s=self._classes.needed(found.outcome, found.took_s, here),
        )
        wait_s = pause_s(fetched)
        if wait_s > 0:
            # The host that sent it, and the one whose redirects lead there.
            for paused in dict.fromkeys((host, host_of(found.hops[-1]))):
                self._host_stats.pause(customer, paused, wait_s)

    def _count_late(self, job_id: int) -> None:
        """Count an expired token; after LATE_MAX the job sends late and pays a second token."""
        self._late_count[job_id] = self._late_count.get(job_id, 0) + 1
        if len(self._late_count) > LATE_JOBS_MAX:
            self._late_count.popitem(last=False)


def _after_pause(left_s: float) -> Requeue:
    """Retry after the pause of a host, spread over a tenth of it."""
    return Requeue(after_s=left_s * (1 + random.random() / 10))


def pause_s(fetched: Fetched) -> float:
    """Pause of the host for all photos of the customer after this outcome."""
    if fetched.outcome == "failed:rate_limited":
        return fetched.retry_after_s or RATE_LIMITED_S
    if fetched.outcome == "failed:http_503":
        return fetched.retry_after_s or 0.0
    return 0.0
