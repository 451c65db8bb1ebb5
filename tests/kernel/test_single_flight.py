"""Concurrent identical calls share one execution, also if some callers are cancelled."""

from __future__ import annotations

import asyncio

import pytest

from headrace.kernel.single_flight import SingleFlight


class Work:
    """An execution that the test ends, and how often it was started."""

    def __init__(self) -> None:
        self.starts = 0
        self.may_end = asyncio.Event()

    async def run(self) -> int:
        self.starts += 1
        await self.may_end.wait()
        return self.starts


@pytest.mark.parametrize("way", ["call", "join"])
async def test_concurrent_callers_share_one_execution(way):
    flight: SingleFlight[str, int] = SingleFlight()
    work = Work()
    callers = [asyncio.create_task(getattr(flight, way)("k", work.run)) for _ in range(3)]
    await asyncio.sleep(0)
    assert "k" in flight
    work.may_end.set()
    assert await asyncio.gather(*callers) == [1, 1, 1]
    assert len(flight) == 0
    assert await getattr(flight, way)("k", work.run) == 2, "results are not kept"


@pytest.mark.parametrize("way", ["call", "join"])
async def test_all_callers_get_the_error(way):
    flight: SingleFlight[str, int] = SingleFlight()

    async def fail() -> int:
        await asyncio.sleep(0)
        raise ValueError

    callers = [getattr(flight, way)("k", fail) for _ in range(3)]
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(result) for result in results] == [ValueError] * 3


async def test_a_cancelled_caller_does_not_cancel_a_called_execution():
    flight: SingleFlight[str, int] = SingleFlight()
    work = Work()
    first, second = (asyncio.create_task(flight.call("k", work.run)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    work.may_end.set()
    assert await second == 1


async def test_a_waiting_caller_takes_over_a_joined_execution():
    flight: SingleFlight[str, int] = SingleFlight()
    work = Work()
    first, second = (asyncio.create_task(flight.join("k", work.run)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    work.may_end.set()
    assert await second == 2


async def test_an_execution_driven_by_callbacks_ends_those_who_joined_it():
    flight: SingleFlight[str, int] = SingleFlight()
    flight.begin("k")
    waiting = asyncio.create_task(flight.join("k", Work().run))
    await asyncio.sleep(0)
    flight.finish("k", 7)
    assert await waiting == 7


async def test_cancel_ends_all_and_idle_is_reached():
    flight: SingleFlight[str, int] = SingleFlight()
    caller = asyncio.create_task(flight.call("k", Work().run))
    await asyncio.sleep(0)
    await flight.cancel()
    await flight.wait_idle()
    with pytest.raises(asyncio.CancelledError):
        await caller
