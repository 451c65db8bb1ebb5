"""`app.fetch`: creates the services of fetch, registers its tasks, and has the everyday verbs.

The services are attributes: `customers`, `webhooks`, `sources`, `schemas`, `mappings`, `runs`,
`reports`, `items`, `consumers`, `hosts`, `links`, `upkeep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeVar

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres, Tx
from headrace.fetch import store
from headrace.fetch.applying import Applying
from headrace.fetch.blob_writer import BlobWriter
from headrace.fetch.catalogues import Catalogues, CurrentRules, Order
from headrace.fetch.consumers import Consumers, Handler
from headrace.fetch.download import Downloader
from headrace.fetch.host_pool import HostQuota
from headrace.fetch.host_stats import HostStats
from headrace.fetch.i18n import Texts
from headrace.fetch.item_upload import ItemUpload
from headrace.fetch.model import (
    CATALOGUE_QUEUE,
    ITEM_QUEUE,
    LIMITER,
    PUBLISH_QUEUE,
    RESULTS_LIMITER,
    WEBHOOK_QUEUE,
    Run,
    SentItem,
)
from headrace.fetch.photo_fetch import PhotoFetcher, PhotoTask
from headrace.fetch.publishing import DELIVERIES_AT_ONCE, Publishing
from headrace.fetch.rate_tokens import LaneClient
from headrace.fetch.robots import Robots
from headrace.fetch.routing import Classes
from headrace.fetch.sampling import Sampling
from headrace.fetch.service.catalogues import Mappings, Reports, Runs, Schemas
from headrace.fetch.service.customers import Customers, Webhooks
from headrace.fetch.service.items import Hosts, Items, Links
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sources import Sources, shown_name
from headrace.fetch.store.outcomes import OutcomeStore
from headrace.fetch.upkeep import Upkeep
from headrace.fetch.validation import Rules
from headrace.fetch.webhook_delivery import WEBHOOKS_AT_ONCE, WebhookClient, WebhookSender
from headrace.jobs import Jobs, Registry, Task

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


class Fetch:
    """Entry point of the room; opens no connection when it is created."""

    def __init__(self, postgres: Postgres, blobs: Blobs, jobs: Jobs, config: FetchConfig) -> None:
        self.config = config
        self._postgres = postgres
        self._downloader = Downloader(config)
        self._classes = Classes(config.classes, config.former_classes)
        self._host_stats = HostStats(postgres, self._classes, half_life_s=config.speed_half_life_s)
        self._blob_writer = BlobWriter(postgres, blobs, decode_share=config.decode_share)
        self._quota = HostQuota(
            jobs, self._classes, self._downloader.pool, connections=config.host_connections
        )
        self._fetcher = PhotoFetcher(
            self._downloader,
            self._blob_writer,
            self._host_stats,
            Robots(postgres, self._downloader, config),
            quota=self._quota,
            photo_max_bytes=config.photo_max_bytes,
        )
        self._photos = PhotoTask(OutcomeStore(postgres, jobs), self._fetcher)
        self._webhook_client = WebhookClient(config)
        self._webhook_sender = WebhookSender(postgres, jobs, self._webhook_client)
        self.consumers = Consumers(postgres, jobs)
        self._publishing = Publishing(
            postgres,
            jobs,
            self.consumers,
            self._webhook_sender,
            handler_timeout_s=config.handler_timeout_s,
        )
        self.webhooks = Webhooks(postgres, jobs, self._webhook_client, self._webhook_sender)
        self.customers = Customers(postgres, jobs, self.webhooks)
        self.schemas = Schemas(postgres)
        self.mappings = Mappings(postgres)
        self.items = Items(postgres)
        self.hosts = Hosts(postgres, self._classes, half_life_s=config.speed_half_life_s)
        self.links = Links(
            postgres, self._downloader, jobs, self.hosts, texts=Texts.load(config=config)
        )
        applying = Applying(jobs, config, self._host_stats, self._downloader.policy)
        self.upkeep = Upkeep(postgres, config, self._publishing, applying)
        self._upload = ItemUpload(postgres, applying, self._downloader.policy)
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

    def register(self, registry: Registry) -> None:
        """Add the room's tasks; every process that enqueues or works needs them."""
        self.upkeep.register(registry)
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
        registry.add(
            Task(
                queue=PUBLISH_QUEUE,
                handler=self._publishing.publish,
                batch=100,
                timeout="5m",
                retries=OWN_FAULT_RETRIES,
                limiter=RESULTS_LIMITER,
            )
        )
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
        """Register `async def handler(item: Item)`.

        It is called at least once per item, with the newest version last.
        """
        self.consumers.add(handler)
        return handler

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
        is_sampled: bool = True,
        has_permit: bool = False,
        tx: Tx | None = None,
    ) -> Run:
        """Read a catalogue file and apply it, within `tx` if given; photos follow as jobs.

        All or nothing: when this returns, the run is `applied` (or `done`, `held`, `dry`) durably.
        When it raises or its process dies, nothing was changed. A dry run downloads some of its
        photos if `is_sampled`. `has_permit`: the caller is inside `catalogue_permit`. Raises:
        CustomerUnknown, MappingUnknown, UnknownFormat, NotACatalogue, CatalogueBroken,
        CatalogueTooLarge, RunUnderWay, RunsBusy.
        """
        await self.customers.get(customer)
        name = "".join(c if c.isprintable() else "?" for c in file_name or path.name)[:200]
        order = Order(
            customer=customer,
            file_name=name,
            format_name=format_name,
            mapping=mapping,
            is_dry_run=is_dry_run,
            is_sampled=is_sampled,
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
        )
        run_id = await self.sources.order(order, url, tx=tx)
        return await self.runs.get(run_id, tx=tx)

    async def send_items(self, items: Sequence[SentItem], *, tx: Tx | None = None) -> list[Run]:
        """Upload up to 1,000 items without a catalogue, all or none; return one run per customer.

        Raises: InvalidItems, CustomerUnknown.
        """
        run_ids = await self._upload.send(items, tx=tx)
        return [await self.runs.get(run_id, tx=tx) for run_id in run_ids]

    async def close(self) -> None:
        """Close connections to hosts and the resolver; stop the decoder process."""
        await self._fetcher.close()
        await self._quota.close()
        await self._host_stats.close()
        await self._blob_writer.close()
        await self._downloader.close()
        await self._webhook_client.close()

    async def _rules(self) -> Rules:
        found = await store.catalogues.find_schemas(self._postgres)
        return Rules(self._downloader.policy, {one.category: one.schema for one in found})
