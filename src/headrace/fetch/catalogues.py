"""A run: a catalogue file becomes staged rows, a diff, changed items and jobs.

    read in a thread -> stage (`staging`, own small transactions) -> hold? -> ONE transaction (`applying`):
    diff, items, photo needs, every job of the run, state `applied`

So a crash leaves either nothing but staged rows, which the customer's next run clears, or the whole run
applied. One session lock a customer keeps two readings apart, and its loss with the process is what
makes a run `abandoned`. The lock has a connection of its own: ten runs that held one of the pool's ten
while they waited for another stopped everything. A few are read at once, the others wait in line.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from headrace.engines.postgres import Postgres, PostgresBusy, Row, Tx
from headrace.engines.sql import Query
from headrace.fetch import store
from headrace.fetch.applying import APPLY_S_MAX, ROWS_TO_ANALYZE, Applying
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
from headrace.fetch.holding import HoldLimits, hold_reason
from headrace.fetch.intake import Rules
from headrace.fetch.mappings import Mapping, NamedMapping
from headrace.fetch.model import DRY_RUNS_KEPT, UNDOABLE_RUNS, RunState
from headrace.fetch.readers import Catalogue, Truncated, open_catalogue, require_format
from headrace.fetch.sampling import Sampling
from headrace.fetch.settings import FetchConfig
from headrace.fetch.staging import Reading, Staging
from headrace.fetch.store.sql import SQL
from headrace.kernel.resilience import crash_point

APPLY_TRIES: Final = 3
UNREADABLE: Final = (
    *(NotACatalogue, CatalogueBroken, CatalogueTooLarge),
    *(UnknownFormat, MappingUnknown),
)
"""Why a file cannot be run; the same file read again would end alike."""
RUNS_AT_ONCE: Final = 4
"""Catalogues that a process reads at once; each uses one connection of the pool at a time."""
IN_LINE_S: Final = 20.0
"""Longest wait for a place among them."""
SAME_FORMAT: Final = "same"
"""Of a run whose file did not change."""
UNDO_FORMAT: Final = "undo"
"""Of a run that undoes another."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A file to be run: as what, whose, and how."""

    customer: str
    file_name: str
    format_name: str | None = None
    mapping: str | None = None
    is_dry_run: bool = False
    is_sampled: bool = True
    """Whether a dry run downloads some of its photos."""
    run_id: int | None = None
    """A run that waits for its file; None: it begins now."""


@dataclass(frozen=True, slots=True)
class Judging:
    """How files are read and rows judged from now on."""

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
        judging: Judging,
        in_line_s: float = IN_LINE_S,
    ) -> None:
        self._postgres = postgres
        self._config = config
        self._applying = applying
        self._sampling = sampling
        self._judging = judging
        self._in_line_s = in_line_s
        self._places = asyncio.Semaphore(RUNS_AT_ONCE)

    async def run(
        self, path: Path, order: Order, *, has_place: bool = False, tx: Tx | None = None
    ) -> int:
        """Read the file at `path` to the end and apply it, within `tx` if given; return the run's id.

        The run is then `applied` or `done`, `held` where a person must confirm, or `dry`. Raises:
        NotACatalogue (no run is made), CatalogueBroken, CatalogueTooLarge (the run is `refused`),
        RunUnderWay, RunsBusy.
        """
        async with self._only_reader(order.customer, has_place=has_place):
            rules = await self._judging.rules()
            catalogue = await self._open(path, order)
            run_id = await self._begin(order, catalogue)
            staging = Staging(self._postgres, run_id, order.customer, rules)
            try:
                reading = await staging.read(catalogue.rows)
            except (CatalogueBroken, CatalogueTooLarge) as error:
                await self._end(run_id, RunState.REFUSED, error.text, fault=error.fault)
                raise
            await self._decide(run_id, order, reading, tx)
            return run_id

    async def confirm(self, run_id: int) -> None:
        """Apply a held run. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        known = await self._postgres.one(SQL.lock_run, run_id=run_id)
        if known is None:
            raise RunUnknown(run_id)
        customer = known["customer"]
        async with self._only_reader(customer):
            await self._apply(run_id, customer, expected=RunState.HELD)

    async def discard(self, run_id: int) -> None:
        """End a held run for good; nothing of it is applied. Raises: RunUnknown, RunNotHeld, RunUnderWay, RunsBusy."""
        known = await self._postgres.one(SQL.lock_run, run_id=run_id)
        if known is None:
            raise RunUnknown(run_id)
        customer = known["customer"]
        async with self._only_reader(customer), self._postgres.transaction() as tx:
            if await tx.value(SQL.discard_held, run_id=run_id) is None:
                raise RunNotHeld(f"run {run_id} cannot be discarded: it is not held")
            await tx.run(SQL.clear_staged, customer=customer)

    async def undo(self, run_id: int) -> int:
        """Put the items back to their state before an applied run; return the id of the run that does so.

        All of it in one transaction. Items sent by themselves since the run stay as they were sent.
        Raises: RunUnknown, RunNotUndoable, RunUnderWay, RunsBusy.
        """
        known = await self._postgres.one(SQL.lock_run, run_id=run_id)
        if known is None:
            raise RunUnknown(run_id)
        async with self._only_reader(known["customer"]):
            return await self._applied(lambda tx: self._undo(tx, run_id, known["customer"]))

    async def _undo(self, tx: Tx, run_id: int, customer: str) -> int:
        await tx.allow_long_statements(APPLY_S_MAX)
        await tx.one(SQL.lock_items, customer=customer)
        _require_undoable(await tx.one(SQL.run_to_undo, run_id=run_id))
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
        """Make a run of a file that did not change: the links that are due are asked again; its id.

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
            await self._applying.ask_photos(tx, run_id, customer, is_whole=True)
            idle = await tx.all(SQL.forget_idle_runs, customer=customer, run_id=run_id)
            await store.runs.forget(tx, [row["id"] for row in idle])
            return run_id

    async def require_readable(self, format_name: str | None, mapping: str | None) -> bytes:
        """What reading and judging so depends on, as a digest. Raises: UnknownFormat, MappingUnknown."""
        found = await self._mapping(mapping)
        require_format(format_name or (found.format if found else None), found)
        rules = await self._judging.rules()
        read_as = msgspec.json.encode((format_name, found), order="sorted")
        return hashlib.sha256(rules.digest + read_as).digest()

    async def _mapping(self, name: str | None) -> Mapping | None:
        return None if name is None else (await self._judging.mapping(name)).mapping

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
        """The run to read into. Raises: RunUnknown, where the one that waited is gone."""
        customer = order.customer
        await self._postgres.run(SQL.abandon_runs, customer=customer, but=order.run_id)
        await self._patiently(SQL.clear_staged, customer=customer)
        if order.run_id is None:
            begun: int = await self._postgres.value(
                SQL.insert_run,
                customer=customer,
                file_name=order.file_name,
                format=catalogue.format,
                is_whole=True,
            )
            return begun
        found = await self._postgres.value(
            SQL.begin_ordered, run_id=order.run_id, customer=customer, format=catalogue.format
        )
        if found is None:
            raise RunUnknown(order.run_id)
        # Read once before, by a process that died in it.
        await self._patiently(SQL.clear_run, run_id=order.run_id)
        await self._postgres.run(SQL.clear_problems, run_id=order.run_id)
        async with self._postgres.transaction() as tx:
            await store.runs.forget_comparison(tx, order.run_id)
        return order.run_id

    @asynccontextmanager
    async def _only_reader(self, customer: str, *, has_place: bool = False) -> AsyncIterator[None]:
        async with nullcontext() if has_place else self.place(customer):
            connection = await self._postgres.connect_unpooled()
            try:
                session = Tx(connection)
                if not await session.value(SQL.try_lock_customer, customer=customer):
                    raise RunUnderWay(
                        f"another catalogue of customer {customer!r} is being read: wait until it is done"
                    )
                try:
                    yield
                finally:
                    # Said, since the server notices the end of a connection a moment later.
                    await session.run(SQL.unlock_customer, customer=customer)
            finally:
                connection.terminate()

    @asynccontextmanager
    async def place(self, customer: str) -> AsyncIterator[None]:
        """One of the places for catalogues under way. Raises: RunsBusy after a wait in line."""
        try:
            async with asyncio.timeout(self._in_line_s):
                await self._places.acquire()
        except TimeoutError:
            raise RunsBusy(
                f"the catalogue of customer {customer!r} waited {self._in_line_s:g} s for {RUNS_AT_ONCE} others"
                " that are being read, nothing was changed: send it again later",
                retry_after_s=self._in_line_s,
            ) from None
        try:
            yield
        finally:
            self._places.release()

    async def _decide(self, run_id: int, order: Order, reading: Reading, tx: Tx | None) -> None:
        customer = order.customer
        if reading.rows > ROWS_TO_ANALYZE:
            await self._patiently(SQL.analyze_staged)
        await self._compare_line_break(run_id, customer, reading)
        reason = await self._hold_reason(run_id, customer, reading)
        if order.is_dry_run:
            await self._look(run_id, customer)
            await self._try_photos(run_id, customer, is_sampled=order.is_sampled)
            held = reason and f"would be held, {reason}"
            await self._end(run_id, RunState.DRY, held, tx=tx, fault=reading.fault)
        elif reason is not None:
            await self._look(run_id, customer)
            await self._patiently(SQL.drop_needs, run_id=run_id)
            async with nullcontext(tx) if tx is not None else self._postgres.transaction() as own:
                await self._end(run_id, RunState.HELD, reason, tx=own, fault=reading.fault)
                # Only the latest can be confirmed: a broken file that comes every hour would pile up.
                await own.run(SQL.supersede_held, run_id=run_id, customer=customer)
                await own.run(SQL.clear_staged, customer=customer)
        else:
            await self._apply(
                run_id, customer, expected=RunState.READING, judged=reading.judged, lent=tx
            )

    async def _compare_line_break(self, run_id: int, customer: str, reading: Reading) -> None:
        """Take a table without a final line break as truncated where the table applied last had one."""
        if reading.has_line_break is None:
            return
        had_line_break = await self._postgres.value(
            SQL.note_line_break,
            run_id=run_id,
            customer=customer,
            has_line_break=reading.has_line_break,
        )
        if had_line_break and not reading.has_line_break and reading.fault is None:
            cut = Truncated("truncated_end", reading.last_line)
            reading.truncated, reading.fault = cut.where, cut.fault

    async def _hold_reason(self, run_id: int, customer: str, reading: Reading) -> str | None:
        about = {"run_id": run_id, "customer": customer}
        known = reading.unreadable and await self._patiently(SQL.unreadable_before, **about)
        [limits] = await store.customers.find_customers(self._postgres, customer)
        share, items = limits.hold_share, limits.hold_items
        return hold_reason(
            HoldLimits(
                share=self._config.hold_share if share is None else share,
                items=self._config.hold_items if items is None else items,
            ),
            rows_valid=await self._patiently(SQL.staged_count, run_id=run_id),
            published=await self._patiently(SQL.published_count, customer=customer),
            missing=await self._patiently(SQL.missing_count, **about),
            is_truncated=reading.truncated,
            has_more_unreadable=reading.unreadable > known,
            unreadable=reading.unreadable,
        )

    async def _look(self, run_id: int, customer: str) -> None:
        """Note what the run would change and which photos it would ask."""
        async with self._postgres.transaction() as tx:
            await self._applying.compare(tx, run_id, customer, is_whole=True)

    async def _try_photos(self, run_id: int, customer: str, *, is_sampled: bool) -> None:
        """Try some of the photos that a dry run would ask; of the dry runs before it the last are kept."""
        async with self._postgres.transaction() as tx:
            # This one is not among them yet: it is still `reading`.
            old = await tx.all(SQL.forget_dry_runs, customer=customer, runs_kept=DRY_RUNS_KEPT - 1)
            await store.runs.forget(tx, [row["id"] for row in old])
        if is_sampled:
            sample = await self._sampling.sample(run_id, customer)
            told = msgspec.json.encode(sample).decode()
            await self._postgres.run(SQL.keep_sample, run_id=run_id, sample=told)
        await self._patiently(SQL.drop_needs, run_id=run_id)

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
            noted = msgspec.json.encode(fault).decode()
            await tx.run(SQL.note_fault, run_id=run_id, fault=noted)
        await tx.allow_long_statements(APPLY_S_MAX)
        await tx.run(SQL.end_run, run_id=run_id, state=state.value, reason=reason)
        if state is not RunState.HELD:
            await tx.run(SQL.clear_run, run_id=run_id)

    async def _patiently(self, query: Query, **parameters: Any) -> Any:
        """The value of a statement over all rows of a run, which may take longer than others."""
        async with self._postgres.transaction() as tx:
            await tx.allow_long_statements(APPLY_S_MAX)
            return await tx.value(query, **parameters)

    async def _apply(
        self,
        run_id: int,
        customer: str,
        *,
        expected: RunState,
        judged: int | None = None,
        lent: Tx | None = None,
    ) -> None:
        """Apply a run within `lent`, or within a transaction of its own."""
        if lent is not None:
            await self._apply_once(lent, run_id, customer, expected=expected, judged=judged)
            return
        await self._applied(
            lambda tx: self._apply_once(tx, run_id, customer, expected=expected, judged=judged)
        )

    async def _applied(self, change: Callable[[Tx], Awaitable[Value]]) -> Value:
        """Call `change` in a transaction, again where a publishing worker held an item that it needs."""
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
        raise AssertionError("the last try returns or raises")

    async def _apply_once(
        self, tx: Tx, run_id: int, customer: str, *, expected: RunState, judged: int | None
    ) -> None:
        await tx.allow_long_statements(APPLY_S_MAX)
        await tx.one(SQL.lock_items, customer=customer)
        run: Row = await tx.one(SQL.lock_run, run_id=run_id)
        newer = await tx.value(SQL.newer_run, customer=customer, run_id=run_id)
        if run["state"] != expected or newer is not None:
            because = f"it is {run['state']}"
            if newer is not None or run["state"] == RunState.SUPERSEDED:
                because = (
                    f"run {newer} was applied since" if newer else "a later one took its place"
                )
            raise RunNotHeld(f"run {run_id} cannot be applied: {because}; run the catalogue again")
        if expected is RunState.HELD:
            # Items may have changed since: what it changes is found anew.
            await store.runs.forget_comparison(tx, run_id)
        await self._applying.apply(tx, run_id, customer, judged=judged)


def _require_undoable(run: Row) -> None:
    """Raises: RunNotUndoable."""
    because = None
    if run["undone_by"] is not None:
        because = f"run {run['undone_by']} did so already"
    elif run["state"] not in (RunState.APPLIED, RunState.DONE):
        because = f"it is {run['state']}, so it changed nothing"
    elif run["format"] == UNDO_FORMAT:
        because = "it undoes another run; run the catalogue again"
    elif not run["is_whole"] or run["format"] == SAME_FORMAT:
        because = "only a run of a whole catalogue can be undone; send the items as they were"
    elif run["later"]:
        because = f"run {run['later'][0]} was applied since; undo that one first"
    elif run["newer"] >= UNDOABLE_RUNS:
        because = f"only the last {UNDOABLE_RUNS} catalogues of a customer can be undone"
    if because is not None:
        raise RunNotUndoable(f"run {run['id']} cannot be undone: {because}")
