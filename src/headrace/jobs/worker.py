"""The worker: agent and slots in one process, for `headrace work` and for tests.

The same host row and dispatcher as the agent's; its slots are seats of one runner in this event loop, one a task, so that
every queue is worked concurrently. Nothing here survives a handler that kills its process: that is what
`headrace agent` is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from headrace.engines.postgres import Postgres
from headrace.jobs.agent.core import HostLoop
from headrace.jobs.agent.dispatcher import Dispatcher
from headrace.jobs.agent.lines import TaskFacts
from headrace.jobs.agent.seats import Seat
from headrace.jobs.model import JobsConfig
from headrace.jobs.service import Jobs
from headrace.jobs.slots.messages import FromSlot, Left, Ready, Settled, Spend, SpendAnswer, Work
from headrace.jobs.slots.runner import SlotRunner
from headrace.kernel.logs import logger

END_S: Final = 3.0
"""What a runner gets beyond the grace time to hand everything back."""
_log: Final = logger(__name__)


class Worker:
    """Runs the tasks of a registry until it is told to stop."""

    def __init__(
        self, postgres: Postgres, jobs: Jobs, config: JobsConfig, *, host_name: str
    ) -> None:
        crew = LocalCrew(jobs, config)
        self._host = HostLoop(postgres, config, name=host_name, crew=crew)

    @property
    def is_listening(self) -> bool:
        """Whether hints arrive; else polling alone finds work."""
        return self._host.is_listening

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then let handlers end within `grace_s`, return the rest and leave.

        Raises: LimiterFixed where a task contradicts what is stored; SlotHookFailed.
        """
        await self._host.run(stop)

    def statistics(self) -> dict[str, int]:
        """What this worker did and holds."""
        return self._host.statistics()


class LocalCrew:
    """Implements `agent.core.Crew` with seats of one runner in this process."""

    kind = "work"

    def __init__(self, jobs: Jobs, config: JobsConfig) -> None:
        self.tags: Sequence[str] = sorted(
            {task.declared.tag for task in jobs.registry if task.declared.tag}
        )
        """All that are asked for: in development this host is fit for everything."""
        self._jobs = jobs
        self._config = config
        self._runner: SlotRunner | None = None
        self._dispatcher: Dispatcher | None = None
        self.seat_of: dict[int, Seat] = {}
        """By lease, of those in hand."""

    async def declare(self) -> Sequence[tuple[TaskFacts, int]]:
        """See `Crew`."""
        queues = await self._jobs.queues.declare()
        return [(TaskFacts.of(task), queues[task.queue].id) for task in self._jobs.registry]

    async def serve(self, dispatcher: Dispatcher) -> None:
        """See `Crew`."""
        self._dispatcher = dispatcher
        self.seat_of.clear()
        runner = SlotRunner(self._jobs.registry, say=self._say, config=self._config)
        self._runner = runner
        for line in dispatcher.lines:
            place = LocalPlace(self, runner)
            place.seat = Seat(place, bound=line)
            dispatcher.add(place.seat)
        await runner.start()
        await asyncio.get_running_loop().create_future()

    async def drain(self, _dispatcher: Dispatcher, /, grace_s: float) -> None:
        """See `Crew`."""
        await self._stop(grace_s)

    async def cut(self) -> None:
        """See `Crew`."""
        await self._stop(0.0)

    async def report(self, postgres: Postgres, host_id: int, dispatcher: Dispatcher) -> None:
        """See `Crew`: a worker has nothing to plan."""

    async def _stop(self, grace_s: float) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s + END_S):
                    await runner.stop(grace_s)

    def _say(self, message: FromSlot) -> None:
        assert self._dispatcher is not None, "the runner is made after it"
        match message:
            case Settled():
                seat = self.seat_of.get(message.lease_id)
                if seat is not None:
                    self._dispatcher.heard(seat, message)
                    if message.lease_id not in seat.hands:
                        del self.seat_of[message.lease_id]
            case Left():
                return
            case Spend():
                self._dispatcher.heard(self._seat_of_queue(message.queue), message)
            case Ready():
                for seat in self._dispatcher.seats:
                    self._dispatcher.heard(seat, message)
            case _:
                self._dispatcher.heard(next(iter(self._dispatcher.seats)), message)

    def _seat_of_queue(self, queue: str) -> Seat:
        assert self._dispatcher is not None, "the runner is made after it"
        return next(
            seat
            for seat in self._dispatcher.seats
            if seat.bound is not None and seat.bound.facts.queue == queue
        )


class LocalPlace:
    """A seat's way to the runner beside it; implements `Place`."""

    def __init__(self, crew: LocalCrew, runner: SlotRunner) -> None:
        self.seat: Seat | None = None
        self._crew = crew
        self._runner = runner

    def give(self, work: Work) -> None:
        """Let it run."""
        assert self.seat is not None, "set with the seat"
        self._crew.seat_of[work.lease_id] = self.seat
        self._runner.give(work)

    def answer(self, answer: SpendAnswer) -> None:
        """Pass on what was spent."""
        self._runner.answer(answer)

    def stop(self, grace_s: float) -> None:
        """The crew stops the runner itself, for all its seats."""
