"""Handles: what `enqueue` and `group` return to their caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.engines.caller_transaction import Transaction
from headrace.jobs.bridge import Bridge, View
from headrace.jobs.errors import GroupClosed, InvalidTask
from headrace.jobs.model import Job, NewJob, Why


class JobService(Protocol):
    """The verbs of `Jobs` that tasks and handles call."""

    async def enqueue_many(
        self,
        jobs: Sequence[NewJob],
        *,
        tx: Transaction | None = None,
        group: Group | None = None,
    ) -> list[int]:
        """Enqueue jobs; return their ids in order."""

    async def result(
        self, job_id: int, *, timeout_s: float | None = None, keeps_result: bool = True
    ) -> Any:
        """The result of a job."""

    async def job(self, job_id: int) -> Job:
        """The job in its current state."""

    async def why(self, job_id: int) -> Why:
        """Why the job is in its state."""

    async def cancel(self, job_id: int, *, tx: Transaction | None = None) -> None:
        """Cancel a waiting job."""


class Group:
    """An open group. Jobs can join it until its block ends."""

    def __init__(self, group_id: int) -> None:
        self.id = group_id
        self.is_open = True

    def require_open(self) -> None:
        """Raises: GroupClosed."""
        if not self.is_open:
            raise GroupClosed(self.id)

    def __repr__(self) -> str:
        return f"Group(id={self.id}, is_open={self.is_open})"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where jobs were enqueued: the service, and what their handles need of the task."""

    jobs: JobService
    keeps_result: bool
    bridge: Callable[[], Bridge] | None


class JobRef(int):
    """A job's id. It is an `int`; its methods query the database."""

    _origin: Origin

    @classmethod
    def of(cls, job_id: int, origin: Origin) -> JobRef:
        """The handle of job `job_id`, enqueued at `origin`."""
        ref = cls(job_id)
        ref._origin = origin
        return ref

    @property
    def id(self) -> int:
        """The id as a plain number."""
        return int(self)

    @property
    def sync(self) -> View:
        """The same methods for sync code: `job.sync.result(timeout_s=5)`. Raises: InvalidTask."""
        bridge = self._origin.bridge
        if bridge is None:
            raise InvalidTask(
                f"job {int(self)} belongs to no app: enqueue it through an app's task"
            )
        return View(bridge(), self)

    async def result(self, timeout_s: float | None = None) -> Any:
        """Wait up to `timeout_s` for the job to end; return what its handler returned.

        Raises: JobFailed, ResultGone, NoResultKept, ResultLate (a TimeoutError), JobUnknown.
        """
        keeps_result = self._origin.keeps_result
        return await self._origin.jobs.result(
            int(self), timeout_s=timeout_s, keeps_result=keeps_result
        )

    async def job(self) -> Job:
        """The job in its current state."""
        return await self._origin.jobs.job(int(self))

    async def why(self) -> Why:
        """Why the job is in its state."""
        return await self._origin.jobs.why(int(self))

    async def cancel(self, *, tx: Transaction | None = None) -> None:
        """Cancel the job while it waits, inside `tx` if given. Raises: JobNotWaiting."""
        await self._origin.jobs.cancel(int(self), tx=tx)

    def __repr__(self) -> str:
        return f"JobRef({int(self)})"

    def __str__(self) -> str:
        return str(int(self))
