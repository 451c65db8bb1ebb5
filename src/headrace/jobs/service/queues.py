"""Queues as declared by code and overridden by operators.

A process that enqueues or works declares the queues of its code once; the last declaration wins.
Overrides are stored beside the declared values and win over them. A queue with a new name in the
code is renamed in place, so that its jobs follow. Older code reaches it by its alias.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres, from_row
from headrace.engines.postgres_errors import ConstraintViolated
from headrace.jobs import store
from headrace.jobs.columns import JobColumns
from headrace.jobs.errors import (
    InvalidFilter,
    InvalidSetting,
    LimiterFixed,
    QueueInUse,
    QueueUnknown,
)
from headrace.jobs.fleet.state import QueueHour, QueueMinute
from headrace.jobs.model import (
    IMPORTANCE_LAST,
    QueueSettings,
    QueueStatus,
)
from headrace.jobs.service.lanes import Lanes
from headrace.jobs.sql import SQL
from headrace.jobs.store.queues import QueueRow
from headrace.jobs.tasks import QueueDeclared, Registry
from headrace.jobs.tasks.options import RETRIES_MAX, SLOTS_MAX, checked_decisions
from headrace.jobs.validation import is_storable, is_whole, refuse
from headrace.kernel.errors import FieldProblem, mismatch
from headrace.kernel.ids import USER_ID
from headrace.kernel.single_flight import SingleFlight

BOUNDS: Final = {
    "importance": IMPORTANCE_LAST,
    "slots_min": SLOTS_MAX,
    "slots_max": SLOTS_MAX,
    "retries": RETRIES_MAX,
}
"""Settings that an operator can override, with their maximum."""
DECISIONS: Final = "decisions"
"""The further setting that an operator can override."""
COUNT_MAX: Final = 100_000
"""Jobs of one state are counted up to this."""
COUNT_MAX_OF_ALL: Final = 10_000
"""The same in a list of all queues."""
MINUTES_SPAN: Final = timedelta(hours=1)
MINUTES_SPAN_MAX: Final = timedelta(days=2)
HOURS_SPAN: Final = timedelta(days=7)
HOURS_SPAN_MAX: Final = timedelta(days=90)
"""Longest span of one call, the default of `jobs.hours_kept`."""
OPEN_END: Final = timedelta(minutes=1)
"""A span without an end includes the current minute."""
OPEN_SLACK: Final = 2 * OPEN_END
"""What such a span may be longer: this minute, and the time that the call takes."""


class Queues:
    """The queues of a registry and their stored ids; `Jobs.queues`."""

    def __init__(self, postgres: Postgres, registry: Registry, lanes: Lanes) -> None:
        self._postgres = postgres
        self._registry = registry
        self._lanes = lanes
        self._rows: dict[str, QueueRow] = {}
        self._declared: frozenset[str] = frozenset()
        """The queues of the registry when it was last stored."""
        self._declaring: SingleFlight[asyncio.AbstractEventLoop, dict[str, QueueRow]] = (
            SingleFlight()
        )

    async def declare(self) -> dict[str, QueueRow]:
        """Store the queues and limiters of the registry. Return all queues by name and alias.

        Raises: LimiterFixed if a task moves a queue with lanes to another limiter.
        """
        declared = self._registry.declared()
        try:
            await store.queues.declare_queues(self._postgres, declared)
        except ConstraintViolated:
            # Another process renamed a queue between our two statements: repeat.
            await store.queues.declare_queues(self._postgres, declared)
        rows = {row.name: row for row in await store.queues.find_queues(self._postgres)}
        for queue in declared:
            rows[queue.name] = await self._limited(queue, rows[queue.name])
        for limiter in self._registry.limiters.values():
            await self._lanes.set_limiter(
                limiter.name,
                starts_max=limiter.starts_max,
                window_s=limiter.window_s,
                concurrency=limiter.concurrency,
                slack_s=limiter.slack_s,
                is_declared=True,
            )
        self._rows, self._declared = rows, frozenset(queue.name for queue in declared)
        return rows

    async def ids(self, jobs: JobColumns) -> list[int]:
        """The queue id of each job, by name or alias. Raises: QueueUnknown, InvalidJob."""
        names = jobs.queues
        used = set(names)
        if not self._are_stored(used):
            # On its own connection: a caller's rollback must not undo the declaration.
            known = await self._declared_once(used)
            for name in names:
                if name not in known:
                    raise QueueUnknown(str(name), known)
        rows = self._rows
        laned = {name for name in used if self._needs_lane(name)}
        if laned:
            refuse(
                [
                    FieldProblem(f"/{index}/lane", "required", _lane_missing(rows[name]))
                    for index, (name, lane) in enumerate(zip(names, jobs.lanes, strict=True))
                    if lane is None and name in laned
                ]
            )
        return [rows[name].id for name in names]

    def _are_stored(self, names: set[str]) -> bool:
        """Whether the rows of these queues are known, and those of own code are declared."""
        return all(
            name in self._rows and (name in self._declared or self._registry.find(name) is None)
            for name in names
        )

    def _needs_lane(self, name: str) -> bool:
        """Whether jobs of a queue need a lane, by its row or by own code."""
        own = self._registry.find(name)
        return self._rows[name].needs_lane or (own is not None and own.declared.needs_lane)

    async def _declared_once(self, names: set[str]) -> dict[str, QueueRow]:
        """Call `declare` once for all concurrent callers of this loop."""
        loop = asyncio.get_running_loop()
        was_declaring = loop in self._declaring
        known = await self._declaring.call(loop, self.declare)
        if was_declaring and not self._are_stored(names):
            # It may have started before these queues were declared.
            known = await self._declaring.call(loop, self.declare)
        return known

    async def settings(self, name: str) -> QueueSettings:
        """The settings of a queue by name or alias. Raises: QueueUnknown."""
        found = await self._find(name)
        if found is None and self._registry.find(name) is not None:
            await self.declare()
            found = await self._find(name)
        if found is None:
            known = await store.queues.find_queues(self._postgres)
            raise QueueUnknown(name, [row.name for row in known])
        return found

    async def set(self, name: str, *, create: bool = False, **changes: Any) -> QueueSettings:
        """Override settings of a queue; return the settings in force.

        `paused`, and `importance`, `slots_min`, `slots_max`, `retries`, `decisions`: None restores
        what the code declares. `create` makes a queue without code if none has the name.
        Raises: QueueUnknown, InvalidSetting.
        """
        if create:
            await self.create(name)
        before = await self.settings(name)
        is_paused = changes.pop("paused", before.paused)
        _require_valid(before, changes, is_paused=is_paused)
        if changes:
            wanted = {**dict.fromkeys((*BOUNDS, DECISIONS)), **before.overridden, **changes}
            if wanted[DECISIONS] is not None:
                # As text, which keeps their order.
                wanted[DECISIONS] = msgspec.json.encode(wanted[DECISIONS]).decode()
            await self._postgres.run(SQL.override_queue, queue=before.queue, **wanted)
        if is_paused != before.paused:
            await self._postgres.run(SQL.set_paused, queue=before.queue, is_paused=is_paused)
        return await self.settings(before.queue)

    async def pause(self, name: str) -> None:
        """Start no more jobs of a queue; running jobs continue. Raises: QueueUnknown."""
        await self.set(name, paused=True)

    async def resume(self, name: str) -> None:
        """Start jobs of a queue again. Raises: QueueUnknown."""
        await self.set(name, paused=False)

    async def create(self, name: str) -> None:
        """Create a queue without code, unless the name or alias exists. Raises: InvalidSetting."""
        if USER_ID.fullmatch(name) is None:
            raise InvalidSetting(
                f"queue {name[:160]!r} cannot be created: names are 1 to 128 of"
                " A-Z a-z 0-9 . _ : @ ~ -"
            )
        if await self._find(name) is None:
            await self._postgres.run(SQL.create_queue, queue=name)

    async def remove(self, name: str) -> None:
        """Remove an empty queue that no code runs, with its overrides.

        A process that used it before may still enqueue into it: the queue returns with that job.
        Raises: QueueUnknown, QueueInUse.
        """
        queue = (await self.settings(name)).queue
        uses = [row["use"] for row in await self._postgres.all(SQL.queue_uses, queue=queue)]
        if self._registry.find(queue) is not None:
            uses.append("a task of this app")
        if uses:
            raise QueueInUse(queue, uses)
        await self._postgres.run(SQL.remove_queue, queue=queue)
        self._rows = {}

    async def all(self, *, tx: Transaction | None = None) -> list[QueueStatus]:
        """Every queue with its backlog, by name. Each count is exact up to 10,000."""
        runner = self._postgres if tx is None else runner_for(tx)
        return await store.queues.queue_statuses(runner, count_max=COUNT_MAX_OF_ALL)

    async def get(self, name: str) -> QueueStatus:
        """One queue with its backlog, by name or alias; counts are exact up to 100,000.

        Raises: QueueUnknown.
        """
        await self.settings(name)
        [found] = await store.queues.queue_statuses(self._postgres, name, count_max=COUNT_MAX)
        return found

    async def find_names(self, part: str, *, rows_max: int = 10) -> list[tuple[str, str]]:
        """Queues, crons and limiters whose name contains `part`, each with its kind."""
        if not is_storable(part):
            return []
        rows = await self._postgres.all(SQL.names_like, part=part, rows_max=rows_max)
        return [(row["kind"], row["name"]) for row in rows]

    async def minutes(
        self, name: str, *, from_at: datetime | None = None, to_at: datetime | None = None
    ) -> list[QueueMinute]:
        """Counts and backlog of a queue by minute, oldest first: the last hour, or up to two days.

        Minutes without work and backlog are left out. Minutes are kept for `jobs.minutes_kept`.
        Raises: QueueUnknown, InvalidFilter.
        """
        span = _span_of("minutes", from_at, to_at, usual=MINUTES_SPAN, most=MINUTES_SPAN_MAX)
        queue = await store.queues.require_queue(self._postgres, name)
        rows = await self._postgres.all(
            SQL.queue_minutes, queue=queue.id, from_at=span[0], to_at=span[1]
        )
        return [from_row(QueueMinute, row) for row in rows]

    async def hours(
        self, name: str, *, from_at: datetime | None = None, to_at: datetime | None = None
    ) -> list[QueueHour]:
        """The same by hour: the last seven days, or up to 90 days; the backlog is the highest.

        Hours are kept for `jobs.hours_kept`.

        Raises: QueueUnknown, InvalidFilter.
        """
        span = _span_of("hours", from_at, to_at, usual=HOURS_SPAN, most=HOURS_SPAN_MAX)
        queue = await store.queues.require_queue(self._postgres, name)
        rows = await self._postgres.all(
            SQL.queue_hours, queue=queue.id, from_at=span[0], to_at=span[1]
        )
        return [from_row(QueueHour, row) for row in rows]

    async def _find(self, name: str) -> QueueSettings | None:
        if not is_storable(name):
            return None
        return await store.queues.find_settings(self._postgres, name)

    async def _limited(self, queue: QueueDeclared, row: QueueRow) -> QueueRow:
        """The row with its declared limiter. A renamed queue keeps the limiter of its old name."""
        is_kept = queue.limiter == queue.name and row.limiter in queue.aliases
        if row.limiter == queue.limiter or row.is_alias or is_kept:
            return row
        if not await self._postgres.run(SQL.change_limiter, queue=row.id, limiter=queue.limiter):
            raise LimiterFixed(
                f"queue {queue.name!r} has jobs in lanes of limiter {row.limiter!r}: keep that"
                f" limiter, or declare a new queue with limiter {queue.limiter!r}"
            )
        return replace(row, limiter=queue.limiter)


def _require_valid(before: QueueSettings, changes: dict[str, Any], *, is_paused: Any) -> None:
    """Check `changes`, a list of decisions becomes a mapping. Raises: InvalidSetting."""
    found = [
        (name, f"expected one of {', '.join(sorted([*BOUNDS, DECISIONS, 'paused']))}")
        for name in changes
        if name not in (*BOUNDS, DECISIONS)
    ]
    if changes.get(DECISIONS) is not None:
        try:
            changes[DECISIONS] = checked_decisions(changes[DECISIONS], before.queue)
        except ValueError as error:
            found.append((DECISIONS, mismatch(str(error), changes[DECISIONS])))
    found += [
        (name, mismatch(f"a whole number 0 to {most}, or none for what code declares", value))
        for name, most in BOUNDS.items()
        if (value := changes.get(name)) is not None and not is_whole(value, 0, most)
    ]
    if not isinstance(is_paused, bool):
        found.append(("paused", mismatch("true or false", is_paused)))
    if not found:
        fewest, most = (
            changes[name] if changes.get(name) is not None else getattr(before, name)
            for name in ("slots_min", "slots_max")
        )
        if fewest > most:
            found.append(("slots_min", mismatch(f"at most slots_max, which is {most}", fewest)))
    problems = [FieldProblem(f"/{name}", "invalid", text) for name, text in found]
    InvalidSetting.require_none(problems, f"queue {before.queue!r}")


def _lane_missing(queue: QueueRow) -> str:
    return (
        f"queue {queue.name!r} has limiter {queue.limiter!r}, which limits only jobs with a lane:"
        " give the job a lane (lane=NAME, --lane NAME), or declare the task with lane='optional'"
    )


def _span_of(
    what: str,
    from_at: datetime | None,
    to_at: datetime | None,
    *,
    usual: timedelta,
    most: timedelta,
) -> tuple[datetime, datetime]:
    """The span of a series. Raises: InvalidFilter."""
    try:
        until_at = _in_utc(to_at or datetime.now(UTC) + OPEN_END)
        since_at = _in_utc(from_at or until_at - usual)
    except (OverflowError, ValueError) as error:
        raise InvalidFilter(
            f"{what}: from and to are moments with a time zone such as 2026-11-21T10:00:00Z"
        ) from error
    slack = OPEN_SLACK if to_at is None else timedelta()
    if not timedelta() < until_at - since_at <= most + slack:
        raise InvalidFilter(
            f"{what} from {since_at.isoformat()} to {until_at.isoformat()}: request a span of"
            f" at most {most.days} days that begins before it ends"
        )
    return since_at, until_at


def _in_utc(moment: datetime) -> datetime:
    """The moment in UTC. Raises: ValueError without a time zone; OverflowError."""
    if moment.tzinfo is None:
        raise ValueError(moment)
    return moment.astimezone(UTC)
