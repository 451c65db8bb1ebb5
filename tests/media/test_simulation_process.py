"""A simulation over the API: in a separate process, one at a time, ended with its caller."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from litestar import Litestar
from tests.kit.waiting import wait_true

from headrace.media.errors import InvalidSimulation
from headrace.media.http.cluster import simulate_media
from headrace.media.simulate.cluster import Cluster, SimulationBusy, simulate, simulate_in_process

SMALL = Cluster(centres=1, nodes=2, load_gbit=10, replicas=1)
LARGE = Cluster(centres=10, nodes=10)


def simulating() -> list[str]:
    """Child processes that run a simulation."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes()
            if parent == os.getpid() and b"headrace.media.simulate.cluster" in command:
                found.append(path.name)
    return found


@pytest.mark.slow
async def test_it_gives_what_the_same_process_would():
    assert await simulate_in_process(SMALL, lost=["c1-n1"]) == simulate(SMALL, lost=["c1-n1"])


async def test_what_cannot_be_is_refused_before_a_process_is_made():
    with pytest.raises(InvalidSimulation, match="c9"):
        await simulate_in_process(SMALL, lost=["c9"])
    assert simulating() == []


@pytest.mark.slow
async def test_it_ends_when_the_caller_leaves():
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Litestar([simulate_media]), log_level="error"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    _, writer = await asyncio.open_connection(*listener.getsockname())
    body = b'{"centres": 4, "nodes": 4}'
    head = f"POST /v1/media/simulate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await wait_true(lambda: len(simulating()) == 1, what="it computes")
    writer.close()
    await wait_true(lambda: simulating() == [], what="it ended")
    server.should_exit = True
    await serving


@pytest.mark.slow
async def test_a_second_one_is_refused_and_a_cancelled_one_ends():
    first = asyncio.create_task(simulate_in_process(LARGE))
    await wait_true(lambda: len(simulating()) == 1, what="it computes")
    with pytest.raises(SimulationBusy):
        await simulate_in_process(SMALL)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert simulating() == []
