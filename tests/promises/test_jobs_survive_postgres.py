"""PostgreSQL is killed under running workers: what was acknowledged is done, and no worker ends."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from itertools import count

import pytest
from own_engines import fleet_on_own_engines
from recorded_fleet import ROLES
from tests.kit.processes import is_alive
from tests.kit.waiting import wait_true

from headrace.jobs import NewJob
from headrace.kernel.errors import Unavailable

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("role", ROLES)
async def test_an_acknowledged_enqueue_survives_and_the_worker_goes_on(tmp_path, role):
    async with fleet_on_own_engines(tmp_path, durable=True) as (fleet, engines):
        process = fleet.start(role)
        stop = asyncio.Event()
        producing = asyncio.create_task(_produce(fleet, stop))
        for _ in range(2):
            await _pass_more(fleet, 50)
            os.kill(engines.postgres_pid, signal.SIGKILL)
            await engines.restart("postgres")
        await _pass_more(fleet, 50)
        stop.set()
        await producing
        acknowledged = fleet.history.told("ok", "enqueue", "job")
        # A claim whose answer was lost with the server is found at the second heartbeat.
        await wait_true(lambda: fleet.ended(acknowledged))
        assert fleet.findings() == []
        assert is_alive(process.pid)


async def _produce(fleet, stop):
    """Enqueue some at a time until `stop`; what was acknowledged is noted."""
    for number in count():
        with suppress(Unavailable):
            await fleet.enqueue([NewJob(queue="noted", payload={"key": f"{number}"})])
        await asyncio.wait([asyncio.create_task(stop.wait())], timeout=0.01)
        if stop.is_set():
            return


async def _pass_more(fleet, least):
    """Wait until so many more were acknowledged, and a job was done."""
    before = len(fleet.history.of("ok")), len(fleet.history.of("end"))

    def has_passed():
        history = fleet.history
        return len(history.of("ok")) > before[0] + least and len(history.of("end")) > before[1]

    await wait_true(has_passed)
