"""Test program: a supervisor of engines and small roles, or one of those roles.

supervised.py FOLDER ROLE...     supervise engines in FOLDER (`-`: none) and these roles
supervised.py --role KIND FOLDER act as a role: `polite`, `stubborn` (ignores SIGTERM) or `failing`
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

from headrace.cli.supervisor import Role, Supervisor, announce_ready, watch_parent
from headrace.engines.embedded import EmbeddedEngines
from headrace.kernel.logs import configure_logs
from headrace.kernel.resilience import Backoff


def act(kind: str, folder: str) -> int:
    watch_parent(grace_s=1)
    if kind == "failing":
        return 7
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set() if kind == "polite" else None)
    announce_ready(listen="127.0.0.1:8080", pid=os.getpid(), kind=kind, name="mine")
    ending.wait()
    if folder != "-":
        # Roles stop before engines, so both sockets still exist.
        sockets = [path.name for path in (Path(folder) / "run").iterdir() if path.is_socket()]
        (Path(folder) / "logs" / "seen-at-the-end").write_text(" ".join(sorted(sockets)))
    return 0


async def supervise(folder: str, kinds: list[str]) -> int:
    configure_logs("up")
    engines = EmbeddedEngines(Path(folder), durable=False) if folder != "-" else None
    roles = [Role(kind, (sys.executable, __file__, "--role", kind, folder)) for kind in kinds]
    supervisor = Supervisor(
        engines,
        roles,
        on_event=show,
        grace_s=float(os.environ.get("GRACE_S", "10")),
        restarts=Backoff(first_s=0.05, max_s=0.2),
    )
    async with supervisor.started_engines() as endpoints:
        running = asyncio.create_task(supervisor.run())
        if "failing" not in kinds:
            ready = await supervisor.wait_ready(20)
            pids = [engines.postgres_pid, engines.valkey_pid] if engines else []
            facts = {"ready": ready, "engines": pids, "postgres": bool(endpoints)}
            print(json.dumps({"kind": "up", **facts}), flush=True)
        return await running


def show(event) -> None:
    print(json.dumps({**event.facts, "kind": event.kind, "name": event.name}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--role":
        sys.exit(act(*sys.argv[2:4]))
    sys.exit(asyncio.run(supervise(sys.argv[1], sys.argv[2:])))
