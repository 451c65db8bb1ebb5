"""Crons: declare, add, change, and enqueue the jobs of those that are due.

Any number of schedulers may do so at once. One transaction locks a due row, enqueues its job and
writes the next scheduled time, so each scheduled time has exactly one job. The server ends the
transaction of a suspended scheduler, so that another can continue.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from headrace.engines.caller_transaction import Transaction, runner_for
from headrace.engines.postgres import Postgres
from headrace.jobs import store
from headrace.jobs.crons import Cron, NewCron, next_moment
from headrace.jobs.errors import CronExists, CronFixed, CronUnknown, InvalidCron, QueueUnknown
from headrace.jobs.model import NewJob
from headrace.jobs.service.queues import Queues
from headrace.jobs.sql import SQL
from headrace.jobs.tasks import Registry
from headrace.jobs.validation import is_storable, prepare_jobs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.ids import require_id
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

if TYPE_CHECKING:
    from headrace.jobs.service.jobs import Jobs

FORGOTTEN_S: Final = 3600.0
"""A cron that no running code has declared for this long stops firing; its row stays."""
UNDECLARED_KEPT_S: Final = 30 * 86_400.0
IDLE_S_MAX: Final = 5.0
FIRED_PER_STEP: Final = 100
_log: Final = logger(__name__)


class Crons:
    """The crons of an app; `Jobs.crons`."""

    def __init__(self, postgres: Postgres, registry: Registry, queues: Queues, jobs: Jobs) -> None:
        self._postgres = postgres
        self._registry = registry
        self._queues = queues
        self._jobs = jobs

    async def all(self) -> list[Cron]:
        """Every cron, by name."""
        return await store.queues.find_crons(self._postgres)

    async def get(self, name: str, *, tx: Transaction | None = None) -> Cron:
        """One cron. Raises: CronUnknown."""
        runner = self._postgres if tx is None else runner_for(tx)
        found = await store.queues.find_crons(runner, require_id("cron", name))
        if not found:
            raise CronUnknown(name)
        return found[0]

    async def add(self, cron: NewCron, *, tx: Transaction | None = None) -> Cron:
        """Store a new cron, inside `tx` if given.

        Raises: CronExists, InvalidCron, InvalidId, InvalidJob, QueueUnknown.
        """
        next_at = await self._require_valid(cron)
        runner = self._postgres if tx is None else runner_for(tx)
        fields = store.queues.cron_fields(cron)
        if not await runner.run(SQL.add_cron, **fields, next_at=next_at):
            raise CronExists(cron.name)
        return await self.get(cron.name, tx=tx)

    async def change(self, name: str, **changes: Any) -> Cron:
        """Change `paused` or any field of `NewCron` except its name.

        A cron declared by code can only be paused and resumed.
        Raises: CronUnknown, CronFixed, InvalidCron, InvalidJob, QueueUnknown.
        """
        found = await self.get(name)
        is_paused = bool(changes.pop("paused", found.paused))
        if not changes:
            return await (self.pause(name) if is_paused else self.resume(name))
        if found.source == "code":
            raise CronFixed(name)
        cron = msgspec.structs.replace(
            msgspec.convert(found, NewCron, from_attributes=True), **changes
        )
        next_at = await self._require_valid(cron)
        fields = store.queues.cron_fields(cron)
        if not await self._postgres.run(
            SQL.change_cron, **fields, next_at=next_at, is_paused=is_paused
        ):
            raise CronUnknown(name)
        return await self.get(name)

    async def pause(self, name: str) -> Cron:
        """Pause a cron. Raises: CronUnknown."""
        if not await self._postgres.run(SQL.pause_cron, name=require_id("cron", name), error=None):
            raise CronUnknown(name)
        return await self.get(name)

    async def resume(self, name: str) -> Cron:
        """Resume a cron at its next scheduled time; missed times are skipped.

        Raises: CronUnknown, InvalidCron.
        """
        found = await self.get(name)
        next_at = next_moment(found.spec, found.tz, await self._postgres.value(SQL.database_now))
        await self._postgres.run(SQL.resume_cron, name=name, next_at=next_at)
        return await self.get(name)

    async def remove(self, name: str) -> None:
        """Delete a cron that no running code declares. Raises: CronUnknown, CronFixed."""
        await self.get(name)
        if not await self._postgres.run(SQL.remove_cron, name=name, forgotten_s=FORGOTTEN_S):
            raise CronFixed(name)

    async def run(self, name: str, *, tx: Transaction | None = None) -> int:
        """Enqueue the cron's job now, in addition to its schedule; return its id.

        Raises: CronUnknown.
        """
        if tx is None:
            async with self._postgres.transaction() as own:
                return await self.run(name, tx=own)
        found = await self.get(name, tx=tx)
        job_id = await self._jobs.enqueue(_job(found), tx=tx)
        await runner_for(tx).run(SQL.note_cron_job, name=name, job=job_id)
        return job_id

    async def declare(self) -> int:
        """Store the crons of this app's code. Return how many; invalid ones are logged."""
        count = 0
        for cron in self._registry.crons.values():
            try:
                next_at = await self._require_valid(cron)
            except HeadraceError as error:
                if error.retryable:
                    raise
                _log.error("cron_left_out", cron=cron.name, error=error.text)
                continue
            fields = store.queues.cron_fields(cron)
            await self._postgres.run(SQL.declare_cron, **fields, next_at=next_at)
            count += 1
        return count

    async def fire_due(self) -> int:
        """Enqueue the jobs of up to 100 due crons, each in its own transaction. Return how many."""
        for fired in range(FIRED_PER_STEP):
            if not await self._fire_one():
                return fired
        return FIRED_PER_STEP

    async def forget(self) -> int:
        """Delete crons that no running code has declared for 30 days. Return how many."""
        return await self._postgres.run(SQL.drop_undeclared, kept_s=UNDECLARED_KEPT_S)

    async def _fire_one(self) -> bool:
        """Enqueue the job of one due cron. Return whether one was due.

        A cron that has become invalid is paused with its error.
        """
        name = None
        try:
            async with self._postgres.transaction() as tx:
                due = await store.queues.lock_due_cron(
                    tx, forgotten_s=FORGOTTEN_S, idle_s_max=IDLE_S_MAX
                )
                if due is None:
                    return False
                cron, after_at = due
                name = cron.name
                next_at = next_moment(cron.spec, cron.tz, after_at)
                job_id = await self._jobs.enqueue(_job(cron), tx=tx)
                crash_point("jobs.cron_enqueued")
                await tx.run(SQL.move_cron, name=name, job=job_id, next_at=next_at)
                crash_point("jobs.cron_moved")
            crash_point("jobs.cron_committed")
        except HeadraceError as error:
            if name is None or error.retryable:
                raise
            await self._postgres.run(SQL.pause_cron, name=name, error=error.text)
            _log.error("cron_paused", cron=name, error=error.text)
        return True

    async def _require_valid(self, cron: NewCron) -> datetime:
        """Check a cron the way its job will be checked. Return its next scheduled time."""
        require_id("cron", cron.name)
        if not cron.name.strip("."):
            raise InvalidCron(
                f"cron {cron.name!r}: a name of dots only cannot be a URL path: use another name"
            )
        if not is_storable(cron.queue):
            raise QueueUnknown(cron.queue)
        prepare_jobs([_job(cron)], self._registry)
        known = await store.queues.find_queues(self._postgres, [cron.queue])
        if any(queue.needs_lane for queue in known):
            raise InvalidCron(
                f"cron {cron.name!r}: jobs of queue {cron.queue!r} need a lane, which crons do not"
                " give: use another queue, or declare its task with lane='optional'"
            )
        # It may be a queue of this app that is not declared yet.
        if not known and cron.queue not in (names := await self._queues.declare()):
            raise QueueUnknown(cron.queue, names)
        return next_moment(cron.spec, cron.tz, await self._postgres.value(SQL.database_now))


def _job(cron: NewCron) -> NewJob:
    return NewJob(queue=cron.queue, payload=cron.payload, priority=cron.priority)
