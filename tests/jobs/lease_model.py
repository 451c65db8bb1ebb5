"""A model of jobs, leases, keys, groups and counts, which the tests compare with PostgreSQL.

`clock` counts the steps of a test: a job that became due in an earlier step is claimed first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.jobs.outcomes import Outcome

LOSSES_MAX = 3
WAITING = ("scheduled", "ready")
ENDED = ("failed", "cancelled", "quarantined")
FINAL_STATES = {"done": "done", "fail": "failed", "cancel": "cancelled"}
COUNTED = {
    "done": "done",
    **dict.fromkeys(("fail", "quarantined"), "failed"),
    "cancel": "cancelled",
    **dict.fromkeys(("retry", "snooze", "moved"), "retried"),
    "lost": "lost",
}


@dataclass
class JobModel:
    """A job that a caller enqueued."""

    id: int
    queue: str
    priority: int = 5
    key: str | None = None
    group: int | None = None
    lane: str | None = None
    due: int = 0
    state: str = "ready"
    attempt: int = 0
    losses: int = 0
    error: str | None = None

    @property
    def row(self):
        """The columns of the stored row."""
        return (
            self.id,
            self.queue,
            self.state,
            self.priority,
            self.attempt,
            self.losses,
            self.lane,
            self.key,
            self.group,
            self.error,
        )


@dataclass
class LeaseModel:
    """A lease with the jobs that have no outcome yet."""

    id: int
    queue: str
    holder: object
    ids: list[int]
    open: set[int] = field(default_factory=set)


class LeaseOracle:
    """Expected rows after each step."""

    def __init__(self, keeping=()):
        self.keeping = frozenset(keeping)
        """Queues that keep done jobs."""
        self.clock = 0
        self.jobs: dict[int, JobModel] = {}
        self.leases: dict[int, LeaseModel] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.groups: dict[int, Counter] = {}
        self.callbacks: dict[int, Counter] = {}
        self.counts: dict[str, Counter] = defaultdict(Counter)

    def add(self, job_id, queue, *, key=None, **columns):
        """Enqueue a job, unless another unfinished one has its key. Return the expected id."""
        if key is not None and (queue, key) in self.keys:
            return self.keys[queue, key]
        if key is not None:
            self.keys[queue, key] = job_id
        self.jobs[job_id] = JobModel(job_id, queue, key=key, due=self.clock, **columns)
        return job_id

    def of(self, *states, queue=None):
        """Jobs in one of these states."""
        found = [job for job in self.jobs.values() if job.state in states]
        return [job for job in found if queue in (None, job.queue)]

    def due(self, queue, *, is_turned=False):
        """Due jobs of a queue without a lane, in the order of a claim."""
        found = [job for job in self.of("ready", queue=queue) if job.lane is None]
        sign = -1 if is_turned else 1
        return sorted(found, key=lambda job: (sign * job.priority, job.due, job.id))

    def claimed(self, queue, *, leases_max, batch, is_turned=False):
        """The leases that a claim gives: jobs with losses alone, others in batches."""
        taken, risky, safe = [], 0, 0
        for job in self.due(queue, is_turned=is_turned)[: leases_max * batch]:
            risky += job.losses > 0
            safe += job.losses == 0
            if risky + -(-safe // batch) > leases_max:
                break
            taken.append(job)
        taken.sort(key=lambda job: (job.priority, job.due, job.id))
        alone = [[job.id] for job in taken if job.losses]
        together = [job.id for job in taken if not job.losses]
        parts = [together[i : i + batch] for i in range(0, len(together), batch)]
        order = {job.id: place for place, job in enumerate(taken)}
        return sorted(alone + parts, key=lambda ids: order[ids[0]])

    def lease(self, lease_id, queue, holder, ids):
        """Lease jobs."""
        for job_id in ids:
            assert self.jobs[job_id].state == "ready"
            assert self.jobs[job_id].queue == queue
            self.jobs[job_id].state, self.jobs[job_id].error = "leased", None
        self.leases[lease_id] = LeaseModel(lease_id, queue, holder, list(ids), set(ids))
        self.counts[queue]["claimed"] += len(ids)

    def settle(self, outcomes: Mapping[int, Mapping[int, Outcome]]):
        """Settle jobs of several leases in one statement. Keys are released before they move."""
        recorded = []
        for lease_id, some in outcomes.items():
            lease = self.leases[lease_id]
            recorded += [
                (self.jobs[job], given) for job, given in some.items() if job in lease.open
            ]
            lease.open -= some.keys()
            if not lease.open:
                del self.leases[lease_id]
        for job, given in recorded:
            self.counts[job.queue][self._counted(job, given)] += 1
            if given.kind in {"done", "fail", "cancel", "quarantined", "moved"} or (
                given.kind == "lost" and job.losses + 1 >= LOSSES_MAX
            ):
                self.keys.pop((job.queue, job.key), None)
        for job, given in recorded:
            self._apply(job, given)

    def give_back(self, lease_ids: Iterable[int], kind):
        """Settle all that is left of leases, as a sweep does. Return the number of jobs."""
        jobs = 0
        for lease_id in list(lease_ids):
            jobs += len(self.leases[lease_id].open)
            self.settle({lease_id: dict.fromkeys(self.leases[lease_id].open, Outcome(kind))})
        return jobs

    def end_waiting(self, job, state):
        """Cancel or delete a waiting job."""
        self.keys.pop((job.queue, job.key), None)
        job.state, job.error = state, "cancelled"
        self._finish(job, "cancelled")

    def retry(self, ids):
        """Put ended jobs back; of several with one key the newest. Return the retried ids."""
        back = []
        for job in sorted((self.jobs[i] for i in set(ids)), key=lambda job: -job.id):
            if job.state not in ENDED or (job.queue, job.key) in self.keys:
                continue
            if job.key is not None:
                self.keys[job.queue, job.key] = job.id
            job.state, job.attempt, job.losses = "ready", 0, 0
            job.group, job.error, job.due = None, None, self.clock
            back.append(job.id)
        return back

    def rows(self):
        """The rows of all jobs of which something is stored."""
        return sorted(job.row for job in self.jobs.values() if job.state != "gone")

    def _counted(self, job, given):
        is_last = given.kind == "lost" and job.losses + 1 >= LOSSES_MAX
        if is_last or (given.kind == "moved" and given.queue == "nowhere"):
            return "failed"
        return COUNTED.get(given.kind, "")

    def _apply(self, job, given):
        kind = given.kind
        if kind == "moved" and given.queue == "nowhere":
            kind, given = "fail", Outcome("fail", None, "send_to: queue nowhere is not known")
        if kind == "lost" and job.losses + 1 >= LOSSES_MAX:
            kind = "quarantined"
        if kind in FINAL_STATES or kind == "quarantined":
            self._end(job, kind, given.error)
            return
        job.state = "scheduled" if kind in {"retry", "snooze"} else "ready"
        job.attempt += kind == "retry"
        job.losses += kind == "lost"
        job.error = (given.error or None) if kind == "retry" else None
        if kind == "moved":
            job.queue, job.attempt, job.losses, job.due = given.queue, 0, 0, self.clock
            if (job.queue, job.key) in self.keys:
                job.key = None
            if job.key is not None:
                self.keys[job.queue, job.key] = job.id

    def _end(self, job, kind, error):
        job.state = FINAL_STATES.get(kind, kind)
        job.attempt += kind == "fail"
        job.losses += kind == "quarantined"
        job.error = None if kind == "done" else error
        if kind == "quarantined" and not error:
            job.error = f"the process that ran it died {job.losses} times"
        self._finish(job, job.state)
        if kind == "done" and job.queue not in self.keeping:
            job.state = "gone"

    def _finish(self, job, state):
        if job.group is None:
            return
        counts = self.groups[job.group]
        counts[state] += 1
        counts["pending"] -= 1
        if not counts["pending"]:
            self.callbacks[job.group] = self.groups.pop(job.group)
