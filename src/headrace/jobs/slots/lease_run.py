"""A lease in the slot that runs it: outcomes per job, and the bisection of a batch that raised."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from headrace.jobs.acks import InFlightLease
from headrace.jobs.messages import Ack, Work
from headrace.jobs.outcomes import DONE, Outcome, final_outcome
from headrace.jobs.tasks import Task
from headrace.kernel.logs import logger
from headrace.kernel.resilience import Backoff

_log: Final = logger(__name__)


class LeaseRun(InFlightLease):
    """A lease that a slot runs. Each job gets one outcome and is reported once."""

    __slots__ = ("_backoff", "_calls", "_has_reported", "_run_s", "_unsent", "task", "work")

    def __init__(self, work: Work, task: Task, backoff: Backoff) -> None:
        super().__init__(work.lease_id, work.ids, work.attempts, retries=work.retries)
        self.work = work
        self.task = task
        self._backoff = backoff
        self._unsent: dict[int, Outcome] = {}
        """Outcomes that no ack has carried yet, by the job's index in the lease."""
        self._has_reported = False
        self._calls = 0
        self._run_s = 0.0

    @property
    def has_old_payloads(self) -> bool:
        """Whether some payloads are not of the version that the task takes."""
        versions = self.work.versions
        return versions.count(self.task.version) != len(versions)

    def note_call(self, run_s: float) -> None:
        """Count a handler call that ended."""
        self._calls += 1
        self._run_s += run_s

    def note(self, index: int, outcome: Any) -> None:
        """Record the outcome of the job at `index`, unvalidated; the first outcome wins."""
        job_id = self.ids[index]
        if not self.is_open(job_id):
            return
        attempt = self.attempts[index] + 1
        final = final_outcome(outcome, attempt=attempt, retries=self.retries, backoff=self._backoff)
        self.close((job_id,))
        self._unsent[index] = final
        if final.kind == "fail":
            _log.warning(
                "job_failed",
                queue=self.work.queue,
                job_id=job_id,
                attempt=attempt,
                error=final.error,
            )

    def note_all(self, indexes: Iterable[int], outcome: Outcome) -> None:
        """Record the same outcome for several jobs."""
        for index in indexes:
            self.note(index, outcome)

    def ack_all_done(self) -> Ack:
        """An ack of the whole lease, for one call that ran every job and set no outcome.

        It costs no work per job.
        """
        self.close(None)
        return Ack(lease_id=self.lease_id, calls=self._calls, run_s=self._run_s)

    def take_ack(self) -> Ack | None:
        """Pop the outcomes noted since the last ack; None where there are none."""
        noted, self._unsent = self._unsent, {}
        if not noted:
            return None
        calls, run_s = self._calls, self._run_s
        self._calls, self._run_s = 0, 0.0
        is_whole = not self._has_reported and len(noted) == len(self.ids)
        self._has_reported = True
        outcomes = list(noted.values())
        if is_whole and all(outcome is DONE for outcome in outcomes):
            return Ack(lease_id=self.lease_id, calls=calls, run_s=run_s)
        results = [outcome.result for outcome in outcomes]
        queues = [outcome.queue for outcome in outcomes]
        return Ack(
            lease_id=self.lease_id,
            ids=[self.ids[index] for index in noted],
            kinds=[outcome.kind for outcome in outcomes],
            delays_s=[outcome.after_s for outcome in outcomes],
            errors=[outcome.error for outcome in outcomes],
            tracebacks=[outcome.traceback for outcome in outcomes],
            results=results if any(result is not None for result in results) else (),
            queues=queues if any(queues) else (),
            calls=calls,
            run_s=run_s,
        )


def snooze_ack(work: Work, after_s: float) -> Ack:
    """An ack that returns all jobs of `work` unchanged, due again after `after_s`."""
    jobs = len(work.ids)
    return Ack(
        lease_id=work.lease_id,
        ids=work.ids,
        kinds=["snooze"] * jobs,
        delays_s=[after_s] * jobs,
        errors=[""] * jobs,
        tracebacks=[""] * jobs,
    )


class Bisect:
    """Find the jobs that make a batch raise: run it again in halves, then singly. No I/O.

    Only a job that fails alone is blamed, so one bad job never fails its neighbors. A good job
    among n runs at most ceil(log2 n) + 1 times. 100 jobs with one bad job take at most 15 calls;
    100 bad jobs take 199.
    """

    def __init__(self, jobs: Sequence[int]) -> None:
        self._runs = [jobs] if jobs else []

    def next_run(self) -> Sequence[int] | None:
        """The jobs of the next call; None where no job is left."""
        return self._runs.pop() if self._runs else None

    def split(self, jobs: Sequence[int]) -> None:
        """Run `jobs`, whose call raised, again in two halves, before all others."""
        middle = (len(jobs) + 1) // 2
        self._runs += [half for half in (jobs[middle:], jobs[:middle]) if half]

    def put_back(self, jobs: Sequence[int]) -> None:
        """Run `jobs` by themselves next: they could not start together with their run."""
        if jobs:
            self._runs.append(jobs)

    def give_up(self) -> list[int]:
        """Remove and return every job that has not run yet."""
        left = [job for run in self._runs for job in run]
        self._runs.clear()
        return left
