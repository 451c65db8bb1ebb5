"""`app.fetch`: creates the services of fetch, registers its tasks, and has the everyday methods.

The services are attributes: `customers`, `webhooks`, `sources`, `schemas`, `mappings`, `runs`,
`reports`, `items`, `held`, `duplicates`, `consumers`, `hosts`, `links`, `upkeep`.

Three crons: publish items at their deadline, retry failed links, and compare photos (`duplicates`).

**Deadlines**, every 5 minutes: a new or changed item whose photos take longer than
`fetch.item_deadline` is published with the photos it has. Downloads continue; photos that arrive
later create a further version.

**Links**, every 15 minutes: failed links are retried at the latest after
`fetch_recheck_wait_v1` (less than a day), even if no catalogue arrives. If `fetch.refresh` is set,
stored photos are requested again with their ETag or date. The items of these links form a run of
the format `links`. Items that another run is changing wait for it.

Catalogue runs skip a failed link for one run, then for two, then for three. This rule is
implemented only in the PostgreSQL functions `fetch_due_round_v1`, `fetch_is_due_v1` and
`fetch_recheck_wait_v1`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeVar

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres, Tx
from headrace.engines.postgres_errors import PostgresBusy
from headrace.fetch import store
from headrace.fetch.applying import APPLY_S_MAX, Applying
from headrace.fetch.catalogues import Catalogues, CurrentRules, Order
from headrace.fetch.consumers import Consumers, Handler
from headrace.fetch.download import Downloader
from headrace.fetch.duplicates import Duplicates
from headrace.fetch.errors import InvalidSource
from headrace.fetch.host_stats import Classes, HostStats
from headrace.fetch.i18n import Texts
from headrace.fetch.limits import HostQuota, LaneClient
from headrace.fetch.model import (
    CATALOGUE_QUEUE,
    DEADLINES_QUEUE,
    ITEM_QUEUE,
    LIMITER,
    LINKS_QUEUE,
    PUBLISH_QUEUE,
    RESULTS_LIMITER,
    WEBHOOK_QUEUE,
    Customer,
    Run,
    SentItem,
)
from headrace.fetch.photo_fetch import BlobWriter, PhotoFetcher, PhotoTask
from headrace.fetch.publish_check import CHECKS_AT_ONCE, Check, CheckedPublishing, HeldItems
from headrace.fetch.publishing import DELIVERIES_AT_ONCE, Publishing
from headrace.fetch.robots import Robots
from headrace.fetch.sampling import Sampling
from headrace.fetch.service.catalogues import Mappings, Reports, Runs, Schemas
from headrace.fetch.service.customers import Customers, Webhooks
from headrace.fetch.service.items import Hosts, Items, ItemUpload, Links
from headrace.fetch.service.lookup import Lookup
from headrace.fetch.service.sellers import LinkSigning, Sellers
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sources import Sources, shown_name
from headrace.fetch.sql import SQL
from headrace.fetch.store.outcomes import OutcomeStore
from headrace.fetch.study import Study, find_study
from headrace.fetch.validation import Rules
from headrace.fetch.webhook_delivery import WEBHOOKS_AT_ONCE, WebhookSender
from headrace.jobs import Jobs, Registry, Task
from headrace.jobs.tasks import TaskOptions
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

LINKS_FORMAT: Final = "links"
LINKS_EVERY_S: Final = 900.0
RATE_SHARE: Final = 0.5
"""The share of the rate limit of a customer that one sweep may use until the next sweep."""
LINKS_MIN: Final = 10
_LOG: Final = logger(__name__)


class Upkeep:
    """Publishes items at their deadline; requests failed and old photos again."""

    def __init__(
        self, postgres: Postgres, config: FetchConfig, publishing: Publishing, applying: Applying
    ) -> None:
        self._postgres = postgres
        self._config = config
        self._publishing = publishing
        self._applying = applying

    def register(self, registry: Registry) -> None:
        """Register the crons."""
        registry.cron("*/5 * * * *", name=DEADLINES_QUEUE, timeout="1h")(self.enforce_deadlines)
        registry.cron("*/15 * * * *", name=LINKS_QUEUE, timeout="1h")(self.recheck_links)

    async def enforce_deadlines(self) -> None:
        """Publish items past their deadline; discard uploads that were not confirmed in time."""
        await self.discard_unreviewed()
        await self.publish_late()

    async def publish_late(self) -> None:
        """Publish each item past its deadline once, with the photos it has."""
        runs = await self._postgres.all(SQL.late_runs, deadline_s=self._config.item_deadline_s)
        for row in runs:
            items = await self._publishing.publish_late(row["id"])
            if items:
                _LOG.info("items_published_late", run=row["id"], items=items)

    async def discard_unreviewed(self) -> None:
        """Discard uploads for review that were not confirmed in time, with their rows."""
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            for row in await tx.all(SQL.discard_unreviewed):
                await tx.run(SQL.forget_staged, runs=[row["id"]])
                _LOG.info("upload_discarded", run=row["id"])

    async def recheck_links(self) -> None:
        """Request due failed links again, and stored photos that are old enough."""
        refresh_s = self._config.refresh_s
        due = await self._postgres.all(SQL.customers_to_recheck, refresh_s=refresh_s)
        for row in due:
            [customer] = await store.runs.find_customers(self._postgres, row["customer"])
            try:
                await self._recheck(customer)
            except PostgresBusy:
                _LOG.info("links_not_rechecked", customer=customer.customer, reason="busy")

    async def _recheck(self, customer: Customer) -> None:
        own_s = customer.refresh_s
        refresh_s = self._config.refresh_s if own_s is None else own_s
        allowed = customer.starts_max / customer.window_s * LINKS_EVERY_S * RATE_SHARE
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            await tx.one(SQL.lock_items, customer=customer.customer)
            run_id: int = await tx.value(
                SQL.insert_run,
                customer=customer.customer,
                file_name=LINKS_FORMAT,
                format=LINKS_FORMAT,
                is_whole=False,
            )
            await tx.run(SQL.avoid_nested_loops)
            items: int = await tx.value(
                SQL.stage_due,
                run_id=run_id,
                customer=customer.customer,
                refresh_s=refresh_s,
                links_max=max(LINKS_MIN, int(allowed)),
            )
            await tx.run(SQL.allow_nested_loops)
            if items:
                await self._applying.request_links(
                    tx, run_id, customer.customer, refresh_s=refresh_s
                )
            else:
                await tx.run(SQL.drop_run, run_id=run_id)
        crash_point("fetch.links_rechecked")


OWN_FAULT_RETRIES: Final = 20
"""Retries of tasks that fail only by a bug or a crash of ours, which must cost a seller no photo.

"""
DELIVERY_SLACK_S: Final = 300.0
"""Time for the work of a delivery beside the handler's call."""
PHOTO_SLACK_S: Final = 240.0
"""Time for the work of a photo beside its class: waits for rate-limit tokens and for our engines.

"""
CATALOGUE_SLACK_S: Final = 3600.0
"""Time to read and apply a fetched catalogue."""
SLOTS_MAX: Final = 100_000
H = TypeVar("H", bound=Handler)
CheckHandler = TypeVar("CheckHandler", bound=Check)


class Fetch:
    """Entry point of the room; opens no connection when it is created."""

    def __init__(
        self,
        postgres: Postgres,
        blobs: Blobs,
        jobs: Jobs,
        config: FetchConfig,
        *,
        link_signing: LinkSigning,
    ) -> None:
        self.config = config
        self._postgres = postgres
        self._jobs = jobs
        self._downloader = Downloader(config)
        self._classes = Classes(config.classes, config.former_classes)
        self._host_stats = HostStats(postgres, self._classes, half_life_s=config.speed_half_life_s)
        self._blob_writer = BlobWriter(postgres, blobs, decode_share=config.decode_share)
        self._quota = HostQuota(jobs, self._classes, connections=config.host_connections)
        self._fetcher = self._make_fetcher(postgres)
        self._photos = PhotoTask(OutcomeStore(postgres, jobs), self._fetcher)
        self._webhook_sender = WebhookSender(
            postgres, jobs, self._downloader, timeout_s=config.webhook_timeout_s
        )
        self.consumers = Consumers(postgres, jobs)
        call_s = config.handler_timeout_s
        self._publishing = Publishing(
            postgres, jobs, self.consumers, self._webhook_sender, handler_timeout_s=call_s
        )
        self._checked: CheckedPublishing | None = None
        self.held = HeldItems(postgres, self._publishing)
        self.duplicates = Duplicates(postgres)
        policy = self._downloader.policy
        self.webhooks = Webhooks(postgres, jobs, self._webhook_sender, policy)
        self.customers = Customers(postgres, jobs, self.webhooks)
        self.schemas = Schemas(postgres)
        self.mappings = Mappings(postgres)
        self.items = Items(postgres)
        self.lookup = Lookup(postgres)
        self.hosts = Hosts(postgres, self._classes, half_life_s=config.speed_half_life_s)
        self.links = Links(
            postgres, self._downloader, jobs, self.hosts, texts=Texts.load(config=config)
        )
        applying = Applying(jobs, config, self._host_stats, policy)
        self.upkeep = Upkeep(postgres, config, self._publishing, applying)
        self._upload = ItemUpload(postgres, applying, policy)
        self._catalogues = Catalogues(
            postgres,
            config,
            applying=applying,
            sampling=Sampling(postgres, LaneClient(jobs), self.links.download),
            current_rules=CurrentRules(self._rules, self.mappings.get),
        )
        self.sources = Sources(
            postgres, jobs, config, catalogues=self._catalogues, downloader=self._downloader
        )
        self.runs = Runs(postgres, self._catalogues)
        self.reports = Reports(postgres, self.runs, config)
        self.sellers = Sellers(
            postgres,
            config,
            runs=self.runs,
            reports=self.reports,
            policy=policy,
            signing=link_signing,
        )

    def _make_fetcher(self, postgres: Postgres) -> PhotoFetcher:
        config = self.config
        return PhotoFetcher(
            self._downloader,
            self._blob_writer,
            self._host_stats,
            Robots(postgres, self._downloader, config),
            quota=self._quota,
            photo_max_bytes=config.photo_max_bytes,
        )

    def register(self, registry: Registry) -> None:
        """Add the room's tasks; every process that enqueues or works needs them."""
        self.upkeep.register(registry)
        self.duplicates.register(registry)
        # Each customer's lane has its own limits. A lane that was reset gets these slow ones.
        registry.limiter(LIMITER, rate="1/s", concurrency=1)
        for time_class in (*self._classes.listed, *self._classes.former):
            # A slot per class: photos of slow hosts hold theirs for a long time.
            slots_min = int(time_class in self._classes.listed)
            registry.add(
                Task(
                    queue=time_class.queue,
                    handler=self._photos.handle,
                    timeout=f"{PHOTO_SLACK_S + 2 * time_class.time_s:.0f}s",
                    retries=OWN_FAULT_RETRIES,
                    concurrency=time_class.concurrency,
                    limiter=LIMITER,
                    slots=(slots_min, SLOTS_MAX),
                )
            )
        # With a `before_publish` handler each item is a call of its own.
        options: TaskOptions = {
            "timeout": f"{self.config.handler_timeout_s + DELIVERY_SLACK_S:.0f}s",
            "retries": OWN_FAULT_RETRIES,
            "limiter": RESULTS_LIMITER,
        }
        publish: Callable[..., Awaitable[None]] = self._publishing.publish
        if self._checked is None:
            options["batch"] = 100
        else:
            publish, options["concurrency"] = self._checked.handle, CHECKS_AT_ONCE
        registry.add(Task(queue=PUBLISH_QUEUE, handler=publish, **options))
        registry.add(
            Task(
                queue=ITEM_QUEUE,
                handler=self._publishing.deliver,
                timeout=f"{self.config.handler_timeout_s + DELIVERY_SLACK_S:.0f}s",
                retries=OWN_FAULT_RETRIES,
                concurrency=DELIVERIES_AT_ONCE,
                limiter=RESULTS_LIMITER,
            )
        )
        registry.add(
            Task(
                queue=WEBHOOK_QUEUE,
                handler=self._webhook_sender.deliver,
                timeout="5m",
                retries=OWN_FAULT_RETRIES,
                concurrency=WEBHOOKS_AT_ONCE,
            )
        )
        registry.add(
            Task(
                queue=CATALOGUE_QUEUE,
                handler=self.sources.handle,
                timeout=f"{self.config.catalogue_timeout_s + CATALOGUE_SLACK_S:.0f}s",
                retries=OWN_FAULT_RETRIES,
            )
        )

    def on_item(self, handler: H) -> H:
        """Register `async def handler(item: Item)`, or `def`, which is called in a thread.

        It is called at least once per item, with the newest version last.
        """
        self.consumers.add(handler)
        return handler

    def before_publish(
        self, *, changes: Collection[str] = ()
    ) -> Callable[[CheckHandler], CheckHandler]:
        """Register `async def check(item: Item) -> Hold | dict | None`, before `register`.

        A `def` is called in a thread.
        It is called at least once before a version of an item is published or edited, and accepts
        it, holds it or changes the fields named in `changes`. The last one registered is called.
        """

        def register(check: CheckHandler) -> CheckHandler:
            self.consumers.add_hook()
            self._checked = CheckedPublishing(
                self._postgres,
                self._jobs,
                self.consumers,
                self._publishing,
                check=check,
                changes=frozenset(changes),
                timeout_s=self.config.handler_timeout_s,
            )
            return check

        return register

    async def declare_consumers(self) -> None:
        """Record the handlers of this process as consumers, and enqueue missing webhook jobs.

        From then on every result is kept for each of them until it is delivered.
        """
        await self.consumers.declare()
        await self._webhook_sender.notify_all()

    async def run_catalogue(
        self,
        path: Path,
        customer: str,
        *,
        file_name: str | None = None,
        format_name: str | None = None,
        mapping: str | None = None,
        is_dry_run: bool = False,
        is_review: bool = False,
        is_sampled: bool = True,
        is_supplemental: bool = False,
        has_permit: bool = False,
        tx: Tx | None = None,
    ) -> Run:
        """Read a catalogue file and apply it, within `tx` if given; photos follow as jobs.

        All or nothing: when this returns, the run is `applied` (or `done`, `held`, `dry`) durably.
        When it raises or its process dies, nothing was changed. A dry run downloads some of its
        photos if `is_sampled`. `is_review` holds the run until `runs.confirm`, which applies the
        changes that `runs.changes` shows, or is refused. With `is_supplemental` the file only
        overlays price and stock of items: see `supplements.py`. `has_permit`: the caller is inside
        `catalogue_permit`. Raises: InvalidSource, CustomerUnknown, MappingUnknown, UnknownFormat,
        NotACatalogue, CatalogueBroken, CatalogueTooLarge, RunUnderWay, RunsBusy.
        """
        if is_review and (is_dry_run or is_supplemental):
            raise InvalidSource("review cannot be combined with dry_run or supplemental")
        await self.customers.get(customer)
        name = "".join(c if c.isprintable() else "?" for c in file_name or path.name)[:200]
        order = Order(
            customer=customer,
            file_name=name,
            format_name=format_name,
            mapping=mapping,
            is_dry_run=is_dry_run,
            is_review=is_review,
            is_sampled=is_sampled,
            is_supplemental=is_supplemental,
        )
        run_id = await self._catalogues.run(path, order, has_permit=has_permit, tx=tx)
        return await self.runs.get(run_id, tx=tx)

    def catalogue_permit(self, customer: str) -> AbstractAsyncContextManager[None]:
        """Wait for one of the few places for catalogues that a process reads at once.

        Enter it before the transaction that `run_catalogue` gets as `tx`: transactions that wait
        for a place would hold the connections that the running ones need. Raises: RunsBusy.
        """
        return self._catalogues.permit(customer)

    async def bring_catalogue(
        self,
        customer: str,
        url: str,
        *,
        format_name: str | None = None,
        mapping: str | None = None,
        is_dry_run: bool = False,
        is_supplemental: bool = False,
        tx: Tx | None = None,
    ) -> Run:
        """Fetch a catalogue from `url` once, by a job, and run it; return the waiting run.

        Raises: CustomerUnknown, MappingUnknown, UnknownFormat, UrlRefused.
        """
        await self.customers.get(customer)
        order = Order(
            customer=customer,
            file_name=shown_name(url),
            format_name=format_name,
            mapping=mapping,
            is_dry_run=is_dry_run,
            is_supplemental=is_supplemental,
        )
        run_id = await self.sources.order(order, url, tx=tx)
        return await self.runs.get(run_id, tx=tx)

    async def send_items(self, items: Sequence[SentItem], *, tx: Tx | None = None) -> list[Run]:
        """Upload up to 1,000 items without a catalogue, all or none; return one run per customer.

        Raises: InvalidItems, CustomerUnknown.
        """
        run_ids = await self._upload.send(items, tx=tx)
        return [await self.runs.get(run_id, tx=tx) for run_id in run_ids]

    async def study(self, *, weeks: int = 4) -> Study:
        """Download times and errors of the last weeks, and timeout classes that would fit them.

        Weeks begin on Monday, UTC; this one is included. Counts are kept for 57 weeks.
        """
        return await find_study(self._postgres.reads, self._classes, weeks=weeks)

    async def close(self) -> None:
        """Close connections to hosts and the resolver; stop the decoder process and threads."""
        self.consumers.close()
        await self._fetcher.close()
        await self._quota.close()
        await self._host_stats.close()
        await self._blob_writer.close()
        await self._downloader.close()

    async def _rules(self) -> Rules:
        found = await store.runs.find_schemas(self._postgres)
        return Rules(self._downloader.policy, {one.category: one.schema for one in found})
