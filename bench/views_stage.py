"""What the questions about views stand on: an API of ours or a raw one, a flusher, items that were
viewed, and the load generator as a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.children import BenchFault, Child, wait_for
from bench.harness import READY_S
from bench.machine import ROOT
from bench.systems import Cell
from headrace import Headrace
from headrace.engines.endpoints import Endpoints
from headrace.views.model import Hit

ITEMS = 20_000
PER_READ = 20
READS = 1_000
"""Prepared requests, sent in turn."""
SCOPES = ("views:hit", "views:read")


@dataclass(frozen=True)
class Api:
    """A server under load."""

    child: Child
    port: int
    token: str


def open_views(cell: Cell) -> Headrace:
    """An app on the engines of a cell; close it."""
    app = Headrace()
    valkey_url = cell.engines.endpoints.valkey_url
    app.use_endpoints(
        replace(
            Endpoints(cell.url, valkey_url, "file:///nowhere"),
        )
    )
    return app


async def view_items(app: Headrace, items: int = ITEMS) -> dict[str, int]:
    """Let every item be seen a few times; the totals."""
    totals = {f"item:{number}": number % 7 + 1 for number in range(items)}
    hits = [Hit(id=item, n=n) for item, n in totals.items()]
    for start in range(0, items, 1_000):
        counted = await app.views.hits(hits[start : start + 1_000])
        assert all(one.total == totals[one.id] for one in counted), (
            "a total is not what was counted"
        )
    return totals


@asynccontextmanager
async def our_api(cell: Cell, token: str, **settings: str) -> AsyncIterator[Api]:
    """`headrace api` on a free port."""
    port = free_port()
    child = cell.role("api", HEADRACE_WEB_LISTEN=f"127.0.0.1:{port}", **settings)
    async with _served(child, port, token) as api:
        yield api


@asynccontextmanager
async def raw_api(cell: Cell, token: str) -> AsyncIterator[Api]:
    """The raw ASGI app on the same server, without access log."""
    port = free_port()
    words = [sys.executable, "-m", "uvicorn", "bench.apps.raw_views:app", "--port", str(port)]
    words += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--lifespan", "off"]
    words += ["--log-level", "error", "--timeout-keep-alive", "75"]
    env = {
        "PYTHONPATH": str(ROOT),
        "BENCH_TOKEN": token,
        "BENCH_VALKEY": cell.engines.endpoints.valkey_url,
    }
    child = Child(words, folder=cell.folder, env=env, name="raw")
    async with _served(child, port, token) as api:
        yield api


@asynccontextmanager
async def _served(child: Child, port: int, token: str) -> AsyncIterator[Api]:
    try:
        await wait_for(lambda: _listens(port), f"port {port}", READY_S, child)
        yield Api(child, port, token)
    finally:
        await child.end()


async def load(
    cell: Cell,
    api: Api,
    kinds: Sequence[Mapping[str, Any]],
    *,
    loop: str,
    seconds: float,
    core: int | None = None,
) -> tuple[dict[str, dict[str, float]], float]:
    """Run the generator; its report by kind, and CPU seconds a second of the server meanwhile."""
    plan = {
        "host": "127.0.0.1",
        "port": api.port,
        "token": api.token,
        "kinds": list(kinds),
        "loop": loop,
        "warm_s": 1.0,
        "seconds": seconds,
    }
    file = cell.folder / "plan.json"
    file.write_text(json.dumps(plan))
    child = Child(
        [sys.executable, "-m", "bench.load", str(file)],
        folder=cell.folder,
        env={"PYTHONPATH": str(ROOT)},
        name="load",
    )
    if core is not None:
        pin(child.pid, core)
    try:
        await wait_for(lambda: "warm" in child.out, "the warm-up", 60, child)
        before_s = api.child.cpu_s()
        out = await child.finish(seconds + 60)
        cpu_s = api.child.cpu_s() - before_s
    finally:
        await child.end()
    report: dict[str, dict[str, float]] = json.loads(out.strip().splitlines()[-1])
    return report, cpu_s / seconds


def reads(totals: Mapping[str, int], *, checked: bool) -> list[dict[str, Any]]:
    """Prepared reads of 20 items each; `checked`: with the totals that must come."""
    dice, items = random.Random(1), list(totals)
    found = []
    for _ in range(READS):
        ids = dice.sample(items, PER_READ)
        row: dict[str, Any] = {"method": "GET", "path": f"/v1/views?ids={','.join(ids)}"}
        if checked:
            row["totals"] = {one: totals[one] for one in ids}
        found.append(row)
    return found


def hits(items: Sequence[str]) -> list[dict[str, Any]]:
    """Prepared hits of one item each, some items far more often than others."""
    dice = random.Random(2)
    weights = [1 / (rank + 1) for rank in range(len(items))]
    chosen = dice.choices(items, weights, k=READS)
    return [{"method": "POST", "path": f"/v1/views/items/{item}?class=human"} for item in chosen]


@asynccontextmanager
async def flusher(cell: Cell, **settings: str) -> AsyncIterator[Child]:
    """`headrace flusher`, running."""
    child = cell.role("flusher", **settings)
    try:
        yield child
    finally:
        await child.end()


async def make_token(app: Headrace) -> str:
    """A token for the load."""
    return (await app.tokens.create("bench", SCOPES)).text


def pin(pid: int, core: int) -> None:
    """Keep a process on one core, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(pid, {cores[core % len(cores)]})


@contextmanager
def on_core(pid: int, core: int) -> Iterator[None]:
    """Keep a process on one core while the block lasts."""
    before = os.sched_getaffinity(pid)
    pin(pid, core)
    try:
        yield
    finally:
        os.sched_setaffinity(pid, before)


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def wait_flushed(app: Headrace, carrier: Child, deadline_s: float = 60) -> None:
    """Wait until PostgreSQL has every hit. Raises: BenchFault, also when the flusher ends."""
    ends_s = asyncio.get_running_loop().time() + deadline_s
    while any(row.pending for row in await app.views.analytics.lag()):
        if not carrier.is_running:
            raise BenchFault(f"the flusher ended: {carrier.err[-1500:]}")
        if asyncio.get_running_loop().time() > ends_s:
            raise BenchFault(f"hits were not flushed within {deadline_s:.0f} s")
        await asyncio.sleep(0.02)
