"""The circuit breaker: one caller tries a silent server, the others fail at once."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engines.postgres_errors import PostgresDown
from headrace.views import valkey_store
from headrace.views.valkey_store import CircuitBreaker


class Server:
    """Answers once `answers` is set; counts calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()

    async def query(self):
        """Wait for the answer."""
        self.calls += 1
        await self.answers.wait()
        return 7


async def test_an_open_breaker_does_not_call_the_server():
    server, circuit = Server(), CircuitBreaker()
    for _ in range(5):
        with pytest.raises(PostgresDown) as raised:
            await circuit.call(server.query, wait_s=0.01)
        assert raised.value.retry_after_s == valkey_store.REST_S
    assert server.calls == 1


async def test_one_caller_tries_after_the_rest_and_its_answer_closes_the_breaker(monkeypatch):
    monkeypatch.setattr(valkey_store, "REST_S", 0.0)
    server, circuit = Server(), CircuitBreaker()
    with pytest.raises(PostgresDown):
        await circuit.call(server.query, wait_s=0.01)
    first = asyncio.create_task(circuit.call(server.query, wait_s=30))
    await asyncio.sleep(0)
    with pytest.raises(PostgresDown):
        await circuit.call(server.query, wait_s=30)
    server.answers.set()
    assert await first == 7
    assert [await circuit.call(server.query, wait_s=30) for _ in range(3)] == [7, 7, 7]
    assert server.calls == 5
