"""The life of a host row: declare, register, renew, listen, serve, fence, drain, leave.

The agent, whose slots are forked, and `headrace work`, whose slots run in its own process, share
it; only their worker pools differ. A host that could not renew in time is fenced: it drops its
leases, ends its slots and registers a new row, because other hosts receive its jobs. A PostgreSQL
outage does not stop a host: every loop waits and retries.

Agents of one name in two data folders have no common lock file, and would follow the same part of
the plan twice. So an agent that finds a live row of its name waits: the row of a dead agent
expires, and a renewed one proves that its agent runs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, Protocol

from headrace.engines.postgres import Postgres, Tx
from headrace.engines.postgres_errors import translated_errors
from headrace.jobs import store
from headrace.jobs.agent import capacity
from headrace.jobs.agent.cancellations import Cancellations
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.queue_state import QueueState, TaskFacts
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.errors import AgentRuns, HostNameHeld
from headrace.jobs.leases import RECONNECT, HostLost, LeaseManager
from headrace.jobs.model import JobsConfig
from headrace.jobs.sql import SQL
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import require_not_cancelled, wait_event

CHANNEL: Final = "headrace_jobs"
FLEET_CHANNEL: Final = "headrace_fleet"
REPORT_EVERY_S: Final = 2.0
LEAVE_S: Final = 5.0
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class WorkerPool(Protocol):
    """The slots of a host."""

    kind: str
    """Of the host row: `agent` or `work`."""
    tags: Sequence[str]
    """Tags that this host offers; tasks without a tag run on every host."""

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """Store the queues that the code declares. Return them with their ids.

        Raises: HeadraceError.
        """

    async def serve(self, dispatcher: Dispatcher) -> None:
        """Run slots for the dispatcher until cancelled."""

    async def drain(self, dispatcher: Dispatcher, /, grace_s: float) -> None:
        """Let slots finish within `grace_s`; afterwards no slot has a job."""

    async def abort(self) -> bool:
        """End all work at once: other hosts receive it. Return whether no handler runs any more."""

    def kill(self, worker: WorkerProxy, why: str) -> None:
        """Kill a slot for no fault of its jobs."""

    async def report(self, postgres: Postgres, host_id: int, dispatcher: Dispatcher) -> None:
        """Report this host's slots to the fleet and apply the fleet's plan."""


class HostLoop:
    """Serves one host name until it is stopped, under one host row after another.

    `on_ready` is called after each registration.
    """

    def __init__(
        self,
        postgres: Postgres,
        config: JobsConfig,
        *,
        name: str,
        pool: WorkerPool,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._postgres = postgres
        self._config = config
        self._name = name
        self._pool = pool
        self._on_ready = on_ready
        self._dispatcher: Dispatcher | None = None
        self._leases: LeaseManager | None = None
        self._own_ids: list[int] = []
        self._other: tuple[int, datetime] | None = None
        """Row and expiry of another agent of this name, when it was first seen."""
        self._jobs_run_before = 0
        self._hosts_lost = 0
        self._reported_s = 0.0
        self._is_report_due = asyncio.Event()
        self._cancellations = Cancellations(postgres, pool.kill, config.grace_s)
        self.is_listening = False
        """Whether notifications arrive; otherwise polling alone finds work."""

    def statistics(self) -> dict[str, int]:
        """Counts of this host: jobs run, jobs and leases in progress, host rows lost."""
        now = self._dispatcher
        return {
            "jobs_run": self._jobs_run_before + (now.jobs_run if now else 0),
            "jobs_open": now.jobs_open if now else 0,
            "leases_held": self._leases.leases_held if self._leases else 0,
            "hosts_lost": self._hosts_lost,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then let handlers end within `grace_s`, return the rest and leave.

        Raises: LimiterFixed if a task contradicts the stored limiter; AgentRuns.
        """
        failures = 0
        while not stop.is_set():
            require_not_cancelled()
            try:
                leases, dispatcher = await self._register()
            except HeadraceError as error:
                if not error.retryable:
                    raise
                failures += 1
                _often.warning("host_waits", error=error.text)
                await wait_event(stop, RECONNECT.delay_s(failures))
                continue
            failures = 0
            self._on_ready()
            try:
                await self._serve(leases, dispatcher, stop)
            except* HostLost:
                self._hosts_lost += 1
                _log.error("host_lost", host_id=leases.host_id, leases=leases.leases_held)
                await leases.abandon()
            finally:
                await dispatcher.abort()
            if not stop.is_set() and await self._pool.abort():
                await self._free_allowances(leases.host_id)
        _log.info("host_stopped", name=self._name, **self.statistics())

    async def _free_allowances(self, host_id: int) -> None:
        """Free the allowances of a lost row, whose work has ended, for the next row."""
        try:
            await store.leases.expire_host(self._postgres, host_id)
        except HeadraceError as error:
            # They are free 5 s after the row expired.
            _log.warning("allowances_not_freed", host_id=host_id, error=error.text)

    async def _register(self) -> tuple[LeaseManager, Dispatcher]:
        declared = await self._pool.declare()
        queues = [QueueState(facts, queue_id) for facts, queue_id in declared]
        async with self._postgres.transaction() as tx:
            if self._pool.kind == "agent":
                await self._require_free_name(tx)
            host_id = await store.leases.add_host(
                tx,
                self._name,
                [queue.queue_id for queue in queues],
                self._config.lease_s,
                kind=self._pool.kind,
                tags=self._pool.tags,
                cores=capacity.cores(),
            )
        self._own_ids.append(host_id)
        self._other = None
        self._jobs_run_before = self.statistics()["jobs_run"]
        self._leases = LeaseManager(self._postgres, self._config, host_id)
        self._dispatcher = Dispatcher(self._leases, queues, self._poll_s)
        names = [queue.facts.queue for queue in queues]
        _log.info("host_registered", name=self._name, host_id=host_id, queues=names)
        return self._leases, self._dispatcher

    async def _require_free_name(self, tx: Tx) -> None:
        """Raises: HostNameHeld while another agent's row is live; AgentRuns once it is renewed."""
        await tx.run(SQL.lock_host_name, name=self._name)
        other = await tx.one(SQL.other_agent, name=self._name, own=self._own_ids)
        if other is None:
            return
        found = (other["id"], other["expires_at"])
        if self._other not in (None, found):
            began = other["started_at"].astimezone(UTC)
            raise AgentRuns(
                self._name,
                f"in another data folder or on another machine since {began:%Y-%m-%d %H:%M:%S} UTC",
            )
        self._other = found
        raise HostNameHeld(self._name, other["left_s"])

    async def _serve(
        self, leases: LeaseManager, dispatcher: Dispatcher, stop: asyncio.Event
    ) -> None:
        renew_allowances = partial(dispatcher.allowances.renew, self._postgres, leases.host_id)
        self._reported_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            heartbeat = group.create_task(self._send_heartbeats(leases))
            loops = [
                group.create_task(self._listen(dispatcher)),
                group.create_task(dispatcher.run()),
                group.create_task(self._pool.serve(dispatcher)),
                group.create_task(
                    self._repeat(partial(self._report, leases, dispatcher), self._is_report_due)
                ),
                group.create_task(self._repeat(renew_allowances, dispatcher.allowances.is_due)),
            ]
            await stop.wait()
            await dispatcher.end_claims()
            await self._pool.drain(dispatcher, self._config.grace_s)
            for task in loops:
                task.cancel()
            await asyncio.wait(loops)
            # An outcome that PostgreSQL does not accept keeps the host until its leases expire.
            await leases.flush()
            await self._add_counts(leases, dispatcher)
            heartbeat.cancel()
        try:
            async with asyncio.timeout(LEAVE_S):
                await leases.leave()
        except (HeadraceError, TimeoutError) as error:
            _log.warning("host_row_not_deleted", host_id=leases.host_id, error=str(error))

    async def _send_heartbeats(self, leases: LeaseManager) -> None:
        """Renew the host row. Raises: HostLost, also after an outage longer than a lease."""
        renewed_s = time.monotonic()
        wait_s = self._config.heartbeat_s
        while True:
            require_not_cancelled()
            await asyncio.sleep(wait_s)
            sent_s = time.monotonic()
            left_s = renewed_s + self._config.lease_s - sent_s
            try:
                async with asyncio.timeout(left_s):
                    await leases.renew()
                    renewed_s, wait_s = sent_s, self._config.heartbeat_s
                    await leases.return_unknown()
            except TimeoutError as error:
                raise HostLost from error
            except HeadraceError as error:
                if not error.retryable:
                    raise
                wait_s = min(1.0, self._config.heartbeat_s)
                _often.warning("heartbeat_failed", error=error.text)

    async def _listen(self, dispatcher: Dispatcher) -> None:
        """Pass on notifications; reconnect after an error, while polling covers the gap."""
        failures = 0
        while True:
            require_not_cancelled()
            connection = None
            try:
                connection = await self._postgres.connect_unpooled()
                lost = asyncio.Event()
                connection.add_termination_listener(lambda *_, lost=lost: lost.set())
                with translated_errors():
                    await connection.add_listener(
                        CHANNEL, lambda *message: _wake_queue(dispatcher, message[3])
                    )
                    await connection.add_listener(
                        FLEET_CHANNEL, lambda *_: self._note_fleet_change(dispatcher)
                    )
                failures, self.is_listening = 0, True
                dispatcher.wake_all()
                await lost.wait()
            except HeadraceError as error:
                _often.warning("listener_waits", error=error.text)
            finally:
                self.is_listening = False
                if connection is not None:
                    connection.terminate()
            failures += 1
            await asyncio.sleep(RECONNECT.delay_s(failures))

    async def _repeat(self, step: Callable[[], Awaitable[None]], due: asyncio.Event) -> None:
        """Run `step` every two seconds, and at once when it is due."""
        failures = 0
        while True:
            require_not_cancelled()
            due.clear()
            try:
                await step()
                failures = 0
            except HeadraceError as error:
                if not error.retryable:
                    raise
                failures += 1
                _often.warning("report_failed", error=error.text)
                await asyncio.sleep(RECONNECT.delay_s(failures))
            await wait_event(due, REPORT_EVERY_S)

    async def _report(self, leases: LeaseManager, dispatcher: Dispatcher) -> None:
        """Report to the fleet, and apply its plan and the cancellations of jobs."""
        self._reported_s, before_s = time.monotonic(), self._reported_s
        dispatcher.add_slot_time(self._reported_s - before_s)
        await self._pool.report(self._postgres, leases.host_id, dispatcher)
        await self._cancellations.run_once(leases.host_id, dispatcher)
        await self._add_counts(leases, dispatcher)

    def _note_fleet_change(self, dispatcher: Dispatcher) -> None:
        self._is_report_due.set()
        dispatcher.allowances.is_due.set()

    async def _add_counts(self, leases: LeaseManager, dispatcher: Dispatcher) -> None:
        """Report the counts since the last time; what fails is reported with the next counts."""
        taken = {
            queue: counts
            for queue in dispatcher.queues
            if (counts := queue.take_counts()) is not None
        }
        if not taken:
            return
        try:
            await store.fleet.add_counts(self._postgres, leases.host_id, list(taken.values()))
        except HeadraceError as error:
            for queue, counts in taken.items():
                queue.counts.add(counts)
            _often.info("counts_delayed", error=error.text)

    def _poll_s(self) -> float:
        return self._config.poll_s * random.uniform(0.5, 1.0)


def _wake_queue(dispatcher: Dispatcher, queue_id: str) -> None:
    if queue_id.isdigit():
        dispatcher.wake(int(queue_id))
