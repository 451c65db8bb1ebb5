"""What a run of the scenario `jobs` must not do; some checks look at every start of a handler.

A run of a handler counts while its lease exists. A host that was cut off for longer than a lease
does not know yet that other hosts have its jobs; what it still runs is fenced: it records nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tests.kit import checkers
from tests.kit.checkers import Finding
from tests.kit.history import START

from headrace.jobs import Batch, JobContext
from verification.simulation.jobs.tables import JobsTables, seconds
from verification.simulation.loop import CURRENT
from verification.simulation.world import World

RETURN_S: Final = 5.0
"""From the end of a lease to the return of its jobs: a sweep every 3 s, and its statements."""
CALM_S: Final = 30.0
"""After a fault of PostgreSQL or of a scheduler, returns may be late for this time."""
KEPT_WITH_SCHEDULER: Final = ("postgres", "scheduler-0", "scheduler-1")


class JobsChecks:
    """The checks of one run."""

    def __init__(self, world: World, tables: JobsTables) -> None:
        self._world = world
        self._tables = tables
        self._found: list[Finding] = []
        self._runs: dict[str, dict[int, tuple[int, int, Any, str]]] = defaultdict(dict)
        """Runs by queue: job, lease, lane and process."""
        self._numbers = 0
        self._busy_s = 0.0
        """When a fault last touched what returns leases."""
        self._terms: dict[int, str] = {}

    def note(self, fault: str, subject: Any, text: str) -> None:
        """Add a finding."""
        if len(self._found) < 20:
            self._found.append(Finding(fault, subject, f"at {self._world.now_s:.3f} s: {text}"))

    # Handlers

    @contextmanager
    def running(self, queue: str, job: JobContext[Any], **facts: Any) -> Iterator[None]:
        """Record a run of a handler, and check the limits at its start."""
        lane = None if job.lane is None else str(job.lane)
        with self._run(queue, [job.id], job.lease_id, lane):
            facts |= {} if lane is None else {"lane": lane}
            with self._world.recorder.running(queue, job=job.id, lease=job.lease_id, **facts):
                yield

    @contextmanager
    def running_batch(self, queue: str, batch: Batch[Any]) -> Iterator[None]:
        """The same for a batch."""
        ids, lease = [job.id for job in batch], batch[0].lease_id
        record = self._world.recorder.running(queue, job=ids, lease=lease)
        with self._run(queue, ids, lease, None), record:
            yield

    @contextmanager
    def _run(self, queue: str, jobs: list[int], lease: int, lane: Any) -> Iterator[None]:
        self._numbers += 1
        number, process = self._numbers, CURRENT.get().name
        self._runs[queue][number] = (jobs[0], lease, lane, process)
        self._check_start(queue, jobs[0], lease, lane)
        try:
            yield
        finally:
            self._runs[queue].pop(number, None)

    def forget_process(self, name: str) -> None:
        """A process has died with its runs."""
        for runs in self._runs.values():
            for number in [n for n, run in runs.items() if run[3] == name]:
                del runs[number]

    def _check_start(self, queue: str, job: int, lease: int, lane: Any) -> None:
        if not self._holds(job, lease):
            host = self._tables.host_of.get(lease)
            if host is not None and self._tables.is_live(host):
                self.note("stale start", job, f"lease {lease} does not hold it; host {host} lives")
            return
        runs = [run for run in self._runs[queue].values() if self._holds(run[0], run[1])]
        if sum(run[0] == job for run in runs) > 1:
            self.note("overlapping", job, f"two runs of job {job} hold its leases")
        if queue == "counted":
            count = sum(run[2] == lane for run in runs)
            if count > 2:
                self.note("over concurrency", lane, f"{count} jobs at once")
        if queue == "capped":
            slots = {run[3] for run in runs}
            if len(slots) > 2:
                self.note("over slots_max", queue, f"{sorted(slots)} work at once")

    def _holds(self, job: int, lease_id: int) -> bool:
        """Whether a run's lease holds: its host is not expired and the job has no outcome."""
        lease = self._tables.lease.get(lease_id)
        if lease is None or job in lease.settled:
            return False
        return self._tables.is_live(lease.host)

    # The state

    def look(self) -> None:
        """Check the state now."""
        world, tables = self._world, self._tables
        names = KEPT_WITH_SCHEDULER
        if any(world.is_disturbed(name) for name in names) or not self.is_up():
            self._busy_s = world.now_s
        head = tables.plan.get(1)
        if (
            head is not None
            and self._terms.setdefault(head["term"], head["leader"]) != (head["leader"])
        ):
            self.note("two leaders", head["term"], f"{self._terms[head['term']]} and {head}")
        self._look_at_lanes()
        if world.now_s - self._busy_s < CALM_S:
            return
        late = tables.now() - seconds(RETURN_S)
        for lease in tables.lease.values():
            host = tables.host.get(lease.host)
            if host is not None and host.expires_at < late:
                self.note("late", lease.id, f"host {host.name} expired at {host.expires_at}")

    def _look_at_lanes(self) -> None:
        """Counts of waiting jobs, with the journal, are the jobs in the lanes."""
        tables, sums = self._tables, Counter[tuple[int, str]]()
        for (_, lane, queue), row in tables.lane_queue.items():
            sums[queue, lane] += row.waiting
        for event in tables.lane_event.values():
            sums[event.queue, event.lane] += event.k
        for job in tables.laned.values():
            sums[job.queue, str(job.lane)] -= 1
        for place, over in sums.items():
            if over:
                self.note("lane counts", place, f"{over} more jobs are counted than wait")

    def is_up(self) -> bool:
        """Whether PostgreSQL responds."""
        return self._tables.model.is_up and not self._tables.model.process.is_paused

    def begin_calm(self) -> None:
        """All faults have ended."""
        self._busy_s = self._world.now_s

    def is_settled(self) -> bool:
        """Whether every job except those of crons has ended, after a calm minute."""
        tables = self._tables
        if self._world.now_s - self._busy_s < CALM_S:
            return False
        crons = {queue for name, queue in tables.queue_by_name.items() if name == "minutely"}
        left = [job for job in tables.ready.values() if job.queue not in crons]
        return not left and not len(tables.laned) and not len(tables.lease)

    # The end

    def seen(self) -> list[Finding]:
        """What `look` and runs of handlers found."""
        return list(self._found)

    def findings(self) -> list[Finding]:
        """All broken promises."""
        history, tables = self._world.recorder.history, self._tables
        stored = {key for key, _ in tables.ready.items()} | {key for key, _ in tables.laned.items()}
        stored |= {key for key, _ in tables.failed.items()}
        stored |= {job.id for lease in tables.lease.values() for job in lease.open_jobs}
        found = [*self._found, *checkers.lost(history, stored=stored)]
        found += checkers.over_limit(_of(history, "rated"), starts_max=5, window_s=10.0)
        found += checkers.doubled(history, what="callback", by="group", witness="job", kind=START)
        found += self._groups() + self._outcomes(stored) + self._counts() + self._crons()
        found += self._hosts()
        return found

    def _groups(self) -> list[Finding]:
        """Acknowledged groups call back, once."""
        history, tables = self._world.recorder.history, self._tables
        called = set(history.reported(START, "callback", "group"))
        found = []
        for event in history.of("ok", what="group"):
            for group in event.facts["group"]:
                if group not in called:
                    text = f"no callback ran; row {tables.group.get(group)}"
                    found.append(Finding("no callback", group, text))
        return found

    def _outcomes(self, stored: set[int]) -> list[Finding]:
        """Every job ends once."""
        found = []
        for job, outcome in self._tables.ended.items():
            if ", " in outcome:
                found.append(Finding("two outcomes", job, outcome))
            elif outcome == "done" and job in stored:
                found.append(Finding("two outcomes", job, "it is done and waits"))
        return found

    def _counts(self) -> list[Finding]:
        """Counts per minute and totals equal what was settled."""
        tables, sums = self._tables, Counter[str]()
        for counts in (*tables.minute.values(), *(row[2] for row in tables.count.values())):
            for name in ("done", "failed"):
                sums[name] += int(counts.get(name, 0))
        ended = Counter(tables_of for _, tables_of in tables.ended.items())
        wanted = {"done": ended["done"], "failed": ended["fail"] + ended["quarantined"]}
        return [
            Finding("counts", name, f"{sums[name]} are counted, {count} ended so")
            for name, count in wanted.items()
            if sums[name] != count
        ]

    def _hosts(self) -> list[Finding]:
        """Every host works again, and only leaders wrote plans."""
        tables = self._tables
        live = {host.name for host in tables.host.values() if tables.is_live(host.id)}
        found = [
            Finding("host missing", name, "its process has no live row")
            for name in ("agent-0", "agent-1", "agent-2", "work")
            if name not in live
        ]
        return found + [
            Finding("not the leader", writer, f"it wrote in term {term}; {leader} led in {own}")
            for _, (writer, term, leader, own) in tables.written.items()
            if (writer, term) != (leader, own)
        ]

    def _crons(self) -> list[Finding]:
        """Each scheduled moment has one job."""
        tables = self._tables
        found = [
            Finding("doubled", moment, "a scheduled moment has two jobs")
            for moment, job in tables.fired.items()
            if job < 0
        ]
        fired = Counter(job for _, job in tables.fired.items())
        found += [Finding("doubled", job, "two moments") for job, n in fired.items() if n > 1]
        return found


def _of(history: Any, queue: str) -> Any:
    """The starts of one queue, and the deaths of processes."""
    kept = tuple(e for e in history.events if e.what == queue or e.kind == "lost")
    return type(history)(kept)
