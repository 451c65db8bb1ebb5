"""Statements of handlers, run by their agent: inserts of jobs, lookups and changes.

Jobs that wait for no lock share statements over all slots of the host (group commit), one at a time
on a connection of the agent's own pool. Everything else may wait for a lock, so it has a pool of
its own, and delays neither claims and acks nor the shared inserts.

A slot sends a bounded number of requests at once. Requests of a dead slot, and those whose caller
left, are cancelled as a lost connection would be: the statement has committed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from headrace.engines.postgres import Postgres
from headrace.engines.remote import PackedError, pack_result
from headrace.jobs.agent.worker_proxy import WorkerChannel
from headrace.jobs.messages import Abandon, Failure, Insert, Result, Statement
from headrace.jobs.service.inserts import Inserts
from headrace.jobs.slots.agent_client import QUERIES
from headrace.kernel.batching import BATCH_MAX

CONNECTIONS_MAX: Final = 8
"""Statements of slots at once, besides the shared inserts."""


class SlotStatements:
    """Runs the statements of this host's slots."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres.with_own_pool(CONNECTIONS_MAX)
        self._shared = Inserts(postgres)
        self._bulk = Inserts(self._postgres)
        self._running: dict[WorkerChannel, dict[int, asyncio.Task[None]]] = {}
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "fetch": self._postgres.all,
            "fetchrow": self._postgres.one,
            "fetchval": self._postgres.value,
            "execute": self._postgres.run,
        }

    def receive(self, slot: WorkerChannel, message: Insert | Statement | Abandon) -> None:
        """Start a request of a slot, or cancel it."""
        running = self._running.setdefault(slot, {})
        if isinstance(message, Abandon):
            if (task := running.get(message.call)) is not None:
                task.cancel()
            return
        running[message.call] = task = asyncio.create_task(self._serve(slot, message))
        task.add_done_callback(lambda _: running.pop(message.call, None))

    def drop(self, slot: WorkerChannel) -> None:
        """Cancel the requests of a slot that has exited."""
        for task in self._running.pop(slot, {}).values():
            task.cancel()

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        tasks = [task for running in self._running.values() for task in running.values()]
        for slot in list(self._running):
            self.drop(slot)
        await asyncio.gather(*tasks, return_exceptions=True)
        for inserts in (self._shared, self._bulk):
            await inserts.close()
        await self._postgres.close()

    async def _serve(self, slot: WorkerChannel, request: Insert | Statement) -> None:
        try:
            slot.send(Result(request.call, await self._result(request)))
        except Exception as error:  # noqa: BLE001 - raised again in the slot
            slot.send(Failure(request.call, PackedError.of(error)))

    async def _result(self, request: Insert | Statement) -> Any:
        if isinstance(request, Statement):
            run, query = self._methods[request.method], QUERIES[request.query]
            return pack_result(request.method, await run(query, **request.parameters))
        inserts = self._bulk if len(request.rows) > BATCH_MAX else self._shared
        rows, queue_ids, headers = request.rows, request.queue_ids, request.headers
        return await inserts.insert_shared(rows, queue_ids, headers)
