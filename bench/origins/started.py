"""The process of the simulated hosts, as the bench starts and steers it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.children import Child, wait_for
from bench.machine import ROOT
from bench.origins.hosts import HELD_FILE, LOG_FILE
from bench.origins.log import Request, read_log
from bench.origins.plan import HostPlan, as_document

READY_S = 20.0


class Origins:
    """All simulated hosts of a cell."""

    def __init__(self, folder: Path, child: Child, ports: dict[str, int]) -> None:
        self._folder = folder
        self._child = child
        self.port = ports["http"]
        self.names_port = ports["names"]

    def url(self, host: str, path: str) -> str:
        """Where a path of a host is."""
        return f"http://{host}:{self.port}{path}"

    def hold(self, hosts: Iterable[str]) -> None:
        """Stop answering. Waiting requests are answered later."""
        draft = self._folder / "held.new"
        draft.write_text("\n".join(hosts))
        draft.rename(self._folder / HELD_FILE)

    def requests(self) -> list[Request]:
        """The access log so far, by moment of arrival."""
        return read_log(self._folder / LOG_FILE)

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a process that requests these hosts."""
        return {
            "HEADRACE_FETCH_ALLOW_NETWORKS": "127.0.0.0/8",
            "HEADRACE_FETCH_ALLOW_PORTS": str(self.port),
            "HEADRACE_FETCH_NAME_SERVERS": f"127.0.0.1:{self.names_port}",
        }

    async def end(self) -> None:
        """Stop it; its log is whole then."""
        await self._child.end()


@asynccontextmanager
async def origins(
    folder: Path, plans: dict[str, HostPlan], *, body_bytes: int = 4_000
) -> AsyncIterator[Origins]:
    """The hosts of `plans` (others answer at once) while the block lasts."""
    plan = _write_plan(folder, as_document(plans, body_bytes=body_bytes))
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "bench.origins.hosts", str(plan), str(folder)]
    child = Child(words, folder=folder, env=env, name="hosts")
    try:
        await wait_for(lambda: "\n" in child.out, "the hosts' ports", READY_S, child)
        yield Origins(folder, child, json.loads(child.out.splitlines()[0]))
    finally:
        await child.end()


def _write_plan(folder: Path, document: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    path.write_text(json.dumps(document))
    return path
