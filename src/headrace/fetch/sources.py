"""Catalogues brought from a URL: on a schedule of the customer's, or once.

    cron --job--> the only one at this customer? --a start of his lane--> download --> same file? a run of its due links
                                                                              \\--> else a run like an upload's

The file is asked for like a photo: through the same guard, out of the same lane, redirects by hand, with the
validators of the file that was applied last, as gzip if the host likes. One that did not change, by the
host's word or by its hash, is not read again; links that are due are asked all the same. What cannot be
mended by asking again (a wrong address, a file that is no catalogue) waits for the schedule; the rest is tried
again with backoff. What came of it is kept with the source.

Validators are sent only while they say something: the run that they are of is the newest that was applied,
and rows would be judged as they were then.
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
from headrace.fetch.download import Download, Downloader
from headrace.fetch.errors import CustomerUnknown, RunUnderWay, RunUnknown, SourceUnknown
from headrace.fetch.guard import judge_url
from headrace.fetch.hop import Bounds, Known
from headrace.fetch.lanes import LaneReach
from headrace.fetch.model import CATALOGUE_QUEUE, RunState, Source, is_temporary
from headrace.fetch.settings import FetchConfig
from headrace.fetch.starts import NotStarted
from headrace.fetch.store.sources import SourceToBring
from headrace.fetch.store.sql import SQL
from headrace.jobs import JobInHand, Jobs, NewCron, NewJob, Snooze
from headrace.jobs.crons import Cron
from headrace.jobs.errors import CronExists, CronUnknown
from headrace.kernel.errors import Unavailable
from headrace.kernel.resilience import Backoff

RETRIES: Final = 5
RETRY: Final = Backoff(first_s=30, max_s=1800)
BUSY_AGAIN_S: Final = 15.0
"""When a file is asked again for whose customer another catalogue is under way."""
START_WAIT_S: Final = 60.0
ACCEPT: Final = "*/*"
CRON_PREFIX: Final = "fetch:"
GOOD_STATES: Final = (RunState.APPLIED, RunState.DONE)


class CatalogueJob(msgspec.Struct, frozen=True, kw_only=True):
    """The payload: a customer's source, or a file to be brought once, into a run that waits for it."""

    customer: str
    run: int | None = None
    url: str | None = None
    format: str | None = None
    mapping: str | None = None
    dry_run: bool = False


class Sources:
    """Where catalogues come from by themselves, and the task that brings them."""

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
        self._lanes = LaneReach(jobs)
        self._bounds = Bounds(
            config.catalogue_timeout_s,
            config.catalogue_max_bytes,
            accept=ACCEPT,
            takes_packed=True,
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
        """Bring the customer's catalogue at every moment of `cron`; replaces the source there was, whose pause goes on.

        Raises: CustomerUnknown, MappingUnknown, UnknownFormat, UrlRefused, InvalidCron.
        """
        if not await store.customers.find_customers(self._postgres, customer):
            raise CustomerUnknown(customer)
        await self._catalogues.require_readable(format_name, mapping)
        judge_url(url, self._downloader.policy)
        name = cron_name(customer)
        new = NewCron(
            name=name, spec=cron, tz=tz, queue=CATALOGUE_QUEUE, payload={"customer": customer}
        )
        async with self._postgres.transaction() as tx:
            await store.sources.set_source(
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
        """Bring a file once, now; the id of the run that waits for it.

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
        """Every source, by customer."""
        rows = await store.sources.find_sources(self._postgres)
        crons = {cron.name: cron for cron in await self._jobs.crons.all()} if rows else {}
        return [_source(row, crons.get(cron_name(row["customer"]))) for row in rows]

    async def get(self, customer: str) -> Source:
        """A customer's source. Raises: SourceUnknown."""
        rows = await store.sources.find_sources(self._postgres, customer)
        if not rows:
            raise SourceUnknown(customer)
        cron = None
        with suppress(CronUnknown):
            cron = await self._jobs.crons.get(cron_name(customer))
        return _source(rows[0], cron)

    async def bring(self, customer: str) -> int:
        """Bring the customer's catalogue now, besides its moments; the id of the job. Raises: SourceUnknown."""
        await self.get(customer)
        job = NewJob(queue=CATALOGUE_QUEUE, payload={"customer": customer})
        return await self._jobs.enqueue(job)

    async def remove(self, customer: str) -> None:
        """Bring the customer's catalogue no more; its items stay. Raises: SourceUnknown."""
        if not await store.sources.drop_source(self._postgres, customer):
            raise SourceUnknown(customer)
        await self._drop_cron(customer)

    async def handle(self, job: JobInHand[CatalogueJob]) -> None:
        """Bring one file and run it."""
        payload = job.payload
        try:
            async with self._alone(payload.customer) as is_alone:
                if is_alone:
                    await self._bring(job)
                elif payload.run is not None:
                    job.snooze(BUSY_AGAIN_S)
        except NotStarted as error:
            raise Snooze(error.after_s or 1.0) from error
        except (RunUnderWay, Unavailable) as error:
            raise Snooze(getattr(error, "retry_after_s", None) or BUSY_AGAIN_S) from error

    @asynccontextmanager
    async def _alone(self, customer: str) -> AsyncIterator[bool]:
        """Whether nobody else brings a file of this customer, until the block ends."""
        connection = await self._postgres.connect_unpooled()
        try:
            yield bool(await Tx(connection).value(SQL.try_lock_source, customer=customer))
        finally:
            with suppress(OSError, TimeoutError):
                await connection.close(timeout=5)

    async def _bring(self, job: JobInHand[CatalogueJob]) -> None:
        payload = job.payload
        source = await self._source_of(payload)
        if source is None:
            await self._drop_cron(payload.customer)
            return
        starts = await self._lanes.starts(payload.customer, wait_max_s=START_WAIT_S)
        download = await self._downloader.download(
            source.url,
            Known(source.etag, source.last_modified),
            bounds=self._bounds,
            starts=starts,
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
        """What to ask for; None: the source was removed."""
        if payload.url is not None:
            return SourceToBring(payload.url, payload.format, payload.mapping)
        found = await store.sources.find_to_bring(self._postgres, payload.customer)
        if found is None:
            return None
        try:
            rules = await self._catalogues.require_readable(found.format_name, found.mapping)
        except UNREADABLE:
            # It is told when the file is there to be read.
            return SourceToBring(found.url, found.format_name, found.mapping)
        return found.read_as(rules)

    async def _end_without(
        self, job: JobInHand[CatalogueJob], source: SourceToBring, download: Download
    ) -> None:
        """No body came: it did not change, or it could not be had."""
        payload = job.payload
        if download.outcome == "unchanged":
            await self._repeat(payload.customer, source)
            return
        outcome, text = download.outcome, download.text
        await self._note_failure(payload, source, outcome, text)
        if is_temporary(outcome) and job.attempt <= RETRIES:
            delay_s = max(download.retry_after_s or 0.0, RETRY.delay_s(job.attempt))
            if payload.run is not None:
                reason = f"{outcome}: {text}; it is asked again"
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
        """Run the file that came."""
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
    """The name of the cron that brings a customer's catalogue."""
    name = f"{CRON_PREFIX}{customer}"
    if len(name) <= 128:
        return name
    return f"{CRON_PREFIX}{hashlib.sha256(customer.encode()).hexdigest()}"


def shown_name(url: str) -> str:
    """A URL as the name of a file: without its query, which may hold a secret."""
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
