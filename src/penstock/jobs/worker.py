"""The worker: one process that works every queue its code knows, on one host row.

Loops: a heartbeat that renews the host row (and with it every lease), a listener for hints, a runner a queue.
A host that could not renew in time is fenced: it drops its leases, cancels its handlers and begins
anew under another row, since its jobs are being given to others. PostgreSQL going away ends nothing:
every loop waits and tries again.

The sweeper is the scheduler role's loop. It looks every 3 s: with the 30 s after which a silent host expires,
a dead worker's jobs are ready again in at most 35 s. Any number may run; each lease is returned by whoever
locks it first.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Final

from penstock.engines.postgres import Postgres, translated_errors
from penstock.jobs import store
from penstock.jobs.leases import RECONNECT, Desk, HostLost, require_not_cancelled
from penstock.jobs.model import JobsConfig
from penstock.jobs.running import QueueRunner
from penstock.jobs.service import Jobs
from penstock.kernel.errors import PenstockError
from penstock.kernel.logs import logger

CHANNEL: Final = "penstock_jobs"
_log: Final = logger(__name__)


class Worker:
    """Runs the tasks of a registry until it is told to stop."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, config: JobsConfig, *, host_name: str
    ) -> None:
        self._postgres = postgres
        self._jobs = jobs
        self._config = config
        self._host_name = host_name
        self._runners: list[QueueRunner] = []
        self._desk: Desk | None = None
        self._jobs_run_before = 0
        self._hosts_lost = 0
        self.is_listening = False
        """Whether hints arrive; else polling alone finds work."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then let handlers end within `grace_s`, return the rest and leave.

        Raises: LimiterFixed where a task contradicts what is stored.
        """
        failures = 0
        while not stop.is_set():
            require_not_cancelled()
            try:
                runners, desk = await self._register()
            except PenstockError as error:
                if not error.retryable:
                    raise
                failures += 1
                _log.warning("worker_waits", error=error.text)
                await _wait_stop(stop, RECONNECT.delay_s(failures))
                continue
            failures = 0
            try:
                await self._serve(desk, runners, stop)
            except* HostLost:
                self._hosts_lost += 1
                _log.error("host_lost", host_id=desk.host_id, leases=desk.leases_held)
        _log.info("worker_stopped", **self.statistics())

    def statistics(self) -> dict[str, int]:
        """What this worker did and holds."""
        return {
            "jobs_run": self._jobs_run_before + sum(r.jobs_run for r in self._runners),
            "calls_running": sum(r.calls_running for r in self._runners),
            "leases_held": self._desk.leases_held if self._desk else 0,
            "hosts_lost": self._hosts_lost,
        }

    async def _register(self) -> tuple[list[QueueRunner], Desk]:
        queues = await self._jobs.declare_queues()
        tasks = list(self._jobs.registry)
        ids = [queues[task.queue].id for task in tasks]
        host_id = await store.hosts.add_host(
            self._postgres, self._host_name, ids, self._config.lease_s
        )
        desk = Desk(self._postgres, self._config, host_id)
        self._jobs_run_before += sum(runner.jobs_run for runner in self._runners)
        self._runners = [
            QueueRunner(desk, task, queue_id, self._poll_s)
            for task, queue_id in zip(tasks, ids, strict=True)
        ]
        for runner in self._runners:
            same = [r for r in self._runners if r.task.limiter == runner.task.limiter]
            runner.on_lanes_freed = partial(_hint_all, same)
        self._desk = desk
        _log.info("worker_registered", host_id=host_id, queues=[task.queue for task in tasks])
        return self._runners, desk

    async def _serve(self, desk: Desk, runners: list[QueueRunner], stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            around = [
                group.create_task(self._beat(desk)),
                group.create_task(self._listen(runners)),
                group.create_task(_wake_at(stop, runners)),
            ]
            work = [group.create_task(runner.run(stop)) for runner in runners]
            work.append(group.create_task(_wait_stop(stop, None)))
            await asyncio.wait(work)
            for task in around:
                task.cancel()
        try:
            await desk.leave()
        except PenstockError as error:
            _log.warning("host_left_behind", host_id=desk.host_id, error=error.text)

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
            except PenstockError as error:
                if not error.retryable:
                    raise
                wait_s = min(1.0, self._config.heartbeat_s)
                _log.warning("heartbeat_failed", error=error.text)

    async def _listen(self, runners: list[QueueRunner]) -> None:
        """Pass hints on; a lost connection is replaced, and polling covers the gap."""
        by_queue = {str(runner.queue_id): runner for runner in runners}
        failures = 0
        while True:
            require_not_cancelled()
            connection = None
            try:
                connection = await self._postgres.connect_alone()
                lost = asyncio.Event()
                connection.add_termination_listener(lambda *_, lost=lost: lost.set())
                with translated_errors():
                    await connection.add_listener(
                        CHANNEL, lambda *message: _pass_hint(by_queue, message[3])
                    )
                failures, self.is_listening = 0, True
                _hint_all(runners)
                await lost.wait()
            except PenstockError as error:
                _log.warning("listener_waits", error=error.text)
            finally:
                self.is_listening = False
                if connection is not None:
                    connection.terminate()
            failures += 1
            await asyncio.sleep(RECONNECT.delay_s(failures))

    def _poll_s(self) -> float:
        return self._config.poll_s * random.uniform(0.5, 1.0)


class Sweeper:
    """Calls `Jobs.sweep` for ever."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._jobs_returned = 0

    def statistics(self) -> dict[str, int]:
        """What this sweeper did."""
        return {"jobs_returned": self._jobs_returned}

    async def run(self, stop: asyncio.Event) -> None:
        """Sweep until `stop`; a database that is away is waited for."""
        failures = 0
        while not stop.is_set():
            require_not_cancelled()
            try:
                wait_s = await self._run_once()
                failures = 0
            except PenstockError as error:
                if not error.retryable:
                    raise
                failures += 1
                wait_s = RECONNECT.delay_s(failures)
                _log.warning("sweep_failed", error=error.text)
            try:
                async with asyncio.timeout(wait_s):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _run_once(self) -> float:
        """One bounded step; seconds to wait before the next."""
        swept = await self._jobs.sweep()
        self._jobs_returned += swept.jobs_returned
        if swept.jobs_returned:
            _log.warning("leases_returned", leases=swept.leases_returned, jobs=swept.jobs_returned)
        return 0.0 if swept.more else self._jobs.config.sweep_every_s


def _pass_hint(by_queue: dict[str, QueueRunner], queue_id: str) -> None:
    runner = by_queue.get(queue_id)
    if runner is not None:
        runner.hint()


async def _wake_at(stop: asyncio.Event, runners: list[QueueRunner]) -> None:
    await stop.wait()
    _hint_all(runners)


def _hint_all(runners: list[QueueRunner]) -> None:
    for runner in runners:
        runner.hint()


async def _wait_stop(stop: asyncio.Event, wait_s: float | None) -> None:
    """Wait until `stop`, at most `wait_s`."""
    try:
        async with asyncio.timeout(wait_s):
            await stop.wait()
    except TimeoutError:
        return
