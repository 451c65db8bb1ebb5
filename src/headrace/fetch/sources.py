"""Sources: catalogues downloaded from a URL, once or on a schedule of the customer.

    cron --> job --> lock of the customer --> rate-limit token --> download
                                              unchanged file --> a run that only retries due links
                                              changed file   --> a run like that of an upload

A file is downloaded like a photo: the same URL checks, the same rate limit, and redirects that are
checked one by one. The request has the validators (ETag, date) of the file that was applied last
and accepts gzip. A file is unchanged if the host reports so, or if its hash is equal.

Temporary errors are retried with backoff. Other errors, such as a wrong URL or a file that is not a
catalogue, wait for the next scheduled time. The result is stored with the source.

Validators are sent only if the run that stored them is the last applied one and the validation
rules did not change since.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from headrace.engines.postgres import Postgres, Row, Tx
from headrace.fetch import store
from headrace.fetch.catalogues import UNREADABLE, Catalogues, Order
from headrace.fetch.curl import Bounds, Validators
from headrace.fetch.download import Download, Downloader
from headrace.fetch.errors import CustomerUnknown, RunUnderWay, RunUnknown, SourceUnknown
from headrace.fetch.guard import judge_url
from headrace.fetch.limits import LaneClient, TokenExpired
from headrace.fetch.model import CATALOGUE_QUEUE, RunState, Source
from headrace.fetch.outcomes import is_temporary
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.fetch.store.runs import SourceToBring
from headrace.jobs import JobContext, Jobs, NewCron, NewJob, Snooze
from headrace.jobs.crons import Cron
from headrace.jobs.errors import CronExists, CronUnknown
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import Backoff

RETRIES: Final = 5
RETRY: Final = Backoff(first_s=30, max_s=1800)
BUSY_AGAIN_S: Final = 15.0
"""Delay before a retry while another catalogue of the customer is running."""
START_WAIT_S: Final = 60.0
ACCEPT: Final = "*/*"
CRON_PREFIX: Final = "fetch:"
GOOD_STATES: Final = (RunState.APPLIED, RunState.DONE)


class CatalogueJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: the source of a customer, or a URL to download once for a waiting run."""

    customer: str
    run: int | None = None
    url: str | None = None
    format: str | None = None
    mapping: str | None = None
    dry_run: bool = False


class Sources:
    """Stores the sources of customers, and downloads their catalogues as jobs."""

    def __init__(
        self,
        postgres: Postgres,
        jobs: Jobs,
        config: FetchConfig,
        *,
        catalogues: Catalogues,
        downloader: Downloader,
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._catalogues = catalogues
        self._downloader = downloader
        self._lanes = LaneClient(jobs)
        self._bounds = Bounds(
            config.catalogue_timeout_s,
            config.catalogue_max_bytes,
            accept=ACCEPT,
            takes_gzip=True,
        )

    async def set(
        self,
        customer: str,
        *,
        url: str,
        cron: str,
        tz: str = "UTC",
        format_name: str | None = None,
        mapping: str | None = None,
    ) -> Source:
        """Download the catalogue of a customer on a schedule, in place of the previous source.

        A paused schedule remains paused. Raises: CustomerUnknown, MappingUnknown, UnknownFormat,
        UrlRefused, InvalidCron.
        """
        if not await store.runs.find_customers(self._postgres, customer):
            raise CustomerUnknown(customer)
        await self._catalogues.require_readable(format_name, mapping)
        judge_url(url, self._downloader.policy)
        name = cron_name(customer)
        new = NewCron(
            name=name, spec=cron, tz=tz, queue=CATALOGUE_QUEUE, payload={"customer": customer}
        )
        async with self._postgres.transaction() as tx:
            await store.runs.set_source(
                tx,
                customer,
                url=url,
                cron=cron,
                tz=tz,
                format_name=format_name,
                mapping=mapping,
            )
            try:
                await self._jobs.crons.add(new, tx=tx)
                is_new = True
            except CronExists:
                is_new = False
        if not is_new:
            await self._jobs.crons.change(name, spec=cron, tz=tz)
        return await self.get(customer)

    async def order(self, order: Order, url: str, *, tx: Tx | None = None) -> int:
        """Download a file once, now; return the id of the run that waits for it.

        Raises: MappingUnknown, UnknownFormat, UrlRefused.
        """
        await self._catalogues.require_readable(order.format_name, order.mapping)
        judge_url(url, self._downloader.policy)
        if tx is None:
            async with self._postgres.transaction() as own:
                return await self.order(order, url, tx=own)
        run_id: int = await tx.value(
            SQL.order_run, customer=order.customer, file_name=shown_name(url)
        )
        payload = CatalogueJob(
            customer=order.customer,
            run=run_id,
            url=url,
            format=order.format_name,
            mapping=order.mapping,
            dry_run=order.is_dry_run,
        )
        job = NewJob(queue=CATALOGUE_QUEUE, payload=msgspec.to_builtins(payload))
        await self._jobs.enqueue(job, tx=tx)
        return run_id

    async def all(self) -> list[Source]:
        """All sources, by customer."""
        rows = await store.runs.find_sources(self._postgres)
        crons = {cron.name: cron for cron in await self._jobs.crons.all()} if rows else {}
        return [_source(row, crons.get(cron_name(row["customer"]))) for row in rows]

    async def get(self, customer: str) -> Source:
        """The source of a customer. Raises: SourceUnknown."""
        rows = await store.runs.find_sources(self._postgres, customer)
        if not rows:
            raise SourceUnknown(customer)
        cron = None
        with suppress(CronUnknown):
            cron = await self._jobs.crons.get(cron_name(customer))
        return _source(rows[0], cron)

    async def bring(self, customer: str) -> int:
        """Download the catalogue of a customer now, off schedule; return the id of the job.

        Raises: SourceUnknown.
        """
        await self.get(customer)
        job = NewJob(queue=CATALOGUE_QUEUE, payload={"customer": customer})
        return await self._jobs.enqueue(job)

    async def remove(self, customer: str) -> None:
        """Delete the source of a customer; its items remain. Raises: SourceUnknown."""
        if not await store.runs.drop_source(self._postgres, customer):
            raise SourceUnknown(customer)
        await self._drop_cron(customer)

    async def handle(self, job: JobContext[CatalogueJob]) -> None:
        """Run one job: download a file and run it."""
        payload = job.payload
        try:
            async with self._lock(payload.customer) as is_locked:
                if is_locked:
                    await self._download(job)
                elif payload.run is not None:
                    job.snooze(BUSY_AGAIN_S)
        except TokenExpired as error:
            raise Snooze(error.after_s or 1.0) from error
        except (RunUnderWay, Unavailable) as error:
            raise Snooze(getattr(error, "retry_after_s", None) or BUSY_AGAIN_S) from error

    @asynccontextmanager
    async def _lock(self, customer: str) -> AsyncIterator[bool]:
        """Try to lock the downloads of a customer until the block ends; yield the success."""
        connection = await self._postgres.connect_unpooled()
        try:
            yield bool(await Tx(connection).value(SQL.try_lock_source, customer=customer))
        finally:
            with suppress(OSError, TimeoutError):
                await connection.close(timeout=5)

    async def _download(self, job: JobContext[CatalogueJob]) -> None:
        payload = job.payload
        source = await self._source_of(payload)
        if source is None:
            await self._drop_cron(payload.customer)
            return
        tokens = await self._lanes.tokens(payload.customer, wait_max_s=START_WAIT_S)
        download = await self._downloader.download(
            source.url,
            Validators(source.etag, source.last_modified),
            bounds=self._bounds,
            tokens=tokens,
        )
        if download.body is None:
            await self._end_without(job, source, download)
            return
        with download.body:
            if download.sha256 == source.sha256:
                await self._repeat(payload.customer, source)
            else:
                await self._run(payload, source, download)

    async def _source_of(self, payload: CatalogueJob) -> SourceToBring | None:
        """The URL to download and its validators; None if the source was deleted."""
        if payload.url is not None:
            return SourceToBring(payload.url, payload.format, payload.mapping)
        found = await store.runs.find_to_bring(self._postgres, payload.customer)
        if found is None:
            return None
        try:
            rules = await self._catalogues.require_readable(found.format_name, found.mapping)
        except UNREADABLE:
            # The run of the file reports the error.
            return SourceToBring(found.url, found.format_name, found.mapping)
        return found.read_as(rules)

    async def _end_without(
        self, job: JobContext[CatalogueJob], source: SourceToBring, download: Download
    ) -> None:
        """Handle a download without a body: the file is unchanged, or the download failed."""
        payload = job.payload
        if download.outcome == "unchanged":
            await self._repeat(payload.customer, source)
            return
        outcome, text = download.outcome, download.text
        await self._note_failure(payload, source, outcome, text)
        if is_temporary(outcome) and job.attempt <= RETRIES:
            delay_s = max(download.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            if payload.run is not None:
                reason = f"{outcome}: {text}; it is retried"
                await self._postgres.run(SQL.note_trouble, run_id=payload.run, reason=reason)
            job.retry(delay_s, f"{outcome}: {text}")
        elif payload.run is not None:
            reason = f"{outcome}: {text}"
            await self._postgres.run(SQL.refuse_ordered, run_id=payload.run, reason=reason)

    async def _repeat(self, customer: str, source: SourceToBring) -> None:
        run_id = await self._catalogues.repeat(customer, file_name=shown_name(source.url))
        await self._postgres.run(
            SQL.note_unchanged, customer=customer, url=source.url, run_id=run_id
        )

    async def _run(self, payload: CatalogueJob, source: SourceToBring, download: Download) -> None:
        """Run a downloaded file and store the result with the source."""
        assert download.body is not None
        order = Order(
            customer=payload.customer,
            file_name=shown_name(source.url),
            format_name=source.format_name,
            mapping=source.mapping,
            is_dry_run=payload.dry_run,
            run_id=payload.run,
        )
        with tempfile.TemporaryDirectory(prefix="headrace-catalogue-") as folder:
            path = Path(folder) / "catalogue"
            await asyncio.to_thread(download.body.copy_to, path)
            try:
                run_id = await self._catalogues.run(path, order)
            except UNREADABLE as error:
                outcome = f"refused:{error.code.rpartition('.')[2]}"
                await self._note_failure(payload, source, outcome, error.text)
                return
            except RunUnknown:
                return
        if payload.url is None:
            await self._note_run(payload.customer, source, download, run_id)

    async def _note_run(
        self, customer: str, source: SourceToBring, download: Download, run_id: int
    ) -> None:
        run = (await store.runs.find_runs(self._postgres, run_id=run_id))[0]
        is_good = run.state in GOOD_STATES
        await self._postgres.run(
            SQL.note_brought,
            customer=customer,
            url=source.url,
            outcome=run.state.value,
            problem=run.reason,
            run_id=run_id,
            etag=download.etag if is_good else None,
            last_modified=download.last_modified if is_good else None,
            sha256=download.sha256 if is_good else None,
            rules=source.rules,
            good_run=run_id if is_good else None,
        )

    async def _note_failure(
        self, payload: CatalogueJob, source: SourceToBring, outcome: str, text: str
    ) -> None:
        if payload.url is None:
            await self._postgres.run(
                SQL.note_not_brought,
                customer=payload.customer,
                url=source.url,
                outcome=outcome,
                problem=text,
            )

    async def _drop_cron(self, customer: str) -> None:
        with suppress(CronUnknown):
            await self._jobs.crons.remove(cron_name(customer))


def cron_name(customer: str) -> str:
    """The name of the cron that downloads the catalogue of a customer."""
    name = f"{CRON_PREFIX}{customer}"
    if len(name) <= 128:
        return name
    return f"{CRON_PREFIX}{hashlib.sha256(customer.encode()).hexdigest()}"


def shown_name(url: str) -> str:
    """A URL as a file name for display, without its query, which may contain a secret."""
    parts = urlsplit(url)
    name = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return "".join(c if c.isprintable() else "?" for c in name)[:200]


def _source(row: Row, cron: Cron | None) -> Source:
    values: dict[str, Any] = {
        name: row[name]
        for name in ("customer", "url", "cron", "tz", "format", "mapping", "outcome", "failures")
    }
    return Source(
        next_at=None if cron is None or cron.paused else cron.next_at,
        tried_at=row["tried_at"],
        text=row["problem"],
        run=row["run_id"],
        **values,
    )
