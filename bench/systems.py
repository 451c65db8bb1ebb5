"""What is measured and how each is started: ours through the real role, each peer in its best
settings.

`ROLE` is the one place that names the role that runs our jobs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.children import Child
from bench.engines import TEMPLATE, BenchEngines
from bench.machine import ROOT
from bench.peers.driver import URL_VARIABLE
from bench.tally import FOLDER_VARIABLE

ROLE = ("agent",)
"""The role that runs jobs: agent and slots."""
SLOTS_VARIABLE = "HEADRACE_JOBS_FLOATS"
"""The setting for the number of slots of a host without a plan."""
PEER_PYTHON = ROOT / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True)
class System:
    """One system: its module, its engine, how many jobs it is given, and the settings to state."""

    name: str
    module: str
    settings: str
    engine: str = "postgres"
    drains: Mapping[int, int] = field(default_factory=dict)
    """Size of the row -> jobs really drained; a row that is missing would take minutes."""
    singles: int = 2_000
    quick_jobs: int = 100_000
    """At most so many in a quick run."""
    command: tuple[str, ...] = ()
    """Its own worker command, inside the folder of its environment."""
    deadline_s: float = 120.0


OURS = System(
    name="headrace",
    module="bench.ours",
    settings="batch=100, retries, minute statistics, metrics and trace ids on",
    drains={10_000: 10_000, 100_000: 100_000, 1_000_000: 1_000_000},
    singles=4_000,
)
PEERS = (
    System(
        name="awa-pg",
        module="bench.peers.awa_pg",
        settings="queue storage, COPY of 1,000, 1,024 workers, claims of 512, deadline rescue off",
        drains={10_000: 10_000, 100_000: 100_000},
    ),
    System(
        name="pgqueuer",
        module="bench.peers.pgqueuer",
        settings="asyncpg, uvloop, batches of 1,000, logged tables, its autovacuum settings",
        drains={10_000: 10_000, 100_000: 100_000},
    ),
    System(
        name="procrastinate",
        module="bench.peers.procrastinate",
        settings="uvloop, concurrency 20, delete_jobs=always, batch_defer of 1,000; 2,000 jobs",
        drains={10_000: 2_000},
        singles=1_000,
        quick_jobs=1_000,
    ),
    System(
        name="taskiq-redis",
        module="bench.peers.taskiq",
        settings="RedisStreamBroker, hiredis, uvloop, 200 tasks at once, prefetch 200, sends by 50",
        engine="valkey",
        drains={10_000: 10_000},
        quick_jobs=3_000,
        command=(
            *("taskiq", "worker", "bench.peers.taskiq:broker", "--workers", "1"),
            *("--max-async-tasks", "200", "--max-prefetch", "200", "--log-level", "WARNING"),
        ),
    ),
    System(
        name="dramatiq",
        module="bench.peers.dramatiq",
        settings="RedisBroker, hiredis, 1 process, 8 threads, sends one by one",
        engine="valkey",
        drains={10_000: 10_000},
        quick_jobs=3_000,
        command=("dramatiq", "bench.peers.dramatiq:broker", "--processes", "1", "--threads", "8"),
    ),
)
REDIS_PEERS = tuple(peer.name for peer in PEERS if peer.engine == "valkey")


def peer_python() -> Path | None:
    """The environment of the peers, if it was made."""
    return PEER_PYTHON if PEER_PYTHON.exists() else None


class Cell:
    """One system on an empty store, in a folder of its own."""

    def __init__(self, engines: BenchEngines, system: System, folder: Path, database: str) -> None:
        self.engines = engines
        self.system = system
        self.folder = folder
        self.database = database
        self.tally_folder = folder / "tally"
        self.tally_folder.mkdir(parents=True, exist_ok=True)
        self._hosts = 0
        self.env: dict[str, str] = {}
        """Further variables for producers and workers."""

    @property
    def url(self) -> str:
        """Its store."""
        if self.system.engine == "valkey":
            return self.engines.endpoints.valkey_url
        return self.engines.database_url(self.database)

    def produce(self, command: str, *numbers: int) -> Child:
        """Start a command of its module."""
        words = [str(self._python), "-m", self.system.module, command, *map(str, numbers)]
        return Child(words, folder=self.folder, env=self._environment(), name=command)

    def work(self, app: str = "bench.apps.noop:app", *, slots: int = 1, **settings: str) -> Child:
        """Start a worker: our role on `app` with `slots` and `HEADRACE_*` settings, or a peer."""
        if self.system is OURS:
            self._hosts += 1
            host = ("--name", f"bench{self._hosts}")
            return self.role(*ROLE, *host, app, **{SLOTS_VARIABLE: str(slots)}, **settings)
        if self.system.command:
            name, *rest = self.system.command
            words = [str(self._python.with_name(name)), *rest]
        else:
            words = [str(self._python), "-m", self.system.module, "work"]
        return Child(words, folder=self.folder, env=self._environment(), name="work")

    def role(self, *words: str, **settings: str) -> Child:
        """Start another role of `headrace`."""
        command = [sys.executable, "-m", "headrace", *words]
        env = {**self._environment(), **settings}
        return Child(command, folder=self.folder, env=env, name=words[0])

    @property
    def _python(self) -> Path:
        return Path(sys.executable) if self.system is OURS else PEER_PYTHON

    def _environment(self) -> dict[str, str]:
        found = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            URL_VARIABLE: self.url,
            FOLDER_VARIABLE: str(self.tally_folder),
            **self.env,
        }
        if self.system is OURS:
            found |= {
                "HEADRACE_POSTGRES_URL": self.url,
                "HEADRACE_VALKEY_URL": self.engines.endpoints.valkey_url,
                "HEADRACE_DATA_FOLDER": str(self.folder / "data"),
            }
        return found


def template_of(system: System) -> str:
    """What its databases are copied from."""
    return TEMPLATE if system is OURS else "template1"
