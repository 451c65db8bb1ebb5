"""A host whose recorder reads, checks and writes as time passes by hand."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

from headrace.engines.postgres_errors import PostgresDown
from headrace.kernel.clock import VirtualClock
from headrace.web.recorder import Recorder


class Engine:
    """An engine that answers unless `is_down`."""

    is_down = is_cut = False
    run = 1

    async def primaries(self):
        return [self]

    async def command(self, *_words):
        return {"run_id": f"{self.run}"}

    async def open(self):
        if self.is_cut:
            raise PostgresDown("down") from TimeoutError()
        if self.is_down:
            raise PostgresDown("down") from ConnectionRefusedError()


class Host:
    """A host whose minutes pass by hand; `roles` are the values of its roles' snapshots."""

    def __init__(self, folder, postgres, name="one", *, ago_s=600.0, center="") -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.valkey = Engine()
        self.postgres = postgres
        now = datetime.now(UTC) - timedelta(seconds=ago_s)
        self.clock = VirtualClock(now.replace(second=0, microsecond=0))
        self.stamps = self.passed_s = 0
        self.roles: dict[str, str] = {}
        self.center = center
        self.is_cut = self.is_read_only = False
        self.servers = self.direct_servers = SimpleNamespace(no_primary=None)
        self.synchronous = ""
        self.started_s = 1.0
        self.name = name
        self.recorder = self.new_recorder(name)

    def new_recorder(self, name="one"):
        engines = SimpleNamespace(postgres=self, valkey=self.valkey, blobs=Engine())
        return Recorder(
            self.folder, lambda: engines, host=name, center=self.center, clock=self.clock
        )

    async def one(self, sql, **given):
        """PostgreSQL's clock, which here is that of the test, and its settings."""
        if self.is_cut:
            raise PostgresDown("PostgreSQL does not respond (TimeoutError)")
        await self.postgres.open()
        if sql.name == "commit_standbys":
            return {
                "names": self.synchronous,
                "synchronous_commit": "on",
                "sees_states": True,
                "synchronous": 0,
                "waited_s": 0.0,
            }
        assert sql.name == "outage_clock"
        return {
            "now_s": self.clock.now().timestamp(),
            "started_s": self.started_s,
            "is_read_only": self.is_read_only,
        }

    async def connect_unpooled(self):
        """No connection beside the pool."""
        raise PostgresDown("PostgreSQL does not respond (TimeoutError)")

    def transaction(self):
        assert not self.is_cut
        return self.postgres.transaction()

    def cut(self):
        """Cut this host off from its engines."""
        self.is_cut = self.valkey.is_cut = True

    def restore(self):
        """End the cut."""
        self.is_cut = self.valkey.is_cut = False

    def write(self, role, *lines, version="1.0", started_s=0.0):
        """Write the snapshot of a role."""
        text = f'process_start_time_seconds{{version="{version}"}} {started_s}\n'
        path = self.folder / f"{role}.prom"
        path.write_text(text + "\n".join(lines) + "\n")
        self.stamps += 1
        at_ns = int(self.clock.now().timestamp() * 1e9) + self.stamps
        os.utime(path, ns=(at_ns, at_ns))

    async def pass_s(self, seconds):
        """Let time pass with a check of the engines every 2 s and a reading every 10 s."""
        for _ in range(int(seconds // 2)):
            self.clock.advance(2)
            self.passed_s += 2
            await self.recorder.check_engines()
            if self.passed_s % 10 == 0:
                await self.recorder.step()


def known(values):
    """The values that were recorded."""
    return [value for value in values if value is not None]
