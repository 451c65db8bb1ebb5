"""What `enqueue` gives back: the job's id, and what can be asked of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engines.caller_transaction import Transaction
from headrace.jobs.bridge import View
from headrace.jobs.errors import InvalidTask
from headrace.jobs.model import Job, Why

if TYPE_CHECKING:
    from headrace.jobs.bridge import Bridge
    from headrace.jobs.service import Jobs


@dataclass(frozen=True, slots=True)
class Origin:
    """Where jobs were enqueued, and what of it concerns those who ask for them."""

    jobs: Jobs
    keeps_result: bool
    bridge: Callable[[], Bridge] | None


class JobRef(int):
    """A job's id, an `int` wherever one is wanted; its verbs ask the database."""

    _origin: Origin

    @classmethod
    def of(cls, job_id: int, origin: Origin) -> JobRef:
        """The job `job_id`, enqueued at `origin`."""
        ref = cls(job_id)
        ref._origin = origin
        return ref

    @property
    def id(self) -> int:
        """The id as a plain number."""
        return int(self)

    @property
    def sync(self) -> View:
        """The same verbs for sync code: `job.sync.result(timeout_s=5)`. Raises: InvalidTask."""
        bridge = self._origin.bridge
        if bridge is None:
            raise InvalidTask(
                f"job {int(self)} belongs to no app: enqueue it through an app's task"
            )
        return View(bridge(), self)

    async def result(self, timeout_s: float | None = None) -> Any:
        """What its handler returned, waiting for it up to `timeout_s`.

        Raises: JobFailed, ResultGone, NoResultKept, ResultLate (a TimeoutError), JobUnknown.
        """
        keeps_result = self._origin.keeps_result
        return await self._origin.jobs.result(
            int(self), timeout_s=timeout_s, keeps_result=keeps_result
        )

    async def job(self) -> Job:
        """The job as it stands."""
        return await self._origin.jobs.job(int(self))

    async def why(self) -> Why:
        """Why it is where it is."""
        return await self._origin.jobs.why(int(self))

    async def cancel(self, *, tx: Transaction | None = None) -> None:
        """Cancel it while it waits, in the caller's transaction if `tx` is given. Raises: JobNotWaiting."""
        await self._origin.jobs.cancel(int(self), tx=tx)

    def __repr__(self) -> str:
        return f"JobRef({int(self)})"

    def __str__(self) -> str:
        return str(int(self))
