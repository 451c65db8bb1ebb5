"""`headrace agent`: the process of a host that claims jobs for its slots.

Startup order: host lock, zygote, return of a dead agent's leases, host row, slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from headrace.engines import Engines
from headrace.engines.children import end_children
from headrace.jobs import store
from headrace.jobs.agent.host_lock import HostLock
from headrace.jobs.agent.host_loop import HostLoop
from headrace.jobs.agent.slot_statements import SlotStatements
from headrace.jobs.agent.worker_pool import ForkedWorkerPool
from headrace.jobs.agent.zygote_client import ZygoteClient
from headrace.jobs.service import Jobs
from headrace.jobs.slots.status_board import StatusBoard
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

_log: Final = logger(__name__)
CHILDREN_END_S: Final = 2.0
Command = Callable[[Sequence[str]], Sequence[str]]
"""Return the command line of a zygote with these options."""


class AgentApp(Protocol):
    """An app with the settings of the zygote's application, in the agent, which lacks its code."""

    @property
    def engines(self) -> Engines: ...

    @property
    def jobs(self) -> Jobs: ...


class Agent:
    """One host's agent. `open_app` receives the settings that the zygote found.

    `on_ready` is called after each registration of the host.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Command,
        open_app: Callable[[dict[str, str]], Awaitable[AgentApp]],
        *,
        tags: Sequence[str] = (),
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._tags = tags
        self._folder = folder
        self._command = command
        self._open_app = open_app
        self._on_ready = on_ready

    async def run(self, stop: asyncio.Event, *, lease_s: float) -> None:
        """Work until `stop`. First wait for a former agent's slots, at most `lease_s`.

        Raises: AgentRuns, ApplicationBroken, LimiterFixed.
        """
        host_lock = await HostLock.take(self._folder, self._name, wait_max_s=lease_s)
        board = StatusBoard.make()
        zygote = ZygoteClient(self._command, board, host_lock.descriptor)
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(zygote.run())
                loaded = await zygote.wait_loaded()
                app = await self._open_app(loaded.settings)
                await _return_leases(app, host_lock)
                postgres, config = app.engines.postgres, app.jobs.config
                statements = SlotStatements(postgres)
                pool = ForkedWorkerPool(
                    *(zygote, board, host_lock, config),
                    name=self._name,
                    statements=statements,
                    tags=self._tags,
                )
                host = HostLoop(
                    postgres, config, name=self._name, pool=pool, on_ready=self._on_ready
                )
                try:
                    await host.run(stop)
                finally:
                    await statements.close()
                keeping.cancel()
        except ExceptionGroup as group_of:
            raise _first_expected(group_of) from None
        finally:
            # Processes that handlers detached from their slots: this process inherited them.
            if left := end_children(CHILDREN_END_S):
                _log.error("children_not_gone", pids=left)
        host_lock.release()


def _first_expected(group: ExceptionGroup[Exception]) -> Exception:
    """The first error with a code in `group`, or `group` itself if it has other errors.

    `except*` is no alternative: Python 3.11 wraps what it raises in a new group.
    """
    expected, unexpected = group.split(HeadraceError)
    if expected is None or unexpected is not None:
        return group
    first: BaseException = expected
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception), "split by an Exception class"
    return first


async def _return_leases(app: AgentApp, host_lock: HostLock) -> None:
    """Return the leases of the former agent at once: none of its handlers runs any more."""
    for host_id in host_lock.former.host_ids:
        try:
            await store.leases.expire_host(app.engines.postgres, host_id)
            swept = await app.jobs.sweep()
            if swept.jobs_returned:
                _log.warning("former_leases_returned", host_id=host_id, jobs=swept.jobs_returned)
        except HeadraceError as error:
            # They return when the host row expires.
            _log.warning("former_leases_not_returned", host_id=host_id, error=error.text)
