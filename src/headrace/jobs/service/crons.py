"""Crons: declare, add, steer, and let those that are due come. Any number of schedulers may do so at once.

A due row is locked, past those that others hold; the job is enqueued and the next moment written in that transaction.
So each moment has one job, whoever dies when. A scheduler that is stopped in the middle is ended there by the server, so
that another may go on.
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
from headrace.jobs.fitting import require_fit
from headrace.jobs.intake import is_storable, prepare_jobs
from headrace.jobs.model import NewJob
from headrace.kernel.errors import HeadraceError
from headrace.kernel.ids import require_id
from headrace.kernel.logs import logger
from headrace.kernel.resilience import crash_point

if TYPE_CHECKING:
    from headrace.jobs.service.jobs import Jobs

FORGOTTEN_S: Final = 3600.0
"""A cron that no running code declared for so long stops coming; its row stays, should that code return."""
UNDECLARED_KEPT_S: Final = 30 * 86_400.0
IDLE_S_MAX: Final = 5.0
FIRED_PER_STEP: Final = 100
_log: Final = logger(__name__)


class Crons:
    """The verbs of crons."""

    def __init__(self, postgres: Postgres, jobs: Jobs) -> None:
        self._postgres = postgres
        self._jobs = jobs

    async def all(self) -> list[Cron]:
        """Every cron, by name."""
        return await store.crons.find_crons(self._postgres)

    async def get(self, name: str, *, tx: Transaction | None = None) -> Cron:
        """One cron. Raises: CronUnknown."""
        runner = self._postgres if tx is None else runner_for(tx)
        found = await store.crons.find_crons(runner, require_id("cron", name))
        if not found:
            raise CronUnknown(name)
        return found[0]

    async def add(self, cron: NewCron, *, tx: Transaction | None = None) -> Cron:
        """Store a new cron, in the caller's transaction if `tx` is given.

        Raises: CronExists, InvalidCron, InvalidId, InvalidJob, QueueUnknown.
        """
        next_at = await self._require_valid(cron)
        runner = self._postgres if tx is None else runner_for(tx)
        if not await store.crons.add_cron(runner, cron, next_at):
            raise CronExists(cron.name)
        return await self.get(cron.name, tx=tx)

    async def change(self, name: str, **changes: Any) -> Cron:
        """Change fields of a cron: those of `NewCron` but its name, and `paused`.

        A cron that code declares can be paused and resumed only.
        Raises: CronUnknown, CronFixed, InvalidCron, InvalidJob, QueueUnknown.
        """
        found = await self.get(name)
        is_paused = bool(changes.pop("paused", found.paused))
        if not changes:
            return await (self.pause(name) if is_paused else self.resume(name))
        if found.source == "code":
            raise CronFixed(name)
        cron = msgspec.structs.replace(_asked(found), **changes)
        next_at = await self._require_valid(cron)
        if not await store.crons.change_cron(self._postgres, cron, next_at, is_paused=is_paused):
            raise CronUnknown(name)
        return await self.get(name)

    async def pause(self, name: str) -> Cron:
        """Let a cron rest. Raises: CronUnknown."""
        if not await store.crons.pause_cron(self._postgres, require_id("cron", name)):
            raise CronUnknown(name)
        return await self.get(name)

    async def resume(self, name: str) -> Cron:
        """Let a cron come again, from its next moment on; what it missed at rest is not made up for.

        Raises: CronUnknown, InvalidCron.
        """
        found = await self.get(name)
        next_at = next_moment(found.spec, found.tz, await store.crons.database_now(self._postgres))
        await store.crons.resume_cron(self._postgres, name, next_at)
        return await self.get(name)

    async def remove(self, name: str) -> None:
        """Delete a cron that no running code declares. Raises: CronUnknown, CronFixed."""
        await self.get(name)
        if not await store.crons.remove_cron(self._postgres, name, forgotten_s=FORGOTTEN_S):
            raise CronFixed(name)

    async def run(self, name: str, *, tx: Transaction | None = None) -> int:
        """Enqueue the cron's job now, besides its moments; return its id. Raises: CronUnknown."""
        if tx is None:
            async with self._postgres.transaction() as own:
                return await self.run(name, tx=own)
        found = await self.get(name, tx=tx)
        job_id = await self._jobs.enqueue(_job(_asked(found)), tx=tx)
        await store.crons.note_cron_job(runner_for(tx), name, job_id)
        return job_id

    async def declare(self) -> int:
        """Store the crons of this app's code; how many. One that is invalid is logged and left out."""
        count = 0
        for declared in self._jobs.registry.crons.values():
            cron = NewCron(
                name=declared.name,
                spec=declared.spec,
                tz=declared.tz,
                queue=declared.queue,
                payload=declared.payload,
            )
            try:
                next_at = await self._require_valid(cron)
            except HeadraceError as error:
                if error.retryable:
                    raise
                _log.error("cron_left_out", cron=cron.name, error=error.text)
                continue
            await store.crons.declare_cron(self._postgres, cron, next_at)
            count += 1
        return count

    async def fire_due(self) -> int:
        """Enqueue the jobs of crons that are due, each in its own short transaction; how many, at most 100."""
        for fired in range(FIRED_PER_STEP):
            if not await self._fire_one():
                return fired
        return FIRED_PER_STEP

    async def forget(self) -> int:
        """Drop crons that no running code has declared for 30 days; how many."""
        return await store.crons.drop_undeclared(self._postgres, kept_s=UNDECLARED_KEPT_S)

    async def _fire_one(self) -> bool:
        """Whether one was due. One that has become invalid pauses itself and says why."""
        name = None
        try:
            async with self._postgres.transaction() as tx:
                due = await store.crons.lock_due_cron(
                    tx, forgotten_s=FORGOTTEN_S, idle_s_max=IDLE_S_MAX
                )
                if due is None:
                    return False
                name = due.cron.name
                next_at = next_moment(due.cron.spec, due.cron.tz, max(due.due_at, due.now_at))
                job_id = await self._jobs.enqueue(_job(due.cron), tx=tx)
                crash_point("jobs.cron_enqueued")
                await store.crons.move_cron(tx, name, job_id=job_id, next_at=next_at)
                crash_point("jobs.cron_moved")
            crash_point("jobs.cron_committed")
        except HeadraceError as error:
            if name is None or error.retryable:
                raise
            await store.crons.pause_cron(self._postgres, name, error=error.text)
            _log.error("cron_paused", cron=name, error=error.text)
        return True

    async def _require_valid(self, cron: NewCron) -> datetime:
        """Check a cron as its job will be checked; its next moment."""
        require_id("cron", cron.name)
        if not cron.name.strip("."):
            raise InvalidCron(
                f"cron {cron.name!r}: a path would lose it: use a name not of dots alone"
            )
        if not is_storable(cron.queue):
            raise QueueUnknown(cron.queue)
        require_fit(prepare_jobs([_job(cron)]), self._jobs.registry)
        is_known = bool(await store.queues.find_queues(self._postgres, [cron.queue]))
        # Perhaps a queue of this very code, which nobody declared yet.
        if not is_known and cron.queue not in await self._jobs.declare_queues():
            raise QueueUnknown(cron.queue)
        return next_moment(cron.spec, cron.tz, await store.crons.database_now(self._postgres))


def _job(cron: NewCron) -> NewJob:
    return NewJob(queue=cron.queue, payload=cron.payload, priority=cron.priority)


def _asked(cron: Cron) -> NewCron:
    return NewCron(
        name=cron.name,
        spec=cron.spec,
        tz=cron.tz,
        queue=cron.queue,
        payload=cron.payload,
        priority=cron.priority,
    )
