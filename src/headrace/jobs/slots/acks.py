"""A lease in a slot: which of its jobs are open, and what is to be said of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.jobs.handling import DONE, Outcome, settled_outcome
from headrace.jobs.slots.messages import Settled, Work
from headrace.jobs.tasks import Task
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

_log = logger(__name__)


class LeaseInSlot:
    """Work that a slot was given; each of its jobs is noted once and said once."""

    __slots__ = ("_backoff", "_calls", "_has_said", "_noted", "_run_s", "_unsaid", "task", "work")

    def __init__(self, work: Work, task: Task, backoff: Backoff) -> None:
        self.work = work
        self.task = task
        self._backoff = backoff
        self._noted: set[int] | range = set()
        self._unsaid: dict[int, Outcome] = {}
        self._has_said = False
        self._calls = 0
        self._run_s = 0.0

    @property
    def open_count(self) -> int:
        """Jobs of which nothing was noted."""
        return len(self.work.ids) - len(self._noted)

    @property
    def has_old_payloads(self) -> bool:
        """Whether some payloads are not of the version that the task takes."""
        versions = self.work.versions
        return versions.count(self.task.version) != len(versions)

    def note_call(self, run_s: float) -> None:
        """A handler call ended."""
        self._calls += 1
        self._run_s += run_s

    def note(self, pick: int, outcome: Any) -> None:
        """What becomes of the job at place `pick`, whatever a handler put there; the first word counts."""
        if pick in self._noted or isinstance(self._noted, range):
            return
        attempt = self.work.attempts[pick] + 1
        final = settled_outcome(
            outcome, attempt=attempt, retries=self.work.retries, backoff=self._backoff
        )
        self._noted.add(pick)
        self._unsaid[pick] = final
        if final.word == "fail":
            _log.warning(
                "job_failed",
                queue=self.work.queue,
                job_id=self.work.ids[pick],
                attempt=attempt,
                error=final.error,
            )

    def note_all(self, picks: Iterable[int], outcome: Outcome) -> None:
        """The same for several."""
        for pick in picks:
            self.note(pick, outcome)

    def all_done(self) -> Settled:
        """What to say where one call did every job and spoke of none: no work a job."""
        self._noted = range(len(self.work.ids))
        return Settled(lease_id=self.work.lease_id, calls=self._calls, run_s=self._run_s)

    def take(self) -> Settled | None:
        """What was noted since the last time; None for nothing."""
        noted, self._unsaid = self._unsaid, {}
        if not noted:
            return None
        calls, run_s = self._calls, self._run_s
        self._calls, self._run_s = 0, 0.0
        is_whole = not self._has_said and len(noted) == len(self.work.ids)
        self._has_said = True
        outcomes = list(noted.values())
        if is_whole and all(outcome is DONE for outcome in outcomes):
            return Settled(lease_id=self.work.lease_id, calls=calls, run_s=run_s)
        results = [outcome.result for outcome in outcomes]
        queues = [outcome.queue for outcome in outcomes]
        return Settled(
            lease_id=self.work.lease_id,
            ids=[self.work.ids[pick] for pick in noted],
            words=[outcome.word for outcome in outcomes],
            delays_s=[outcome.after_s for outcome in outcomes],
            errors=[outcome.error for outcome in outcomes],
            tracebacks=[outcome.traceback for outcome in outcomes],
            results=results if any(result is not None for result in results) else (),
            queues=queues if any(queues) else (),
            calls=calls,
            run_s=run_s,
        )


def returned_later(work: Work, after_s: float) -> Settled:
    """All jobs of `work` back as they came, to be offered again after `after_s`."""
    jobs = len(work.ids)
    return Settled(
        lease_id=work.lease_id,
        ids=work.ids,
        words=["snooze"] * jobs,
        delays_s=[after_s] * jobs,
        errors=[""] * jobs,
        tracebacks=[""] * jobs,
    )
