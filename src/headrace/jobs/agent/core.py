"""The life of a host row: declare, register, renew, listen, serve, fence, drain, leave.

The same for the agent, whose slots are forked, and for `headrace work`, whose slots are part of it; what differs is
the crew. A host that could not renew in time is fenced: it drops its leases, cuts its slots off and begins anew
under another row, since its jobs are being given to others. PostgreSQL going away ends nothing: every loop
waits and tries again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from headrace.engines.postgres import Postgres, translated_errors
from headrace.jobs import store
from headrace.jobs.agent import capacity
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.lines import Counts, Line, TaskFacts
from headrace.jobs.fleet.facts import QueueCounts
from headrace.jobs.leases import RECONNECT, Desk, HostLost
from headrace.jobs.model import JobsConfig
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import SparseLogger, logger
from headrace.kernel.resilience import require_not_cancelled

CHANNEL: Final = "headrace_jobs"
FLEET_CHANNEL: Final = "headrace_fleet"
REPORT_EVERY_S: Final = 2.0
LEAVE_S: Final = 5.0
_log: Final = logger(__name__)
_often: Final = SparseLogger(_log)


class Crew(Protocol):
    """Who keeps the slots of a host."""

    kind: str
    """Of the host row: `agent` or `work`."""
    tags: Sequence[str]
    """What this host is fit for beside tasks without a tag."""

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """Store what the code says of its queues; each with the queue's id. May raise a HeadraceError."""

    async def serve(self, dispatcher: Dispatcher) -> None:
        """Keep slots seated at the dispatcher until cancelled."""

    async def drain(self, dispatcher: Dispatcher, /, grace_s: float) -> None:
        """Let slots finish within the grace time; afterwards none holds a job."""

    async def cut(self) -> None:
        """End all work at once: it belongs to others now."""

    async def report(self, postgres: Postgres, host_id: int, dispatcher: Dispatcher) -> None:
        """Tell the fleet what is here, and do what its plan says."""


class HostLoop:
    """Serves one host name until it is told to stop, under one host row after another."""

    def __init__(self, postgres: Postgres, config: JobsConfig, *, name: str, crew: Crew) -> None:
        self._postgres = postgres
        self._config = config
        self._name = name
        self._crew = crew
        self._dispatcher: Dispatcher | None = None
        self._desk: Desk | None = None
        self._jobs_run_before = 0
        self._hosts_lost = 0
        self._is_report_due = asyncio.Event()
        self.on_ready: Callable[[], None] = lambda: None
        """Is called once the first host row stands."""
        self.is_listening = False
        """Whether hints arrive; else polling alone finds work."""

    def statistics(self) -> dict[str, int]:
        """What this host did and holds."""
        now = self._dispatcher
        return {
            "jobs_run": self._jobs_run_before + (now.jobs_run if now else 0),
            "jobs_open": now.jobs_open if now else 0,
            "leases_held": self._desk.leases_held if self._desk else 0,
            "hosts_lost": self._hosts_lost,
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then let handlers end within `grace_s`, return the rest and leave.

        Raises: LimiterFixed where a task contradicts what is stored.
        """
        failures = 0
        while not stop.is_set():
            require_not_cancelled()
            try:
                desk, dispatcher = await self._register()
            except HeadraceError as error:
                if not error.retryable:
                    raise
                failures += 1
                _often.warning("host_waits", error=error.text)
                await wait_event(stop, RECONNECT.delay_s(failures))
                continue
            failures = 0
            self.on_ready()
            try:
                await self._serve(desk, dispatcher, stop)
            except* HostLost:
                self._hosts_lost += 1
                _log.error("host_lost", host_id=desk.host_id, leases=desk.leases_held)
                await desk.abandon()
            finally:
                await dispatcher.cut()
            if not stop.is_set():
                await self._crew.cut()
        _log.info("host_stopped", name=self._name, **self.statistics())

    async def _register(self) -> tuple[Desk, Dispatcher]:
        declared = await self._crew.declare()
        lines = [Line(facts, queue_id) for facts, queue_id in declared]
        ids = [line.queue_id for line in lines]
        host_id = await store.hosts.add_host(
            self._postgres,
            self._name,
            ids,
            self._config.lease_s,
            kind=self._crew.kind,
            tags=self._crew.tags,
            cores=capacity.cores(),
        )
        self._jobs_run_before = self.statistics()["jobs_run"]
        self._desk = Desk(self._postgres, self._config, host_id)
        self._dispatcher = Dispatcher(self._desk, lines, self._poll_s)
        queues = [line.facts.queue for line in lines]
        _log.info("host_registered", name=self._name, host_id=host_id, queues=queues)
        return self._desk, self._dispatcher

    async def _serve(self, desk: Desk, dispatcher: Dispatcher, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self._beat(desk))
            around = [
                group.create_task(self._listen(dispatcher)),
                group.create_task(dispatcher.run()),
                group.create_task(self._crew.serve(dispatcher)),
                group.create_task(self._report(desk, dispatcher)),
                group.create_task(self._allow(desk, dispatcher)),
            ]
            await stop.wait()
            await dispatcher.end_claims()
            await self._crew.drain(dispatcher, self._config.grace_s)
            for task in around:
                task.cancel()
            await asyncio.wait(around)
            # An outcome that PostgreSQL does not take keeps the host for as long as its leases last.
            await desk.flush()
            await self._add_counts(desk, dispatcher)
            beat.cancel()
        try:
            async with asyncio.timeout(LEAVE_S):
                await desk.leave()
        except (HeadraceError, TimeoutError) as error:
            _log.warning("host_left_behind", host_id=desk.host_id, error=str(error))

    async def _beat(self, desk: Desk) -> None:
        """Renew the host row. Raises: HostLost, also where the database was silent for too long."""
        renewed_s = time.monotonic()
        wait_s = self._config.heartbeat_s
        while True:
            require_not_cancelled()
            await asyncio.sleep(wait_s)
            sent_s = time.monotonic()
            left_s = renewed_s + self._config.lease_s - sent_s
            try:
                async with asyncio.timeout(left_s):
                    await desk.renew()
                    renewed_s, wait_s = sent_s, self._config.heartbeat_s
                    await desk.return_unknown()
            except TimeoutError as error:
                raise HostLost from error
            except HeadraceError as error:
                if not error.retryable:
                    raise
                wait_s = min(1.0, self._config.heartbeat_s)
                _often.warning("heartbeat_failed", error=error.text)

    async def _listen(self, dispatcher: Dispatcher) -> None:
        """Pass hints on; a lost connection is replaced, and polling covers the gap."""
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
                        CHANNEL, lambda *message: _pass_hint(dispatcher, message[3])
                    )
                    await connection.add_listener(
                        FLEET_CHANNEL, lambda *_: self._note_fleet_change(dispatcher)
                    )
                failures, self.is_listening = 0, True
                dispatcher.hint_all()
                await lost.wait()
            except HeadraceError as error:
                _often.warning("listener_waits", error=error.text)
            finally:
                self.is_listening = False
                if connection is not None:
                    connection.terminate()
            failures += 1
            await asyncio.sleep(RECONNECT.delay_s(failures))

    async def _report(self, desk: Desk, dispatcher: Dispatcher) -> None:
        """Every two seconds, and when the plan changed."""
        told_s = time.monotonic()
        while True:
            require_not_cancelled()
            told_s, since_s = time.monotonic(), told_s
            dispatcher.note_slot_time(told_s - since_s)
            self._is_report_due.clear()
            try:
                await self._crew.report(self._postgres, desk.host_id, dispatcher)
                await self._add_counts(desk, dispatcher)
            except HeadraceError as error:
                if not error.retryable:
                    raise
                _often.warning("report_failed", error=error.text)
            await wait_event(self._is_report_due, REPORT_EVERY_S)

    def _note_fleet_change(self, dispatcher: Dispatcher) -> None:
        self._is_report_due.set()
        dispatcher.allowances.is_due.set()

    async def _allow(self, desk: Desk, dispatcher: Dispatcher) -> None:
        """Keep this host within the maximum slots of its queues: every two seconds, and on need."""
        allowances = dispatcher.allowances
        failures = 0
        while True:
            require_not_cancelled()
            allowances.is_due.clear()
            try:
                await allowances.renew(self._postgres, desk.host_id)
                failures = 0
            except HeadraceError as error:
                if not error.retryable:
                    raise
                failures += 1
                _log.warning("allowances_delayed", error=error.text)
                await asyncio.sleep(RECONNECT.delay_s(failures))
            await wait_event(allowances.is_due, REPORT_EVERY_S)

    async def _add_counts(self, desk: Desk, dispatcher: Dispatcher) -> None:
        """Report what was done since the last time; what fails is reported with the next."""
        taken = [(line, line.take_counts()) for line in dispatcher.lines]
        told = [(line, counts) for line, counts in taken if not counts.is_empty]
        if not told:
            return
        try:
            rows = [_counts_row(line, counts) for line, counts in told]
            await store.fleet.add_counts(self._postgres, desk.host_id, rows)
        except HeadraceError as error:
            for line, counts in told:
                line.counts.add(counts)
            _often.info("counts_delayed", error=error.text)

    def _poll_s(self) -> float:
        return self._config.poll_s * random.uniform(0.5, 1.0)


def _counts_row(line: Line, counts: Counts) -> QueueCounts:
    return QueueCounts(
        queue_id=line.queue_id,
        ended=counts.ended,
        calls=counts.calls,
        run_s=counts.run_s,
        slot_s=counts.slot_s,
    )


def _pass_hint(dispatcher: Dispatcher, queue_id: str) -> None:
    if queue_id.isdigit():
        dispatcher.hint(int(queue_id))


async def wait_event(event: asyncio.Event, wait_s: float) -> None:
    """Wait until `event`, at most `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return
