"""Questions that share a statement: order, company, bounds, and what errors do."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.waiting import wait_true

from headrace.kernel.batching import BATCH_MAX, RUNS_AT_ONCE, Batcher


async def test_questions_asked_together_share_an_answer_and_keep_their_order():
    calls: list[list[int]] = []

    async def double(asked: list[int]) -> list[int]:
        calls.append(asked)
        return [2 * number for number in asked]

    gathering: Batcher[int, int] = Batcher(double)
    answers = await asyncio.gather(*[gathering.submit(n) for n in range(20)])
    assert answers == [2 * n for n in range(20)]
    assert calls == [list(range(20))]


async def test_while_statements_are_under_way_the_next_one_gathers():
    calls: list[int] = []
    gate = asyncio.Event()
    running = most = 0

    async def slow(asked: list[int]) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        calls.append(len(asked))
        await gate.wait()
        running -= 1
        return asked

    gathering: Batcher[int, int] = Batcher(slow)
    first = [asyncio.create_task(gathering.submit(n)) for n in range(RUNS_AT_ONCE * BATCH_MAX)]
    rest = [asyncio.create_task(gathering.submit(n)) for n in range(BATCH_MAX + 50)]
    await wait_true(lambda: len(calls) == RUNS_AT_ONCE, what="as many as may are under way")
    # No timer runs while they are: what waits goes when the first of them ends.
    assert gathering._timer is None
    assert calls == [BATCH_MAX] * RUNS_AT_ONCE
    gate.set()
    assert await asyncio.gather(*first, *rest) == [
        *range(RUNS_AT_ONCE * BATCH_MAX),
        *range(BATCH_MAX + 50),
    ]
    assert most == RUNS_AT_ONCE
    assert calls[RUNS_AT_ONCE:] == [BATCH_MAX, 50]


async def test_an_error_reaches_whom_it_concerns():
    async def picky(asked: list[int]) -> list[int | Exception]:
        if 7 in asked:
            raise RuntimeError("all of them")
        return [ValueError("you") if number < 0 else number for number in asked]

    gathering: Batcher[int, int] = Batcher(picky)
    answers = await asyncio.gather(
        gathering.submit(1), gathering.submit(-1), return_exceptions=True
    )
    assert answers[0] == 1
    assert isinstance(answers[1], ValueError)
    with pytest.raises(RuntimeError):
        await asyncio.gather(gathering.submit(1), gathering.submit(7))
    assert await gathering.submit(3) == 3


async def test_a_caller_that_left_costs_the_others_nothing():
    async def echo(asked: list[int]) -> list[int]:
        return asked

    gathering: Batcher[int, int] = Batcher(echo)
    leaving = asyncio.create_task(gathering.submit(1))
    staying = asyncio.create_task(gathering.submit(2))
    await asyncio.wait([leaving], timeout=0)
    leaving.cancel()
    assert await staying == 2
