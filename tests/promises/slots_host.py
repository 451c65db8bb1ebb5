"""Agents that run `slots_app`, and what a test sees of them from outside."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.kit.processes import HeadraceProcess, descendants, is_alive

from headrace.engines.sql import compile_query
from headrace.jobs import Jobs, JobsConfig, NewJob, Registry

QUEUES = ("held", "poison", "side_by_side", "hangs", "blocks", "forks", "quick", "grows")
QUEUES += ("splits", "splits_async", "leaves", "starves")
LEFT = compile_query(
    "left",
    "-- Jobs of a queue that wait and that are handed out.\n"
    "SELECT (SELECT count(*) FROM headrace.job_ready r WHERE r.queue = q.id) AS ready,"
    " (SELECT coalesce(sum(cardinality(l.ids) - cardinality(l.settled)), 0)"
    "  FROM headrace.job_lease l WHERE l.queue = q.id) AS leased,"
    " (SELECT count(*) FROM headrace.job_failed f WHERE f.queue = q.id) AS failed"
    " FROM headrace.queue q WHERE q.name = :queue",
)
LOSSES = compile_query(
    "losses", "-- By job.\nSELECT id, losses FROM headrace.job_ready ORDER BY id"
)


class SlotsHost:
    """Start and kill agents, enqueue and look."""

    def __init__(self, folder: Path, postgres, *, postgres_url: str, valkey_url: str) -> None:
        self.folder = folder
        self.postgres = postgres
        self.agents: list[HeadraceProcess] = []
        (folder / "notes").mkdir(parents=True)
        self._env = {
            "HEADRACE_POSTGRES_URL": postgres_url,
            "HEADRACE_VALKEY_URL": valkey_url,
            "HEADRACE_JOBS_POLL": "200ms",
            "HEADRACE_JOBS_GRACE": "2s",
            "HEADRACE_JOBS_RETRY_FIRST": "20ms",
            "HEADRACE_JOBS_RETRY_MAX": "50ms",
            "HEADRACE_JOBS_FLOATS": "2",
            "NOTES": str(folder / "notes"),
            "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent)]),
        }
        registry = Registry()
        for queue in QUEUES:

            @registry.task(queue)
            async def never_called(job: dict): ...

        self.jobs = Jobs(postgres, JobsConfig(), registry)

    def start(
        self, *, name: str = "h1", application: str = "slots_app:app", **env: str
    ) -> HeadraceProcess:
        """One more agent; `env` without its prefix."""
        agent = HeadraceProcess(
            ["agent", application, "--name", name],
            folder=self.folder,
            env={**self._env, **{f"HEADRACE_{key}": value for key, value in env.items()}},
        )
        self.agents.append(agent)
        return agent

    async def enqueue(self, queue: str, payloads: list[dict]) -> list[int]:
        """Their ids."""
        rows = [NewJob(queue=queue, payload=payload) for payload in payloads]
        return await self.jobs.enqueue_many(rows)

    def noted(self, word: str) -> list[tuple[int, int]]:
        """(job id, pid) of what handlers noted under `word`, in order."""
        file = self.folder / "notes" / "notes.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [line.split() for line in lines]
        return [(int(row[1]), int(row[2])) for row in rows if row[0] == word]

    def effects(self) -> list[int]:
        """Ids of jobs that had their effect, sorted."""
        return sorted(job_id for job_id, _ in self.noted("effect"))

    def let_go(self) -> None:
        """End the waiting of `held`."""
        (self.folder / "notes" / "go").touch()

    async def left(self, queue: str) -> tuple[int, int, int]:
        """(ready, leased, failed) of a queue."""
        row = await self.postgres.one(LEFT, queue=queue)
        return (row["ready"], row["leased"], row["failed"])

    async def losses(self) -> dict[int, int]:
        """By waiting job, how often its process died."""
        return {row["id"]: row["losses"] for row in await self.postgres.all(LOSSES)}

    def end(self) -> None:
        """Stop whatever runs."""
        for agent in self.agents:
            for pid in agent.family():
                if is_alive(pid):
                    os.kill(pid, signal.SIGCONT)
            agent.end()


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
    """The zygote below an agent."""
    found = [pid for pid in descendants(agent.pid) if title_of(pid).startswith("headrace zygote")]
    return found[0] if found else None


def title_of(pid: int) -> str:
    """What the process list says of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
