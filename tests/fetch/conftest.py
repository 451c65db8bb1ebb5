"""A seller's host, the fetch room on real engines, and a worker that drains its queues."""

from __future__ import annotations

import asyncio

import pytest
from name_server import NameServer
from origin import Origin
from receiver import Receiver
from room import LIMITS, Process, Shop, Terminal, api_client, new_room, working

from headrace.fetch import FetchConfig, Item


@pytest.fixture
def process(shop, blobs, config):
    """Make another process with these handlers: `async with process(handler) as other`."""
    return lambda *handlers, config=config: Process(shop, blobs, config, *handlers)


@pytest.fixture
async def origin():
    """A host that is running."""
    origin = Origin()
    await origin.start()
    yield origin
    await origin.close()


@pytest.fixture
async def canary():
    """A host that must never be connected to."""
    canary = Origin()
    await canary.start("127.0.0.1", "::1")
    yield canary
    await canary.close()


@pytest.fixture
async def names():
    """A name server on a free port."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    yield server
    transport.close()


@pytest.fixture
async def receiver():
    """A receiver of webhooks."""
    receiver = Receiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest.fixture
def config(origin, request):
    """Settings that allow loopback, and the ports of the test's servers."""
    ports = [origin.port]
    if "receiver" in request.fixturenames:
        ports.append(request.getfixturevalue("receiver").port)
    return FetchConfig(allow_networks=("127.0.0.0/8",), allow_ports=tuple(ports), classes=(3.0,))


@pytest.fixture
async def shop(postgres, blobs, config, origin, tmp_path):
    """The room with customer `shop`, no worker."""

    async def publish(item: Item) -> None:
        found.items.append(item)

    fetch, jobs = new_room(postgres, blobs, config, publish)
    found = Shop(fetch, jobs, postgres, tmp_path, origin)
    await fetch.customers.set("shop", **LIMITS)
    yield found
    await fetch.close()
    # Debts of a late request would charge the lane of the next test's customer.
    paying = [t for t in asyncio.all_tasks() if t.get_coro().__qualname__ == "TokenDebts._pay"]
    for task in paying:
        task.cancel()
    await asyncio.gather(*paying, return_exceptions=True)


@pytest.fixture
async def worker(shop, postgres):
    """A worker on the room's queues."""
    async with working(postgres, shop.jobs) as task:
        yield task


@pytest.fixture
async def client(shop, postgres):
    """A client of the HTTP API."""
    async with await api_client(shop.fetch, postgres) as client:
        yield client


@pytest.fixture
async def command(shop):
    """Run `headrace fetch WORDS`: (exit code or our error, the text shown)."""

    async def run(*words: str):
        terminal = Terminal(shop.fetch)
        ended = await terminal.type(*words)
        text = ended.output if terminal.text is None else terminal.text
        return getattr(ended.exception, "code", ended.exit_code), text

    return run
