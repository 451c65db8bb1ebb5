"""`headrace agent`: the process of a host that claims jobs for its slots.

Startup order: host lock, zygote, return of a dead agent's leases, host row, slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from headrace.engines.children import end_children
from headrace.engines.postgres import Postgres
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


async def run_agent(
    stop: asyncio.Event,
    *,
    name: str,
    folder: Path,
    command: Command,
    open_jobs: Callable[[dict[str, str]], Awaitable[tuple[Postgres, Jobs]]],
    lease_s: float,
    tags: Sequence[str] = (),
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Work until `stop`. First wait for a former agent's slots, at most `lease_s`.

    `open_jobs` receives the settings of the zygote's application, whose code the agent lacks.
    `on_ready` is called after each registration of the host.
    Raises: AgentRuns, ApplicationBroken, LimiterFixed.
    """
    host_lock = await HostLock.take(folder, name, wait_max_s=lease_s)
    board = StatusBoard.make()
    zygote = ZygoteClient(command, board, host_lock.descriptor)
    try:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(zygote.run())
            loaded = await zygote.wait_loaded()
            postgres, jobs = await open_jobs(loaded.settings)
            await _return_leases(postgres, jobs, host_lock)
            statements = SlotStatements(postgres)
            pool = ForkedWorkerPool(
                *(zygote, board, host_lock, jobs.config),
                name=name,
                statements=statements,
                tags=tags,
            )
            host = HostLoop(postgres, jobs.config, name=name, pool=pool, on_ready=on_ready)
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


async def _return_leases(postgres: Postgres, jobs: Jobs, host_lock: HostLock) -> None:
    """Return the leases of the former agent at once: none of its handlers runs any more."""
    for host_id in host_lock.former.host_ids:
        try:
            await store.leases.expire_host(postgres, host_id)
            swept = await jobs.sweep()
            if swept.jobs_returned:
                _log.warning("former_leases_returned", host_id=host_id, jobs=swept.jobs_returned)
        except HeadraceError as error:
            # They return when the host row expires.
            _log.warning("former_leases_not_returned", host_id=host_id, error=error.text)
