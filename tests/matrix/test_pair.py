"""A synchronous standby is promoted under load.

Nothing that was acknowledged is lost, and all rooms go on.
"""

from __future__ import annotations

import asyncio
import threading
from itertools import count

import httpx
import pytest
from rooms import ROOMS
from tests.kit.own_postgres import OwnPostgres, missing_server, run_statements
from tests.kit.waiting import wait_true

pytestmark = pytest.mark.slow
STREAMING = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"


@pytest.fixture
async def pair(servers_folder):
    """A primary and its synchronous standby, both with stock configurations otherwise."""
    reason = missing_server("15")
    if reason:
        pytest.skip(reason)
    primary = OwnPostgres(servers_folder / "p", "15", synchronous_standby_names="standby")
    standby = OwnPostgres(servers_folder / "s", "15")
    try:
        await primary.make()
        await primary.start()
        await standby.copy(primary, name="standby")
        await standby.start()

        async def is_synchronous() -> bool:
            return (await run_statements(primary.url, STREAMING))[0][0] == 1

        await wait_true(is_synchronous, what="the standby is synchronous")
        yield primary, standby
    finally:
        standby.end()
        primary.end()


async def test_a_promoted_standby_has_all_that_was_acknowledged(pair, make_rooms, running_engines):
    primary, standby = pair
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    rooms = make_rooms(
        HEADRACE_POSTGRES_URL=f"postgresql://headrace@{hosts}/postgres?target_session_attrs=read-write",
        HEADRACE_POSTGRES_CONNECT_TIMEOUT="2s",
        HEADRACE_VALKEY_URL=running_engines.endpoints.valkey_url,
        HEADRACE_VALKEY_PREFIX="pair",
    )
    acknowledged: list[str] = []
    stop = threading.Event()

    def produce() -> None:
        for number in count():
            if stop.is_set():
                return
            try:
                rooms.call(
                    "POST", "/v1/queues/notes/jobs", json={"payload": {"text": f"n{number}"}}
                )
            except (AssertionError, httpx.HTTPError):
                stop.wait(0.05)
                continue
            acknowledged.append(f"n{number}")

    producing = threading.Thread(target=produce)
    producing.start()
    try:
        await _pass_more(acknowledged, 50)
        primary.kill()
        standby.run("pg_ctl", "promote", "-D", standby.data)
        await _pass_more(acknowledged, 50)
    finally:
        stop.set()
        await asyncio.to_thread(producing.join)

    def have_run() -> bool:
        return set(acknowledged) <= set((rooms.folder / "notes.txt").read_text().split())

    await wait_true(have_run, what="every acknowledged job ran")
    for room in ROOMS:
        await asyncio.to_thread(getattr(rooms, room))


async def _pass_more(acknowledged: list[str], least: int) -> None:
    before = len(acknowledged)
    await wait_true(lambda: len(acknowledged) >= before + least, what=f"{least} more jobs")
