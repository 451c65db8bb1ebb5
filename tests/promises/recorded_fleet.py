"""Processes that run `recorded_app`, the jobs they work on, and the history of both sides.

ROLES are the commands that work jobs: what is promised of one is promised of each.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from tests.kit.checkers import doubled, lost
from tests.kit.history import Recorder, read_history
from tests.kit.processes import HeadraceProcess, is_alive

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, JobState, Registry

ROLES = ("work", "agent")
QUEUES = ("noted", "laned", "told", "gated", "locking")
LEASE_S, HEARTBEAT_S = 1.5, 0.3
"""A host that fell silent has lost its jobs soon, so that tests see it happen."""
SETTINGS = {
    "HEADRACE_JOBS_LEASE": f"{LEASE_S}s",
    "HEADRACE_JOBS_HEARTBEAT": f"{HEARTBEAT_S}s",
    "HEADRACE_JOBS_POLL": "200ms",
    "HEADRACE_JOBS_GRACE": "1s",
    "HEADRACE_JOBS_RETRY_FIRST": "50ms",
    "HEADRACE_JOBS_RETRY_MAX": "100ms",
    "HEADRACE_JOBS_LOSSES_MAX": "50",
    "HEADRACE_POSTGRES_CONNECT_TIMEOUT": "500ms",
    "HEADRACE_POSTGRES_STATEMENT_TIMEOUT": "500ms",
}
HOSTS = compile_query("hosts", "-- Who registered.\nSELECT id FROM headrace.host")
MAKE_EFFECTS = compile_query(
    "make_effects", "-- What handlers write.\nCREATE TABLE effect (job bigint, lease bigint)"
)
EFFECTS = compile_query("effects", "-- What they wrote.\nSELECT job FROM effect ORDER BY job")
EXPIRE = compile_query(
    "expire",
    "-- Hosts fell silent.\nUPDATE headrace.host SET expires_at = now() WHERE kind <> 'taker'",
)
LEASED = compile_query(
    "leased",
    "-- Jobs handed out.\nSELECT coalesce(sum(cardinality(ids)), 0) FROM headrace.job_lease",
)


class RecordedFleet:
    """Start and kill processes, enqueue and look; `history` is what all of them noted."""

    application = "recorded_app:app"
    settings = SETTINGS

    def __init__(self, folder: Path, postgres, *, postgres_url: str, valkey_url: str) -> None:
        self.folder = folder
        self.postgres = postgres
        self.recorder = Recorder(folder / "history")
        self.jobs = self.jobs_on(postgres)
        self._urls = {"HEADRACE_POSTGRES_URL": postgres_url, "HEADRACE_VALKEY_URL": valkey_url}
        self._processes: list[HeadraceProcess] = []

    @property
    def history(self):
        """Everything that was noted so far."""
        return read_history(self.folder / "history")

    @property
    def processes(self) -> list[HeadraceProcess]:
        """Those that were started and not killed here."""
        return list(self._processes)

    def jobs_on(self, postgres):
        """A service of a process that only enqueues and looks."""
        registry = Registry()
        for queue in QUEUES:
            registry.queue(queue)
        return Jobs(postgres, JobsConfig(), registry)

    def start(
        self, role: str, *, host: str = "host", url: str | None = None, **env: str
    ) -> HeadraceProcess:
        """One more process, perhaps with another URL of the database or other settings.

        Agents that run at once are of several hosts.
        """
        own = {"HEADRACE_POSTGRES_URL": url} if url else {}
        environment = self.environment(**own, **env)
        arguments = [role, self.application, *(["--name", host] if role == "agent" else [])]
        process = HeadraceProcess(arguments, folder=self.folder, env=environment)
        self._processes.append(process)
        return process

    def environment(self, **more: str) -> dict[str, str]:
        """What a process of this fleet is told."""
        paths = [str(self.folder), str(Path(__file__).parent)]
        return {
            **self.settings,
            **self._urls,
            "HISTORY": str(self.folder / "history"),
            "PYTHONPATH": os.pathsep.join(paths),
            **more,
        }

    def kill(self, process: HeadraceProcess) -> None:
        """SIGKILL it with all below it; from here on what it ran counts no more."""
        self.note_lost(process)
        self._processes.remove(process)
        process.kill_all()

    def note_lost(self, process: HeadraceProcess) -> None:
        """What it runs counts no more: its host is dead, or was taken for dead."""
        for pid in process.family():
            self.recorder.note("lost", "process", pid=pid)

    def signal(self, process: HeadraceProcess, number: signal.Signals) -> None:
        """Send a signal to it and all below it."""
        for pid in process.family():
            os.kill(pid, number)

    async def enqueue(self, jobs, *, service=None):
        """Enqueue, noting what was asked and answered; ids."""
        keys = [job.payload.get("key") for job in jobs]
        with self.recorder.asking("enqueue", key=keys) as asked:
            ids = await (service or self.jobs).enqueue_many(jobs)
            asked.ok(job=ids)
        return ids

    async def ended(self, ids) -> bool:
        """Whether all of them are done, after a sweep of what dead hosts left."""
        self._require_running()
        await self.jobs.sweep()
        for job in ids:
            if (await self.jobs.job(job)).state is not JobState.GONE:
                return False
        return True

    async def begin_effects(self) -> None:
        """Make the table that `gated` and `locking` write into."""
        await self.postgres.run(MAKE_EFFECTS)

    async def effects(self) -> list[int]:
        """Jobs whose effects were committed."""
        return [row["job"] for row in await self.postgres.all(EFFECTS)]

    def let_go(self) -> None:
        """End the waiting of `gated` and `locking`."""
        (self.folder / "go").touch()

    async def expire_hosts(self) -> None:
        """Let every host be as silent as if it was dead; those that live do not know."""
        await self.postgres.run(EXPIRE)

    async def has_hosts(self, count: int) -> bool:
        """Whether so many hosts registered."""
        return len(await self.hosts()) >= count

    async def hosts(self) -> list[int]:
        """Ids of those that registered."""
        self._require_running()
        return [row["id"] for row in await self.postgres.all(HOSTS)]

    async def leased(self) -> int:
        """Jobs that are handed out."""
        self._require_running()
        return await self.postgres.value(LEASED)

    def started(self) -> Counter:
        """How often each job started."""
        self._require_running()
        jobs: Counter = Counter()
        for event in self.history.of("start"):
            job = event.facts["job"]
            jobs.update(job if isinstance(job, list) else [job])
        return jobs

    def findings(self, stored=()):
        """What no fault may bring about: a job lost, a group that called back as two jobs."""
        history = self.history
        callbacks = doubled(history, what="told", by="group", witness="job", kind="start")
        return [*lost(history, stored=stored), *callbacks]

    def end(self) -> None:
        """Stop every process."""
        for process in self._processes:
            process.kill_all()
        self.recorder.close()

    def _require_running(self) -> None:
        """No process ended by itself: waiting for what it should do would tell nothing."""
        for process in self._processes:
            assert is_alive(process.pid), f"{process.out}\n{process.err}"
