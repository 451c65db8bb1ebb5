"""`headrace work`: agent and slots in one process, for development and tests.

It shares the host row and the dispatcher with the agent. Its slots are proxies of one runner in
this event loop, one per task, so that all queues are worked concurrently. A handler that crashes
its process ends all of it; `headrace agent` isolates such crashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias

from headrace.engines.postgres import Postgres
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.host_loop import HostLoop
from headrace.jobs.agent.queue_state import TaskFacts
from headrace.jobs.agent.worker_proxy import WorkerProxy
from headrace.jobs.messages import Ack, FromSlot, Left, Ready, Spend, ToSlot
from headrace.jobs.model import JobsConfig
from headrace.jobs.service import Jobs
from headrace.jobs.slots.runner import SlotRunner

END_S: Final = 3.0
THREADS_END_S: Final = 1.0
"""Wait for sync handlers of a lost host; one that runs longer keeps the host's allowances."""
"""Extra time after the grace time in which a runner returns its jobs."""
Declare: TypeAlias = Callable[[], Awaitable[Mapping[str, int]]]
"""Stores what the code declares, and returns the ids of its queues by name."""


async def declared_ids(jobs: Jobs) -> Mapping[str, int]:
    """Store the queues that the code declares. Return their ids by name."""
    return {name: queue.id for name, queue in (await jobs.queues.declare()).items()}


class Worker:
    """Runs the tasks of a registry until it is stopped."""

    def __init__(
        self,
        postgres: Postgres,
        jobs: Jobs,
        config: JobsConfig,
        *,
        host_name: str,
        declare: Declare | None = None,
    ) -> None:
        pool = LocalWorkerPool(jobs, config, declare or partial(declared_ids, jobs))
        self._host = HostLoop(postgres, config, name=host_name, pool=pool)

    @property
    def is_listening(self) -> bool:
        """Whether notifications arrive; otherwise polling alone finds work."""
        return self._host.is_listening

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then let handlers end within `grace_s`, return the rest and leave.

        Raises: LimiterFixed if a task contradicts the stored limiter; SlotHookFailed.
        """
        await self._host.run(stop)

    def statistics(self) -> dict[str, int]:
        """Counts of this worker: jobs run, jobs and leases in progress, host rows lost."""
        return self._host.statistics()


class LocalWorkerPool:
    """Implements `WorkerPool` with proxies of one runner in this process."""

    kind = "work"

    def __init__(self, jobs: Jobs, config: JobsConfig, declare: Declare) -> None:
        self.tags: Sequence[str] = sorted(
            {task.declared.tag for task in jobs.registry if task.declared.tag}
        )
        """Every tag that a task requires: in development one host runs all tasks."""
        self._jobs = jobs
        self._config = config
        self._declare = declare
        self._runner: SlotRunner | None = None
        self._is_stopped = False
        self._dispatcher: Dispatcher | None = None
        self._workers: dict[str, WorkerProxy] = {}
        """By queue."""

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """See `WorkerPool`."""
        ids = await self._declare()
        return [(TaskFacts.of(task), ids[task.queue]) for task in self._jobs.registry]

    async def serve(self, dispatcher: Dispatcher) -> None:
        """See `WorkerPool`."""
        self._dispatcher = dispatcher
        runner = SlotRunner(self._jobs.registry, send=self._receive, config=self._config)
        self._runner, self._is_stopped = runner, False
        self._workers = {
            queue.facts.queue: WorkerProxy(self, bound=queue) for queue in dispatcher.queues
        }
        for worker in self._workers.values():
            dispatcher.add(worker)
        await runner.start()
        await asyncio.get_running_loop().create_future()

    def send(self, message: ToSlot) -> None:
        """See `WorkerChannel`."""
        if self._runner is not None:
            self._runner.receive(message)

    async def drain(self, _dispatcher: Dispatcher, /, grace_s: float) -> None:
        """See `WorkerPool`."""
        await self._stop(grace_s)

    async def abort(self) -> bool:
        """See `WorkerPool`."""
        await self._stop(0.0)
        return self._runner is None or await self._runner.wait_idle(THREADS_END_S)

    async def report(self, postgres: Postgres, host_id: int, dispatcher: Dispatcher) -> None:
        """See `WorkerPool`: nothing to report, the fleet plans no slots here."""

    def kill(self, worker: WorkerProxy, why: str) -> None:
        """See `WorkerPool`: a handler in this process cannot be ended by force."""

    async def _stop(self, grace_s: float) -> None:
        if self._runner is not None and not self._is_stopped:
            self._is_stopped = True
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s + END_S):
                    await self._runner.stop(grace_s)

    def _receive(self, message: FromSlot) -> None:
        assert self._dispatcher is not None, "the runner is created after it"
        match message:
            case Ack():
                for worker in self._workers.values():
                    if message.lease_id in worker.leases:
                        self._dispatcher.receive(worker, message)
                        break
            case Left():
                return
            case Spend():
                self._dispatcher.receive(self._workers[message.queue], message)
            case Ready():
                for worker in self._workers.values():
                    self._dispatcher.receive(worker, message)
            case _:
                # Any proxy will do: progress belongs to a job.
                self._dispatcher.receive(next(iter(self._workers.values())), message)
