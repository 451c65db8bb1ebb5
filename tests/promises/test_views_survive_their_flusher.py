"""However a flusher dies, each hit is counted once.

The real process, killed at each step of its work.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import signal

import pytest
from counted_views import CountedViews
from tests.kit.processes import HeadraceProcess

STEPS = ("read", "confirmed", "aggregated", "committed", "recorded")


@pytest.fixture
async def counted(running_engines, database_url, tmp_path):
    """Clients on this test's database and keys."""
    found = CountedViews(
        database_url,
        running_engines.endpoints.valkey_url,
        tmp_path,
        prefix=f"test-{secrets.token_hex(4)}",
        lease_s=1.0,
    )
    yield found
    await found.close()


@pytest.mark.slow
async def test_a_flusher_killed_at_each_step_loses_and_doubles_nothing(
    counted, running_engines, database_url, tmp_path
):
    await _kill(counted, running_engines, database_url, tmp_path, kills=20)


@pytest.mark.soak
async def test_flushers_killed_many_times_lose_and_double_nothing(
    counted, running_engines, database_url, tmp_path
):
    await _kill(counted, running_engines, database_url, tmp_path, kills=200)


async def _kill(counted, running_engines, database_url, tmp_path, *, kills):
    """Two run at once: one takes over what the other leaves, or races it."""
    chance = random.Random(3)
    await counted.hit()
    counted.start(hitters=2)
    env = {
        "HEADRACE_POSTGRES_URL": database_url,
        "HEADRACE_VALKEY_URL": running_engines.endpoints.valkey_url,
        "HEADRACE_VALKEY_PREFIX": counted.engines.valkey.prefix,
        "HEADRACE_VIEWS_FLUSH_EVERY": "20ms",
        "HEADRACE_VIEWS_LEASE": "1s",
    }
    points = [f"views.{STEPS[n % len(STEPS)]}:{chance.randint(1, 12)}" for n in range(kills)]
    running: list[HeadraceProcess] = []
    try:
        for point in points:
            crash = {"HEADRACE_CRASH_AT": point}
            running.append(HeadraceProcess(["flusher"], folder=tmp_path / "f", env=env | crash))
            if len(running) == 2:
                first = running.pop(0)
                assert await _ended(first) == -signal.SIGKILL, first.err
        assert await _ended(running.pop()) == -signal.SIGKILL
    finally:
        for process in running:
            process.kill_all()
    await counted.finish()
    assert counted.asked == counted.acked
    await counted.require_exact()


async def _ended(process):
    """The exit code, while clients go on."""
    return await asyncio.to_thread(process.wait_exit)
