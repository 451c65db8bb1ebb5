"""Concurrent token requests share a statement; a refused sum is requested in halves."""

from __future__ import annotations

import asyncio
import time

from headrace.jobs.agent.token_batcher import STATEMENTS_AT_ONCE, TokenBatcher
from headrace.jobs.messages import Spend
from headrace.kernel.errors import Unavailable


class Lanes:
    """Answers `spend`; a lane gives `left` starts."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.statements: list[tuple[int, str, int, float]] = []
        self.gate = asyncio.Event()
        self.at_once = self.most_at_once = 0

    async def spend(self, queue_id: int, lane: str, starts: int, wait_max_s: float) -> float | None:
        self.statements.append((queue_id, lane, starts, wait_max_s))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.gate.wait()
        self.at_once -= 1
        if starts > self.left:
            return None
        self.left -= starts
        return 0.5


async def ask(tokens: TokenBatcher, lane: str = "a", *, starts: int = 1, wait_max_s: float = 9.0):
    return asyncio.create_task(tokens.take(7, Spend(1, "queue", lane, starts, wait_max_s)))


async def test_those_that_ask_while_a_statement_is_under_way_share_the_next():
    lanes = Lanes(left=100)
    tokens = TokenBatcher(lanes.spend)
    first = await ask(tokens)
    await asyncio.wait([first], timeout=0.01)
    rest = [await ask(tokens, starts=2, wait_max_s=5.0 + n) for n in range(10)]
    await asyncio.wait(rest, timeout=0.01)
    asked_s = time.monotonic()
    lanes.gate.set()
    granted = await asyncio.gather(first, *rest)
    assert lanes.statements == [(7, "a", 1, 9.0), (7, "a", 20, 5.0)]
    assert {one.wait_s for one in granted} == {0.5}
    assert granted[0].sent_s < asked_s <= granted[1].sent_s


async def test_what_a_lane_refuses_together_is_given_as_far_as_it_goes():
    lanes = Lanes(left=5)
    lanes.gate.set()
    tokens = TokenBatcher(lanes.spend)
    granted = await asyncio.gather(*[await ask(tokens) for _ in range(8)])
    assert sum(one.wait_s is not None for one in granted) == 5
    assert lanes.left == 0


async def test_few_statements_run_at_once_and_a_fault_refuses_only_its_own():
    lanes = Lanes(left=1000)
    tokens = TokenBatcher(lanes.spend)
    asks = [await ask(tokens, f"lane {n}") for n in range(10)]
    await asyncio.wait(asks, timeout=0.01)
    assert len(lanes.statements) == STATEMENTS_AT_ONCE
    lanes.gate.set()
    await asyncio.gather(*asks)
    assert lanes.most_at_once == STATEMENTS_AT_ONCE

    async def broken(*_) -> float | None:
        raise Unavailable("the database is away")

    tokens = TokenBatcher(broken)
    assert (await (await ask(tokens))).wait_s is None
