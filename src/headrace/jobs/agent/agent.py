"""`headrace agent`: the process of a host that claims for its slots, put together.

lock of the host's name -> zygote -> what a dead agent left is returned -> host row -> slots
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from headrace.engines import Engines
from headrace.jobs import store
from headrace.jobs.agent.board import Board
from headrace.jobs.agent.core import HostLoop
from headrace.jobs.agent.crew import ForkedCrew
from headrace.jobs.agent.keeper import ZygoteKeeper
from headrace.jobs.agent.remains import end_children
from headrace.jobs.agent.succession import Succession
from headrace.jobs.service import Jobs
from headrace.kernel.errors import HeadraceError
from headrace.kernel.logs import logger

_log: Final = logger(__name__)
CHILDREN_END_S: Final = 2.0
Command = Callable[[Sequence[str]], Sequence[str]]
"""The command line of a zygote with these options."""


class Opened(Protocol):
    """An app as it is configured where the code is, in the process that has not the code."""

    @property
    def engines(self) -> Engines: ...

    @property
    def jobs(self) -> Jobs: ...


class Agent:
    """One host's agent. `open_app` is told what the zygote found the settings to be."""

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Command,
        open_app: Callable[[dict[str, str]], Awaitable[Opened]],
        *,
        tags: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._tags = tags
        self._folder = folder
        self._command = command
        self._open_app = open_app
        self.on_ready: Callable[[], None] = lambda: None
        """Is called once the first host row stands."""

    async def run(self, stop: asyncio.Event, *, lease_s: float) -> None:
        """Work until `stop`. Waits for former slots as long as their leases may last.

        Raises: AgentRuns, ApplicationBroken, LimiterFixed.
        """
        succession = await Succession.take(self._folder, self._name, wait_max_s=lease_s)
        board = Board.make()
        keeper = ZygoteKeeper(self._command, board, succession.descriptor)
        try:
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(keeper.run())
                loaded = await keeper.wait_loaded()
                app = await self._open_app(loaded.settings)
                await _return_leases(app, succession)
                postgres, config = app.engines.postgres, app.jobs.config
                crew = ForkedCrew(
                    keeper, board, succession, config, name=self._name, tags=self._tags
                )
                host = HostLoop(postgres, config, name=self._name, crew=crew)
                host.on_ready = self.on_ready
                await host.run(stop)
                keeping.cancel()
        except ExceptionGroup as group_of:
            raise _first_expected(group_of) from None
        finally:
            # What handlers detached from their slots: this process inherited it.
            if left := end_children(CHILDREN_END_S):
                _log.error("children_not_gone", pids=left)
        succession.release()


def _first_expected(group: ExceptionGroup[Exception]) -> Exception:
    """The first error with a code in `group`, or `group` itself where another error is among them.

    `except*` is no alternative: what is raised inside it leaves wrapped in a new group on Python 3.11.2.
    """
    expected, unexpected = group.split(HeadraceError)
    if expected is None or unexpected is not None:
        return group
    first: BaseException = expected
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, Exception), "split by an Exception class"
    return first


async def _return_leases(app: Opened, succession: Succession) -> None:
    """Give back at once what the agent before this one held: nothing of it runs any more."""
    for host_id in succession.former.host_ids:
        try:
            await store.leases.expire_host(app.engines.postgres, host_id)
            swept = await app.jobs.sweep()
            if swept.jobs_returned:
                _log.warning("former_leases_returned", host_id=host_id, jobs=swept.jobs_returned)
        except HeadraceError as error:
            # They return when the row expires.
            _log.warning("former_leases_not_returned", host_id=host_id, error=error.text)
