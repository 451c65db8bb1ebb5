"""Who does not answer is asked by one at a time, and the others are told at once."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engines.postgres import PostgresDown
from headrace.views.service import patience
from headrace.views.service.patience import Patience


class Server:
    """Answers when it may; counts who asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = asyncio.Event()

    async def ask(self):
        """Wait for the answer."""
        self.asked += 1
        await self.answers.wait()
        return 7


async def test_a_silent_server_is_asked_once_and_left_alone():
    server, asker = Server(), Patience()
    for _ in range(5):
        with pytest.raises(PostgresDown) as raised:
            await asker.ask(server.ask, wait_s=0.01)
        assert raised.value.retry_after_s == patience.REST_S
    assert server.asked == 1


async def test_after_its_rest_one_asks_and_its_answer_opens_it_to_all(monkeypatch):
    monkeypatch.setattr(patience, "REST_S", 0.0)
    server, asker = Server(), Patience()
    with pytest.raises(PostgresDown):
        await asker.ask(server.ask, wait_s=0.01)
    first = asyncio.create_task(asker.ask(server.ask, wait_s=30))
    await asyncio.sleep(0)
    with pytest.raises(PostgresDown):
        await asker.ask(server.ask, wait_s=30)
    server.answers.set()
    assert await first == 7
    assert [await asker.ask(server.ask, wait_s=30) for _ in range(3)] == [7, 7, 7]
    assert server.asked == 5
