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
from typing import Final
from urllib.parse import urlsplit

import msgspec

from headrace.engines.postgres import Postgres, Row, Tx, from_row
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


class CatalogueJob(Order, frozen=True, kw_only=True, omit_defaults=True):
    """The payload: the source of a customer, or a URL to download once for a waiting run."""

    url: str | None = None


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
        payload = {"customer": customer}
        new = NewCron(name=name, spec=cron, tz=tz, queue=CATALOGUE_QUEUE, payload=payload)
        values = {"url": url, "cron": cron, "tz": tz, "format": format_name, "mapping": mapping}
        async with self._postgres.transaction() as tx:
            await tx.run(SQL.set_source, customer=customer, **values)
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
        ordered = msgspec.structs.asdict(order) | {"run_id": run_id}
        job = NewJob(queue=CATALOGUE_QUEUE, payload=CatalogueJob(**ordered, url=url))
        await self._jobs.enqueue(job, tx=tx)
        return run_id

    async def all(self) -> list[Source]:
        """All sources, by customer."""
        rows = await self._postgres.all(SQL.sources, customer=None)
        crons = {cron.name: cron for cron in await self._jobs.crons.all()} if rows else {}
        return [_source(row, crons.get(cron_name(row["customer"]))) for row in rows]

    async def get(self, customer: str) -> Source:
        """The source of a customer. Raises: SourceUnknown."""
        row = await self._postgres.one(SQL.sources, customer=customer)
        if row is None:
            raise SourceUnknown(customer)
        cron = None
        with suppress(CronUnknown):
            cron = await self._jobs.crons.get(cron_name(customer))
        return _source(row, cron)

    async def bring(self, customer: str) -> int:
        """Download the file of a source now, off schedule; return the id of the job.

        Raises: SourceUnknown.
        """
        await self.get(customer)
        payload = {"customer": customer}
        return await self._jobs.enqueue(NewJob(queue=CATALOGUE_QUEUE, payload=payload))

    async def remove(self, customer: str) -> None:
        """Delete a source; items remain. Raises: SourceUnknown."""
        if await self._postgres.one(SQL.drop_source, customer=customer) is None:
            raise SourceUnknown(customer)
        await self._drop_cron(customer)

    async def handle(self, job: JobContext[CatalogueJob]) -> None:
        """Run one job: download a file and run it."""
        payload = job.payload
        try:
            async with self._lock(payload) as is_locked:
                if is_locked:
                    await self._download(job)
                elif payload.run_id is not None:
                    job.snooze(BUSY_AGAIN_S)
        except TokenExpired as error:
            raise Snooze(error.after_s or 1.0) from error
        except (RunUnderWay, Unavailable) as error:
            raise Snooze(getattr(error, "retry_after_s", None) or BUSY_AGAIN_S) from error

    @asynccontextmanager
    async def _lock(self, payload: CatalogueJob) -> AsyncIterator[bool]:
        """Try to lock the downloads of a customer until the block ends; yield the success."""
        connection = await self._postgres.connect_unpooled()
        try:
            yield bool(
                await Tx(connection).value(
                    SQL.try_lock_source,
                    customer=payload.customer,
                    is_supplemental=payload.is_supplemental,
                )
            )
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
                await self._repeat(payload, source)
            else:
                await self._run(payload, source, download)

    async def _source_of(self, payload: CatalogueJob) -> SourceToBring | None:
        """The URL to download and its validators; None if the source was deleted."""
        if payload.url is not None:
            return SourceToBring(payload.url, payload.format_name, payload.mapping)
        row = await self._postgres.one(SQL.source_to_bring, customer=payload.customer)
        if row is None:
            return None
        found = SourceToBring(*row)
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
            await self._repeat(payload, source)
            return
        outcome, text = download.outcome, download.text
        await self._note_failure(payload, source, outcome, text)
        if is_temporary(outcome) and job.attempt <= RETRIES:
            delay_s = max(download.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            if payload.run_id is not None:
                reason = f"{outcome}: {text}; it is retried"
                await self._postgres.run(SQL.note_trouble, run_id=payload.run_id, reason=reason)
            job.retry(delay_s, f"{outcome}: {text}")
        elif payload.run_id is not None:
            reason = f"{outcome}: {text}"
            await self._postgres.run(SQL.refuse_ordered, run_id=payload.run_id, reason=reason)

    async def _repeat(self, payload: CatalogueJob, source: SourceToBring) -> None:
        customer = payload.customer
        run_id = await self._catalogues.repeat(customer, file_name=shown_name(source.url))
        await self._postgres.run(
            SQL.note_unchanged, customer=customer, url=source.url, run_id=run_id
        )

    async def _run(self, payload: CatalogueJob, source: SourceToBring, download: Download) -> None:
        """Run a downloaded file and store the result with the source."""
        assert download.body is not None
        order = msgspec.structs.replace(
            payload,
            file_name=shown_name(source.url),
            format_name=source.format_name,
            mapping=source.mapping,
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
            await self._note_run(payload, source, download, run_id)

    async def _note_run(
        self, payload: CatalogueJob, source: SourceToBring, download: Download, run_id: int
    ) -> None:
        run = (await store.runs.find_runs(self._postgres, run_ids=[run_id]))[0]
        is_good = run.state in GOOD_STATES
        await self._postgres.run(
            SQL.note_brought,
            customer=payload.customer,
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
    next_at = None if cron is None or cron.paused else cron.next_at
    return from_row(Source, row, next_at=next_at, text=row["problem"], run=row["run_id"])
