"""PostgreSQL stands still for longer than a lease.

Whoever works gives its host up and goes on after.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from own_engines import fleet_on_own_engines
from recorded_fleet import LEASE_S, ROLES
from tests.kit.waiting import wait_true

from headrace.engines.postgres import PostgresDown
from headrace.engines.sql import compile_query
from headrace.jobs import NewJob

pytestmark = pytest.mark.slow
TIMEOUT_S = 1.0
FROZEN_S = LEASE_S + 2.0


@pytest.mark.parametrize("role", ROLES)
async def test_the_same_worker_runs_jobs_after_the_thaw(tmp_path, role):
    async with fleet_on_own_engines(tmp_path, durable=False) as (fleet, engines):
        process = fleet.start(role)
        first = await fleet.enqueue([_job("before")])
        await wait_true(lambda: fleet.ended(first))
        with _frozen(engines.postgres_pid):
            frozen_s = time.monotonic()
            await wait_true(lambda: time.monotonic() - frozen_s > FROZEN_S)
        rest = await fleet.enqueue([_job(f"after {number}") for number in range(3)])
        await wait_true(lambda: fleet.ended(rest))
        assert process.events("host_lost")
        assert set(fleet.started().values()) == {1}
        assert fleet.findings() == []


async def test_a_cancelled_statement_on_a_silent_server_ends_as_cancelled(tmp_path):
    asked = compile_query("asked", "-- Any statement.\nSELECT 1")
    own = fleet_on_own_engines(tmp_path, durable=False, timeout_s=TIMEOUT_S)
    async with own as (fleet, engines):
        assert await fleet.postgres.value(asked) == 1
        with _frozen(engines.postgres_pid):
            asking = asyncio.create_task(fleet.postgres.value(asked))
            done, _ = await asyncio.wait([asking], timeout=TIMEOUT_S / 4)
            assert not done
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asking, 60)
            with pytest.raises(PostgresDown):
                async with asyncio.timeout(60):
                    await fleet.postgres.connect_unpooled()


def _job(key):
    return NewJob(queue="noted", payload={"key": key})


@contextmanager
def _frozen(postmaster):
    """The postmaster and every child of it stand still inside the block."""
    stopped = []
    try:
        # The postmaster first, so that no child is added behind our back.
        for find in (lambda: [postmaster], lambda: _children(postmaster)):
            for pid in find():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.append(pid)
        yield
    finally:
        # The postmaster last: it reaps a child that was ending when it was stopped, and the pid is
        # gone.
        for pid in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
