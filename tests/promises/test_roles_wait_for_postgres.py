"""Roles that are started while PostgreSQL is down wait for it, and work when it is up."""

from __future__ import annotations

import signal

import pytest
from tests.kit.chaos import PASS, RESET, ChaosProxy
from tests.kit.processes import wait_until

pytestmark = pytest.mark.slow
STARTED = {
    "agent": "host_registered",
    "work": "host_registered",
    "scheduler": "lead_taken",
    "flusher": "views_shard_taken",
}


async def test_roles_started_before_postgres_wait_then_work_or_stop(fleet, database_url):
    with ChaosProxy(database_url) as proxy:
        proxy.set(RESET)
        roles = {role: fleet.start(role, url=proxy.url) for role in STARTED}
        stopped = [fleet.start(role, url=proxy.url, host="other") for role in ("agent", "flusher")]
        for process in (*roles.values(), *stopped):
            wait_until(lambda p=process: p.events("role_waits"), what="it waits")
        for process in stopped:
            process.signal(signal.SIGTERM)
            assert process.wait_exit() == 0
        for role, process in roles.items():
            assert not process.events(STARTED[role])
        proxy.set(PASS)
        for role, process in roles.items():
            wait_until(lambda p=process, r=role: p.events(STARTED[r]), what=f"{role} works")
        for process in roles.values():
            process.signal(signal.SIGTERM)
        assert [process.wait_exit() for process in roles.values()] == [0] * len(roles)


async def test_a_worker_that_loses_its_connections_while_it_declares_works(fleet, database_url):
    with ChaosProxy(database_url) as proxy:
        lost = proxy.lose_request(b"fetch_webhook", times=2)
        process = fleet.start("work", url=proxy.url)
        wait_until(lambda: process.events("host_registered"), what="it works")
        assert lost.fired == 2
        process.signal(signal.SIGTERM)
        assert process.wait_exit() == 0


async def test_a_role_that_postgres_refuses_ends(fleet, database_url):
    """A wrong name in the URL does not become right by waiting."""
    process = fleet.start("scheduler", url=database_url.replace("//headrace@", "//nobody@", 1))
    assert process.wait_exit() == 7
    assert "postgres.url" in process.err
