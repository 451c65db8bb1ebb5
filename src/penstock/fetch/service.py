"""Fetch, the verbs: customers, catalogues, what became of items and photos."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.engines.blobs import Blobs
from penstock.engines.postgres import Postgres
from penstock.fetch import store
from penstock.fetch.catalogues import Catalogues
from penstock.fetch.consumers import Consumers, Handler
from penstock.fetch.download import Downloader
from penstock.fetch.guard import judge_url
from penstock.fetch.images import NotAPhoto, inspect_image
from penstock.fetch.model import (
    ITEM_QUEUE,
    LIMITER,
    PHOTO_QUEUE,
    PUBLISH_QUEUE,
    Consumer,
    Customer,
    CustomerUnknown,
    FetchConfig,
    InvalidRate,
    ItemUnknown,
    PhotoProblem,
    PhotoReport,
    Result,
    RowProblem,
    Run,
    RunUnknown,
    StoredItem,
    UrlRefused,
    UrlReport,
)
from penstock.fetch.photos import PHOTOS_AT_ONCE, Photos
from penstock.fetch.publishing import DELIVERIES_AT_ONCE, Publishing
from penstock.fetch.store import SQL
from penstock.jobs import Jobs, Registry, Task
from penstock.kernel.ids import USER_ID, require_id
from penstock.kernel.limits import PAGE_ROWS_MAX

STARTS_MAX_MAX: Final = 1_000_000
CONNECTIONS_MAX: Final = 1000
BIGINT_MAX: Final = 2**63 - 1
OWN_FAULT_RETRIES: Final = 20
"""Of tasks whose failures are ours: a bug or a crash must not cost a seller his photo."""
DELIVERY_SLACK_S: Final = 300.0
"""For what a delivery does beside its handler's call."""
H = TypeVar("H", bound=Handler)


class Fetch:
    """The room's handle; opens nothing by itself."""

    def __init__(self, postgres: Postgres, blobs: Blobs, jobs: Jobs, config: FetchConfig) -> None:
        self.config = config
        self._postgres = postgres
        self._jobs = jobs
        self._catalogues = Catalogues(postgres, jobs, config)
        self._downloader = Downloader(config)
        self._photos = Photos(postgres, blobs, jobs, self._downloader)
        self._consumers = Consumers(postgres, jobs)
        self._publishing = Publishing(
            postgres, jobs, self._consumers, handler_timeout_s=config.handler_timeout_s
        )

    def register(self, registry: Registry) -> None:
        """Add the room's tasks; every process that enqueues or works needs them."""
        registry.add(
            Task(
                queue=PHOTO_QUEUE,
                handler=self._photos.handle,
                timeout="5m",
                retries=OWN_FAULT_RETRIES,
                concurrency=PHOTOS_AT_ONCE,
                limiter=LIMITER,
            )
        )
        registry.add(
            Task(
                queue=PUBLISH_QUEUE,
                handler=self._publishing.publish,
                batch=100,
                timeout="5m",
                retries=OWN_FAULT_RETRIES,
            )
        )
        registry.add(
            Task(
                queue=ITEM_QUEUE,
                handler=self._publishing.deliver,
                timeout=f"{self.config.handler_timeout_s + DELIVERY_SLACK_S:.0f}s",
                retries=OWN_FAULT_RETRIES,
                concurrency=DELIVERIES_AT_ONCE,
            )
        )

    def on_item(self, handler: H) -> H:
        """Register `async def handler(item: Item)`; called at least once an item, newest last."""
        self._consumers.add(handler)
        return handler

    async def declare_consumers(self) -> None:
        """Record the handlers of this process as consumers: results wait for them from now on."""
        await self._consumers.declare()

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

    async def close(self) -> None:
        """Close connections to hosts and the resolver."""
        await self._downloader.close()

    async def set_customer(
        self, customer: str, *, starts_max: int, window_s: float, connections: int
    ) -> Customer:
        """Make a customer or change its limits; they hold for photos not started yet.

        Raises: InvalidId, InvalidRate.
        """
        require_id("customer", customer)
        if not 1 <= starts_max <= STARTS_MAX_MAX or not 0.1 <= window_s <= 86_400:
            raise InvalidRate(
                f"customer {customer!r}: {starts_max} requests in {window_s:g} s: use 1 to"
                f" {STARTS_MAX_MAX:,} requests in 0.1 s to 86400 s"
            )
        if not 1 <= connections <= CONNECTIONS_MAX:
            raise InvalidRate(
                f"customer {customer!r}: {connections} connections: use 1 to {CONNECTIONS_MAX}"
            )
        values = Customer(
            customer=customer, starts_max=starts_max, window_s=window_s, connections=connections
        )
        async with self._postgres.transaction() as tx:
            await store.set_customer(tx, values)
            await self._jobs.set_lane(
                LIMITER,
                customer,
                starts_max=starts_max,
                window_s=window_s,
                concurrency=connections,
                tx=tx,
            )
        return values

    async def customer(self, customer: str) -> Customer:
        """A customer's limits. Raises: CustomerUnknown."""
        is_name = USER_ID.fullmatch(customer) is not None
        found = await store.customers(self._postgres, customer) if is_name else []
        if not found:
            raise CustomerUnknown(customer)
        return found[0]

    async def customers(self) -> list[Customer]:
        """Every customer, by name."""
        return await store.customers(self._postgres)

    async def run_catalogue(
        self, path: Path, customer: str, *, file_name: str | None = None, is_dry_run: bool = False
    ) -> Run:
        """Read a catalogue file and apply it; photos follow as jobs.

        All or nothing: when this returns, the run is `applied` (or `done`, `held`, `dry`) durably; when
        it raises or its process dies, nothing was changed. Raises: CustomerUnknown, NotACatalogue,
        CatalogueBroken, CatalogueTooLarge, RunUnderWay, RunsBusy.
        """
        await self.customer(customer)
        name = "".join(c if c.isprintable() else "?" for c in file_name or path.name)[:200]
        run_id = await self._catalogues.run(path, customer, file_name=name, is_dry_run=is_dry_run)
        return await self.run(run_id)

    async def confirm_run(self, run_id: int) -> Run:
        """Apply a held run. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        await self.run(run_id)
        await self._catalogues.confirm(run_id)
        return await self.run(run_id)

    async def run(self, run_id: int) -> Run:
        """How far a run is. Raises: RunUnknown."""
        is_id = 0 < run_id <= BIGINT_MAX
        found = await store.runs(self._postgres, run_id=run_id) if is_id else []
        if not found:
            raise RunUnknown(run_id)
        return found[0]

    async def runs(self, customer: str | None = None, *, runs_max: int = 50) -> list[Run]:
        """The newest runs, of one customer or of all. Raises: CustomerUnknown."""
        if customer is not None:
            await self.customer(customer)
        rows_max = min(max(1, runs_max), PAGE_ROWS_MAX)
        return await store.runs(self._postgres, customer=customer, rows_max=rows_max)

    async def problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX
    ) -> list[tuple[int, RowProblem]]:
        """(position, problem) of a run's rows behind position `after`. Raises: RunUnknown."""
        await self.run(run_id)
        rows_max = min(max(1, rows_max), PAGE_ROWS_MAX)
        after = min(max(0, after), BIGINT_MAX)
        return await store.problems(self._postgres, run_id, after=after, rows_max=rows_max)

    async def photo_problems(
        self, run_id: int, *, after: int = 0, rows_max: int = PAGE_ROWS_MAX
    ) -> list[tuple[int, PhotoProblem]]:
        """(position, photo) of those that failed or were refused, behind `after`. Raises: RunUnknown."""
        await self.run(run_id)
        rows_max = min(max(1, rows_max), PAGE_ROWS_MAX)
        after = min(max(0, after), BIGINT_MAX)
        return await store.photo_problems(self._postgres, run_id, after=after, rows_max=rows_max)

    async def item(self, customer: str, item: str) -> StoredItem:
        """An item as it stands, with its photos. Raises: ItemUnknown."""
        is_named = USER_ID.fullmatch(customer) and USER_ID.fullmatch(item)
        row = is_named and await self._postgres.one(SQL.item, customer=customer, item=item)
        if not row:
            raise ItemUnknown(
                f"customer {customer[:128]!r} has no item {item[:128]!r}: no catalogue named it"
            )
        photos = await store.item_photos(self._postgres, [(customer, item)])
        return StoredItem(
            customer=customer,
            id=item,
            version=row["version"],
            is_gone=row["is_gone"],
            run=row["run_id"],
            fields=msgspec.json.decode(row["fields"]),
            photos=photos[customer, item],
        )

    async def results(
        self, *, after: int = 0, results_max: int = 100, customer: str | None = None
    ) -> list[Result]:
        """Results behind `after` in the order of their commits; a poller keeps the last `seq`.

        Raises: CustomerUnknown.
        """
        if customer is not None:
            await self.customer(customer)
        after = min(max(0, after), BIGINT_MAX)
        rows_max = min(max(1, results_max), PAGE_ROWS_MAX)
        return await store.results(
            self._postgres, after=after, rows_max=rows_max, customer=customer
        )

    async def photo(self, url: str) -> PhotoReport:
        """Download one photo now and say what became of it; nothing is stored, no lane is used."""
        found = await self._downloader.download(url)
        values: dict[str, Any] = {"url": url, "hops": found.hops, "took_s": round(found.took_s, 4)}
        if found.body is None:
            return PhotoReport(outcome=found.outcome, text=found.text, **values)
        with found.body:
            found.body.seek(0)
            data = found.body.read()
        values |= {"size_bytes": len(data), "sha256": found.sha256, "etag": found.etag}
        try:
            image = inspect_image(data)
        except NotAPhoto as refused:
            return PhotoReport(outcome=refused.outcome, text=refused.text, **values)
        values |= {"format": image.format, "width": image.width, "height": image.height}
        text = f"a {image.format} of {image.width} x {image.height} pixels, {len(data):,} bytes"
        return PhotoReport(outcome="stored", text=text, **values)

    async def why(self, url: str) -> UrlReport:
        """Whether `url` may be asked, and what every customer's last run made of it."""
        try:
            target = judge_url(url, self._downloader.policy)
        except UrlRefused as error:
            allowed, judgement = False, f"refused:{error.reason}: {error.text}"
        else:
            allowed, judgement = True, f"may be asked at {target.host} port {target.port}"
        links = await store.links_of_url(self._postgres, url) if url.isprintable() else []
        return UrlReport(url=url, allowed=allowed, judgement=judgement, links=links)
