"""Runs of catalogues: read a file, stage its rows, then hold or apply the run.

    read in a thread -> stage rows (`validation`, small transactions) -> hold or apply
    (`applying`): diff, items, needed photos and all jobs, in ONE transaction

A crash leaves either staged rows, which the next run of the customer deletes, or the whole run
applied.

A session lock per customer allows one reader at a time; if its process dies, the run becomes
`abandoned`. The lock uses a connection outside the pool. With a pooled connection, ten waiting runs
could hold the whole pool and block each other. Only a few catalogues are read at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from headrace.engines.postgres import Postgres, Row, Tx
from headrace.engines.postgres_errors import PostgresBusy
from headrace.fetch import store
from headrace.fetch.applying import APPLY_S_MAX, ROWS_TO_ANALYZE, Applying, SafetyHold, slow_value
from headrace.fetch.errors import (
    CatalogueBroken,
    CatalogueTooLarge,
    FileFault,
    MappingUnknown,
    NotACatalogue,
    RunNotHeld,
    RunNotUndoable,
    RunsBusy,
    RunUnderWay,
    RunUnknown,
    UnknownFormat,
)
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.model import (
    DRY_RUNS_KEPT,
    SAME_FORMAT,
    SUPPLEMENTAL,
    UNDO_FORMAT,
    Run,
    RunState,
)
from headrace.fetch.readers import Catalogue, open_catalogue, require_format
from headrace.fetch.sampling import Sampling
from headrace.fetch.settings import FetchConfig
from headrace.fetch.sql import SQL
from headrace.fetch.supplements import SupplementalStaging, supplemental_rows, supplemental_rules
from headrace.fetch.validation import Reading, Rules, Staging
from headrace.kernel.resilience import crash_point

APPLY_TRIES: Final = 3
UNREADABLE: Final = (
    *(NotACatalogue, CatalogueBroken, CatalogueTooLarge),
    *(UnknownFormat, MappingUnknown),
)
"""Errors of the file itself: a retry with the same file cannot succeed."""
RUNS_AT_ONCE: Final = 4
"""Catalogues that one process reads concurrently; each uses one pooled connection at a time."""
WAIT_S_MAX: Final = 20.0
"""Longest wait for permission to read a catalogue."""
REVIEW: Final = "review: the upload was compared and waits for its confirmation"
"""Why a run is held that would be applied without a review."""
OUTDATED: Final = "outdated: items changed since its comparison; upload the catalogue again"
"""Why a review stays held whose confirmation was refused."""
Value = TypeVar("Value")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run a file: its customer, how to read it, and what to do."""

    customer: str
    file_name: str = ""
    format_name: str | None = None
    mapping: str | None = None
    is_dry_run: bool = False
    is_review: bool = False
    """Whether the run is held until it is confirmed, whatever the file contains."""
    is_sampled: bool = True
    """Whether a dry run downloads a sample of its photos."""
    is_supplemental: bool = False
    """Whether the file overlays fields of items, instead of listing all items."""
    run_id: int | None = None
    """A run that already waits for this file; None creates a run."""


@dataclass(frozen=True, slots=True)
class CurrentRules:
    """Access to the current validation rules and mappings."""

    rules: Callable[[], Awaitable[Rules]]
    mapping: Callable[[str], Awaitable[NamedMapping]]


class Catalogues:
    """Reads, compares and applies catalogues."""

    def __init__(
        self,
        postgres: Postgres,
        config: FetchConfig,
        *,
        applying: Applying,
        sampling: Sampling,
        current_rules: CurrentRules,
        wait_s_max: float = WAIT_S_MAX,
    ) -> None:
        self._postgres = postgres
        self._config = config
        self._safety_hold = SafetyHold(postgres, config)
        self._applying = applying
        self._sampling = sampling
        self._current_rules = current_rules
        self._wait_s_max = wait_s_max
        self._permits = asyncio.Semaphore(RUNS_AT_ONCE)

    async def run(
        self, path: Path, order: Order, *, has_permit: bool = False, tx: Tx | None = None
    ) -> int:
        """Read the file at `path` and apply it, within `tx` if given; return the id of the run.

        The run is then `applied`, `done`, `held` or `dry`. Raises: NotACatalogue (no run is
        created), CatalogueBroken, CatalogueTooLarge (the run is `refused`), RunUnderWay, RunsBusy.
        """
        async with self._only_reader(order.customer, has_permit=has_permit):
            rules = await self._current_rules.rules()
            catalogue = await self._open(path, order)
            run_id = await self._begin(order, catalogue)
            rows, kind = catalogue.rows, Staging
            if order.is_supplemental:
                rows, kind = supplemental_rows(rows), SupplementalStaging
                rules = supplemental_rules(rules.policy)
            staging = kind(self._postgres, run_id, order.customer, rules)
            try:
                reading = await staging.read(rows)
            except (CatalogueBroken, CatalogueTooLarge) as error:
                await self._end(run_id, RunState.REFUSED, error.text, fault=error.fault)
                raise
            await self._decide(run_id, order, reading, tx)
            return run_id

    async def confirm(self, run: Run) -> None:
        """Apply a held run. Raises: RunNotHeld, RunUnderWay, RunsBusy."""
        async with self._only_reader(run.customer):
            try:
                await self._apply(run.run, run.customer, expected=RunState.HELD)
            except _ItemsChanged:
                await self._postgres.run(SQL.note_outdated, run_id=run.run, reason=OUTDATED)
                detail = OUTDATED.partition(": ")[2]
                raise RunNotHeld(f"run {run.run} cannot be applied: {detail}") from None

    async def discard(self, run: Run) -> None:
        """Discard a held run; it can no longer be confirmed.

        Raises: RunNotHeld, RunUnderWay, RunsBusy.
        """
        async with self._only_reader(run.customer), self._postgres.transaction() as tx:
            if await tx.value(SQL.discard_held, run_id=run.run) is None:
                raise RunNotHeld(f"run {run.run} cannot be discarded: it is not held")
            await tx.run(SQL.clear_staged, customer=run.customer)

    async def undo(self, run: Run) -> int:
        """Restore the items to their state before an applied run; return the id of the new run.

        This is one transaction. Items that were sent by API since the run are not restored.
        Raises: RunNotUndoable, RunUnderWay, RunsBusy.
        """
        async with self._only_reader(run.customer):
            return await self._retry_busy(lambda tx: self._undo(tx, run.run, run.customer))

    async def _undo(self, tx: Tx, run_id: int, customer: str) -> int:
        await tx.allow_long_statements(APPLY_S_MAX)
        await tx.one(SQL.lock_items, customer=customer)
        await tx.one(SQL.lock_run, run_id=run_id)
        refusal = await store.runs.undo_refusal(tx, run_id)
        if refusal is not None:
            raise RunNotUndoable(f"run {run_id} cannot be undone: {refusal}")
        undo_id: int = await tx.value(
            SQL.insert_run,
            customer=customer,
            file_name=f"run {run_id}",
            format=UNDO_FORMAT,
            is_whole=False,
        )
        rows: int = await tx.value(SQL.stage_new_as_gone, run_id=run_id, undo_id=undo_id)
        after = ""
        while page := await tx.all(SQL.before_page, run_id=run_id, after=after):
            after = page[-1]["item"]
            rows += len(page)
            await self._applying.stage_stored(tx, undo_id, page)
        await store.runs.note_reading(tx, undo_id, rows=rows, invalid=0, problems=0)
        await self._applying.restore(tx, undo_id, customer)
        await tx.run(SQL.note_undone, run_id=run_id, undo_id=undo_id)
        await tx.run(SQL.supersede_held, run_id=undo_id, customer=customer)
        return undo_id

    async def repeat(self, customer: str, *, file_name: str) -> int:
        """Create a run for a file that did not change, which retries due links; return its id.

        Raises: RunUnderWay, RunsBusy.
        """
        async with self._only_reader(customer), self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            await tx.one(SQL.lock_items, customer=customer)
            run_id: int = await tx.value(
                SQL.insert_run,
                customer=customer,
                file_name=file_name,
                format=SAME_FORMAT,
                is_whole=True,
            )
            await store.runs.stage_broken(tx, run_id, customer)
            await self._applying.request_photos(tx, run_id, customer, is_whole=True)
            idle = await tx.all(SQL.forget_idle_runs, customer=customer, run_id=run_id)
            await store.runs.forget(tx, [row["id"] for row in idle])
            return run_id

    async def require_readable(self, format_name: str | None, mapping: str | None) -> bytes:
        """Require a usable format and mapping; return a digest of all rules for such a file.

        Raises: UnknownFormat, MappingUnknown.
        """
        found = await self._mapping(mapping)
        require_format(format_name or (found.format if found else None), found)
        rules = await self._current_rules.rules()
        encoded = msgspec.json.encode((format_name, found), order="sorted")
        return hashlib.sha256(rules.digest + encoded).digest()

    async def _mapping(self, name: str | None) -> Mapping | None:
        return None if name is None else (await self._current_rules.mapping(name)).mapping

    async def _open(self, path: Path, order: Order) -> Catalogue:
        try:
            return await asyncio.to_thread(
                open_catalogue,
                path,
                bytes_max=self._config.catalogue_max_bytes,
                format_name=order.format_name,
                mapping=await self._mapping(order.mapping),
            )
        except UNREADABLE as error:
            if order.run_id is not None:
                fault = getattr(error, "fault", None)
                await self._end(order.run_id, RunState.REFUSED, error.text, fault=fault)
            raise

    async def _begin(self, order: Order, catalogue: Catalogue) -> int:
        """Start the run of a file; return its id. Raises: RunUnknown if it was deleted."""
        customer = order.customer
        format_name = SUPPLEMENTAL if order.is_supplemental else catalogue.format
        await self._postgres.run(SQL.abandon_runs, customer=customer, but=order.run_id)
        await slow_value(self._postgres, SQL.clear_staged, customer=customer)
        if order.run_id is None:
            begun: int = await self._postgres.value(
                SQL.insert_run,
                customer=customer,
                file_name=order.file_name,
                format=format_name,
                is_whole=not order.is_supplemental,
            )
            return begun
        found = await self._postgres.value(
            SQL.begin_ordered, run_id=order.run_id, customer=customer, format=format_name
        )
        if found is None:
            raise RunUnknown(order.run_id)
        # A process may have died while it read this run.
        await slow_value(self._postgres, SQL.forget_staged, runs=[order.run_id])
        await self._postgres.run(SQL.clear_problems, run_id=order.run_id)
        async with self._postgres.transaction() as tx:
            await store.runs.forget_comparison(tx, order.run_id)
        return order.run_id

    @asynccontextmanager
    async def _only_reader(self, customer: str, *, has_permit: bool = False) -> AsyncIterator[None]:
        """Hold the lock of the customer until the block ends. Raises: RunUnderWay, RunsBusy."""
        async with nullcontext() if has_permit else self.permit(customer):
            connection = await self._postgres.connect_unpooled()
            try:
                session = Tx(connection)
                if not await session.value(SQL.try_lock_customer, customer=customer):
                    raise RunUnderWay(
                        f"another catalogue of customer {customer!r} is being read:"
                        " wait until it is done"
                    )
                try:
                    yield
                finally:
                    # Unlock explicitly: the server detects a closed connection with a delay.
                    await session.run(SQL.unlock_customer, customer=customer)
            finally:
                connection.terminate()

    @asynccontextmanager
    async def permit(self, customer: str) -> AsyncIterator[None]:
        """Hold one of the permits to read a catalogue until the block ends. Raises: RunsBusy."""
        try:
            async with asyncio.timeout(self._wait_s_max):
                await self._permits.acquire()
        except TimeoutError:
            raise RunsBusy(
                f"the catalogue of customer {customer!r} waited {self._wait_s_max:g} s because"
                f" {RUNS_AT_ONCE} others are being read; nothing was changed: send it again later",
                retry_after_s=self._wait_s_max,
            ) from None
        try:
            yield
        finally:
            self._permits.release()

    async def _decide(self, run_id: int, order: Order, reading: Reading, tx: Tx | None) -> None:
        customer = order.customer
        if reading.rows > ROWS_TO_ANALYZE:
            await slow_value(self._postgres, SQL.analyze_staged)
        reason = await self._safety_hold.find_reason(
            run_id, customer, reading, is_supplemental=order.is_supplemental
        )
        if order.is_review and reason is None:
            reason = REVIEW
        if order.is_dry_run:
            await self._compare(run_id, order)
            is_sampled = order.is_sampled and not order.is_supplemental
            await self._finish_dry_run(run_id, customer, is_sampled=is_sampled)
            held = reason and f"would be held, {reason}"
            await self._end(run_id, RunState.DRY, held, tx=tx, fault=reading.fault)
        elif reason is not None:
            await self._compare(run_id, order)
            await slow_value(self._postgres, SQL.forget_needs, runs=[run_id])
            async with nullcontext(tx) if tx is not None else self._postgres.transaction() as own:
                await self._end(run_id, RunState.HELD, reason, tx=own, fault=reading.fault)
                if order.is_review:
                    review_s = self._config.review_s
                    await own.run(SQL.await_review, run_id=run_id, review_s=review_s)
                # Keep only the latest held run, or an hourly broken file would add up.
                await own.run(SQL.supersede_held, run_id=run_id, customer=customer)
                await own.run(SQL.clear_staged, customer=customer)
        else:
            await self._apply(
                run_id,
                customer,
                expected=RunState.READING,
                validated=reading.validated,
                caller_tx=tx,
            )

    async def _compare(self, run_id: int, order: Order) -> None:
        """Store what a run would change, without applying it."""
        async with self._postgres.transaction() as tx:
            if order.is_supplemental:
                await self._applying.compare_overlays(tx, run_id, order.customer)
            else:
                await self._applying.compare(tx, run_id, order.customer, is_whole=True)

    async def _finish_dry_run(self, run_id: int, customer: str, *, is_sampled: bool) -> None:
        """Sample photos of a dry run, and delete old dry runs."""
        async with self._postgres.transaction() as tx:
            # This run is still `reading` and does not count yet.
            old = await tx.all(SQL.forget_dry_runs, customer=customer, runs_kept=DRY_RUNS_KEPT - 1)
            await store.runs.forget(tx, [row["id"] for row in old])
        if is_sampled:
            sample = await self._sampling.sample(run_id, customer)
            encoded = msgspec.json.encode(sample).decode()
            await self._postgres.run(SQL.keep_sample, run_id=run_id, sample=encoded)
        await slow_value(self._postgres, SQL.forget_needs, runs=[run_id])

    async def _end(
        self,
        run_id: int,
        state: RunState,
        reason: str | None,
        *,
        tx: Tx | None = None,
        fault: FileFault | None = None,
    ) -> None:
        if tx is None:
            async with self._postgres.transaction() as own:
                await self._end(run_id, state, reason, tx=own, fault=fault)
            return
        if fault is not None:
            encoded = msgspec.json.encode(fault).decode()
            await tx.run(SQL.note_fault, run_id=run_id, fault=encoded)
        await tx.allow_long_statements(APPLY_S_MAX)
        await tx.run(SQL.end_run, run_id=run_id, state=state.value, reason=reason)
        if state is not RunState.HELD:
            await tx.run(SQL.forget_staged, runs=[run_id])

    async def _apply(
        self,
        run_id: int,
        customer: str,
        *,
        expected: RunState,
        validated: int | None = None,
        caller_tx: Tx | None = None,
    ) -> None:
        """Apply a run within the transaction of the caller, or within a new one."""

        async def apply(tx: Tx) -> None:
            await self._apply_once(tx, run_id, customer, expected=expected, validated=validated)

        await (apply(caller_tx) if caller_tx is not None else self._retry_busy(apply))

    async def _retry_busy(self, change: Callable[[Tx], Awaitable[Value]]) -> Value:
        """Run `change` in a transaction; retry it if a publishing worker holds a needed item."""
        for tries_left in reversed(range(APPLY_TRIES)):
            try:
                async with self._postgres.transaction() as tx:
                    found = await change(tx)
            except PostgresBusy:
                if not tries_left:
                    raise
            else:
                crash_point("fetch.run_applied")
                return found
        raise AssertionError("the last attempt returns or raises")

    async def _apply_once(
        self, tx: Tx, run_id: int, customer: str, *, expected: RunState, validated: int | None
    ) -> None:
        await tx.allow_long_statements(APPLY_S_MAX)
        await tx.one(SQL.lock_items, customer=customer)
        run: Row = await tx.one(SQL.lock_run, run_id=run_id)
        is_supplemental = run["format"] == SUPPLEMENTAL
        newer = await tx.value(
            SQL.newer_run, customer=customer, run_id=run_id, is_supplemental=is_supplemental
        )
        if run["state"] != expected or newer is not None:
            reason = f"it is {run['state']}"
            if newer is not None:
                reason = f"run {newer} was applied since"
            elif run["state"] == RunState.SUPERSEDED:
                reason = "a later run replaced it"
            raise RunNotHeld(f"run {run_id} cannot be applied: {reason}; run the catalogue again")
        shown = None
        if expected is RunState.HELD:
            if run["review_until"] is not None:
                shown = await tx.value(SQL.changes_digest, run_id=run_id)
            # Items may have changed since the comparison: compare again.
            await store.runs.forget_comparison(tx, run_id)
        if is_supplemental:
            await self._applying.overlay(tx, run_id, customer)
            await tx.run(SQL.supersede_held, run_id=run_id, customer=customer)
            return
        await self._applying.apply(tx, run_id, customer, validated=validated)
        if shown is not None and shown != await tx.value(SQL.changes_digest, run_id=run_id):
            raise _ItemsChanged


class _ItemsChanged(Exception):
    """A review would make other changes than those that it showed."""
