"""Fetch, the handle: its tasks, and the verbs of customers, catalogues, items, results and links."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

from msgspec import UNSET, UnsetType

from headrace.engines.blobs import Blobs
from headrace.engines.postgres import Postgres, Tx
from headrace.fetch.applying import Applying
from headrace.fetch.asking import Asking
from headrace.fetch.catalogues import Catalogues, Judging, Order
from headrace.fetch.consumers import Consumers, Handler
from headrace.fetch.download import Downloader
from headrace.fetch.intake import Rules
from headrace.fetch.keeping import Keeping
from headrace.fetch.lanes import LaneReach
from headrace.fetch.ledger import Ledger
from headrace.fetch.model import (
    CATALOGUE_QUEUE,
    ITEM_QUEUE,
    LIMITER,
    PUBLISH_QUEUE,
    RESULTS_LIMITER,
    WEBHOOK_QUEUE,
    Change,
    Consumer,
    Customer,
    CustomerSet,
    Host,
    PhotoProblem,
    PhotoReport,
    Result,
    RowProblem,
    Run,
    SentItem,
    StoredItem,
    UrlReport,
)
from headrace.fetch.photos import Photos
from headrace.fetch.posting import Poster
from headrace.fetch.publishing import DELIVERIES_AT_ONCE, Publishing
from headrace.fetch.robots import Robots
from headrace.fetch.routing import Classes
from headrace.fetch.sampling import Sampling
from headrace.fetch.sent import Sent
from headrace.fetch.service.customers import Customers
from headrace.fetch.service.hosts import Hosts
from headrace.fetch.service.items import Items
from headrace.fetch.service.reports import Reports
from headrace.fetch.service.runs import Runs
from headrace.fetch.service.schemas import Mappings, Schemas
from headrace.fetch.service.urls import Urls
from headrace.fetch.service.webhooks import Webhooks
from headrace.fetch.settings import FetchConfig
from headrace.fetch.share import Share
from headrace.fetch.sources import Sources, shown_name
from headrace.fetch.speeds import Speeds
from headrace.fetch.texts import DEFAULT, Texts
from headrace.fetch.upkeep import Upkeep
from headrace.fetch.webhooks import WEBHOOKS_AT_ONCE, WebhookSending
from headrace.jobs import Jobs, Registry, Task
from headrace.kernel.routes import PAGE_ROWS_MAX

OWN_FAULT_RETRIES: Final = 20
"""Of tasks whose failures are ours: a bug or a crash must not cost a seller his photo."""
DELIVERY_SLACK_S: Final = 300.0
"""For what a delivery does beside its handler's call."""
PHOTO_SLACK_S: Final = 240.0
"""The same of a photo beside its class: waits for starts of its lane, and for our own engines."""
CATALOGUE_SLACK_S: Final = 3600.0
"""For reading and applying a catalogue that was brought."""
SLOTS_MAX: Final = 100_000
H = TypeVar("H", bound=Handler)


class Fetch:
    """The room's handle; opens nothing by itself."""

    def __init__(self, postgres: Postgres, blobs: Blobs, jobs: Jobs, config: FetchConfig) -> None:
        self.config = config
        self._postgres = postgres
        self._jobs = jobs
        self._downloader = Downloader(config)
        self._classes = Classes(config.classes, config.former_classes)
        self._speeds = Speeds(postgres, self._classes, half_life_s=config.speed_half_life_s)
        applying = Applying(jobs, config, self._speeds, self._downloader.policy)
        self._sent = Sent(postgres, applying, self._downloader.policy)
        self._catalogues = Catalogues(
            postgres,
            config,
            applying=applying,
            sampling=Sampling(postgres, LaneReach(jobs), self._urls.try_photo),
            judging=Judging(self._rules, self.mappings.get),
        )
        self.sources = Sources(
            postgres, jobs, config, catalogues=self._catalogues, downloader=self._downloader
        )
        self._keeping = Keeping(postgres, blobs, decode_share=config.decode_share)
        self._share = Share(
            jobs,
            self._classes,
            self._downloader.places,
            connections=config.host_connections,
        )
        asking = Asking(
            self._downloader,
            self._keeping,
            self._speeds,
            Robots(postgres, self._downloader, config),
            share=self._share,
            photo_max_bytes=config.photo_max_bytes,
        )
        self._photos = Photos(Ledger(postgres, jobs), asking)
        self._consumers = Consumers(postgres, jobs)
        self._poster = Poster(config)
        self._sending = WebhookSending(postgres, jobs, self._poster)
        self._publishing = Publishing(
            postgres,
            jobs,
            self._consumers,
            self._sending,
            handler_timeout_s=config.handler_timeout_s,
        )

        self.upkeep = Upkeep(postgres, config, self._publishing, applying)

    def register(self, registry: Registry) -> None:
        """Add the room's tasks; every process that enqueues or works needs them."""
        self.upkeep.register(registry)
        # Every customer's lane has limits of its own; one that a person resets is as polite as can be.
        registry.limiter(LIMITER, rate="1/s", concurrency=1)
        for time_class in (*self._classes.listed, *self._classes.former):
            # A slot of its own for each: photos of slow hosts hold theirs for as long as it takes.
            slots_min = int(time_class in self._classes.listed)
            registry.add(
                Task(
                    queue=time_class.queue,
                    handler=self._photos.handle,
                    timeout=f"{PHOTO_SLACK_S + 2 * time_class.time_s:.0f}s",
                    retries=OWN_FAULT_RETRIES,
                    concurrency=time_class.places,
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
                handler=self._sending.deliver,
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
        """Register `async def handler(item: Item)`; called at least once an item, newest last."""
        self._consumers.add(handler)
        return handler

    async def close(self) -> None:
        """Close connections to hosts and the resolver; end the process that decodes."""
        await self._share.close()
        await self._speeds.close()
        await self._keeping.close()
        await self._downloader.close()
        await self._poster.close()

    async def set_customer(
        self,
        customer: str,
        *,
        starts_max: int,
        window_s: float,
        connections: int,
        webhook: str | UnsetType | None = UNSET,
        hold_share: float | UnsetType | None = UNSET,
        hold_items: int | UnsetType | None = UNSET,
        refresh_s: float | UnsetType | None = UNSET,
    ) -> CustomerSet:
        """Make a customer or change its limits; they hold for photos not started yet.

        `webhook`: the URL that its results are sent to, None for none; the secret of a new one is in the
        answer, this once. `hold_share` and `hold_items`: a catalogue that removes more is held. `refresh_s`:
        good photos are asked for again after so long, 0 for never. None is the deployment's setting; what
        is left out stays as it is. Raises: InvalidId, InvalidRate, InvalidCustomer, UrlRefused.
        """
        return await self._customers.set(
            customer,
            starts_max=starts_max,
            window_s=window_s,
            connections=connections,
            webhook=webhook,
            hold_share=hold_share,
            hold_items=hold_items,
            refresh_s=refresh_s,
        )

    async def customer(self, customer: str) -> Customer:
        """A customer's limits. Raises: CustomerUnknown."""
        return await self._customers.get(customer)

    async def customers(self) -> list[Customer]:
        """Every customer, by name."""
        return await self._customers.all()

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
        has_place: bool = False,
        tx: Tx | None = None,
    ) -> Run:
        """Read a catalogue file and apply it, within `tx` if given; photos follow as jobs.

        All or nothing: when this returns, the run is `applied` (or `done`, `held`, `dry`) durably; when
        it raises or its process dies, nothing was changed. A dry run downloads some of its photos where
        `is_sampled`. `has_place`: the caller is within `catalogue_place`. Raises: CustomerUnknown, MappingUnknown, UnknownFormat, NotACatalogue,
        CatalogueBroken, CatalogueTooLarge, RunUnderWay, RunsBusy.
        """
        await self.customer(customer)
        name = "".join(c if c.isprintable() else "?" for c in file_name or path.name)[:200]
        order = Order(
            customer=customer,
            file_name=name,
            format_name=format_name,
            mapping=mapping,
            is_dry_run=is_dry_run,
            is_sampled=is_sampled,
        )
        run_id = await self._catalogues.run(path, order, has_place=has_place, tx=tx)
        return await self._runs.get(run_id, tx=tx)

    def catalogue_place(self, customer: str) -> AbstractAsyncContextManager[None]:
        """One of the few places for catalogues that are read at once.

        Whoever runs one within a transaction of his own takes it before that: transactions that wait in
        line would leave no connection to those whose turn it is. Raises: RunsBusy.
        """
        return self._catalogues.place(customer)

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
        """Bring a catalogue from `url` once, now, and run it; the run that waits for the file.

        Raises: CustomerUnknown, MappingUnknown, UnknownFormat, UrlRefused.
        """
        await self.customer(customer)
        order = Order(
            customer=customer,
            file_name=shown_name(url),
            format_name=format_name,
            mapping=mapping,
            is_dry_run=is_dry_run,
        )
        run_id = await self.sources.order(order, url, tx=tx)
        return await self._runs.get(run_id, tx=tx)

    async def send_items(self, items: Sequence[SentItem], *, tx: Tx | None = None) -> list[Run]:
        """Take up to 1,000 items in without a catalogue, all or none; the runs, one a customer.

        Raises: InvalidItems, CustomerUnknown.
        """
        run_ids = await self._sent.send(items, tx=tx)
        return [await self._runs.get(run_id, tx=tx) for run_id in run_ids]

    async def confirm_run(self, run_id: int) -> Run:
        """Apply a held run. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        await self.run(run_id)
        await self._catalogues.confirm(run_id)
        return await self.run(run_id)

    async def discard_run(self, run_id: int) -> Run:
        """End a held run, which is then not to be applied. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        await self.run(run_id)
        await self._catalogues.discard(run_id)
        return await self.run(run_id)

    async def undo_run(self, run_id: int) -> Run:
        """Put the customer's items back to their state before a run; the run that does so.

        Raises: RunUnknown, RunNotUndoable, RunUnderWay, RunsBusy.
        """
        await self.run(run_id)
        return await self.run(await self._catalogues.undo(run_id))

    async def run(self, run_id: int) -> Run:
        """How far a run is. Raises: RunUnknown."""
        return await self._runs.get(run_id)

    async def runs(self, customer: str | None = None, *, runs_max: int = 50) -> list[Run]:
        """The newest runs, of one customer or of all. Raises: CustomerUnknown."""
        if customer is not None:
            await self.customer(customer)
        return await self._runs.newest(customer, runs_max=runs_max)

    async def changes(
        self, run_id: int, *, after: str = "", rows_max: int = PAGE_ROWS_MAX
    ) -> list[Change]:
        """What a run changes, or would, by item, those after item `after`. Raises: RunUnknown."""
        return await self._runs.changes(run_id, after=after, rows_max=rows_max)

    async def problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX, lang: str = DEFAULT
    ) -> list[tuple[int, RowProblem]]:
        """(position, problem) of a run's rows behind position `after`. Raises: RunUnknown, LanguageUnknown."""
        return await self.reports.problems(run_id, after=after, rows_max=rows_max, lang=lang)

    async def photo_problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX, lang: str = DEFAULT
    ) -> list[tuple[int, PhotoProblem]]:
        """(position, photo) of those that failed or were refused. Raises: RunUnknown, LanguageUnknown."""
        return await self.reports.photo_problems(run_id, after=after, rows_max=rows_max, lang=lang)

    async def item(self, customer: str, item: str) -> StoredItem:
        """An item as it stands, with its photos. Raises: ItemUnknown."""
        return await self._items.get(customer, item)

    async def results(
        self, *, after: int = 0, results_max: int = 100, customer: str | None = None
    ) -> list[Result]:
        """Results behind `after` in the order of their commits; a poller keeps the last `seq`.

        Raises: CustomerUnknown.
        """
        if customer is not None:
            await self.customer(customer)
        return await self._items.results(after=after, results_max=results_max, customer=customer)

    async def newest_results(
        self, *, before: int | None = None, results_max: int = 100, customer: str | None = None
    ) -> list[Result]:
        """The newest results, newest first, those before number `before`; for people who look, not for pollers.

        Raises: CustomerUnknown.
        """
        if customer is not None:
            await self.customer(customer)
        return await self._items.newest_results(
            before=before, results_max=results_max, customer=customer
        )

    async def declare_consumers(self) -> None:
        """Record the handlers of this process as consumers: results wait for them from now on.

        Webhooks that are behind without a job at it get one.
        """
        await self._consumers.declare()
        await self._sending.wake_all()

    async def consumers(self) -> list[Consumer]:
        """Every consumer recorded, by name."""
        return await self._consumers.all()

    async def remove_consumer(self, name: str) -> None:
        """Forget a consumer and drop what waits for it; a worker that starts with it records it anew.

        Raises: ConsumerUnknown.
        """
        await self._consumers.remove(name)

    async def replay(self, name: str, *, customer: str | None = None) -> int:
        """Tell a consumer the newest version of every item once more; return how many items.

        Raises: ConsumerUnknown, CustomerUnknown.
        """
        if customer is not None:
            await self.customer(customer)
        return await self._consumers.replay(name, customer)

    async def photo(self, url: str) -> PhotoReport:
        """Download one photo now and say what became of it; nothing is stored, no lane is used."""
        return await self._urls.try_photo(url)

    async def hosts(
        self,
        *,
        customer: str | None = None,
        after: tuple[str, str] = ("", ""),
        hosts_max: int = PAGE_ROWS_MAX,
    ) -> list[Host]:
        """Hosts that photos were asked of, behind `after`, a (host, customer). Raises: CustomerUnknown."""
        if customer is not None:
            await self.customer(customer)
        return await self._hosts.page(customer=customer, after=after, rows_max=hosts_max)

    async def host(self, host: str) -> list[Host]:
        """A host as each customer's links know it. Raises: HostUnknown."""
        return await self._hosts.get(host)

    async def why(self, url: str) -> UrlReport:
        """Whether `url` may be asked, and what every customer's last run made of it."""
        return await self._urls.why(url)

    @cached_property
    def reports(self) -> Reports:
        """What was wrong with a run, in a seller's language."""
        return Reports(self._postgres, self._runs, self.config)

    @cached_property
    def webhooks(self) -> Webhooks:
        """Where results are sent by themselves."""
        return Webhooks(self._postgres, self._jobs, self._poster, self._sending)

    @cached_property
    def schemas(self) -> Schemas:
        """What rows must hold, by category."""
        return Schemas(self._postgres)

    @cached_property
    def mappings(self) -> Mappings:
        """What the names of foreign files mean."""
        return Mappings(self._postgres)

    async def _rules(self) -> Rules:
        return await self.schemas.rules(self._downloader.policy)

    @cached_property
    def _customers(self) -> Customers:
        return Customers(self._postgres, self._jobs, self.webhooks)

    @cached_property
    def _runs(self) -> Runs:
        return Runs(self._postgres)

    @cached_property
    def _items(self) -> Items:
        return Items(self._postgres)

    @cached_property
    def _hosts(self) -> Hosts:
        return Hosts(self._postgres, self._classes, half_life_s=self.config.speed_half_life_s)

    @cached_property
    def _urls(self) -> Urls:
        texts = Texts.load(config=self.config)
        return Urls(self._postgres, self._downloader, self._jobs, self._hosts, texts=texts)
