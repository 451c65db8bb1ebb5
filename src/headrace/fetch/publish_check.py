"""The check before publishing: `@app.before_publish` handlers, and the items that they hold back.

    group done --> prepare (transaction) --> handler --> prepare again, publish or hold (the same)

No transaction is open while the handler runs, so a handler that hangs blocks no other item: it
occupies one of CHECKS_AT_ONCE places of its worker until `fetch.handler_timeout`. Its exceptions
and timeouts retry the job of its item alone. A verdict is valid for exactly the version, fields
and photos that the handler received. If they changed meanwhile, the item is checked again.

The handler is called at least once per version, before every publication and edit; never for an
item that is unpublished. It returns

- None: publish the item;
- a dict of changed fields, only those declared in `changes`: publish it with them. The stored item
  keeps its own fields;
- `Hold(reason)`: do not publish this version. Consumers keep the version they have. A moderator
  releases it (`fetch.held`), or a later version of the item is checked in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec

from headrace.engines.postgres import Postgres, from_row
from headrace.fetch import store
from headrace.fetch.consumers import Consumers
from headrace.fetch.errors import InvalidVerdict, NotHeld
from headrace.fetch.model import FIELDS_BYTES_MAX, Item, ItemPhoto
from headrace.fetch.publishing import Prepared, Publishing, PublishJob, call_handler
from headrace.fetch.sql import SQL
from headrace.fetch.store.results import NewResult
from headrace.fetch.validation import find_item_id
from headrace.jobs import JobContext, Jobs, Snooze
from headrace.jobs.errors import LeaseLost
from headrace.kernel.batching import Batcher
from headrace.kernel.errors import Unavailable
from headrace.kernel.ids import USER_ID
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point
from headrace.kernel.routes import PAGE_ROWS_MAX

CHECKS_AT_ONCE: Final = 50
REASON_CHARACTERS_MAX: Final = 1_000
CHANGED_AGAIN_S: Final = 0.5
_LOG: Final = logger(__name__)


@dataclass(frozen=True, slots=True)
class Hold:
    """Verdict: do not publish this version until a moderator releases it."""

    reason: str


Verdict: TypeAlias = Hold | dict[str, Any] | None
Check: TypeAlias = Callable[[Item], Any]
"""Returns a `Verdict`: `async def`, or `def`, which is called in a thread."""


class HeldItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item that a `before_publish` handler holds back, as it would be published."""

    customer: str
    id: str
    version: int
    reason: str
    held_at: datetime
    fields: dict[str, Any]
    photos: list[ItemPhoto]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A job, what the handler received, and its verdict."""

    lease_id: int
    payload: PublishJob
    seen: NewResult | None = None
    verdict: Hold | str | None = None
    """A text is the item's fields with the changes."""

    @property
    def key(self) -> tuple[int, str]:
        return self.payload.run, self.payload.item


class CheckedPublishing:
    """Handler of the publish queue in an application with a `before_publish` handler."""

    def __init__(
        self,
        postgres: Postgres,
        jobs: Jobs,
        consumers: Consumers,
        publishing: Publishing,
        *,
        check: Check,
        changes: frozenset[str],
        timeout_s: float,
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._consumers = consumers
        self._publishing = publishing
        self._check = check
        self._changes = changes
        self._timeout_s = timeout_s
        self._seen: Batcher[_Entry, NewResult | None] = Batcher(self._look)
        self._ended: Batcher[_Entry, bool] = Batcher(self._end)

    async def handle(self, job: JobContext[PublishJob]) -> None:
        """Check one item and publish or hold it; an error of the handler retries the job."""
        try:
            await self._consumers.declare()
            entry = _Entry(job.lease_id, job.payload)
            seen = await self._seen.submit(entry)
            verdict: Hold | str | None = None
            if seen is not None and seen.action != "unpublish":
                verdict, error = await self._verdict_on(seen)
                if error is not None:
                    job.retry(None, f"before_publish: {type(error).__name__}: {error}")
                    return
            crash_point("fetch.judged")
            if not await self._ended.submit(replace(entry, seen=seen, verdict=verdict)):
                job.snooze(CHANGED_AGAIN_S)
        except Unavailable as error:
            raise Snooze(error.retry_after_s or 5.0) from error

    async def _verdict_on(self, seen: NewResult) -> tuple[Hold | str | None, BaseException | None]:
        fields: dict[str, Any] = msgspec.json.decode(seen.fields)
        item = Item(
            customer=seen.customer,
            id=seen.item,
            version=seen.version,
            action=seen.action,
            fields=dict(fields),
            photos=list(seen.photos),
        )
        limit_s, threads = self._timeout_s, self._consumers.threads
        verdict, error = await call_handler(self._check, item, timeout_s=limit_s, threads=threads)
        if error is None:
            try:
                return self._valid(verdict, fields), None
            except InvalidVerdict as invalid:
                error = invalid
        place = {"customer": seen.customer, "item": seen.item}
        _LOG.warning("before_publish_failed", **place, error=repr(error), exc_info=error)
        return None, error

    def _valid(self, verdict: Any, fields: dict[str, Any]) -> Hold | str | None:
        """The verdict, if it is allowed, with changes as text. Raises: InvalidVerdict."""
        if verdict is None or isinstance(verdict, Hold):
            return verdict
        if not isinstance(verdict, dict):
            raise InvalidVerdict(
                f"a before_publish handler returned {type(verdict).__name__}: return None, a dict"
                " of changed fields, or Hold(reason)"
            )
        others = sorted(str(name) for name in verdict.keys() - self._changes)
        if others:
            raise InvalidVerdict(
                f"a before_publish handler changed {', '.join(others)[:200]}: name these fields in"
                " @app.before_publish(changes=[...])"
            )
        try:
            changed = msgspec.json.encode({**fields, **verdict})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidVerdict(f"a before_publish handler returned no JSON: {error}") from error
        if len(changed) > FIELDS_BYTES_MAX:
            raise InvalidVerdict(
                f"a before_publish handler returned fields of {len(changed):,} bytes, the limit is"
                f" {FIELDS_BYTES_MAX:,}"
            )
        return changed.decode()

    async def _look(self, entries: list[_Entry]) -> list[NewResult | Exception | None]:
        """What each entry would publish now."""
        async with self._postgres.transaction() as tx:
            held = await self._jobs.lock_leases(tx, {entry.lease_id for entry in entries})
            ours = [entry.payload for entry in entries if entry.lease_id in held]
            found = {one.key: one.result for one in await self._publishing.prepare(tx, ours)}
        return [
            found.get(entry.key) if entry.lease_id in held else LeaseLost(entry.lease_id)
            for entry in entries
        ]

    async def _end(self, entries: list[_Entry]) -> list[bool | Exception]:
        """Publish or hold each entry; False if it is not what its verdict was given for."""
        async with self._postgres.transaction() as tx:
            leases = await self._jobs.lock_leases(tx, {entry.lease_id for entry in entries})
            # Of two jobs of an item the one at its deadline does nothing.
            by_lateness = sorted(entries, key=lambda entry: not entry.payload.late)
            ours = {entry.key: entry for entry in by_lateness if entry.lease_id in leases}
            prepared = await self._publishing.prepare(tx, [one.payload for one in ours.values()])
            right = [one for one in prepared if one.result == ours[one.key].seen]
            judged = [_judged(one, ours[one.key].verdict) for one in right]
            await self._publishing.store(tx, judged)
            held = [(one, v) for one in right if isinstance(v := ours[one.key].verdict, Hold)]
            await tx.run(
                SQL.hold_items,
                customers=[one.customer for one, _ in held],
                items=[one.key[1] for one, _ in held],
                versions=[one.result.version for one, _ in held if one.result],
                reasons=[_reason_text(verdict) for _, verdict in held],
            )
        crash_point("fetch.checked")
        wrong = {one.key for one in prepared} - {one.key for one in right}
        return [
            entry.key not in wrong if entry.lease_id in leases else LeaseLost(entry.lease_id)
            for entry in entries
        ]


def _judged(one: Prepared, verdict: Hold | str | None) -> Prepared:
    """The change with its verdict: without a result if it is held."""
    if isinstance(verdict, Hold):
        return replace(one, result=None)
    if verdict is None or one.result is None:
        return one
    return replace(one, result=replace(one.result, fields=verdict))


def _reason_text(verdict: Hold) -> str:
    text = "".join(c if c.isprintable() else " " for c in str(verdict.reason))
    return text[:REASON_CHARACTERS_MAX]


class HeldItems:
    """Items that a `before_publish` handler holds back: `fetch.held`."""

    def __init__(self, postgres: Postgres, publishing: Publishing) -> None:
        self._postgres = postgres
        self._publishing = publishing

    async def list(
        self,
        customer: str | None = None,
        *,
        after: tuple[str, str] = ("", ""),
        rows_max: int = PAGE_ROWS_MAX,
    ) -> list[HeldItem]:
        """Held items by customer and id, behind the item `after` (its customer and id).

        Raises: CustomerUnknown.
        """
        if customer is not None:
            await store.runs.get_customer(self._postgres, customer)
        rows = await self._postgres.all(
            SQL.held_items,
            customer=customer,
            # A text that is no id starts at the first item; PostgreSQL would reject some texts.
            after_customer=after[0] if USER_ID.fullmatch(after[0]) else "",
            after_item=find_item_id(after[1]) or "",
            rows_max=min(max(1, rows_max), PAGE_ROWS_MAX),
        )
        keys = [(row["customer"], row["item"]) for row in rows]
        photos = await store.outcomes.item_photos(self._postgres, keys)
        return [
            from_row(
                HeldItem,
                row,
                id=row["item"],
                fields=msgspec.json.decode(row["fields"]),
                photos=photos[row["customer"], row["item"]],
            )
            for row in rows
        ]

    async def release(self, customer: str, item: str) -> None:
        """Publish a held item as it is, without calling the handler. Raises: NotHeld."""
        found = find_item_id(item) if USER_ID.fullmatch(customer) else None
        if found is None:
            raise NotHeld(customer, item)
        await self._publishing.release(customer, found)
