"""Items with their photos and results, the hosts of photos, and single links.

**Upload.** Items without a catalogue file take the same validation and diff:

    items --validate--> staged --diff--> changes, photos, jobs  all in the caller's one transaction

Uploaded items and items of catalogues are one set, and the latest write wins. An upload holds
until a catalogue that starts later differs. A catalogue lists all items of its customer, so an
item that it omits is unpublished. For an item without fields only the photos change. Each call
creates one run per customer; a faulty item is a problem of its run and stays unchanged.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from headrace.engines.postgres import Postgres, Row, Tx, from_row
from headrace.fetch import store
from headrace.fetch.applying import Applying
from headrace.fetch.download import Downloader
from headrace.fetch.errors import HostUnknown, InvalidItems, ItemUnknown, UrlRefused
from headrace.fetch.guard import Policy, judge_url
from headrace.fetch.host_stats import FORGOTTEN, Classes, TimeClass, host_of
from headrace.fetch.i18n import Texts
from headrace.fetch.images import NotAPhoto, inspect_image
from headrace.fetch.limits import RateTokens
from headrace.fetch.model import (
    BIGINT_MAX,
    ITEMS_SENT_MAX,
    LIMITER,
    Host,
    Link,
    PhotoReport,
    Result,
    SentItem,
    StoredItem,
    UrlCustomer,
    UrlReport,
    ValidatedRow,
)
from headrace.fetch.readers import Fault, RawRow
from headrace.fetch.sql import SQL
from headrace.fetch.validation import (
    Chunk,
    Rules,
    Staging,
    find_item_id,
    problem_of,
    set_content,
    validate_photos,
    validate_row,
)
from headrace.jobs import Jobs
from headrace.jobs.errors import LaneUnknown, LimiterUnknown
from headrace.jobs.model import JobState, Why
from headrace.kernel.errors import mismatch
from headrace.kernel.ids import USER_ID
from headrace.kernel.resilience import crash_point
from headrace.kernel.routes import PAGE_ROWS_MAX
from headrace.kernel.terminal import pluralize

HOST_CHARACTERS_MAX: Final = 300
CUSTOMERS_MAX: Final = 20
JOBS_LOOKED_AT: Final = 50
_UNDER_WAY: Final = (JobState.READY, JobState.SCHEDULED, JobState.LEASED)


class Items:
    """Items with their photos, and published results: `fetch.items`."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres

    async def get(self, customer: str, item: str) -> StoredItem:
        """Current state of an item with its photos. Raises: ItemUnknown."""
        is_name = isinstance(customer, str) and USER_ID.fullmatch(customer)
        found = find_item_id(item) if is_name and isinstance(item, str) else None
        row = found and await self._postgres.one(SQL.item, customer=customer, item=found)
        if not row:
            raise ItemUnknown(
                f"customer {str(customer)[:128]!r} has no item {str(item)[:200]!r}: no catalogue"
                " named it"
            )
        key = (customer, row["item"])
        photos = await store.outcomes.item_photos(self._postgres, [key])
        supplemental = msgspec.json.decode(row["supplemental"])
        return from_row(
            StoredItem,
            row,
            customer=customer,
            id=row["item"],
            run=row["run_id"],
            fields=msgspec.json.decode(row["fields"]) | supplemental,
            photos=photos[key],
            supplemental=supplemental,
        )

    async def results(
        self, *, after: int = 0, results_max: int = 100, customer: str | None = None
    ) -> list[Result]:
        """Results behind `after` in the order of their commits; a poller stores the last `seq`.

        Raises: CustomerUnknown.
        """
        if customer is not None:
            await store.runs.get_customer(self._postgres, customer)
        after = min(max(0, after), BIGINT_MAX)
        rows_max = min(max(1, results_max), PAGE_ROWS_MAX)
        rows = await self._postgres.all(
            SQL.results, after=after, rows_max=rows_max, customer=customer
        )
        return [store.results.result_of(row) for row in rows]

    async def newest_results(
        self,
        *,
        cursor: int | None = None,
        results_max: int = 100,
        customer: str | None = None,
        from_at: datetime | None = None,
        to_at: datetime | None = None,
    ) -> list[Result]:
        """The results with numbers below `cursor`, newest first; for people, not for pollers.

        `from_at` and `to_at` bound their time, in UTC without an offset. Raises: CustomerUnknown.
        """
        if customer is not None:
            await store.runs.get_customer(self._postgres, customer)
        given = {
            "before": BIGINT_MAX if cursor is None else min(max(0, cursor), BIGINT_MAX),
            "rows_max": min(max(1, results_max), PAGE_ROWS_MAX),
            "customer": customer,
        }
        if from_at is None and to_at is None:
            rows = await self._postgres.reads.all(SQL.results_before, **given)
        else:
            rows = await self._postgres.reads.all(
                SQL.results_between,
                from_at=from_at or datetime.min.replace(tzinfo=UTC),
                to_at=to_at or datetime.max.replace(tzinfo=UTC),
                **given,
            )
        return [store.results.result_of(row) for row in rows]


class Hosts:
    """Statistics of the hosts of photos: `fetch.hosts`."""

    def __init__(self, postgres: Postgres, classes: Classes, *, half_life_s: float) -> None:
        self._postgres = postgres
        self._classes = classes
        self._half_life_s = half_life_s

    async def page(
        self,
        *,
        customer: str | None = None,
        host: str | None = None,
        after: tuple[str, str] = ("", ""),
        hosts_max: int = PAGE_ROWS_MAX,
    ) -> list[Host]:
        """Hosts behind `after`, a (host, customer), in that order. Raises: CustomerUnknown."""
        if customer is not None and host is None:
            await store.runs.get_customer(self._postgres, customer)
        rows = await self._postgres.reads.all(
            SQL.hosts,
            customer=customer,
            host=host,
            after_host=after[0],
            after_customer=after[1],
            rows_max=min(max(1, hosts_max), PAGE_ROWS_MAX),
            half_life_s=self._half_life_s,
        )
        return [self._host(row) for row in rows]

    async def get(self, host: str) -> list[Host]:
        """Statistics of a host, or of the host of a URL, per customer. Raises: HostUnknown."""
        name = host_of(host) or host.lower()
        is_name = name.isprintable() and len(name) <= HOST_CHARACTERS_MAX
        found = await self.page(host=name) if is_name else []
        if not found:
            raise HostUnknown(name)
        return found

    def _host(self, row: Row) -> Host:
        weights = dict(zip(row["classes_s"], row["weights"], strict=True))
        total = sum(weights.values())
        is_measured = total >= FORGOTTEN and row["photos"] > 0
        return from_row(
            Host,
            row,
            starts_in=self._classes.starting(weights).name,
            needs={
                TimeClass(class_s).name: round(weight / total, 3)
                for class_s, weight in weights.items()
                if is_measured
            },
            mean_s=round(row["seconds"] / row["photos"], 4) if is_measured else None,
            photos_by_outcome=msgspec.json.decode(row["by_outcome"] or "{}", type=dict[str, int]),
        )


class Links:
    """Single photo URLs: `fetch.links`."""

    def __init__(
        self, postgres: Postgres, downloader: Downloader, jobs: Jobs, hosts: Hosts, *, texts: Texts
    ) -> None:
        self._texts = texts
        self._postgres = postgres
        self._downloader = downloader
        self._jobs = jobs
        self._hosts = hosts

    async def download(self, url: str, tokens: RateTokens | None = None) -> PhotoReport:
        """Download one photo now and report the outcome; nothing is stored.

        Without `tokens` the request uses no customer's lane.
        """
        found = await self._downloader.download(url, tokens=tokens)
        values: dict[str, Any] = {"url": url, "hops": found.hops, "took_s": round(found.took_s, 4)}
        values["steps"] = found.steps
        if found.body is None:
            return PhotoReport(outcome=found.outcome, text=found.text, **values)
        with found.body:
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
        """Whether `url` is allowed, its last outcome per customer, and its next request."""
        try:
            target = judge_url(url, self._downloader.policy)
        except UrlRefused as error:
            allowed, judgement = False, f"refused:{error.reason}: {error.text}"
        else:
            allowed, judgement = True, f"allowed: {target.host} port {target.port}"
        if not url.isprintable():
            return UrlReport(url=url, allowed=allowed, judgement=judgement, links=[], customers=[])
        links = {
            link.customer: msgspec.structs.replace(link, text=self._texts.outcome(link.outcome))
            for link in await store.outcomes.links_of_url(self._postgres, url)
        }
        waiting = await store.outcomes.waiting_runs(self._postgres, url)
        return UrlReport(
            url=url,
            allowed=allowed,
            judgement=judgement,
            links=list(links.values()),
            customers=[
                await self._customer(
                    customer,
                    url,
                    links.get(customer),
                    runs=waiting.get(customer, []),
                    allowed=allowed,
                )
                for customer in sorted({*links, *waiting})[:CUSTOMERS_MAX]
            ],
        )

    async def _customer(
        self, customer: str, url: str, link: Link | None, *, runs: list[int], allowed: bool
    ) -> UrlCustomer:
        hosts = await self._hosts.page(customer=customer, host=host_of(url), hosts_max=1)
        host = hosts[0] if hosts else None
        job = await self._why_waiting(customer, url) if runs else None
        try:
            lane = await self._jobs.lanes.get(LIMITER, customer)
        except (LaneUnknown, LimiterUnknown):
            lane = None
        return UrlCustomer(
            customer=customer,
            waiting_runs=runs,
            job=job,
            host=host,
            lane=lane,
            ahead=ahead_of(link, host, runs=runs, job=job, is_allowed=allowed),
        )

    async def _why_waiting(self, customer: str, url: str) -> Why | None:
        """Why the photo's job waits.

        If it is not among the newest jobs: why another job of the lane waits.
        """
        found = await self._jobs.find(lane=customer, jobs_max=JOBS_LOOKED_AT)
        ids = [job.id for job in found.jobs if job.state in _UNDER_WAY]
        for job_id in ids:
            payload = (await self._jobs.job(job_id)).payload
            if isinstance(payload, dict) and payload.get("url") == url:
                return await self._jobs.why(job_id)
        return await self._jobs.why(ids[0]) if ids else None


def ahead_of(
    link: Link | None, host: Host | None, *, runs: list[int], job: Why | None, is_allowed: bool
) -> str:
    """When a customer's link is requested next, as a sentence."""
    pause = ""
    if host is not None and host.paused_until is not None:
        pause = f"; its host is paused until {host.paused_until:%Y-%m-%d %H:%M:%S} (Retry-After)"
    if runs:
        why = f": {job.text}" if job is not None else ""
        return f"run {runs[-1]} will request it{why}{pause}"
    if not is_allowed:
        return "not requested while the URL is refused"
    if link is None or link.outcome in ("stored", "unchanged"):
        return (
            "a good copy is stored; requested again when an item's links change or after"
            " `fetch.refresh`"
        )
    kept = "the last good copy is kept; " if link.sha256 else ""
    latest = (
        "" if link.recheck_at is None else f", {link.recheck_at:%Y-%m-%d %H:%M:%S} at the latest"
    )
    if link.rounds_left > 0:
        return (
            f"{kept}skipped by {pluralize(link.rounds_left, 'more whole catalogue')}, then"
            f" requested again{latest}{pause}"
        )
    return f"{kept}requested again by the next catalogue that lists it{latest}{pause}"


FORMAT: Final = "items"
"""Format of runs of uploaded items."""
SENDING_AT_ONCE: Final = 4
"""Calls of a process that hold a connection; those of one customer wait for each other."""


class ItemUpload:
    """Uploads items without a catalogue."""

    def __init__(self, postgres: Postgres, applying: Applying, policy: Policy) -> None:
        self._postgres = postgres
        self._applying = applying
        self._policy = policy
        self._places = asyncio.Semaphore(SENDING_AT_ONCE)

    async def send(self, items: Sequence[SentItem], *, tx: Tx | None = None) -> list[int]:
        """Apply up to 1,000 items, all or none; return one run id per customer.

        All of it within `tx` if given.

        Raises: InvalidItems, CustomerUnknown.
        """
        _require_items(items)
        if tx is None:
            async with self._places, self._postgres.transaction() as own:
                return await self.send(items, tx=own)
        rules = await self._rules(tx)
        by_customer: dict[str, list[SentItem]] = defaultdict(list)
        seen: set[tuple[str, str]] = set()
        for item in items:
            key = (item.customer, find_item_id(item.item) or item.item)
            if key in seen:
                raise InvalidItems(
                    f"item {key[1][:200]!r} of customer {item.customer[:128]!r} occurs twice:"
                    " send each once"
                )
            seen.add(key)
            by_customer[item.customer].append(item)
        for customer in sorted(by_customer):
            await store.runs.get_customer(tx, customer)
        # In one order for all callers, since the items of each customer are locked.
        return [
            await self._send(tx, customer, by_customer[customer], rules)
            for customer in sorted(by_customer)
        ]

    async def _rules(self, tx: Tx) -> Rules:
        """Current rules, read in the transaction: a caller must not need a second connection."""
        found = await store.runs.find_schemas(tx)
        return Rules(self._policy, {one.category: one.schema for one in found})

    async def _send(self, tx: Tx, customer: str, items: list[SentItem], rules: Rules) -> int:
        # Lock before the insert, so that a later run of the customer has a higher id.
        await tx.one(SQL.lock_items, customer=customer)
        run_id: int = await tx.value(
            SQL.insert_run, customer=customer, file_name=FORMAT, format=FORMAT, is_whole=False
        )
        chunk, gone = _judge(items, await self._stored(tx, customer, items), rules)
        staging = Staging(self._postgres, run_id, customer, rules)
        await staging.stage_validated(tx, chunk)
        if gone:
            await tx.run(SQL.stage_gone, run_id=run_id, items=gone)
        await staging.note(tx, rows=len(items))
        await self._applying.apply(tx, run_id, customer, is_whole=False)
        crash_point("fetch.items_sent")
        return run_id

    async def _stored(self, tx: Tx, customer: str, items: list[SentItem]) -> dict[str, bytes]:
        """Stored fields of the items that are uploaded without fields."""
        bare = [find_item_id(item.item) for item in items if item.fields is None]
        if not any(bare):
            return {}
        rows = await tx.all(SQL.stored_fields, customer=customer, items=[i for i in bare if i])
        return {row["item"]: row["fields"].encode() for row in rows}


def _judge(
    items: list[SentItem], stored: dict[str, bytes], rules: Rules
) -> tuple[Chunk, list[str]]:
    """Validated rows of items, and the ids of items to unpublish."""
    chunk = Chunk()
    gone = []
    for number, item in enumerate(items, 1):
        raw = RawRow(number, number, _texts(item), item.photos)
        item_id = find_item_id(item.item)
        if item.gone and item_id is not None:
            gone.append(item_id)
            continue
        chunk.rows_count += 1
        faults: list[Fault]
        row: ValidatedRow | None
        if item.fields is None and item_id is not None:
            row = bare = ValidatedRow(number, number, item_id)
            faults = validate_photos(bare, item.photos, rules.policy)
            set_content(bare, stored.get(item_id, b"{}"))
        else:
            row, faults = validate_row(raw, rules)
        if row is not None:
            chunk.rows.append(row)
        named = row.item if row is not None else None
        chunk.problems.extend(problem_of(raw, named, fault) for fault in faults)
    return chunk, gone


def _texts(item: SentItem) -> dict[str, Any]:
    """The fields as texts, as a catalogue row has them."""
    values = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in (item.fields or {}).items()
        if value not in (None, "")
    }
    return {**values, "id": item.item}


def _require_items(items: object) -> None:
    """Raises: InvalidItems."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise InvalidItems(f"nothing was sent: {mismatch('a list of SentItem', items)}")
    if not 1 <= len(items) <= ITEMS_SENT_MAX:
        raise wrong_count(len(items))
    for index, item in enumerate(items):
        if not isinstance(item, SentItem):
            raise InvalidItems(f"nothing was sent: /{index}: {mismatch('a SentItem', item)}")


def wrong_count(count: int) -> InvalidItems:
    """The error of a call with an invalid number of items."""
    return InvalidItems(f"{count} items in one call: send 1 to {ITEMS_SENT_MAX:,} at a time")
