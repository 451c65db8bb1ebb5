"""Processes that run `fleet_app`, the jobs they work on, and the history of both sides.

ROLES are the commands that work jobs: the promises hold for each.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.kit.checkers import Finding, doubled, lost
from tests.kit.history import History, HistoryReader, Recorder
from tests.kit.processes import HeadraceProcess, descendants, is_alive
from tests.kit.stepped_clock import OFFSET_FILE

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, JobState, NewJob, Registry

ROLES = ("work", "agent")
KEPT: Final = {"retries": 50, "keep_done": "1h"}
QUEUES: Final[dict[str, dict[str, Any]]] = {
    "noted": {"retries": 50},
    "laned": {"retries": 50},
    "called_back": {"retries": 50},
    "gated": {"batch": 5, "retries": 50},
    "locking": {"retries": 50},
    "fenced": KEPT,
    "batched": {"batch": 10, **KEPT},
    "fails": {"retries": 1},
    "narrow": {"slots": (0, 2), "retries": 50},
    "stopped": {"slots": (0, 0), "retries": 50},
    "held": {"batch": 5, "retries": 3},
    "poison": {"batch": 10, "retries": 3},
    "concurrent": {"retries": 3},
    "hangs": {"retries": 1},
    "sleeps": {"retries": 1},
    "blocks": {"retries": 1},
    "forks": {"batch": 5},
    "quick": {"batch": 10},
    "grows": {"batch": 1},
    "splits": {},
    "splits_async": {},
    "leaves": {"retries": 0},
    "starves": {"retries": 0},
}
"""Queues with the options that both sides declare."""
LEASE_S, HEARTBEAT_S = 1.5, 0.3
"""Short, so that a silent host loses its jobs soon."""
SETTINGS = {
    "JOBS_LEASE": f"{LEASE_S}s",
    "JOBS_HEARTBEAT": f"{HEARTBEAT_S}s",
    "JOBS_POLL": "200ms",
    "JOBS_GRACE": "1s",
    "JOBS_RETRY_FIRST": "50ms",
    "JOBS_RETRY_MAX": "100ms",
    "JOBS_LOSSES_MAX": "50",
    "POSTGRES_CONNECT_TIMEOUT": "500ms",
    "POSTGRES_STATEMENT_TIMEOUT": "500ms",
}
LONG_LEASE = {
    "JOBS_LEASE": "30m",
    "JOBS_HEARTBEAT": "10m",
    "POSTGRES_CONNECT_TIMEOUT": "30s",
    "POSTGRES_STATEMENT_TIMEOUT": "30s",
}
"""The process checks its leases only after the end of the test."""
SLOT_SETTINGS = {
    "JOBS_POLL": "200ms",
    "JOBS_GRACE": "2s",
    "JOBS_RETRY_FIRST": "20ms",
    "JOBS_RETRY_MAX": "50ms",
    "JOBS_FLOATS": "2",
}
"""Leases that last longer than a test."""
HOSTS = compile_query("hosts", "-- Registered hosts.\nSELECT id FROM headrace.host")
MAKE_EFFECTS = compile_query(
    "make_effects",
    "-- Rows of handlers.\nCREATE TABLE IF NOT EXISTS effect (job bigint, lease bigint)",
)
EFFECTS = compile_query("effects", "-- Rows of handlers.\nSELECT job FROM effect ORDER BY job")
EXPIRE = compile_query(
    "expire",
    "-- Expire all hosts.\nUPDATE headrace.host SET expires_at = now() WHERE kind <> 'taker'",
)
LEASED = compile_query(
    "leased",
    "-- Leased jobs.\nSELECT coalesce(sum(cardinality(ids)), 0) FROM headrace.job_lease",
)


class Fleet:
    """Starts and kills processes and enqueues jobs; `history` is what both sides recorded."""

    def __init__(self, folder: Path, postgres, *, urls: dict[str, str], **settings: str) -> None:
        self.folder, self.postgres = folder, postgres
        self.recorder = Recorder(folder / "history")
        self.settings = settings or SETTINGS
        self.jobs = self.jobs_on(postgres)
        self._urls = urls
        self._reader = HistoryReader(folder / "history")
        self._processes: list[HeadraceProcess] = []

    @property
    def history(self) -> History:
        return self._reader.read()

    @property
    def processes(self) -> list[HeadraceProcess]:
        """Those that were started and not killed here."""
        return list(self._processes)

    def jobs_on(self, postgres) -> Jobs:
        """A service of a process that only enqueues and reads."""
        registry = Registry()
        for queue, options in QUEUES.items():
            registry.queue(queue, **options)
        return Jobs(postgres, JobsConfig(), registry)

    def start(
        self,
        role: str = "agent",
        *,
        host: str = "host",
        app: str = "fleet_app:app",
        url: str | None = None,
        code: Path | None = None,
        **settings: str,
    ) -> HeadraceProcess:
        """One more process, perhaps with another URL of the database, settings or package."""
        own = {"POSTGRES_URL": url} if url else {}
        arguments = [role] if role == "flusher" else [role, app]
        arguments += ["--name", host] if role == "agent" else []
        env = self.environment(**own, **settings)
        if code is not None:
            env["PYTHONPATH"] = os.pathsep.join([str(code), env["PYTHONPATH"]])
        process = HeadraceProcess(arguments, folder=self.folder, env=env)
        self._processes.append(process)
        return process

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a process of this fleet; settings without their prefix."""
        settings = {**self.settings, **self._urls, **more}
        env = {f"HEADRACE_{name}": value for name, value in settings.items()}
        paths = [str(self.folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            **env,
            "HISTORY": str(self.folder / "history"),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "CLOCK_OFFSET": str(self.folder / OFFSET_FILE),
        }

    def kill(self, process: HeadraceProcess) -> None:
        self.note_lost(process)
        self._processes.remove(process)
        process.kill_all()

    def note_lost(self, process: HeadraceProcess) -> None:
        """End the runs of its processes: its host is dead, or was declared dead."""
        for pid in process.family():
            self.recorder.note("lost", "process", pid=pid)

    def signal(self, process: HeadraceProcess, number: signal.Signals) -> None:
        """Send a signal to it and all descendants, the last first to wake."""
        pids = process.family()
        for pid in reversed(pids) if number == signal.SIGCONT else pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def enqueue(self, jobs: list[NewJob], *, service: Jobs | None = None) -> list[int]:
        """Enqueue and record request and reply; return ids."""
        keys = [(job.payload or {}).get("key") for job in jobs]
        with self.recorder.asking("enqueue", key=keys) as asked:
            ids = await (service or self.jobs).enqueue_many(jobs)
            asked.ok(job=ids)
        return ids

    async def add(self, queue: str, count: int = 1, **payload: Any) -> list[int]:
        """Enqueue equal jobs; return ids."""
        return await self.enqueue([NewJob(queue=queue, payload=payload)] * count)

    async def ended(self, ids: list[int]) -> bool:
        """Whether all of them are done, after a sweep."""
        self._require_running()
        await self.jobs.sweep()
        states = [(await self.jobs.job(job)).state for job in ids]
        return all(state is JobState.GONE for state in states)

    async def state(self, job: int) -> JobState:
        return (await self.jobs.job(job)).state

    async def counts(self, queue: str) -> tuple[int, int, int]:
        """Jobs of a queue that are ready, leased and failed."""
        status = await self.jobs.queues.get(queue)
        return status.ready, status.leased, status.failed

    async def is_idle(self, queue: str) -> bool:
        return await self.counts(queue) == (0, 0, 0)

    async def begin_effects(self) -> None:
        await self.postgres.run(MAKE_EFFECTS)

    async def effect_rows(self) -> list[int]:
        return [row["job"] for row in await self.postgres.all(EFFECTS)]

    def let_go(self) -> None:
        (self.folder / "go").touch()

    async def expire_hosts(self) -> None:
        """Expire every host; live hosts are not notified."""
        await self.postgres.run(EXPIRE)

    async def host_ids(self) -> list[int]:
        self._require_running()
        return [row["id"] for row in await self.postgres.all(HOSTS)]

    async def has_hosts(self, count: int) -> bool:
        return len(await self.host_ids()) >= count

    async def leased(self) -> int:
        self._require_running()
        return await self.postgres.value(LEASED)

    def started(self) -> Counter:
        """How often each job started."""
        self._require_running()
        started: Counter = Counter()
        for event in self.history.of("start"):
            job = event.facts["job"]
            started.update(job if isinstance(job, list) else [job])
        return started

    def noted(self, word: str) -> list[tuple[int, int]]:
        """(job id, pid) of each step `word` that handlers recorded, in order."""
        return [(event.facts["job"], event.pid) for event in self.history.of(word)]

    def effects(self) -> list[int]:
        """Jobs whose step `effect` was recorded, sorted."""
        return sorted(job for job, _ in self.noted("effect"))

    def findings(self) -> list[Finding]:
        history = self.history
        callbacks = doubled(history, what="called_back", by="group", witness="job", kind="start")
        return [*lost(history, stored=()), *callbacks]

    def end(self) -> None:
        for process in self._processes:
            process.kill_all()
        self.recorder.close()

    def _require_running(self) -> None:
        """Fail at once if a process ended by itself."""
        for process in self._processes:
            assert is_alive(process.pid), f"{process.wait_exit()}: {process.out}\n{process.err}"


def open_fleet(folder, running_engines, postgres, database_url, **settings):
    """A fleet on a database of the shared engines; no process runs yet."""
    valkey_url = running_engines.endpoints.valkey_url
    urls = {"POSTGRES_URL": database_url, "VALKEY_URL": valkey_url}
    urls["VALKEY_PREFIX"] = f"test-{secrets.token_hex(4)}"
    return Fleet(folder, postgres, urls=urls, **settings)


def slot_pids(agent: HeadraceProcess) -> list[int]:
    """The slots below an agent, by number."""
    titles = {}
    for pid in descendants(agent.pid):
        title = title_of(pid)
        if title.startswith("headrace slot ") and ":" in title:
            number = title.removeprefix("headrace slot ").partition(":")[0]
            if number.isdigit() and "starting" not in title:
                titles.setdefault(int(number), pid)
    return [titles[number] for number in sorted(titles)]


def zygote_pid(agent: HeadraceProcess) -> int | None:
    found = [pid for pid in descendants(agent.pid) if title_of(pid).startswith("headrace zygote")]
    return found[0] if found else None


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
